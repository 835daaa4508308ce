"""Runs a command: checks its options and files, loads the model, runs the job."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from bytetx import __version__
from bytetx.arguments import DTYPE_ALIASES
from bytetx.cli.files.job import run_job
from bytetx.cli.files.lock import OutputLock, OutputPaths, check_output
from bytetx.cli.files.options import JobOptions
from bytetx.cli.files.parquet import ParquetForm
from bytetx.cli.files.parquet_reader import kept_types
from bytetx.cli.files.reader import open_sources, read_records
from bytetx.cli.files.records import RankRequest, Record, RecordError, Shape, Source, Value
from bytetx.cli.files.resume import (
    SIDE_FILES,
    JobProgress,
    families_identity,
    model_identity,
    side_files_identity,
    skip_done,
)
from bytetx.cli.files.start import started
from bytetx.cli.files.tasks import JobTask, is_unicode
from bytetx.cli.files.terminal import JobBar, closing_line, tell, waiting
from bytetx.cli.files.writer import (
    Output,
    StagedOutput,
    StdoutOutput,
    begin_or_resume,
    find_unfinished,
    is_complete,
)
from bytetx.errors import BytetxError, InputError, OptionError, StepError

# The exit code of a job that is done but for malformed records, whose lines are lost.
LINES_LOST = 3


@dataclass(frozen=True, slots=True)
class JobInputs:
    """Inputs of a job.

    sources: the output has a row for each of their records; `--keep` copies their columns.
    also: further files that it reads.  read: all records, from the first.
    """

    sources: list[Source]
    read: Callable[[], Iterator[Record]]
    also: tuple[Source, ...] = ()

    @property
    def total_bytes(self) -> int:
        """0 where one of them is a pipe."""
        is_known = all(source.is_regular for source in self.sources)
        return sum(source.size_bytes for source in self.sources) if is_known else 0


def run_text_job(options: JobOptions, task: JobTask, *, takes_pairs: bool = False) -> None:
    """Runs a task on each text of the inputs."""
    columns = tuple(options.column or ("text",))
    if len(columns) > (2 if takes_pairs else 1):
        needed = "one, or two for pairs" if takes_pairs else "one"
        raise typer.BadParameter(f"--column was given {len(columns)} times; give {needed}")
    _run_rows(options, task, Shape(columns, keep=_keep(options, task)))


def run_pair_job(options: JobOptions, task: JobTask, *, columns: tuple[str, str]) -> None:
    """Runs a task on each pair of the inputs. columns: those of a pair where --column is absent."""
    if options.truncate:
        raise typer.BadParameter("--truncate does not go with contexts, which are cut into chunks")
    chosen = tuple(options.column or columns)
    if len(chosen) != 2:
        raise typer.BadParameter(f"--column was given {len(chosen)} times; give it twice")
    _run_rows(options, task, Shape(chosen, keep=_keep(options, task)))


def run_prompt_job(options: JobOptions, task: JobTask) -> None:
    """Runs a task on each prompt of the inputs, which may be chats where a line is JSON."""
    if options.truncate:
        raise typer.BadParameter("--truncate does not go with prompts, which are never cut")
    columns = tuple(options.column or ("text",))
    if len(columns) > 1:
        raise typer.BadParameter("--column was given twice; prompts have one column")
    _run_rows(options, task, Shape(columns, chats=True, keep=_keep(options, task)))


def run_decision_job(options: JobOptions, task: JobTask) -> None:
    """Runs a task on each request of the inputs: a JSON object on each line."""
    if options.truncate:
        raise typer.BadParameter("--truncate does not go with requests, which are never cut")
    if options.column:
        raise typer.BadParameter("--column does not go with requests, which are whole lines")
    shape = Shape((), decisions=True, keep=_keep(options, task))
    sources = open_sources(options.files or [], format=options.input_format)
    if any(source.format not in ("jsonl", "text") for source in sources):
        raise typer.BadParameter(
            'decide reads .jsonl with {"state": ..., "questions": {...}} on each line'
        )
    _run(options, task, JobInputs(sources, lambda: read_records(sources, shape)), keep=shape.keep)


def load_model(options: JobOptions, name: str) -> tuple[Path, Any]:
    """(the checkpoint's folder, the model) of a command that is no job. name: of the command."""
    task = JobTask(name, {}, {}, lambda model, suffix: model)
    folder = _checkpoint_folder(options, task)
    return folder, _load(options, folder, task)


def run_rank_job(
    options: JobOptions, task: JobTask, *, query: str | None, query_file: str | None
) -> None:
    """Ranks the documents of the inputs for one query, for those of a file, or line by line."""
    keep = _keep(options, task)
    shape = Shape(tuple(options.column or ("text",)))
    if len(shape.columns) > 1:
        raise typer.BadParameter("--column was given twice; documents have one column")
    if query is not None and keep:
        raise typer.BadParameter("--keep copies columns of queries; give them with --query-file")
    if query is not None and not is_unicode(query):
        raise typer.BadParameter("--query holds bytes that are not UTF-8")
    sources = open_sources(options.files or [], format=options.input_format)
    if query is not None:
        total_bytes = sum(source.size_bytes for source in sources)
        one = [Record(query, total_bytes, "--query")]
        _run(options, task, JobInputs(sources, lambda: _ranking(one, sources, shape)))
        return
    if query_file is not None:
        if query_file == "-" and any(source.path is None for source in sources):
            raise typer.BadParameter("queries and documents cannot both come from stdin")
        asking = open_sources([query_file])
        queries = replace(shape, keep=keep)

        def read() -> Iterator[Record]:
            return _ranking(read_records(asking, queries), sources, shape)

        _run(options, task, JobInputs(asking, read, also=tuple(sources)), keep=keep)
        return
    if options.input_format is None:
        sources = [s if s.is_regular else replace(s, format="jsonl") for s in sources]
    if any(source.format != "jsonl" for source in sources):
        raise typer.BadParameter(
            'give --query or --query-file, or .jsonl inputs with {"query": "...", "documents": '
            "[...]} on each line"
        )
    by_line = Shape((), rank_requests=True, keep=keep)
    _run(options, task, JobInputs(sources, lambda: read_records(sources, by_line)), keep=keep)


def _run_rows(options: JobOptions, task: JobTask, shape: Shape) -> None:
    sources = open_sources(options.files or [], format=options.input_format)
    inputs = JobInputs(sources, lambda: read_records(sources, shape))
    _run(options, task, inputs, keep=shape.keep)


def _ranking(queries: Iterable[Record], sources: list[Source], shape: Shape) -> Iterator[Record]:
    """Every query with all documents; a query that could not be read stays an error."""
    documents: list[Value | InputError] = []
    for record in read_records(sources, shape):
        assert not isinstance(record.value, RankRequest)  # the shape names columns
        documents.append(record.value)
    for query in queries:
        value = query.value
        if isinstance(value, str):
            value = RankRequest(value, tuple(documents))
        elif not isinstance(value, InputError):
            value = RecordError(query.where, "a query must be a string, got token ids")
        yield replace(query, value=value)


def _keep(options: JobOptions, task: JobTask) -> tuple[str, ...]:
    """The columns that `--keep` names, checked against the columns of the output."""
    names = [name for given in options.keep or () for name in given.split(",")]
    taken = ("index", *task.columns, "error")
    for number, name in enumerate(names):
        if not name:
            raise typer.BadParameter("--keep has an empty name; give columns as --keep id,date")
        if name in names[:number]:
            raise typer.BadParameter(f"--keep names {name!r} twice")
        if name in taken:
            raise typer.BadParameter(
                f"--keep {name}: rows of {task.name} have {', '.join(taken)} already; rename "
                "that column of the input"
            )
    path = options.output_path
    if names and path is not None and path.suffix.lower() == ".npy":
        raise typer.BadParameter(
            f"--keep: .npy has no columns but vectors, got {path}; write .jsonl or .parquet"
        )
    return tuple(names)


def _run(
    options: JobOptions, task: JobTask, inputs: JobInputs, *, keep: tuple[str, ...] = ()
) -> None:
    """Runs a job under the lock of its output, which is taken before any state is read."""
    path = options.output_path
    console = Console(stderr=True, highlight=False)
    _check_output_options(options, task)
    if path is None:
        _run_job(options, task, inputs, keep=keep, console=console)
        return
    paths = check_output(path)
    _check_no_input(paths, inputs)
    with OutputLock(paths) as lock:
        unfinished = find_unfinished(lock, resume=options.resume, overwrite=options.overwrite)
        if unfinished is None and is_complete(
            lock, resume=options.resume, overwrite=options.overwrite
        ):
            tell(
                console,
                f"{path} is complete: there is nothing to resume; --overwrite writes it again",
            )
            return
        _run_job(options, task, inputs, keep=keep, console=console, lock=lock, was=unfinished)


def _run_job(
    options: JobOptions,
    task: JobTask,
    inputs: JobInputs,
    *,
    keep: tuple[str, ...],
    console: Console,
    lock: OutputLock | None = None,
    was: JobProgress | None = None,
) -> None:
    """lock: of the output, None for stdout.  was: the state of the unfinished job to resume."""
    path, suffix = options.output_path, options.output_suffix
    folder = _checkpoint_folder(options, task)
    job = _job(options, task, folder, keep=keep)
    progress = JobProgress(job)
    if lock is not None:
        progress = begin_or_resume(was, job, lock, overwrite=options.overwrite)
    parquet = None
    if suffix == ".parquet":
        parquet = ParquetForm(task.columns, keep, kept_types(inputs.sources, keep))
    records = inputs.read()
    skip_done(records, progress, path or Path("-"))
    with waiting(console, f"loading {options.model or 'all-MiniLM-L6-v2, the demo checkpoint'}"):
        model = _load(options, folder, task)
        run, encoder = task.open(model, suffix)
    started()
    if task.describe is not None:
        tell(console, task.describe(model))
    if lock is None:
        output: Output = StdoutOutput()
    else:
        output = StagedOutput(lock, encoder, progress=progress, parquet=parquet)
    try:
        with JobBar(console, total_bytes=inputs.total_bytes, title=task.name) as show:
            run_job(records, run, output=output, encoder=encoder, show=show)
        output.finish()
    except KeyboardInterrupt:
        tell(console, f"interrupted: {_what_is_left(output, path)}")
        raise
    except InputError as error:  # an input could not be read to its end
        raise InputError(f"{error}; {_what_is_left(output, path)}") from error
    finally:
        output.close()
    _print_closing(console, output, task=task, path=path)


def _check_output_options(options: JobOptions, task: JobTask) -> None:
    path = options.output_path
    if options.ranks is not None and options.tp not in (None, options.ranks.size):
        raise typer.BadParameter(
            f"--tp {options.tp} does not match the {options.ranks.size} ranks that torchrun "
            "started; leave --tp out"
        )
    if options.resume and options.overwrite:
        raise typer.BadParameter("--resume and --overwrite exclude each other; give one of them")
    if options.resume and path is None:
        raise typer.BadParameter("--resume needs an output file; give -o")
    if options.output_suffix == ".npy" and task.name != "embed":
        raise typer.BadParameter(
            f"{path}: .npy holds vectors, which embed gives; {task.name} writes .jsonl or .parquet"
        )


def _check_no_input(paths: OutputPaths, inputs: JobInputs) -> None:
    for source in (*inputs.sources, *inputs.also):
        for path in paths.all:
            if source.path is not None and _is_same_file(source.path, path):
                role = "the output" if path == paths.final else f"a file that {paths.name} needs"
                raise typer.BadParameter(
                    f"{source.path} is an input and {role}; give the output another name"
                )


def _is_same_file(one: Path, other: Path) -> bool:
    """False where one does not exist; one call, because another job may be removing it."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def _checkpoint_folder(options: JobOptions, task: JobTask) -> Path:
    from bytetx.checkpoint.demo import demo_checkpoint
    from bytetx.checkpoint.files import resolve_checkpoint

    if options.model == "":
        raise typer.BadParameter("--model is empty; give a checkpoint's folder or hub id")
    if options.model is not None:
        return resolve_checkpoint(
            options.model, revision=options.revision, local_files_only=options.offline
        )
    if task.name != "embed":
        raise typer.BadParameter(
            f"{task.name} needs --model: the default, the demo checkpoint, can only embed"
        )
    return demo_checkpoint()


def _job(
    options: JobOptions, task: JobTask, folder: Path, *, keep: tuple[str, ...]
) -> dict[str, Any]:
    """Return what must be equal for a job to be resumed."""
    return {
        "bytetx": __version__,
        "task": task.name,
        "model": model_identity(folder),
        SIDE_FILES: side_files_identity(folder),
        "device": options.device,
        "dtype": DTYPE_ALIASES.get(options.dtype, options.dtype),
        "tp": options.tp if options.ranks is None else options.ranks.size,
        "column": options.column,
        "keep": list(keep),
        "output": options.output_suffix,
        # Only where it is given, so that jobs of before can be resumed.
        **({} if options.grid is None else {"grid": options.grid}),
        **({"batch_invariant": True} if options.batch_invariant else {}),
        **({} if options.families is None else {"families": families_identity(options.families)}),
        **task.options,
    }


def _load(options: JobOptions, folder: Path, task: JobTask) -> Any:
    # Imported late: torch takes seconds, and checks of files and options need not wait for it.
    import torch

    from bytetx.model import load

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        return load(
            folder,
            device=options.device,
            dtype=options.dtype,
            tp=options.ranks or options.tp or 1,
            grid=options.grid,
            token_budget=options.token_budget,
            prefix_cache_bytes=options.prefix_cache_bytes,
            group_timeout=options.group_timeout,
            batch_invariant=options.batch_invariant,
            families=options.families,
            **task.load_options,
        )
    except StepError:
        raise
    except InputError as error:  # there is no input yet: it is one of these options
        raise OptionError(str(error)) from error


def _what_is_left(output: Output, path: Path | None) -> str:
    num_texts = output.progress.counts.num_texts
    if path is None or num_texts == 0:
        return f"{num_texts:,} results were written"
    return f"{num_texts:,} results are saved; continue with the same command and --resume"


def _print_closing(console: Console, output: Output, *, task: JobTask, path: Path | None) -> None:
    counts = output.progress.counts
    what = task.name if path is None else f"{task.name} → {path}"
    errors_at = ""
    if path is not None and path.suffix.lower() == ".npy":
        errors_at = str(OutputPaths(path).errors)
    line = closing_line(counts, what=what, errors_at=errors_at)
    tell(console, line)
    if 0 < counts.num_texts == counts.num_errors:
        raise BytetxError(f"every text failed; the errors are in {errors_at or 'the output'}")
    if counts.num_malformed:
        raise typer.Exit(LINES_LOST)
