"""Varlen attention on the CPU: every instruction set, dtype and head size against float64.

Uninitialised memory is NaN in every test here, so neither the output nor the workspace can lend a
right answer that the kernel did not write.
"""

import cpu_kernels
import pytest
import torch
import torch.nn.functional as F
from cpu_kernels import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from torch import Tensor

from bytetx.ops import attention, native

poisoned_memory, isa, dtype = cpu_kernels.poisoned_memory, cpu_kernels.isa, cpu_kernels.dtype
HEAD_DIMS = (*range(8, 129, 8), 160, 192, 256, 1, 5, 20, 33, 260)
# Around every tile edge: vectors of 4, 8 and 16 queries, score tiles of 4, 6 and 12 keys.
SHORT = (0, 1, 2, 3, 0, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 32, 33, 1)
# Around the tiles that share a packed copy (128 queries), the key block and the group (256).
LONG = (127, 128, 129, 1, 255, 256, 257, 0, 511, 512, 513)


def make_qkv(seqlens: tuple[int, ...], num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """[total_tokens, 3, num_heads, head_dim] of unit normals."""
    return torch.randn(sum(seqlens), 3, num_heads, head_dim).to(dtype)


def cu_seqlens_of(seqlens: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *seqlens]).cumsum(0).int()


def run(
    qkv: Tensor,
    seqlens: tuple[int, ...],
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
    sinks: Tensor | None = None,
    window: int = 0,
    isa: str = "auto",
) -> Tensor:
    """The kernel on the three views of one packed qkv buffer, whose rows are 3 * hidden apart."""
    return attention.run_kernel(
        *qkv.unbind(1),
        cu_seqlens_of(seqlens),
        max_seqlen=max(seqlens, default=0),
        softmax_scale=qkv.shape[3] ** -0.5 if scale is None else scale,
        softcap=softcap,
        relative_bias=bias,
        bias_positions=positions,
        sinks=sinks,
        window=window,
        isa=isa,
    )


def plain_torch(
    qkv: Tensor,
    seqlens: tuple[int, ...],
    dtype: torch.dtype,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
    sinks: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """torch's scaled_dot_product_attention, or where scores are capped or there are sinks its
    definition, a sequence at a time, in `dtype` throughout."""
    parts = []
    start = 0
    for n in seqlens:
        q, k, v = qkv[start : start + n].to(dtype).permute(1, 2, 0, 3)
        mask = None
        if bias is not None:
            at = torch.arange(n) if positions is None else positions[start : start + n].long()
            mask = bias[:, at[None, :] - at[:, None] + (bias.shape[1] + 1) // 2 - 1].to(dtype)
        if window:
            far = (torch.arange(n)[None, :] - torch.arange(n)[:, None]).abs() >= window
            hidden = torch.zeros(n, n, dtype=dtype).masked_fill_(far, -torch.inf)
            mask = hidden if mask is None else mask + hidden
        if softcap or sinks is not None:
            scores = q @ k.transpose(1, 2) * (q.shape[2] ** -0.5 if scale is None else scale)
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores if mask is None else scores + mask
            if sinks is not None:
                sink = sinks.to(dtype)[:, None, None].expand(-1, n, 1)
                scores = torch.cat([scores, sink], dim=2)
            attended = scores.softmax(-1)[..., :n] @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        parts.append(attended.transpose(0, 1))
        start += n
    return torch.cat(parts)


def assert_as_exact_as_torch(got: Tensor, qkv: Tensor, seqlens: tuple[int, ...], **kw) -> None:
    """`assert_close` for every sequence and head, against torch on the same rows."""
    exact = plain_torch(qkv, seqlens, torch.float64, **kw)
    theirs = plain_torch(qkv, seqlens, got.dtype, **kw)
    for parts in zip(*(t.split(seqlens) for t in (got, exact, theirs)), strict=True):
        for head in range(qkv.shape[2]):
            assert_close(*(part[:, head] for part in parts))


def assert_close(got: Tensor, exact: Tensor, theirs: Tensor) -> None:
    """rms error <= 2 * rms error of torch in the same dtype + one unit in the last place.

    The root mean square of one head of one sequence: a wrong row stands out, and the luck of the
    single worst element, which differs by more than 2 between two orders of summation, does not.
    The unit is there because torch, on a short input, may happen to round to the nearest.
    """
    assert got.isfinite().all()
    if got.numel() == 0:
        return
    unit = torch.finfo(got.dtype).eps * rms(exact)
    assert rms(got.double() - exact) <= 2 * rms(theirs.double() - exact) + unit, tuple(got.shape)


def rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_short_sequences(head_dim: int, dtype: torch.dtype, isa: str) -> None:
    qkv = make_qkv(SHORT, 2, head_dim, dtype)
    assert_as_exact_as_torch(run(qkv, SHORT, isa=isa), qkv, SHORT)


@pytest.mark.parametrize("head_dim", [8, 20, 32, 48, 64, 80, 128])
def test_long_sequences(head_dim: int, dtype: torch.dtype, isa: str) -> None:
    qkv = make_qkv(LONG, 1, head_dim, dtype)
    assert_as_exact_as_torch(run(qkv, LONG, isa=isa), qkv, LONG)


def test_one_of_8192_among_ones(dtype: torch.dtype, isa: str) -> None:
    seqlens = (1, 1, 8192, 1, 0, 1)
    qkv = make_qkv(seqlens, 1, 32, dtype)
    one, other, long, *rest = run(qkv, seqlens, isa=isa).split(seqlens)
    ones = [0, 1, 8194, 8195]
    assert torch.equal(torch.cat([one, other, *rest]), qkv[ones, 2])  # one key: its own value
    q, k, v = qkv[2:8194].permute(1, 2, 0, 3)
    some = slice(None, None, 61)  # float64 scores of all rows would take half a GiB
    exact = F.scaled_dot_product_attention(q[:, some].double(), k.double(), v.double())
    theirs = F.scaled_dot_product_attention(q[:, some], k, v)
    assert_close(long[some, 0], exact[0], theirs[0])
    assert long.isfinite().all()


@pytest.mark.parametrize("spread", [0.01, 8.0], ids=["flat", "peaked"])
def test_flat_and_peaked_scores(spread: float, dtype: torch.dtype, isa: str) -> None:
    seqlens = (70, 600)  # peaked, a few rows are too few: one key decides each row's error
    qkv = make_qkv(seqlens, 2, 64, dtype) * spread
    assert_as_exact_as_torch(run(qkv, seqlens, isa=isa), qkv, seqlens)


@pytest.mark.parametrize("scale", [0.0, -0.25, 1.0])
def test_any_softmax_scale(scale: float, dtype: torch.dtype, isa: str) -> None:
    seqlens = (5, 70, 300)
    qkv = make_qkv(seqlens, 2, 32, dtype)
    assert_as_exact_as_torch(run(qkv, seqlens, scale=scale, isa=isa), qkv, seqlens, scale=scale)


@pairwise({"softcap": [0.3, 5.0, 50.0], "has_bias": [False, True], "head_dim": [64, 256]})
def test_softcap(
    softcap: float, has_bias: bool, head_dim: int, dtype: torch.dtype, isa: str
) -> None:
    bias = torch.randn(2, 2 * 300 - 1) if has_bias else None
    for seqlens, scale in (((1, 0, 5, 17, 33, 300), None), ((70, 300), 3.0)):
        qkv = make_qkv(seqlens, 2, head_dim, dtype)  # scores below the cap, and far above it
        kw = {"softcap": softcap, "bias": bias, "scale": scale}
        assert_as_exact_as_torch(run(qkv, seqlens, isa=isa, **kw), qkv, seqlens, **kw)


@pairwise(
    {
        "lengths": [SHORT, LONG],
        "sink": [-40.0, 0.0, 3.0],
        "options": [
            *({}, {"window": 5}, {"window": 129}, {"softcap": 2.0}),
            *({"scale": 0.0}, {"scale": -0.3, "window": 40}),
        ],
    }
)
def test_sinks(
    lengths: tuple[int, ...],
    sink: float,
    options: dict[str, object],
    dtype: torch.dtype,
    isa: str,
) -> None:
    """Sinks far below the scores, and among them."""
    qkv = make_qkv(lengths, 2, 40, dtype)
    sinks = torch.tensor([sink, sink - 1.5])
    got = run(qkv, lengths, sinks=sinks, isa=isa, **options)
    exact = plain_torch(qkv, lengths, torch.float64, sinks=sinks, **options)
    theirs = plain_torch(qkv, lengths, dtype, sinks=sinks, **options)
    assert_close(got, exact, theirs)


@pytest.mark.parametrize("scale", [None, 0.0, -0.3])
def test_a_sink_far_above_every_score_leaves_the_rest_its_weights(
    scale: float | None, isa: str
) -> None:
    qkv, sinks = make_qkv(SHORT, 2, 40, torch.float32), torch.tensor([60.0, 58.5])
    got = run(qkv, SHORT, sinks=sinks, scale=scale, isa=isa)
    exact = plain_torch(qkv, SHORT, torch.float64, sinks=sinks, scale=scale)
    # A weight is 2^-87, whose exponent is rounded to 2^-18 where it comes from e^-60.
    assert rms(got.double() - exact) <= 2**-18 * rms(exact)


def test_a_sink_far_below_every_score_changes_nothing(dtype: torch.dtype, isa: str) -> None:
    qkv = make_qkv(SHORT, 2, 40, dtype)
    for sink in (-1e20, -3e38):
        got = run(qkv, SHORT, sinks=torch.full((2,), sink), isa=isa)
        assert torch.equal(got, run(qkv, SHORT, isa=isa))


@pytest.mark.parametrize("has_positions", [False, True])
def test_relative_bias(has_positions: bool, dtype: torch.dtype, isa: str) -> None:
    seqlens = (1, 5, 16, 33, 0, 90, 300)
    span = 320
    qkv = make_qkv(seqlens, 3, 32, dtype)
    bias = torch.randn(3, 2 * span - 1)
    positions = None
    if has_positions:  # as behind a mask with holes: rising, not dense
        positions = torch.cat([torch.randperm(span)[:n].sort().values for n in seqlens]).int()
    kw = {"bias": bias, "positions": positions}
    assert_as_exact_as_torch(run(qkv, seqlens, isa=isa, **kw), qkv, seqlens, **kw)


def test_bias_table_is_read_to_its_ends_only(isa: str) -> None:
    seqlens = (257, 19)  # the span is the longest length, so both ends of the table are in use
    qkv = make_qkv(seqlens, 2, 16, torch.float32)
    padded = torch.full((4, 2 * 257 - 1), torch.nan)
    padded[1:3] = torch.randn(2, 2 * 257 - 1)
    assert_as_exact_as_torch(
        run(qkv, seqlens, bias=padded[1:3], isa=isa), qkv, seqlens, bias=padded[1:3]
    )


@pytest.mark.parametrize("kind", ["plain", "bias", "sinks"])
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_batch_mates_order_and_threads_change_no_bit(
    num_threads: int, kind: str, dtype: torch.dtype, isa: str
) -> None:
    seqlens = (90, 1, 700, 0, 17, 256, 33, 4)
    qkv = make_qkv(seqlens, 4, 32, dtype)
    more: dict[str, Tensor] = {}
    if kind != "plain":
        more[kind] = torch.randn(4, 2 * 700 - 1) if kind == "bias" else torch.randn(4)
    each = qkv.split(seqlens)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [run(x, (len(x),), isa=isa, **more) for x in each]
        torch.set_num_threads(num_threads)
        order = torch.randperm(len(seqlens)).tolist()
        shuffled = tuple(seqlens[i] for i in order)
        got = run(torch.cat([each[i] for i in order]), shuffled, isa=isa, **more)
    finally:
        torch.set_num_threads(before)
    for i, x in zip(order, got.split(shuffled), strict=True):
        assert torch.equal(x, alone[i]), f"length {seqlens[i]}"


def test_nan_stays_in_its_sequence_and_head(dtype: torch.dtype, isa: str) -> None:
    seqlens = (40, 41, 42)
    qkv = make_qkv(seqlens, 2, 32, dtype)
    clean = run(qkv, seqlens, isa=isa)
    qkv[60, 1, 1, 3] = torch.nan  # a key of the second sequence, second head
    got = run(qkv, seqlens, isa=isa)
    assert got[40:81, 1].isnan().all()
    got[40:81, 1] = clean[40:81, 1]
    assert torch.equal(got, clean)


def test_rows_further_apart_than_a_packed_qkv(dtype: torch.dtype, isa: str) -> None:
    seqlens = (3, 50)
    wide = torch.full((53, 3 * 2 * 24 + 7), torch.nan, dtype=dtype)  # odd: bf16 rows off 4 bytes
    qkv = wide[:, 7:].unflatten(1, (3, 2, 24))
    qkv.copy_(make_qkv(seqlens, 2, 24, dtype))
    assert torch.equal(run(qkv, seqlens, isa=isa), run(qkv.contiguous(), seqlens, isa=isa))


@pytest.mark.parametrize("seqlens", [(), (0,), (0, 0, 0)])
def test_no_tokens(seqlens: tuple[int, ...], dtype: torch.dtype, isa: str) -> None:
    assert run(make_qkv(seqlens, 2, 32, dtype), seqlens, isa=isa).shape == (0, 2, 32)


@settings(max_examples=60)
@given(
    seqlens=st.lists(st.integers(0, 80) | st.integers(200, 300), min_size=1, max_size=6),
    num_heads=st.integers(1, 4),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(list(DTYPES.values())),
    isa=st.sampled_from(native.available_isas()),
    seed=st.integers(0, 1 << 16),
)
def test_any_lengths(
    seqlens: list[int], num_heads: int, head_dim: int, dtype: torch.dtype, isa: str, seed: int
) -> None:
    torch.manual_seed(seed)
    lengths = tuple(seqlens)
    qkv = make_qkv(lengths, num_heads, head_dim, dtype)
    assert_as_exact_as_torch(run(qkv, lengths, isa=isa), qkv, lengths)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [([1, 9], "start at 0"), ([0, 8], "end at total_tokens"), ([0, 6, 4, 9], "not decrease")],
)
def test_wrong_cu_seqlens_are_refused(cu_seqlens: list[int], message: str) -> None:
    q, k, v = make_qkv((9,), 2, 16, torch.float32).unbind(1)
    with pytest.raises(ValueError, match=message):
        attention.varlen_attention(q, k, v, torch.tensor(cu_seqlens).int(), max_seqlen=9)


def test_sequence_longer_than_the_bias_is_refused() -> None:
    q, k, v = make_qkv((9,), 2, 16, torch.float32).unbind(1)
    with pytest.raises(ValueError, match="span the longest sequence, its span, got 5"):
        attention.varlen_attention(
            q, k, v, cu_seqlens_of((9,)), max_seqlen=5, relative_bias=torch.zeros(2, 9)
        )
