"""Encoders with GEMMs of 8-bit integers on a CPU: every family, real embeddings, refusals."""

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from nomic_moe import save_nomic_moe
from tiny import one_thread  # noqa: F401

import bytetx
from bytetx.checkpoint.demo import demo_checkpoint
from bytetx.cli.passages import Lognormal, english_passages
from bytetx.errors import InputError
from bytetx.nn.transformer import Transformer
from bytetx.ops.int8_linear import Int8LinearWeight, why_no_int8_linear

pytestmark = pytest.mark.skipif(
    why_no_int8_linear() is not None, reason=f"int8: {why_no_int8_linear()}"
)

# Rows and weights that are rounded to 8 bits are 0.006 to 0.012 off each, at random.
_GEMM_NOISE = 0.017


@pytest.mark.feature("Arithmetic", "int8 weights on CPUs")
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_stays_near_its_own_f32(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    exact = tiny.load(tiny.save(tiny.tiny_model(family), tmp_path))
    options = {"dtype": dtype, "device": "cpu", "prepack": False, "quantization": "int8"}
    int8 = Transformer.from_tensors(exact.spec, exact.weights.cast(dtype), **options)
    outs = [layer.linears[-1] for layer in int8.layers.weights]
    assert all(isinstance(w, Int8LinearWeight) for w in outs)
    batch = exact.pack(tiny.random_ids([1, 30, 7, 64]))
    rows = int8.forward(batch)
    assert rows.dtype == dtype
    expected = exact.transformer.forward(batch)
    error = (rows.float() - expected).norm() / expected.norm()
    # Eight rounded products behind one another at most double what one of each adds up to.
    assert 1e-4 < error < 2 * _GEMM_NOISE * 8**0.5


def test_vectors_of_real_texts() -> None:
    folder = demo_checkpoint()
    texts = english_passages(200, lengths=Lognormal(60, 0.8, 3, 250))
    expected = bytetx.load(folder, device="cpu").embed(texts).vectors
    model = bytetx.load(folder, device="cpu", dtype="int8")
    assert model.info()["dtype"] in (
        "int8 (bfloat16 outside of GEMMs)",
        "int8 (float32 outside of GEMMs)",
    )
    got = model.embed(texts).vectors
    cosines = (got * expected).sum(1)
    assert cosines.mean() > 0.998 and cosines.min() > 0.995
    # A text's vector does not depend on the other texts.
    np.testing.assert_array_equal(model.embed(texts[7:8]).vectors[0], got[7])


def test_where_it_cannot_run(tmp_path: Path) -> None:
    save_nomic_moe(tmp_path)
    with pytest.raises(InputError, match="dtype int4 is not for the experts of nomic_bert"):
        bytetx.load(tmp_path, device="cpu", dtype="int4")
    with pytest.raises(InputError, match="dtype int8 runs in one process; leave out tp"):
        bytetx.load(demo_checkpoint(), device="cpu", dtype="int8", tp=2)
