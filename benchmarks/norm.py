"""Suite `norm`: the passes over memory between an encoder's GEMMs, against torch on a GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import DTYPES, Gpu, Work, compile_rival, gpu_suite, graph_us
from benchmarks.lengths import Lengths, prefix_sums
from benchmarks.suite import Measurement, Suite, measured
from bytetx.ops.embedding import embed
from bytetx.ops.norm import layer_norm
from bytetx.ops.pooling import pool

_HIDDEN_SIZES = (384, 768, 1024)
_TOKENS = 32768
_VOCABULARY, _POSITIONS = 30522, 512
_NUM_BUFFERS = 4  # operands and results taken in turn, together larger than the L2
_EPS = 1e-12

Op = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: an operation on [tokens, hidden_size] rows."""

    name: str
    op: str
    hidden_size: int
    tokens: int = _TOKENS
    dtype: str = "fp16"


@dataclass(frozen=True, slots=True)
class Contest:
    """One operation: sets of arguments to be taken in turn, who computes it, and what it must move.

    ours, torch: take one set of arguments.  compiles: whether torch.compile's version is a rival.
    """

    arguments: list[tuple[Tensor, ...]]
    ours: Op
    torch: Op
    num_bytes: int
    compiles: bool = True


def suite(*, patterns: list[str]) -> Suite:
    return gpu_suite("norm", shapes(), measure, patterns=patterns, unit="us")


def shapes() -> list[Shape]:
    return [Shape(f"{op}-{size}", op, size) for op in _CONTESTS for size in _HIDDEN_SIZES]


def measure(shape: Shape, gpu: Gpu) -> Measurement:
    """Ours, torch's own operations one after another, and what torch.compile makes of them."""
    torch.manual_seed(0)
    contest = _CONTESTS[shape.op](shape)
    notes: list[str] = []
    ops = {"ours": contest.ours, "torch": contest.torch}
    if contest.compiles:
        compiled = compile_rival("torch-compiled", contest.torch, contest.arguments[0], notes)
        ops |= compiled

    runs = {name: partial(in_turn, op, contest.arguments) for name, op in ops.items()}
    found = graph_us(runs, calls=len(contest.arguments))
    work = Work(contest.num_bytes)
    sizes = {
        "total_tokens": shape.tokens,
        "hidden_size": shape.hidden_size,
        "bytes": work.num_bytes,
    }
    return measured(found, gpu.rates.floor_us(work), sizes, notes)


def in_turn(op: Op, arguments: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """The results of all calls, which live until the last one: else each call would be given the
    memory of the one before it, which the L2 still has."""
    return [op(*given) for given in arguments]


def _residual_norm(shape: Shape) -> Contest:
    weight, bias = _rows(shape, 2)
    arguments: list[tuple[Tensor, ...]] = [
        (_rows(shape), _rows(shape)) for _ in range(_NUM_BUFFERS)
    ]

    def ours(x: Tensor, residual: Tensor) -> Tensor:
        return layer_norm(x, weight, bias, eps=_EPS, residual=residual)

    def theirs(x: Tensor, residual: Tensor) -> Tensor:
        return F.layer_norm(x + residual, weight.shape, weight, bias, _EPS)

    return Contest(arguments, ours, theirs, 3 * _nbytes(shape))


def _embedding(shape: Shape) -> Contest:
    tables = [_rows(shape, rows) for rows in (_VOCABULARY, _POSITIONS, 2)]
    weight, bias = _rows(shape, 2)
    ids = [
        [torch.randint(len(t), (shape.tokens,), device="cuda", dtype=torch.int32) for t in tables]
        for _ in range(_NUM_BUFFERS)
    ]

    def ours(words: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        return embed(
            words,
            positions,
            types,
            word=tables[0],
            position=tables[1],
            token_type=tables[2],
            norm_weight=weight,
            norm_bias=bias,
            eps=_EPS,
        )

    def theirs(words: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        word, position, token_type = map(F.embedding, (words, positions, types), tables)
        return F.layer_norm(word + position + token_type, weight.shape, weight, bias, _EPS)

    # Each row that the ids name is read once, however often they name it.
    rows = sum(len(column.unique()) for column in ids[0]) + shape.tokens
    itemsize = DTYPES[shape.dtype].itemsize
    num_bytes = rows * shape.hidden_size * itemsize + sum(t.nbytes for t in ids[0])
    return Contest([tuple(columns) for columns in ids], ours, theirs, num_bytes)


def _pool_mean(shape: Shape) -> Contest:
    lengths = Lengths().lognormal(128, 0.8, shape.tokens // 64, 4, 512)
    lengths = lengths[: int((lengths.cumsum() <= shape.tokens).sum())]
    lengths[-1] += shape.tokens - lengths.sum()
    cu_seqlens = prefix_sums(lengths)
    counts = cu_seqlens.diff()
    owners = torch.arange(len(lengths), device="cuda").repeat_interleave(counts)
    arguments: list[tuple[Tensor, ...]] = [(_rows(shape),) for _ in range(_NUM_BUFFERS)]

    def ours(x: Tensor) -> Tensor:
        return pool(x, cu_seqlens, mode="mean", normalize=True)

    def theirs(x: Tensor) -> Tensor:
        sums = x.new_zeros((len(lengths), x.shape[1]), dtype=torch.float32)
        sums.index_add_(0, owners, x.float())
        return F.normalize(sums / counts.unsqueeze(1), dim=1)

    num_bytes = _nbytes(shape) + len(lengths) * shape.hidden_size * torch.float32.itemsize
    return Contest(arguments, ours, theirs, num_bytes, compiles=False)


def _rows(shape: Shape, rows: int | None = None) -> Tensor:
    size = (shape.tokens if rows is None else rows, shape.hidden_size)
    return torch.randn(size, device="cuda", dtype=DTYPES[shape.dtype])


def _nbytes(shape: Shape) -> int:
    return shape.tokens * shape.hidden_size * DTYPES[shape.dtype].itemsize


_CONTESTS: dict[str, Callable[[Shape], Contest]] = {
    "residual-norm": _residual_norm,
    "embedding": _embedding,
    "pool-mean": _pool_mean,
}
