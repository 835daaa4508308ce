"""Records as a table on the terminal."""

from rich.table import Table

from bytetx.bench.records import Record


def records_table(records: list[Record]) -> Table:
    """One row a record: ours, the fraction of the floor, each rival with its ratio to ours."""
    rivals = list(dict.fromkeys(name for record in records for name in record.rivals))
    table = Table(caption="lower is better; ratio: how many times bytetx is faster")
    table.add_column("case", no_wrap=True)
    for name in ("bytetx", "rate", "of floor", *rivals):
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(*_row(record, rivals))
    return table


def summary_line(record: Record) -> str:
    """A record in one line, for progress while a suite runs."""
    ratios = ", ".join(f"{record.ratio(name):.2f}x {name}" for name in record.rivals)
    rate = f" = {rate_text(record)}" if rate_text(record) else ""
    return f"{record.case}: {record.ours:g} {record.unit}{rate}" + (f"; {ratios}" if ratios else "")


def rate_text(record: Record) -> str:
    """tokens/s where the unit is a time per token; empty for other units."""
    return f"{1e6 / record.ours:,.0f} tokens/s" if record.unit == "us/token" else ""


def _row(record: Record, rivals: list[str]) -> list[str]:
    fraction = record.floor_fraction
    cells = [
        record.case,
        f"[bold]{record.ours:g}[/] {record.unit}",
        rate_text(record),
        "" if fraction is None else f"{fraction:.0%}",
    ]
    for name in rivals:
        known = name in record.rivals
        cells.append(f"{record.rivals[name]:g} ({record.ratio(name):.2f}x)" if known else "")
    return cells
