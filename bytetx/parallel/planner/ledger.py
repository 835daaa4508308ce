"""Every collective of one forward pass on a grid, with its bytes: what the runtime counts, too."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from bytetx.parallel.grid import Grid, gathered_numbers
from bytetx.parallel.layout import shard_model
from bytetx.parallel.planner.machine import Kind
from bytetx.parallel.planner.shapes import ModelShape
from bytetx.parallel.row_scheme import RowScheme

F32_BYTES = 4  # per sum that norms of whole projections need over y
F64_BYTES = 8  # per sum that norms over x need


@dataclass(frozen=True, slots=True)
class LocalSizes:
    """A rank's share of every layer; weights: numbers of its linear layers before they are divided
    over z."""

    num_heads: int
    num_kv_heads: int
    inner: int
    hidden: int
    vocab: int
    weights: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """`count` equal collectives.  axis: of the grid, or "slots", all of data and z together.

    payload_bytes: of what one gathers or sums.  what: which tensor.  is_of_layer: once or more in
    every layer; else once per pass.
    """

    axis: str
    kind: Kind
    payload_bytes: int
    count: int
    what: str
    is_of_layer: bool


def local_sizes(shape: ModelShape, grid: Grid, *, rank: int = 0) -> LocalSizes:
    """Raises InputError where the model's heads or hidden features cannot be divided so."""
    shard = shard_model(shape, rank=grid.coordinates(rank).y, size=grid.y)
    hidden = shape.hidden_size // grid.x
    heads, kv_heads = len(shard.heads), len(shard.kv_heads)
    features = 2 * (heads + kv_heads) * shape.head_dim  # q, k, v, and the attention's output
    weights = hidden * (features + (shape.num_inner + 1) * len(shard.inner))
    return LocalSizes(heads, kv_heads, len(shard.inner), hidden, len(shard.vocab), weights)


def pass_transfers(
    shape: ModelShape,
    grid: Grid,
    local: LocalSizes,
    *,
    num_rows: int,
    total_rows: int,
    itemsize: int,
    row_scheme: RowScheme | None = None,
) -> list[Transfer]:
    """The collectives of a rank whose slot has num_rows of a pass's total_rows tokens.

    row_scheme: of the y axis, where long passes divide their rows: their all-reduces are then a
    reduce-scatter and an all-gather, of the same bytes in total.
    """
    layers, hidden = shape.num_layers, shape.hidden_size
    found: list[Transfer] = []

    def add(axis: str, kind: Kind, numbers: int, each: int, count: int, what: str) -> None:
        size = grid.num_slots if axis == "slots" else grid.length(axis)
        if size > 1 and numbers and count:
            of_layer = count >= layers
            found.append(Transfer(axis, kind, numbers * each, count, what, of_layer))

    z_numbers = gathered_numbers(local.weights, grid.z)
    add("z", "all_gather", z_numbers, itemsize, layers, "weights of the next layer")
    are_rows_divided = (
        grid.x == 1 and row_scheme is not None and row_scheme.offsets(num_rows, grid.y) is not None
    )
    sums = shape.sums_per_layer * layers
    embedded = num_rows * shape.embedding_size
    if are_rows_divided:
        rows = num_rows * hidden
        add("y", "reduce_scatter", embedded, itemsize, 1, "embedded tokens")
        add("y", "all_gather", rows, itemsize, 2 * layers, "rows before q, k, v and feed-forward")
        add("y", "reduce_scatter", rows, itemsize, sums, "sums after both halves")
        add("y", "all_gather", rows, itemsize, 1, "rows after the last layer")
    else:
        add("y", "all_reduce", embedded, itemsize, 1, "embedded tokens")
        halves = num_rows * local.hidden
        add("y", "all_reduce", halves, itemsize, sums, "sums after both halves")
    if shape.norms_projections:
        add("y", "all_reduce", 2 * num_rows, F32_BYTES, layers, "squares of q and k")
    qkv = num_rows * (local.num_heads + 2 * local.num_kv_heads) * shape.head_dim
    add("x", "all_reduce", qkv, itemsize, layers, "sums of q, k and v")
    inner = num_rows * local.inner * shape.num_inner
    add("x", "all_reduce", inner, itemsize, layers, "sums of the inner features")
    norms = shape.norms_per_layer * layers + shape.has_first_norm
    add(
        "x",
        "all_reduce",
        shape.norm_statistics * num_rows,
        F64_BYTES,
        norms,
        "sums and squares of norms",
    )
    add("x", "all_gather", num_rows * hidden, itemsize, 1, "features after the last layer")
    add(
        "slots",
        "all_gather",
        total_rows * (shape.output_size or hidden),
        itemsize,
        1,
        "rows of all slots",
    )
    return found


def count_transfers(transfers: Iterable[Transfer]) -> Counter[tuple[str, str, int]]:
    """(axis, kind, payload bytes) -> how often: the form in which the runtime counts."""
    counts: Counter[tuple[str, str, int]] = Counter()
    for transfer in transfers:
        counts[transfer.axis, transfer.kind, transfer.payload_bytes] += transfer.count
    return counts
