"""ReadingPool: threads that tokenise the texts of all calls, those of many small calls together."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Protocol

import numpy as np

from bytetx.encode.request import Window
from bytetx.ops.heap import release_heap_after
from bytetx.requests.inputs import Input, InputReader
from bytetx.runtime.forking import computing

# Calls of at most so many texts are tokenised with others, and so many calls at a time.
_MAX_SMALL_TEXTS, _MAX_CALLS = 32, 64


class Owner(Protocol):
    """Who asked for texts to be read; called in a thread of the pool."""

    @property
    def is_dropped(self) -> bool:
        """Whether nobody needs the texts any more."""
        ...

    def accept(self, window: Window) -> None:
        """The texts as token ids."""
        ...

    def refuse(self, error: Exception) -> None:
        """Why there are none."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """Texts of one call, numbered from `start`."""

    owner: Owner
    reader: InputReader
    texts: Sequence[Input]
    start: int


class ReadingPool:
    """A thread takes what has come since it was busy, so that many callers share one tokenizer
    call and wake one thread.  Threads start with the first texts."""

    def __init__(self, num_threads: int):
        self._num_threads = num_threads
        self._readings: SimpleQueue[Reading | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._starting = Lock()

    def put(self, reading: Reading) -> None:
        """Has texts read; their owner hears of it."""
        self._readings.put(reading)
        if not self._threads:
            with self._starting:
                if not self._threads:
                    self._threads = [self._start(number) for number in range(self._num_threads)]

    def close(self) -> None:
        """Ends the threads, after what they were given."""
        for _ in self._threads:
            self._readings.put(None)

    def _start(self, number: int) -> Thread:
        thread = Thread(target=self._run, name=f"bytetx-tokenizer-{number}", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        while (first := self._readings.get()) is not None:
            readings = [first, *self._others()]
            num_tokens = sum(map(_num_tokens, readings))
            _read(readings)
            del readings, first  # while this thread waits it holds nothing of a caller
            release_heap_after(num_tokens)

    def _others(self) -> list[Reading]:
        """Readings that wait beside the first one, a share of it where there are other threads."""
        most = min(-(-self._readings.qsize() // self._num_threads), _MAX_CALLS)
        found: list[Reading] = []
        while len(found) < most:
            try:
                reading = self._readings.get_nowait()
            except Empty:
                break
            if reading is None:  # the end, which this thread finds again
                self._readings.put(None)
                break
            found.append(reading)
        return found


def _num_tokens(reading: Reading) -> int:
    """A guess of the tokens of a reading's texts before they are cut."""
    return sum(map(reading.reader.estimate_tokens, reading.texts))


def _read(readings: Sequence[Reading]) -> None:
    """Reads texts: those of small calls with readers that do the same in one tokenizer call."""
    groups: dict[Hashable, list[Reading]] = {}
    for reading in readings:
        if not reading.owner.is_dropped:
            groups.setdefault(_key(reading), []).append(reading)
    for group in groups.values():
        for reading in _read_together(group) if len(group) > 1 else group:
            _read_alone(reading)


def _key(reading: Reading) -> Hashable:
    """Equal for readings that one reader can do."""
    reader = reading.reader
    is_plain = type(reader) is InputReader and not (
        reader.cuts or reader.with_alignment or reader.needs_mask or reader.expansion
    )
    if not is_plain or len(reading.texts) > _MAX_SMALL_TEXTS:
        return id(reading)
    return id(reader.tokenizer), reader.prompt, reader.truncate, reader.max_tokens


def _read_together(group: Sequence[Reading]) -> Sequence[Reading]:
    """Reads the texts of several calls.  Returns calls with a bad text, whose errors name it by
    its number among all texts."""
    texts = [text for reading in group for text in reading.texts]
    starts = np.cumsum([0, *(len(reading.texts) for reading in group)]).tolist()
    try:
        with computing():
            window = replace(group[0].reader, keeps_errors=True).read(texts, 0)
    except Exception:
        return group
    requests = window.requests
    bad = np.searchsorted(starts, [failure.index for failure in window.failures], side="right") - 1
    pieces = requests.cut(np.searchsorted(requests.indices, starts).tolist())
    for number, (reading, piece) in enumerate(zip(group, pieces, strict=True)):
        if number in bad:
            continue
        own = replace(piece, indices=piece.indices + (reading.start - starts[number]))
        _accept(reading, Window(reading.start, len(reading.texts), own))
    return [group[number] for number in dict.fromkeys(bad.tolist())]


def _read_alone(reading: Reading) -> None:
    try:
        with computing():
            window = reading.reader.read(reading.texts, reading.start)
    except Exception as error:
        reading.owner.refuse(error)
    else:
        _accept(reading, window)


def _accept(reading: Reading, window: Window) -> None:
    try:
        reading.owner.accept(window)
    except Exception as error:
        reading.owner.refuse(error)
