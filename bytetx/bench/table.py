"""Records as a table on the terminal."""

from rich import box
from rich.table import Table

from bytetx.bench.records import Record

# Columns of a terminal from which a table with four rivals fits with their values.
_WIDE = 116


def records_table(records: list[Record], *, width: int) -> Table:
    """One row a record: ours, the fraction of the floor, each rival's value and ratio to ours.

    width: columns of the terminal; on a narrow one the rivals' ratios stand alone.
    """
    rivals = list(dict.fromkeys(name for record in records for name in record.rivals))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption = "lower is better; a rival's ratio says how many times faster bytetx is"
    for name in ("case", "bytetx", "tokens/s", "floor", *rivals):
        justify = "left" if name == "case" else "right"
        table.add_column(name.replace("-", "-\n"), justify=justify, no_wrap=True)
    for record in records:
        table.add_row(*_row(record, rivals, with_values=width >= _WIDE))
    return table


def summary_line(record: Record) -> str:
    """A record in one line, for progress while a suite runs."""
    ratios = ", ".join(f"{record.ratio(name):.2f}x {name}" for name in record.rivals)
    rate = f" = {rate_text(record)} tokens/s" if rate_text(record) else ""
    return f"{record.case}: {record.ours:g} {record.unit}{rate}" + (f"; {ratios}" if ratios else "")


def rate_text(record: Record) -> str:
    """tokens/s where the unit is a time per token; empty for other units."""
    return f"{1e6 / record.ours:,.0f}" if record.unit == "us/token" else ""


def _row(record: Record, rivals: list[str], *, with_values: bool) -> list[str]:
    fraction = record.floor_fraction
    unit = " MiB" if record.unit == "MiB" else " us"
    cells = [
        record.case,
        f"[bold]{record.ours:g}[/]{unit}",
        rate_text(record),
        "" if fraction is None else f"{fraction:.0%}",
    ]
    for name in rivals:
        value = f"{record.rivals[name]:g}  " if with_values and name in record.rivals else ""
        ratio = f"[bold]{record.ratio(name):.2f}x[/]" if name in record.rivals else ""
        cells.append(value + ratio)
    return cells
