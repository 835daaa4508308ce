"""Paged attention on a GPU: decode rows and prefill pieces against float64, graphs, batch mates."""

import random
from dataclasses import replace

import pytest
import torch
from captured import captured
from exact_rotary import turn
from paged_steps import Step, assert_exact, make_step
from pairwise import pairwise
from torch import Tensor

from bytetx.ops import paged, triton_backend
from bytetx.ops.kv_codes import NAN_SCALE, quantize_kv, restore_kv
from bytetx.ops.paged import PAGED_ATTENTION, PagedCalls, paged_attention, write_kv
from bytetx.ops.paged_plan import EarlyRead, PagedPlan, plan_paged_attention
from bytetx.ops.rotary_kv import rotary_write_kv

pytestmark = pytest.mark.gpu

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
# Around steps of 16 keys, rounds of 64, and chunks of 256 and more.
EDGES = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 255, 256, 257, 511, 513, 640, 1023, 1025, 2049)
DECODE = [(1, n) for n in EDGES]
# (new tokens, keys with them): pieces around tiles of 64 and 128 rows, decode rows between them.
MIXED = [
    (1, 1),
    (16, 16),
    (5, 33),
    (1, 700),
    (2, 300),
    (63, 63),
    (64, 64),
    (65, 129),
    (1, 257),
    (129, 1000),
    (300, 650),
    (200, 200),
]
HEADS = [(4, 4), (6, 3), (6, 2), (8, 2), (5, 1), (6, 1), (14, 2), (8, 1), (16, 1), (20, 1), (48, 2)]


@pytest.fixture(params=DTYPES.values(), ids=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def make(lengths: list[tuple[int, int]], **options: object) -> tuple[Step, "Inputs"]:
    """A step, and its operands on the GPU."""
    step = make_step(lengths, **({"dtype": torch.bfloat16, "head_dim": 64} | options))
    return step, Inputs(step)


class Inputs:
    """A step's operands on the GPU; lengths may be bounds."""

    def __init__(self, step: Step, *, max_seqlen: int = 0, max_kv_seqlen: int = 0):
        self.q, self.k_cache, self.v_cache = (
            t.cuda() for t in (step.q, step.k_cache, step.v_cache)
        )
        lengths = step.lengths()
        self.lengths = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in lengths.items()}
        self.lengths["max_seqlen"] = max(max_seqlen, self.lengths["max_seqlen"])
        self.lengths["max_kv_seqlen"] = max(max_kv_seqlen, self.lengths["max_kv_seqlen"])

    def attend(self, **options: object) -> Tensor:
        options = {"out": torch.full_like(self.q, torch.nan)} | options
        return paged_attention(self.q, self.k_cache, self.v_cache, **self.lengths, **options)

    def plan(self, *, window: int = 0) -> PagedPlan:
        others = ("page_table", "k_scales", "v_scales")
        lengths = {k: v for k, v in self.lengths.items() if k not in others}
        heads = {"num_heads": self.q.shape[1], "num_kv_heads": self.k_cache.shape[2]}
        sizes = {"total_tokens": self.q.shape[0], "head_dim": self.q.shape[2]}
        plan = plan_paged_attention(**lengths, **heads, **sizes, window=window)
        assert plan is not None
        return plan


def repeat_last(inputs: Inputs, count: int) -> None:
    """Makes the last of some sequences of one row `count` sequences, which read the same pages."""

    def repeated(rows: Tensor) -> Tensor:
        return torch.cat([rows[:-1], rows[-1:].expand(count, *rows.shape[1:])]).contiguous()

    inputs.q = repeated(inputs.q)
    for name in ("kv_seqlens", "page_table"):
        inputs.lengths[name] = repeated(inputs.lengths[name])
    inputs.lengths["cu_seqlens"] = torch.arange(len(inputs.q) + 1).int().cuda()


def check(
    lengths: list[tuple[int, int]],
    *,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    **options: object,
) -> None:
    step, inputs = make(lengths, window=window, given_back=window > 0, **options)
    changes = {"window": window, "softcap": softcap, "alibi_slopes": alibi_slopes}
    assert_exact(inputs.attend(**changes), step, **changes)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_groups(
    lengths: list, head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    check(lengths, **heads, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 3), (6, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("batches", [1, 7], ids=["clusters", "items"])
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_heads_of_256_features(
    lengths: list, batches: int, window: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 256}
    check([*lengths, (1, 5000)] * batches, window=window, dtype=dtype, **heads)


@pytest.mark.parametrize(("num_heads", "head_dim"), [(9, 256), (16, 200)])
def test_more_wide_heads_on_a_key_than_the_kernels_take(num_heads: int, head_dim: int) -> None:
    heads = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": head_dim}
    check([(1, 20), (3, 9), (1, 300)], **heads)


@pairwise(
    {
        "softcap": [0.0, 1.5, 50.0],
        "has_slopes": [False, True],
        "window": [0, 100],
        "head_dim": [64, 80, 128, 256],
        "batches": [pytest.param(1, id="clusters"), pytest.param(7, id="items")],
    }
)
def test_capped_scores_and_slopes(
    softcap: float, has_slopes: bool, window: int, head_dim: int, batches: int, dtype: torch.dtype
) -> None:
    heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": head_dim}
    slopes = torch.tensor([0.5, 0.25, 0.03, 0.004, 0.0005, 0.0]) if has_slopes else None
    if slopes is not None:
        slopes = slopes.cuda()
    options = {"softcap": softcap, "alibi_slopes": slopes, "window": window, "dtype": dtype}
    check([*MIXED, *DECODE, (0, 7), (1, 5000)] * batches, **options, **heads)


def test_slopes_of_many_heads_on_one_key() -> None:
    slopes = torch.rand(20).cuda()
    heads = {"num_heads": 20, "num_kv_heads": 1, "head_dim": 64}
    for batches in (1, 70):
        check([(1, 70), (1, 1100), (40, 90)] * batches, alibi_slopes=slopes, **heads)


def test_slopes_far_from_the_first_key(dtype: torch.dtype) -> None:
    slopes = torch.tensor([2.0**-8, 1.0, 0.5, 2.0**-4]).cuda()
    check([(1, 30_000), (70, 20_000)], alibi_slopes=slopes, dtype=dtype, softcap=4.0)


@pytest.mark.parametrize("head_dim", [8, 16, 24, 32, 40, 80, 96, 120])
def test_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    check([*MIXED, (1, 3), (1, 2000)], head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 32, 64, 128, 256])
@pytest.mark.parametrize("window", [0, 37, 300])
def test_page_sizes(page_size: int, window: int) -> None:
    check([*MIXED, (1, 513), (1, 1025)], page_size=page_size, window=window)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 64, 255, 257, 5000])
def test_windows_read_no_page_before_them(window: int, dtype: torch.dtype) -> None:
    check([*MIXED, *DECODE], window=window, dtype=dtype)


def test_one_long_among_short(dtype: torch.dtype) -> None:
    check([(1, 1)] * 20 + [(1, 8192), (3, 3), (1, 9001), (40, 8000)], head_dim=128, dtype=dtype)


@pytest.mark.parametrize("num_short", [1, 70, 300], ids=["few", "some", "many"])
@pytest.mark.parametrize(("keys", "page_size"), [(70_001, 16), (40_001, 1)])
def test_longer_than_staged_pages(num_short: int, keys: int, page_size: int) -> None:
    lengths = [(1, keys)] + [(1, 5)] * num_short
    check(lengths, num_heads=2, num_kv_heads=1, head_dim=32, page_size=page_size)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_size", "window"),
    [
        (6, 2, 32, 16, 0),
        (6, 2, 64, 4, 37),
        (6, 2, 80, 16, 300),
        (6, 2, 128, 1, 0),
        (6, 2, 128, 128, 37),
        (20, 1, 64, 16, 0),
    ],
)
def test_many_decode_rows(
    num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, window: int
) -> None:
    """More than clusters take: items of the plan, two a key where a group has over 16 heads."""
    lengths = [*DECODE, (0, 0), (1, 5000)] * 7
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    check(lengths, window=window, page_size=page_size, **heads)


def test_scales() -> None:
    step, inputs = make([*MIXED, *DECODE])
    for scale in (0.0, 0.7, -0.3):
        assert_exact(inputs.attend(softmax_scale=scale), step, scale=scale)


@pytest.mark.parametrize("window", [0, 100])
def test_batch_mates_change_no_bit(window: int, dtype: torch.dtype) -> None:
    lengths = [*MIXED, (1, 5000), *DECODE]
    step, inputs = make(lengths, window=window, dtype=dtype, head_dim=128, num_heads=8)
    together = inputs.attend(window=window).split(step.seqlens)
    queries = inputs.q.split(step.seqlens)
    for i, seqlen in enumerate(step.seqlens):
        alone = paged_attention(
            queries[i],
            inputs.k_cache,
            inputs.v_cache,
            cu_seqlens=torch.tensor([0, seqlen]).int().cuda(),
            page_table=inputs.lengths["page_table"][i : i + 1],
            kv_seqlens=inputs.lengths["kv_seqlens"][i : i + 1],
            max_seqlen=seqlen,
            max_kv_seqlen=lengths[i][1],
            window=window,
        )
        assert torch.equal(alone, together[i])


def test_batch_mates_change_no_bit_in_large_batches() -> None:
    """Large batches find their keys by a plan, and cut them alike whoever is in them."""
    lengths = [*MIXED, *DECODE, (1, 4000)] * 3
    step, inputs = make(lengths, head_dim=128, num_heads=8)
    together = inputs.attend().split(step.seqlens)
    queries, chosen = inputs.q.split(step.seqlens), range(0, len(lengths), 2)
    subset = torch.tensor(chosen).cuda()
    seqlens = [step.seqlens[i] for i in chosen]
    apart = paged_attention(
        torch.cat([queries[i] for i in chosen]),
        inputs.k_cache,
        inputs.v_cache,
        cu_seqlens=torch.tensor([0, *seqlens]).cumsum(0).int().cuda(),
        page_table=inputs.lengths["page_table"][subset],
        kv_seqlens=inputs.lengths["kv_seqlens"][subset],
        max_seqlen=max(seqlens),
        max_kv_seqlen=4000,
    )
    for i, rows in zip(chosen, apart.split(seqlens), strict=True):
        assert torch.equal(rows, together[i])


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (24, 24, 64)])
@pytest.mark.parametrize("window", [0, 2500])
@pytest.mark.parametrize("num_mates", [6, 70, 300])
def test_long_sequences_have_the_same_bits_split_and_whole(
    num_mates: int,
    window: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    """Among its like one CTA has all of a long sequence, among short ones many share it."""
    lengths = [(1, keys) for keys in (1025, 2048, 4097, 9000, 20_000, 6000)]
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    step, inputs = make(lengths, window=window, dtype=dtype, **heads)
    repeat_last(inputs, num_mates)
    whole = inputs.attend(window=window)[: len(lengths)]
    assert_exact(whole, step, window=window)
    inputs.lengths["kv_seqlens"][len(lengths) - 1 :] = 1
    split = inputs.attend(window=window)[: len(lengths) - 1]
    assert torch.equal(split, whole[:-1])


@pytest.mark.parametrize("batch_size", [9, 16, 17, 33, 34, 45, 66, 100])
def test_equal_sequences_have_the_same_bits_in_any_number(batch_size: int) -> None:
    """Whether CTAs have one each, two, or a last round leaves most of them idle."""
    step, inputs = make([(1, 3000)], num_heads=16, num_kv_heads=8, head_dim=128)
    repeat_last(inputs, batch_size)
    rows = inputs.attend()
    assert_exact(rows[:1], step)
    assert torch.equal(rows, rows[:1].expand_as(rows))


def test_runs_give_the_same_bits() -> None:
    _, inputs = make([*MIXED, *DECODE, (1, 8000)], head_dim=128)
    first = inputs.attend()
    assert all(torch.equal(first, inputs.attend()) for _ in range(5))


def test_sequences_without_rows_write_nothing() -> None:
    lengths = [(0, 5), (1, 40), (0, 0), (0, 17), (20, 90), (1, 700), (0, 3)]
    step, inputs = make(lengths)
    total = inputs.q.shape[0]
    inputs.q = torch.cat([inputs.q, torch.full_like(inputs.q[:9], torch.nan)])
    got = inputs.attend()
    assert_exact(got[:total], step)
    assert got[total:].isnan().all()  # rows of no sequence


def test_lengths_may_be_bounds() -> None:
    step, _ = make([*DECODE, (7, 40)])
    pages = torch.full((len(DECODE) + 1, 700), -1).int()
    pages[:, : step.past.page_table.shape[1]] = step.past.page_table
    wide = replace(step, past=replace(step.past, page_table=pages))
    bounded = Inputs(wide, max_seqlen=300, max_kv_seqlen=11_000)
    assert torch.equal(bounded.attend(), Inputs(step).attend())


def test_operands_in_wider_rows_and_given_output() -> None:
    step, inputs = make(MIXED)
    rows = torch.full((len(step.q), 7, 64), torch.nan, dtype=torch.bfloat16).cuda()
    rows[:, :4] = inputs.q
    expected, inputs.q = inputs.attend(), rows[:, :4]
    out = torch.full((len(step.q), 4, 64), torch.nan, dtype=torch.bfloat16).cuda()
    assert inputs.attend(out=out) is out
    assert torch.equal(out, expected)


def test_layers_share_a_plan() -> None:
    _, inputs = make([*MIXED, *DECODE])
    plan, expected = inputs.plan(), inputs.attend()
    for _ in range(3):
        assert torch.equal(inputs.attend(plan=plan), expected)
    with pytest.raises(ValueError, match="plan must be of this step"):
        inputs.attend(plan=plan, window=7)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 128), (6, 3, 64)])
@pytest.mark.parametrize("num_rows", [0, 3, 40, 300])
def test_layers_of_a_mixed_step_wait_for_one_another(
    num_heads: int, num_kv_heads: int, head_dim: int, num_rows: int
) -> None:
    """Decode rows and pieces run side by side; each layer's keys are results of the one before."""
    decode = [(1, 1 + 37 * i % 1500) for i in range(num_rows)]
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    step, inputs = make([*decode, (300, 650), (1, 9), (65, 65), (200, 1000)], **heads)
    slots, plan = step.past.slot_mapping.cuda(), inputs.plan()
    first, num_layers = inputs.q, 6

    def run(*, synchronized: bool = False) -> Tensor:
        inputs.q = first
        for _ in range(num_layers):
            k, v = inputs.q[:, :num_kv_heads], inputs.q[:, num_heads - num_kv_heads :]
            write_kv(k, v, inputs.k_cache, inputs.v_cache, slots)
            inputs.q = inputs.attend(plan=plan)
            if synchronized:
                torch.cuda.synchronize()
        return inputs.q

    expected = run(synchronized=True)
    assert not expected.isnan().any()
    graph, output = captured(run)
    for _ in range(10):
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output, expected)


def test_unaligned_rows_take_the_slow_path() -> None:
    step, inputs = make([(1, 20), (3, 9)])
    rows = torch.zeros(len(step.q), 4 * 64 + 1, dtype=torch.bfloat16).cuda()
    rows[:, 1:].unflatten(1, (4, 64)).copy_(inputs.q)
    inputs.q = rows[:, 1:].unflatten(1, (4, 64))
    assert_exact(inputs.attend(out=None), step)


def test_captured_step_serves_any_lengths() -> None:
    """One graph of a bucket: 32 places of decode rows, some of them empty at the end."""
    places, heads = 32, {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    big, inputs = make([(1, 1024)] * places, **heads)

    def run() -> Tensor:
        return inputs.attend(plan=inputs.plan(), out=out)

    out = torch.full_like(inputs.q, torch.nan)
    inputs.lengths["max_kv_seqlen"] = 1024
    run()
    graph, _ = captured(run)
    rng = random.Random(0)
    for used in (32, 1, 17, 31, 0, 5):
        lengths = [(1, rng.randint(1, 1024)) for _ in range(used)] + [(0, 0)] * (places - used)
        keys = torch.tensor([n for _, n in lengths]).int()
        rows = torch.tensor([0, *(n for n, _ in lengths)]).cumsum(0).int()
        inputs.lengths["kv_seqlens"].copy_(keys)
        inputs.lengths["cu_seqlens"].copy_(rows)
        out.fill_(torch.nan)
        graph.replay()
        assert out[used:].isnan().all()
        if used == 0:
            continue
        step = replace(
            big,
            q=big.q[:used],
            keys=tuple(k[:n] for k, n in zip(big.keys, keys.tolist(), strict=True))[:used],
            values=tuple(v[:n] for v, n in zip(big.values, keys.tolist(), strict=True))[:used],
            seqlens=(1,) * used,
        )
        assert_exact(out[:used], step)


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed: int) -> None:
    rng = random.Random(seed)
    group, num_kv_heads = rng.choice([1, 2, 3, 4, 7, 8]), rng.choice([1, 2, 4])
    lengths = []
    for _ in range(rng.choice([1, 7, 40])):
        new = rng.choice([0, 1, 1, 1, 1, rng.randint(2, 40), rng.randint(41, 300)])
        lengths.append((new, new + int(rng.random() ** 4 * 3000)))
    lengths.append((1, rng.randint(1, 600)))
    check(
        lengths,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice([32, 64, 80, 128]),
        page_size=rng.choice([1, 8, 16, 16, 64]),
        window=rng.choice([0, 0, rng.randint(1, 700)]),
        dtype=rng.choice(list(DTYPES.values())),
    )


@pytest.mark.parametrize("batch_size", [2, 40], ids=["few", "many"])
def test_settled_keys_are_read_early_and_new_ones_are_not(batch_size: int) -> None:
    """A step's writes and its attention, again and again in one graph, each write another value."""
    lengths = [(1, 700 + 13 * i) for i in range(batch_size)]
    _, inputs = make(lengths, head_dim=128, num_heads=8, num_kv_heads=4)
    pages, keys = inputs.lengths["page_table"], inputs.lengths["kv_seqlens"]
    last = keys.long() - 1
    slots = (pages.gather(1, last[:, None] // 16)[:, 0] * 16 + last % 16).int()
    new = torch.randn(30, 2, batch_size, 4, 128, device="cuda").to(inputs.q.dtype)
    outs = torch.full((2, len(new), *inputs.q.shape), torch.nan, device="cuda").to(inputs.q.dtype)

    def run(early_read: EarlyRead, out: Tensor) -> None:
        plan = inputs.plan()
        for (k, v), own in zip(new, out, strict=True):
            write_kv(k, v, inputs.k_cache, inputs.v_cache, slots)
            inputs.attend(plan=plan, early_read=early_read, out=own)

    run(EarlyRead.NOTHING, outs[0])
    graph, _ = captured(lambda: run(EarlyRead.KEYS, outs[1]))
    for _ in range(5):
        outs[1].fill_(torch.nan)
        graph.replay()
        assert torch.equal(*outs)


def test_settled_tables_change_no_bit() -> None:
    _, inputs = make([*MIXED, *DECODE, (1, 8000)], head_dim=128)
    plan, expected = inputs.plan(), inputs.attend()
    for early_read in EarlyRead:
        assert torch.equal(inputs.attend(plan=plan, early_read=early_read), expected)


# ---- pages of E4M3 codes


@pairwise(
    {
        "heads": [(4, 4), (6, 3), (6, 2), (8, 1), (16, 1), (20, 1), (48, 2)],
        "head_dim": [16, 48, 64, 80, 128],
        "batches": [pytest.param(1, id="clusters"), pytest.param(7, id="items")],
        "page_size": [16, 64, 8],
        "window": [0, 37],
        "lengths": [pytest.param(DECODE, id="decode"), pytest.param(MIXED, id="mixed")],
    }
)
def test_codes(
    heads: tuple[int, int],
    head_dim: int,
    batches: int,
    page_size: int,
    window: int,
    lengths: list,
    dtype: torch.dtype,
) -> None:
    options = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    options |= {"page_size": page_size, "has_codes": True, "dtype": dtype}
    check([*lengths, (1, 5000)] * batches, window=window, **options)


@pytest.mark.parametrize("batches", [1, 7], ids=["clusters", "items"])
@pytest.mark.parametrize("window", [0, 300])
def test_codes_of_256_features(batches: int, window: int, dtype: torch.dtype) -> None:
    heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 256}
    check([*DECODE, (1, 5000)] * batches, window=window, dtype=dtype, has_codes=True, **heads)


@pytest.mark.parametrize("batches", [1, 7], ids=["clusters", "items"])
def test_changed_scores_of_codes(batches: int, dtype: torch.dtype) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.03, 0.004, 0.0005, 0.0]).cuda()
    heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 128, "has_codes": True}
    for window in (0, 100):
        options = {"softcap": 2.0, "alibi_slopes": slopes, "window": window, "dtype": dtype}
        check([*DECODE, (0, 7), (1, 5000)] * batches, **options, **heads)


@pytest.mark.parametrize("num_mates", [6, 70, 300])
def test_codes_have_the_same_bits_split_and_whole(num_mates: int) -> None:
    lengths = [(1, keys) for keys in (1025, 2048, 4097, 9000, 20_000, 6000)]
    heads = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "has_codes": True}
    step, inputs = make(lengths, **heads)
    repeat_last(inputs, num_mates)
    whole = inputs.attend()[: len(lengths)]
    assert_exact(whole, step)
    inputs.lengths["kv_seqlens"][len(lengths) - 1 :] = 1
    assert torch.equal(inputs.attend()[: len(lengths) - 1], whole[:-1])


def test_codes_take_the_native_kernel_for_decode_rows_alone() -> None:
    device = torch.device("cuda")
    calls = PagedCalls(torch.bfloat16, 16, 8, 128, page_size=16, has_codes=True)
    assert PAGED_ATTENTION.choose(device, calls).name == "native"
    for other in ({"decodes": False}, {"page_size": 8}, {"head_dim": 40}):
        assert PAGED_ATTENTION.choose(device, calls._replace(**other)).name != "native"


@pytest.mark.parametrize("restores", [True, False])
def test_prompts_over_codes_are_restored_where_they_fit(
    restores: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, triton_kernels = [], triton_backend.kernels(torch.device("cuda"))
    restore = triton_kernels.restore_pages
    monkeypatch.setattr(
        triton_kernels, "restore_pages", lambda *a, **k: chosen.append(1) or restore(*a, **k)
    )
    if not restores:
        monkeypatch.setattr(paged, "MAX_RESTORED_BYTES", 0)
    heads = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "has_codes": True}
    check([(300, 300), (1, 900), (70, 1500), (0, 9)], dtype=dtype, **heads)
    assert bool(chosen) == restores


@pytest.mark.parametrize("num_tokens", [5, 3000])
@pytest.mark.parametrize("head_dim", [24, 64, 128, 256])
@pytest.mark.parametrize("has_norms", [False, True])
def test_written_codes(head_dim: int, num_tokens: int, has_norms: bool, dtype: torch.dtype) -> None:
    """Those of values are the reference's; keys are rounded once, behind norm and rotation."""
    qkv = torch.randn(num_tokens, 8, head_dim, dtype=dtype, device="cuda")
    qkv *= torch.logspace(-5, 3, num_tokens, device="cuda")[:, None, None].to(dtype)
    q, k, v = qkv.split([4, 2, 2], dim=1)
    v[1, 0, 3], v[2, 1] = torch.inf, 0.0
    angles = torch.rand(99, head_dim // 2, device="cuda")
    positions = torch.randint(99, (num_tokens,), device="cuda").int()
    norms = [torch.rand(head_dim, device="cuda").to(dtype) for _ in range(2)] * has_norms
    norms = norms or [None, None]
    num_pages = num_tokens // 16 + 2
    slots = torch.randperm(num_pages * 16, device="cuda")[:num_tokens].int()
    slots[3] = -1
    keys = k.double()
    if has_norms:
        keys /= (keys.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        keys *= norms[1].double()
    exact = turn(keys, angles.cos(), angles.sin(), positions, False)
    values = v.clone()
    pages = torch.full((2, num_pages, 16, 2, head_dim), 9, dtype=torch.uint8, device="cuda")
    scales = torch.full((2, num_pages, 2, 16), 9, dtype=torch.uint8, device="cuda")
    rotary_write_kv(
        *(q, k, v, angles.cos(), angles.sin(), positions, pages[0], pages[1], slots),
        **{"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6},
        **{"k_scales": scales[0], "v_scales": scales[1]},
    )
    kept = slots >= 0
    own = slots[kept].long()
    codes = pages.flatten(1, 2)[:, own]
    exponents = scales.transpose(2, 3).flatten(1, 2)[:, own]
    expected, expected_scales = quantize_kv(values[kept])
    assert torch.equal(exponents[1], expected_scales)
    finite = expected_scales != NAN_SCALE
    assert torch.equal(codes[1][finite], expected[finite])
    largest = exact[kept].abs().amax(-1, keepdim=True)
    error = (restore_kv(codes[0], exponents[0]).double() - exact[kept]).abs()
    assert (error <= 1.01 * (2.0**-4 * exact[kept].abs() + 2.0**-17 * largest) + 1e-9).all()
    others = torch.ones(num_pages * 16, dtype=torch.bool, device="cuda")
    others[own] = False
    assert (pages.flatten(1, 2)[:, others] == 9).all()
