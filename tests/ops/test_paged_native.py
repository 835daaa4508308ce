"""Causal, windowed, grouped and paged attention on the CPU: every instruction set against float64.

Uninitialised memory is NaN in every test here, and so is every slot of the cache that holds no key.
"""

import cpu_kernels
import pytest
import torch
from paged_steps import Step, assert_exact, make_step, pack_past
from pairwise import pairwise
from torch import Tensor

from bytetx.ops import attention, paged
from bytetx.ops.kv_codes import LARGEST_SCALE, LEAST_SCALE, NAN_SCALE, restore_kv

poisoned_memory, isa, dtype = cpu_kernels.poisoned_memory, cpu_kernels.isa, cpu_kernels.dtype
# Runs of 512 keys, blocks of 64 and 256, tiles of 32 rows, groups of 256; decode rows and pieces.
LENGTHS = [
    *[(1, n) for n in (1, 2, 7, 8, 9, 15, 17, 63, 64, 65, 511, 512, 513, 1024, 1025, 1500)],
    *[
        (2, 2),
        (2, 257),
        (15, 15),
        (16, 256),
        (17, 300),
        (33, 33),
        (31, 543),
        (255, 256),
        (300, 700),
    ],
]


def run(step: Step, isa: str, **changes: object) -> Tensor:
    lengths = {k: v for k, v in step.lengths().items() if not k.startswith("max_")}
    options = {"softmax_scale": step.q.shape[2] ** -0.5, "window": 0} | changes
    return paged.run_kernel(step.q, step.k_cache, step.v_cache, **lengths, **options, isa=isa)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_groups(group: int, dtype: torch.dtype, isa: str) -> None:
    step = make_step(LENGTHS, dtype=dtype, num_heads=2 * group, head_dim=32)
    assert_exact(run(step, isa), step)


@pytest.mark.parametrize("head_dim", [8, 20, 33, 40, 64, 80, 96, 120, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 5])
def test_head_sizes(head_dim: int, group: int, dtype: torch.dtype, isa: str) -> None:
    lengths = [(1, 5), (1, 100), (1, 600), (3, 40), (40, 70)]
    heads = {"num_heads": group, "num_kv_heads": 1}
    step = make_step(lengths, dtype=dtype, head_dim=head_dim, **heads)
    assert_exact(run(step, isa), step)


@pytest.mark.parametrize(
    ("window", "page_size"),
    [(1, 2), (2, 16), (31, 2), (64, 16), (256, 512), (300, 2), (513, 16), (1 << 40, 16)],
)
def test_windows(window: int, page_size: int, dtype: torch.dtype, isa: str) -> None:
    options = {"page_size": page_size, "window": window, "given_back": True}
    step = make_step(LENGTHS, dtype=dtype, **options)
    assert_exact(run(step, isa, window=window), step, window=window)


@pairwise({"softcap": [0.0, 1.5, 50.0], "window": [0, 300], "has_slopes": [False, True]})
def test_capped_scores_and_slopes(
    window: int, softcap: float, has_slopes: bool, dtype: torch.dtype, isa: str
) -> None:
    heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 40}
    step = make_step([*LENGTHS, (1, 5000)], dtype=dtype, window=window, given_back=True, **heads)
    slopes = torch.tensor([0.5, 0.25, 0.03, 0.004, 0.0005, 0.0]) if has_slopes else None
    options = {"window": window, "softcap": softcap, "alibi_slopes": slopes}
    assert_exact(run(step, isa, **options), step, **options)


@pytest.mark.parametrize("softcap", [0.01, 30.0])
def test_capped_scores_of_any_size(softcap: float, dtype: torch.dtype, isa: str) -> None:
    """Scores far above the cap, where tanh is flat, and far below, where it is straight."""
    step = make_step([(1, 600), (40, 300)], dtype=dtype, head_dim=64)
    for scale in (0.0, 1e-3, 1.0, -3.0):
        got = run(step, isa, softcap=softcap, softmax_scale=scale)
        assert_exact(got, step, softcap=softcap, scale=scale)


@pytest.mark.feature("Generation", "keys and values in FP8, natively on CPUs")
@pytest.mark.parametrize("head_dim", [8, 20, 33, 64, 96, 120, 128, 256])
@pytest.mark.parametrize("group", [1, 5])
def test_codes(head_dim: int, group: int, dtype: torch.dtype, isa: str) -> None:
    """In pages of E4M3 with a scale of each vector; decode rows, prompts and runs of both."""
    heads = {"num_heads": 3 * group, "num_kv_heads": 3, "head_dim": head_dim}
    lengths = [(1, 5), (1, 100), (1, 600), (1, 1500), (3, 40), (40, 70), (300, 700)]
    step = make_step(lengths, dtype=dtype, **heads, has_codes=True)
    assert_exact(run(step, isa), step)


@pytest.mark.parametrize(("window", "page_size"), [(1, 2), (64, 16), (300, 2), (513, 64)])
def test_codes_in_windows(window: int, page_size: int, dtype: torch.dtype, isa: str) -> None:
    options = {"page_size": page_size, "window": window, "given_back": True}
    step = make_step(LENGTHS, dtype=dtype, **options, has_codes=True)
    slopes = torch.tensor([0.25, 0.03, 0.004, 0.0])
    more = {"window": window, "softcap": 30.0, "alibi_slopes": slopes}
    assert_exact(run(step, isa, **more), step, **more)


def test_every_code_and_scale(dtype: torch.dtype, isa: str) -> None:
    """One key a sequence: its value is the output, exactly."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(torch.float8_e4m3fn).float().isfinite()]
    scales = torch.arange(LEAST_SCALE, LARGEST_SCALE + 1).to(torch.uint8)
    num = len(scales)
    cache = torch.zeros((num, 2, 1, len(codes)), dtype=torch.uint8)
    cache[:, 0, 0] = codes
    exponents = torch.full((num, 1, 2), 127, dtype=torch.uint8)
    v_scales = exponents.clone()
    v_scales[:, 0, 0] = scales
    ends = torch.arange(num + 1, dtype=torch.int32)
    found = paged.run_kernel(
        torch.ones(num, 1, len(codes), dtype=dtype),
        torch.zeros_like(cache),
        cache,
        cu_seqlens=ends,
        page_table=ends[:num, None].contiguous(),
        kv_seqlens=torch.ones(num, dtype=torch.int32),
        softmax_scale=1.0,
        window=0,
        k_scales=exponents,
        v_scales=v_scales,
        isa=isa,
    )
    wanted = restore_kv(codes.expand(num, -1).contiguous(), scales)
    assert torch.equal(found[:, 0].float(), wanted)


@pytest.mark.parametrize("is_key", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_vectors_that_are_not_numbers_show(
    num_rows: int, is_key: bool, dtype: torch.dtype, isa: str
) -> None:
    step = make_step([(num_rows, 70), (num_rows, 70)], dtype=dtype, has_codes=True)
    clean = run(step, isa)
    scales = step.k_scales if is_key else step.v_scales
    assert scales is not None
    page, slot = step.past.page_table[1, 4], 3
    scales[page, 1, slot] = NAN_SCALE
    found = run(step, isa)
    assert torch.equal(found[:num_rows], clean[:num_rows])
    group = found.shape[1] // 2
    assert found[num_rows:, group:].isnan().all()
    assert torch.equal(found[num_rows:, :group], clean[num_rows:, :group])


def test_more_heads_on_one_key_than_are_decoded_at_once(dtype: torch.dtype, isa: str) -> None:
    step = make_step([(1, 70), (1, 1100), (9, 20)], dtype=dtype, num_heads=71, num_kv_heads=1)
    assert_exact(run(step, isa), step)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_threads_change_no_bit(num_threads: int, window: int, dtype: torch.dtype, isa: str) -> None:
    step = make_step([*LENGTHS, (1, 9000)], dtype=dtype, head_dim=64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run(step, isa, window=window)
        torch.set_num_threads(num_threads)
        for _ in range(3):
            assert torch.equal(run(step, isa, window=window), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0), (1, 0), (50, 0), (256, 3), (301, 0)])
def test_a_prompt_in_pieces_has_the_bits_of_the_prompt(
    window: int, softcap: float, dtype: torch.dtype, isa: str
) -> None:
    """And those of attention without a cache."""
    options = {"window": window, "softcap": softcap}
    sizes = [2, 17, 33, 200, 5, 256, 99, 88]
    whole = make_step([(sum(sizes), sum(sizes))], dtype=dtype, head_dim=40)
    expected = run(whole, isa, **options)
    end, pages = 0, [whole.past.page_table[0].tolist()]
    for size in sizes:
        rows = slice(end, end + size)
        end += size
        kv_seqlens, seqlens = (torch.tensor([n]).int().numpy() for n in (end, size))
        past = pack_past(pages, kv_seqlens, seqlens, page_size=16)
        caches = (whole.k_cache, whole.v_cache)
        piece = Step(whole.q[rows], whole.keys, whole.values, (size,), *caches, past)
        assert torch.equal(run(piece, isa, **options), expected[rows])
    packed = attention.run_kernel(
        whole.q,
        whole.keys[0],
        whole.values[0],
        whole.cu_seqlens,
        max_seqlen=end,
        softmax_scale=40**-0.5,
        causal=True,
        **options,
        relative_bias=None,
        bias_positions=None,
        isa=isa,
    )
    assert torch.equal(packed, expected)


def test_a_nan_stays_in_its_sequence_and_key_head(dtype: torch.dtype, isa: str) -> None:
    lengths = [(1, 40), (1, 700), (5, 64), (1, 3)]
    step = make_step(lengths, dtype=dtype)
    clean = run(step, isa)
    slot = int(step.past.page_table[1, 3]) * 16 + 5
    step.k_cache.flatten(0, 1)[slot, 1] = torch.nan
    got = run(step, isa)
    assert got[1, 2:].isnan().all()
    got[1, 2:] = clean[1, 2:]
    assert torch.equal(got, clean)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3, 40, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_masks(
    causal: bool, window: int, has_bias: bool, dtype: torch.dtype, isa: str
) -> None:
    """Against float64, with torch's own error in the dtype as the measure."""
    lengths, heads = (3, 0, 17, 300, 1, 64), 6
    total, span = sum(lengths), 300
    q, k, v = (torch.randn(total, n, 24).to(dtype) for n in (heads, 2, 2))
    bias = torch.randn(heads, 2 * span - 1) if has_bias else None
    got = attention.run_kernel(
        q,
        k,
        v,
        torch.tensor([0, *lengths]).cumsum(0).int(),
        max_seqlen=max(lengths),
        softmax_scale=0.25,
        causal=causal,
        window=window,
        relative_bias=bias,
        bias_positions=None,
        isa=isa,
    )
    exact, theirs = (
        torch.cat([masked(q, k, v, rows, t, bias, causal, window) for rows in split(lengths)])
        for t in (torch.float64, dtype)
    )
    error, allowed = (
        (t.double() - exact).square().mean((0, 2)).sqrt() for t in (got, theirs.double())
    )
    assert (error <= 2 * allowed + torch.finfo(dtype).eps * exact.square().mean().sqrt()).all()


def split(lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    return torch.arange(sum(lengths)).split(lengths)


def masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    causal: bool,
    window: int,
) -> Tensor:
    k, v = (t[rows].repeat_interleave(3, dim=1).to(dtype) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q[rows].to(dtype), k) * 0.25
    distance = rows[None, :] - rows[:, None]
    if bias is not None:
        scores += bias[:, distance + 299].to(dtype)
    if causal:
        scores.masked_fill_(distance > 0, -torch.inf)
    if window:
        scores.masked_fill_(distance.abs() >= window, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
