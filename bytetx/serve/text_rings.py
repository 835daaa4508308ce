"""The engine's side of rings: the texts of front-ends go into steps, and vectors come back.

The engine's own thread does this between steps, for all texts that have come, in arrays.
"""

import logging
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np

from bytetx.encode.engine import EncodeEngine
from bytetx.encode.request import Requests
from bytetx.encode.request_queue import OpenCall
from bytetx.encode.step import Task
from bytetx.errors import BytetxError, InputError
from bytetx.ops import host
from bytetx.serve.engine import ServedModel
from bytetx.serve.ring_memory import RingMemory, RingSizes
from bytetx.tasks.embed import EmbedTask

logger = logging.getLogger("bytetx.serve")

NUM_SLOTS = 2048  # texts of a front-end that a model may have at a time; more go by frames
MAX_TOKENS = 512  # a longer text has so much to compute that frames do
_NOBODY: Any = None  # the receiver of a call that is being made
# Of indices, kinds, groups, seqlens, prompt tokens, whether texts were truncated, and token ids.
_COLUMN_TYPES = (np.int64, np.int32, np.int32, np.int32, np.int32, np.bool_, np.int32)
_MAX_KINDS = 256  # different options of `embed` that rings know for each model


@dataclass(frozen=True, slots=True)
class _RingTask:
    """Options of `embed`.  size: numbers of a vector."""

    task: Task[Any]
    size: int


class _Ring:
    """A front-end's ring.

    native: the native core's TextRing.
    is_lost: set where the front-end is gone; the engine's thread drops its calls then.
    """

    def __init__(self, connection: socket.socket, memory: RingMemory):
        self.connection, self.memory, self.native = connection, memory, memory.ring
        self.is_lost = False

    def wake(self) -> None:
        with suppress(OSError):  # closed, as the loop sees
            self.connection.send(b"\0")


class _RingSet:
    """All rings of a model at one time.  The index of a text is its slot, and NUM_SLOTS more for
    each ring before its own."""

    def __init__(self, rings: Sequence[_Ring]):
        self.rings, self.natives = rings, [ring.native for ring in rings]

    def ring_of(self, index: int) -> _Ring:
        return self.rings[index // NUM_SLOTS]


@dataclass(frozen=True, slots=True)
class _Done:
    """Texts that have what they will have, and whose front-ends were not told."""

    rings: _RingSet
    indices: np.ndarray
    call: OpenCall


@dataclass(eq=False, slots=True)
class _TakenCall:
    """Texts that came together, as the receiver of their results.

    indices: int64 [num_texts].  ring, group: of a large call; no ring and 0 where it is of several.
    done: takes what has results.
    """

    rings: _RingSet
    size: int
    indices: np.ndarray
    ring: _Ring | None
    group: int
    call: OpenCall
    num_left: int
    done: list[_Done]

    def put_rows(self, indices: np.ndarray, results: Sequence[Any]) -> None:
        rows = np.ascontiguousarray(results, dtype=np.float32)
        _native().put(self.rings.natives, indices, rows)
        self._note(indices)

    def fail(self, index: int, error: InputError) -> None:
        self._fail(np.array([index]))

    def fail_rest(self) -> None:
        """The texts without a result will have none."""
        if self.num_left:
            self._fail(self.indices)

    def _fail(self, indices: np.ndarray) -> None:
        failed = _native().fail(self.rings.natives, indices)
        self._note(np.frombuffer(failed, np.int64))

    def _note(self, indices: np.ndarray) -> None:
        self.num_left -= len(indices)
        self.done.append(_Done(self.rings, indices, self.call))


class TextRings:
    """The rings of one model: a TextSource of its engine."""

    def __init__(self, engine: EncodeEngine, *, sizes: RingSizes):
        self.engine, self.sizes = engine, sizes
        self._kinds: list[_RingTask] = []
        self._set = _RingSet([])
        self._new = deque[_Ring]()  # that the engine's thread has not seen
        self._calls: list[_TakenCall] = []
        self._done: list[_Done] = []
        self._has_waited = self._has_ended = False
        engine.add_source(self)

    def add_kind(self, task: Task[Any], size: int) -> int | None:
        """A number for calls with these options; None where there are too many."""
        kind = _RingTask(task, size)
        if kind in self._kinds:
            return self._kinds.index(kind)
        if len(self._kinds) == _MAX_KINDS:
            return None
        self._kinds.append(kind)
        return len(self._kinds) - 1

    def add(self, connection: socket.socket, descriptor: int) -> _Ring:
        """A front-end's ring. Raises ValueError for memory that is too small, or at the end."""
        ring = _Ring(connection, RingMemory(descriptor, self.sizes))
        self._new.append(ring)
        if self._has_ended:  # and it may not be seen any more
            raise ValueError("the engine has ended")
        self.wake()
        return ring

    def wake(self) -> None:
        """A ring has texts, or is lost."""
        self.engine.wake()

    # What follows is called by the engine's thread.

    def feed(self) -> None:
        if self._new:
            rings = list(self._set.rings)
            while self._new:
                rings.append(self._new.popleft())
            self._set = _RingSet(rings)
        if self._calls:
            self._settle()
        for ring in self._set.rings:
            if ring.is_lost:
                self._forget(ring)
        self._take()
        if self._done:
            self.give()

    def give(self) -> None:
        done, self._done[:] = list(self._done), []
        for one in done:
            call, count = one.call, max(one.call.num_computed, 1)
            seconds = call.queue_seconds / count, call.compute_seconds / count
            for number in _native().give(one.rings.natives, one.indices, *seconds):
                one.rings.rings[number].wake()

    def may_wait(self) -> bool:
        self._has_waited = True
        return all([native.start_waiting() for native in self._set.natives])

    def end(self) -> None:
        self._has_ended = True
        self._settle(is_over=True)
        self.give()
        for ring in [*self._set.rings, *self._new]:
            self._close(ring)

    def _take(self) -> None:
        """Queues what the rings have."""
        rings = self._set
        *columns, cancelled, has_kinds, has_groups, has_prompts, damaged = _native().take(
            rings.natives, self._has_waited
        )
        self._has_waited = False
        if columns[0]:
            arrays = [np.frombuffer(*pair) for pair in zip(columns, _COLUMN_TYPES, strict=True)]
            indices, kinds, groups, seqlens, prompts, is_truncated, token_ids = arrays
            prompt_tokens = prompts if has_prompts else None
            requests = Requests(
                indices, seqlens, token_ids, is_truncated, prompt_tokens=prompt_tokens
            )
            self._queue(rings, requests, kinds, groups if has_groups else None, has_kinds)
        for index in np.frombuffer(cancelled, np.int64).tolist():
            ring = rings.ring_of(index)
            self._cancel(ring, int(ring.memory.facts["group"][index % NUM_SLOTS]))
        for number in damaged:  # the front-end makes another ring
            logger.error("the memory of a front-end's ring is damaged")
            self._close(rings.rings[number])

    def _queue(
        self,
        rings: _RingSet,
        requests: Requests,
        kinds: np.ndarray,
        groups: np.ndarray | None,
        has_kinds: bool,
    ) -> None:
        """Queues texts: those of small calls as one call of each kind, a large call as its own.

        Where the next step has room for all of them, nothing is small or large.
        kinds, groups: int32 of each text; no groups where all calls are small.  has_kinds: whether
        they are several.
        """
        if groups is not None and not self.engine.runs_at_once(requests.total_tokens):
            numbers = requests.indices // NUM_SLOTS
            for group, number in _pairs(groups, numbers):
                rows = np.flatnonzero((groups == group) & (numbers == number))
                kind, own = int(kinds[rows[0]]), requests.take(rows)
                self._put(rings, kind, own, ring=rings.rings[number], group=group)
            rows = np.flatnonzero(groups == 0)
            requests, kinds = requests.take(rows), kinds[rows]
        if has_kinds:
            for kind in np.unique(kinds).tolist():
                self._put(rings, kind, requests.take(np.flatnonzero(kinds == kind)))
        elif len(kinds):
            self._put(rings, int(kinds[0]), requests)

    def _put(
        self,
        rings: _RingSet,
        kind_number: int,
        requests: Requests,
        *,
        ring: _Ring | None = None,
        group: int = 0,
    ) -> None:
        num_texts = len(requests)
        is_known = 0 <= kind_number < len(self._kinds)
        kind = self._kinds[kind_number if is_known else 0]
        call = OpenCall(kind.task, _NOBODY, keeps_errors=True, num_calls=1 if group else num_texts)
        texts = _TakenCall(
            rings, kind.size, requests.indices, ring, group, call, num_texts, self._done
        )
        call.receiver = texts
        try:
            if not is_known:
                raise InputError(f"a ring has a text of kind {kind_number}")
            self.engine.put(call, requests)
        except BytetxError:  # it is full or closed: the front-end asks by a frame, and is told why
            texts.fail_rest()
        else:
            self._calls.append(texts)

    def _cancel(self, ring: _Ring, group: int) -> None:
        for texts in self._calls:
            if group and texts.group == group and texts.ring is ring:
                self.engine.end(texts.call)
                texts.fail_rest()

    def _settle(self, *, is_over: bool = False) -> None:
        """Ends calls whose texts all have results, or that have failed."""
        kept = []
        for texts in self._calls:
            if texts.num_left and texts.call.error is None and not is_over:
                kept.append(texts)
                continue
            self.engine.end(texts.call)
            texts.fail_rest()
        self._calls = kept

    def _close(self, ring: _Ring) -> None:
        """Tells the front-end that its ring is of no use any more."""
        self._forget(ring)
        with suppress(OSError):
            ring.connection.shutdown(socket.SHUT_RDWR)

    def _forget(self, ring: _Ring) -> None:
        """Drops the large calls of a front-end that is gone; the small ones of all run on."""
        for texts in self._calls:
            if texts.ring is ring:
                self._cancel(ring, texts.group)
        if ring in self._set.rings:
            self._set = _RingSet([one for one in self._set.rings if one is not ring])


def _native() -> Any:
    return host.text_ring()


def _pairs(groups: np.ndarray, numbers: np.ndarray) -> list[tuple[int, int]]:
    """(group, number) of all large calls.  groups, numbers: of each text, as of its ring."""
    is_large = groups != 0
    pairs = zip(groups[is_large].tolist(), numbers[is_large].tolist(), strict=True)
    return list(dict.fromkeys(pairs))


class RingModels:
    """The rings of all models of a process."""

    def __init__(self, served: Sequence[ServedModel]):
        self._served = {one.facts.name: one for one in served}
        self._rings: dict[str, TextRings | None] = {}

    def find(self, name: str) -> TextRings | None:
        """Those that a front-end was told of."""
        return self._rings.get(name)

    def kind(
        self, name: str, options: Mapping[str, Any], *, has_reader: bool
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        """How a front-end sends texts of `embed` with these options, as a frame has it.

        "kind" is None for what goes by frames: options that are wrong, or not of every text alike.
        has_reader: whether it has the model's tokenizer already; else the array is its JSON.
        """
        nothing: tuple[dict[str, Any], list[np.ndarray]] = {"kind": None}, []
        served = self._served.get(name)
        if served is None or host.text_ring() is None:
            return nothing
        try:
            engine, call = served.model.embed_call([], options)
            engine.check_open()
        except Exception:  # as the call itself will be told
            return nothing
        reader, task, tokenizer = call.reader, call.task, call.reader.tokenizer
        is_plain = call.adapters is call.merge is reader.prompts is reader.expansion is None
        state = None if tokenizer is None else tokenizer.state()
        if not is_plain or reader.cuts or tokenizer is None or state is None:
            return nothing
        if not isinstance(task, EmbedTask) or task.quantizer is not None:
            return nothing
        rings = self._rings.get(name)
        if rings is None:
            _, whole = served.model.embed_call([], {**options, "dimensions": None})
            most = min(served.facts.max_tokens, MAX_TOKENS)
            width = cast(EmbedTask, whole.task).size
            sizes = RingSizes(NUM_SLOTS, most, width)
            rings = self._rings[name] = TextRings(engine, sizes=sizes)
        is_own = rings.engine is engine and tokenizer is served.model.model.tokenizer
        if not is_own or task.size > rings.sizes.width:  # a route has another tokenizer or size
            return nothing
        number = rings.add_kind(task, task.size)
        if number is None:
            return nothing
        spec = reader.spec
        header = {
            "kind": number,
            "size": task.size,
            "prompt": reader.prompt,
            "truncate": reader.truncate,
            "ring": rings.sizes.row(),
            "limits": served.model.queue_limits,
            "sizes": [spec.vocab_size, spec.max_positions, spec.num_token_types, spec.num_layers],
            "tokenizer": asdict(state),
        }
        backend = b"" if has_reader else tokenizer.backend.to_str().encode()
        return header, [np.frombuffer(backend, dtype=np.uint8)]
