"""Records as a table on the terminal."""

from rich import box
from rich.table import Table

from benchmarks.records import Record

# Columns of a terminal from which a table with four rivals fits with their values.
_WIDE = 116
_RATE = 2  # the column that only units of time have
_SECONDS = {"us": 1e-6, "ms": 1e-3}


def records_table(records: list[Record], *, width: int) -> Table:
    """One row a record: ours, the fraction of the floor, each rival's value and ratio to ours.

    width: columns of the terminal; on a narrow one the rivals' ratios stand alone.
    """
    rivals = list(dict.fromkeys(name for record in records for name in record.rivals))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption = "lower is better; a rival's ratio says how many times faster bytetx is"
    units = {unit for record in records if (unit := _rate(record)[1])}
    rate = [units.pop() if len(units) == 1 else "rate"] if units else []
    for name in ("case", "bytetx", *rate, "floor", *rivals):
        header = name.replace("-", "-\n")
        table.add_column(header, justify="left" if name == "case" else "right", no_wrap=True)
    for record in records:
        cells = _row(record, rivals, with_values=width >= _WIDE)
        table.add_row(*(cells if rate else cells[:_RATE] + cells[_RATE + 1 :]))
    return table


def summary_line(record: Record) -> str:
    """A record in one line, for progress while a suite runs."""
    ratios = ", ".join(f"{record.ratio(name):.2f}x {name}" for name in record.rivals)
    value, unit = _rate(record)
    rate = f" = {value} {unit}" if value else ""
    return f"{record.case}: {record.ours:g} {record.unit}{rate}" + (f"; {ratios}" if ratios else "")


def _rate(record: Record) -> tuple[str, str]:
    """Things, FLOP or bytes a second and their unit, by what the record's unit or shape counts."""
    time, _, thing = record.unit.partition("/")
    if time not in _SECONDS:
        return "", ""
    per_second = 1 / (record.ours * _SECONDS[time])
    if thing:
        return f"{per_second:,.0f}", f"{thing}s/s"
    if "flop" in record.shape:
        return f"{float(record.shape['flop']) * per_second / 1e12:.3g}", "TFLOP/s"
    if "bytes" in record.shape:
        return f"{float(record.shape['bytes']) * per_second / 1e9:,.0f}", "GB/s"
    return "", ""


def _row(record: Record, rivals: list[str], *, with_values: bool) -> list[str]:
    fraction, (rate, _) = record.floor_fraction, _rate(record)
    cells = [
        record.case,
        f"[bold]{record.ours:g}[/] {record.unit.partition('/')[0]}",
        rate,
        "" if fraction is None else f"{fraction:.0%}",
    ]
    for name in rivals:
        value = f"{record.rivals[name]:g}  " if with_values and name in record.rivals else ""
        ratio = f"[bold]{record.ratio(name):.2f}x[/]" if name in record.rivals else ""
        cells.append(value + ratio)
    return cells
