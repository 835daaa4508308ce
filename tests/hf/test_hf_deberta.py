"""wrap of DeBERTa: tables that are computed of parameters follow them; every head; its options."""

import copy

import pytest
import torch
from hf_models import (  # noqa: F401  (fixtures)
    FAMILIES,
    fallbacks_are_errors,
    largest_difference,
    one_thread,
    padded_inputs,
    tiny_model,
    zeroed,
)

from bytetx.hf import FallbackWarning, unwrap, wrap

TOLERANCE = 1e-4  # of last hidden states in fp32, which are of order 1: DESIGN.md, "Numbers"
SEQLENS = [9, 1, 23, 14]
DEBERTAS = [name for name in FAMILIES if "deberta" in name]


def assert_agree(stock, wrapped, inputs):
    is_token = inputs["attention_mask"].bool()
    with torch.inference_mode():
        want, have = stock(**inputs)[0], wrapped(**inputs)[0]
    assert largest_difference(have[is_token], want[is_token]) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *((family, "in place") for family in DEBERTAS),
        *(("deberta-v2", way) for way in ("state_dict", "load_state_dict", "replaced")),
    ],
)
def test_every_parameter_that_is_changed_counts(family, way):
    stock = tiny_model(family)
    wrapped = wrap(copy.deepcopy(stock))
    inputs = padded_inputs(SEQLENS)
    for name, parameter in stock.named_parameters():
        with torch.inference_mode():
            before = wrapped(**inputs)[0]
        own = wrapped.get_parameter(name)
        entry = wrapped.state_dict()[name]
        with torch.no_grad():
            parameter.add_(0.3 * torch.randn_like(parameter))
            if way == "in place":
                own.copy_(parameter)
            elif way == "state_dict":
                entry.copy_(parameter)
            elif way == "load_state_dict":
                wrapped.load_state_dict({name: parameter}, strict=False)
            else:
                own.data = parameter.detach().clone()
        assert_agree(stock, wrapped, inputs)
        with torch.inference_mode():
            assert largest_difference(wrapped(**inputs)[0], before) > 1e-6, name


@pytest.mark.parametrize("family", DEBERTAS)
def test_a_change_of_nothing_keeps_the_plan(family):
    wrapped = wrap(tiny_model(family))
    plan = wrapped.forward.current_plan()
    wrapped.state_dict()
    with torch.inference_mode():
        wrapped(**padded_inputs(SEQLENS))
    assert wrapped.forward.current_plan() is plan


OPTIONS = {
    "c2p": {"pos_att_type": ["c2p"]},
    "p2c": {"pos_att_type": ["p2c"]},
    "no terms": {"pos_att_type": None},
    "no relative positions": {"relative_attention": False},
    "a bucket a distance": {"position_buckets": -1, "max_relative_positions": 9},
    "own projections": {"share_att_key": False},
    "absolute positions": {"position_biased_input": True},
    "no norm of positions": {"norm_rel_ebd": "none"},
    "no token types": {"type_vocab_size": 0},
    "wide convolution": {"conv_kernel_size": 5, "conv_act": "gelu"},
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_config(option, side):
    stock = tiny_model("deberta-v2", **OPTIONS[option])
    assert_agree(stock, wrap(copy.deepcopy(stock)), padded_inputs(SEQLENS, side=side))


@pytest.mark.parametrize("family", ["deberta", "deberta-v3"])
def test_masked_lm_without_a_decoder_of_its_own(family):
    stock = tiny_model(family, "ForMaskedLM", legacy=False)
    assert hasattr(stock, "lm_predictions")
    assert_agree(stock, wrap(copy.deepcopy(stock)), padded_inputs(SEQLENS))


@pytest.mark.parametrize("family", DEBERTAS)
def test_a_mask_with_holes_runs_the_original(family):
    stock = tiny_model(family)
    wrapped = wrap(copy.deepcopy(stock))
    inputs = padded_inputs(SEQLENS)
    inputs["attention_mask"][2, 4:7] = 0
    with torch.inference_mode(), pytest.warns(FallbackWarning, match="distances of tokens"):
        have = wrapped(**inputs)[0]
    with torch.inference_mode():
        assert torch.equal(have, zeroed(stock(**inputs)[0], inputs["attention_mask"]))


@pytest.mark.parametrize("family", DEBERTAS)
def test_unwrap_restores_everything(family):
    stock = tiny_model(family, "ForSequenceClassification")
    model = copy.deepcopy(stock)
    inputs = padded_inputs(SEQLENS)
    with torch.inference_mode():
        wrap(model)(**inputs)
        assert unwrap(model) is model
        assert torch.equal(model(**inputs).logits, stock(**inputs).logits)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    have, want = model.state_dict(), stock.state_dict()
    assert have.keys() == want.keys()
    assert all(torch.equal(have[name], want[name]) for name in want)
