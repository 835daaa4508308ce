"""Disentangled attention on Hopper against float64: lengths, buckets, heads, broken values."""

import math

import pytest
import torch
from captured import assert_replays_give_the_same_bits
from test_disentangled import random_case, wanted

from bytetx.ops.disentangled import (
    DISENTANGLED_ATTENTION,
    disentangled_attention,
    log_buckets,
)

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]
LENGTHS = {
    "edges": [0, 1, 2, 63, 64, 65, 0, 127, 128, 129, 31, 32, 33, 191, 192, 193, 511, 3, 0],
    "short": [9, 4, 1, 17, 30, 2, 5] * 20,
    "long": [1300, 7, 512],
    "one": [1],
}


def on_gpu(tensors):
    return tuple(None if t is None else t.cuda() for t in tensors)


def poisoned(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The same rows with NaN behind them."""
    return torch.cat([tensor, tensor.new_full((rows, *tensor.shape[1:]), float("nan"))])


def assert_close(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Weights and results are rounded to the dtype; see also the families' test against float64."""
    bound = 4 * torch.finfo(found.dtype).eps * max(1.0, float(exact.abs().max()))
    assert (found.double() - exact).abs().max() < bound


def keep(tables, terms: str):
    """Both tables, the one of that name, or none of them; None stands for the others."""
    names = ("pos_k", "pos_q")
    return tuple(t if terms in ("both", n) else None for t, n in zip(tables, names, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 72, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", [(0, 50), (256, 512), (8, 40)])
def test_against_float64(dtype, head_dim: int, lengths: str, kind: tuple[int, int]) -> None:
    torch.manual_seed(1)
    seqlens = LENGTHS[lengths]
    qkv, tables, buckets, cu_seqlens = random_case(seqlens, 2, head_dim, *kind, dtype)
    scale = 0.5 * head_dim**-0.5
    exact = wanted(*on_gpu(qkv), *on_gpu(tables), buckets.cuda(), seqlens, scale).cpu()
    padded = tuple(poisoned(t, 70).cuda() for t in qkv)
    call = (*padded, *on_gpu(tables), buckets.cuda(), cu_seqlens.cuda())
    device = padded[0].device
    assert DISENTANGLED_ATTENTION.choose(device, dtype, head_dim, True, True).name == "native"
    torch.use_deterministic_algorithms(True)  # new memory holds NaN
    try:
        found = disentangled_attention(*call, max_seqlen=max(seqlens), softmax_scale=scale)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[sum(seqlens) :].isnan().all()  # as memory was: neither read nor written
    assert_close(found[: sum(seqlens)].cpu(), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("terms", ["pos_k", "pos_q", "none"])
def test_fewer_terms(terms: str, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    qkv, tables, buckets, cu_seqlens = random_case([70, 300], 3, head_dim, 16, 100, dtype)
    qkv, tables, buckets = on_gpu(qkv), on_gpu(keep(tables, terms)), buckets.cuda()
    exact = wanted(*qkv, *tables, buckets, [70, 300], 0.06)
    call = (*qkv, *tables, buckets, cu_seqlens.cuda())
    found = disentangled_attention(*call, max_seqlen=300, softmax_scale=0.06)
    assert_close(found, exact)


@pytest.mark.parametrize("kind", ["a longer span", "one bucket"])
def test_buckets_of_other_spans(kind: str) -> None:
    torch.manual_seed(3)
    seqlens = LENGTHS["edges"]
    qkv, tables, _, cu_seqlens = random_case(seqlens, 2, 64, 16, 100, torch.float16)
    is_one = kind == "one bucket"
    buckets = torch.zeros(2 * 511 - 1, dtype=torch.int32) if is_one else log_buckets(16, 100, 2000)
    qkv, tables, buckets = on_gpu(qkv), on_gpu(tables), buckets.cuda()
    exact = wanted(*qkv, *tables, buckets, seqlens, 0.06)
    call = (*qkv, *tables, buckets, cu_seqlens.cuda())
    assert_close(disentangled_attention(*call, max_seqlen=511, softmax_scale=0.06), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("terms", ["both", "pos_k", "pos_q"])
def test_terms_beyond_the_range_of_halves(terms: str, head_dim: int, dtype: torch.dtype) -> None:
    """Terms of 1e5 of both signs, and a scale by which none of them decides a row alone."""
    torch.manual_seed(4)
    seqlens = LENGTHS["edges"]
    qkv, tables, buckets, cu_seqlens = random_case(seqlens, 2, head_dim, 16, 100, dtype)
    tables = on_gpu(keep([t * (1e5 / head_dim**0.5) for t in tables], terms))
    qkv, buckets = on_gpu(qkv), buckets.cuda()
    exact = wanted(*qkv, *tables, buckets, seqlens, 1e-5)
    call = (*qkv, *tables, buckets, cu_seqlens.cuda())
    assert_close(disentangled_attention(*call, max_seqlen=511, softmax_scale=1e-5), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_broken_values_stay_in_their_row_or_sequence(
    operand: str, broken: float, dtype: torch.dtype
) -> None:
    """A broken query is its own row's affair, a key or a value its sequence's."""
    torch.manual_seed(5)
    seqlens, row = [5, 9, 100, 3, 200, 40], 14 + 30
    qkv, tables, buckets, cu_seqlens = random_case(seqlens, 2, 64, 16, 100, dtype)
    qkv, tables, buckets = on_gpu(qkv), on_gpu(tables), buckets.cuda()
    clean = wanted(*qkv, *tables, buckets, seqlens, 0.06)
    qkv["qkv".index(operand)][row] = broken
    call = (*qkv, *tables, buckets, cu_seqlens.cuda())
    found = disentangled_attention(*call, max_seqlen=200, softmax_scale=0.06)
    touched = torch.zeros(sum(seqlens), dtype=torch.bool, device="cuda")
    touched[row if operand == "q" else slice(14, 114)] = True
    assert_close(found[~touched], clean[~touched])
    if math.isnan(broken):
        assert found[touched].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.float16, 40), (torch.float16, 128)]
)
@pytest.mark.parametrize("lengths", ["edges", "short", "long"])
def test_batch_mates_change_nothing_and_graphs(
    lengths: str, dtype: torch.dtype, head_dim: int
) -> None:
    torch.manual_seed(6)
    seqlens = LENGTHS[lengths]
    qkv, tables, buckets, cu_seqlens = random_case(seqlens, 2, head_dim, 16, 100, dtype)
    qkv, tables, buckets = on_gpu(qkv), on_gpu(tables), buckets.cuda()

    def run(qkv, cu_seqlens):
        return disentangled_attention(
            *qkv, *tables, buckets, cu_seqlens, max_seqlen=max(seqlens), softmax_scale=0.06
        )

    bounds = cu_seqlens.cuda()
    assert_replays_give_the_same_bits(lambda: run(qkv, bounds))
    together, start = run(qkv, bounds), 0
    for n in filter(None, seqlens):
        own = tuple(t[start : start + n] for t in qkv)
        alone = run(own, torch.tensor([0, n], dtype=torch.int32, device="cuda"))
        assert torch.equal(alone, together[start : start + n])
        start += n
