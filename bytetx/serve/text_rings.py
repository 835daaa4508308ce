"""The engine's side of rings: the texts of front-ends go into steps, and vectors come back.

The engine's own thread does this between steps, for all texts that have come, in arrays.
"""

import logging
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np

from bytetx.encode.engine import EncodeEngine
from bytetx.encode.request import Requests, join_requests
from bytetx.encode.request_queue import OpenCall
from bytetx.encode.step import Task
from bytetx.errors import BytetxError, InputError
from bytetx.ops import host
from bytetx.sequence_tree import rows_of
from bytetx.serve.engine import ServedModel
from bytetx.serve.ring_memory import HAS_NONE, RingMemory, RingSizes
from bytetx.tasks.embed import EmbedTask

logger = logging.getLogger("bytetx.serve")

NUM_SLOTS = 2048  # texts of a front-end that a model may have at a time; more go by frames
MAX_TOKENS = 512  # a longer text has so much to compute that frames do
_NOBODY: Any = None  # the receiver of a call that is being made
_MAX_KINDS = 256  # different options of `embed` that rings know for each model


@dataclass(frozen=True, slots=True)
class _RingTask:
    """Options of `embed`.  size: numbers of a vector."""

    task: Task[Any]
    size: int


@dataclass(eq=False, slots=True)
class _TakenCall:
    """Texts that came together, as the receiver of their results.

    rings: whose texts they are.  indices: int64 [num_texts], slots of the first ring; those of the
    second one are NUM_SLOTS more, and so on, and so are the indices of results.
    group: 0 for those of small calls; else the number of their one call in its ring.
    """

    rings: Sequence["_Ring"]
    size: int
    indices: np.ndarray
    group: int
    call: OpenCall
    num_left: int

    def put_rows(self, indices: np.ndarray, results: Sequence[Any]) -> None:
        if len(self.rings) == 1:
            self.rings[0].put(indices, results, self)
        else:
            owners, rows = indices // NUM_SLOTS, np.asarray(results)
            for number, ring in enumerate(self.rings):
                own = np.flatnonzero(owners == number)
                if len(own):
                    ring.put(indices[own] - number * NUM_SLOTS, rows[own], self)
        self.num_left -= len(indices)

    def fail(self, index: int, error: InputError) -> None:
        self._fail(np.array([index]))

    def fail_rest(self) -> None:
        """The texts without a result will have none."""
        if self.num_left:
            self._fail(self.indices)

    def _fail(self, indices: np.ndarray) -> None:
        for number, ring in enumerate(self.rings):
            slots = indices[indices // NUM_SLOTS == number] - number * NUM_SLOTS
            slots = slots[ring.is_open[slots]]
            if len(slots):
                ring.states[slots] = HAS_NONE
                ring.note(slots, self)
                self.num_left -= len(slots)


class _Ring:
    """A front-end's ring.  done: slots with results that it was not told of.

    is_open: bool [num_slots], of texts without a result.
    is_lost: set where the front-end is gone; the engine's thread drops its calls then.
    """

    def __init__(self, connection: socket.socket, memory: RingMemory):
        self.connection, self.ring = connection, memory.ring
        self.memory, self.states = memory, memory.facts["state"]
        self._queue_seconds = memory.facts["queue_seconds"]
        self._compute_seconds = memory.facts["compute_seconds"]
        self.is_open = np.zeros(memory.sizes.num_slots, dtype=bool)
        self.done: list[tuple[np.ndarray, OpenCall]] = []
        self.is_lost = False

    def put(self, slots: np.ndarray, rows: np.ndarray | Sequence[Any], call: _TakenCall) -> None:
        """Writes the vectors of texts of a call."""
        vectors = self.memory.vectors
        if call.size == vectors.shape[1]:
            vectors[slots] = rows
        else:
            vectors[slots, : call.size] = rows
        self.note(slots, call)

    def note(self, slots: np.ndarray, call: _TakenCall) -> None:
        """These texts have what they will have."""
        self.is_open[slots] = False
        self.done.append((slots, call.call))

    def give(self) -> None:
        """Gives done slots back and wakes the front-end."""
        done, self.done = self.done, []
        for slots, call in done:
            num_computed = max(call.num_computed, 1)
            self._queue_seconds[slots] = call.queue_seconds / num_computed
            self._compute_seconds[slots] = call.compute_seconds / num_computed
        slots = done[0][0] if len(done) == 1 else np.concatenate([one for one, _ in done])
        self.ring.finish(slots.astype(np.int32))
        with suppress(OSError):  # full: it has not read earlier ones; or closed, as the loop sees
            self.connection.send(b"\0")


@dataclass(frozen=True, slots=True)
class _Texts:
    """Texts that a ring has just got: int32 columns of each text, and their token ids."""

    slots: np.ndarray
    kinds: np.ndarray
    groups: np.ndarray
    seqlens: np.ndarray
    prompt_tokens: np.ndarray
    is_truncated: np.ndarray
    token_ids: np.ndarray

    def requests(self, first_index: int) -> Requests:
        prompt_tokens = self.prompt_tokens if self.prompt_tokens.any() else None
        indices = self.slots.astype(np.int64) + first_index
        is_truncated = self.is_truncated != 0
        return Requests(
            indices, self.seqlens, self.token_ids, is_truncated, prompt_tokens=prompt_tokens
        )


class TextRings:
    """The rings of one model: a TextSource of its engine."""

    def __init__(self, engine: EncodeEngine, *, sizes: RingSizes):
        self.engine, self.sizes = engine, sizes
        self._kinds: list[_RingTask] = []
        self._rings: list[_Ring] = []
        self._new = deque[_Ring]()  # that the engine's thread has not seen
        self._calls: list[_TakenCall] = []
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
        while self._new:
            self._rings.append(self._new.popleft())
        if self._calls:
            self._settle()
        taken: list[tuple[_Ring, _Texts]] = []
        for ring in list(self._rings):
            if self._has_waited:
                ring.ring.stop_waiting()
            if ring.is_lost:
                self._forget(ring)
            elif ring.ring.has_entries():
                self._take(ring, taken)
        self._has_waited = False
        if taken:
            self._put_small(taken)
        self.give()

    def give(self) -> None:
        for ring in self._rings:
            if ring.done:
                ring.give()

    def may_wait(self) -> bool:
        self._has_waited = True
        return all([ring.ring.start_waiting() for ring in self._rings])

    def end(self) -> None:
        self._has_ended = True
        self._settle(is_over=True)
        self.give()
        for ring in [*self._rings, *self._new]:
            self._close(ring)

    def _take(self, ring: _Ring, small: list[tuple[_Ring, _Texts]]) -> None:
        """Queues the large calls that a ring has, and adds the texts of small ones to `small`."""
        try:
            *columns, cancelled = [np.frombuffer(one, np.int32) for one in ring.ring.take_entries()]
        except RuntimeError:  # the memory is damaged: the front-end makes another ring
            logger.exception("a front-end's ring is of no use")
            self._close(ring)
            return
        texts = _Texts(*columns)
        if len(texts.slots):
            ring.is_open[texts.slots] = True
            if texts.groups.any():
                requests = texts.requests(0)
                for group in np.unique(texts.groups[texts.groups != 0]).tolist():
                    rows = np.flatnonzero(texts.groups == group)
                    self._put([ring], int(texts.kinds[rows[0]]), group, requests.take(rows))
                rows = np.flatnonzero(texts.groups == 0)
                places = rows_of(requests.cu_seqlens[rows], texts.seqlens[rows])
                columns = [column[rows] for column in columns[:-1]]
                columns.append(texts.token_ids[places])
                texts = _Texts(*columns)
            if len(texts.slots):
                small.append((ring, texts))
        for slot in cancelled.tolist():
            self._cancel(ring, int(ring.memory.facts["group"][slot]))

    def _put_small(self, taken: Sequence[tuple[_Ring, _Texts]]) -> None:
        """Queues the texts of the small calls of all rings as one call for each kind."""
        rings = [ring for ring, _ in taken]
        pieces = [texts.requests(i * NUM_SLOTS) for i, (_, texts) in enumerate(taken)]
        kinds = np.concatenate([texts.kinds for _, texts in taken])
        indices = np.concatenate([piece.indices for piece in pieces])
        requests = replace(join_requests(pieces), indices=indices)
        if (kinds == kinds[0]).all():
            self._put(rings, int(kinds[0]), 0, requests)
            return
        for kind in np.unique(kinds).tolist():
            self._put(rings, kind, 0, requests.take(np.flatnonzero(kinds == kind)))

    def _put(
        self, rings: Sequence[_Ring], kind_number: int, group: int, requests: Requests
    ) -> None:
        num_texts = len(requests)
        is_known = 0 <= kind_number < len(self._kinds)
        kind = self._kinds[kind_number if is_known else 0]
        call = OpenCall(kind.task, _NOBODY, keeps_errors=True, num_calls=1 if group else num_texts)
        texts = _TakenCall(rings, kind.size, requests.indices, group, call, num_texts)
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
            if group and texts.group == group and texts.rings[0] is ring:
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
            if texts.group and texts.rings[0] is ring:
                self._cancel(ring, texts.group)
        ring.done = []
        if ring in self._rings:
            self._rings.remove(ring)


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
