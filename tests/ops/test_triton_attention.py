"""The Triton attention kernels against f64: on the GPU, or interpreted where there is none."""

import math

import pytest
import torch
from paged_steps import assert_exact, make_step
from pairwise import pairwise
from torch import Tensor

from bytetx.ops import reference
from bytetx.ops.disentangled import log_buckets

pytest.importorskip("triton")

from bytetx.ops import triton_kernels  # noqa: E402
from bytetx.ops.kv_codes import quantize_kv  # noqa: E402
from bytetx.ops.triton_kernels import disentangled, paged  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# numpy, which interprets them, warns of inf and NaN.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
# The interpreter multiplies no bf16.
HALF_DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
DTYPES = [*HALF_DTYPES, torch.float32]
EDGES = [0, 1, 5, 0, 64, 65, 3, 130, 1]


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0).int()


def rows(total: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(total, heads, head_dim, device=DEVICE).to(dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], **options: object) -> Tensor:
    """The Triton kernel, into an output that held NaN."""
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=DEVICE)
    bounds = triton_kernels.sequence_bounds(bounds_of(lengths), len(q))
    options = {"softmax_scale": q.shape[2] ** -0.5} | options
    triton_kernels.varlen_attention(q, k, v, bounds, batch_size=len(lengths), out=out, **options)
    return out


def expected(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], **options: object) -> Tensor:
    bounds, longest = bounds_of(lengths), max(lengths, default=0)
    options = {"softmax_scale": q.shape[2] ** -0.5} | options
    operands = (q.float(), k.float(), v.float(), bounds)
    return reference.varlen_attention(*operands, max_seqlen=longest, **options)


def assert_close(ours: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert not ours.isnan().any()
    assert (ours.float() - right).abs().max() <= tolerance * right.abs().max()


@pytest.mark.feature("Arithmetic", "Triton kernels for other GPUs")
@pairwise(
    {
        "options": [
            *({}, {"causal": True}, {"window": 17}),
            *({"causal": True, "window": 40}, {"softcap": 2.0}),
            *({"sinks": 0.5}, {"sinks": 4.0, "window": 17}, {"sinks": -30.0, "softcap": 2.0}),
        ],
        "head_dim": [24, 64, 128],
        "dtype": DTYPES,
    }
)
def test_attention_is_the_reference(
    options: dict[str, object], head_dim: int, dtype: torch.dtype
) -> None:
    q = rows(sum(EDGES), 4, head_dim, dtype)
    k, v = (rows(sum(EDGES), 2, head_dim, dtype) for _ in range(2))
    if "sinks" in options:
        options = options | {"sinks": options["sinks"] + torch.arange(4.0, device=DEVICE) / 4}
    assert_close(attend(q, k, v, EDGES, **options), expected(q, k, v, EDGES, **options), dtype)


@pytest.mark.parametrize("head_dim", [320, 512])
@pytest.mark.parametrize("options", [{}, {"window": 17}, {"causal": True}], ids=str)
def test_wide_heads(options: dict[str, object], head_dim: int) -> None:
    q = rows(sum(EDGES), 2, head_dim, torch.float16)
    k, v = (rows(sum(EDGES), 1, head_dim, torch.float16) for _ in range(2))
    right = expected(q, k, v, EDGES, **options)
    assert_close(attend(q, k, v, EDGES, **options), right, torch.float16)


@pytest.mark.parametrize("lengths", [[530], [130, 1, 200], [1] * 70, [2]], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 100}], ids=str)
def test_long_ones_and_many_short_ones(lengths: list[int], options: dict[str, object]) -> None:
    q, k, v = (rows(sum(lengths), 2, 64, torch.float16) for _ in range(3))
    right = expected(q, k, v, lengths, **options)
    assert_close(attend(q, k, v, lengths, **options), right, torch.float16)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1e-3, 3.0])
def test_scales(scale: float) -> None:
    q, k, v = (rows(sum(EDGES), 2, 64, torch.float16) for _ in range(3))
    right = expected(q, k, v, EDGES, softmax_scale=scale)
    assert_close(attend(q, k, v, EDGES, softmax_scale=scale), right, torch.float16)


@pytest.mark.parametrize("has_positions", [False, True])
def test_a_bias_of_relative_positions(has_positions: bool) -> None:
    q, k, v = (rows(sum(EDGES), 2, 32, torch.float16) for _ in range(3))
    span = 200
    options = {"relative_bias": torch.randn(2, 2 * span - 1, device=DEVICE), "softcap": 3.0}
    if has_positions:
        places = torch.randint(0, span, (len(q),), dtype=torch.int32, device=DEVICE)
        options["bias_positions"] = places
    right = expected(q, k, v, EDGES, **options)
    assert_close(attend(q, k, v, EDGES, **options), right, torch.float16)


def test_views_of_fused_rows() -> None:
    q, k, v = rows(sum(EDGES), 3 * 4, 64, torch.float16).view(-1, 3, 4, 64).unbind(1)
    assert_close(attend(q, k, v, EDGES), expected(q, k, v, EDGES), torch.float16)


def test_rows_of_padding_are_neither_read_nor_written() -> None:
    total = sum(EDGES)
    q, k, v = (rows(total + 150, 2, 64, torch.float16) for _ in range(3))
    for operand in (q, k, v):
        operand[total:] = torch.nan
    ours = attend(q, k, v, EDGES)
    assert ours[total:].isnan().all()
    assert_close(ours[:total], expected(q[:total], k[:total], v[:total], EDGES), torch.float16)


@pairwise(
    {
        "has_sinks": [False, True],
        "operand": [pytest.param(i, id=name) for i, name in enumerate("qkv")],
        "broken": [torch.nan, torch.inf],
        "lengths": [[5, 9, 30], [66, 9, 60]],
    }
)
def test_broken_values_stay_in_their_sequence(
    lengths: list[int], operand: int, broken: float, has_sinks: bool
) -> None:
    operands = [rows(sum(lengths), 1, 64, torch.float16) for _ in range(3)]
    sinks = {"sinks": torch.tensor([1.5], device=DEVICE)} if has_sinks else {}
    right = expected(*operands, lengths, **sinks)
    its_own = slice(lengths[0], lengths[0] + lengths[1])
    operands[operand][its_own] = broken
    ours = attend(*operands, lengths, **sinks)
    others = torch.ones(len(ours), dtype=torch.bool)
    others[its_own] = False
    assert_close(ours[others], right[others], torch.float16)
    if math.isnan(broken):
        assert ours[its_own].isnan().all()


def test_a_later_token_does_not_break_an_earlier_one() -> None:
    q, k, v = (rows(50, 2, 64, torch.float16) for _ in range(3))
    right = expected(q, k, v, [50], causal=True)
    k[30:], v[30:] = torch.nan, torch.inf
    assert_close(attend(q, k, v, [50], causal=True)[:30], right[:30], torch.float16)


def test_mates_change_no_bit_of_a_sequence_that_fills_tiles() -> None:
    q, k, v = (rows(64 + 128 + 3, 2, 64, torch.float16) for _ in range(3))
    together = attend(q, k, v, [64, 128, 3])
    alone = attend(q[64:192], k[64:192], v[64:192], [128])
    assert torch.equal(together[64:192], alone)


def test_bounds_of_tokens() -> None:
    bounds = triton_kernels.sequence_bounds(bounds_of([0, 2, 0, 0, 1, 3, 0]), 8)
    assert bounds.tolist() == [[0, 0, 2, 3, 3, 3, 6, 7], [2, 2, 3, 6, 6, 6, 0, 0]]


def check_disentangled(
    lengths: list[int], broken: int, head_dim: int, terms: str, dtype: torch.dtype
) -> None:
    """Rows of padding are not read, and what is broken stays in its sequence, the one at broken."""
    total = sum(lengths)
    q, k, v = (rows(total + 9, 2, head_dim, dtype) for _ in range(3))
    buckets = log_buckets(16, 64, 160).to(DEVICE)
    pos_k = rows(32, 2, head_dim, dtype) if terms in ("both", "pos_k") else None
    pos_q = rows(32, 2, head_dim, dtype) if terms in ("both", "pos_q") else None
    operands = [None if t is None else t.float() for t in (q, k, v, pos_k, pos_q)]
    scale = (3 * head_dim) ** -0.5
    right = reference.disentangled_attention(
        *operands, buckets, bounds_of(lengths), softmax_scale=scale
    )
    bounds = triton_kernels.sequence_bounds(bounds_of(lengths), total + 9)
    for operand in (q, k, v):
        operand[total:] = torch.nan
    tables = (pos_k, pos_q, buckets, bounds)
    ours = triton_kernels.disentangled_attention(q, k, v, *tables, softmax_scale=scale)
    assert_close(ours[:total], right[:total], dtype)
    begin, end = sum(lengths[:broken]), sum(lengths[: broken + 1])
    v[begin:end] = torch.nan
    ours = triton_kernels.disentangled_attention(q, k, v, *tables, softmax_scale=scale)
    assert ours[begin:end].isnan().all()
    others = [*range(begin), *range(end, total)]
    assert_close(ours[others], right[others], dtype)


@pairwise(
    {
        "terms": ["both", "pos_k", "pos_q", "none"],
        "head_dim": [24, 64, 128],
        "dtype": DTYPES,
    }
)
def test_disentangled_attention(head_dim: int, terms: str, dtype: torch.dtype) -> None:
    check_disentangled([100, 40, 0, 1, 5, 9], 4, head_dim, terms, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_sequence_of_several_tiles_of_disentangled_attention(dtype: torch.dtype) -> None:
    check_disentangled([5, 0, 1, 40, 70, 9], 4, 64, "both", dtype)


class Pages:
    """Keys and values of sequences in pages of 16 tokens, dealt in random order."""

    def __init__(
        self,
        new: list[int],
        past: list[int],
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        dtype: torch.dtype = torch.float16,
        has_codes: bool = False,
    ):
        self.new, self.keys = new, [a + b for a, b in zip(new, past, strict=True)]
        counts = [-(-n // 16) for n in self.keys]
        dealt = iter(torch.randperm(sum(counts) + 2).tolist())
        table = torch.full((len(new), max(counts)), 10**6, dtype=torch.int32)
        for i, count in enumerate(counts):
            table[i, :count] = torch.tensor([next(dealt) for _ in range(count)])
        self.table = table.to(DEVICE)
        shape = (sum(counts) + 2, 16, heads[1], head_dim)
        self.k, self.v = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
        self.scales = {}
        if has_codes:
            (self.k, k_scales), (self.v, v_scales) = quantize_kv(self.k), quantize_kv(self.v)
            scales = [s.transpose(1, 2).contiguous() for s in (k_scales, v_scales)]
            self.scales = {"k_scales": scales[0], "v_scales": scales[1]}
        self.q = rows(sum(new), heads[0], head_dim, dtype)
        self.lengths = torch.tensor(self.keys, dtype=torch.int32, device=DEVICE)

    def run(self, *, padding: int = 0, **options: object) -> Tensor:
        q = torch.cat([self.q, torch.full_like(self.q[:1], torch.nan).repeat(padding, 1, 1)])
        out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=DEVICE)
        triton_kernels.paged_attention(
            q,
            self.k,
            self.v,
            cu_seqlens=bounds_of(self.new),
            page_table=self.table,
            kv_seqlens=self.lengths,
            longest=(max(self.new), max(self.keys)),
            softmax_scale=self.q.shape[2] ** -0.5,
            out=out,
            **({"window": 0, "softcap": 0.0, "alibi_slopes": None} | self.scales | options),
        )
        assert out[len(self.q) :].isnan().all()
        return out[: len(self.q)]

    def expected(self, **options: object) -> Tensor:
        return reference.paged_attention(
            self.q.float(),
            self.k if self.scales else self.k.float(),
            self.v if self.scales else self.v.float(),
            cu_seqlens=bounds_of(self.new),
            page_table=self.table,
            kv_seqlens=self.lengths,
            softmax_scale=self.q.shape[2] ** -0.5,
            **(self.scales | options),
        )


NUM_SMS = [pytest.param(1, id="small GPU"), pytest.param(132, id="132 SMs")]


@pytest.fixture
def num_sms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """More multiprocessors: the keys of a sequence are shared among programs."""
    monkeypatch.setattr(paged, "num_multiprocessors", lambda device: request.param)
    return request.param


STEPS = {
    "decode": ([1, 1, 1, 1], [0, 5, 300, 1100]),
    "prefill": ([40, 1, 130], [0, 0, 0]),
    "mixed": ([40, 0, 1, 70], [0, 7, 33, 300]),
}


@pairwise(
    {
        "options": [{}, {"window": 50}, {"window": 600, "softcap": 5.0}, {"softcap": 2.0}],
        "step": list(STEPS),
        "num_sms": NUM_SMS,
        "has_codes": [False, True],
    },
    indirect=["num_sms"],
)
def test_paged_attention_is_the_reference(
    options: dict[str, object], step: str, num_sms: int, has_codes: bool
) -> None:
    pages = Pages(*STEPS[step], has_codes=has_codes)
    assert_close(pages.run(padding=20, **options), pages.expected(**options), torch.float16)


@pairwise(
    {
        "step": list(STEPS),
        "heads": [(1, 1), (6, 2), (19, 1)],
        "dtype,head_dim": [(torch.float32, 24), (torch.float16, 128)],
        "num_sms": NUM_SMS,
        "has_codes": [False, True],
    },
    indirect=["num_sms"],
)
def test_heads_that_share_keys(
    dtype: torch.dtype,
    head_dim: int,
    heads: tuple[int, int],
    step: str,
    num_sms: int,
    has_codes: bool,
) -> None:
    sizes = {"heads": heads, "head_dim": head_dim, "dtype": dtype, "has_codes": has_codes}
    pages = Pages(*STEPS[step], **sizes)
    slopes = torch.rand(heads[0], device=DEVICE)
    right = pages.expected(alibi_slopes=slopes)
    assert_close(pages.run(alibi_slopes=slopes), right, dtype)


@pairwise(
    {
        "lengths": [
            pytest.param([(1, 64), (1, 300)], id="decode"),
            pytest.param([(5, 33), (70, 200), (3, 64)], id="mixed"),
        ],
        "heads": [(4, 4), (6, 2)],
        "head_dim": [64, 256],
        "num_sms": NUM_SMS,
        "has_codes": [False, True],
    },
    indirect=["num_sms"],
)
def test_pages_before_the_window_are_not_read(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    num_sms: int,
    has_codes: bool,
) -> None:
    """They were given back, and every page that is no sequence's is NaN."""
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    sizes["has_codes"] = has_codes
    step = make_step(lengths, window=37, given_back=True, dtype=torch.float16, **sizes)
    past = {name: t.to(DEVICE) for name, t in step.lengths().items() if isinstance(t, Tensor)}
    q, k_cache, v_cache = (t.to(DEVICE) for t in (step.q, step.k_cache, step.v_cache))
    out = torch.full_like(q, torch.nan)
    triton_kernels.paged_attention(
        q,
        k_cache,
        v_cache,
        **past,
        longest=(max(new for new, _ in lengths), max(total for _, total in lengths)),
        softmax_scale=head_dim**-0.5,
        window=37,
        softcap=0.0,
        alibi_slopes=None,
        out=out,
    )
    assert_exact(out, step, window=37)


def test_heads_of_disentangled_attention_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the products of all of them with positions would be large."""
    monkeypatch.setattr(disentangled, "_TABLE_BYTES", 1)
    check_disentangled([70, 0, 1, 9], 2, 16, "both", torch.float16)
