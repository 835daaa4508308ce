"""Wrapped models whose layers multiply in FP8: as a Transformer of the same weights in FP8."""

import copy
import pickle
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import transformers
from tiny import random_ids, randomize
from tiny_decoders import tiny_decoder
from torch import nn

import bytetx
from bytetx.checkpoint.families import read_families
from bytetx.checkpoint.spec import build_module_spec
from bytetx.errors import InputError
from bytetx.hf import FallbackWarning
from bytetx.nn import fp8
from bytetx.nn.transformer import Transformer
from bytetx.ops import native
from bytetx.packed import pack

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
IDS = random_ids([20, 1, 33, 7])


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products in FP8 run in plain torch where there is no kernel."""
    monkeypatch.setattr(fp8, "native", SimpleNamespace(why_no_kernel=lambda *_: None))
    yield


def tiny_encoder() -> nn.Module:
    config = transformers.BertConfig(vocab_size=96, num_hidden_layers=2, **SIZES)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    randomize(model)
    return model


def tiny_model(name: str) -> nn.Module:
    model = tiny_encoder() if name == "bert" else tiny_decoder(name)
    for parameter in model.parameters():  # frequencies of rotary embeddings stay in f32
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def base_of(model: nn.Module) -> nn.Module:
    return getattr(model, "base_model", model)


def expected(model: nn.Module) -> list[torch.Tensor]:
    """Hidden states of each text by a Transformer in FP8 of the same weights, which it copies."""
    base = base_of(model)
    tensors = {name: t.detach().clone() for name, t in base.named_parameters()}
    spec = build_module_spec(model.config.to_dict(), read_families())
    options = {"dtype": torch.bfloat16, "device": "cpu", "prepack": False, "quantization": "fp8"}
    transformer = Transformer.from_tensors(spec, tensors, **options)
    has_types = not spec.is_causal
    options = {"has_token_types": has_types, "position_offset": spec.position_offset}
    return [transformer.forward(pack([ids], **options)) for ids in IDS]


def states_of(model: nn.Module) -> list[torch.Tensor]:
    """Hidden states of each text by the model; a fallback is an error."""
    found = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", FallbackWarning)
        for ids in IDS:
            found.append(base_of(model)(torch.tensor([ids])).last_hidden_state[0])
    return found


def assert_near(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """The same products: one that rounds to another number of bf16 may take another code, too."""
    error = (torch.cat(found) - torch.cat(wanted)).float().norm()
    assert error < 0.05 * torch.cat(wanted).float().norm()


@pytest.mark.feature("Wrap", "layers in FP8")
@pytest.mark.parametrize(
    "name", ["bert", "llama", "qwen3", "gpt2", "gpt_neox", "gemma2", "mixtral"]
)
def test_hidden_states_are_those_of_fp8(name: str, on_any_device: None) -> None:
    model = tiny_model(name)
    plain = states_of(bytetx.wrap(copy.deepcopy(model)))
    wanted = expected(model)
    before = {key: t.clone() for key, t in model.state_dict().items()}
    wrapped = bytetx.wrap(model, dtype="fp8")
    found = states_of(wrapped)
    assert_near(found, wanted)
    assert (torch.cat(found) - torch.cat(plain)).abs().max() > 1e-3
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])
    again = pickle.loads(pickle.dumps(wrapped))
    assert_near(states_of(again), found)
    assert torch.equal(torch.cat(states_of(bytetx.wrap(wrapped))), torch.cat(plain))


def test_copies_follow_the_parameters(on_any_device: None) -> None:
    model = bytetx.wrap(tiny_model("llama"), dtype="fp8")
    before = torch.cat(states_of(model))
    layer = base_of(model).layers[0]
    with torch.no_grad():
        layer.mlp.down_proj.weight.mul_(-1)
    changed = torch.cat(states_of(model))
    assert (changed - before).abs().max() > 1e-2
    assert_near([changed], [torch.cat(expected(model))])
    bytetx.unwrap(model)
    stock = base_of(model)(torch.tensor([IDS[0]])).last_hidden_state[0]
    assert (stock - changed[: len(IDS[0])]).abs().max() > 1e-3


def test_generate_has_the_tokens_of_fp8(on_any_device: None) -> None:
    model = bytetx.wrap(tiny_model("llama"), dtype="fp8")
    ids = torch.tensor([IDS[0]])
    (answer,) = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    for end in range(len(IDS[0]), len(answer)):
        with torch.no_grad():
            logits = model(answer[None, :end]).logits[0, -1].float()
        # Sums of other orders take other codes on the way: a tenth of a logit, of either token.
        assert logits.max() - logits[answer[end]] <= 0.2 * logits.abs().max()


def test_what_cannot_run_falls_back_and_says_why() -> None:
    model = tiny_model("llama")
    wanted = base_of(copy.deepcopy(model))(torch.tensor([IDS[0]])).last_hidden_state
    wrapped = bytetx.wrap(model, dtype="fp8")
    with pytest.warns(FallbackWarning, match="dtype fp8 cannot run on cpu"):
        found = base_of(wrapped)(torch.tensor([IDS[0]])).last_hidden_state
    assert torch.equal(found, wanted)
    full = bytetx.wrap(tiny_model("llama").float(), dtype="fp8")
    with pytest.warns(FallbackWarning, match="for models in float16 or bfloat16.*in float32"):
        base_of(full)(torch.tensor([IDS[0]]))
    with pytest.raises(InputError, match="dtype must be one of 'auto', 'fp8', got 'int8'"):
        bytetx.wrap(model, dtype="int8")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert", "llama", "mixtral"])
def test_wrapped_in_fp8_on_a_gpu(name: str) -> None:
    if native.why_no_kernel("fp8_linear", torch.device("cuda")) is not None:
        pytest.skip("no kernel for this GPU")
    model = tiny_model(name)
    wanted = torch.cat(expected(model))
    wrapped = bytetx.wrap(model.to("cuda"), dtype="fp8")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", FallbackWarning)
        rows = [base_of(wrapped)(torch.tensor([ids], device="cuda")) for ids in IDS]
    found = torch.cat([row.last_hidden_state[0] for row in rows]).cpu()
    error = (found - wanted).float().norm(dim=1) / wanted.float().norm(dim=1)
    assert error.median() < 0.1
