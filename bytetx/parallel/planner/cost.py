"""The time and memory of one forward pass on a grid: products, attention, communication.

First-order: a product takes its FLOP or its bytes, whichever is longer; a collective takes a
latency and its bytes over the bandwidth of its group (bytetx.parallel.planner.machine). Gathers of
weights run beside the layer before; a share of tensor parallelism's sums is hidden by kernels.
What no CUDA graph replays takes at least as long as the host needs to launch it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bytetx.parallel.grid import Grid, gathered_numbers
from bytetx.parallel.planner.ledger import LocalSizes, Transfer, pass_transfers
from bytetx.parallel.planner.machine import Machine
from bytetx.parallel.planner.shapes import ModelShape

# What the host launches in a layer: products, attention and norms; where hidden features are
# divided (x), also the sums, squares and statistics of norms. Fitted to two H100s.
_LAYER_OPS, _LAYER_OPS_OF_X = 6, 27
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
    """Of the rank whose slot takes longest.

    host_us: of launching what no CUDA graph replays.
    """

    compute_us: float
    transfers: tuple[TransferCost, ...]
    host_us: float = 0.0

    @property
    def exposed_us(self) -> float:
        return sum(row.exposed_us for row in self.transfers)

    @property
    def hidden_us(self) -> float:
        return sum(row.wait_us - row.exposed_us for row in self.transfers)

    @property
    def waiting_us(self) -> float:
        """What the GPU waits for the host."""
        return max(0.0, self.host_us - self.compute_us - self.exposed_us)

    @property
    def total_us(self) -> float:
        return self.compute_us + self.exposed_us + self.waiting_us


@dataclass(frozen=True, slots=True)
class Work:
    """What a pass computes in the slot that takes longest.

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
    products = _products_us(shape, machine, local, work, itemsize=itemsize)
    layer_us = products + _others_us(shape, machine, local, work, itemsize=itemsize)
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
    costs = [_activation_cost(t, shape, grid, machine, products) for t in transfers]
    exposed_us = sum(c.exposed_us for c in costs if c is not None and c.transfer.is_of_layer)
    beside_us = layer_us + exposed_us / shape.num_layers
    rows = [
        _weights_cost(t, grid, machine, beside_us) if cost is None else cost
        for t, cost in zip(transfers, costs, strict=True)
    ]
    host_us = _host_us(shape, grid, machine, transfers, is_replayed=is_replayed)
    return PassCost(shape.num_layers * layer_us + head_us, tuple(rows), host_us)


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
    is_of_y = transfer.axis == "y" and transfer.is_of_layer
    return grid.is_y_alone and is_of_y and machine.fused_y > 0


def _activation_cost(
    transfer: Transfer, shape: ModelShape, grid: Grid, machine: Machine, products_us: float
) -> TransferCost | None:
    """None of weights, whose gathers run beside whole layers."""
    if transfer.axis == "z":
        return None
    size, wait = _wait_us(transfer, grid, machine)
    if not _is_fused(transfer, grid, machine):
        return TransferCost(transfer, size, wait, wait, "")
    hideable = min(wait, products_us * shape.num_layers)
    return TransferCost(transfer, size, wait, wait - machine.fused_y * hideable, "its GEMMs")


def _weights_cost(
    transfer: Transfer, grid: Grid, machine: Machine, beside_us: float
) -> TransferCost:
    """The first layer's gather has nothing to run beside; each other one has the layer before."""
    size, wait = _wait_us(transfer, grid, machine)
    each = wait / transfer.count
    exposed = each + (transfer.count - 1) * max(0.0, each - beside_us)
    return TransferCost(transfer, size, wait, exposed, "the layer before")


def _wait_us(transfer: Transfer, grid: Grid, machine: Machine) -> tuple[int, float]:
    """(ranks of the group, time of all its collectives one after another)"""
    if transfer.axis == "slots":
        size, inner = grid.num_slots, grid.inner("z")
    else:
        size, inner = grid.length(transfer.axis), grid.inner(transfer.axis)
    each = machine.collective_us(transfer.kind, transfer.payload_bytes, inner=inner, size=size)
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
    shape: ModelShape, machine: Machine, local: LocalSizes, work: Work, *, itemsize: int
) -> float:
    """Attention, the cache that it reads, and two norms of a layer."""
    features = local.num_heads * shape.head_dim
    attention = 4 * work.attended * features / machine.attention_tflops / 1e6
    kv_bytes = work.kv_rows * 2 * local.num_kv_heads * shape.head_dim * itemsize
    # Each norm reads a sum and a residual and writes both.
    moved = kv_bytes + 2 * 4 * work.rows * local.hidden * itemsize
    return attention + moved / machine.hbm_gbps / 1e3 + 3 * machine.launch_us


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

    Word embeddings and logits are divided over y; positions, norms and biases are on every rank.
    """
    shard = gathered_numbers(local.weights, grid.z) // grid.z
    tables = local.vocab * (2 if shape.has_lm_head and not shape.is_tied else 1)
    embedding = (tables + shape.num_positions) * shape.embedding_size
    features = shape.head_dim * (local.num_heads + 2 * local.num_kv_heads)
    widest = max(features, shape.num_inner * local.inner)
    # Every rank receives the rows of all slots, and puts them in the order of the batch.
    received = 2 * total_rows * shape.hidden_size if grid.num_slots > 1 else 0
    logits = num_logits * local.vocab
    return Memory(
        weights=itemsize * (shape.num_layers * shard + embedding),
        gathered=itemsize * 2 * local.weights if grid.z > 1 else 0,
        kv_cache=itemsize * (2 * kv_rows * local.num_kv_heads * shape.head_dim * shape.num_layers),
        workspace=itemsize * (rows * (3 * shape.hidden_size + widest) + received + logits),
    )
