"""Records of measurements: one JSON line a case and device, the latest run of each kept."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bytetx.errors import BytetxError

_ROOT = Path(__file__).resolve().parent.parent
_NOT_SOURCE = {".pyc", ".so", ".o", ".md"}  # nor what is said of it


@dataclass(frozen=True, slots=True)
class Record:
    """One measured case; lower is better for `ours`, `rivals` and `floor`, all in `unit`.

    floor: the least the hardware allows, by this run's own measurement of its rates; None where no
        floor is defined.
    device: what it ran on, named so that two kinds of machines never have the same name.
    source: sha256 of the code that the numbers belong to, see source_sha256().
    versions: of the packages measured.
    """

    suite: str
    case: str
    unit: str
    ours: float
    rivals: dict[str, float]
    floor: float | None
    device: str
    dtype: str
    shape: dict[str, int | float | str]
    source: str
    date: str
    command: str
    versions: dict[str, str]

    def ratio(self, rival: str) -> float:
        """Ratio of the rival's number to ours: above 1, ours is better."""
        return self.rivals[rival] / self.ours

    @property
    def floor_fraction(self) -> float | None:
        """The part of the floor's rate that ours reaches, 1.0 at the floor."""
        return None if self.floor is None else self.floor / self.ours


def read_records(path: Path) -> list[Record]:
    """The records of a .jsonl file, in its order; BytetxError names a line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BytetxError(f"{path}: cannot read records: {error.strerror}") from error
    return [_parse(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]


def write_record(path: Path, record: Record) -> None:
    """Replaces the line of the record's (suite, case, device) in `path`, or appends it.

    All others are kept, those of the same case on another device, too. The file is swapped whole,
    so a run that dies leaves the old or the new one, never a part.
    """
    kept = read_records(path) if path.exists() else []
    key = (record.suite, record.case, record.device)
    places = [i for i, other in enumerate(kept) if (other.suite, other.case, other.device) == key]
    if places:
        kept[places[0]] = record
    else:
        kept.append(record)
    _replace_file(path, "".join(f"{line}\n" for line in _lines(kept)))


def of_devices(records: list[Record], device: str | None) -> list[Record]:
    """The records of the device of this name, else of those whose name has this part; None: all.

    Raises BytetxError where no name has it.
    """
    kept = [record for record in records if record.device == device]
    kept = kept or [record for record in records if device is None or device in record.device]
    if records and not kept:
        known = "; ".join(dict.fromkeys(record.device for record in records))
        raise BytetxError(f"no record's device is named like {device!r}; there are: {known}")
    return kept


def of_one_device(records: list[Record], device: str | None) -> list[Record]:
    """of_devices(), of one device a suite.

    Raises BytetxError, too, where a suite's records are of several devices.
    """
    kept = of_devices(records, device)
    for suite in dict.fromkeys(record.suite for record in kept):
        names = list(dict.fromkeys(r.device for r in kept if r.suite == suite))
        if len(names) > 1:
            raise BytetxError(
                f"the records of {suite} are of {len(names)} devices, a picture shows one; choose "
                f"by --device with a part of its name: {'; '.join(names)}"
            )
    return kept


def source_sha256(root: Path | None = None) -> str:
    """sha256 over names and contents of csrc/ and bytetx/ops/: what a recorded number measures.

    root: the checkout; by default the one this package lies in. An installed package has no csrc/,
    and is hashed without it.
    """
    root = root or _ROOT
    folders = [root / "csrc", root / "bytetx" / "ops"]
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*")):
        if path.is_file() and path.suffix not in _NOT_SOURCE:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def utc_now() -> str:
    """The current time as records write it: 2026-01-31T12:00:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _lines(records: list[Record]) -> Iterator[str]:
    return (json.dumps(asdict(record)) for record in records)


def _parse(line: str, place: str) -> Record:
    try:
        content: dict[str, Any] = json.loads(line)
        return Record(**content)
    except (json.JSONDecodeError, TypeError) as error:
        raise BytetxError(
            f"{place} is no bench record: {error}; delete the line and measure the case again"
        ) from error


def _replace_file(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError as error:
        raise BytetxError(f"{path}: cannot write records: {error.strerror}") from error
