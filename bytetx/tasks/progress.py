"""A progress bar on stderr, for calls that are asked for one."""

from collections.abc import Callable, Generator, Iterable, Sized
from contextlib import closing
from typing import TypeVar

T = TypeVar("T")


def with_progress(
    parts: Generator[T, None, None],
    num_done: Callable[[], int],
    *,
    title: str,
    total: int | None,
) -> Generator[T, None, None]:
    """The same parts, with a bar while they come; it goes when they end or are closed.

    The bar says "first batch" until the first part is there.

    num_done: texts that are done so far.  total: texts; None where nobody knows.
    """
    # Here alone: calls without a bar need none of it, and it takes time to import.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = ("[bold]{task.description}", BarColumn(24), "{task.fields[texts]}")
    times = (TimeElapsedColumn(), TextColumn("<"), TimeRemainingColumn(compact=True))
    console = Console(stderr=True, highlight=False)
    end = "" if total is None else f"/{total:,}"
    with closing(parts), Progress(*columns, *times, console=console) as progress:
        row = progress.add_task(title, total=total, texts=f"0{end} texts, first batch")
        for part in parts:
            progress.update(row, completed=num_done(), texts=f"{num_done():,}{end} texts")
            yield part
        # A bar without a known total is full at the end.
        progress.update(row, total=num_done(), completed=num_done())


def num_texts(texts: Iterable[object]) -> int | None:
    """None for a generator, whose length nobody knows."""
    return len(texts) if isinstance(texts, Sized) else None
