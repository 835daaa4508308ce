"""Progress of a job on stderr: a bar while it runs, one line when it ends."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from rich.console import Console

from bytetx.cli.files.resume import Counts


class JobBar:
    """A progress bar of texts and tokens, drawn only where stderr is a terminal.

    Until the first results are there it says "first batch", which takes the longest.

    total_bytes: size of all inputs; 0 where it cannot be known, as from a pipe.
    """

    def __init__(self, console: Console, *, total_bytes: int, title: str):
        self._console = console
        self._total_bytes = total_bytes
        self._title = title
        self._progress: Any = None
        self._start: Counts | None = None

    def __enter__(self) -> Callable[[Counts, int], None]:
        if not self._console.is_terminal:
            return _show_nothing
        self._progress = _make_progress(self._console, self._total_bytes > 0)
        self._row = self._progress.add_task(
            self._title, total=self._total_bytes or None, texts="first batch", rate=""
        )
        self._progress.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _show(self, counts: Counts, end_bytes: int) -> None:
        if self._start is None:
            self._start = counts
        seconds = counts.seconds - self._start.seconds
        num_tokens = counts.num_tokens - self._start.num_tokens
        self._progress.update(
            self._row,
            completed=end_bytes if self._total_bytes else None,
            texts=f"{counts.num_texts:,} texts",
            rate=f"{short(num_tokens / seconds)} tokens/s" if seconds > 0.2 else "",
        )


def _show_nothing(counts: Counts, end_bytes: int) -> None:
    """The callback where there is no terminal."""


def _make_progress(console: Console, has_total: bool) -> Any:
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    end = (
        (TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn(compact=True))
        if has_total
        else (TimeElapsedColumn(),)
    )
    columns = ("[bold]{task.description}", BarColumn(24), "{task.fields[texts]}")
    return Progress(*columns, "[cyan]{task.fields[rate]}", *end, console=console, transient=True)


def tell(console: Console, line: str) -> None:
    """Prints a line without markup; ignores a stderr that is full or closed."""
    with suppress(OSError):
        console.print(line, markup=False, soft_wrap=True)


def waiting(console: Console, text: str) -> AbstractContextManager[object]:
    """A spinner with `text` on a terminal, nothing elsewhere."""
    return console.status(text) if console.is_terminal else nullcontext()


def closing_line(counts: Counts, *, what: str, errors_at: str = "") -> str:
    """One line on a finished job.

    what: task and output, such as "embed → vectors.npy".  errors_at: the file that lists errors,
    where they are not in the output itself.
    """
    seconds = max(counts.seconds, 1e-3)
    texts = counted(counts.num_texts, "text")
    if counts.num_blank:
        texts += f" ({counts.num_blank:,} blank, a row each)"
    rates = (
        f"{short(counts.num_texts / seconds)} texts/s, "
        f"{short(counts.num_tokens / seconds)} tokens/s"
    )
    pads = f"{counted(counts.num_pad_tokens, 'pad token')} not computed"
    if counts.num_pad_tokens:
        share = counts.num_pad_tokens / (counts.num_tokens + counts.num_pad_tokens)
        pads += f" ({share:.0%} of a padded run)"
    errors = counted(counts.num_errors, "error")
    if counts.num_errors and errors_at:
        errors += f", listed in {errors_at}"
    if counts.num_malformed:
        errors += f", {counted(counts.num_malformed, 'malformed record')} of csv among them"
    cut = f"{counts.num_truncated:,} truncated, " if counts.num_truncated else ""
    run = f"{texts}, {counted(counts.num_tokens, 'token')} in {seconds:.1f} s ({rates})"
    return f"{what}: {run}; {pads}; {cut}{errors}"


def counted(number: int, noun: str) -> str:
    """ "1 text", "1,200 texts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(number: float) -> str:
    """A rate in at most four characters and a unit: 87, 1.2k, 46k, 3.1M."""
    for unit in ("", "k", "M"):
        if number < 999.5:
            return f"{number:.1f}{unit}" if number < 9.95 and unit else f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.1f}G"
