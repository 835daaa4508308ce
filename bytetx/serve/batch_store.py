"""Files and batches of OpenAI's batch routes, in a folder that several processes may share.

FOLDER/files has ID.jsonl, the content, and ID.json, what the routes say of it: a file is there once
the latter is, which is written last. FOLDER/batches has ID.json of each batch, written once by the
process that makes it and from then on by the one that holds FOLDER/lock, and ID.cancel where any
process was asked to cancel it. The results of a batch are appended to the content of its output and
error files, which are there for the routes once it has ended: they are their own journal.
"""

import asyncio
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

import orjson

from bytetx.errors import OptionError, shown
from bytetx.serve.errors import ServeError

T = TypeVar("T")

MAX_FILE_BYTES = 200 << 20  # an upload may have; as OpenAI has it
MAX_FILES, MAX_BATCHES = 10_000, 10_000
_MIN_FREE_BYTES = 1 << 30  # left on the disk, for results of what runs
_KEPT_S = 30 * 24 * 3600  # that an ended batch is listed
_ABANDONED_S = 24 * 3600  # after which a content that nothing refers to is no upload any more
_ID = re.compile(r"(file-|batch_)[0-9a-f]{40}")
ENDED = ("completed", "failed", "expired", "cancelled")
_NUM_THREADS = 4


class BatchStore:
    """The folder. Its methods read and write it at once; `in_thread` runs them in its threads."""

    def __init__(self, folder: Path):
        """Makes the folder; OptionError where it cannot be written."""
        self.folder, self._files, self._batches = folder, folder / "files", folder / "batches"
        try:
            for one in (folder, self._files, self._batches):
                one.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"--batch-dir {folder} cannot be made: {error.strerror or error}; name a folder "
                "that the server may write"
            ) from error
        if not os.access(self._files, os.W_OK | os.X_OK):
            raise OptionError(f"--batch-dir {folder} cannot be written: no permission")
        self.on_change: Callable[[], None] = lambda: None  # a batch was made or cancelled here
        self.num_uploads = 0
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="bytetx-batches")

    async def in_thread(self, function: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *given)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # Files.

    def add_file(self, source: IO[bytes], filename: str, purpose: str) -> dict[str, Any]:
        """Copies an upload. ServeError where there are too many files, or too little space."""
        if _count(self._files, ".json") >= MAX_FILES:
            raise ServeError(
                "validation", f"there are {MAX_FILES:,} files, the most; delete some of them"
            )
        if shutil.disk_usage(self.folder).free < _MIN_FREE_BYTES + MAX_FILE_BYTES:
            raise ServeError("overloaded", "the disk of --batch-dir is full", retry_after_s=60)
        name = _new_id("file-")
        with self.content_path(name).open("xb") as content:
            shutil.copyfileobj(source, content, 1 << 20)
            content.flush()
            os.fsync(content.fileno())
        return self.publish(name, filename, purpose)

    def publish(self, name: str, filename: str, purpose: str) -> dict[str, Any]:
        """Makes a content that is complete a file of the routes."""
        found = {
            "id": name,
            "object": "file",
            "bytes": self.content_path(name).stat().st_size,
            "created_at": int(time.time()),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        _write(self._files / f"{name}.json", found)
        return found

    def file(self, name: str) -> dict[str, Any]:
        """Return the routes' fields of a file; ServeError where there is none of that id."""
        return _read(self._files, name, "file-")

    def content_path(self, name: str) -> Path:
        """The content of a file, there or not.  name: an id that was checked."""
        return self._files / f"{name}.jsonl"

    def files(
        self, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[dict[str, Any]]:
        """At most so many, from the one behind `after` on."""
        found = _listed(self._files, "file-", after, newest_first=newest_first)
        return list(islice((one for one in found if purpose in (None, one["purpose"])), limit))

    def delete_file(self, name: str) -> None:
        """ServeError where it is not there, or a batch that has not ended reads it."""
        self.file(name)
        reader = next((one for one in self.open_batches() if one["input_file_id"] == name), None)
        if reader is not None:
            raise ServeError(
                "validation", f"the batch {reader['id']} reads {name}; cancel it, or let it end"
            )
        for path in (self._files / f"{name}.json", self.content_path(name)):
            path.unlink(missing_ok=True)

    # Batches.

    def add_batch(self, fields: dict[str, Any], *, seconds: int) -> dict[str, Any]:
        """Makes a batch of the caller's fields.  seconds: of its completion window."""
        if _count(self._batches, ".json") >= MAX_BATCHES:
            raise ServeError(
                "validation",
                f"there are {MAX_BATCHES:,} batches, the most; ended ones go after 30 days",
            )
        now = int(time.time())
        stages = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling")
        batch = {
            "id": _new_id("batch_"),
            "object": "batch",
            **fields,
            "errors": None,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + seconds,
            **{f"{stage}_at": None for stage in (*stages, "cancelled")},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }
        self.save_batch(batch)
        self.on_change()
        return batch

    def save_batch(self, batch: dict[str, Any]) -> None:
        _write(self._batches / f"{batch['id']}.json", batch)

    def batch(self, name: str) -> dict[str, Any]:
        """Return the routes' fields of a batch; ServeError where there is none of that id."""
        return self._with_cancelling(_read(self._batches, name, "batch_"))

    def batches(self, *, after: str | None, limit: int) -> list[dict[str, Any]]:
        """At most so many, the newest first, from the one behind `after` on."""
        found = _listed(self._batches, "batch_", after, newest_first=True)
        return list(map(self._with_cancelling, islice(found, limit)))

    def cancel(self, name: str) -> dict[str, Any]:
        """Asks whoever runs a batch to end it; ServeError where it has ended."""
        batch = self.batch(name)
        if batch["status"] in ENDED:
            raise ServeError(
                "validation", f"the batch {name} cannot be cancelled: it is {batch['status']}"
            )
        self._cancel_path(name).touch(mode=0o600)
        self.on_change()
        return self.batch(name)

    def is_cancelled(self, name: str) -> bool:
        return self._cancel_path(name).exists()

    def open_batches(self, ended: set[str] | None = None) -> list[dict[str, Any]]:
        """Those that have not ended, the oldest first.

        ended: ids that are not looked at; those that are found to have ended are added.
        """
        ended = set() if ended is None else ended
        names = [name for name in _ids(self._batches, "batch_") if name not in ended]
        batches = list(_readable(self._batches, names, "batch_"))
        ended.update(batch["id"] for batch in batches if batch["status"] in ENDED)
        return [batch for batch in batches if batch["status"] not in ENDED]

    def _with_cancelling(self, batch: dict[str, Any]) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            if batch["status"] not in ENDED:
                since = int(self._cancel_path(batch["id"]).stat().st_mtime)
                return batch | {"status": "cancelling", "cancelling_at": since}
        return batch

    def _cancel_path(self, name: str) -> Path:
        return self._batches / f"{name}.cancel"

    # Whoever runs batches.

    def take_lock(self) -> int | None:
        """A descriptor that holds the lock until it is closed, or its process ends; None where
        another one has it."""
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
        return descriptor

    def sweep(self) -> None:
        """Deletes what was left behind, and batches that ended long ago; only under the lock."""
        now, kept = time.time(), set[str]()
        for name in _ids(self._batches, "batch_"):
            batch = _read(self._batches, name, "batch_")
            if batch["status"] not in ENDED:
                kept |= {result_id(name, kind) for kind in ("output", "error")}
            elif (self._batches / f"{name}.json").stat().st_mtime < now - _KEPT_S:
                for suffix in (".json", ".cancel"):
                    (self._batches / f"{name}{suffix}").unlink(missing_ok=True)
        for path in (*self._files.iterdir(), *self._batches.glob("*.tmp")):
            is_content = path.suffix == ".jsonl" and path.stem not in kept
            is_loose = is_content and not path.with_suffix(".json").exists()
            with suppress(FileNotFoundError):
                if (is_loose or path.suffix == ".tmp") and (
                    path.stat().st_mtime < now - _ABANDONED_S
                ):
                    path.unlink()


def result_id(batch: str, kind: str) -> str:
    """The id of the output or error file of a batch, which is as hard to guess as the batch's."""
    own = batch.removeprefix("batch_")
    return f"file-{own[:16]}{hashlib.blake2b(f'{own} {kind}'.encode(), digest_size=12).hexdigest()}"


def _new_id(prefix: str) -> str:
    """Ids sort by their time; what follows it cannot be guessed."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(12)}"


def _ids(folder: Path, prefix: str) -> list[str]:
    """The ids in a folder, the oldest first."""
    names = (name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json"))
    return sorted(name for name in names if name.startswith(prefix) and _ID.fullmatch(name))


def _count(folder: Path, suffix: str) -> int:
    return sum(name.endswith(suffix) for name in os.listdir(folder))


def _listed(
    folder: Path, prefix: str, after: str | None, *, newest_first: bool
) -> Iterator[dict[str, Any]]:
    names = _ids(folder, prefix)
    if newest_first:
        names.reverse()
    if after is not None:
        names = [name for name in names if (name < after if newest_first else name > after)]
    return _readable(folder, names, prefix)


def _readable(folder: Path, names: list[str], prefix: str) -> Iterator[dict[str, Any]]:
    for name in names:
        with suppress(ServeError):  # it was deleted meanwhile
            yield _read(folder, name, prefix)


def _read(folder: Path, name: str, prefix: str) -> dict[str, Any]:
    """ServeError where there is none of that id; what is no id is never part of a path."""
    kind = prefix[:-1]
    if name.startswith(prefix) and _ID.fullmatch(name):
        with suppress(FileNotFoundError):
            found: dict[str, Any] = orjson.loads((folder / f"{name}.json").read_bytes())
            return found
    raise ServeError("not_found", f"there is no {kind} {shown(name)}", code="not_found")


def _write(path: Path, content: dict[str, Any]) -> None:
    """A reader finds the old content or the new one, whenever this is killed."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(orjson.dumps(content))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
