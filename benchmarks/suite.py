"""Suites: cases that measure themselves, and the loop that runs and records them."""

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.records import Record, source_sha256, utc_now, write_record
from bytetx.errors import OptionError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Result of one case; `ours`, `rivals` and `floor` in the case's unit, lower is better.

    shape: sizes of the input, for the record.   notes: what a reader of the numbers must know.
    """

    ours: float
    rivals: dict[str, float]
    floor: float | None
    shape: dict[str, int | float | str]
    notes: tuple[str, ...] = ()


def measured(
    found: Mapping[str, float],
    floor: float | None,
    shape: Mapping[str, int | float | str],
    notes: Iterable[str] = (),
    *,
    per: float = 1.0,
) -> Measurement:
    """The measurement of every engine's time, `ours` among them; per: divides times and floor."""
    rivals = {name: value / per for name, value in found.items()}
    ours = rivals.pop("ours")
    floor = None if floor is None else floor / per
    return Measurement(ours, rivals, floor, dict(shape), tuple(notes))


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a suite: a name, and the measurement that `measure` takes when called."""

    name: str
    unit: str
    dtype: str
    measure: Callable[[], Measurement]


@dataclass(frozen=True, slots=True)
class Suite:
    """A suite's name, where it ran, and its cases, made one by one so that few models live at once.

    versions: of the packages measured.
    """

    name: str
    device: str
    versions: dict[str, str]
    cases: Iterable[Case]


def run_suite(
    suite: Suite, *, command: str, record_to: Path | None
) -> Iterator[tuple[Record, tuple[str, ...]]]:
    """Measures case after case; yields each record with its notes as soon as it is there.

    record_to: the .jsonl file that each record goes to at once, so that a killed run keeps the
    cases it has finished.
    """
    source = source_sha256()
    for case in suite.cases:
        found = case.measure()
        record = Record(
            suite=suite.name,
            case=case.name,
            unit=case.unit,
            ours=rounded(found.ours),
            rivals={name: rounded(value) for name, value in found.rivals.items()},
            floor=None if found.floor is None else rounded(found.floor),
            device=suite.device,
            dtype=case.dtype,
            shape=found.shape,
            source=source,
            date=utc_now(),
            command=command,
            versions=suite.versions,
        )
        if record_to is not None:
            write_record(record_to, record)
        yield record, found.notes


def select(
    items: Iterable[T],
    patterns: list[str],
    *,
    name: Callable[[T], str],
    what: str = "no case",
    them: str = "the cases",
) -> list[T]:
    """Return the items whose names the patterns select.

    what, them: words of none_fits(), which is raised where there is none.
    """
    every = list(items)
    chosen = [item for item in every if is_selected(name(item), patterns)]
    if not chosen:
        raise none_fits(patterns, map(name, every), what=what, them=them)
    return chosen


def none_fits(
    patterns: list[str], names: Iterable[str], *, what: str = "no case", them: str = "the cases"
) -> OptionError:
    """Make the error that no name fits any pattern, with the names that there are."""
    return OptionError(f"{what} fits {', '.join(patterns)}; {them} are: {', '.join(names)}")


def is_selected(name: str, patterns: list[str]) -> bool:
    """Return whether a case runs: no pattern, or one that is part of its name or fits as a glob."""
    return not patterns or any(
        pattern in name or fnmatch.fnmatchcase(name, pattern) for pattern in patterns
    )


def rounded(value: float) -> float:
    """Four significant digits: what a median of a few rounds can carry."""
    return float(f"{value:.4g}")
