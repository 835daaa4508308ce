"""The Hopper attention kernels against float64: lengths, masks, padding, broken neighbours."""

import math
from dataclasses import dataclass

import pytest
import torch
from captured import captured
from pairwise import pairwise
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bytetx.ops import native
from bytetx.ops.attention import varlen_attention
from bytetx.ops.attention_plan import plan_attention

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]
HEAD_DIMS = [32, 64, 80, 96, 128, 256]
EDGES = [0, 1, 2, 63, 64, 65, 0, 127, 128, 129, 31, 32, 33, 191, 192, 193, 3, 0]
MIDDLE = [300, 129, 700] * 10  # below every mean for which warpgroups share keys, and many tiles
LENGTHS = {
    "edges": EDGES,
    "huge among ones": [1, 1, 1, 8192, 1, 1],
    "short": [9, 4, 1, 17, 30, 2, 5] * 20,
    "middle": MIDDLE,
    "long": [700, 1025, 512],  # mean above 512: the pipeline where head_dim is large
    "longest": [2100],  # and where it is small
    "few": [300, 5, 129, 1, 257],  # so few tiles that warpgroups split the keys of one
    "few and short": [250, 20, 250, 20],  # one begins in a step that another warpgroup takes
    "one": [1],
}


@dataclass(frozen=True)
class Case:
    """Operands of one call; q, k and v are views into one packed buffer, as in a model."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: list[int]

    @property
    def cu_seqlens(self) -> Tensor:
        ends = torch.tensor([0, *self.lengths], device="cuda").cumsum(0)
        return ends.to(torch.int32)

    def run(self, **options: object) -> Tensor:
        out = torch.full(self.q.shape, torch.nan, device="cuda", dtype=self.q.dtype)
        longest = max(self.lengths)
        return varlen_attention(
            self.q, self.k, self.v, self.cu_seqlens, max_seqlen=longest, out=out, **options
        )


def make_case(
    lengths: list[int],
    *,
    dtype: torch.dtype = torch.float16,
    num_heads: int = 2,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    seed: int = 0,
) -> Case:
    reason = native.why_no_kernel("planned_attention", torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(seed)
    kv_heads = num_kv_heads or num_heads
    heads = num_heads + 2 * kv_heads
    packed = torch.randn(sum(lengths), heads, head_dim, device="cuda", dtype=dtype)
    q, k, v = packed.split([num_heads, kv_heads, kv_heads], dim=1)
    return Case(q, k, v, lengths)


def attend(
    case: Case,
    dtype: torch.dtype,
    *,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    relative_bias: Tensor | None = None,
) -> Tensor:
    """The definition, sequence by sequence, in `dtype`; returned in float64."""
    group = case.q.shape[1] // case.k.shape[1]
    out = []
    for q, k, v in zip(*(t.split(case.lengths) for t in (case.q, case.k, case.v)), strict=True):
        index = torch.arange(len(q), device="cuda")
        distance = index[None, :] - index[:, None]
        mask = torch.zeros(1, len(q), len(q), device="cuda", dtype=dtype)
        if relative_bias is not None:
            span = (relative_bias.shape[1] + 1) // 2
            mask = relative_bias.to(dtype)[:, distance + span - 1]
        if causal:
            mask = mask.masked_fill(distance > 0, -torch.inf)
        if window:
            mask = mask.masked_fill(distance.abs() >= window, -torch.inf)
        q, k, v = (t.transpose(0, 1).to(dtype) for t in (q, k, v))
        k, v = (t.repeat_interleave(group, dim=0) for t in (k, v))
        if softcap:
            scores = softcap * torch.tanh(q @ k.transpose(1, 2) * q.shape[2] ** -0.5 / softcap)
            attended = (scores + mask).softmax(-1) @ v
        else:
            attended = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out.append(attended.transpose(0, 1).double())
    return torch.cat(out)


def assert_as_exact_as_torch(ours: Tensor, case: Case, **options: object) -> None:
    """At most twice the error of torch in the same dtype, and the rounding of the result."""
    exact = attend(case, torch.float64, **options)
    torchs = attend(case, case.q.dtype, **options) - exact
    error = ours.double() - exact
    rounding = torch.finfo(case.q.dtype).eps * exact.abs()
    assert error.norm() <= 2 * torchs.norm() + rounding.norm()
    assert error.abs().max() <= 2 * torchs.abs().max() + rounding.max()


@pytest.mark.feature("Arithmetic", "attention kernels for Hopper")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("causal", [False, True])
def test_every_shape_is_as_exact_as_torch(
    dtype: torch.dtype, head_dim: int, lengths: list[int], causal: bool
) -> None:
    case = make_case(lengths, dtype=dtype, head_dim=head_dim)
    assert_as_exact_as_torch(case.run(causal=causal), case, causal=causal)


@pairwise(
    {
        "head_dim": HEAD_DIMS,
        "lengths": [
            pytest.param(EDGES, id="edges"),
            pytest.param(MIDDLE, id="middle"),
            pytest.param([700, 1025, 512], id="long"),
        ],
        "causal": [False, True],
        "window": [1, 63, 100],
    }
)
def test_a_window_hides_tokens_outside_it(
    head_dim: int, lengths: list[int], causal: bool, window: int
) -> None:
    case = make_case(lengths, head_dim=head_dim)
    options = {"causal": causal, "window": window}
    assert_as_exact_as_torch(case.run(**options), case, **options)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [EDGES, [700, 1025, 512]], ids=["edges", "long"])
def test_query_heads_share_key_heads(num_kv_heads: int, head_dim: int, lengths: list[int]) -> None:
    case = make_case(lengths, num_heads=8, num_kv_heads=num_kv_heads, head_dim=head_dim)
    assert_as_exact_as_torch(case.run(causal=True), case, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("lengths", [EDGES, [700, 1025, 512]], ids=["edges", "long"])
def test_a_relative_bias_is_added(dtype: torch.dtype, head_dim: int, lengths: list[int]) -> None:
    case = make_case(lengths, dtype=dtype, head_dim=head_dim)
    span = max(lengths) + 5
    bias = torch.randn(2, 2 * span - 1, device="cuda")
    assert_as_exact_as_torch(case.run(relative_bias=bias), case, relative_bias=bias)
    positions = torch.cat([torch.arange(n) for n in lengths]).int().cuda()
    moved = case.run(relative_bias=bias, bias_positions=positions)
    assert torch.equal(moved, case.run(relative_bias=bias))


@pairwise(
    {
        "dtype": DTYPES,
        "head_dim": [64, 80, 128, 160, 256],
        "lengths": [
            pytest.param(EDGES, id="edges"),
            pytest.param(MIDDLE, id="middle"),
            pytest.param([700, 1025, 512], id="long"),
            pytest.param([2100], id="longest"),
        ],
        "softcap": [2.0, 50.0],
        "causal,window": [(False, 0), (True, 0), (True, 100), (False, 63)],
    }
)
def test_capped_scores(
    dtype: torch.dtype,
    head_dim: int,
    lengths: list[int],
    softcap: float,
    causal: bool,
    window: int,
) -> None:
    case = make_case(lengths, dtype=dtype, num_heads=4, num_kv_heads=2, head_dim=head_dim)
    case.q.mul_(4)  # scores of some 4: below the one cap, above the other
    options = {"causal": causal, "window": window, "softcap": softcap}
    assert_as_exact_as_torch(case.run(**options), case, **options)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_capped_scores_with_a_bias(head_dim: int) -> None:
    case = make_case(EDGES, head_dim=head_dim)
    bias = torch.randn(2, 2 * max(EDGES) - 1, device="cuda")
    options = {"softcap": 3.0, "relative_bias": bias}
    assert_as_exact_as_torch(case.run(**options), case, **options)


@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_broken_values_stay_in_their_sequence_of_capped_scores(operand: str) -> None:
    lengths = [5, 9, 30, 70, 3, 40]
    case = make_case(lengths)
    clean = attend(case, torch.float64, softcap=2.0)
    getattr(case, operand)[5:14] = torch.nan
    ours = case.run(softcap=2.0).double()
    others = torch.ones(len(ours), dtype=torch.bool, device="cuda")
    others[5:14] = False
    assert (ours - clean)[others].abs().max() < 5e-3  # as in the random lists
    assert ours[5:14].isnan().all()


def test_capped_scores_share_a_plan_for_them() -> None:
    case = make_case([700, 1025, 512], head_dim=128)
    sizes = {"total_tokens": sum(case.lengths), "head_dim": 128}
    plan = plan_attention(case.cu_seqlens, **sizes, softcap=5.0)
    assert torch.equal(case.run(softcap=5.0, plan=plan), case.run(softcap=5.0))
    wide = plan_attention(case.cu_seqlens, **sizes)
    with pytest.raises(ValueError, match="not for this head_dim, bias, softcap or batch_invariant"):
        case.run(softcap=5.0, plan=wide)


@pairwise(
    {
        "head_dim": HEAD_DIMS,
        "dtype": DTYPES,
        "size": [3.0, 10.0, 60.0],
        "lengths": [
            pytest.param([1500], id="few"),
            pytest.param([2500], id="longest"),
            pytest.param(MIDDLE, id="middle"),
        ],
    }
)
def test_a_score_far_above_the_earlier_ones(
    size: float, dtype: torch.dtype, head_dim: int, lengths: list[int]
) -> None:
    """Later steps look for no maximum first: weights beyond 2^12, and beyond f32, are caught."""
    case = make_case(lengths, dtype=dtype, head_dim=head_dim)
    case.k[700] *= size
    case.k[1100] *= 2 * size
    case.k[lengths[0] - 1] *= 3 * size  # among keys that are masked for the rows of other tiles
    assert_as_exact_as_torch(case.run(), case)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize(
    "lengths", [[5, 9, 30, 70, 3, 40], MIDDLE, [700, 9, 1500]], ids=["short", "middle", "long"]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_broken_values_stay_in_their_sequence(
    broken: float, operand: str, lengths: list[int], head_dim: int
) -> None:
    case = make_case(lengths, head_dim=head_dim)
    clean = attend(case, torch.float64)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    rows = slice(ends[0], ends[1])
    getattr(case, operand)[rows] = broken
    ours = case.run().double()
    others = torch.ones(len(ours), dtype=torch.bool, device="cuda")
    others[rows] = False
    assert (ours - clean)[others].abs().max() < 5e-3  # as in the random lists
    if math.isnan(broken):
        assert ours[rows].isnan().all()


# Each with one kernel for the batch and for all of it alone.
MATES = [([7, 300, 20, 1, 65, 129], 120), ([300, 5, 129, 1, 257], 2), ([700, 1025, 3, 600], 2)]


def assert_same_alone(mates: Case) -> None:
    """Sequences that start a tile of their own, which those longer than a tile do."""
    together = mates.run()
    ends = torch.tensor([0, *mates.lengths]).cumsum(0).tolist()
    for first, last in zip(ends, ends[1:], strict=False):
        if last - first <= 64:
            continue
        rows = slice(first, last)
        alone = Case(mates.q[rows], mates.k[rows], mates.v[rows], [last - first])
        assert torch.equal(alone.run(), together[rows])


@pytest.mark.parametrize(("lengths", "num_heads"), MATES)
def test_a_long_sequence_does_not_depend_on_its_mates(lengths: list[int], num_heads: int) -> None:
    assert_same_alone(make_case(lengths, num_heads=num_heads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("lengths", "num_heads"), [*MATES, ([2500, 5, 3700], 2)])
@pytest.mark.parametrize("keys_a_nat", [4, 16])
def test_nor_where_scores_grow_from_key_to_key(
    dtype: torch.dtype, head_dim: int, lengths: list[int], num_heads: int, keys_a_nat: int
) -> None:
    """Tops are raised step by step, beside mates that begin in the midst of it."""
    case = make_case(lengths, dtype=dtype, num_heads=num_heads, head_dim=head_dim)
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    case.q[:, :, 0] = head_dim**0.5
    case.k[:, :, 0] = (positions.clamp(max=1000) / keys_a_nat)[:, None]
    assert_same_alone(case)
    assert_as_exact_as_torch(case.run(), case)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_heads", [2, 14])  # few tiles, and more
def test_one_graph_serves_other_lengths_and_leaves_padding_alone(
    head_dim: int, num_heads: int
) -> None:
    rows = 2048
    case = make_case([rows], head_dim=head_dim, num_heads=num_heads)
    cu_seqlens = torch.zeros(9, dtype=torch.int32, device="cuda")
    out = torch.empty(case.q.shape, device="cuda", dtype=case.q.dtype)

    def step() -> None:
        plan = plan_attention(cu_seqlens, total_tokens=rows, head_dim=head_dim)
        operands = (case.q, case.k, case.v, cu_seqlens)
        varlen_attention(*operands, max_seqlen=rows, plan=plan, out=out)

    step()
    graph, _ = captured(step)
    for lengths in ([3, 200, 0, 64, 1, 1, 500, 30], [1500, 1, 1, 1, 1, 1, 1, 1], [0] * 8):
        total = sum(lengths)
        torch.manual_seed(total)
        for operand in (case.q, case.k, case.v):
            operand.normal_()
            operand[total:] = torch.nan
        used = Case(case.q[:total], case.k[:total], case.v[:total], lengths)
        cu_seqlens.copy_(used.cu_seqlens)
        out.fill_(torch.nan)
        graph.replay()
        assert out[total:].isnan().all()
        if total:
            assert_as_exact_as_torch(out[:total], used)


def test_weights_are_as_exact_as_their_two_roundings() -> None:
    """Values that are unit vectors show the weights: the fast exponential must not be visible."""
    case = make_case([64] * 50, num_heads=1)
    case.q.mul_(3)
    case.v.copy_(torch.eye(64, device="cuda").repeat(50, 1)[:, None])
    exact = attend(case, torch.float64)
    is_large = exact > 2**-10  # smaller ones are subnormal in f16, where the rounding is absolute
    error = ((case.run().double() - exact) / exact)[is_large].abs().max()
    two_roundings = torch.finfo(torch.float16).eps
    assert error <= 1.01 * two_roundings


def test_a_batch_whose_tiles_stay_half_empty() -> None:
    """More tiles than the grid expects: some CTAs take a second one."""
    case = make_case([33] * 180, num_heads=4)
    assert_as_exact_as_torch(case.run(), case)


def test_a_plan_of_another_batch_is_refused() -> None:
    case = make_case([5, 6])
    plan = plan_attention(case.cu_seqlens, total_tokens=11, head_dim=64, causal=True)
    with pytest.raises(ValueError, match="plan must be of this batch"):
        case.run(plan=plan)
