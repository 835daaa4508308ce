"""wrap: a causal model's `generate` gives transformers' own tokens, whoever finds them."""

import copy
import warnings
import weakref

import pytest
import torch
import transformers
from hf_models import (  # noqa: F401  (fixtures)
    fallbacks_are_errors,
    one_thread,
    padded_inputs,
    tiny_model,
)
from tiny_decoders import DECODERS, tiny_decoder

from bytetx.generate.engine import GenerationEngine
from bytetx.hf import FallbackWarning, unwrap, wrap
from bytetx.sampling_params import SamplingParams

SEQLENS = [9, 1, 23, 14]
NINE = ["gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3"]
GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


def stock_and_wrapped(name, **config):
    stock = tiny_decoder(name, **config)
    return stock, wrap(copy.deepcopy(stock))


@pytest.mark.feature("Wrap", "`generate` of wrapped models")
# test_hf_mixers.py has the other one, which transformers runs: its pads change its texts.
@pytest.mark.parametrize("name", [n for n in DECODERS if n != "lfm2-biases"])
def test_greedy_tokens(name):
    stock, wrapped = stock_and_wrapped(name)
    inputs = padded_inputs(SEQLENS, side="left", pad_token_id=0)
    options = GREEDY | {"eos_token_id": None}
    want, have = stock.generate(**inputs, **options), wrapped.generate(**inputs, **options)
    assert have.dtype == want.dtype
    assert torch.equal(have, want)
    alone = inputs["input_ids"][2:3]
    assert torch.equal(wrapped.generate(alone, **options), stock.generate(alone, **options))


@pytest.mark.parametrize("name", NINE)
def test_answers_that_end_in_the_middle(name):
    """Tokens that some rows come to and others do not; then none before the shortest length."""
    stock, wrapped = stock_and_wrapped(name)
    inputs = padded_inputs(SEQLENS, side="left", pad_token_id=0)
    free = stock.generate(**inputs, **GREEDY, eos_token_id=None)[:, 23:]
    stops = [int(free[0, 4]), int(free[1, 7])]
    for options in (
        {"eos_token_id": stops},
        {"eos_token_id": stops[0], "min_new_tokens": 6},
        {"eos_token_id": stops, "min_length": 29},
        {"eos_token_id": stops, "max_new_tokens": None, "max_length": 30},
        {"eos_token_id": stops, "use_cache": False},
    ):
        want, have = (m.generate(**inputs, **GREEDY | options) for m in (stock, wrapped))
        assert torch.equal(have, want), options


def test_masks_and_configs_that_transformers_works_out():
    stock, wrapped = stock_and_wrapped("llama", pad_token_id=0)
    inputs = padded_inputs(SEQLENS, side="left", pad_token_id=0)
    holes = padded_inputs([20, 20], pad_token_id=0)
    holes["attention_mask"][0, 3:9] = 0
    config = transformers.GenerationConfig(max_new_tokens=5, pad_token_id=0, eos_token_id=7)
    calls = [
        {"inputs": inputs["input_ids"], "max_new_tokens": 6},  # the mask is found in the pads
        {"input_ids": inputs["input_ids"].int(), "attention_mask": inputs["attention_mask"].bool()},
        inputs | {"generation_config": config},
        inputs | {"cache_implementation": "static", "max_new_tokens": 3, "custom_generate": None},
        holes | {"max_new_tokens": 6},
    ]
    for call in calls:
        want, have = stock.generate(**call), wrapped.generate(**call)
        assert have.dtype == want.dtype
        assert torch.equal(have, want)


@pytest.mark.parametrize("name", NINE)
def test_bf16_tokens_are_the_likeliest_within_rounding(name):
    """Ties within bf16's rounding may fall either way: each token must be one of the likeliest by
    the fp32 model, to a unit in the last place of logits up to 16."""
    exact = tiny_decoder(name)
    wrapped = wrap(copy.deepcopy(exact)).to(torch.bfloat16)
    inputs = padded_inputs([9, 23], side="left", pad_token_id=0)
    ids = wrapped.generate(**inputs, **GREEDY, eos_token_id=None)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 12, dtype=torch.int64)], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode():
        rows = exact(ids, attention_mask=mask, position_ids=positions).logits[:, 22:-1]
        stock = copy.deepcopy(exact).to(torch.bfloat16)
        half = stock(ids, attention_mask=mask, position_ids=positions).logits[:, 22:-1]
    chosen = rows.gather(2, ids[:, 23:, None]).squeeze(2)
    error = (half.float() - rows).abs().max()
    allowed = 4 * error + 16 * torch.finfo(torch.bfloat16).eps
    assert (rows.amax(2) - chosen <= allowed).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"do_sample": True}, "do_sample draws"),
        ({"num_beams": 2}, "beam_search"),
        ({"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor changes"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
        ({"max_time": 60.0}, "MaxTimeCriteria ends"),
        ({"return_dict_in_generate": True, "output_scores": True}, "return_dict_in_generate"),
        ({"num_return_sequences": 2, "num_beams": 2}, "beam_search"),
        ({"max_new_tokens": 90}, "113 positions are more than the 96"),
        ({"streamer": "a list"}, "the argument streamer"),
        ({"position_ids": None}, None),
    ],
)
def test_what_transformers_generates(options, text):
    stock, wrapped = stock_and_wrapped("llama")
    inputs = padded_inputs(SEQLENS, side="left", pad_token_id=0)
    calls = []
    if "streamer" in options:
        inputs = {name: tensor[2:3] for name, tensor in inputs.items()}
        options = {"streamer": Collector(calls)}
    answers = []
    for model in (stock, wrapped):
        torch.manual_seed(3)
        if model is stock or text is None:
            answers.append(model.generate(**inputs, **GREEDY | options))
            continue
        with pytest.warns(FallbackWarning, match=text) as said:
            answers.append(model.generate(**inputs, **GREEDY | options))
        assert len([w for w in said if w.category is FallbackWarning]) == 1
        torch.manual_seed(3)
        again = model.generate(**inputs, **GREEDY | options)  # and nothing is said any more
        assert torch.equal(
            getattr(again, "sequences", again), getattr(answers[1], "sequences", answers[1])
        )
    want, have = (getattr(answer, "sequences", answer) for answer in answers)
    assert torch.equal(have, want)


# Each makes transformers change logits in its own order: a bias before penalties, for one.
PROCESSORS = {
    "SequenceBias": {"sequence_bias": {(5,): 8.0, (9,): -4.0}, "repetition_penalty": 1.7},
    "NoBadWords": {"bad_words_ids": [[5], [7, 9]]},
    "SuppressTokens": {"suppress_tokens": list(range(4, 30))},
    "SuppressTokensAtBegin": {"begin_suppress_tokens": list(range(4, 30))},
    "ForcedBOS": {"forced_bos_token_id": 7},
    "ForcedEOS": {"forced_eos_token_id": 7},
    "InfNanRemove": {"remove_invalid_values": True},
    "ExponentialDecayLength": {
        "exponential_decay_length_penalty": (2, 1.5),
        "eos_token_id": 7,
    },
    "UnbatchedClassifierFreeGuidance": {"guidance_scale": 1.5},
    "RepetitionPenalty": {"repetition_penalty": 1.7, "min_new_tokens": 3, "eos_token_id": 7},
    "NoRepeatNGram": {"no_repeat_ngram_size": 1},
    "LogitNormalization": {"renormalize_logits": True},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_whatever_changes_logits_is_transformers_to_apply(name):
    stock, wrapped = stock_and_wrapped("llama")
    inputs = padded_inputs(SEQLENS, side="left", pad_token_id=0)
    options = GREEDY | PROCESSORS[name]
    want = stock.generate(**inputs, **options)
    with pytest.warns(FallbackWarning, match=f"{name}\\w* changes the logits"):
        have = wrapped.generate(**inputs, **options)
    assert torch.equal(have, want)
    config = transformers.GenerationConfig(**options)  # the same, of the model's own defaults
    wrapped.generation_config = stock.generation_config = config
    assert torch.equal(wrapped.generate(**inputs), stock.generate(**inputs))


def test_the_engine_is_told_lengths_and_ends_alone(monkeypatch):
    """Every other field of SamplingParams keeps a default that changes nothing."""
    _, wrapped = stock_and_wrapped("llama")
    inputs = padded_inputs(SEQLENS, side="left", pad_token_id=0)
    given = []
    add_request = GenerationEngine.add_request

    def record(engine, prompt, params, **options):
        given.append(params)
        return add_request(engine, prompt, params, **options)

    monkeypatch.setattr(GenerationEngine, "add_request", record)
    # Of sampling, which greedy decoding does not look at.
    options = {"temperature": 0.3, "top_k": 3, "top_p": 0.5, "eos_token_id": [7, 9]}
    wrapped.generate(**inputs, **GREEDY | options, min_new_tokens=2)
    want = SamplingParams(temperature=0, max_tokens=12, min_tokens=2, stop_token_ids=(7, 9))
    assert given == [want] * len(SEQLENS)


class Collector:
    """A streamer."""

    def __init__(self, calls):
        self.calls = calls

    def put(self, value):
        self.calls.append(value)

    def end(self):
        self.calls.append(None)


@pytest.mark.parametrize(
    ("name", "lengths", "side", "text"),
    [
        ("llama", [4, 7], "right", "ends in padding"),
        ("llama", [4, 0], "left", "has no tokens"),
        ("llama-dynamic", [90, 80], "left", "positions are more than"),
    ],
)
def test_rows_that_transformers_generates_from(name, lengths, side, text):
    stock, wrapped = stock_and_wrapped(name)
    inputs = padded_inputs(lengths, side=side, pad_token_id=0)
    want = stock.generate(**inputs, **GREEDY)
    with pytest.warns(FallbackWarning, match=text):
        have = wrapped.generate(**inputs, **GREEDY)
    assert torch.equal(have[:1], want[:1])
    assert have.shape == want.shape


def test_changed_models_and_errors():
    stock, wrapped = stock_and_wrapped("gpt2")
    inputs = padded_inputs(SEQLENS, side="left", pad_token_id=0)
    with pytest.raises(ValueError, match="max_new_tokens"):
        wrapped.generate(**inputs, max_new_tokens=0)
    with pytest.raises(ValueError, match="nonsense"), pytest.warns(FallbackWarning):
        wrapped.generate(**inputs, nonsense=3)
    handle = wrapped.lm_head.register_forward_hook(lambda *_: None)
    with pytest.warns(FallbackWarning, match="head was changed"):
        have = wrapped.generate(**inputs, **GREEDY)
    handle.remove()
    assert torch.equal(have, stock.generate(**inputs, **GREEDY))
    assert torch.equal(wrapped.generate(**inputs, **GREEDY), have)
    twin = copy.deepcopy(wrapped)
    assert twin.generate.module is twin
    assert torch.equal(twin.generate(**inputs, **GREEDY), have)
    assert torch.equal(unwrap(wrapped).generate(**inputs, **GREEDY), have)
    assert "generate" not in wrapped.__dict__


def test_a_cache_smaller_than_the_batch_makes_rows_wait(monkeypatch):
    """The engine takes pages from the last rows, and they come out the same."""
    stock, wrapped = stock_and_wrapped("qwen3")
    inputs = padded_inputs([30, 20, 30, 25], side="left", pad_token_id=0)
    monkeypatch.setattr("bytetx.generate.build._cache_limit_bytes", lambda device: 1)
    steps = []
    step = GenerationEngine.step
    monkeypatch.setattr(GenerationEngine, "step", lambda self: steps.append(1) or step(self))
    have = wrapped.generate(**inputs, **GREEDY, eos_token_id=None)
    assert len(steps) > 12
    assert torch.equal(have, stock.generate(**inputs, **GREEDY, eos_token_id=None))


def idle_engine(wrapped):
    (idle,) = wrapped.base_model.forward.engines._idle
    return idle.engine


def test_calls_share_one_engine_as_large_as_the_largest(monkeypatch):
    stock, wrapped = stock_and_wrapped("qwen3")
    many = padded_inputs(SEQLENS, side="left", pad_token_id=0)
    few = padded_inputs([60, 50], side="left", pad_token_id=0)
    for inputs in (many, few, many):
        options = GREEDY | {"eos_token_id": None}
        want = stock.generate(**inputs, **options)
        assert torch.equal(wrapped.generate(**inputs, **options), want)
    engine = idle_engine(wrapped)  # of the second call: as many prompts and as many tokens
    monkeypatch.setattr("bytetx.hf.engine_cache.build_engine", None)
    for inputs in (few, many):
        wrapped.generate(**inputs, **options)
        assert idle_engine(wrapped) is engine
    pages = engine._scheduler.pages
    assert pages.num_available == pages.num_pages


def test_parameters_changed_in_place_find_no_page_of_before():
    stock, wrapped = stock_and_wrapped("qwen3")
    inputs = padded_inputs([40, 35], side="left", pad_token_id=0)
    before = wrapped.generate(**inputs, **GREEDY, eos_token_id=None)
    engine = idle_engine(wrapped)
    for model in (stock, wrapped):
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                noise = torch.Generator().manual_seed(number)
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=noise)
    want = stock.generate(**inputs, **GREEDY, eos_token_id=None)
    have = wrapped.generate(**inputs, **GREEDY, eos_token_id=None)
    assert idle_engine(wrapped) is engine
    assert torch.equal(have, want) and not torch.equal(have, before)


@pytest.mark.parametrize(
    "change",
    [
        lambda wrapped: wrapped.to(torch.bfloat16),
        unwrap,
        lambda wrapped: wrapped.model.layers[0].mlp.up_proj.register_parameter(
            "weight", torch.nn.Parameter(wrapped.model.layers[0].mlp.up_proj.weight * 2)
        ),
    ],
)
def test_an_engine_is_released_with_what_it_ran_over(change):
    _, wrapped = stock_and_wrapped("qwen3")
    inputs = padded_inputs(SEQLENS, side="left", pad_token_id=0)
    wrapped.generate(**inputs, **GREEDY, eos_token_id=None)
    cache = weakref.ref(idle_engine(wrapped)._runner.cache.layers[0].k_cache)
    change(wrapped)
    wrapped.generate(**inputs, **GREEDY, eos_token_id=None)
    assert cache() is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", NINE)
def test_greedy_tokens_on_a_gpu(name):
    stock = tiny_decoder(name).cuda()
    wrapped = wrap(copy.deepcopy(stock))
    inputs = padded_inputs(SEQLENS, side="left", pad_token_id=0)
    inputs = {key: tensor.cuda() for key, tensor in inputs.items()}
    options = GREEDY | {"eos_token_id": None}
    assert torch.equal(wrapped.generate(**inputs, **options), stock.generate(**inputs, **options))


# Arguments that reach the forward through generate, or change which forwards its loop makes.
THROUGH = {
    "logits_to_keep": {"logits_to_keep": 0},
    "two logits": {"logits_to_keep": 2},
    "logits of a column": {"logits_to_keep": torch.tensor([-1])},
    "no cache": {"use_cache": False},
    "no cache, all logits": {"use_cache": False, "logits_to_keep": 0},
    "all layers": {"output_hidden_states": True, "return_dict_in_generate": True},
    "one layer": {"output_hidden_states": [1], "return_dict_in_generate": True},
    "all layers, unread": {"output_hidden_states": True},
    "logits": {"output_logits": True, "return_dict_in_generate": True, "logits_to_keep": 0},
    "beams": {"num_beams": 2, "logits_to_keep": 0},
    "sampling": {"do_sample": True, "logits_to_keep": 0},
    "a penalty": {"repetition_penalty": 1.3, "logits_to_keep": 0},
    "chunks of a prompt": {"prefill_chunk_size": 4},
    "a static cache": {"cache_implementation": "static", "logits_to_keep": 0},
}


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_what_passes_through_generate_changes_no_token(name, side):
    """With zeros at pads, the first token of a right-padded prompt was token 0."""
    stock, wrapped = stock_and_wrapped(name)
    inputs = padded_inputs([4, 9, 6], side=side, pad_token_id=0)
    for what, options in THROUGH.items():
        options = GREEDY | {"eos_token_id": None, "max_new_tokens": 4} | options
        torch.manual_seed(3)
        want = stock.generate(**inputs, **options)
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            have = wrapped.generate(**inputs, **options)
        if isinstance(want, torch.Tensor):
            assert torch.equal(have, want), what
            continue
        assert torch.equal(have.sequences, want.sequences), what
        pairs = zip(want.hidden_states or (), have.hidden_states or (), strict=True)
        for theirs, ours in ((a, b) for step in pairs for a, b in zip(*step, strict=True)):
            assert theirs is None or (ours - theirs).abs().max() < 1e-4, what


@pytest.mark.parametrize("head", ["bert LMHeadModel", "roberta ForCausalLM"])
def test_an_encoders_head_generates_as_transformers_does(head):
    stock = tiny_model(*head.split())
    wrapped = wrap(copy.deepcopy(stock))
    for side in ("right", "left"):
        inputs = padded_inputs([4, 9, 6], side=side, pad_token_id=1)
        for options in ({}, {"logits_to_keep": 0}):
            options = options | {"do_sample": False, "max_new_tokens": 3, "use_cache": False}
            want, have = (m.generate(**inputs, **options) for m in (stock, wrapped))
            assert torch.equal(have, want), (side, options)
    assert "generate" not in unwrap(wrapped).__dict__
