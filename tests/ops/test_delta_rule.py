"""The gated delta rule of packed sequences against float64, in torch and in Triton."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bytetx.ops import delta_rule as op
from bytetx.ops.delta_chunk import CHUNK
from bytetx.ops.delta_rule import DeltaGates, DeltaPast, gated_delta_rule, gated_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
# The interpreter multiplies no bf16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
SEQLENS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 0, 2 * CHUNK + 5, 2]
# key heads, value heads, k_dim, v_dim; the last has rows that begin at multiples of 16 bytes
SIZES = [(2, 4, 12, 8), (1, 2, 128, 128)] + [(16, 32, 128, 128)] * (DEVICE == "cuda")
PADDING = 5


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Has the ops run by one backend; Triton's kernels are interpreted where there is no GPU."""
    runs: tuple[Callable[..., Tensor], ...] = (op._run_torch, op._norm_in_torch)
    if request.param == "triton":
        pytest.importorskip("triton")
        from bytetx.ops import triton_backend, triton_kernels

        monkeypatch.setattr(triton_backend, "kernels", lambda device: triton_kernels)
        runs = (op._run_triton, op._norm_in_triton)

    class Chosen:
        def __init__(self, run: Callable[..., Tensor]):
            self.run = run

    for operation, run in zip((op.DELTA_RULE, op.GATED_NORM), runs, strict=True):
        monkeypatch.setattr(operation, "choose", partial(lambda own, *shape: own, Chosen(run)))
    return str(request.param)


class Inputs:
    """Rows of random tokens, with padding of NaN behind them, as views of wider rows."""

    def __init__(self, total: int, sizes: tuple[int, ...], dtype: torch.dtype, seed: int = 0):
        k_heads, heads, k_dim, v_dim = self.sizes = sizes
        torch.manual_seed(seed)
        widths = [k_heads * k_dim, k_heads * k_dim, heads * v_dim, heads, heads]
        rows = torch.randn(total + PADDING, sum(widths)).to(DEVICE, dtype)
        rows[total:] = torch.nan
        self.rows = rows
        q, k, v, decay, beta = rows.split(widths, 1)
        self.q, self.k = q.unflatten(1, (-1, k_dim)), k.unflatten(1, (-1, k_dim))
        self.v = v.unflatten(1, (-1, v_dim))
        # A head that forgets nothing, and one that forgets almost all at once.
        rates = torch.linspace(-1e-4, -4, heads, device=DEVICE)
        self.gates = DeltaGates(decay, beta, rates, torch.randn(heads, device=DEVICE))

    def run(self, rows: slice, seqlens: list[int], past: DeltaPast | None = None) -> Tensor:
        given = self.gates
        gates = DeltaGates(given.decay[rows], given.beta[rows], given.rates, given.decay_bias)
        lengths = torch.tensor(seqlens, dtype=torch.int32)
        ends = F.pad(lengths.cumsum(0).int(), (1, 0)).to(DEVICE)
        return gated_delta_rule(
            *(x[rows] for x in (self.q, self.k, self.v)),
            gates,
            ends,
            lengths,
            max_seqlen=max(seqlens, default=0),
            past=past,
        )

    def exact(self, rows: slice, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(result, last state) of one sequence, token by token in float64."""
        k_heads, heads, k_dim, v_dim = self.sizes
        q, k = (x[rows].double().repeat_interleave(heads // k_heads, 1) for x in (self.q, self.k))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        v, gates = self.v[rows].double(), self.gates
        logs = F.softplus(gates.decay[rows].double() + gates.decay_bias) * gates.rates
        b, out = gates.beta[rows].double().sigmoid(), torch.zeros_like(v)
        if state is None:
            state = torch.zeros(heads, k_dim, v_dim, dtype=torch.float64, device=DEVICE)
        state = state.double()
        for t in range(len(v)):
            state = state * logs[t].exp()[:, None, None]
            change = v[t] - (state * k[t][..., None]).sum(1)
            state = state + k[t][..., None] * (b[t][:, None] * change)[:, None]
            out[t] = (state * q[t][..., None]).sum(1) * k_dim**-0.5
        return out, state


def assert_close(ours: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    """To the roundings of a chunk's solutions and states, which are products of dtype's."""
    eps = torch.finfo(dtype).eps
    scale = max(1.0, float(right.abs().max())) if right.numel() else 1.0
    torch.testing.assert_close(ours.double(), right, rtol=0, atol=24 * eps * scale)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_sequences(backend: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Lengths around a chunk's; batch mates change no bit, padding gives zeros."""
    total = sum(SEQLENS)
    inputs = Inputs(total, sizes, dtype)
    same = inputs.k[total - CHUNK : total]
    same[:] = same[0].clone()  # powers of their products would overflow
    out = inputs.run(slice(None), SEQLENS)
    assert out.shape == inputs.v.shape and out.dtype == dtype and not out[total:].any()
    start = 0
    for length in SEQLENS:
        rows = slice(start, start + length)
        start += length
        assert_close(out[rows], inputs.exact(rows)[0], dtype)
        if length == CHUNK + 1:
            assert torch.equal(inputs.run(rows, [length]), out[rows]) or backend == "torch"


@pytest.mark.parametrize("dtype", DTYPES)
def test_thousands_of_tokens(backend: str, dtype: torch.dtype) -> None:
    inputs = Inputs(2050, (1, 1, 16, 16), dtype)
    out = inputs.run(slice(0, 2050), [2050])
    assert_close(out, inputs.exact(slice(0, 2050))[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_sequences(backend: str, dtype: torch.dtype) -> None:
    seqlens = [1 + i * 7 % 5 for i in range(40)]
    inputs = Inputs(sum(seqlens), (1, 1, 16, 16), dtype)
    out, start = inputs.run(slice(None), seqlens), 0
    for length in seqlens:
        rows = slice(start, start + length)
        start += length
        assert_close(out[rows], inputs.exact(rows)[0], dtype)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_with_a_state(backend: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """Pieces of 0 to many tokens, and steps of one for each; slots start as NaN."""
    totals = [8, 77, 3, 70]
    texts = [Inputs(total, sizes, dtype, seed) for seed, total in enumerate(totals)]
    both = Inputs(0, sizes, dtype)
    heads, k_dim, v_dim = sizes[1:]
    memory = torch.full((6, heads, k_dim, v_dim), torch.nan, device=DEVICE)
    slots, done = torch.tensor([4, 0, 3, 1], dtype=torch.int32, device=DEVICE), [0] * 4
    pieces: list[list[Tensor]] = [[] for _ in texts]
    for counts in ([1, 65, 0, 1], [1, 1, 1, 1], [5, 10, 1, 67], [1, 1, 1, 1]):
        own = [t.rows[d : d + n] for t, d, n in zip(texts, done, counts, strict=True)]
        done = [d + n for d, n in zip(done, counts, strict=True)]
        rows = torch.cat(own)
        step = Inputs(len(rows), sizes, dtype)
        step.rows[: len(rows)] = rows
        step.gates = DeltaGates(
            step.gates.decay, step.gates.beta, both.gates.rates, both.gates.decay_bias
        )
        kv_seqlens = torch.tensor(done, dtype=torch.int32, device=DEVICE)
        out = step.run(slice(0, len(rows)), counts, DeltaPast(memory, slots, kv_seqlens))
        for some, piece in zip(pieces, out.split(counts), strict=True):
            some.append(piece)
    assert done == totals
    for i, text in enumerate(texts):
        text.gates = DeltaGates(
            text.gates.decay, text.gates.beta, both.gates.rates, both.gates.decay_bias
        )
        right, state = text.exact(slice(0, totals[i]))
        assert_close(torch.cat(pieces[i]), right, dtype)
        assert_close(memory[slots[i]], state, dtype)
    assert memory[[2, 5]].isnan().all()  # a slot without a sequence is left alone


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm(backend: str, dtype: torch.dtype) -> None:
    for tokens, heads, width in ((1, 1, 128), (7, 3, 12), (70, 2, 300)):
        x = torch.randn(tokens, heads, width, device=DEVICE).to(dtype)
        gate = torch.randn(tokens, heads * width + 5, device=DEVICE).to(dtype)[:, : heads * width]
        weight = torch.randn(width, device=DEVICE).to(dtype)
        wide = x.double()
        normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        right = normed.flatten(1) * F.silu(gate.double())
        eps = torch.finfo(dtype).eps
        ours = gated_norm(x, gate, weight, 1e-6)
        torch.testing.assert_close(ours.double(), right, rtol=4 * eps, atol=4 * eps)


def test_no_rows(backend: str) -> None:
    inputs = Inputs(0, SIZES[0], torch.float32)
    assert inputs.run(slice(0, 0), []).shape == (0, 4, 8)
    assert inputs.run(slice(0, 0), [0, 0]).shape == (0, 4, 8)
    assert not inputs.run(slice(None), [0]).any()


def test_what_is_refused() -> None:
    inputs, one = Inputs(4, SIZES[0], torch.float32), torch.zeros(1, dtype=torch.int32)
    past = DeltaPast(torch.zeros(1, 4, 8, 12), one, one)
    with pytest.raises(ValueError, match="past.memory"):
        inputs.run(slice(0, 4), [4], past)
    inputs.v = inputs.v.half()
    with pytest.raises(ValueError, match="^q "):
        inputs.run(slice(0, 4), [4])
    x = torch.randn(4, 2, 8)
    with pytest.raises(ValueError, match="gate"):
        gated_norm(x, torch.randn(4, 8), torch.randn(8), 1e-6)
    with pytest.raises(ValueError, match="x must be contiguous"):
        gated_norm(x.transpose(0, 1), torch.randn(2, 32), torch.randn(8), 1e-6)
