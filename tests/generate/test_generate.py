"""Model.generate against transformers.generate, for every causal family, in every kind of step."""

import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from chat_templates import TEMPLATE
from checkpoints import SENTENCES, edit_json
from tiny import one_thread, random_ids, save  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import DECODERS, tiny_decoder
from torch import nn

import bytetx
from bytetx.errors import CheckpointError, DeviceMemoryError, InputError, OptionError, TooLongError
from bytetx.model import Model
from bytetx.nn import heads
from bytetx.nn.cpu_steps import CpuSteps
from bytetx.nn.transformer import Transformer
from bytetx.sampling_params import SamplingParams

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEQLENS = [1, 13, 6, 37, 2]
TEXTS = [text for text in SENTENCES if text]


def greedy(model: nn.Module, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    """Return the tokens that transformers gives after one prompt, alone and with its own cache."""
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
    ids = model.generate(torch.tensor([prompt]), pad_token_id=0, **options)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.feature("Generation", "`generate`: the greedy tokens of transformers")
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_as_transformers(name: str, tmp_path: Path) -> None:
    theirs, prompts = tiny_decoder(name), random_ids(SEQLENS)
    wanted = [greedy(theirs, prompt) for prompt in prompts]
    checkpoint = bytetx.load(save(theirs, tmp_path)).checkpoint
    model = Model(checkpoint)
    together = model.generate(prompts, GREEDY)
    assert [answer.token_ids for answer in together] == wanted
    assert [answer.num_prompt_tokens for answer in together] == SEQLENS
    assert {answer.finish_reason for answer in together} == {"length"}
    alone = [Model(checkpoint).generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    assert alone == wanted
    again = model.generate(prompts, GREEDY)  # now with the pages of the first time
    assert [answer.token_ids for answer in again] == wanted
    # A prefix would have to leave the states of layers without attention, too.
    num_cached = 32 if checkpoint.spec.layer_spec.mixer is None else 0
    assert model.engines.idle[0].engine._scheduler.num_cached_tokens == num_cached
    pieces = Model(checkpoint, token_budget=5)  # prompts in pieces of up to 5 tokens
    assert [answer.token_ids for answer in pieces.generate(prompts, GREEDY)] == wanted
    tight = Model(checkpoint)  # five pages: sequences throw each other out
    found = tight.generate(prompts, GREEDY, kv_cache_tokens=80)
    assert [answer.token_ids for answer in found] == wanted
    assert tight.engines.idle[0].engine._scheduler.num_preempted


def test_dynamic_scaling_in_pieces_beyond_the_trained_positions(tmp_path: Path) -> None:
    """A prompt's own length turns it, whole, in pieces, beside others, or after preemption; the
    tokens after it are turned by theirs."""
    sizes = {"max_position_embeddings": 24}
    folder = save(tiny_decoder("llama-dynamic", **sizes), tmp_path)
    prompts = random_ids([28, 4, 20, 27, 25])
    prompts[4] = prompts[0][:25]  # a start that another prompt has turned otherwise
    # A new model each time: transformers' keeps the frequencies of longer texts before.
    wanted = [greedy(tiny_decoder("llama-dynamic", **sizes), prompt) for prompt in prompts]
    checkpoint = bytetx.load(folder).checkpoint
    for budget, cache in ((1024, None), (7, None), (64, 80), (9, 80)):
        model = Model(checkpoint, token_budget=budget)
        for _ in range(2):
            answers = model.generate(prompts, GREEDY, kv_cache_tokens=cache)
            assert [answer.token_ids for answer in answers] == wanted
        scheduler = model.engines.idle[0].engine._scheduler
        assert bool(scheduler.num_preempted) == (cache is not None)


CHAT = [
    {"role": "user", "content": "a packed batch"},
    {"role": "assistant", "content": "has no pad token"},
    {"role": "user", "content": "é?"},
]


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from checkpoints import save_causal

    return save_causal(tmp_path_factory.mktemp("text"), "llama3")


@pytest.fixture(scope="module")
def text_model(text_folder: Path) -> Model:
    return bytetx.load(text_folder)


def test_text_and_token_ids_of_strings(text_model: Model, text_folder: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(text_folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(text_folder)
    for text, answer in zip(TEXTS, text_model.generate(TEXTS, GREEDY), strict=True):
        ids = tokenizer(text)["input_ids"]
        wanted = greedy(theirs, ids)
        assert answer.token_ids == wanted and answer.num_prompt_tokens == len(ids)
        assert answer.text == tokenizer.decode(wanted, skip_special_tokens=True)


def test_an_end_of_text_token_ends_the_answer(text_folder: Path, text_model: Model) -> None:
    """generation_config.json says which tokens do, before config.json."""
    tokens = text_model.generate(["packed"], GREEDY)[0].token_ids
    ends = list(dict.fromkeys(tokens))[2:4]
    path = text_folder / "generation_config.json"
    before = path.read_text()
    edit_json(path, eos_token_id=ends)
    model = bytetx.load(text_folder)
    path.write_text(before)
    params = replace(GREEDY, ignore_eos=False)
    answer = model.generate(["packed"], params)[0]
    first = min(tokens.index(end) for end in ends)
    assert answer.token_ids == tokens[: first + 1] and answer.finish_reason == "stop"
    assert answer.outputs[0].stop == tokens[first]
    assert model.generate(["packed"], GREEDY)[0].token_ids == tokens


def test_pieces_add_up_to_whole_answers(text_model: Model) -> None:
    prompts, params = TEXTS[:5], SamplingParams(max_tokens=15, seed=3, n=2, logprobs=2)
    whole = text_model.generate(prompts, params)
    texts, tokens = defaultdict(str), defaultdict(list)
    for piece in text_model.generate(prompts, params, stream="pieces"):
        texts[piece.request_id, piece.index] += piece.text
        tokens[piece.request_id, piece.index] += piece.token_ids
    for place, generation in enumerate(whole):
        assert len(generation.outputs) == 2
        for index, answer in enumerate(generation.outputs):
            assert texts[place, index] == answer.text
            assert tokens[place, index] == answer.token_ids
            assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
            assert all(len(entry.top) == 2 for entry in answer.logprobs)
    assert [g.text for g in text_model.generate(iter(prompts), params, stream=True)] == [
        generation.text for generation in whole
    ]


def test_log_probabilities_are_those_of_score(text_model: Model) -> None:
    params = replace(GREEDY, logprobs=0, prompt_logprobs=0)
    for prompt in random_ids([3, 30]):
        answer = text_model.generate([prompt], params)[0]
        found = [entry.logprob for entry in [*answer.prompt_logprobs, *answer.logprobs]]
        score = text_model.score([prompt + answer.token_ids])[0]
        np.testing.assert_allclose(found, score.token_log_likelihoods, atol=1e-4)


def test_prompt_logits_are_held_a_block_at_a_time(
    text_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    prompts = random_ids([40, 3, 25])
    wanted = [g.prompt_logprobs for g in text_model.generate(prompts, params)]
    monkeypatch.setattr(heads, "_MAX_LOGITS_BYTES", 7 * 8 * text_model.spec.vocab_size)
    sizes, forward = [], heads.LmHead.forward
    monkeypatch.setattr(
        heads.LmHead, "forward", lambda head, x: sizes.append(len(x)) or forward(head, x)
    )
    found = [g.prompt_logprobs for g in Model(text_model.checkpoint).generate(prompts, params)]
    assert found == wanted
    assert max(sizes) == 7


@pytest.mark.feature("Generation", "seeded sampling, whatever runs beside it")
def test_a_seed_gives_the_same_answer_whatever_runs_beside_it(text_model: Model) -> None:
    params = SamplingParams(seed=11, max_tokens=18, top_p=0.95, presence_penalty=0.4)
    alone = [text_model.generate([text], params)[0].token_ids for text in TEXTS]
    assert len(set(map(tuple, alone))) > len(TEXTS) / 2
    for budget, tokens in ((4, 160), (1024, None)):
        model = Model(text_model.checkpoint, token_budget=budget)
        together = model.generate(TEXTS, params, kv_cache_tokens=tokens)
        assert [answer.token_ids for answer in together] == alone


def test_params_of_each_prompt(text_model: Model) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(seed=5, max_tokens=6, n=2, ignore_eos=True),
        SamplingParams(seed=6, top_k=4, max_tokens=9, logprobs=1),
    ]
    prompts = TEXTS[:3]
    pairs = list(zip(prompts, params, strict=True))
    wanted = [text_model.generate([prompt], own)[0].outputs for prompt, own in pairs]
    assert [answer.outputs for answer in text_model.generate(prompts, params)] == wanted
    lazy = text_model.generate(iter(prompts), tuple(params), stream=True)
    assert [answer.outputs for answer in lazy] == wanted
    pieces: dict[tuple[int, int], list[int]] = {}
    for piece in text_model.generate(prompts, params, stream="pieces"):
        pieces.setdefault((piece.request_id, piece.index), []).extend(piece.token_ids)
    assert [len(own) for _, own in sorted(pieces.items())] == [
        len(answer.token_ids) for answers in wanted for answer in answers
    ]


def test_params_that_do_not_go_with_the_prompts(text_model: Model) -> None:
    two, no_tokens = [SamplingParams(max_tokens=2)] * 2, [SamplingParams(logit_bias={10**6: 1.0})]
    for prompts in (TEXTS[:3], TEXTS[:1], iter(TEXTS[:3]), iter(TEXTS[:1])):
        with pytest.raises(InputError, match=r"one a prompt: got 2 of them for \d"):
            text_model.generate(prompts, two, on_error="return")
    with pytest.raises(InputError, match=r"params\[2\]: logit_bias must name"):
        text_model.generate(TEXTS[:3], two + no_tokens)
    with pytest.raises(InputError, match=r"params\[0\]: params must be SamplingParams, got dict"):
        text_model.generate(TEXTS[:1], [{}])
    assert text_model.generate([], []) == []
    assert len(text_model.generate(TEXTS[:1], two[:1])) == 1


@pytest.mark.feature("Generation", "chats by the checkpoint's template")
def test_chats_by_the_checkpoints_template(text_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(text_folder, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    model = bytetx.load(folder)
    assert model.encode_prompts([CHAT]) == [wanted]
    assert model.generate([CHAT], GREEDY)[0].token_ids == (
        model.generate([wanted], GREEDY)[0].token_ids
    )
    for given in ({"add_generation_prompt": False}, {"continue_final_message": True}):
        wanted_ids = tokenizer.apply_chat_template(CHAT, **given)["input_ids"]
        assert model.encode_prompts([CHAT], chat_template_kwargs=given) == [wanted_ids]
        answer = model.generate([CHAT], GREEDY, chat_template_kwargs=given)[0]
        assert answer.token_ids == model.generate([wanted_ids], GREEDY)[0].token_ids
    with pytest.raises(OptionError, match="takes no tokenize"):
        model.generate([CHAT], chat_template_kwargs={"tokenize": False})
    (folder / "chat_template.jinja").unlink()
    edit_json(folder / "tokenizer_config.json", chat_template=TEMPLATE)
    assert bytetx.load(folder).encode_prompts([CHAT]) == [wanted]
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    assert bytetx.load(folder).encode_prompts([CHAT]) == [wanted]
    with pytest.raises(InputError, match=r"prompts\[1\].*unknown role"):
        model.generate(["a", [{"role": "tool", "content": "x"}]])
    edit_json(folder / "tokenizer_config.json", chat_template="{% for %}")
    with pytest.raises(CheckpointError, match="chat template is broken"):
        bytetx.load(folder).generate([CHAT])


def test_what_generate_refuses(text_model: Model, tmp_path: Path) -> None:
    long = random_ids([97])[0]
    for prompts, message in (
        ("text", "put it in a list"),
        ([CHAT[0]], r"prompts\[0\]: one message is no prompt"),
        ([CHAT], r"prompts\[0\]: the checkpoint's tokenizer has no chat template"),
        (["a", ("b", "c")], r"prompts\[1\]: a list of strings is no prompt"),
        (["a", []], r"prompts\[1\].*no token"),
        ([[10**6]], r"prompts\[0\]"),
        ([1.5], r"prompts\[0\]"),
        ([long], r"prompts\[0\] has 97 token ids, the model takes at most 96; shorten it$"),
        ([long[:96]], r"prompts\[0\]: .*leaves room for 0"),
    ):
        with pytest.raises(InputError, match=message):
            text_model.generate(prompts, GREEDY)
    kept = text_model.generate(["a", [], long, "b"], GREEDY, on_error="return")
    assert [isinstance(answer, InputError) for answer in kept] == [False, True, True, False]
    assert sorted(kept.errors) == [1, 2] and kept.stats.num_errors == 2
    pieces = list(text_model.generate(["a", []], GREEDY, on_error="return", stream="pieces"))
    assert [p.request_id for p in pieces if p.error is not None] == [1]
    for options in (
        {"params": {"n": 1}},
        {"params": SamplingParams(stop_token_ids=[10**6])},
        {"stream": "words"},
        {"on_error": "drop"},
        {"kv_cache_tokens": 0},
        {"max_num_seqs": 1.5},
        {"max_num_seqs": 10**6},
    ):
        with pytest.raises(InputError):
            text_model.generate(["a"], **options)
    # Before a cache of a share of the memory is allocated for them.
    with pytest.raises(InputError, match="max_num_seqs must be 1 ... token_budget"):
        text_model.generation_sizes(max_num_seqs=10**6)
    with pytest.raises(TooLongError, match="give the cache more memory"):
        text_model.generate([long[:60]], GREEDY, kv_cache_tokens=48)
    base = bytetx.load(save(tiny_decoder("llama", "Model"), tmp_path / "base"))
    with pytest.raises(InputError, match="no language model head"):
        base.generate([[5]])
    bare = bytetx.load(save(tiny_decoder("llama"), tmp_path / "bare"))
    for prompt, params in (("text", GREEDY), (CHAT, GREEDY), ([5], replace(GREEDY, stop=["x"]))):
        with pytest.raises(InputError, match="tokenizer"):
            bare.generate([prompt], params)
    assert bare.generate([[5]], GREEDY)[0].text == ""


def test_sizes_are_counted_in_bytes(text_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = text_model.spec
    sizes = text_model.generation_sizes(kv_cache_tokens=100, max_num_seqs=3)
    assert (sizes.num_pages, sizes.kv_cache_tokens, sizes.max_num_seqs) == (7, 112, 3)
    per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
    assert sizes.cache_bytes == 112 * per_token
    weights = (text_model.checkpoint.folder / "model.safetensors").stat().st_size
    assert weights * 0.9 < sizes.weights_bytes < weights * 1.5
    tables = text_model.transformer.layers.tables.values()  # of rotary positions
    tables_bytes = sum(t.cos.nbytes + t.sin.nbytes for t in tables)
    with monkeypatch.context() as patch:
        patch.setattr(text_model.transformer.layers, "tables", {})
        without = text_model.generation_sizes(kv_cache_tokens=100)
    assert sizes.weights_bytes == without.weights_bytes + tables_bytes
    assert text_model.generation_sizes().kv_cache_tokens == 64 * 96
    with pytest.raises(DeviceMemoryError, match="lower kv_cache_tokens"):
        text_model.generate(["a"], kv_cache_tokens=10**13)


def test_nan_ends_one_request_alone(tmp_path: Path) -> None:
    """And who takes over its pages reads nothing of it."""
    model = bytetx.load(save(tiny_decoder("llama"), tmp_path))
    prompts = [[5, 6, 7], [5, 9, 7], [8, 6], [5, 6, 7, 8]] * 3
    params = replace(GREEDY, logit_bias={9: -math.inf})
    wanted = model.generate(prompts, params)
    model.transformer.embeddings.word[9] = torch.nan
    kept = Model(model.checkpoint).generate(
        prompts, params, on_error="return", kv_cache_tokens=64, max_num_seqs=2
    )
    assert sorted(kept.errors) == [1, 5, 9]
    assert all("NaN" in str(error) for error in kept.errors.values())
    for place in set(range(len(prompts))) - kept.errors.keys():
        assert kept[place].token_ids == wanted[place].token_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_hold_their_own_cache(dtype: str, tmp_path: Path) -> None:
    model = bytetx.load(save(tiny_decoder("llama3"), tmp_path), dtype=dtype)
    prompts = random_ids(SEQLENS)
    together = [answer.token_ids for answer in model.generate(prompts, GREEDY)]
    assert together == [model.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    engine = model.engines.idle[0].engine
    assert engine._runner.cache.layers[0].k_cache.dtype == model.checkpoint.dtype


def test_a_step_without_memory_ends_its_own_texts(
    text_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner's error names the step and what to do; the engine goes on with the others."""
    params, forward = replace(GREEDY, max_tokens=3), Transformer.forward
    wanted = text_model.generate(TEXTS[:6], params)
    num_calls = 0

    def failing_once(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def step(*args: object, **options: object) -> torch.Tensor:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 2:
                raise torch.OutOfMemoryError("out of memory: 1 GiB")
            return run(*args, **options)

        return step

    for kind in (Transformer, CpuSteps):  # either runs a step
        monkeypatch.setattr(kind, "forward", failing_once(kind.forward))
    model = Model(text_model.checkpoint)
    kept = model.generate(TEXTS[:6], params, max_num_seqs=2, on_error="return")
    assert sorted(kept.errors) == [0, 1]
    for error in kept.errors.values():
        assert isinstance(error, DeviceMemoryError) and "kv_cache_tokens" in str(error)
    assert [answer.text for answer in kept[2:]] == [answer.text for answer in wanted[2:]]
    num_calls = 0
    with pytest.raises(DeviceMemoryError, match=r"^prompts\[0\]: a step of 2 tokens of 2 texts"):
        model.generate(TEXTS[:6], params, max_num_seqs=2)
    monkeypatch.setattr(Transformer, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # our own faults are nobody's text's
        model.generate(TEXTS[:6], params, max_num_seqs=2)
    monkeypatch.setattr(Transformer, "forward", forward)
    assert [a.text for a in model.generate(TEXTS[:6], params)] == [a.text for a in wanted]


def test_the_engine_of_the_same_options_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where less memory is free now, which the engine itself holds."""
    tiny_decoder("llama").save_pretrained(tmp_path)
    model = bytetx.load(tmp_path, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=2)
    model.generate([[5, 6]], params)
    engine = model.engines.idle[0].engine
    monkeypatch.setattr("bytetx.generate.build._cache_limit_bytes", lambda device: 1 << 16)
    model.generate([[5, 6]], params)
    assert model.engines.idle[0].engine is engine
    model.generate([[5, 6]], params, max_num_seqs=3)
    assert model.engines.idle[0].engine is not engine
