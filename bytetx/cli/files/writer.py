"""Results into .npy, .jsonl and .parquet, staged beside the output so that a killed job resumes."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bytetx.cli.files.encoders import Encoder, VectorEncoder
from bytetx.cli.files.lock import OutputError, OutputLock, OutputPaths
from bytetx.cli.files.parquet import ParquetForm, lines_to_parquet, vectors_to_parquet
from bytetx.cli.files.resume import (
    Progress,
    check_same_job,
    load_progress,
    save_progress,
    temporary_of,
)
from bytetx.errors import InputError


class Output(Protocol):
    """Where encoded rows go."""

    progress: Progress

    def append(self, data: bytes, lines: bytes, progress: Progress) -> None:
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

    def append(self, data: bytes, lines: bytes, progress: Progress) -> None:
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


def find_unfinished(lock: OutputLock, *, resume: bool, overwrite: bool) -> Progress | None:
    """What a job that ended early left; None where there is nothing to go on with.

    What only its renames were missing is put in its place first. Raises OutputError where an output
    is there that may not be replaced, InputError where what was left cannot be gone on with.
    """
    paths = lock.paths
    if overwrite:
        return None
    progress = _settled(paths)
    if progress is None:
        return None
    if not resume:
        raise OutputError(
            f"{paths.name} is unfinished, from a job that ended early; go on with --resume, or "
            "start again with --overwrite"
        )
    _check_replaces(paths, progress)
    if not _is_all_there(paths, progress):
        raise InputError(
            f"{paths.partial} is shorter than the {progress.counts.num_texts:,} results that "
            f"{paths.progress} counts; start again with --overwrite"
        )
    return progress


def is_complete(lock: OutputLock, *, resume: bool, overwrite: bool) -> bool:
    """Whether an output is there and is to stay. Raises OutputError where it is only in the way.

    Ask where nothing is unfinished.
    """
    if overwrite or not lock.paths.final.exists():
        return False
    if resume:
        return True
    raise OutputError(
        f"{lock.paths.name} exists; replace it with --overwrite, or give another name"
    )


def begin_or_go_on(
    unfinished: Progress | None, job: Mapping[str, Any], lock: OutputLock, *, overwrite: bool
) -> Progress:
    """The unfinished job's committed state, or that of one not begun.

    Raises InputError where the unfinished job is not this one.
    """
    if unfinished is None:
        return Progress(job, replaces=overwrite)
    check_same_job(unfinished, job, lock.paths.progress)
    return unfinished


class StagedOutput:
    """An output that is appended to under `<name>.partial` and renamed when it is whole.

    Rows count from the moment that `<name>.progress.json` says so: after the rows themselves are
    on the disk. What stands beyond is written over, so a kill at any moment costs those rows only.
    """

    def __init__(
        self,
        lock: OutputLock,
        encoder: Encoder,
        *,
        progress: Progress,
        parquet: ParquetForm | None = None,
    ):
        """lock: held until after `close`.  progress: what `begin_or_go_on` said.

        parquet: columns and types, where the output is one.
        """
        self.paths = lock.paths
        self.progress = progress
        self._encoder = encoder
        self._parquet = parquet
        self._list: int | None = None
        try:
            self._data = os.open(self.paths.partial, _OPEN_FLAGS, 0o666)
        except OSError as error:
            raise self._failure(error) from error
        if progress.counts.num_texts == 0:
            self._begin()

    def _begin(self) -> None:
        """Throws away what another job left; from its progress file on, in one step."""
        job, replaces = self.progress.job, self.progress.replaces
        try:
            self.paths.progress.unlink(missing_ok=True)
            _remove_leftovers(self.paths, but=self.paths.partial)
            os.ftruncate(self._data, 0)
        except OSError as error:
            raise self._failure(error) from error
        self.progress = Progress(job, replaces=replaces)
        self.append(self._encoder.header(0), b"", self.progress)

    def append(self, data: bytes, lines: bytes, progress: Progress) -> None:
        """Commits rows: data, then their lines in the list, then the progress that counts them."""
        was = self.progress
        try:
            _write(self._data, data, was.data_bytes)
            if lines:
                _write(self._open_list(), lines, was.list_bytes)
            now = replace(
                was,
                counts=progress.counts,
                digest=progress.digest,
                data_bytes=was.data_bytes + len(data),
                list_bytes=was.list_bytes + len(lines),
            )
            save_progress(now, self.paths.progress)
        except OSError as error:
            raise self._failure(error) from error
        self.progress = now

    def finish(self) -> None:
        """Makes the output whole, says so in the progress file, and only then renames.

        A kill before that file is written leaves a job to resume; after it, renames that the next
        job on this output does first of all.
        """
        num_rows, paths = self.progress.counts.num_texts, self.paths
        try:
            self._check_staged()
            os.ftruncate(self._data, self.progress.data_bytes)
            _write(self._data, self._encoder.header(num_rows), 0)
            if self.progress.list_bytes > 0:
                os.ftruncate(self._open_list(), self.progress.list_bytes)
            if self._parquet is not None:
                self._write_parquet(self._parquet)
            whole_bytes = paths.whole.stat().st_size
            self.progress = replace(self.progress, whole_bytes=whole_bytes)
            _check_replaces(paths, self.progress)
            save_progress(self.progress, paths.progress)
            _publish(paths, self.progress)
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Ends the job: committed rows of an unfinished one stay; one without any leaves none."""
        os.close(self._data)
        if self._list is not None:
            os.close(self._list)
        if self.progress.counts.num_texts == 0:
            with suppress(OSError):  # the next job on this output removes them
                self.paths.progress.unlink(missing_ok=True)
                _remove_leftovers(self.paths)

    def _check_staged(self) -> None:
        """Raises OutputError where the rows are no longer under their name, or not all of them."""
        is_there = self.paths.partial.exists() and os.path.samestat(
            self.paths.partial.stat(), os.fstat(self._data)
        )
        if not is_there or not _is_all_there(self.paths, self.progress):
            raise OutputError(
                f"{self.paths.partial} was removed, replaced or cut while the job ran; "
                f"{self.paths.name} is not touched: start again with --overwrite"
            )

    def _open_list(self) -> int:
        if self._list is None:
            self._list = os.open(self.paths.partial_list, _OPEN_FLAGS, 0o666)
        return self._list

    def _write_parquet(self, form: ParquetForm) -> None:
        paths = self.paths
        if isinstance(self._encoder, VectorEncoder):
            vectors = np.load(paths.partial, mmap_mode="r")
            lines = paths.partial_list if self.progress.list_bytes > 0 else None
            vectors_to_parquet(vectors, lines, paths.whole, form=form)
        else:
            lines_to_parquet(paths.partial, paths.whole, form=form)
        _sync(paths.whole)

    def _failure(self, error: OSError) -> OutputError:
        num_done = self.progress.counts.num_texts
        return OutputError(
            f"{self.paths.name} cannot be written: {error.strerror or error}; {num_done:,} results "
            "are kept: make room and go on with --resume"
        )


def _settled(paths: OutputPaths) -> Progress | None:
    """The progress of an unfinished job, once what a killed one had left to rename is renamed."""
    if not paths.progress.exists():
        _remove_leftovers(paths)
        return None
    progress = load_progress(paths.progress)
    if progress.whole_bytes is None:
        return progress
    try:
        _publish(paths, progress)
    except OSError as error:
        raise OutputError(f"{paths.name} cannot be written: {error.strerror}") from error
    return None


def _publish(paths: OutputPaths, progress: Progress) -> None:
    """Gives the whole output its name. Each step may have been done already by a killed job."""
    if paths.whole.exists():
        if paths.whole.stat().st_size != progress.whole_bytes:
            raise OutputError(
                f"{paths.whole} is not the {progress.whole_bytes:,} bytes that {paths.progress} "
                f"counts; {paths.name} is not touched: start again with --overwrite"
            )
        _check_replaces(paths, progress)
        if paths.suffix == ".npy":
            _publish_errors(paths, progress)
        paths.whole.replace(paths.final)
        with suppress(OSError):  # not every file system knows it of folders
            _sync(paths.final.parent)
    _remove_leftovers(paths)
    paths.progress.unlink(missing_ok=True)


def _publish_errors(paths: OutputPaths, progress: Progress) -> None:
    if progress.list_bytes == 0:
        paths.errors.unlink(missing_ok=True)
    elif paths.partial_list.exists():
        paths.partial_list.replace(paths.errors)


def _remove_leftovers(paths: OutputPaths, *, but: Path | None = None) -> None:
    leftovers = (paths.partial, paths.partial_list, temporary_of(paths.progress), paths.whole)
    for path in leftovers:
        if path != but:
            path.unlink(missing_ok=True)


def _is_all_there(paths: OutputPaths, progress: Progress) -> bool:
    """Whether the rows that the progress counts are on the disk."""
    needed = {paths.partial: progress.data_bytes, paths.partial_list: progress.list_bytes}
    return all(
        path.exists() and path.stat().st_size >= num_bytes
        for path, num_bytes in needed.items()
        if num_bytes > 0
    )


def _check_replaces(paths: OutputPaths, progress: Progress) -> None:
    """Raises OutputError where an output came to be while the job ran, by whoever made it."""
    if paths.final.exists() and not progress.replaces:
        raise OutputError(
            f"{paths.name} is there now and was not when its unfinished job began; move it away "
            "and go on with --resume, or start again with --overwrite"
        )


_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


def _write(descriptor: int, data: bytes, offset: int) -> None:
    """All of `data` at `offset`, on the disk before this returns."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
    os.fsync(descriptor)


def _sync(path: Path) -> None:
    """What was written to a file, or renamed in a folder, is on the disk after this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
