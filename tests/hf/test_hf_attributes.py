"""wrap: whatever a stock forward reads beside parameters, changed before or after, counts."""

import copy
import types
import warnings
from contextlib import contextmanager

import pytest
import torch
from hf_models import (
    FAMILIES,
    largest_difference,
    one_thread,  # noqa: F401  (a fixture)
    padded_inputs,
    tiny_model,
)
from tiny_decoders import tiny_decoder
from torch import nn

from bytetx.hf import FallbackWarning, unwrap, wrap

TOLERANCE = 1e-4  # of last hidden states in fp32: DESIGN.md, "Numbers"
NAMES = [
    *(
        "bert",
        "roberta",
        "distilbert",
        "mpnet",
        "nomic_bert",
        "t5",
        "gpt2-scales",
        "gpt_neo",
        "gptj",
        "gpt_neox",
    ),
    *("opt", "llama-dynamic", "qwen3-window"),
]
SEQLENS = [9, 1, 14]


def model_of(name):
    return tiny_model(name) if name in FAMILIES else tiny_decoder(name, "Model")


def places_of(model):
    """(module name, attribute) once a class: the last module's, for layers differ in depth."""
    places = {}
    for module_name, module in model.named_modules():
        if module_name.split(".")[0] == "pooler" or type(module) in (nn.Linear, nn.Dropout):
            continue
        names = [n for n in module.__dict__ if not n.startswith("_")]
        names += [n for n, buffer in module._buffers.items() if buffer is not None]
        places.update({(type(module), n): (module_name, n) for n in names})
    return places.values()


def other_value(value):
    """Another value of the same kind, or None where there is none to think of."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value * 1.7 + 0.01
        case str():
            return {"global": "local", "full_attention": "sliding_attention"}.get(value)
        case torch.Tensor() if value.dtype == torch.bool:
            return ~value
        case torch.Tensor() if value.is_floating_point():
            return value * 1.3
        case torch.Tensor():
            return (value + 1).remainder(2)
        case types.BuiltinFunctionType() | types.FunctionType():
            return torch.relu
        case _:
            return None


def hidden_states(model, inputs):
    with torch.inference_mode():
        return model(**inputs)[0][inputs["attention_mask"].bool()]


def is_noticed_or_equal(want, wrapped, inputs):
    wrapped.forward.notices.said.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        have = hidden_states(wrapped, inputs)
    said = [str(w.message) for w in caught if w.category is FallbackWarning]
    return bool(said) or largest_difference(have, want) < TOLERANCE


@contextmanager
def changed(model, place, *, in_place):
    """While it is open, the place holds another value; False where there is none."""
    module, name = model.get_submodule(place[0]), place[1]
    value = getattr(module, name)
    other = other_value(value)
    if in_place:
        before = value.clone()
        value.copy_(other)
    elif other is not None:
        setattr(module, name, other)
    try:
        yield other is not None
    finally:
        if in_place:
            value.copy_(before)
        elif other is not None:
            setattr(module, name, value)


@pytest.mark.parametrize("name", NAMES)
def test_every_attribute_that_is_changed_counts(name):
    stock, inputs = model_of(name), padded_inputs(SEQLENS)
    wrapped = copy.deepcopy(stock)
    unseen = []
    for place in places_of(stock):
        is_tensor = isinstance(getattr(stock.get_submodule(place[0]), place[1]), torch.Tensor)
        for in_place in (False, True) if is_tensor else (False,):
            with changed(stock, place, in_place=in_place) as is_changed:
                try:
                    want = hidden_states(stock, inputs)
                except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):
                    continue  # the stock model cannot run like that
            if not is_changed:
                continue
            with changed(wrapped, place, in_place=in_place):
                if not is_noticed_or_equal(want, wrap(wrapped), inputs):
                    unseen.append((*place, in_place, "before"))
            hidden_states(wrapped, inputs)
            with changed(wrapped, place, in_place=in_place):
                if not is_noticed_or_equal(want, wrapped, inputs):
                    unseen.append((*place, in_place, "after"))
            unwrap(wrapped)
    assert not unseen
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        wrap(wrapped)(**inputs)  # nothing is left of the changes


def replace_method(model):
    layer = model.get_submodule("encoder.layer.1")
    layer.feed_forward_chunk = lambda x: x


def delete_module(model):
    layer = model.get_submodule("encoder.layer.1.intermediate")
    del layer.intermediate_act_fn
    layer.intermediate_act_fn = torch.relu


def swap_config(model):
    attention = model.get_submodule("encoder.layer.1.attention.self")
    attention.config = copy.deepcopy(model.config)
    attention.config.hidden_act = "relu"


def repeat_layer(model):
    model.encoder.layer.append(copy.deepcopy(model.encoder.layer[0]))


CHANGES = [replace_method, delete_module, swap_config, repeat_layer]


@pytest.mark.parametrize("change", CHANGES)
def test_replaced_methods_functions_and_configs_run_the_original(change):
    stock, wrapped = tiny_model("bert"), wrap(tiny_model("bert"))
    inputs = padded_inputs(SEQLENS)
    hidden_states(wrapped, inputs)
    for model in (stock, wrapped):
        change(model)
    want = hidden_states(stock, inputs)
    with pytest.warns(FallbackWarning):
        assert torch.equal(hidden_states(wrapped, inputs), want)


def test_a_forward_replaced_in_its_class(monkeypatch):
    """As patches do that bring their own attention."""
    from transformers.models.bert import modeling_bert

    own = modeling_bert.BertIntermediate.forward
    stock, wrapped = tiny_model("bert"), wrap(tiny_model("bert"))
    inputs = padded_inputs(SEQLENS)
    hidden_states(wrapped, inputs)
    with monkeypatch.context() as patch:
        patch.setattr(modeling_bert.BertIntermediate, "forward", lambda self, x: -own(self, x))
        want = hidden_states(stock, inputs)
        with pytest.warns(FallbackWarning, match="has a forward of test_hf_attributes"):
            assert torch.equal(hidden_states(wrapped, inputs), want)


def test_config_keys_that_no_layer_reads_keep_the_plan():
    wrapped = wrap(tiny_model("bert"))
    plan = wrapped.forward.current_plan()
    wrapped.config.output_hidden_states = True
    wrapped.config.name_or_path = "elsewhere"
    assert wrapped.forward.current_plan() is plan
    wrapped.config.layer_norm_eps = 0.1
    assert wrapped.forward.current_plan() is not plan


@pytest.mark.parametrize("name", ["llama-yarn", "gpt_neox"])
def test_a_model_cast_with_its_frequencies_turns_as_the_stock_model(name):
    """`.to(bfloat16)` rounds inv_freq, which far positions show: both models turn by it."""
    stock = model_of(name).to(torch.bfloat16)
    wrapped = wrap(copy.deepcopy(stock))
    inputs = {"input_ids": torch.arange(90).remainder(50)[None] + 4}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        # In f32, where nothing but the frequencies, which stay rounded, is of lower precision.
        want, have = stock.float()(**inputs)[0], wrapped.float()(**inputs)[0]
    assert largest_difference(have, want) < TOLERANCE


def test_dynamic_frequencies_that_the_forward_itself_changes_keep_the_plan():
    """A long text grows them, a short one puts them back."""
    stock = tiny_decoder("llama-dynamic", "Model")
    wrapped = wrap(copy.deepcopy(stock))
    long = {"input_ids": torch.arange(120).remainder(50)[None] + 4}
    short = {"input_ids": long["input_ids"][:, :20]}
    plan = wrapped.forward.current_plan()
    with torch.inference_mode():
        with pytest.warns(FallbackWarning, match="120 positions are more"):
            wrapped(**long)
        for inputs in (short, long, short):
            want, have = stock(**inputs)[0], wrapped(**inputs)[0]
            assert largest_difference(have, want) < TOLERANCE
    assert wrapped.forward.current_plan() is plan
