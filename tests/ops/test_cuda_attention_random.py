"""The Hopper attention kernels on random lists of lengths, masks and sizes: --random-lists N."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bytetx.ops import native
from bytetx.ops.attention import varlen_attention

pytestmark = pytest.mark.gpu

HEAD_DIMS = [32, 64, 80, 96, 128, 256]
DTYPES = [torch.float16, torch.bfloat16]
LONGEST = 1500  # tokens of one sequence
MOST_ROWS = 40_000  # of the pool that operands are cut from
LISTS_A_CHECK = 250  # between two looks at the errors, which wait for the GPU


@dataclass(frozen=True)
class Draw:
    """One random case."""

    lengths: Tensor  # int64 [batch_size], on the CPU
    first_row: int  # in the pool
    head_dim: int
    num_heads: int
    num_kv_heads: int
    dtype: torch.dtype
    causal: bool
    window: int


def draw(generator: torch.Generator) -> Draw:
    def pick(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    if pick(3) == 0:  # means for which warpgroups share their keys
        lengths = torch.randint(1, LONGEST + 1, (1 + pick(4),), generator=generator)
    else:
        scale = 10 ** (2.8 * float(torch.rand(1, generator=generator)))
        lengths = torch.empty(1 + pick(40)).exponential_(generator=generator).mul_(scale).long()
        lengths = torch.cat([torch.ones(1, dtype=torch.int64), lengths.clamp_(max=LONGEST)])
    num_kv_heads = (1, 2, 4)[pick(3)]
    return Draw(
        lengths=lengths[torch.randperm(len(lengths), generator=generator)],
        first_row=pick(1000),
        head_dim=HEAD_DIMS[pick(len(HEAD_DIMS))],
        num_heads=num_kv_heads * (1 + pick(2)),
        num_kv_heads=num_kv_heads,
        dtype=DTYPES[pick(2)],
        causal=pick(2) == 1,
        window=(0, 0, 1 + pick(300))[pick(3)],
    )


def expected(case: Draw, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
    """The definition in f32 on padded sequences.  rows: int64 [batch_size, longest]; seen: bool."""
    group = case.num_heads // case.num_kv_heads
    q, k, v = (t.float()[rows].transpose(1, 2) for t in (q, k, v))  # [batch, heads, longest, d]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = (q @ k.transpose(2, 3)) * case.head_dim**-0.5
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)
    return (weights.nan_to_num() @ v).transpose(1, 2)  # rows of padding see nothing


def largest_error(case: Draw, pool: Tensor) -> Tensor:
    """The error of one case, in units of the dtype's rounding; NaN where ours is NaN."""
    total, longest = int(case.lengths.sum()), int(case.lengths.max())
    heads = case.num_heads + 2 * case.num_kv_heads
    packed = pool[case.first_row : case.first_row + total, : heads * case.head_dim]
    packed = packed.view(total, heads, case.head_dim)
    q, k, v = packed.split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    ends = case.lengths.cumsum(0)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int().cuda()
    ours = varlen_attention(
        *(q, k, v, cu_seqlens),
        max_seqlen=longest,
        causal=case.causal,
        window=case.window,
        out=torch.full(q.shape, torch.nan, device="cuda", dtype=q.dtype),
    )
    index = torch.arange(longest, device="cuda")
    lengths = cu_seqlens.diff()[:, None]
    is_row = index < lengths  # [batch_size, longest]
    rows = (cu_seqlens[:-1, None] + index).clamp_(max=total - 1).long()
    seen = is_row[:, None, :] & is_row[:, :, None]
    distance = index[None, :] - index[:, None]
    if case.causal:
        seen = seen & (distance <= 0)
    if case.window:
        seen = seen & (distance.abs() < case.window)
    error = (ours.float()[rows] - expected(case, q, k, v, rows, seen)).abs()
    error = error.masked_fill(~is_row[:, :, None, None], 0.0)
    return error.max() / torch.finfo(case.dtype).eps


def test_random_lists_of_lengths(request: pytest.FixtureRequest) -> None:
    reason = native.why_no_kernel("planned_attention", torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    num_lists = request.config.getoption("--random-lists")
    generator = torch.Generator().manual_seed(1)
    width = 16 * max(HEAD_DIMS)  # up to 8 query heads and 4 of k and v each
    numbers = torch.randn(MOST_ROWS + 1000, width, device="cuda")
    pools = {dtype: numbers.to(dtype) for dtype in DTYPES}
    cases, errors = [], []
    for i in range(num_lists):
        case = draw(generator)
        while case.lengths.sum() > MOST_ROWS or case.lengths.sum() * case.lengths.max() > 3e6:
            case = draw(generator)
        cases.append(case)
        errors.append(largest_error(case, pools[case.dtype]))
        if len(cases) == LISTS_A_CHECK or i + 1 == num_lists:
            # Weights and results are rounded: a few roundings of values up to 5.
            is_right = torch.stack(errors) <= 6.0  # not where the error is NaN
            wrong = (~is_right).nonzero().flatten().tolist()
            assert not wrong, f"list {i + 1 - len(cases) + wrong[0]}: {cases[wrong[0]]}"
            cases, errors = [], []
