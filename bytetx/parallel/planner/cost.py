"""The time and memory of one forward pass on a grid: products, attention, communication.

First-order: a product takes its FLOP or its bytes, whichever is longer; a collective takes a
latency and its bytes over the bandwidth of its group (bytetx.parallel.planner.machine). Gathers of
weights run beside the layer before; a share of tensor parallelism's sums is hidden by kernels.
What a CUDA graph replays has the rows of its bucket; what none replays takes at least as long as
the host needs to launch it. Around its layers a pass takes ids to the ranks and results back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bytetx.buckets import round_tokens
from bytetx.parallel.grid import Grid, gathered_numbers
from bytetx.parallel.planner.ledger import LocalSizes, Transfer, pass_transfers
from bytetx.parallel.planner.machine import Around, Machine, wire_bytes
from bytetx.parallel.planner.shapes import ModelShape

# What the host launches in a layer: products, attention and norms; where hidden features are
# divided (x), also the sums, squares and statistics of norms. Fitted to two H100s.
_LAYER_OPS, _LAYER_OPS_OF_X = 6, 27
# Of the time of all that a copy of weights writes, what shows beside the GEMMs that read the same
# memory; and of the memory's rate, what x's operations, which are torch's, reach. Fitted to two
# H100s.
_SHARED = 1.0
_UNFUSED_RATE = 0.6
_FUSED_OPS = 2  # a product with its collective in one kernel, and what it waits for


@dataclass(frozen=True, slots=True)
class TransferCost:
    """A row of the ledger.  wait_us: of all `count` collectives, alone.  exposed_us: what of it is
    not hidden; hides_behind: what runs meanwhile, empty where nothing does."""

    transfer: Transfer
    group_size: int
    wait_us: float
    exposed_us: float
    hides_behind: str


@dataclass(frozen=True, slots=True)
class PassCost:
    """The cost of a pass on the rank whose slot takes longest, in microseconds.

    host_us: launches of what no CUDA graph replays.  around_us: before and behind the layers,
    while no GPU computes.
    """

    compute_us: float
    transfers: tuple[TransferCost, ...]
    host_us: float = 0.0
    around_us: float = 0.0

    @property
    def exposed_us(self) -> float:
        return sum(row.exposed_us for row in self.transfers)

    @property
    def hidden_us(self) -> float:
        return sum(row.wait_us - row.exposed_us for row in self.transfers)

    @property
    def waiting_us(self) -> float:
        """The time that the GPU waits for the host."""
        return max(0.0, self.host_us - self.compute_us - self.exposed_us) + self.around_us

    @property
    def total_us(self) -> float:
        return self.compute_us + self.exposed_us + self.waiting_us


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a pass in the slot that takes longest.

    rows: tokens of the slot.  total_rows: of all slots.  attended: pairs of a query and a key that
    it sees.  kv_rows: cached keys that are read, of a decode step.  num_logits: rows that are
    multiplied with the vocabulary, on every rank.
    """

    rows: int
    total_rows: int
    attended: float
    kv_rows: int = 0
    num_logits: int = 0


def work_of_batch(
    shape: ModelShape, seqlens: Sequence[int], slots: Sequence[Sequence[int]], *, num_logits: int
) -> Work:
    """The work of a pass over whole texts; slots: as assign_sequences returns them."""

    def attended(slot: Sequence[int]) -> float:
        return sum(seqlens[i] ** 2 for i in slot) / (2 if shape.causal else 1)

    def tokens(slot: Sequence[int]) -> int:
        return sum(seqlens[i] for i in slot)

    largest = max(slots, key=lambda slot: 6 * shape.hidden_size * tokens(slot) + attended(slot))
    return Work(tokens(largest), sum(seqlens), attended(largest), num_logits=num_logits)


def pass_cost(
    shape: ModelShape,
    grid: Grid,
    machine: Machine,
    local: LocalSizes,
    work: Work,
    *,
    itemsize: int,
    is_replayed: bool = False,
) -> PassCost:
    """is_replayed: a CUDA graph holds the layers, with their collectives."""
    if is_replayed and work.rows <= machine.graph_tokens:
        work = replace(work, rows=round_tokens(work.rows))
    products = _products_us(shape, machine, local, work, itemsize=itemsize)
    layer_us = products + _others_us(shape, grid, machine, local, work, itemsize=itemsize)
    head_us = 0.0
    if work.num_logits:
        head_us = machine.gemm_us(
            work.num_logits, local.vocab, shape.embedding_size, itemsize=itemsize
        )
    transfers = list(
        pass_transfers(
            shape, grid, local, num_rows=work.rows, total_rows=work.total_rows, itemsize=itemsize
        )
    )
    if work.num_logits and grid.y > 1:
        logits = work.num_logits * shape.vocab_size * itemsize
        transfers.append(Transfer("y", "all_gather", logits, 1, "logits", False))
    ends_us = _ends_us(shape, grid, machine, work, itemsize=itemsize)
    costs = [_activation_cost(t, shape, grid, machine, products) for t in transfers]
    exposed_us = sum(c.exposed_us for c in costs if c is not None and c.transfer.is_of_layer)
    beside_us = layer_us + exposed_us / shape.num_layers
    rows = [
        _weights_cost(t, shape, grid, machine, beside_us) if cost is None else cost
        for t, cost in zip(transfers, costs, strict=True)
    ]
    host_us = _host_us(shape, grid, machine, transfers, is_replayed=is_replayed)
    compute_us = shape.num_layers * layer_us + head_us + ends_us
    kind = "slots" if grid.num_slots > 1 else "ranks" if grid.size > 1 else "one"
    around = machine.around.get(kind, Around())
    around_us = 0.0 if work.kv_rows else around.of(work.total_rows)
    return PassCost(compute_us, tuple(rows), host_us, around_us)


def _host_us(
    shape: ModelShape,
    grid: Grid,
    machine: Machine,
    transfers: Sequence[Transfer],
    *,
    is_replayed: bool,
) -> float:
    if is_replayed:  # but for the rows of all slots, which are gathered behind it
        return machine.host_collective_us * sum(t.count for t in transfers if t.axis == "slots")
    fused = sum(t.count for t in transfers if _is_fused(t, grid, machine))
    collectives = sum(t.count for t in transfers) - fused
    ops = shape.num_layers * (_LAYER_OPS_OF_X if grid.x > 1 else _LAYER_OPS) + _FUSED_OPS * fused
    return ops * machine.host_op_us + collectives * machine.host_collective_us


def _is_fused(transfer: Transfer, grid: Grid, machine: Machine) -> bool:
    """Whether a kernel computes and communicates at once, as where y is the only axis."""
    return transfer.axis == "y" and transfer.is_of_layer and _has_fused_sums(grid, machine)


def _has_fused_sums(grid: Grid, machine: Machine) -> bool:
    """Whether products with y's sums are such kernels: they read and write their peers' memory."""
    if grid.y == 1 or not (grid.is_y_alone and _is_inside(machine, grid, "y")):
        return False
    return machine.fused_y > 0 or machine.sum_gbps > 0


def _is_inside(machine: Machine, grid: Grid, axis: str) -> bool:
    return machine.is_inside(grid.inner(axis), grid.length(axis), ranks=grid.size)


def _activation_cost(
    transfer: Transfer, shape: ModelShape, grid: Grid, machine: Machine, products_us: float
) -> TransferCost | None:
    """None of weights, whose gathers run beside whole layers."""
    if transfer.axis == "z":
        return None
    size, wait = _wait_us(transfer, grid, machine)
    if not _is_fused(transfer, grid, machine):
        return TransferCost(transfer, size, wait, wait, "")
    if machine.sum_gbps:
        moved = wire_bytes(transfer.kind, transfer.payload_bytes, size)
        exposed = transfer.count * (machine.sum_us + moved / machine.sum_gbps / 1e3)
        return TransferCost(transfer, size, max(wait, exposed), exposed, "its GEMMs")
    hideable = min(wait, products_us * shape.num_layers)
    return TransferCost(transfer, size, wait, wait - machine.fused_y * hideable, "its GEMMs")


def _weights_cost(
    transfer: Transfer, shape: ModelShape, grid: Grid, machine: Machine, beside_us: float
) -> TransferCost:
    """Each gather runs beside the layer before. The first layer's has one only where it is a copy,
    which the rank begins in the pass before (bytetx.nn.weight_gather): the last layer then, which
    is in the other slot if their number is even. Copies share the memory with that layer."""
    size, wait = _wait_us(transfer, grid, machine)
    are_copies = machine.copies_gbps > 0 and _is_inside(machine, grid, "z")
    shared_us, alone = 0.0, 1
    if are_copies:
        payload = transfer.payload_bytes
        wait = transfer.count * wire_bytes("all_gather", payload, size) / machine.copies_gbps / 1e3
        shared_us = _SHARED * payload / machine.hbm_gbps / 1e3
        alone = shape.num_layers % 2
    each = wait / transfer.count
    hidden = transfer.count - alone
    exposed = alone * each + hidden * max(shared_us, each - beside_us)
    return TransferCost(transfer, size, max(wait, exposed), exposed, "the layer before")


def _wait_us(transfer: Transfer, grid: Grid, machine: Machine) -> tuple[int, float]:
    """(ranks of the group, time of all its collectives one after another)"""
    if transfer.axis == "slots":
        size, inner = grid.num_slots, grid.inner("z")
    else:
        size, inner = grid.length(transfer.axis), grid.inner(transfer.axis)
    each = machine.collective_us(
        transfer.kind, transfer.payload_bytes, inner=inner, size=size, ranks=grid.size
    )
    return size, each * transfer.count


def _products_us(
    shape: ModelShape, machine: Machine, local: LocalSizes, work: Work, *, itemsize: int
) -> float:
    """The four products of a layer."""
    qkv = (local.num_heads + 2 * local.num_kv_heads) * shape.head_dim
    sizes = (
        (qkv, local.hidden),
        (local.hidden, local.num_heads * shape.head_dim),
        (shape.num_inner * local.inner, local.hidden),
        (local.hidden, local.inner),
    )
    return sum(machine.gemm_us(work.rows, n, k, itemsize=itemsize) for n, k in sizes)


def _others_us(
    shape: ModelShape,
    grid: Grid,
    machine: Machine,
    local: LocalSizes,
    work: Work,
    *,
    itemsize: int,
) -> float:
    """Attention, the cache that it reads, and two norms of a layer."""
    flop = 4 * work.attended * local.num_heads * shape.head_dim
    # Of a token that attends to all of its text.
    length = work.attended * (2 if shape.causal else 1) / max(work.rows, 1)
    attention = machine.attention_us(
        flop, length=max(length, 1.0), head_dim=shape.head_dim, causal=shape.causal
    )
    kv_bytes = work.kv_rows * shape.kv_bytes(itemsize, local.num_kv_heads)
    # Each norm reads a sum and a residual and writes both. Kernels with y's sums norm a rank's own
    # rows alone, and the measured time of their sums has the norms in it.
    norms, normed_rows = 2, float(work.rows)
    if _has_fused_sums(grid, machine):
        norms, normed_rows = 0 if machine.sum_gbps else 2, work.rows / grid.y
    moved: float = kv_bytes + norms * 4 * normed_rows * local.hidden * itemsize
    kernels = 1 + norms
    if grid.x > 1:
        moved += work.rows * _unfused_bytes(shape, local, itemsize=itemsize) / _UNFUSED_RATE
        kernels += _LAYER_OPS_OF_X
    return attention + moved / machine.hbm_gbps / 1e3 + kernels * machine.launch_us


def _unfused_bytes(shape: ModelShape, local: LocalSizes, *, itemsize: int) -> int:
    """Bytes per row and layer that a grid with x moves where other grids fuse the work into a
    product or a norm (bytetx.nn.feature_blocks): biases, activations and residuals; norms in f32.
    """
    passed = 2 * itemsize
    qkv = (local.num_heads + 2 * local.num_kv_heads) * shape.head_dim
    is_gated = shape.num_inner > 1
    has_biases = not is_gated
    bias = passed * (qkv + shape.num_inner * local.inner + 2 * local.hidden) if has_biases else 0
    activation = (3 if is_gated else 2) * itemsize * local.inner
    has_mean = shape.norm_statistics > 1
    # The passes convert to f32, square and sum, scale, and convert back.
    f32_passes = 12 if has_mean else 7
    norms = shape.norms_per_layer * local.hidden * 4 * f32_passes
    return bias + activation + norms


def _ends_us(
    shape: ModelShape, grid: Grid, machine: Machine, work: Work, *, itemsize: int
) -> float:
    """Embedding and pooling; where there are slots, their rows in the order of the batch."""
    row = shape.hidden_size * itemsize
    moved = 5 * work.rows * row  # tables are read, rows written, and read by a norm and the pooling
    if grid.num_slots > 1:
        moved += 2 * work.total_rows * row
    return moved / machine.hbm_gbps / 1e3


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes a GPU.  gathered: the two layers that z has whole."""

    weights: int
    gathered: int
    kv_cache: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.gathered + self.kv_cache + self.workspace


def memory_of(
    shape: ModelShape,
    grid: Grid,
    local: LocalSizes,
    *,
    rows: int,
    total_rows: int,
    kv_rows: int,
    num_logits: int,
    itemsize: int,
) -> Memory:
    """rows, total_rows: of a pass, in a slot and in all.  kv_rows: tokens whose keys and values a
    rank has room for in all layers.

    Word embeddings are divided over y; positions, norms and biases are on every rank, and logits
    once they are gathered.
    """
    shard = gathered_numbers(local.weights, grid.z) // grid.z
    tables = local.vocab * (2 if shape.has_lm_head and not shape.is_tied else 1)
    embedding = (tables + shape.num_positions) * shape.embedding_size
    features = shape.head_dim * (local.num_heads + 2 * local.num_kv_heads)
    widest = max(features, shape.num_inner * local.inner)
    # Every rank receives the rows of all slots, and puts them in the order of the batch.
    received = 2 * total_rows * shape.hidden_size if grid.num_slots > 1 else 0
    logits = num_logits * (local.vocab + (shape.vocab_size if grid.y > 1 else 0))
    numbers = shape.num_stored_layers * shard + embedding
    bits = shape.kept_bits if shape.kept_bits and grid.size == 1 else 8 * itemsize
    return Memory(
        weights=int(numbers * bits / 8),
        gathered=itemsize * 2 * local.weights if grid.z > 1 else 0,
        kv_cache=kv_rows * shape.num_layers * shape.kv_bytes(itemsize, local.num_kv_heads),
        workspace=itemsize * (rows * (3 * shape.hidden_size + widest) + received + logits),
    )
