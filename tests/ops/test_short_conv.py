"""The causal convolution of packed sequences against float64, in torch and in Triton."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise
from torch import Tensor

from bytetx.ops import short_conv as op
from bytetx.ops.short_conv import ConvPast, short_conv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SEQLENS = [3, 0, 1, 70, 2, 0, 17, 1]


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Has the op run by one backend; Triton's kernels are interpreted where there is no GPU."""
    run: Callable[..., Tensor] = op._run_torch
    if request.param == "triton":
        pytest.importorskip("triton")
        from bytetx.ops import triton_backend, triton_kernels

        monkeypatch.setattr(triton_backend, "kernels", lambda device: triton_kernels)
        run = op._run_triton

    class Chosen:
        pass

    chosen = Chosen()
    chosen.run = run  # type: ignore[attr-defined]
    monkeypatch.setattr(op.SHORT_CONV, "choose", lambda *shape_class: chosen)
    return str(request.param)


def ends(seqlens: list[int]) -> Tensor:
    return torch.tensor([0, *seqlens]).cumsum(0).int().to(DEVICE)


def exact(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, is_gated: bool, has_silu: bool
) -> Tensor:
    """One sequence whole, in float64; x: [tokens, 3 * channels or channels]."""
    channels, taps = weight.shape
    rounded, x = x.dtype, x.double()
    u, gate = x[:, :channels], x[:, channels : 2 * channels]
    if is_gated:
        u = (u * x[:, 2 * channels :]).to(rounded).double()
    padded = F.pad(u.t()[None], (taps - 1, 0))
    own_bias = None if bias is None else bias.double()
    out = F.conv1d(padded, weight.double()[:, None], own_bias, groups=channels)[0].t()
    out = F.silu(out) if has_silu else out
    return out * gate if is_gated else out


def assert_close(ours: Tensor, right: Tensor) -> None:
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.double(), right, rtol=4 * eps, atol=32 * eps)


@pairwise(
    {
        "taps": [1, 3, 4],
        "channels": [5, 48, 300],
        "dtype": DTYPES,
        "is_gated": [False, True],
        "has_bias": [False, True],
    }
)
def test_whole_sequences(
    backend: str, taps: int, channels: int, dtype: torch.dtype, is_gated: bool, has_bias: bool
) -> None:
    """Rows have strides of their own, and NaN behind the last sequence reaches none of them."""
    width, total = (3 if is_gated else 1) * channels, sum(SEQLENS)
    wide = torch.randn(total + 9, width + 7, device=DEVICE).to(dtype)
    wide[total:] = torch.nan
    wide[:, width:] = torch.nan
    x = wide[:, :width]
    weight = torch.randn(channels, taps, device=DEVICE).to(dtype)
    bias = torch.randn(channels, device=DEVICE).to(dtype) if has_bias else None
    kind = {"is_gated": is_gated, "has_silu": not is_gated}
    out = short_conv(x, weight, bias, ends(SEQLENS), **kind)
    assert out.shape == (total + 9, channels) and out.dtype == dtype
    for own, ours in zip(x[:total].split(SEQLENS), out[:total].split(SEQLENS), strict=True):
        if len(own):
            assert_close(ours, exact(own, weight, bias, **kind))
            alone = short_conv(own, weight, bias, ends([len(own)]), **kind)
            if is_gated:  # batch mates change no bit
                assert torch.equal(alone, ours)
            else:  # torch's SiLU has other bits at the ends of rows
                assert_close(alone, ours.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_pieces_with_a_state(backend: str, is_gated: bool, dtype: torch.dtype) -> None:
    """Pieces of 0 to many tokens give the bits of whole sequences; slots start as NaN."""
    channels, taps, totals = 20, 4, [9, 30, 1, 6]
    width = (3 if is_gated else 1) * channels
    texts = [torch.randn(n, width, device=DEVICE).to(dtype) for n in totals]
    weight = torch.randn(channels, taps, device=DEVICE).to(dtype)
    kind = {"is_gated": is_gated, "has_silu": False}
    whole = short_conv(torch.cat(texts), weight, None, ends(totals), **kind).split(totals)
    state = torch.full((6, taps - 1, channels), torch.nan, device=DEVICE).to(dtype)
    slots, done = torch.tensor([4, 0, 3, 1], dtype=torch.int32, device=DEVICE), [0] * 4
    pieces: list[list[Tensor]] = [[] for _ in texts]
    for counts in ([1, 2, 0, 3], [1, 0, 1, 1], [2, 20, 0, 0], [0, 1, 0, 1], [5, 7, 0, 1]):
        own = [t[d : d + n] for t, d, n in zip(texts, done, counts, strict=True)]
        done = [d + n for d, n in zip(done, counts, strict=True)]
        # Padding, as of a step of a bucket: a sequence that starts, in a slot that is nobody's.
        x = torch.cat([*own, torch.full((3, width), torch.nan, device=DEVICE).to(dtype)])
        kv_seqlens = torch.tensor([*done, 3], dtype=torch.int32, device=DEVICE)
        past = ConvPast(state, F.pad(slots, (0, 1), value=5), kv_seqlens)
        rows = short_conv(x, weight, None, ends([*counts, 3]), past=past, **kind)
        for some, piece in zip(pieces, rows[: sum(counts)].split(counts), strict=True):
            some.append(piece)
    assert done == totals
    for some, rows in zip(pieces, whole, strict=True):
        assert torch.equal(torch.cat(some), rows)
    assert state[2].isnan().all()  # a slot without a sequence is left alone


def test_no_rows(backend: str) -> None:
    weight, none = torch.randn(8, 3, device=DEVICE), torch.randn(0, 8, device=DEVICE)
    assert short_conv(none, weight, None, ends([])).shape == (0, 8)
    assert short_conv(none, weight, None, ends([0, 0])).shape == (0, 8)


def test_what_is_refused() -> None:
    x, weight, one = torch.randn(4, 24), torch.randn(8, 3), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="rows of 3 \\* 8 adjacent features or more"):
        short_conv(x[:, :20], weight, None, one, is_gated=True)
    with pytest.raises(ValueError, match="weight"):
        short_conv(x, weight.half(), None, one)
    past = ConvPast(torch.zeros(2, 2, 8), one[1:], one[1:])
    with pytest.raises(ValueError, match="past.state"):
        short_conv(x, weight, None, one, past=ConvPast(past.state[:, :1], past.slots, one[1:]))
    with pytest.raises(ValueError, match="past.slots"):
        short_conv(x, weight, None, one, past=ConvPast(past.state, one, one[1:]))
