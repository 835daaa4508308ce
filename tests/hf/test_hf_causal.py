"""wrap for causal families: hidden states, logits, losses and pasts of padded batches as stock."""

import copy

import pytest
import torch
import transformers
from hf_models import (  # noqa: F401  (fixtures)
    fallbacks_are_errors,
    largest_difference,
    one_thread,
    padded_inputs,
    rms_difference,
    zeroed,
)
from tiny_decoders import DECODERS, tiny_decoder

from bytetx.hf import FallbackWarning, unwrap, wrap

TOLERANCE = 1e-4  # of last hidden states and logits in fp32: DESIGN.md, "Numbers"
SEQLENS = [9, 1, 23, 14]
# One of each family, and those whose masks or layouts differ. test_hf_mixers.py has those without
# attention in some layers, whose cache is not ours to give.
MIXERS = ["lfm2", "lfm2-biases", "qwen3_5", "qwen3_5_moe", "qwen3_next"]
FAMILIES = [
    name
    for name in DECODERS
    if name not in ("llama2", "llama-linear", "mistral-full", "gpt2-unscaled", *MIXERS)
]
NINE = ["gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3"]
WITH_EXPERTS = ["mixtral", "qwen3_moe"]


def stock_and_wrapped(name, head="ForCausalLM", **config):
    stock = tiny_decoder(name, head, **config)
    return stock, wrap(copy.deepcopy(stock))


def assert_equal_at_tokens(ours, stock, mask):
    is_token = mask.bool()
    assert ours.shape == stock.shape and ours.dtype == stock.dtype
    assert largest_difference(ours[is_token], stock[is_token]) < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_hidden_states_of_base_models(name, side):
    stock, wrapped = stock_and_wrapped(name, "Model")
    inputs = padded_inputs(SEQLENS, side=side)
    mask = inputs["attention_mask"]
    with torch.inference_mode():
        want = stock(**inputs, output_hidden_states=True)
        have = wrapped(**inputs, output_hidden_states=True)
    assert type(have) is type(want)
    assert list(have.keys()) == list(want.keys())
    assert_equal_at_tokens(have.last_hidden_state, want.last_hidden_state, mask)
    assert not have.last_hidden_state[~mask.bool()].any()
    assert len(have.hidden_states) == len(want.hidden_states)
    for ours, theirs in zip(have.hidden_states, want.hidden_states, strict=True):
        assert_equal_at_tokens(ours, theirs, mask)


@pytest.mark.feature("Wrap", "`wrap` of causal models of transformers")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_and_loss(name, side):
    stock, wrapped = stock_and_wrapped(name)
    inputs = padded_inputs(SEQLENS, side=side)
    mask = inputs["attention_mask"]
    first = mask.bool() & (mask.cumsum(1) == 1)  # nothing that is a token stands before it
    labels = inputs["input_ids"].masked_fill((mask == 0) | first, -100)
    with torch.inference_mode():
        want, have = (m(**inputs, labels=labels) for m in (stock, wrapped))
        as_tuple = wrapped(**inputs, return_dict=False)
    assert type(have) is type(want)
    assert list(have.keys()) == list(want.keys())
    assert_equal_at_tokens(have.logits, want.logits, mask)
    assert abs(have.loss - want.loss) < TOLERANCE
    assert torch.equal(as_tuple[0], have.logits)


@pytest.mark.parametrize("name", NINE)
def test_logits_to_keep_without_a_mask_and_of_one_row(name):
    stock, wrapped = stock_and_wrapped(name)
    inputs = padded_inputs(SEQLENS, side="left")
    calls = [
        inputs | {"logits_to_keep": 1},
        {"input_ids": inputs["input_ids"]},
        {"input_ids": inputs["input_ids"][:1], "logits_to_keep": torch.tensor([3, 0, 22])},
        {"input_ids": torch.tensor([[7]]), "use_cache": False},
    ]
    with torch.inference_mode():
        for call in calls:
            want, have = stock(**call), wrapped(**call)
            assert list(have.keys()) == list(want.keys())
            ones = torch.ones(have.logits.shape[:2])
            mask = call.get("attention_mask") if "logits_to_keep" not in call else ones
            assert_equal_at_tokens(have.logits, want.logits, ones if mask is None else mask)


UNWINDOWED = [name for name in NINE if name not in ("gpt_neo", "mistral")]


@pytest.mark.parametrize("name", [*UNWINDOWED, "bloom", "falcon-alibi"])
def test_masks_with_holes_and_an_empty_row(name):
    stock, wrapped = stock_and_wrapped(name)
    inputs = padded_inputs([20, 17, 0, 12])
    mask = inputs["attention_mask"]
    mask[0, 3:9] = 0
    mask[1, 0] = 0
    mask[1, 5] = 0
    with torch.inference_mode():
        want, have = stock(**inputs), wrapped(**inputs)
    assert_equal_at_tokens(have.logits, want.logits, mask)
    assert have.logits[2].isfinite().all()


@pytest.mark.filterwarnings("default::bytetx.hf.FallbackWarning")
def test_more_tokens_than_alibi_was_trained_with():
    stock, wrapped = stock_and_wrapped("bloom", seq_length=16)
    inputs = padded_inputs([20, 12])
    with torch.inference_mode(), pytest.warns(FallbackWarning, match="20 tokens are more than"):
        have = wrapped(**inputs)
    with torch.inference_mode():
        want = stock(**inputs)
    assert_equal_at_tokens(have.logits, want.logits, inputs["attention_mask"])


@pytest.mark.parametrize("name", [*NINE, "gemma3"])
def test_positions_and_embeddings(name):
    stock, wrapped = stock_and_wrapped(name)
    inputs = padded_inputs(SEQLENS, side="left")
    mask = inputs["attention_mask"]
    calls = [
        inputs | {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)},
        inputs | {"position_ids": torch.arange(5, 28).unsqueeze(0)},
        {
            "inputs_embeds": stock.get_input_embeddings()(inputs["input_ids"]).detach(),
            "attention_mask": mask,
        },
    ]
    with torch.inference_mode():
        for call in calls:
            assert_equal_at_tokens(wrapped(**call).logits, stock(**call).logits, mask)


@pytest.mark.parametrize("name", [*NINE, "gemma2", "gemma3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_past_is_what_the_original_goes_on_from(name, side):
    stock, wrapped = stock_and_wrapped(name)
    inputs = padded_inputs([6, 3, 12], side=side)
    mask = inputs["attention_mask"]
    following = {
        "input_ids": torch.tensor([[5, 6], [7, 8], [9, 10]]),
        "attention_mask": torch.cat([mask, torch.ones(3, 2, dtype=mask.dtype)], 1),
    }
    with torch.inference_mode():
        want, have = stock(**inputs), wrapped(**inputs)
        assert isinstance(have.past_key_values, type(want.past_key_values))
        for ours, theirs in zip(
            have.past_key_values.layers, want.past_key_values.layers, strict=True
        ):
            assert type(ours) is type(theirs)
            assert ours.keys.shape == theirs.keys.shape
        filled = transformers.DynamicCache(config=stock.config)
        assert wrapped(**inputs, past_key_values=filled).past_key_values is filled
        want = stock(**following, past_key_values=want.past_key_values).logits
        with pytest.warns(FallbackWarning, match="hold keys and values already"):
            first = wrapped(**following, past_key_values=have.past_key_values).logits
        second = wrapped(**following, past_key_values=filled).logits
    assert largest_difference(first, want) < TOLERANCE
    assert largest_difference(second, want) < TOLERANCE


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gpt_neox"])
def test_packed_rows(name):
    wrapped = wrap(tiny_decoder(name))
    inputs = padded_inputs(SEQLENS)
    mask = inputs["attention_mask"].bool()
    cu_seqlens = torch.tensor([0, *SEQLENS]).cumsum(0)
    with torch.inference_mode():
        want = wrapped(**inputs).logits[mask]
        have = wrapped(inputs["input_ids"][mask], cu_seqlens=cu_seqlens).logits
    assert have.shape == (1, *want.shape)
    assert torch.equal(have[0], want)


# One of each family but those with experts: rounding may choose other experts for a token.
@pytest.mark.parametrize("name", [n for n in FAMILIES if "-" not in n and n not in WITH_EXPERTS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much_as_stock(name, dtype):
    """By the root mean square over all tokens of the distance from the fp32 model."""
    exact = tiny_decoder(name)
    stock = copy.deepcopy(exact).to(dtype)
    wrapped = wrap(copy.deepcopy(exact)).to(dtype)
    inputs = padded_inputs(SEQLENS)
    is_token = inputs["attention_mask"].bool()
    with torch.inference_mode():
        reference, theirs, ours = (m(**inputs).logits[is_token] for m in (exact, stock, wrapped))
    assert ours.dtype == dtype
    assert rms_difference(ours, reference) <= 2 * rms_difference(theirs, reference)


@pytest.mark.parametrize("name", [*NINE, "gemma3"])
def test_weights_are_held_once_saved_alike_and_given_back(name, tmp_path):
    model = tiny_decoder(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    attributes = {key: set(m.__dict__) for key, m in model.named_modules()}
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        want = model(**inputs).logits
        assert wrap(wrap(model)) is model
        plan = model.base_model.forward.current_plan()
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        assert plan.reason is None
        layer = plan.transformer.layers.weights[0]
        for weight in layer.linears:
            assert weight.dense.weight.untyped_storage().data_ptr() in own
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert torch.equal(again.eval()(**inputs).logits, want)
        assert unwrap(unwrap(model)) is model
        assert torch.equal(model(**inputs).logits, want)
    assert {key: set(m.__dict__) for key, m in model.named_modules()} == attributes
    after = model.state_dict()
    assert all(torch.equal(before[key], tensor) for key, tensor in after.items())
    assert all(tensor.is_contiguous() for tensor in after.values())


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "gemma3"])
def test_weights_changed_in_place_are_seen(name):
    stock, wrapped = stock_and_wrapped(name)
    inputs = padded_inputs(SEQLENS)
    with torch.no_grad():
        wrapped(**inputs)
        for model in (stock, wrapped):
            for parameter in model.parameters():
                parameter.mul_(0.9)
    with torch.inference_mode():
        want, have = stock(**inputs).logits, wrapped(**inputs).logits
    assert_equal_at_tokens(have, want, inputs["attention_mask"])


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "gemma3"])
def test_other_heads(name):
    inputs = padded_inputs(SEQLENS)
    for head in ("ForSequenceClassification", "ForTokenClassification"):
        if not hasattr(transformers, DECODERS[name][0] + head):
            continue
        stock, wrapped = stock_and_wrapped(name, head, pad_token_id=0, num_labels=3)
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 0)
        with torch.inference_mode():
            want, have = stock(**inputs).logits, wrapped(**inputs).logits
        if head == "ForTokenClassification":
            assert_equal_at_tokens(have, want, inputs["attention_mask"])
        else:
            assert largest_difference(have, want) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("name", NINE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(name, dtype):
    exact = tiny_decoder(name).cuda()
    stock = copy.deepcopy(exact).to(dtype)
    wrapped = wrap(copy.deepcopy(exact)).to(dtype)
    inputs = {key: tensor.cuda() for key, tensor in padded_inputs(SEQLENS, side="left").items()}
    is_token = inputs["attention_mask"].bool()
    with torch.inference_mode():
        reference, theirs, ours = (m(**inputs).logits[is_token] for m in (exact, stock, wrapped))
    rounding = max(TOLERANCE, 16 * torch.finfo(dtype).eps)
    assert (
        largest_difference(ours, reference) <= 2 * largest_difference(theirs, reference) + rounding
    )


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((name, {"is_causal": False}) for name in ("llama", "mistral", "qwen2-window", "qwen3")),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("gemma3-capped", {"use_bidirectional_attention": True, "is_causal": False}),
    ],
)
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_decoder_without_its_causal_mask(name, key, side):
    stock, wrapped = stock_and_wrapped(name, **key)
    inputs = padded_inputs(SEQLENS, side=side)
    mask = inputs["attention_mask"]
    with torch.inference_mode():
        want, have = (m(**inputs, output_hidden_states=True) for m in (stock, wrapped))
        causal = tiny_decoder(name)(**inputs).logits
        for ours, theirs in zip(have.hidden_states, want.hidden_states, strict=True):
            assert_equal_at_tokens(ours, theirs, mask)
        assert_equal_at_tokens(have.logits, want.logits, mask)
        assert largest_difference(causal[mask.bool()], want.logits[mask.bool()]) > 0.1
        keys = [output.past_key_values.layers[0].keys.transpose(1, 2) for output in (have, want)]
        assert_equal_at_tokens(*keys, mask[:, -keys[1].shape[1] :])  # of a window: its last ones
        alone = inputs["input_ids"][2:3]  # the longest: it has no pads
        ours, theirs = (m(alone, use_cache=False).logits for m in (wrapped, stock))
        assert largest_difference(ours, theirs) < TOLERANCE


def test_a_causal_mask_that_is_taken_away_later():
    stock, wrapped = stock_and_wrapped("llama")
    inputs = padded_inputs(SEQLENS, side="left")
    mask = inputs["attention_mask"]
    with torch.inference_mode():
        before = wrapped(**inputs, use_cache=False).logits
        stock.config.is_causal = wrapped.config.is_causal = False
        have, want = (m(**inputs, use_cache=False).logits for m in (wrapped, stock))
    assert_equal_at_tokens(have, want, mask)
    assert largest_difference(have, before) > 0.1


def test_a_decoder_without_its_causal_mask_generates_as_transformers_does():
    stock, wrapped = stock_and_wrapped("llama", is_causal=False)
    ids = padded_inputs([7])["input_ids"]
    options = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0}
    with pytest.warns(FallbackWarning, match="see their whole sequence"):
        have = wrapped.generate(ids, **options)
    assert torch.equal(have, stock.generate(ids, **options))


def test_a_key_that_transformers_does_not_read_keeps_the_causal_mask():
    stock, wrapped = stock_and_wrapped("llama", use_bidirectional_attention=True)
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode(), pytest.warns(FallbackWarning, match="reads is_causal alone"):
        have = wrapped(**inputs).logits
    assert torch.equal(have, zeroed(stock(**inputs).logits, inputs["attention_mask"]))
