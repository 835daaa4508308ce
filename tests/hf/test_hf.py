"""wrap: every family and head equals the stock model on padded input, and pads are zeros."""

import copy

import pytest
import torch
from hf_models import (  # noqa: F401  (fixtures)
    FAMILIES,
    FAMILY_HEADS,
    fallbacks_are_errors,
    largest_difference,
    one_thread,
    padded_inputs,
    rms_difference,
    tiny_model,
)

from bytetx.errors import InputError
from bytetx.hf import FallbackWarning, unwrap, wrap

TOLERANCE = 1e-4  # of last hidden states in fp32, which are of order 1: DESIGN.md, "Numbers"
SEQLENS = [9, 1, 23, 14]


def stock_and_wrapped(family, head="Model", **config):
    stock = tiny_model(family, head, **config)
    return stock, wrap(copy.deepcopy(stock))


def assert_equal_at_tokens(ours, stock, mask):
    is_token = mask.bool()
    assert largest_difference(ours[is_token], stock[is_token]) < TOLERANCE
    assert not ours[~is_token].any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_hidden_states_equal_at_tokens_and_are_zero_at_pads(family, side):
    stock, wrapped = stock_and_wrapped(family)
    inputs = padded_inputs(SEQLENS, side=side)
    with torch.inference_mode():
        want = stock(**inputs, output_hidden_states=True)
        have = wrapped(**inputs, output_hidden_states=True)
    assert type(have) is type(want)
    assert list(have.keys()) == list(want.keys())
    assert len(have.hidden_states) == len(want.hidden_states) == 3
    mask = inputs["attention_mask"]
    assert_equal_at_tokens(have.last_hidden_state, want.last_hidden_state, mask)
    for ours, theirs in zip(have.hidden_states, want.hidden_states, strict=True):
        assert_equal_at_tokens(ours, theirs, mask)
    if side == "right" and "pooler_output" in want:
        assert largest_difference(have.pooler_output, want.pooler_output) < TOLERANCE


@pytest.mark.parametrize("family", [name for name in FAMILIES if "deberta" not in name])
def test_masks_with_holes(family):
    # A window counts columns, holes included.
    windowed = ("modernbert", "ultrabert")
    options = {"layer_types": ["full_attention"] * 2} if family in windowed else {}
    stock, wrapped = stock_and_wrapped(family, **options)
    inputs = padded_inputs([20, 17, 12], side="right")
    mask = inputs["attention_mask"]
    mask[0, 3:9] = 0
    mask[1, 0] = 0
    mask[1, 5] = 0
    with torch.inference_mode():
        want, have = stock(**inputs), wrapped(**inputs)
    assert_equal_at_tokens(have.last_hidden_state, want.last_hidden_state, mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_position_ids_token_types_and_embeddings(family):
    stock, wrapped = stock_and_wrapped(family)
    inputs = padded_inputs(SEQLENS, side="left")
    mask = inputs["attention_mask"]
    position_ids = torch.randint(0, 40, mask.shape, generator=torch.Generator().manual_seed(1))
    calls = [
        inputs | {"position_ids": position_ids},
        inputs | {"position_ids": torch.arange(5, 28).unsqueeze(0)},
        {
            "inputs_embeds": stock.get_input_embeddings()(inputs["input_ids"]).detach(),
            "attention_mask": mask,
        },
    ]
    if getattr(stock.config, "type_vocab_size", 1) > 1:
        calls.append(inputs | {"token_type_ids": (torch.arange(23) % 2).expand(4, -1)})
    for call in calls:
        with torch.inference_mode():
            want, have = stock(**call), wrapped(**call)
        assert_equal_at_tokens(have.last_hidden_state, want.last_hidden_state, mask)


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet"])
def test_pad_ids_under_an_open_mask(family):
    """RoBERTa's kin take positions from the ids, whatever the mask says."""
    stock, wrapped = stock_and_wrapped(family)
    input_ids = padded_inputs(SEQLENS)["input_ids"]
    with torch.inference_mode():
        want, have = stock(input_ids), wrapped(input_ids)
    assert largest_difference(have.last_hidden_state, want.last_hidden_state) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.float32])
def test_masks_of_any_dtype(dtype):
    stock, wrapped = stock_and_wrapped("bert")
    inputs = padded_inputs(SEQLENS)
    mask = inputs["attention_mask"].to(dtype)
    with torch.inference_mode():
        want, have = stock(inputs["input_ids"], mask), wrapped(inputs["input_ids"], mask)
    assert_equal_at_tokens(have[0], want[0], mask)


@pytest.mark.feature("Wrap", "`wrap` of encoders of transformers")
@pytest.mark.parametrize(("family", "head"), FAMILY_HEADS)
def test_every_head_equals_stock(family, head):
    stock, wrapped = stock_and_wrapped(family, head)
    inputs = padded_inputs(SEQLENS)
    mask = inputs["attention_mask"].bool()
    if head == "ForMultipleChoice":
        inputs = {name: tensor.view(2, 2, -1) for name, tensor in inputs.items()}
    with torch.inference_mode():
        try:
            want = stock(**inputs, output_hidden_states=True)
        except TypeError as error:  # transformers 5.0.0: XLM-RoBERTa and CamemBERT, multiple choice
            pytest.skip(f"the stock head itself fails: {error}")
        have = wrapped(**inputs, output_hidden_states=True)
        as_tuple = wrapped(**inputs, return_dict=False)
    assert type(have) is type(want)
    assert list(have.keys()) == list(want.keys())
    for name in want:
        if name == "hidden_states":
            continue
        ours, theirs = have[name], want[name]
        if theirs.shape[:2] == mask.shape:
            ours, theirs = ours[mask], theirs[mask]
        assert largest_difference(ours, theirs) < TOLERANCE, name
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], next(iter(have.values())))


@pytest.mark.parametrize("family", ["bert", "mpnet", "distilbert"])
@pytest.mark.parametrize("add_hidden_states", [False, True])
def test_return_dict_false(family, add_hidden_states):
    stock, wrapped = stock_and_wrapped(family)
    inputs = padded_inputs(SEQLENS) | {"output_hidden_states": add_hidden_states}
    with torch.inference_mode():
        want = stock(**inputs, return_dict=False)
        have = wrapped(**inputs, return_dict=False)
    assert isinstance(have, tuple)
    assert len(have) == len(want)
    assert [type(part) for part in have] == [type(part) for part in want]


def test_config_defaults_are_honoured():
    _, wrapped = stock_and_wrapped("bert", output_hidden_states=True, return_dict=False)
    with torch.inference_mode():
        output = wrapped(**padded_inputs(SEQLENS))
    assert isinstance(output, tuple)
    assert len(output[-1]) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_without_tokens_is_zeros(family):
    stock, wrapped = stock_and_wrapped(family)
    inputs = padded_inputs([5, 0, 3])
    with torch.inference_mode():
        want, have = stock(**inputs), wrapped(**inputs)
        nothing = wrapped(**padded_inputs([0, 0], width=4))
    assert_equal_at_tokens(have.last_hidden_state, want.last_hidden_state, inputs["attention_mask"])
    assert nothing.last_hidden_state.shape == (2, 4, 64)
    assert not nothing.last_hidden_state.any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much_as_stock(family, dtype):
    """By the root mean square over all tokens of the distance from the fp32 model."""
    exact = tiny_model(family)
    stock = copy.deepcopy(exact).to(dtype)
    wrapped = wrap(copy.deepcopy(exact)).to(dtype)
    inputs = padded_inputs(SEQLENS)
    is_token = inputs["attention_mask"].bool()
    with torch.inference_mode():
        reference, theirs, ours = (m(**inputs)[0][is_token] for m in (exact, stock, wrapped))
    assert ours.dtype == dtype
    assert rms_difference(ours, reference) <= 2 * rms_difference(theirs, reference)


def test_a_frozen_encoder_feeds_a_trained_head():
    """Outputs under recorded gradients are tensors that autograd may keep."""
    model = tiny_model("bert", "ForTokenClassification")
    model.bert.requires_grad_(False)
    wrap(model)
    model(**padded_inputs(SEQLENS)).logits.sum().backward()
    model(**padded_inputs([4, 4])).logits.sum().backward()
    assert model.classifier.weight.grad.abs().sum() > 0


def test_positional_arguments_and_wrong_ones():
    stock, wrapped = stock_and_wrapped("bert")
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        want = stock(inputs["input_ids"], inputs["attention_mask"])
        have = wrapped(inputs["input_ids"], inputs["attention_mask"])
        assert_equal_at_tokens(have[0], want[0], inputs["attention_mask"])
        with pytest.raises(ValueError, match="exactly one of input_ids"):
            wrapped()
        with pytest.raises(TypeError, match="several values"):
            wrapped(inputs["input_ids"], input_ids=inputs["input_ids"])
        with pytest.raises(ValueError, match="input_ids"):
            wrapped(torch.tensor([[5, 1000]]))


def test_float_ids_are_refused_and_huge_ones_do_not_wrap_round():
    wrapped = wrap(tiny_model("bert"))
    inputs = {"input_ids": torch.full((1, 4), 5), "token_type_ids": torch.zeros(1, 4).long()}
    inputs["position_ids"] = torch.arange(4).unsqueeze(0)
    for name, ids in inputs.items():
        with torch.inference_mode():
            with pytest.raises(ValueError, match=f"{name} must be integers, got torch.float32"):
                wrapped(**inputs | {name: ids.float()})
            for shift in (2**32, -(2**32)):
                with pytest.raises(ValueError, match="but the table has"):
                    wrapped(**inputs | {name: ids + shift})


def test_unwrap_restores_everything():
    model = tiny_model("roberta", "ForSequenceClassification")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: set(m.__dict__) for name, m in model.named_modules()}
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        want = model(**inputs).logits
        assert wrap(wrap(model)) is model
        wrapped = model(**inputs).logits
        assert unwrap(unwrap(model)) is model
        have = model(**inputs).logits
    assert largest_difference(wrapped, want) < TOLERANCE
    assert torch.equal(have, want)
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == attributes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    storages = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(storages)) == len(storages)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(family, dtype):
    exact = tiny_model(family)
    stock = copy.deepcopy(exact).to("cuda", dtype)
    wrapped = wrap(copy.deepcopy(exact)).to("cuda", dtype)
    inputs = padded_inputs(SEQLENS, side="left")
    is_token = inputs["attention_mask"].bool()
    on_gpu = {name: tensor.cuda() for name, tensor in inputs.items()}
    with torch.inference_mode():
        reference = exact(**inputs)[0][is_token]
        theirs, ours = stock(**on_gpu)[0].cpu(), wrapped(**on_gpu)[0].cpu()
    assert not ours[~is_token].any()
    rounding = 4 * torch.finfo(dtype).eps
    limit = 2 * largest_difference(theirs[is_token], reference) + rounding
    assert largest_difference(ours[is_token], reference) <= limit


def test_masks_with_holes_under_a_window():
    stock, wrapped = stock_and_wrapped("modernbert")
    inputs = padded_inputs([20, 17, 12], side="right")
    inputs["attention_mask"][0, 3:9] = 0
    with torch.inference_mode(), pytest.warns(FallbackWarning, match="layers with a window"):
        want, have = stock(**inputs), wrapped(**inputs)
    is_token = inputs["attention_mask"].bool()
    assert torch.equal(have.last_hidden_state[is_token], want.last_hidden_state[is_token])
    assert not have.last_hidden_state[~is_token].any()


@pytest.mark.parametrize(
    ("family", "pooling"),
    [("modernbert", "mean"), ("eurobert", "mean"), ("eurobert", "late"), ("ultrabert", "mean")],
)
@pytest.mark.parametrize("side", ["right", "left"])
def test_heads_that_take_a_mean(family, pooling, side):
    stock, wrapped = stock_and_wrapped(
        family, "ForSequenceClassification", classifier_pooling=pooling
    )
    inputs = padded_inputs([9, 1, 17], side=side)
    with torch.inference_mode():
        want, have = stock(**inputs), wrapped(**inputs)
    assert largest_difference(have.logits, want.logits) < TOLERANCE
    packed = {"input_ids": inputs["input_ids"][inputs["attention_mask"].bool()]}
    with pytest.raises(InputError, match="takes a mean over each row"):
        wrapped(**packed, cu_seqlens=torch.tensor([0, 9, 10, 27], dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_frequencies_of_each_kind_of_layer(dtype):
    """Those that a cast rounded, as the stock model uses them."""
    stock, wrapped = stock_and_wrapped("modernbert")
    stock, wrapped = stock.to(dtype).float(), wrapped.to(dtype).float()
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        want, have = stock(**inputs), wrapped(**inputs)
    assert_equal_at_tokens(have.last_hidden_state, want.last_hidden_state, inputs["attention_mask"])
