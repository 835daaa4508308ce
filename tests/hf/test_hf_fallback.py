"""wrap: when the original forward runs instead, that it says so once, and what wrap refuses."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from hf_models import (  # noqa: F401  (a fixture)
    FAMILIES,
    MAX_POSITIONS,
    largest_difference,
    one_thread,
    padded_inputs,
    tiny_model,
    zeroed,
)
from torch import nn

from bytetx.errors import BytetxError, InputError
from bytetx.hf import FallbackWarning, unwrap, wrap

SEQLENS = [9, 1, 14]


@contextmanager
def says(text):
    """The block gives exactly one FallbackWarning, with `text` in it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(w.message) for w in caught if w.category is FallbackWarning]
    assert len(messages) == 1, messages
    assert text in messages[0]


@contextmanager
def runs_packed():
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("error", FallbackWarning)
        yield


def assert_equals_stock(stock, wrapped, inputs):
    with torch.no_grad():
        want, have = stock(**inputs), wrapped(**inputs)
    is_token = inputs["attention_mask"]
    assert torch.equal(have[0], zeroed(want[0], is_token))


def test_gradients_run_the_original():
    stock = tiny_model("bert")
    wrapped = wrap(copy.deepcopy(stock))
    inputs = padded_inputs(SEQLENS)
    with says("torch.inference_mode()"):
        output = wrapped(**inputs)
        wrapped(**inputs)
    assert torch.equal(output[0], zeroed(stock(**inputs)[0], inputs["attention_mask"]))
    output[0].sum().backward()
    assert wrapped.encoder.layer[0].attention.self.query.weight.grad.abs().sum() > 0
    with runs_packed():
        assert not wrapped(**inputs)[0][1, 1:].any()


def test_training_mode_and_a_single_active_dropout():
    wrapped = wrap(tiny_model("bert"))
    inputs = padded_inputs(SEQLENS)
    wrapped.train()
    with says("training mode"), torch.no_grad():
        wrapped(**inputs)
    wrapped.eval()
    wrapped.encoder.layer[1].output.dropout.train()
    with says("inner module is in training mode"), torch.no_grad():
        wrapped(**inputs)
    wrapped.eval()
    with runs_packed():
        wrapped(**inputs)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"output_attentions": True}, "output_attentions"),
        ({"encoder_hidden_states": torch.zeros(3, 2, 64)}, "encoder_hidden_states"),
        ({"output_hidden_states": [1]}, "selects layers"),
        ({"attention_mask": torch.ones(3, 1, 14, 14, dtype=torch.bool)}, "4 dimensions"),
    ],
)
def test_arguments_that_the_original_takes(extra, text):
    wrapped = wrap(tiny_model("bert", attn_implementation="eager"))
    with says(text), torch.no_grad():
        wrapped(**(padded_inputs(SEQLENS) | extra))
        wrapped(**(padded_inputs(SEQLENS) | extra))


class Scaled(nn.Linear):
    """A linear layer that replaces one of the model."""

    def forward(self, x):
        return 2 * super().forward(x)


def replace_linear(model):
    layer = Scaled(64, 64)
    layer.load_state_dict(model.encoder.layer[1].attention.self.value.state_dict())
    model.encoder.layer[1].attention.self.value = layer


def add_hook(model):
    model.encoder.layer[0].register_forward_hook(lambda module, args, output: output)


def replace_forward(model):
    layer = model.encoder.layer[0].attention.self.query
    layer.forward = lambda x, forward=layer.forward: 2 * forward(x)


def change_eps(model):
    model.encoder.layer[0].output.LayerNorm.eps = 1e-3


def replace_activation(model):
    model.encoder.layer[0].intermediate.intermediate_act_fn = nn.ReLU()


def parametrize(model):
    nn.utils.parametrizations.weight_norm(model.encoder.layer[0].output.dense)


def mix_dtypes(model):
    model.embeddings.LayerNorm.double()


def quantise(model):
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)


CHANGES = {
    replace_linear: "encoder.layer.1.attention.self.value is ",
    add_hook: "encoder.layer.0 has forward hooks",
    replace_forward: "the forward of encoder.layer.0.attention.self.query was replaced",
    replace_activation: "encoder.layer.0.intermediate.intermediate_act_fn is ",
    parametrize: "encoder.layer.0.output.dense is ",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after", "after a call"])
def test_changed_modules_run_the_original(change, when):
    stock, wrapped = tiny_model("bert"), tiny_model("bert")
    inputs = padded_inputs(SEQLENS)
    change(stock)
    if when == "before":
        change(wrapped)
    wrap(wrapped)
    if when == "after a call":
        with runs_packed():
            wrapped(**inputs)
    if when != "before":
        change(wrapped)
    with says(CHANGES[change]):
        assert_equals_stock(stock, wrapped, inputs)
        assert_equals_stock(stock, wrapped, inputs)


@pytest.mark.parametrize(
    ("change", "text"), [(change_eps, "eps is 0.001"), (mix_dtypes, "differ in dtype")]
)
def test_changes_before_wrapping(change, text):
    wrapped = tiny_model("bert")
    change(wrapped)
    with says(text), torch.no_grad():
        try:
            wrap(wrapped)(**padded_inputs(SEQLENS))
        except RuntimeError:  # stock BERT cannot run in mixed dtypes; that is its own answer
            assert change is mix_dtypes


def test_quantised_model_runs_the_original():
    stock, wrapped = tiny_model("bert"), wrap(tiny_model("bert"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        quantise(stock)
        quantise(wrapped)
    with says("quantized"):
        assert_equals_stock(stock, wrapped, padded_inputs(SEQLENS))


def test_undoing_a_change_runs_packed_again():
    wrapped = wrap(tiny_model("bert"))
    inputs = padded_inputs(SEQLENS)
    handle = wrapped.encoder.layer[0].register_forward_hook(lambda *_: None)
    with says("forward hooks"), torch.no_grad():
        wrapped(**inputs)
    handle.remove()
    with runs_packed():
        wrapped(**inputs)


def test_output_capturing_of_transformers_is_no_foreign_change():
    """A stock call that collects hidden states leaves hooks or attributes of transformers' own."""
    model = tiny_model("bert")
    inputs = padded_inputs(SEQLENS)
    with torch.no_grad():
        model(**inputs, output_hidden_states=True)
    wrap(model)
    with runs_packed():
        model(**inputs)
    model(**inputs, output_hidden_states=True)
    with runs_packed():
        model(**inputs, output_hidden_states=True)


def test_weights_changed_in_place_are_seen():
    stock, other = tiny_model("mpnet"), tiny_model("mpnet", num_labels=7)
    wrapped = wrap(copy.deepcopy(stock))
    inputs = padded_inputs([20, 9])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    is_token = inputs["attention_mask"].bool()
    for assign in (False, True):
        with runs_packed():
            wrapped(**inputs)
        wrapped.load_state_dict(other.state_dict(), assign=assign)
        with runs_packed():
            want, have = other(**inputs)[0], wrapped(**inputs)[0]
        assert largest_difference(want[is_token], have[is_token]) < 1e-4
        wrapped.load_state_dict(stock.state_dict())


@pytest.mark.parametrize("family", ["bert", "mpnet", "gte", "t5"])
def test_a_model_moved_in_inference_mode(family):
    """sentence-transformers moves a model to its device inside of encode."""
    stock = tiny_model(family)
    wrapped = wrap(copy.deepcopy(stock))
    inputs = padded_inputs(SEQLENS)
    is_token = inputs["attention_mask"].bool()
    for factor in (1, 2):
        with torch.no_grad():
            for model in (stock, wrapped):
                for parameter in model.parameters():
                    parameter.mul_(factor)
        with runs_packed():
            wrapped.double().float()
            want, have = stock(**inputs)[0], wrapped(**inputs)[0]
        assert largest_difference(want[is_token], have[is_token]) < 1e-4 * factor


def test_a_model_made_in_inference_mode_runs_its_original_forward():
    model = tiny_model("bert", attn_implementation="eager")
    with torch.inference_mode():
        wrapped = wrap(copy.deepcopy(model))
        wrapped(**padded_inputs(SEQLENS))
        with says("attention weights"):
            have = wrapped(**padded_inputs(SEQLENS), output_attentions=True)
        want = model(**padded_inputs(SEQLENS))[0]
        assert torch.equal(have[0], zeroed(want, padded_inputs(SEQLENS)["attention_mask"]))


def test_layers_and_embeddings_changed_in_number():
    wrapped = wrap(tiny_model("bert"))
    stock = tiny_model("bert")
    inputs = padded_inputs(SEQLENS)
    is_token = inputs["attention_mask"].bool()
    for model in (stock, wrapped):
        model.encoder.layer = model.encoder.layer[:1]
        torch.manual_seed(3)
        model.resize_token_embeddings(70)
    with runs_packed():
        want, have = stock(**inputs)[0], wrapped(**inputs)[0]
    assert largest_difference(want[is_token], have[is_token]) < 1e-4


def test_left_padding_under_a_first_token_head_runs_the_original():
    stock = tiny_model("bert", "ForSequenceClassification")
    wrapped = wrap(copy.deepcopy(stock))
    with says("padding_side = 'right'"):
        assert_equals_stock(stock, wrapped, padded_inputs(SEQLENS, side="left"))
    with runs_packed():
        wrapped(**padded_inputs([5, 5], side="left"))
        wrapped(**padded_inputs([5, 0, 2]))


ROTARY = ("modernbert", "eurobert", "ultrabert", "nomic_bert", "gte", "jina_embeddings_v3")
UNBOUNDED = [name for name in (*ROTARY, "deberta-v2", "deberta-v3") if name in FAMILIES]


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
@pytest.mark.parametrize("family", UNBOUNDED)
def test_texts_beyond_the_tables_of_a_model_without_learnt_positions(family, head):
    """transformers runs them, so wrap does; columns of pads alone are not beyond a table."""
    stock = tiny_model(family, head)
    wrapped = wrap(copy.deepcopy(stock))
    long = padded_inputs([5, MAX_POSITIONS + 9])
    for inputs in (padded_inputs([5, MAX_POSITIONS]), padded_inputs([5, 9], width=100)):
        with runs_packed():
            assert largest_difference(wrapped(**inputs)[0], zeroed_as(stock, inputs)) < 1e-4
    with says(f"{MAX_POSITIONS + 9} "), torch.inference_mode():
        assert torch.equal(wrapped(**long)[0], zeroed_as(stock, long))
    ids = torch.full((1, 2 * MAX_POSITIONS), 4)
    with runs_packed():  # each of two sequences is within
        wrapped.base_model(ids, cu_seqlens=torch.tensor([0, MAX_POSITIONS, 2 * MAX_POSITIONS]))
    with pytest.raises(InputError, match="it cannot: 95 "), torch.inference_mode():
        wrapped.base_model(ids, cu_seqlens=torch.tensor([0, 95, 96]))
    if family in ROTARY:
        far = {"input_ids": ids[:, :4], "position_ids": torch.arange(4)[None] + MAX_POSITIONS}
        with says(f"{MAX_POSITIONS + 4} positions"), torch.inference_mode():
            assert torch.equal(wrap(unwrap(wrapped))(**far)[0], stock(**far)[0])


def zeroed_as(stock, inputs):
    """The stock model's first output with the zeros that wrap puts at pads."""
    with torch.inference_mode():
        want = stock(**inputs)[0]
    return zeroed(want, inputs["attention_mask"]) if want.dim() == 3 else want


def test_heads_that_read_pads_run_the_original():
    question = tiny_model("bert", "ForQuestionAnswering")
    spans = {"start_positions": torch.tensor([1, 0, 2]), "end_positions": torch.tensor([2, 0, 3])}
    choice = tiny_model("electra", "ForMultipleChoice", summary_type="mean")
    choices = {name: tensor.unsqueeze(0) for name, tensor in padded_inputs(SEQLENS).items()}
    for stock, inputs in ((question, padded_inputs(SEQLENS) | spans), (choice, choices)):
        wrapped = wrap(copy.deepcopy(stock))
        with says("at pads"):
            assert_equals_stock(stock, wrapped, inputs)


def test_autocast_runs_the_original():
    stock = tiny_model("bert")
    wrapped = wrap(copy.deepcopy(stock))
    with says("autocast"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equals_stock(stock, wrapped, padded_inputs(SEQLENS))


def test_decoders_and_damaged_weights_run_the_original():
    decoder = tiny_model("bert", is_decoder=True)
    with says("is_decoder"):
        assert_equals_stock(decoder, wrap(copy.deepcopy(decoder)), padded_inputs([4, 4]))
    damaged = wrap(tiny_model("bert"))
    damaged.encoder.layer[0].output.dense.weight.data = torch.full((64, 96), float("nan"))
    with says("not finite"), torch.no_grad():
        inputs = padded_inputs(SEQLENS)
        assert damaged(**inputs)[0][inputs["attention_mask"].bool()].isnan().all()


def test_wrap_refuses_what_it_cannot_run():
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    rembert = transformers.RemBertModel(transformers.RemBertConfig(**sizes, intermediate_size=8))
    for model in (rembert, nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=r"supported are BertModel.*SentenceTransformer"):
            wrap(model)
    with pytest.raises(TypeError, match="got str"):
        wrap("bert-base-uncased")
    with pytest.raises(TypeError, match="got NoneType"):
        unwrap(None)
    model = tiny_model("bert")
    model.encoder.layer[0]._hf_hook = object()
    with pytest.raises(BytetxError, match="accelerate hook"):
        wrap(model)
    replaced = tiny_model("bert")
    replaced.forward = lambda *args, **kwargs: None
    with pytest.raises(BytetxError, match="already replaced"):
        wrap(replaced)


def test_nomic_bert_with_experts_is_refused():
    """transformers has no class for NomicBERT v2; its checkpoint's own code is not replaced."""
    config = {"num_experts": 4, "n_embd": 48, "n_head": 3, "n_layer": 2}
    with pytest.raises(
        BytetxError, match=r"no experts, the config says num_experts=4.*bytetx.load"
    ):
        wrap(tiny_model("nomic_bert", **config))
    model = tiny_model("nomic_bert")
    own = type("NomicBertModel", (type(model),), {})
    own.__module__ = "transformers_modules.nomic.modeling_hf_nomic_bert"
    model.__class__ = own
    for key, value in config.items():
        setattr(model.config, key, value)
    text = r"code of its checkpoint \(transformers_modules.*bytetx.load.*NomicBERT v2"
    with pytest.raises(TypeError, match=text):
        wrap(nn.Sequential(model))


def test_an_old_transformers_is_refused(monkeypatch):
    import transformers

    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(BytetxError, match=r"needs transformers 5\.0 or newer, found 4\.57\.1"):
        wrap(tiny_model("bert"))
