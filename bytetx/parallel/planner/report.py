"""Plans as text for a terminal: the ranking, the ledger of a grid, and a picture of it."""

from collections.abc import Iterable, Sequence

from bytetx.parallel.grid import AXES, Coordinates, Grid
from bytetx.parallel.planner.axonn2024 import Headline, TrainingCost
from bytetx.parallel.planner.machine import GIB
from bytetx.parallel.planner.plan import Plan, PlannedGrid
from bytetx.parallel.planner.simulate import Year

# Replicas and slots that a picture shows before it writes "...".
_MAX_DRAWN = 4


def plan_text(plan: Plan, *, top: int) -> str:
    shape, traffic = plan.shape, plan.traffic
    lines = [
        f"{shape.name}: {shape.num_parameters / 1e9:.2f} B parameters on {plan.gpus} GPUs of "
        f"{plan.machine.name} ({plan.machine.description})",
        f"a batch: {len(traffic.seqlens)} texts, {traffic.total_tokens:,} tokens"
        + (f", {traffic.output_tokens} generated for each" if traffic.output_tokens else ""),
        f"goal: {plan.goal}; machine data: {plan.machine.source}",
        "",
        _table(plan, plan.grids[:top]),
        "",
        f"best in latency, throughput or memory (Pareto): {_named(plan.pareto)}",
        plan.advice,
        "",
        picture(plan.best.grid),
    ]
    return "\n".join(lines)


def _named(grids: Sequence[PlannedGrid]) -> str:
    return ", ".join(str(planned.grid) for planned in grids)


def _table(plan: Plan, grids: Iterable[PlannedGrid]) -> str:
    heads = [
        "grid",
        "GPUs",
        "latency",
        "compute",
        "exposed",
        "hidden",
        "host",
        "memory",
        "tokens/s/GPU",
    ]
    rows = [heads + (["texts/s"] if plan.traffic.rate else [])]
    for one in grids:
        row = [
            str(one.grid),
            str(one.num_gpus),
            duration(one.latency_s),
            duration(one.compute_s),
            duration(one.exposed_s),
            duration(one.hidden_s),
            duration(one.waiting_s),
            f"{one.memory.total / GIB:.1f} GiB",
            f"{one.tokens_per_s_per_gpu:,.0f}",
        ]
        rows.append(
            row + ([f"{one.texts_per_s * one.num_instances:,.0f}"] if plan.traffic.rate else [])
        )
    return _columns(rows)


def ledger_text(plan: Plan, planned: PlannedGrid) -> str:
    """Every collective of a pass: group, bytes, time, what hides it; then the memory of a GPU."""
    lines = [picture(planned.grid), ""]
    passes = [("pass over the texts", planned.prefill)]
    if planned.decode is not None:
        passes.append(("decode step", planned.decode))
    for name, cost in passes:
        rows = [
            ["collective", "axis", "ranks", "times", "MB each", "time", "exposed", "behind", "of"]
        ]
        rows += [
            [
                row.transfer.kind,
                row.transfer.axis,
                str(row.group_size),
                str(row.transfer.count),
                f"{row.transfer.payload_bytes / 1e6:.3f}",
                duration(row.wait_us / 1e6),
                duration(row.exposed_us / 1e6),
                row.hides_behind or "-",
                row.transfer.what,
            ]
            for row in cost.transfers
        ]
        total = (
            f"{name}: {duration(cost.total_us / 1e6)} = {duration(cost.compute_us / 1e6)} of "
            f"compute + {duration(cost.exposed_us / 1e6)} of exposed communication"
            + (f" + {duration(cost.waiting_us / 1e6)} for the host" if cost.waiting_us else "")
        )
        lines += [total, _columns(rows) if cost.transfers else "no communication", ""]
    memory = planned.memory
    lines.append(
        f"memory a GPU: {memory.total / GIB:.2f} GiB = weights {memory.weights / GIB:.2f} + "
        f"gathered layers {memory.gathered / GIB:.2f} + keys and values "
        f"{memory.kv_cache / GIB:.2f} + workspace {memory.workspace / GIB:.2f}, of "
        f"{plan.memory_limit / GIB:.1f}"
    )
    return "\n".join(lines)


def picture(grid: Grid) -> str:
    """The ranks of a grid: a box for each replica (data), rows for z, columns for y and x."""
    lines = [f"grid {grid}: {grid.size} rank{'s' * (grid.size > 1)}"]
    for replica in range(min(grid.data, _MAX_DRAWN)):
        lines += _box(grid, replica)
    if grid.data > _MAX_DRAWN:
        lines.append(f"... {grid.data - _MAX_DRAWN} more replicas like these")
    notes = {
        "data": "each takes some texts of every batch",
        "z": "rows share the layers' weights, and take some texts each",
        "y": "columns share heads and inner features",
        "x": "columns inside a y share hidden features",
    }
    lines += [
        f"{axis}={grid.length(axis)}: {notes[axis]}" for axis in AXES if grid.length(axis) > 1
    ]
    return "\n".join(lines)


def _box(grid: Grid, replica: int) -> list[str]:
    width = len(str(grid.size - 1))
    rows = []
    for z in range(min(grid.z, _MAX_DRAWN)):
        cells = []
        for y in range(min(grid.y, 2 * _MAX_DRAWN)):
            ranks = [
                str(grid.rank(Coordinates(replica, z, y, x))).rjust(width)
                for x in range(min(grid.x, _MAX_DRAWN))
            ]
            cells.append(" ".join(ranks) + (" .." if grid.x > _MAX_DRAWN else ""))
        rows.append(" | ".join(cells) + (" | .." if grid.y > 2 * _MAX_DRAWN else ""))
    if grid.z > _MAX_DRAWN:
        rows.append("..")
    title = f" data {replica} " if grid.data > 1 else ""
    inside = max(*(len(row) for row in rows), len(title)) + 2
    edge = "+" + title.center(inside, "-") + "+"
    bottom = "+" + "-" * inside + "+"
    return [edge, *(f"| {row.ljust(inside - 2)} |" for row in rows), bottom]


def training_text(
    model: str, as_is: Sequence[TrainingCost], mended: Sequence[TrainingCost], *, top: int
) -> str:
    """Both rankings of the authors' model side by side; grids as rows.columns.depth.data."""
    rows = [["as published", "s", "with the second product mended", "s"]]
    for one, other in zip(as_is[:top], mended[:top], strict=True):
        rows.append([one.notation, f"{one.total_s:.2f}", other.notation, f"{other.total_s:.2f}"])
    head = (
        f"AxoNN's model of {model}: communication of an iteration, {len(as_is)} grids as "
        "rows.columns.depth.data"
    )
    return f"{head}\n{_columns(rows)}"


def headline_text(found: Headline) -> str:
    return "\n".join(
        [
            "80B on 1024 GPUs of Perlmutter, batch 1024 (the batch of the published ranking):",
            f"  products {found.compute_s:.2f} s, communication {found.communication_s:.2f} s; the "
            f"model bounds the share of peak: {found.exposed_share:.0%} with no overlap, "
            f"{found.hidden_all_share:.0%} with all",
            f"  reported {found.reported_share:.0%}: {found.reported_s:.2f} s an iteration, which "
            f"needs {found.hidden_share:.0%} of the communication hidden",
            f"  reported +26 % over Megatron-LM: {found.baseline_s:.2f} s for it, the time of the "
            f"same grid with {found.baseline_hidden_share:.0%} hidden; its own grid is not "
            "published, so the model cannot predict it",
        ]
    )


def year_text(year: Year) -> str:
    rows = [["traffic", "texts", "grid", "latency", "peak GPUs", "GPU hours"]]
    rows += [
        [
            one.traffic.name,
            _amount(one.texts),
            str(one.planned.grid),
            duration(one.planned.latency_s),
            f"{one.peak_gpus:,}",
            _amount(one.gpu_hours),
        ]
        for one in year.classes
    ]
    lines = [
        f"a year on {year.fleet:,} GPUs: {_amount(year.texts)} texts, "
        f"{_amount(year.tokens)} tokens",
        _columns(rows),
        f"in use: {year.peak_gpus:,} GPUs at the peak, {year.mean_gpus:,.0f} on average, "
        f"{_amount(year.gpu_hours)} GPU hours",
    ]
    if year.same_grid_gpu_hours is not None:
        more = round(year.same_grid_gpu_hours / year.gpu_hours - 1, 2) + 0.0  # no -0
        lines.append(
            f"one grid for all, {year.same_grid}: {_amount(year.same_grid_gpu_hours)} GPU "
            f"hours, {more:+.0%}"
        )
    return "\n".join(lines)


def _amount(number: float) -> str:
    for unit, name in (
        (1e15, "quadrillion"),
        (1e12, "trillion"),
        (1e9, "billion"),
        (1e6, "million"),
    ):
        if number >= unit:
            return f"{number / unit:,.2f} {name}"
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.0f} us"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
