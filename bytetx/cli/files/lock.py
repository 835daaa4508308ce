"""The files next to an output while a job writes it, and the lock that one job at a time holds."""

import errno
import fcntl
import os
import stat
from contextlib import AbstractContextManager
from pathlib import Path

from bytetx.cli.files.parquet_reader import import_parquet
from bytetx.cli.files.resume import temporary_of
from bytetx.errors import BytetxError, OptionError

OUTPUT_SUFFIXES = (".npy", ".jsonl", ".parquet")


class OutputError(BytetxError):
    """The output cannot be written: no such folder, no permission, no space, another job."""


class OutputPaths:
    """The paths of an output and of the files next to it while the job runs.

    name: as the user gave it.  final: the name with a symbolic link resolved, so that a job on the
    link and a job on the file take the same lock.
    """

    def __init__(self, name: Path):
        self.name = name
        self.suffix = name.suffix.lower()
        self.final = Path(os.path.realpath(name)) if os.path.islink(name) else name

    @property
    def lock(self) -> Path:
        return self._beside(".lock")

    @property
    def partial(self) -> Path:
        """Rows so far: as .npy, or as JSON lines."""
        return self._beside(".partial")

    @property
    def partial_list(self) -> Path:
        """One JSON line for each row of a .npy that has an error or copied columns."""
        return self._beside(".list.partial")

    @property
    def progress(self) -> Path:
        return self._beside(".progress.json")

    @property
    def complete(self) -> Path:
        """The file that is renamed to the output."""
        return self._beside(".tmp") if self.suffix == ".parquet" else self.partial

    @property
    def errors(self) -> Path:
        """The list of errors that remains next to a .npy."""
        return self._beside(".errors.jsonl")

    @property
    def all(self) -> tuple[Path, ...]:
        own = (self.final, self.lock, self.partial, self.partial_list, self.progress)
        return (*own, temporary_of(self.progress), self.complete, self.errors)

    def _beside(self, suffix: str) -> Path:
        return self.final.with_name(self.final.name + suffix)


def check_output(path: Path) -> OutputPaths:
    """Raises an error where the name or the folder of an output cannot be used."""
    if path.suffix.lower() not in OUTPUT_SUFFIXES:
        raise OptionError(
            f"the output's name must end in {', '.join(OUTPUT_SUFFIXES)}, got {str(path)!r}; "
            "without -o, jsonl goes to stdout"
        )
    if path.suffix.lower() == ".parquet":
        import_parquet(str(path))
    paths = OutputPaths(path)
    _check_names(paths)
    if path.is_dir():
        raise OutputError(f"{path} is a folder; give a file name, such as {path.name}/out.jsonl")
    folder = paths.final.parent
    if not folder.is_dir():
        raise OutputError(f"{path} cannot be written: there is no folder {folder}; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{path} cannot be written: no permission to write in {folder}")
    return paths


def _check_names(paths: OutputPaths) -> None:
    """Raises OutputError where the file system refuses a name, as one that is too long."""
    longest = max(paths.all, key=lambda path: len(path.name))
    for path in (longest, paths.final):
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            hint = ""
            if error.errno == errno.ENAMETOOLONG:
                hint = (
                    f"; give a shorter name: the job also writes {longest.name[-24:]} and other "
                    "files next to it"
                )
            message = f"{paths.name} cannot be written: {error.strerror}{hint}"
            raise OutputError(message) from error


class OutputLock(AbstractContextManager["OutputLock"]):
    """The exclusive lock of one output; a job without it reads and writes no file of the output.

    It is `flock` on `<name>.lock`, which the kernel releases when the process ends. The lock file
    is never renamed, and its holder deletes it last. A job that locks a file which was deleted in
    the meantime finds that the name refers to another file, and tries again. Where the file system
    has no `flock`, creating the file is the lock, and a killed job leaves it behind.
    """

    def __init__(self, paths: OutputPaths):
        """Takes the lock or raises OutputError, at once."""
        self.paths = paths
        self._descriptor = self._take()

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Deletes the file while it is still locked, so that no other job locks a deleted file."""
        try:
            if _is_at(self.paths.lock, self._descriptor) and not os.fstat(self._descriptor).st_size:
                self.paths.lock.unlink(missing_ok=True)
        except OSError:
            pass  # such as a folder that became read-only: the next job takes the file as it is
        os.close(self._descriptor)

    def _take(self) -> int:
        while True:
            descriptor, is_new = self._open()
            try:
                self._lock(descriptor, is_new=is_new)
                if _is_at(self.paths.lock, descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its job ended and deleted it, after this one had opened it

    def _open(self) -> tuple[int, bool]:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            try:
                return os.open(self.paths.lock, flags | os.O_CREAT | os.O_EXCL, 0o666), True
            except FileExistsError:
                pass
            except OSError as error:
                raise self._failure(error) from error
            try:
                return os.open(self.paths.lock, flags), False
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._failure(error) from error

    def _lock(self, descriptor: int, *, is_new: bool) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"{self.paths.name} is being written by another bytetx; wait for it, or give "
                "another output"
            ) from None
        except OSError as error:
            if not is_new:
                raise OutputError(
                    f"another bytetx may be writing {self.paths.name}: there is "
                    f"{self.paths.lock}, on a file system that cannot lock ({error.strerror}); "
                    "delete that file if no job runs"
                ) from error

    def _failure(self, error: OSError) -> OutputError:
        return OutputError(f"{self.paths.lock} cannot be created: {error.strerror}")


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the path still names this open file."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.fstat(descriptor))
