"""Disentangled attention against its definition in float64, on lengths that meet every bucket."""

import cpu_kernels
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bytetx.ops import native
from bytetx.ops.disentangled import disentangled_attention, log_buckets, run_kernel

poisoned_memory, isa, dtype = cpu_kernels.poisoned_memory, cpu_kernels.isa, cpu_kernels.dtype


def wanted(q, k, v, pos_k, pos_q, buckets, seqlens, scale):
    """By the definition, pair by pair of positions, in f64."""
    outputs, start, center = [], 0, len(buckets) // 2
    for n in seqlens:
        own = [t[start : start + n].double() for t in (q, k, v)]
        at = torch.arange(n, device=q.device)
        index = buckets[at[:, None] - at + center].long()
        scores = torch.einsum("ihd,jhd->hij", own[0], own[1])
        if pos_k is not None:
            scores += torch.einsum("ihd,ijhd->hij", own[0], pos_k.double()[index])
        if pos_q is not None:
            scores += torch.einsum("jhd,ijhd->hij", own[1], pos_q.double()[index])
        outputs.append(torch.einsum("hij,jhd->ihd", (scores * scale).softmax(-1), own[2]))
        start += n
    return torch.cat([q.new_zeros(0, *q.shape[1:]).double(), *outputs])


def random_case(seqlens, num_heads, head_dim, num_buckets, max_distance, dtype=torch.float32):
    total, span = sum(seqlens), max([1, *seqlens])
    qkv = torch.randn(total, 3, num_heads, head_dim, dtype=dtype)
    tables = torch.randn(2, 2 * (num_buckets or max_distance), num_heads, head_dim, dtype=dtype)
    cu_seqlens = torch.tensor([0, *seqlens]).cumsum(0).int()
    buckets = log_buckets(num_buckets, max_distance, span)
    return qkv.unbind(1), tables.unbind(0), buckets, cu_seqlens


def run(qkv, tables, buckets, cu_seqlens, scale):
    longest = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    return disentangled_attention(
        *qkv, *tables, buckets, cu_seqlens, max_seqlen=longest, softmax_scale=scale
    )


@pytest.mark.feature("Arithmetic", "disentangled attention (DeBERTa)")
@pytest.mark.parametrize("terms", ["both", "pos_k", "pos_q"])
def test_equals_the_definition(isa: str, dtype: torch.dtype, terms: str) -> None:
    seqlens = [1, 0, 33, 300, 7, 64, 129]
    qkv, tables, buckets, cu_seqlens = random_case(seqlens, 2, 24, 16, 100, dtype)
    tables = tuple(
        t if terms in ("both", n) else None for t, n in zip(tables, ("pos_k", "pos_q"), strict=True)
    )
    if native.kernel("disentangled_attention", qkv[0].device) is None:
        pytest.skip("no native core")
    found = run_kernel(*qkv, *tables, buckets, cu_seqlens, softmax_scale=0.1, isa=isa)
    exact = wanted(*qkv, *tables, buckets, seqlens, 0.1)
    error = (found.double() - exact).abs().max()
    assert error < (2e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(0, 40), (256, 512), (8, 64), (0, 700)])
def test_buckets_of_every_kind(num_buckets: int, max_distance: int) -> None:
    seqlens = [600, 3]
    qkv, tables, buckets, cu_seqlens = random_case(seqlens, 1, 16, num_buckets, max_distance)
    found = run(qkv, tables, buckets, cu_seqlens, 0.2)
    exact = wanted(*qkv, *tables, buckets, seqlens, 0.2)
    torch.testing.assert_close(found.double(), exact, atol=2e-5, rtol=0)


@settings(max_examples=30, deadline=None)
@given(
    seqlens=st.lists(st.integers(0, 90), max_size=6),
    head_dim=st.sampled_from([8, 12, 64]),
    seed=st.integers(0, 1 << 30),
)
def test_any_lengths(seqlens: list[int], head_dim: int, seed: int) -> None:
    torch.manual_seed(seed)
    qkv, tables, buckets, cu_seqlens = random_case(seqlens, 3, head_dim, 8, 30)
    found = run(qkv, tables, buckets, cu_seqlens, 0.3)
    exact = wanted(*qkv, *tables, buckets, seqlens, 0.3)
    torch.testing.assert_close(found.double(), exact, atol=2e-5, rtol=0)


def test_batch_mates_change_nothing() -> None:
    seqlens = [40, 257, 5]
    qkv, tables, buckets, cu_seqlens = random_case(seqlens, 2, 32, 8, 30)
    found = run(qkv, tables, buckets, cu_seqlens, 0.3)
    start = 0
    for n in seqlens:
        alone = tuple(t[start : start + n] for t in qkv)
        mine = run(alone, tables, buckets, torch.tensor([0, n], dtype=torch.int32), 0.3)
        assert torch.equal(mine, found[start : start + n])
        start += n


def test_wrong_arguments_are_named() -> None:
    qkv, (pos_k, pos_q), buckets, cu_seqlens = random_case([5], 2, 8, 8, 30)

    def call(*tables, buckets=buckets, scale=0.3, max_seqlen=5):
        disentangled_attention(
            *qkv, *tables, buckets, cu_seqlens, max_seqlen=max_seqlen, softmax_scale=scale
        )

    with pytest.raises(ValueError, match="pos_q must have shape"):
        call(pos_k, pos_q[:3])
    with pytest.raises(ValueError, match="span >= max_seqlen 6"):
        call(pos_k, pos_q, max_seqlen=6)
    with pytest.raises(ValueError, match="softmax_scale must be above 0, got nan"):
        call(pos_k, pos_q, scale=float("nan"))
    if native.kernel("disentangled_attention", qkv[0].device) is not None:
        with pytest.raises(ValueError, match="buckets must grow by 0 or 1, got 2"):
            call(pos_k, pos_q, buckets=2 * torch.arange(9, dtype=torch.int32).clamp(max=7))


def test_log_buckets_are_those_of_transformers() -> None:
    from transformers.models.deberta_v2 import modeling_deberta_v2 as stock

    rows = torch.zeros(1, 600, 1)
    for num_buckets, max_distance in ((256, 512), (8, 64), (32, 128), (-1, 100)):
        relative = stock.build_relative_position(rows, rows, num_buckets, max_distance)[0]
        half = num_buckets if num_buckets > 0 else max_distance
        index = (relative + half).clamp(0, 2 * half - 1)
        at = torch.arange(600)
        own = log_buckets(max(num_buckets, 0), max_distance, 600)
        assert torch.equal(own[at[:, None] - at + 599].long(), index)
