"""A front-end's side of rings: small calls of `embed` as token ids in shared memory.

The calls of one turn of the event loop are tokenised together, and their ids are written into slots
of the model's ring; the engine's process writes the vectors back. Whatever does not go this way (a
text that is wrong or too long, a full queue, an unusual option) is a call by a frame, which says
why where it fails.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import orjson

from bytetx.checkpoint.tokenizer import Tokenizer, TokenizerState
from bytetx.encode.request import Requests
from bytetx.requests.inputs import InputReader
from bytetx.requests.token_ids import Errors
from bytetx.serve.calls import Call, Outcome, Timings
from bytetx.serve.errors import ServeError
from bytetx.serve.ring_memory import FACTS, HAS_VECTOR, RingMemory, RingSizes, new_memory

logger = logging.getLogger("bytetx.serve")

# Of one call; a larger one has much to compute.
_MAX_TEXTS, _MAX_CHARACTERS = 64, 1 << 16
# A call of more tokens is the engine's as a call of its own: it waits behind shorter ones, and it
# is dropped where its client leaves.
_MAX_JOINED_TOKENS = 512
# Texts of a turn with more characters are read in a thread: these take about 5 ms.
_MAX_INLINE_CHARACTERS = 1 << 14
_MAX_KINDS = 256
_MAX_LEARNING = 16  # options that the engine is asked for at a time
_MAX_OPTION_CHARACTERS = 1 << 10  # longer options are not remembered
_MAX_GROUP = 1 << 31

# (header, arrays) of the answer to a frame.
Ask = Callable[[dict[str, Any]], Awaitable[tuple[dict[str, Any], Any]]]


class ReaderSizes(NamedTuple):
    """An InputReader's `spec`."""

    vocab_size: int
    max_positions: int
    num_token_types: int
    num_layers: int


@dataclass(frozen=True, eq=False, slots=True)
class _RingOptions:
    """Calls with the same options.

    number: as the engine knows it.  size: of a vector.  max_texts, max_tokens: of a call; one that
    is more than the whole queue takes goes by a frame, and is refused.
    """

    ring: "_ClientRing"
    number: int
    size: int
    reader: InputReader
    max_texts: int
    max_tokens: int


@dataclass(eq=False, slots=True)
class RingCall:
    """A call on its way.  answer: its result; None where it is to go by a frame.

    slots: of its texts, once they are read.  group: its number, 0 where it is small.
    """

    kind: _RingOptions
    texts: Sequence[str]
    answer: "asyncio.Future[Outcome | None]"
    started: float
    slots: np.ndarray | None = None
    group: int = 0
    num_left: int = 0
    has_failed: bool = False
    num_tokens: int = 0
    num_truncated: int = 0
    tokenize_seconds: float = 0.0


class RingClient:
    """The rings of a front-end, one for each model, made when a model is first asked for."""

    def __init__(self, path: str, ask: Ask, lost: Callable[[], ServeError]):
        """path: of the engine's socket for rings.  ask: sends a frame.  lost: the error of calls
        whose engine has ended."""
        self._path, self._ask, self._lost = path, ask, lost
        # None: calls with these options go by frames, or it is not known yet.
        self._kinds: dict[Hashable, _RingOptions | None] = {}
        self._rings: dict[str, _ClientRing] = {}
        self._learning = asyncio.Lock()
        self._tasks = set[asyncio.Task[None]]()

    def start(self, call: Call) -> RingCall | None:
        """The call, if it goes by a ring; it is sent at the end of this turn of the loop."""
        if call.task != "embed":
            return None
        texts, options = call.inputs, call.options
        if not _is_small(texts) or options.get("left"):
            return None
        key = call.model, tuple(options.items())
        try:
            kind = self._kinds[key]
        except KeyError:
            self._begin_to_learn(key, call)
            return None
        except TypeError:  # a list among them
            return None
        if kind is None:
            return None
        loop = asyncio.get_running_loop()
        found = RingCall(kind, texts, loop.create_future(), time.perf_counter())
        kind.ring.add(found)
        return found

    def close(self) -> None:
        """Forgets the rings: the engine's process has ended, and another one knows none of them."""
        rings, self._rings = list(self._rings.values()), {}
        self._kinds.clear()
        for ring in rings:
            ring.close(self._lost())

    def _begin_to_learn(self, key: Hashable, call: Call) -> None:
        texts = (option for option in call.options.values() if isinstance(option, str))
        if len(self._tasks) == _MAX_LEARNING or sum(map(len, texts)) > _MAX_OPTION_CHARACTERS:
            return
        if len(self._kinds) == _MAX_KINDS:  # wrong options, too, have been among them
            del self._kinds[next(iter(self._kinds))]
        self._kinds[key] = None
        task = asyncio.get_running_loop().create_task(self._learn(key, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _learn(self, key: Hashable, call: Call) -> None:
        """Asks the engine how calls with these options are sent."""
        try:
            async with self._learning:
                ring = self._rings.get(call.model)
                row = [call.model, call.task, [], call.options]
                question = {"op": "kind", "call": row, "has_reader": ring is not None}
                header, arrays = await self._ask(question)
                if header["kind"] is None:
                    return
                if ring is None:
                    ring = await self._open(call.model, header, arrays[0])
            reader = InputReader(
                ReaderSizes(*header["sizes"]),
                ring.tokenizer,
                prompt=header["prompt"],
                truncate=header["truncate"],
                keeps_errors=True,
            )
            if self._rings.get(call.model) is ring:
                number, size = header["kind"], header["size"]
                self._kinds[key] = _RingOptions(ring, number, size, reader, *header["limits"])
        except (ServeError, OSError) as error:
            self._kinds.pop(key, None)
            logger.debug("no ring for %s: %s", call.model, error)

    async def _open(self, model: str, header: dict[str, Any], backend: np.ndarray) -> "_ClientRing":
        """Makes the ring of a model and hands its memory to the engine."""
        state = TokenizerState(**header["tokenizer"])
        text = backend.tobytes().decode()
        tokenizer = await asyncio.to_thread(Tokenizer.from_state, text, state)
        sizes = RingSizes(*header["ring"])
        descriptor = new_memory(sizes)
        connection = socket.socket(socket.AF_UNIX)
        try:
            memory = RingMemory(descriptor, sizes)
            connection.setblocking(False)
            connection.connect(self._path)
            socket.send_fds(connection, [orjson.dumps({"model": model})], [descriptor])
        except OSError:
            connection.close()
            raise
        finally:
            os.close(descriptor)
        ring = _ClientRing(connection, memory, tokenizer, lambda: self._forget(model))
        self._rings[model] = ring
        return ring

    def _forget(self, model: str) -> None:
        """The engine has closed a ring: the model's calls go by frames until there is another."""
        ring = self._rings.pop(model, None)
        for key, kind in list(self._kinds.items()):
            if kind is not None and kind.ring is ring:
                del self._kinds[key]
        if ring is not None:
            ring.close(self._lost())


class _ClientRing:
    """The ring of one model."""

    def __init__(
        self,
        connection: socket.socket,
        memory: RingMemory,
        tokenizer: Tokenizer,
        on_close: Callable[[], None],
    ):
        """on_close: called where the engine has closed the connection."""
        self._connection, self._memory, self._ring = connection, memory, memory.ring
        self.tokenizer, self._on_close = tokenizer, on_close
        self._loop = asyncio.get_running_loop()
        self._free = list(range(memory.sizes.num_slots))  # the last ones are taken: few are used
        self._pending: list[RingCall | None] = [None] * memory.sizes.num_slots
        self._turn: list[RingCall] = []
        self._reading = set[RingCall]()
        self._groups = count(1)
        self._states = memory.facts["state"]
        self._flat_ids = memory.token_ids.reshape(-1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bytetx-tokenizer")
        self._is_closed = False
        self._loop.add_reader(connection.fileno(), self._on_readable)

    def add(self, call: RingCall) -> None:
        """Sends a call at the end of this turn."""
        if not self._turn:
            self._loop.call_soon(self._send_turn)
        self._turn.append(call)

    def cancel(self, call: RingCall) -> None:
        """Nobody waits for a call any more."""
        is_large = call.group and call.slots is not None and call.num_left
        if is_large and not self._is_closed:
            assert call.slots is not None
            self._submit(~call.slots[:1])

    def close(self, error: ServeError) -> None:
        """Ends what waits with the error."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        waiting = [*self._turn, *self._reading, *(call for call in self._pending if call)]
        for call in waiting:
            if not call.answer.done():
                call.answer.set_exception(error)
        self._turn, self._pending = [], []

    def _send_turn(self) -> None:
        turn, self._turn = self._turn, []
        by_kind: dict[_RingOptions, list[RingCall]] = {}
        for call in turn:
            if not call.answer.done():
                by_kind.setdefault(call.kind, []).append(call)
        for kind, calls in by_kind.items():
            num_characters = sum(len(text) for call in calls for text in call.texts)
            if num_characters <= _MAX_INLINE_CHARACTERS:
                self._send(kind, calls, *_read(kind.reader, calls))
            else:
                self._reading.update(calls)
                task = self._loop.run_in_executor(self._thread, _read, kind.reader, calls)
                task.add_done_callback(partial(self._on_read, kind, calls))

    def _on_read(
        self, kind: _RingOptions, calls: list[RingCall], done: "asyncio.Future[Any]"
    ) -> None:
        self._reading.difference_update(calls)
        if not done.cancelled() and done.exception() is None:
            self._send(kind, calls, *done.result())
        else:
            _leave_to_frames(calls)

    def _send(
        self, kind: _RingOptions, calls: list[RingCall], requests: Requests | None, errors: Errors
    ) -> None:
        """Gives the calls slots, and tells the engine."""
        if self._is_closed:
            return
        if requests is None or errors:
            wrong, start = [], 0
            for call in calls:
                if requests is None or any(start <= i < start + len(call.texts) for i in errors):
                    wrong.append(call)
                start += len(call.texts)
            _leave_to_frames(wrong)
            right = [call for call in calls if call not in wrong]
            if right:
                self._send(kind, right, *_read(kind.reader, right))
            return
        now = time.perf_counter()
        seqlens, most, start = requests.seqlens, self._memory.sizes.max_tokens, 0
        slots = np.full(len(seqlens), -1, dtype=np.int32)
        groups = np.zeros(len(seqlens), dtype=np.int32)
        for call in calls:
            rows = slice(start, start + len(call.texts))
            start = rows.stop
            own = seqlens[rows]
            if call.answer.done():
                continue
            call.num_tokens, call.num_left = int(own.sum()), len(own)
            is_large = len(own) > kind.max_texts or call.num_tokens > kind.max_tokens
            if is_large or own.max() > most or len(own) > len(self._free):
                call.answer.set_result(None)
                continue
            call.num_truncated = int(np.count_nonzero(requests.is_truncated[rows]))
            call.tokenize_seconds = now - call.started
            if call.num_tokens > _MAX_JOINED_TOKENS:
                call.group = groups[rows] = next(self._groups) % _MAX_GROUP or next(self._groups)
            taken = self._free[-len(own) :]
            del self._free[-len(own) :]
            for slot in taken:
                self._pending[slot] = call
            call.slots = slots[rows] = np.array(taken, dtype=np.int32)
        self._write(kind, requests, slots, groups)

    def _write(
        self, kind: _RingOptions, requests: Requests, slots: np.ndarray, groups: np.ndarray
    ) -> None:
        """Writes texts into their slots; those without one are passed over."""
        is_sent = slots >= 0
        if not is_sent.all():
            rows = np.flatnonzero(is_sent)
            if not len(rows):
                return
            requests, slots, groups = requests.take(rows), slots[rows], groups[rows]
        facts = np.zeros(len(slots), dtype=FACTS)
        facts["kind"], facts["group"], facts["seqlen"] = kind.number, groups, requests.seqlens
        facts["is_truncated"] = requests.is_truncated
        if requests.prompt_tokens is not None:
            facts["prompt_tokens"] = requests.prompt_tokens
        self._memory.facts[slots] = facts
        shifts = slots * np.int64(self._memory.sizes.max_tokens) - requests.cu_seqlens[:-1]
        places = np.repeat(shifts, requests.seqlens) + np.arange(requests.total_tokens)
        self._flat_ids[places] = requests.token_ids
        self._submit(slots)

    def _submit(self, entries: np.ndarray) -> None:
        if self._ring.submit(entries):
            with suppress(OSError):  # closed: the reader will see that
                self._connection.send(b"\0")

    def _on_readable(self) -> None:
        try:
            if not self._connection.recv(1 << 16):
                self._on_close()
                return
            done = np.frombuffer(self._ring.take_done(), np.int32)
        except BlockingIOError:
            return
        except (OSError, RuntimeError):
            self._on_close()
            return
        states = self._states[done].tolist()
        for slot, state in zip(done.tolist(), states, strict=True):
            call = self._pending[slot]
            assert call is not None
            call.num_left -= 1
            call.has_failed |= state != HAS_VECTOR
            if not call.num_left:
                self._answer(call)

    def _answer(self, call: RingCall) -> None:
        slots = call.slots
        assert slots is not None
        if not call.answer.done():
            call.answer.set_result(None if call.has_failed else self._outcome(call, slots))
        for slot in slots.tolist():
            self._pending[slot] = None
            self._free.append(slot)

    def _outcome(self, call: RingCall, slots: np.ndarray) -> Outcome:
        facts = self._memory.facts[slots]
        timings = Timings(
            len(slots),
            call.num_tokens,
            call.num_truncated,
            call.tokenize_seconds,
            float(facts["queue_seconds"].mean()),
            float(facts["compute_seconds"].mean()),
        )
        return Outcome(timings, arrays=(self._memory.vectors[slots, : call.kind.size],))


def _is_small(texts: Any) -> bool:
    if not isinstance(texts, list) or not 0 < len(texts) <= _MAX_TEXTS:
        return False
    return all(type(text) is str for text in texts) and sum(map(len, texts)) <= _MAX_CHARACTERS


def _read(reader: InputReader, calls: Sequence[RingCall]) -> tuple[Requests | None, Errors]:
    """The texts of all calls behind one another, and the errors of some; None where that fails."""
    errors: Errors = {}
    texts = dict(enumerate(text for call in calls for text in call.texts))
    try:
        return reader.read_texts(texts, errors), errors
    except Exception:  # the engine, which has the same tokenizer, says what it is
        return None, errors


def _leave_to_frames(calls: Sequence[RingCall]) -> None:
    for call in calls:
        if not call.answer.done():
            call.answer.set_result(None)
