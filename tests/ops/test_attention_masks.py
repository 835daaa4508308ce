"""Causal, windowed and grouped attention where no planned kernel runs: against the definition."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from bytetx.ops import native
from bytetx.ops.attention import VARLEN_ATTENTION, AttentionCalls, varlen_attention
from bytetx.ops.attention_plan import plan_attention
from bytetx.sequence_tree import SequenceTree

LENGTHS = [3, 0, 17, 30, 1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 4, 100])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 0.7, 50.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("in_torch", [False, True])
def test_masks_and_groups(
    causal: bool,
    window: int,
    num_kv_heads: int,
    has_bias: bool,
    softcap: float,
    has_sinks: bool,
    in_torch: bool,
) -> None:
    total, num_heads, head_dim = sum(LENGTHS), 8, 16
    q = torch.randn(total, num_heads, head_dim)
    k, v = torch.randn(2, total, num_kv_heads, head_dim)
    bias = torch.randn(num_heads, 2 * 30 - 1) if has_bias else None
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    options = {"causal": causal, "window": window, "relative_bias": bias}
    options["softcap"] = softcap
    sinks = options["sinks"] = torch.randn(num_heads) if has_sinks else None
    with native.without_kernels("cpu") if in_torch else nullcontext():
        ours = varlen_attention(q, k, v, cu_seqlens, max_seqlen=30, **options)

    group = num_heads // num_kv_heads
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    expected = []
    for rows in torch.arange(total).split(LENGTHS):
        scores = torch.einsum("ihd,jhd->hij", q[rows].double(), k[rows].double()) / head_dim**0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = rows[None, :] - rows[:, None]
        if bias is not None:
            scores += bias[:, distance + 29]
        if causal:
            scores.masked_fill_(distance > 0, -torch.inf)
        if window:
            scores.masked_fill_(distance.abs() >= window, -torch.inf)
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, len(rows), 1)
            scores = torch.cat([scores, sink], dim=2)
        weights = scores.softmax(-1)[..., : len(rows)]
        expected.append(torch.einsum("hij,jhd->ihd", weights, v[rows].double()))
    torch.testing.assert_close(ours.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_key_heads_must_divide_query_heads() -> None:
    q, k = torch.randn(4, 8, 16), torch.randn(4, 3, 16)
    with pytest.raises(ValueError, match="divides q's 8, got 3"):
        varlen_attention(q, k, k, torch.tensor([0, 4], dtype=torch.int32), max_seqlen=4)


def test_a_negative_window_is_refused() -> None:
    q = torch.randn(4, 8, 16)
    with pytest.raises(ValueError, match="window must be 0"):
        varlen_attention(q, q, q, torch.tensor([0, 4], dtype=torch.int32), max_seqlen=4, window=-1)


@pytest.mark.parametrize("softcap", [-1.0, float("inf"), float("nan")])
def test_a_softcap_that_caps_nothing_is_refused(softcap: float) -> None:
    q = torch.randn(4, 8, 16)
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="softcap must be 0"):
        varlen_attention(q, q, q, cu_seqlens, max_seqlen=4, softcap=softcap)


def test_sinks_that_are_no_row_of_scores_are_refused() -> None:
    q, cu_seqlens = torch.randn(4, 8, 16), torch.tensor([0, 4], dtype=torch.int32)
    for sinks in (torch.randn(7), torch.randn(8).double(), torch.randn(16)[::2]):
        with pytest.raises(ValueError, match="sinks must"):
            varlen_attention(q, q, q, cu_seqlens, max_seqlen=4, sinks=sinks)
    tree = SequenceTree(np.array([-1, 0], np.int32), np.array([2, 2], np.int32))
    cu_seqlens = torch.tensor([0, 2, 4], dtype=torch.int32)
    plan = plan_attention(cu_seqlens, total_tokens=4, head_dim=16, causal=True, tree=tree)
    options = {"max_seqlen": 4, "causal": True, "plan": plan, "sinks": torch.randn(8)}
    with pytest.raises(ValueError, match="sinks must be None where sequences continue"):
        varlen_attention(q, q, q, cu_seqlens, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_kernel_that_knows_no_sinks_takes_them(
    dtype: torch.dtype,
) -> None:
    """On a GPU with the native kernels as on one without: Triton's, or plain torch."""
    calls = AttentionCalls(dtype, 64, changes_scores=False, has_mask=False, has_sinks=True)
    names = {"native", "torch's FlashAttention", "torch's memory-efficient attention"}
    gpu = torch.device("cuda", 0)
    takers = [one.name for one in VARLEN_ATTENTION.backends
              if "cuda" in one.device_types and one.takes(gpu, calls)]  # fmt: skip
    assert "triton" in takers and takers[-1] == "torch" and not names & set(takers[:-1])


def test_no_plan_where_no_kernel_takes_one() -> None:
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
    assert plan_attention(cu_seqlens, total_tokens=4, head_dim=64) is None
