"""Weights that are read as rows of codes: what layers hold is what the file says."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import write_blocks
from tiny import random_ids, save, tiny_model
from tiny_decoders import tiny_decoder
from torch import Tensor

import bytetx
from bytetx.checkpoint.files import resolve_checkpoint
from bytetx.checkpoint.weights import Weights
from bytetx.errors import CheckpointError
from bytetx.nn.coded_tensors import read_coded
from bytetx.nn.loading import LoadedCheckpoint, load_checkpoint, load_spec
from bytetx.nn.transformer import Transformer
from bytetx.ops.coded_rows import round_rows
from bytetx.ops.gated import GatedWeight
from bytetx.ops.grouped_linear import GroupedWeight, prepare_grouped_linear
from bytetx.ops.linear import prepare_linear
from bytetx.ops.panel_linear import why_no_panels

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(
    why_no_panels() is not None, reason=f"weights in groups: {why_no_panels()}"
)

BITS = {"int8": 8, "int4": 4}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of GGUF files are kept below it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def held(model: LoadedCheckpoint) -> list[list[Tensor]]:
    """The matrices that the layers stand for."""
    found = []
    for layer in model.transformer.layers.weights:
        fused = [w.fused if isinstance(w, GatedWeight) else w for w in layer.linears]
        assert all(isinstance(w, GroupedWeight) for w in fused)
        found.append([w.restored for w in fused])
    return found


def saved(folder: Path) -> tuple[Transformer, list[list[Tensor]]]:
    spec = load_spec(folder)
    weights = Weights(folder, spec).cast(torch.float32)
    model = Transformer.from_tensors(
        spec, weights, dtype=torch.float32, device="cpu", prepack=False
    )
    return model, [[w.dense.weight for w in layer.linears] for layer in model.layers.weights]


@pytest.mark.feature("Checkpoints", "GGUF codes kept as they are by int8 and int4")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("Q4_0", "int4"), ("Q4_1", "int4"), ("Q4_0", "int8"), ("Q5_0", "int8"), ("Q8_0", "int8")],
)
def test_layers_hold_the_values_of_a_gguf_file(kind: str, dtype: str, tmp_path: Path) -> None:
    """q and k in the order of transformers' rows, gates and values in turn."""
    file = write_blocks(tmp_path / "model.gguf", {"": kind})
    plain, wanted = saved(resolve_checkpoint(file))
    model = load_checkpoint(resolve_checkpoint(file), device="cpu", dtype=dtype)
    for got, of_layer in zip(held(model), wanted, strict=True):
        for one, other in zip(got, of_layer, strict=True):
            assert torch.equal(one, other)
    coded = model.transformer.embeddings.coded
    assert coded is not None and model.heads.lm is not None
    if dtype == "int8":
        assert torch.equal(coded.restored, plain.embeddings.word)
    assert bytetx.load(file, device="cpu", dtype=dtype).info()["unused_tensors"] == []


@pytest.mark.parametrize("dtype", BITS)
def test_formats_are_mixed_in_one_matrix(dtype: str, tmp_path: Path) -> None:
    """As Q4_K_M does: q and k keep their codes, v is rounded from its numbers."""
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q6_K", "": "Q4_K"}
    file = write_blocks(tmp_path / "model.gguf", kinds)
    _, wanted = saved(resolve_checkpoint(file))
    model = load_checkpoint(resolve_checkpoint(file), device="cpu", dtype=dtype)
    near = {"int8": 0.01, "int4": 0.09}[dtype]
    for got, of_layer in zip(held(model), wanted, strict=True):
        for one, other in zip(got, of_layer, strict=True):
            assert ((one - other).norm(dim=1) <= near * other.norm(dim=1)).all()
        if dtype == "int4":  # q and k, and gates with values: only f16 scales differ
            for one, other in ((got[0][:320], of_layer[0][:320]), (got[2], of_layer[2])):
                assert ((one - other).norm(dim=1) <= 6e-4 * other.norm(dim=1)).all()


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "phi3"])
def test_numbers_are_rounded_from_those_of_the_file(name: str, dtype: str, tmp_path: Path) -> None:
    """In f32, whatever the model's dtype is."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    folder = save(tiny_decoder(name, **sizes), tmp_path)
    plain, wanted = saved(folder)
    model = load_checkpoint(folder, device="cpu", dtype=dtype)

    def rounded(matrix: Tensor, bits: int) -> Tensor:
        weight = prepare_linear(matrix.contiguous(), prepack=False)
        return prepare_grouped_linear(weight, bits=bits).restored

    for got, of_layer in zip(held(model), wanted, strict=True):
        for one, other in zip(got, of_layer, strict=True):
            assert torch.equal(one, rounded(other, BITS[dtype]))
    coded = model.transformer.embeddings.coded
    assert coded is not None and torch.equal(coded.restored, rounded(plain.embeddings.word, 8))


def test_an_encoder_has_its_biases(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    folder = save(tiny_model("bert", **sizes), tmp_path)
    model = load_checkpoint(folder, device="cpu", dtype="int4")
    _, wanted = saved(folder)
    for got, of_layer in zip(held(model), wanted, strict=True):
        for one, other in zip(got, of_layer, strict=True):
            weight = prepare_linear(other, prepack=False)
            assert torch.equal(one, prepare_grouped_linear(weight, bits=4).restored)
    assert all(w.bias is not None for w in model.transformer.layers.weights[0].linears)


@pytest.mark.parametrize("dtype", BITS)
def test_a_number_that_is_not_finite_is_named(dtype: str, tmp_path: Path) -> None:
    decoder = tiny_decoder("llama", hidden_size=64, intermediate_size=96)
    with torch.no_grad():
        decoder.model.layers[1].mlp.down_proj.weight[3, 5] = torch.nan
    folder = save(decoder, tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj.*not finite"):
        load_checkpoint(folder, device="cpu", dtype=dtype)


def test_what_is_added_to_a_tensor_is_rounded_with_it(tmp_path: Path) -> None:
    folder = save(tiny_decoder("llama", hidden_size=64, intermediate_size=96), tmp_path)
    weights = Weights(folder, load_spec(folder)).cast(torch.bfloat16)
    name = "layers.0.mlp.down_proj.weight"

    class One:
        needs_all = False

        def apply_to(self, weight: Tensor, part: object) -> None:
            weight += 1

    exact = Weights(folder, load_spec(folder)).cast(torch.float32)[name]
    weights._added = {name: [One()]}  # type: ignore[dict-item]
    assert torch.equal(read_coded(weights, name, 4), round_rows(exact + 1, 4))
    assert name in weights.used


def test_tokens_are_those_of_the_float_model(tmp_path: Path) -> None:
    file = write_blocks(tmp_path / "model.gguf", {"": "Q8_0"})
    params = bytetx.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = random_ids([9, 3, 17])
    models = [bytetx.load(file, device="cpu", dtype=dtype) for dtype in ("float32", "int8")]
    scores = [[one.log_likelihood for one in m.score(prompts)] for m in models]
    np.testing.assert_allclose(scores[1], scores[0], rtol=0.02)
    assert len(models[1].generate(prompts, params)) == 3
