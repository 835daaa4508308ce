"""Lines of a batch: what its input file asks for, and the records of its results."""

import os
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from bytetx.errors import shown
from bytetx.serve.balance import estimate_tokens
from bytetx.serve.batch_store import BatchStore, result_id
from bytetx.serve.calls import Call

MAX_LINES = 50_000  # in a batch; as OpenAI has it
_ENVELOPE_BYTES = 4096  # a line may have beside its body
_PART_BYTES = 1 << 20  # that are read at a time
_MAX_CUSTOM_ID = 512  # characters
_RECORD = re.compile(rb'\{"id":"batch_req_[0-9a-f]{40}_(\d+)"')
_FIELDS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch.

    number: from 1.  tokens: about how many its body has.  problem: (code, message) of a line that
    cannot be run.
    """

    number: int
    custom_id: str | None
    body: bytes = b""
    model: str | None = None
    streams: bool = False
    tokens: int = 0
    problem: tuple[str, str] | None = None


def count_lines(path: Path) -> int:
    """Lines that are not blank, at most MAX_LINES + 1.  Raises OSError."""
    count = 0
    with path.open("rb") as file:
        is_blank = True
        while count <= MAX_LINES and (part := file.readline(_PART_BYTES)):
            is_blank = is_blank and not part.strip()
            if part.endswith(b"\n"):
                count, is_blank = count + (not is_blank), True
        return count + (not is_blank)


def read_lines(
    path: Path, *, endpoint: str, max_body_bytes: int, done: Set[int]
) -> Iterator[list[BatchLine]]:
    """The lines of a file that are not blank and not done, some at a time.  Raises OSError."""
    custom_ids: set[str] = set()
    with path.open("rb") as file:
        part, size, number = list[BatchLine](), 0, 0
        while text := file.readline(max_body_bytes + _ENVELOPE_BYTES):
            number += 1
            is_whole = text.endswith(b"\n")
            while not is_whole and (more := file.readline(_PART_BYTES)):
                is_whole, text = more.endswith(b"\n"), b"{"  # no JSON
            if not text.strip():
                continue
            line = _line(number, text, endpoint, max_body_bytes)
            if line.custom_id in custom_ids:
                problem = "duplicate_custom_id", f"line {number}: its custom_id was there before"
                line = BatchLine(number, line.custom_id, problem=problem)
            elif line.custom_id is not None:
                custom_ids.add(line.custom_id)
            if number in done:
                continue
            part.append(line)
            size += len(text)
            if size >= _PART_BYTES:
                yield part
                part, size = [], 0
        yield part


def _line(number: int, text: bytes, endpoint: str, max_body_bytes: int) -> BatchLine:
    custom_id = None
    try:
        given = orjson.loads(text)
        if not isinstance(given, dict):
            raise ValueError("it must be an object of JSON")
        custom_id = given.get("custom_id")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID:
            custom_id = None
            raise ValueError(f"custom_id must be a text of 1 to {_MAX_CUSTOM_ID} characters")
        if given.get("method") != "POST":
            raise ValueError(f"method must be POST, got {shown(given.get('method'))}")
        if given.get("url") != endpoint:
            raise ValueError(f"url must be the batch's, {endpoint}, got {shown(given.get('url'))}")
        unknown = sorted(given.keys() - _FIELDS)
        if unknown:
            raise ValueError(f"the field {shown(unknown[0])} is not known")
        body = given.get("body")
        if not isinstance(body, dict):
            raise ValueError("body must be an object")
        written = orjson.dumps(body)
        if len(written) > max_body_bytes:
            raise ValueError(f"body has more than {max_body_bytes:,} bytes, --payload-limit")
    except (ValueError, TypeError) as error:  # orjson writes less deep than it reads
        is_json = not isinstance(error, orjson.JSONDecodeError)
        reason = error if is_json else "it is no JSON, or longer than --payload-limit"
        return BatchLine(number, custom_id, problem=("invalid_line", f"line {number}: {reason}"))
    model, n = body.get("model"), body.get("n")
    outputs = n if type(n) is int and n > 0 else 1
    return BatchLine(
        number,
        custom_id,
        written,
        model if isinstance(model, str) else None,
        body.get("stream") is True,
        estimate_tokens(Call("", "", body)) * outputs,
    )


class Journal:
    """The results of a batch, appended to the content of its output and error files.

    A record is one line that begins with the number of its line; one that was written in part, by a
    process that was killed, is cut off when the files are opened.
    done: numbers of the lines that have a record.
    """

    def __init__(self, store: BatchStore, batch: str):
        """Opens the files; raises OSError."""
        self._store, self._batch = store, batch
        self.done: set[int] = set()
        self._files: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self.counts = {"output": 0, "error": 0}
        for kind in self.counts:
            path = store.content_path(result_id(batch, kind))
            self._files[kind] = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            self._recover(kind, path)

    def _recover(self, kind: str, path: Path) -> None:
        size = 0
        with path.open("rb") as file:
            for record in file:
                found = _RECORD.match(record)
                if found is None or not record.endswith(b"\n"):
                    break
                self.done.add(int(found[1]))
                self.counts[kind] += 1
                size += len(record)
        os.ftruncate(self._files[kind], size)
        self._sizes[kind] = size

    def add_response(self, line: BatchLine, status: int, request_id: str, body: bytes) -> None:
        """Appends the answer of a line's route; raises OSError, and then nothing was appended.

        body: JSON, in one line.
        """
        head = orjson.dumps({"status_code": status, "request_id": request_id})[:-1]
        response = head + b',"body":' + body + b"}"
        self._append("output" if status == 200 else "error", line, response, b"null")

    def add_error(self, line: BatchLine, code: str, message: str) -> None:
        """As add_response, of a line that was not run."""
        self._append("error", line, b"null", orjson.dumps({"code": code, "message": message}))

    def _append(self, kind: str, line: BatchLine, response: bytes, error: bytes) -> None:
        name = f"batch_req_{self._batch.removeprefix('batch_')}_{line.number}"
        head = orjson.dumps({"id": name, "custom_id": line.custom_id})[:-1]
        record = head + b',"response":' + response + b',"error":' + error + b"}\n"
        file, left = self._files[kind], memoryview(record)
        try:
            while left:
                left = left[os.write(file, left) :]
        except OSError:
            os.ftruncate(file, self._sizes[kind])
            raise
        self._sizes[kind] += len(record)
        self.counts[kind] += 1
        self.done.add(line.number)

    def publish(self) -> dict[str, Any]:
        """Makes the files that have records files of the routes, and gives the batch's fields."""
        found: dict[str, Any] = {}
        for kind, file in self._files.items():
            name = result_id(self._batch, kind)
            if self._sizes[kind]:
                os.fsync(file)
                self._store.publish(name, f"{self._batch}_{kind}.jsonl", "batch_output")
                found[f"{kind}_file_id"] = name
            else:
                self._store.content_path(name).unlink(missing_ok=True)
        return found

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
