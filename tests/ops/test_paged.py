"""The ops under generation against float64: paged attention, writing keys, rotary, the past."""

from dataclasses import replace

import pytest
import torch
from exact_rotary import turn
from paged_steps import Step, assert_exact, make_step, pack_past
from torch import Tensor

from bytetx.nn.kv_cache import allocate_cache, page_bytes
from bytetx.ops.kv_codes import quantize_kv
from bytetx.ops.paged import paged_attention, write_kv
from bytetx.ops.rotary_kv import rotary
from bytetx.packed import pack

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# (new tokens, keys with them): decode rows, whole prompts and later pieces, at every page edge.
MIXED = [
    (1, 1),
    (1, 15),
    (1, 16),
    (1, 17),
    (16, 16),
    (5, 33),
    (31, 31),
    (2, 300),
    (1, 700),
    (40, 64),
]


@pytest.fixture(params=DTYPES.values(), ids=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=[False, True], ids=["same", "fp8"])
def has_codes(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_mixed_steps(group: int, page_size: int, dtype: torch.dtype, has_codes: bool) -> None:
    heads = {"num_heads": 8, "num_kv_heads": 8 // group}
    step = make_step(MIXED, dtype=dtype, **heads, page_size=page_size, has_codes=has_codes)
    assert_exact(step.attend(), step)


@pytest.mark.parametrize("head_dim", [*range(16, 129, 8), 8, 5, 160, 256])
def test_head_sizes(head_dim: int, dtype: torch.dtype, has_codes: bool) -> None:
    lengths = [(1, 50), (7, 20), (1, 3)]
    step = make_step(lengths, dtype=dtype, head_dim=head_dim, has_codes=has_codes)
    assert_exact(step.attend(), step)


@pytest.mark.parametrize("window", [1, 2, 7, 16, 255, 256, 257, 5000])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_windows_read_no_page_before_them(
    window: int, page_size: int, dtype: torch.dtype, has_codes: bool
) -> None:
    lengths = [*MIXED, (300, 650)]
    options = {"page_size": page_size, "window": window, "given_back": True}
    options["has_codes"] = has_codes
    step = make_step(lengths, dtype=dtype, **options)
    assert_exact(step.attend(window=window), step, window=window)


def test_long_past_among_short(dtype: torch.dtype, has_codes: bool) -> None:
    lengths = [(1, 1), (1, 9000), (3, 3), (1, 2049)]
    step = make_step(lengths, dtype=dtype, has_codes=has_codes)
    assert_exact(step.attend(), step)


def test_any_scale(dtype: torch.dtype) -> None:
    step = make_step(MIXED, dtype=dtype)
    for scale in (0.0, 0.7, -0.3):
        assert_exact(step.attend(softmax_scale=scale), step, scale=scale)


@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("has_slopes", [False, True])
def test_capped_scores_and_slopes(
    window: int, softcap: float, has_slopes: bool, dtype: torch.dtype, has_codes: bool
) -> None:
    step = make_step([*MIXED, (300, 650)], dtype=dtype, window=window, has_codes=has_codes)
    slopes = torch.tensor([0.5, 0.1, 0.01, 0.0]) if has_slopes else None
    options = {"window": window, "softcap": softcap, "alibi_slopes": slopes}
    assert_exact(step.attend(**options), step, **options)


@pytest.mark.parametrize("window", [0, 37])
def test_batch_mates_change_no_bit(window: int, has_codes: bool, dtype: torch.dtype) -> None:
    step = make_step([*MIXED, (300, 650)], dtype=dtype, has_codes=has_codes)
    together = step.attend(window=window).split(step.seqlens)
    queries = step.q.split(step.seqlens)
    for i in range(len(step.seqlens)):
        alone = paged_attention(
            queries[i],
            step.k_cache,
            step.v_cache,
            cu_seqlens=torch.tensor([0, step.seqlens[i]]).int(),
            page_table=step.past.page_table[i : i + 1],
            kv_seqlens=step.past.kv_seqlens[i : i + 1],
            max_seqlen=step.seqlens[i],
            max_kv_seqlen=int(step.past.kv_seqlens[i]),
            window=window,
            k_scales=step.k_scales,
            v_scales=step.v_scales,
        )
        assert torch.equal(alone, together[i])


def test_sequences_without_rows_are_skipped() -> None:
    step = make_step([(0, 5), (2, 40), (0, 17), (1, 9)])
    assert_exact(step.attend(), step)


def test_output_goes_where_it_is_wanted() -> None:
    step = make_step(MIXED)
    out = torch.full_like(step.q, torch.nan)
    assert step.attend(out=out) is out
    assert torch.equal(out, step.attend())


def test_queries_in_wider_rows() -> None:
    step = make_step(MIXED)
    rows = torch.full((len(step.q), 7, 16), torch.nan)
    rows[:, :4] = step.q
    got = paged_attention(rows[:, :4], step.k_cache, step.v_cache, **step.lengths())
    assert torch.equal(got, step.attend())


def broken(step: Step, **changes: object) -> dict[str, object]:
    return step.lengths() | changes


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kv_seqlens", [2, 40], "kv_seqlens"),
        ("kv_seqlens", [17, 0], "kv_seqlens"),
        ("kv_seqlens", [17, -9000], "kv_seqlens"),
        ("page_table", [[0, 99, 0], [0, 0, 0]], "page_table"),
        ("page_table", [[0, 0, -2], [0, -1, 0]], "page_table"),
        ("cu_seqlens", [0, 5], "cu_seqlens must have shape"),
    ],
)
def test_wrong_tables_are_refused(name: str, value: list, message: str) -> None:
    step = make_step([(5, 17), (1, 40)])
    given = broken(step, **{name: torch.tensor(value).int()})
    with pytest.raises(ValueError, match=message):
        paged_attention(step.q, step.k_cache, step.v_cache, **given)


def test_wrong_shapes_are_refused() -> None:
    step = make_step([(5, 17), (1, 40)])
    caches = (step.k_cache, step.v_cache)
    with pytest.raises(ValueError, match="pages for max_kv_seqlen 100 keys"):
        paged_attention(step.q, *caches, **broken(step, max_kv_seqlen=100))
    with pytest.raises(ValueError, match="window must be 0"):
        paged_attention(step.q, *caches, **step.lengths(), window=-1)
    with pytest.raises(ValueError, match="softcap must be 0"):
        paged_attention(step.q, *caches, **step.lengths(), softcap=-1.0)
    with pytest.raises(ValueError, match=r"alibi_slopes must have shape \[4\]"):
        paged_attention(step.q, *caches, **step.lengths(), alibi_slopes=torch.zeros(3))
    with pytest.raises(ValueError, match="divides q's 3, got 2"):
        paged_attention(step.q[:, :3].contiguous(), *caches, **step.lengths())
    with pytest.raises(ValueError, match="k_cache must be uint8, got float32"):
        paged_attention(step.q, *caches, **broken(step, v_scales=torch.zeros(1)))
    coded = make_step([(5, 17), (1, 40)], has_codes=True)
    pages = (coded.k_cache, coded.v_cache)
    with pytest.raises(ValueError, match="batch_invariant does not go with"):
        paged_attention(coded.q, *pages, **coded.lengths(), batch_invariant=True)
    with pytest.raises(TypeError, match="k_scales must be a torch.Tensor, got NoneType"):
        paged_attention(coded.q, *pages, **broken(coded, k_scales=None))
    with pytest.raises(ValueError, match="k_cache must be float32"):
        paged_attention(coded.q, *pages, **broken(coded, k_scales=None, v_scales=None))
    with pytest.raises(ValueError, match=r"v_scales must have shape \[.*, 2, 16\]"):
        paged_attention(coded.q, *pages, **broken(coded, v_scales=coded.v_scales[:, :1]))
    with pytest.raises(ValueError, match="power of two tokens, got 12"):
        paged_attention(step.q, *(t[:, :12].contiguous() for t in caches), **step.lengths())


# ---- writing keys and values


def test_written_rows_and_no_others(dtype: torch.dtype) -> None:
    qkv = torch.randn(6, 3, 2, 24).to(dtype)
    before = torch.randn(2, 4, 8, 2, 24).to(dtype)
    cache = before.clone()
    slots = torch.tensor([31, 0, -1, 8, 7, -1]).int()
    write_kv(qkv[:, 1], qkv[:, 2], cache[0], cache[1], slots)
    kept = slots >= 0
    for part, own in enumerate(cache.flatten(1, 2)):
        assert torch.equal(own[slots[kept].long()], qkv[kept, part + 1])
    cache.flatten(1, 2)[:, slots[kept].long()] = before.flatten(1, 2)[:, slots[kept].long()]
    assert torch.equal(cache, before)


def test_written_codes_and_no_others(dtype: torch.dtype) -> None:
    qkv = torch.randn(6, 3, 2, 24).to(dtype)
    cache = torch.full((2, 4, 8, 2, 24), 9, dtype=torch.uint8)
    scales = torch.full((2, 4, 2, 8), 9, dtype=torch.uint8)
    slots = torch.tensor([31, 0, -1, 8, 7, -1]).int()
    write_kv(qkv[:, 1], qkv[:, 2], cache[0], cache[1], slots, scales[0], scales[1])
    kept = slots >= 0
    own = slots[kept].long()
    codes, exponents = quantize_kv(qkv[kept, 1:].transpose(0, 1))
    assert torch.equal(cache.flatten(1, 2)[:, own], codes)
    by_slot = scales.transpose(2, 3).flatten(1, 2)
    assert torch.equal(by_slot[:, own], exponents)
    others = [slot for slot in range(32) if slot not in own]
    assert (cache.flatten(1, 2)[:, others] == 9).all() and (by_slot[:, others] == 9).all()


@pytest.mark.parametrize("slot", [-2, 32])
def test_slots_outside_the_cache_are_refused(slot: int) -> None:
    k, cache = torch.randn(2, 2, 24), torch.zeros(2, 4, 8, 2, 24)
    with pytest.raises(ValueError, match=r"slot_mapping must be in \[-1, 32\)"):
        write_kv(k, k, cache[0], cache[1], torch.tensor([3, slot]).int())
    assert not cache.any()


# ---- rotary


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(16, 16), (64, 64), (80, 20), (24, 6), (8, 0)]
)
def test_rotary(is_interleaved: bool, head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(37, 5, head_dim).to(dtype)
    before = qkv.clone()
    angles = torch.randn(50, rotary_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(50, (37,)).int()
    x = qkv[:, 1:4]
    assert rotary(x, cos, sin, positions, is_interleaved=is_interleaved) is x
    exact = turn(before[:, 1:4], cos, sin, positions, is_interleaved)
    # Two products and a sum in f32, then one rounding.
    rounding = torch.finfo(dtype).eps * exact.abs() + 4 * torch.finfo(torch.float32).eps
    assert ((x.double() - exact).abs() <= rounding).all()
    assert torch.equal(qkv[:, [0, 4]], before[:, [0, 4]])


@pytest.mark.parametrize("position", [-1, 50])
def test_positions_outside_the_tables_are_refused(position: int) -> None:
    x, table = torch.zeros(2, 1, 8), torch.zeros(50, 4)
    with pytest.raises(ValueError, match=r"position_ids must be in \[0, 50\)"):
        rotary(x, table, table, torch.tensor([0, position]).int())


def test_no_tokens() -> None:
    x, table, none = torch.zeros(0, 2, 8), torch.zeros(50, 4), torch.zeros(0).int()
    assert rotary(x, table, table, none).shape == (0, 2, 8)
    cache = torch.zeros(2, 1, 4, 2, 8)
    write_kv(x, x, cache[0], cache[1], none)
    lengths = {"page_table": torch.zeros(0, 1).int(), "kv_seqlens": none}
    lengths |= {"max_seqlen": 0, "max_kv_seqlen": 0, "cu_seqlens": torch.zeros(1).int()}
    assert paged_attention(x, cache[0], cache[1], **lengths).shape == (0, 2, 8)


# ---- the past, the cache, torch.compile


def test_slots_of_pieces_and_decode_rows() -> None:
    seqlens, kv_seqlens = torch.tensor([3, 1, 0]).int(), torch.tensor([6, 9, 4]).int()
    pages = [[5, 2], [7, 1, 0], [3]]
    past = pack_past(pages, kv_seqlens.numpy(), seqlens.numpy(), page_size=4)
    assert past.slot_mapping.tolist() == [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 0]
    assert past.page_table.tolist() == [[5, 2, -1], [7, 1, 0], [3, -1, -1]]
    assert past.kv_seqlens.tolist() == [6, 9, 4] and past.max_kv_seqlen == 9
    assert past.slot_mapping.dtype == past.page_table.dtype == torch.int32


def test_a_batch_takes_its_past_along() -> None:
    batch = pack([[1, 2, 3]])
    assert batch.past is None and batch.to("meta").past is None
    step = make_step([(3, 20)])
    moved = replace(batch, past=step.past).to("meta")
    tensors = (moved.past.page_table, moved.past.kv_seqlens, moved.past.slot_mapping)
    assert all(t.is_meta for t in tensors) and moved.past.page_size == 16


def test_cache_sizes() -> None:
    sizes = {"num_layers": 3, "page_size": 16, "num_kv_heads": 2, "head_dim": 8}
    cache = allocate_cache(**sizes, num_pages=5, dtype=torch.bfloat16)
    assert (cache.num_pages, cache.page_size, len(cache.layers)) == (5, 16, 3)
    assert cache.layers[2].v_cache.shape == (5, 16, 2, 8)
    assert cache.num_bytes == 5 * page_bytes(**sizes, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="page_size must be a power of two, got 12"):
        allocate_cache(**(sizes | {"page_size": 12}), num_pages=5, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        allocate_cache(**sizes, num_pages=0, dtype=torch.bfloat16)


def test_a_cache_of_codes_takes_a_byte_a_number_and_one_a_vector() -> None:
    sizes = {"num_layers": 3, "page_size": 16, "num_kv_heads": 2, "head_dim": 128}
    cache = allocate_cache(**sizes, num_pages=5, dtype=torch.bfloat16, has_codes=True)
    each = page_bytes(**sizes, dtype=torch.bfloat16, has_codes=True)
    assert cache.has_codes and cache.num_bytes == 5 * each
    assert each == 2 * 3 * 16 * 2 * 129
    half = page_bytes(**sizes, dtype=torch.bfloat16) / 2
    assert half < each < 1.01 * half


def test_compiled_graphs_hold_each_op_once() -> None:
    step = make_step(MIXED)
    table = torch.randn(50, 8)
    positions = torch.arange(len(step.q)).int() % 50
    slots = step.past.slot_mapping

    slopes = torch.rand(4)

    def layer(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        q = rotary(q * 1, table, table, positions)
        write_kv(q[:, :2], q[:, 2:], k_cache, v_cache, slots)
        options = {"softcap": 2.0, "alibi_slopes": slopes}
        return paged_attention(q, k_cache, v_cache, **step.lengths(), **options)

    copies = [(step.q, step.k_cache.clone(), step.v_cache.clone()) for _ in range(2)]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*copies[0]), layer(*copies[1]))
    assert torch.equal(copies[0][1].nan_to_num(), copies[1][1].nan_to_num())
