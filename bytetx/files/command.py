"""From a command's options to a finished output: check all that is cheap, load, run, close."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from bytetx import __version__
from bytetx.errors import BytetxError, InputError
from bytetx.files.job import run_job
from bytetx.files.options import JobOptions
from bytetx.files.reader import RankRequest, Record, Shape, Source, open_sources, read_records
from bytetx.files.resume import Progress, model_identity, skip_done
from bytetx.files.tasks import Task
from bytetx.files.terminal import JobBar, closing_line, waiting
from bytetx.files.writer import (
    Output,
    StagedOutput,
    StdoutOutput,
    check_output,
    unfinished_progress,
)


def run_text_job(options: JobOptions, task: Task, *, takes_pairs: bool = False) -> None:
    """Runs a task on each text of the inputs."""
    shape = Shape(tuple(options.column or ("text",)))
    if len(shape.columns) > (2 if takes_pairs else 1):
        needed = "one, or two for pairs" if takes_pairs else "one"
        raise typer.BadParameter(f"--column was given {len(shape.columns)} times; give {needed}")
    sources = open_sources(options.files or [], format=options.input_format)
    _run(options, task, lambda: read_records(sources, shape), total_bytes=_total_bytes(sources))


def run_prompt_job(options: JobOptions, task: Task) -> None:
    """Runs a task on each prompt of the inputs, which may be chats where a line is JSON."""
    if options.truncate:
        raise typer.BadParameter("--truncate does not go with prompts, which are never cut")
    shape = Shape(tuple(options.column or ("text",)), chats=True)
    if len(shape.columns) > 1:
        raise typer.BadParameter("--column was given twice; prompts have one column")
    sources = open_sources(options.files or [], format=options.input_format)
    _run(options, task, lambda: read_records(sources, shape), total_bytes=_total_bytes(sources))


def run_rank_job(
    options: JobOptions, task: Task, *, query: str | None, query_file: str | None
) -> None:
    """Ranks the documents of the inputs for one query, for those of a file, or line by line."""
    sources = open_sources(options.files or [], format=options.input_format)
    shape = Shape(tuple(options.column or ("text",)))
    if len(shape.columns) > 1:
        raise typer.BadParameter("--column was given twice; documents have one column")
    total_bytes = _total_bytes(sources)
    if query is not None:
        one = [Record(query, total_bytes, "--query")]
        _run(options, task, lambda: _ranking(one, sources, shape), total_bytes=total_bytes)
        return
    if query_file is not None:
        if query_file == "-" and any(source.path is None for source in sources):
            raise typer.BadParameter("queries and documents cannot both come from stdin")
        asking = open_sources([query_file])
        _run(
            options,
            task,
            lambda: _ranking(read_records(asking, shape), sources, shape),
            total_bytes=_total_bytes(asking),
        )
        return
    if options.input_format is None:
        sources = [s if s.is_regular else replace(s, format="jsonl") for s in sources]
    if any(source.format != "jsonl" for source in sources):
        raise typer.BadParameter(
            'give --query or --query-file, or .jsonl inputs with {"query": "...", "documents": '
            "[...]} on each line"
        )
    by_line = Shape(rank_requests=True)
    _run(options, task, lambda: read_records(sources, by_line), total_bytes=total_bytes)


def _ranking(queries: Iterable[Record], sources: list[Source], shape: Shape) -> Iterator[Record]:
    """Every query with all documents; a query that could not be read stays its error."""
    documents = tuple(record.value for record in read_records(sources, shape))
    for query in queries:
        value = query.value
        if isinstance(value, str):
            value = RankRequest(value, documents)
        elif not isinstance(value, InputError):
            value = InputError("a query must be a string, got token ids")
        yield replace(query, value=value)


def _total_bytes(sources: list[Source]) -> int:
    """0 where one of them is a pipe."""
    return sum(s.size_bytes for s in sources) if all(s.is_regular for s in sources) else 0


def _run(
    options: JobOptions, task: Task, records: Callable[[], Iterator[Record]], *, total_bytes: int
) -> None:
    console = Console(stderr=True, highlight=False)
    path = options.output_path
    _check_output_options(options, task)
    if path is not None and not check_output(
        path, resume=options.resume, overwrite=options.overwrite
    ):
        line = f"{path} is whole; nothing is left to resume; --overwrite would make it again"
        console.print(line, markup=False, soft_wrap=True)
        return
    folder = _checkpoint_folder(options, task)
    progress = Progress(_job(options, task, folder))
    if path is not None:
        progress = unfinished_progress(path, progress.job, resume=options.resume)
    waiting_records = records()
    skip_done(waiting_records, progress, path or Path("-"))
    with waiting(console, f"loading {options.model or 'all-MiniLM-L6-v2, the demo checkpoint'}"):
        model = _load(options, folder)
        run, encoder = task.open(model, path is not None and path.suffix.lower() != ".jsonl")
    if task.describe is not None:
        console.print(task.describe(model), markup=False, soft_wrap=True)
    output = StdoutOutput() if path is None else StagedOutput(path, encoder, progress=progress)
    try:
        with JobBar(console, total_bytes=total_bytes, title=task.name) as show:
            run_job(waiting_records, run, output=output, encoder=encoder, show=show)
        output.finish()
    except KeyboardInterrupt:
        _print_interrupted(console, output, path)
        raise
    finally:
        output.close()
    _print_closing(console, output, task=task, path=path)


def _check_output_options(options: JobOptions, task: Task) -> None:
    path = options.output_path
    if options.ranks is not None and options.tp not in (None, options.ranks.size):
        raise typer.BadParameter(
            f"--tp {options.tp}: torchrun started {options.ranks.size} ranks, which all take part"
        )
    if options.resume and options.overwrite:
        raise typer.BadParameter("--resume goes on, --overwrite starts again; give one of them")
    if options.resume and path is None:
        raise typer.BadParameter("--resume needs an output file; give -o")
    if path is not None and any(_is_same_file(path, name) for name in options.files or []):
        raise typer.BadParameter(f"{path} is an input, too; give the output another name")
    if path is not None and path.suffix.lower() == ".npy" and task.name != "embed":
        raise typer.BadParameter(
            f"{path}: .npy holds vectors, which embed gives; {task.name} writes .jsonl or .parquet"
        )


def _is_same_file(path: Path, name: str) -> bool:
    return os.path.exists(name) and os.path.exists(path) and os.path.samefile(name, path)


def _checkpoint_folder(options: JobOptions, task: Task) -> Path:
    from bytetx.config import resolve_checkpoint
    from bytetx.demo import demo_checkpoint

    if options.model is not None:
        return resolve_checkpoint(
            options.model, revision=options.revision, local_files_only=options.offline
        )
    if task.name != "embed":
        raise typer.BadParameter(
            f"{task.name} needs --model; the demo checkpoint, which is taken without it, has no "
            "such head and can only embed"
        )
    return demo_checkpoint()


def _job(options: JobOptions, task: Task, folder: Path) -> dict[str, Any]:
    """What a job that resumes must have in common with the one that was killed."""
    suffix = "" if options.output_path is None else options.output_path.suffix.lower()
    return {
        "bytetx": __version__,
        "task": task.name,
        "model": model_identity(folder),
        "device": options.device,
        "dtype": options.dtype,
        "tp": options.tp if options.ranks is None else options.ranks.size,
        "column": options.column,
        "output": suffix,
        **task.options,
    }


def _load(options: JobOptions, folder: Path) -> Any:
    # Imported here: torch takes seconds, which checks of files and options must not wait for.
    import torch

    from bytetx.model import load

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return load(
        folder,
        device=options.device,
        dtype=options.dtype,
        tp=options.ranks or options.tp or 1,
        token_budget=options.token_budget,
        group_timeout=options.group_timeout,
    )


def _print_interrupted(console: Console, output: Output, path: Path | None) -> None:
    num_texts = output.progress.counts.num_texts
    if path is None or num_texts == 0:
        left = f"{num_texts:,} results were written"
    else:
        left = f"{num_texts:,} results are kept; go on with the same command and --resume"
    console.print(f"interrupted: {left}", markup=False, soft_wrap=True)


def _print_closing(console: Console, output: Output, *, task: Task, path: Path | None) -> None:
    counts = output.progress.counts
    what = task.name if path is None else f"{task.name} → {path}"
    errors_at = ""
    if path is not None and path.suffix.lower() == ".npy":
        errors_at = f"{path}.errors.jsonl"
    line = closing_line(counts, what=what, errors_at=errors_at)
    console.print(line, markup=False, soft_wrap=True)
    if 0 < counts.num_texts == counts.num_errors:
        raise BytetxError(f"every text failed; {errors_at or 'the output'} says why for each")
