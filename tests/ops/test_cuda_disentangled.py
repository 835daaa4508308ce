"""Disentangled attention on Hopper against float64: lengths, buckets, heads, broken padding."""

import pytest
import torch
from captured import assert_replays_give_the_same_bits
from test_disentangled import random_case, wanted

from bytetx.ops.disentangled import DISENTANGLED_ATTENTION, disentangled_attention

pytestmark = pytest.mark.gpu

LENGTHS = {
    "edges": [0, 1, 2, 63, 64, 65, 0, 127, 128, 129, 31, 32, 33, 191, 192, 193, 3, 0],
    "short": [9, 4, 1, 17, 30, 2, 5] * 20,
    "long": [1300, 7, 512],
    "one": [1],
}


def on_gpu(tensors):
    return tuple(None if t is None else t.cuda() for t in tensors)


def poisoned(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The same rows with NaN behind them."""
    return torch.cat([tensor, tensor.new_full((rows, *tensor.shape[1:]), float("nan"))])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 32, 64, 72, 128])
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
    found = disentangled_attention(*call, max_seqlen=max(seqlens), softmax_scale=scale)
    found = found[: sum(seqlens)].cpu().double()
    # Weights and results are rounded to the dtype; see also the families' test against float64.
    bound = 4 * torch.finfo(dtype).eps * max(1.0, float(exact.abs().max()))
    assert (found - exact).abs().max() < bound


@pytest.mark.parametrize("terms", ["pos_k", "pos_q", "none"])
def test_fewer_terms(terms: str) -> None:
    qkv, tables, buckets, cu_seqlens = random_case([70, 300], 3, 64, 16, 100, torch.float16)
    tables = tuple(
        t if terms == n else None for t, n in zip(tables, ("pos_k", "pos_q"), strict=True)
    )
    exact = wanted(*qkv, *tables, buckets, [70, 300], 0.06)
    call = (*on_gpu(qkv), *on_gpu(tables), buckets.cuda(), cu_seqlens.cuda())
    found = disentangled_attention(*call, max_seqlen=300, softmax_scale=0.06)
    assert (found.cpu().double() - exact).abs().max() < 4e-3


def test_batch_mates_change_nothing_and_graphs() -> None:
    seqlens = [40, 257, 5, 128]
    qkv, tables, buckets, cu_seqlens = random_case(seqlens, 2, 64, 16, 100, torch.bfloat16)
    qkv, tables, buckets = on_gpu(qkv), on_gpu(tables), buckets.cuda()

    def run(qkv, cu_seqlens):
        return disentangled_attention(
            *qkv, *tables, buckets, cu_seqlens, max_seqlen=257, softmax_scale=0.06
        )

    bounds = cu_seqlens.cuda()
    assert_replays_give_the_same_bits(lambda: run(qkv, bounds))
    together, start = run(qkv, bounds), 0
    for n in seqlens:
        own = tuple(t[start : start + n] for t in qkv)
        alone = run(own, torch.tensor([0, n], dtype=torch.int32, device="cuda"))
        assert torch.equal(alone, together[start : start + n])
        start += n
