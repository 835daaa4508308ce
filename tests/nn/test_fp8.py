"""Encoders with GEMMs of E4M3 rows: every family, the bound of inner rows, real embeddings."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from tiny import one_thread  # noqa: F401

import bytetx
from bytetx.checkpoint.demo import demo_checkpoint
from bytetx.checkpoint.weights import Weights
from bytetx.cli.passages import Lognormal, english_passages
from bytetx.errors import InputError
from bytetx.nn.fp8 import inner_bound, takes_fp8
from bytetx.nn.loading import load_checkpoint
from bytetx.nn.transformer import Transformer
from bytetx.ops import native
from bytetx.ops.fp8_linear import Fp8LinearWeight
from bytetx.ops.linear import prepare_linear
from bytetx.ops.norm import LayerNorm, layer_norm
from bytetx.packed import split

# Both operands of a product are up to 2^-4 off, at random: in the mean 0.026 each.
_GEMM_NOISE = 0.037

# Of post-norm layers without a gate; the others are refused.
REFUSED = (
    *("modernbert", "eurobert", "ultrabert", "xlm-roberta-xl", "roberta-prelayernorm"),
    *("nomic_bert", "gte"),
)
FP8_FAMILIES = [name for name in tiny.FAMILIES if name not in REFUSED]


@pytest.mark.feature("Arithmetic", "FP8 on GPUs")
@pytest.mark.parametrize("family", FP8_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_family_stays_near_its_own_f32(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    exact = tiny.load(tiny.save(tiny.tiny_model(family), tmp_path))
    options = {"dtype": dtype, "device": "cpu", "prepack": False, "quantization": "fp8"}
    fp8 = Transformer.from_tensors(exact.spec, exact.weights.cast(dtype), **options)
    weights = fp8.layers.weights
    assert len(weights) == exact.spec.num_layers
    assert all(
        isinstance(w, Fp8LinearWeight)
        for layer in weights
        for w in (layer.qkv, *layer.feed_forward.linears)
    )
    batch = exact.pack(tiny.random_ids([1, 30, 7, 64]))
    seen: list[torch.Tensor] = []
    rows = fp8.forward(batch, on_layer=seen.append)
    assert rows.dtype == dtype and len(seen) == exact.spec.num_layers + 1
    expected = exact.transformer.forward(batch)
    error = (rows.float() - expected).norm() / expected.norm()
    # Six rounded products behind one another at most double what one of each adds up to.
    assert 1e-3 < error < 2 * _GEMM_NOISE * 6**0.5


@pytest.mark.parametrize("k", [32, 384])
def test_no_inner_row_passes_its_bound(k: int) -> None:
    torch.manual_seed(k)
    weight = torch.randn(96, k) + 0.3
    norm = LayerNorm(torch.randn(k), torch.randn(k), 1e-12)
    w = prepare_linear(weight, torch.randn(96), prepack=False)
    bound = inner_bound(w, norm)
    # The worst row there is: along the centred, scaled weights of the output with the largest.
    worst = weight * norm.weight
    x = torch.cat([torch.randn(500, k), worst, -worst, 100 * torch.eye(k)])
    inner = layer_norm(x, norm.weight, norm.bias, eps=1e-12) @ weight.T + w.bias
    assert inner.abs().max() <= bound * 1.0001
    assert inner.abs().max() >= bound * 0.9
    assert inner_bound(replace(w, bias=None), replace(norm, bias=None)) > 0


def test_fp8_says_where_it_cannot_run(tmp_path: Path) -> None:
    folder = tiny.save(tiny.tiny_model("bert"), tmp_path)
    with pytest.raises(InputError, match="dtype fp8 cannot run on cpu: .*; use dtype float16"):
        bytetx.load(folder, device="cpu", dtype="fp8")


def test_fp8_is_for_post_norm_encoders(tmp_path: Path) -> None:
    spec = tiny.load(tiny.save(tiny.tiny_model("bert"), tmp_path)).spec
    assert takes_fp8(spec)
    assert not takes_fp8(replace(spec, layer_spec=replace(spec.layer_spec, norm_placement="pre")))
    assert not takes_fp8(replace(spec, layer=dict(spec.layer) | {"ffn_gate": "gate.{i}"}))


def test_embeddings_of_a_real_checkpoint() -> None:
    """all-MiniLM-L6-v2, by the definition in plain torch: kernels are held to it elsewhere."""
    texts = english_passages(32) + english_passages(16, lengths=Lognormal(12, 0.5, 4, 64))
    checkpoint = load_checkpoint(demo_checkpoint(), device="cpu", dtype="float32")
    exact = bytetx.Model(checkpoint).embed(texts).vectors
    weights = Weights(checkpoint.sentence.folder, checkpoint.spec).cast(torch.float16)
    options = {"dtype": torch.float16, "device": "cpu", "prepack": False, "quantization": "fp8"}
    fp8 = Transformer.from_tensors(checkpoint.spec, weights, **options)
    got = bytetx.Model(replace(checkpoint, transformer=fp8)).embed(texts).vectors
    cosine = (got * exact).sum(1)
    # Rounding to 4 bits leaves 0.026 of a weight and of a feature: of 18 products as much as this.
    assert cosine.mean() >= 0.997 and cosine.min() >= 0.993, (cosine.mean(), cosine.min())


@pytest.mark.gpu
@pytest.mark.parametrize("family", FP8_FAMILIES)
def test_kernels_give_what_the_definition_gives(family: str, tmp_path: Path) -> None:
    if native.why_no_kernel("fp8_linear", torch.device("cuda")) is not None:
        pytest.skip("no kernel for this GPU")
    sizes = {"hidden_size": 96, "intermediate_size": 192}
    folder = tiny.save(tiny.tiny_model(family, **sizes), tmp_path)
    exact = tiny.load(folder)
    ids = tiny.random_ids([1, 30, 7, 64, 2, 50])
    model = bytetx.load(folder, device="cuda", dtype="fp8")
    assert model.info()["dtype"] == "fp8 (float16 outside of GEMMs)"
    options = {"dtype": torch.float16, "device": "cpu", "prepack": False, "quantization": "fp8"}
    weights = exact.weights.cast(torch.float16)
    plain = Transformer.from_tensors(exact.spec, weights, **options)
    expected = split(plain.forward(exact.pack(ids)), exact.pack(ids))
    for rows, row in zip(model.hidden_states(ids), expected, strict=True):
        error = np.linalg.norm(rows[0] - row.float().numpy()) / np.linalg.norm(rows)
        # One f16 rounding apart, features fall to the other side of an E4M3 step.
        assert error < 2 * _GEMM_NOISE * 6**0.5
