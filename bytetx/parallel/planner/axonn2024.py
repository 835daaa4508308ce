"""The cost model of AxoNN's authors, as in their public code: training, communication alone.

Per layer: gathers and a reduce-scatter of weights over depth (z), all-reduces of activations over
rows (y) and columns (x), and of gradients over data, each by the ring algorithm at the bandwidth of
its group. Nothing has a latency or is hidden, and products take no time. Sources: arXiv 2305.13525
and 2502.08145. Bandwidths are GiB/s of the machine's TOML file.

Their code costs the second feed-forward product as a layer from H to 4 H features; it leads from
4 H to H. mends_ffn_out puts that right; both answers are given.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from bytetx.errors import OptionError
from bytetx.parallel.grid import Grid
from bytetx.parallel.planner.machine import Machine
from bytetx.parallel.planner.shapes import AXONN_SIZES

SEQLEN, VOCAB_SIZE, ITEMSIZE = 2048, 51200, 2
# Instead of a memory model: the fewest ranks (row x column x depth) that a model's state fits.
MIN_RANKS = {
    "5B": 4,
    "10B": 8,
    "20B": 16,
    "40B": 32,
    "60B": 64,
    "80B": 64,
    "160B": 128,
    "320B": 256,
    "640B": 512,
}


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """One grid: the grid in the authors' notation, rows x columns x depth x data, and seconds."""

    grid: Grid
    depth_s: float
    rows_s: float
    columns_s: float
    data_s: float

    @property
    def total_s(self) -> float:
        return self.depth_s + self.rows_s + self.columns_s + self.data_s

    @property
    def notation(self) -> str:
        """row.column.depth.data"""
        return f"{self.grid.y}.{self.grid.x}.{self.grid.z}.{self.grid.data}"


def rank_grids(
    model: str, *, gpus: int, batch: int, machine: Machine, mends_ffn_out: bool
) -> list[TrainingCost]:
    """Every grid of powers of two, least communication an iteration first.

    model: a name of AXONN_SIZES.  batch: sequences of 2048 tokens.  Raises OptionError for another
    model, or where no grid is allowed.
    """
    name = model.upper()
    if name not in AXONN_SIZES:
        raise OptionError(f"model must be one of {', '.join(AXONN_SIZES)}, got {model!r}")
    found = [
        training_cost(name, grid, batch=batch, machine=machine, mends_ffn_out=mends_ffn_out)
        for grid in _grids(name, gpus=gpus, batch=batch)
    ]
    if not found:
        raise OptionError(
            f"no grid of {gpus} GPUs is allowed: {name} needs a power of two from "
            f"{MIN_RANKS[name]} on, and a batch that data x depth divides, got batch {batch}"
        )
    return sorted(found, key=lambda cost: cost.total_s)


def _grids(name: str, *, gpus: int, batch: int) -> Iterator[Grid]:
    """Grids of powers of two that divide the batch evenly and have room for the model's state."""
    powers = [1 << i for i in range(gpus.bit_length()) if gpus % (1 << i) == 0]
    if gpus & (gpus - 1):
        return
    for data in powers:
        for z in powers:
            for y in powers:
                x, rest = divmod(gpus, data * z * y)
                if rest or not x or batch % (data * z) or x * y * z < MIN_RANKS[name]:
                    continue
                yield Grid(data, z, y, x)


def training_cost(
    name: str, grid: Grid, *, batch: int, machine: Machine, mends_ffn_out: bool
) -> TrainingCost:
    """Seconds of communication of one iteration, with activations computed again."""
    num_layers, hidden, _ = AXONN_SIZES[name]
    tokens = batch * SEQLEN // grid.num_slots

    def seconds(axis: str, num_bytes: float) -> float:
        size = grid.length(axis)
        if size == 1:
            return 0.0
        inner = grid.inner(axis)
        is_inside = machine.is_inside(inner, size, ranks=grid.size)
        gbps = machine.inside_gbps(inner, size) if is_inside else machine.between_gbps(inner)
        return num_bytes * (size - 1) / size / gbps / 1e9

    rows = columns = 0.0
    for inputs, outputs, is_transposed in _linears(hidden, mends_ffn_out=mends_ffn_out):
        # A transposed layer's outputs are divided over columns, and it sums over rows.
        summed, divided = (grid.y, grid.x) if is_transposed else (grid.x, grid.y)
        # Twice forward (once for the recomputation), once backward; a ring moves each twice.
        forward = 2 * 2 * tokens * outputs / divided * ITEMSIZE
        backward = 2 * tokens * inputs / summed * ITEMSIZE
        if is_transposed:
            rows, columns = rows + forward, columns + backward
        else:
            rows, columns = rows + backward, columns + forward
    weights = 12 * hidden * hidden * ITEMSIZE / (grid.x * grid.y)
    return TrainingCost(
        grid,
        depth_s=num_layers * seconds("z", 3 * weights),  # two gathers and a reduce-scatter
        rows_s=num_layers * seconds("y", rows),
        columns_s=num_layers * seconds("x", columns),
        data_s=num_layers * seconds("data", 4 * weights / grid.z),  # gradients in f32, ring of two
    )


def _linears(hidden: int, *, mends_ffn_out: bool) -> list[tuple[int, int, bool]]:
    """(inputs, outputs, whether it is transposed) of a layer's four products."""
    last = (4 * hidden, hidden) if mends_ffn_out else (hidden, 4 * hidden)
    return [
        (hidden, 3 * hidden, False),
        (hidden, hidden, True),
        (hidden, 4 * hidden, False),
        (*last, True),
    ]


def iteration_tflop(name: str, batch: int) -> float:
    """Forward, backward and recomputation: 96 B S L H^2 (1 + S / 6H + V / 16 L H), in 1e12."""
    num_layers, hidden, _ = AXONN_SIZES[name]
    shares = 1 + SEQLEN / (6 * hidden) + VOCAB_SIZE / (16 * num_layers * hidden)
    return 96 * batch * SEQLEN * num_layers * hidden**2 * shares / 1e12


@dataclass(frozen=True, slots=True)
class Headline:
    """The paper's run of 80B on 1024 GPUs of Perlmutter, beside what its own model says.

    *_share: of the vendor's peak.  hidden_share: of the best grid's communication that must be
    hidden behind products for the reported share.  baseline_s: an iteration of Megatron-LM, from
    the reported +26 %.
    """

    compute_s: float
    communication_s: float
    reported_s: float
    reported_share: float
    exposed_share: float
    hidden_all_share: float
    hidden_share: float
    baseline_s: float
    baseline_hidden_share: float


# arXiv 2305.13525, abstract: 57 % of peak (182 PFLOP/s on 1024 A100), 26 % more than Megatron-LM.
_REPORTED_PFLOPS, _REPORTED_GAIN = 182.0, 1.26


def headline(machine: Machine) -> Headline:
    """How much of the abstract's 57 % and +26 % follows from the model, with a batch of 1024.

    Products at the practical peak of the machine file, communication of the best grid of the
    mended model. Both together without overlap are a lower bound of the share of peak, the longer
    of them an upper bound. Megatron-LM's grid is not in the data, so its time is only compared.
    """
    gpus = batch = 1024
    best = rank_grids("80B", gpus=gpus, batch=batch, machine=machine, mends_ffn_out=True)[0]
    tflop = iteration_tflop("80B", batch) / gpus
    compute, communication = tflop / machine.gemm_tflops, best.total_s
    reported = tflop * gpus / (_REPORTED_PFLOPS * 1e3)
    baseline = reported * _REPORTED_GAIN

    def hidden(seconds: float) -> float:
        return (compute + communication - seconds) / communication

    def share(seconds: float) -> float:
        return tflop / seconds / machine.peak_tflops

    return Headline(
        compute_s=compute,
        communication_s=communication,
        reported_s=reported,
        reported_share=share(reported),
        exposed_share=share(compute + communication),
        hidden_all_share=share(max(compute, communication)),
        hidden_share=hidden(reported),
        baseline_s=baseline,
        baseline_hidden_share=hidden(baseline),
    )
