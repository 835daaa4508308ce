"""Results into .npy, .jsonl and .parquet, staged beside the output so that a killed job resumes."""

import fcntl
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bytetx.errors import BytetxError, InputError
from bytetx.files.parquet import lines_to_parquet, vectors_to_parquet
from bytetx.files.reader import import_parquet
from bytetx.files.resume import Progress, check_same_job, load_progress, save_progress

OUTPUT_SUFFIXES = (".npy", ".jsonl", ".parquet")
NPY_HEADER_BYTES = 128


class OutputError(BytetxError):
    """The output cannot be written: no such folder, no permission, no space."""


@dataclass(frozen=True, slots=True)
class Row:
    """One result, encoded. error_line: for the list of errors, where `data` has no room for it."""

    data: bytes
    error_line: bytes = b""
    is_error: bool = False


class Encoder(Protocol):
    """Turns results into the bytes of an unfinished output."""

    def header(self, num_rows: int) -> bytes:
        """What stands before the rows; its size never changes."""

    def encode(self, index: int, result: Any) -> Row:
        """The row of the result of text `index`; an exception is a result too."""


class VectorEncoder:
    """Rows of float32 after a .npy header. An error is a row of NaN and a line in the list."""

    def __init__(self, dim: int):
        self._dim = dim

    def header(self, num_rows: int) -> bytes:
        shape = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({num_rows}, {self._dim}), }}"
        room = NPY_HEADER_BYTES - 10  # magic (6), version (2), length of the rest (2)
        return (
            b"\x93NUMPY\x01\x00"
            + room.to_bytes(2, "little")
            + shape.encode("ascii").ljust(room - 1)
            + b"\n"
        )

    def encode(self, index: int, result: Any) -> Row:
        if not isinstance(result, Exception):
            vector = np.asarray(result, dtype="<f4")
            if np.isfinite(vector).all():
                return Row(vector.tobytes())
            result = _NOT_FINITE
        row = np.full(self._dim, np.nan, dtype="<f4").tobytes()
        return Row(row, _error_line(index, result), is_error=True)


class LineEncoder:
    """One JSON object a result: {"index": i, ...}, or {"index": i, "error": "..."}.

    to_json: a result as the text of a JSON object with at least one key.
    """

    def __init__(self, to_json: Callable[[Any], str]):
        self._to_json = to_json

    def header(self, num_rows: int) -> bytes:
        return b""

    def encode(self, index: int, result: Any) -> Row:
        if not isinstance(result, Exception):
            try:
                text = self._to_json(result)
            except ValueError:  # JSON has no NaN
                result = _NOT_FINITE
            else:
                # A label may hold half a surrogate pair; the escape of it is the one JSON has.
                line = f'{{"index": {index}, {text[1:]}\n'
                return Row(line.encode("utf-8", "backslashreplace"))
        return Row(_error_line(index, result), is_error=True)


_NOT_FINITE = InputError(
    "the model's answer is not finite; check its weights, or try another dtype"
)


def _error_line(index: int, error: Exception) -> bytes:
    return f"{json.dumps({'index': index, 'error': str(error)})}\n".encode()


class Output(Protocol):
    """Where encoded rows go."""

    progress: Progress

    def append(self, data: bytes, errors: bytes, progress: Progress) -> None:
        """Writes rows and makes `progress` the committed state; sizes in it are filled in."""

    def finish(self) -> None:
        """Gives the output its name and form."""

    def close(self) -> None:
        """Lets go of files; an unfinished output stays as it is."""


class StdoutOutput:
    """Lines to stdout as they come; nothing to resume."""

    def __init__(self) -> None:
        if sys.stdout is None:
            raise OutputError("stdout is closed; give an output file with -o")
        self.progress = Progress({})

    def append(self, data: bytes, errors: bytes, progress: Progress) -> None:
        try:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # the reader has enough, as `head` does; the command ends silently
            raise
        except OSError as error:
            _forget_stdout()
            raise OutputError(
                f"stdout cannot be written: {error.strerror}; {self.progress.counts.num_texts:,} "
                "results were written; a job with an output file (-o) can be resumed"
            ) from error
        self.progress = progress

    def finish(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing is held."""


def _forget_stdout() -> None:
    """Drops what is buffered: Python would try to write it once more, and complain, at exit."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """The output and what stands beside it while the job runs."""

    final: Path

    @property
    def partial(self) -> Path:
        return self._beside(".partial")

    @property
    def progress(self) -> Path:
        return self._beside(".progress.json")

    @property
    def errors(self) -> Path:
        return self._beside(".errors.jsonl")

    def _beside(self, suffix: str) -> Path:
        return self.final.with_name(self.final.name + suffix)


def check_output(path: Path, *, resume: bool, overwrite: bool) -> bool:
    """Whether there is something to do; raises OutputError where the output cannot be written.

    False where `resume` is asked for and the output is whole already.
    """
    paths = OutputPaths(path)
    if path.suffix.lower() not in OUTPUT_SUFFIXES:
        raise OutputError(
            f"the output's name must end in {', '.join(OUTPUT_SUFFIXES)}, got {str(path)!r}; "
            "without -o, jsonl goes to stdout"
        )
    if path.suffix.lower() == ".parquet":
        import_parquet(str(path))
    _check_name_length(paths)
    if path.is_dir():
        raise OutputError(f"{path} is a folder; give a file name, such as {path.name}/out.jsonl")
    folder = path.parent
    if not folder.is_dir():
        raise OutputError(f"{path} cannot be written: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{path} cannot be written: no permission to write in {folder}")
    is_unfinished = paths.partial.exists() and paths.progress.exists()
    if is_unfinished and not (resume or overwrite):
        raise OutputError(
            f"{path} is unfinished, from a job that ended early; go on with --resume, or start "
            "again with --overwrite"
        )
    if path.exists() and not is_unfinished:
        if resume:
            return False
        if not overwrite:
            raise OutputError(f"{path} exists; replace it with --overwrite, or give another name")
    return True


def _check_name_length(paths: OutputPaths) -> None:
    """Raises OutputError where the file system has no room for the longest name beside it."""
    longest = paths.progress.with_name(f"{paths.progress.name}.tmp")  # as save_progress has it
    try:
        longest.exists()
        paths.final.exists()
    except OSError as error:
        raise OutputError(
            f"{paths.final} cannot be written: {error.strerror}; give a shorter name, as files "
            f"such as {longest.name[-24:]} stand beside it while the job runs"
        ) from error


def unfinished_progress(path: Path, job: Mapping[str, Any], *, resume: bool) -> Progress:
    """Where to go on: the committed state of the unfinished job, or that of one not begun.

    Raises InputError where the unfinished job is not this one.
    """
    paths = OutputPaths(path)
    if not (resume and paths.partial.exists() and paths.progress.exists()):
        return Progress(job)
    progress = load_progress(paths.progress)
    check_same_job(progress, job, paths.progress)
    return progress


class StagedOutput:
    """An output that is appended to under `<name>.partial` and renamed when it is whole.

    Rows count from the moment that `<name>.progress.json` says so: after the rows themselves are
    on the disk. What stands beyond is written over, so a kill at any moment costs those rows only.
    """

    def __init__(self, path: Path, encoder: Encoder, *, progress: Progress):
        """progress: what `unfinished_progress` found, or that of a job that has not begun."""
        self.paths = OutputPaths(path)
        self.progress = progress
        self._encoder = encoder
        self._data = _open_locked(self.paths.partial)
        self._errors: int | None = None
        if progress.counts.num_texts == 0:
            self.progress = Progress(progress.job)
            self.append(encoder.header(0), b"", self.progress)
            os.ftruncate(self._data, self.progress.data_bytes)

    def append(self, data: bytes, errors: bytes, progress: Progress) -> None:
        """Commits rows: data, then errors, then the progress that counts them."""
        was = self.progress
        try:
            _write(self._data, data, was.data_bytes)
            if errors:
                _write(self._open_errors(), errors, was.error_bytes)
            now = Progress(
                was.job,
                progress.counts,
                progress.digest,
                was.data_bytes + len(data),
                was.error_bytes + len(errors),
            )
            save_progress(now, self.paths.progress)
        except OSError as error:
            raise self._failure(error) from error
        self.progress = now

    def finish(self) -> None:
        num_rows = self.progress.counts.num_texts
        try:
            os.ftruncate(self._data, self.progress.data_bytes)
            _write(self._data, self._encoder.header(num_rows), 0)
            if self.progress.error_bytes > 0:
                os.ftruncate(self._open_errors(), self.progress.error_bytes)
            else:
                self.paths.errors.unlink(missing_ok=True)
            if self.paths.final.suffix.lower() == ".parquet":
                self._finish_parquet()
            else:
                self.paths.partial.replace(self.paths.final)
            self.paths.progress.unlink()
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Ends the job: committed rows of an unfinished one stay; one without any leaves none."""
        os.close(self._data)
        if self._errors is not None:
            os.close(self._errors)
        if self.progress.counts.num_texts == 0:
            self.paths.progress.unlink(missing_ok=True)
            self.paths.partial.unlink(missing_ok=True)

    def _open_errors(self) -> int:
        if self._errors is None:
            self._errors = os.open(self.paths.errors, _OPEN_FLAGS, 0o666)
        return self._errors

    def _finish_parquet(self) -> None:
        whole = self.paths.final.with_name(self.paths.final.name + ".tmp")
        if isinstance(self._encoder, VectorEncoder):
            vectors = np.load(self.paths.partial, mmap_mode="r")
            errors = self.paths.errors if self.progress.error_bytes > 0 else None
            vectors_to_parquet(vectors, errors, whole)
        else:
            lines_to_parquet(self.paths.partial, whole, task=str(self.progress.job["task"]))
        whole.replace(self.paths.final)
        self.paths.partial.unlink()
        self.paths.errors.unlink(missing_ok=True)

    def _failure(self, error: OSError) -> OutputError:
        num_done = self.progress.counts.num_texts
        return OutputError(
            f"{self.paths.final} cannot be written: {error.strerror}; {num_done:,} results are "
            "kept: make room and go on with --resume"
        )


_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


def _open_locked(path: Path) -> int:
    try:
        descriptor = os.open(path, _OPEN_FLAGS, 0o666)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise OutputError(f"{path} is being written by another bytetx; wait for it") from error
    if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
        os.close(descriptor)  # its job ended meanwhile, and this is the finished output now
        raise OutputError(f"{path} was just finished by another bytetx; look at its output")
    return descriptor


def _write(descriptor: int, data: bytes, offset: int) -> None:
    """All of `data` at `offset`, on the disk before this returns."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
    os.fsync(descriptor)
