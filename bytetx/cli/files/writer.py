"""Results into .npy, .jsonl and .parquet, staged next to the output so that a job can resume."""

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
    JobProgress,
    check_same_job,
    load_progress,
    save_progress,
    temporary_of,
)
from bytetx.errors import InputError


class Output(Protocol):
    """Where encoded rows go."""

    progress: JobProgress

    def append(self, data: bytes, lines: bytes, progress: JobProgress) -> None:
        """Writes rows and makes `progress` the committed state; sizes in it are filled in."""

    def finish(self) -> None:
        """Writes the final form and renames it to the output."""

    def close(self) -> None:
        """Closes files; an unfinished output stays as it is."""


class StdoutOutput:
    """Writes lines to stdout at once; such a job cannot resume."""

    def __init__(self) -> None:
        if sys.stdout is None:
            raise OutputError("stdout is closed; give an output file with -o")
        self.progress = JobProgress({})

    def append(self, data: bytes, lines: bytes, progress: JobProgress) -> None:
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
    """Drops buffered output, which Python would otherwise try to write again at exit."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def find_unfinished(lock: OutputLock, *, resume: bool, overwrite: bool) -> JobProgress | None:
    """The committed state of a job that ended early, or None.

    Finishes the renames of a job that had written all rows. Raises OutputError where an output
    exists that may not be replaced, InputError where the state cannot be resumed.
    """
    paths = lock.paths
    if overwrite:
        return None
    progress = _finish_renames(paths)
    if progress is None:
        return None
    if not resume:
        raise OutputError(
            f"{paths.name} is unfinished, from a job that ended early; continue it with --resume, "
            "or start again with --overwrite"
        )
    _check_replaces(paths, progress)
    if not _is_all_there(paths, progress):
        raise InputError(
            f"{paths.partial} is shorter than the {progress.counts.num_texts:,} results that "
            f"{paths.progress} counts; start again with --overwrite"
        )
    return progress


def is_complete(lock: OutputLock, *, resume: bool, overwrite: bool) -> bool:
    """Whether a finished output exists, where no unfinished job does.

    Raises OutputError where it exists and neither --resume nor --overwrite was given.
    """
    if overwrite or not lock.paths.final.exists():
        return False
    if resume:
        return True
    raise OutputError(
        f"{lock.paths.name} exists; replace it with --overwrite, or give another name"
    )


def begin_or_resume(
    unfinished: JobProgress | None, job: Mapping[str, Any], lock: OutputLock, *, overwrite: bool
) -> JobProgress:
    """The unfinished job's committed state, or the state of a new job.

    Raises InputError where the unfinished job has other options.
    """
    if unfinished is None:
        return JobProgress(job, replaces=overwrite)
    check_same_job(unfinished, job, lock.paths.progress)
    return unfinished


class StagedOutput:
    """An output that is appended to as `<name>.partial` and renamed when it is complete.

    A row is committed when `<name>.progress.json` counts it, which happens after the row is on the
    disk. Later bytes are overwritten on resumption, so a killed job loses uncommitted rows only.
    """

    def __init__(
        self,
        lock: OutputLock,
        encoder: Encoder,
        *,
        progress: JobProgress,
        parquet: ParquetForm | None = None,
    ):
        """lock: held until after `close`.  progress: from `begin_or_resume`.

        parquet: columns and types of a parquet output.
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
        """Deletes the files of an earlier job, its progress file first."""
        job, replaces = self.progress.job, self.progress.replaces
        try:
            self.paths.progress.unlink(missing_ok=True)
            _remove_leftovers(self.paths, but=self.paths.partial)
            os.ftruncate(self._data, 0)
        except OSError as error:
            raise self._failure(error) from error
        self.progress = JobProgress(job, replaces=replaces)
        self.append(self._encoder.header(0), b"", self.progress)

    def append(self, data: bytes, lines: bytes, progress: JobProgress) -> None:
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
        """Completes the output, records that in the progress file, and then renames.

        A job killed before the record can be resumed; after it, the next job on this output
        finishes the renames.
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
            complete_bytes = paths.complete.stat().st_size
            self.progress = replace(self.progress, complete_bytes=complete_bytes)
            _check_replaces(paths, self.progress)
            save_progress(self.progress, paths.progress)
            _publish(paths, self.progress)
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Closes the files. An unfinished job's committed rows stay; without any, no file does."""
        os.close(self._data)
        if self._list is not None:
            os.close(self._list)
        if self.progress.counts.num_texts == 0:
            with suppress(OSError):  # the next job on this output removes them
                self.paths.progress.unlink(missing_ok=True)
                _remove_leftovers(self.paths)

    def _check_staged(self) -> None:
        """Raises OutputError where the file of rows was removed, replaced or cut."""
        is_there = self.paths.partial.exists() and os.path.samestat(
            self.paths.partial.stat(), os.fstat(self._data)
        )
        if not is_there or not _is_all_there(self.paths, self.progress):
            raise OutputError(
                f"{self.paths.partial} was removed, replaced or cut while the job ran; "
                f"{self.paths.name} is unchanged: start again with --overwrite"
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
            vectors_to_parquet(vectors, lines, paths.complete, form=form)
        else:
            lines_to_parquet(paths.partial, paths.complete, form=form)
        _sync(paths.complete)

    def _failure(self, error: OSError) -> OutputError:
        num_done = self.progress.counts.num_texts
        return OutputError(
            f"{self.paths.name} cannot be written: {error.strerror or error}; {num_done:,} results "
            "are saved: free disk space and continue with --resume"
        )


def _finish_renames(paths: OutputPaths) -> JobProgress | None:
    """The progress of an unfinished job; finishes the renames of one that wrote all rows."""
    if not paths.progress.exists():
        _remove_leftovers(paths)
        return None
    progress = load_progress(paths.progress)
    if progress.complete_bytes is None:
        return progress
    try:
        _publish(paths, progress)
    except OSError as error:
        raise OutputError(f"{paths.name} cannot be written: {error.strerror}") from error
    return None


def _publish(paths: OutputPaths, progress: JobProgress) -> None:
    """Renames the complete output. A killed job may have done some of the steps already."""
    if paths.complete.exists():
        if paths.complete.stat().st_size != progress.complete_bytes:
            raise OutputError(
                f"{paths.complete} is not the {progress.complete_bytes:,} bytes that "
                f"{paths.progress} counts; {paths.name} is unchanged: start again with --overwrite"
            )
        _check_replaces(paths, progress)
        if paths.suffix == ".npy":
            _publish_errors(paths, progress)
        paths.complete.replace(paths.final)
        with suppress(OSError):  # not every file system knows it of folders
            _sync(paths.final.parent)
    _remove_leftovers(paths)
    paths.progress.unlink(missing_ok=True)


def _publish_errors(paths: OutputPaths, progress: JobProgress) -> None:
    if progress.list_bytes == 0:
        paths.errors.unlink(missing_ok=True)
    elif paths.partial_list.exists():
        paths.partial_list.replace(paths.errors)


def _remove_leftovers(paths: OutputPaths, *, but: Path | None = None) -> None:
    leftovers = (paths.partial, paths.partial_list, temporary_of(paths.progress), paths.complete)
    for path in leftovers:
        if path != but:
            path.unlink(missing_ok=True)


def _is_all_there(paths: OutputPaths, progress: JobProgress) -> bool:
    """Whether the files have all rows that the progress counts."""
    needed = {paths.partial: progress.data_bytes, paths.partial_list: progress.list_bytes}
    return all(
        path.exists() and path.stat().st_size >= num_bytes
        for path, num_bytes in needed.items()
        if num_bytes > 0
    )


def _check_replaces(paths: OutputPaths, progress: JobProgress) -> None:
    """Raises OutputError where another program created the output while the job ran."""
    if paths.final.exists() and not progress.replaces:
        raise OutputError(
            f"{paths.name} exists now and did not when its unfinished job began; move it away "
            "and continue with --resume, or start again with --overwrite"
        )


_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


def _write(descriptor: int, data: bytes, offset: int) -> None:
    """Writes all of `data` at `offset` and flushes it to the disk."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
    os.fsync(descriptor)


def _sync(path: Path) -> None:
    """Flushes a file, or the renames in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
