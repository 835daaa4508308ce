"""The queue of all callers: which texts run next, the shortest first, and none waits for ever."""

import asyncio
import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice
from typing import Any, Protocol

import numpy as np

from bytetx.encode.prefix_index import Place, PrefixIndex
from bytetx.encode.prefixes import MIN_PREFIX_TOKENS, most_shared, prefix_order
from bytetx.encode.request import Requests
from bytetx.errors import InputError

# A call that has had more tokens than this is no longer set back: bulk calls take turns.
_MOST_SERVED_TOKENS = 1 << 16
# Calls whose next text does not fit a step any more, and that are passed over while it is filled.
_MAX_PASSED_OVER = 16
# A call gets at least so large a share of a step at a time: with many calls of many texts, the
# shortest first would be one text of each in turn, and the work on the host one of each text.
_LEAST_SHARE = 8
# Texts of a call whose beginnings a step remembers, and groups of texts of other calls that begin
# like them and that it takes along, in at most half of its tokens.
_MAX_BEGINNINGS, _MAX_MATES = 16, 64
_BUDGET_PARTS = 32  # granularity of step sizes; the buckets of CUDA graphs have the same


@dataclass(eq=False)
class QueuedTexts:
    """Texts of one call that were queued together, the longest first; steps take the last ones.

    requests: their columns, in this order.  num_shared: int32 [num_texts], tokens that each has in
    common with the next one, which a step that has both computes once; None where they are not
    looked for.  cu_seqlens: of requests.  cu_tokens: prefix sums of the tokens that each adds to a
    step that has the next.
    time: when they were queued.  num_left: texts that are in no step yet, the first ones.
    place: of the next text among those of all that wait, if it is there.
    """

    requests: Requests
    cu_seqlens: np.ndarray
    cu_tokens: np.ndarray
    time: float
    num_left: int
    num_shared: np.ndarray | None = None
    place: Place | None = None

    @cached_property
    def prefix_ids(self) -> np.ndarray:
        """Those of requests."""
        return self.requests.prefix_ids

    @property
    def next_tokens(self) -> int:
        """Tokens of the next text."""
        return int(self.requests.seqlens[self.num_left - 1])

    def shared_with_next(self, stop: int) -> int:
        """Tokens that text stop - 1 has in common with the one after it."""
        return 0 if self.num_shared is None or not stop else int(self.num_shared[stop - 1])

    @property
    def left_tokens(self) -> int:
        """Tokens of the texts that are in no step yet."""
        return int(self.cu_tokens[self.num_left]) + self.shared_with_next(self.num_left)

    @property
    def group_tokens(self) -> int:
        """Tokens of the next text and of those that have a prefix in common with it."""
        if self.num_shared is None:
            return self.next_tokens
        apart = np.flatnonzero(self.num_shared[: self.num_left - 1] == 0)
        start = int(apart[-1]) + 1 if len(apart) else 0
        return self.left_tokens - int(self.cu_tokens[start])

    def ids(self, text: int) -> np.ndarray:
        """The token ids of a text, by which others begin alike."""
        return self.prefix_ids[self.cu_seqlens[text] : self.cu_seqlens[text + 1]]


class Receiver(Protocol):
    """Takes the results of one call, in the engine's thread."""

    def put_rows(self, indices: np.ndarray, results: Sequence[Any]) -> None:
        """Results of some texts; arrays among them are only lent."""
        ...

    def fail(self, index: int, error: InputError) -> None:
        """A text that the device could not run, or whose numbers are not finite."""
        ...


@dataclass(eq=False)
class OpenCall:
    """A call that is not answered yet, with its texts in the queue.

    task: a Task; the queue, which imports no torch, does not look at it.
    priority: lower numbers run first.
    keeps_errors: a text that cannot run is its receiver's; else its error ends the call.
    num_calls: of callers, where several run as one.
    num_reading, reading_tokens: texts that are being tokenised, and a guess of their tokens.
    num_open, open_tokens: texts that were queued and have no result yet.
    num_queued, queued_tokens: texts in `waiting`, which no step has.
    served_tokens: of its texts that were taken for steps.
    entry: number of its entry in the heap; entries with other numbers are stale.
    queue_seconds, compute_seconds: sums over num_computed texts.
    failed: indices of texts without a result.
    error: why the call ended early.
    waiter: has its result once fewer than wakes_at tokens are open, and where wakes_after_reading
    all announced texts are in the queue.
    """

    task: Any
    receiver: Receiver
    priority: int = 0
    keeps_errors: bool = False
    num_calls: int = 1
    num_reading: int = 0
    reading_tokens: int = 0
    num_open: int = 0
    open_tokens: int = 0
    num_queued: int = 0
    queued_tokens: int = 0
    served_tokens: int = 0
    is_dropped: bool = False
    waiting: deque[QueuedTexts] = field(default_factory=deque)
    entry: int = -1
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    num_computed: int = 0
    failed: set[int] = field(default_factory=set)
    error: BaseException | None = None
    wakes_at: int = 0
    wakes_after_reading: bool = False
    waiter: "asyncio.Future[None] | None" = None

    @cached_property
    def key(self) -> Hashable:
        """Equal for calls whose texts can be one part of a step."""
        key: Hashable = self.task.key
        return key

    @cached_property
    def pass_key(self) -> Hashable:
        """Equal for calls whose texts run in one forward pass."""
        task = self.task  # which the queue does not know
        return True if getattr(task, "shares_pass", False) else getattr(task, "key", task)

    @property
    def has_room(self) -> bool:
        """Whether `waiter` need not wait any more."""
        if self.error is not None:
            return True
        if self.num_reading and self.wakes_after_reading:
            return False
        is_idle = not self.num_open and not self.num_reading
        return is_idle or self.open_tokens + self.reading_tokens < self.wakes_at


@dataclass(frozen=True, slots=True)
class Taken:
    """Texts start to stop of those that were queued together, taken for a step."""

    call: OpenCall
    texts: QueuedTexts
    start: int
    stop: int

    @property
    def num_texts(self) -> int:
        return self.stop - self.start

    @property
    def total_tokens(self) -> int:
        """Tokens to compute, common prefixes once."""
        own = int(self.texts.cu_tokens[self.stop] - self.texts.cu_tokens[self.start])
        return own + self.texts.shared_with_next(self.stop)

    def beginnings(self, most: int) -> list[np.ndarray]:
        """Token ids of one text of each group with a common prefix, at most so many; of texts that
        are long enough to have one."""
        shared, first = self.texts.num_shared, max(self.start, self.stop - most)
        ends: Sequence[int] = range(first, self.stop)
        if shared is not None:
            apart = self.start + np.flatnonzero(shared[self.start : self.stop - 1] == 0)
            ends = [*apart[1 - most :].tolist(), self.stop - 1]
        found = map(self.texts.ids, ends)
        return [ids for ids in found if len(ids) > MIN_PREFIX_TOKENS]

    def requests(self) -> Requests:
        """The columns of these texts, views of all that were queued together."""
        if self.num_texts == len(self.texts.requests):
            return self.texts.requests
        return self.texts.requests.cut([self.start, self.stop])[0]


@dataclass(slots=True)
class _Filling:
    """A step that is being filled.

    room: tokens that it may still have.  mates_room, num_mates: of that, tokens for texts that
    begin like those that it has, and groups of them so far.
    begun: texts that it has, by the pass that runs them, of those that others which wait begin
    like.  unmet: those of them, with their calls, that nobody looked for mates of.
    """

    room: int
    taken: list[Taken] = field(default_factory=list)
    mates_room: int = 0
    num_mates: int = 0
    begun: dict[Hashable, PrefixIndex[None]] = field(default_factory=dict)
    unmet: list[tuple[OpenCall, np.ndarray]] = field(default_factory=list)

    def remember(self, call: OpenCall, ids: np.ndarray) -> None:
        """Notes a text that the step has."""
        self.begun.setdefault(call.pass_key, PrefixIndex()).put(ids, None)
        self.unmet.append((call, ids))

    def in_common(self, call: OpenCall, texts: QueuedTexts) -> int:
        """Tokens of the next of these texts that the step has already and does not count again."""
        begun = self.begun.get(call.pass_key)
        if begun is None or texts.place is None:
            return 0
        common, _ = next(begun.near(texts.ids(texts.num_left - 1)), (0, None))
        return min(common, int(most_shared(np.array(texts.next_tokens))))


class RequestQueue:
    """The texts of all calls that wait for a step. Not thread-safe: the owner has a lock.

    Inside a priority class a text's rank is its own tokens and those that its call has had before:
    single texts run the shortest first, and a call of many texts comes after what is small.  A text
    that has waited for age_limit_s comes before all ranks and classes, the oldest first, in up to
    half of each step.  Times are seconds of whatever clock the caller has.
    shares_prefixes: steps compute tokens that texts have in common once: texts of a call with a
    common prefix stay together, and count what is left of them; those of other calls of the class
    that begin alike come along, in up to half of a step, and count what the step has not.
    """

    def __init__(self, *, age_limit_s: float, shares_prefixes: bool = False):
        self._age_limit_s, self._shares_prefixes = age_limit_s, shares_prefixes
        self._heaps: dict[int, list[tuple[int, int, OpenCall]]] = {}
        self._arrivals: deque[tuple[OpenCall, QueuedTexts]] = deque()
        self._numbers = count()
        self._num_stale = 0
        self._passed_over: OpenCall | None = None
        # The next texts of what waits, and what is not among them yet.
        self._nexts = PrefixIndex[tuple[OpenCall, QueuedTexts]]()
        self._unplaced: list[tuple[OpenCall, QueuedTexts]] = []
        self.num_queued = 0
        self.queued_tokens = 0

    def __bool__(self) -> bool:
        return self.num_queued > 0

    @property
    def num_entries(self) -> int:
        """Entries that the queue holds, stale ones among them."""
        return sum(map(len, self._heaps.values()))

    def add(self, call: OpenCall, requests: Requests, now: float) -> None:
        """Queues texts of a call that was not dropped."""
        if not len(requests):
            return
        found = prefix_order(requests) if self._shares_prefixes and len(requests) > 1 else None
        if found is not None:
            requests, shared = requests.take(found.texts), found.num_shared
            own = np.append(0, np.cumsum(requests.seqlens - shared, dtype=np.int64))
            texts = QueuedTexts(requests, requests.cu_seqlens, own, now, len(requests), shared)
        else:
            if len(requests) > 1:
                requests = longest_first(requests)
            bounds = requests.cu_seqlens
            texts = QueuedTexts(requests, bounds, bounds, now, len(requests))
        call.waiting.append(texts)
        if self._shares_prefixes:
            self._unplaced.append((call, texts))
        self._arrivals.append((call, texts))
        self._count(call, len(requests), int(texts.cu_tokens[-1]))
        if call.entry < 0:
            self._push(call)

    def drop(self, call: OpenCall) -> None:
        """Forgets a call's texts that are in no step yet."""
        call.is_dropped = True
        self._count(call, -call.num_queued, -call.queued_tokens)
        for texts in call.waiting:
            if texts.place is not None:
                self._nexts.remove(texts.place)
        call.waiting.clear()
        if call.entry >= 0:
            call.entry = -1
            self._num_stale += 1
            self._sweep()
        if self._passed_over is call:
            self._passed_over = None
        self._forget()

    def take(self, budget: int, now: float) -> list[Taken]:
        """The texts of the next step, at most `budget` tokens, or one text that is longer alone.

        A text that does not fit what is left of a step begins the next one.  Where all that waits
        fits, nothing is ranked.
        """
        if self.queued_tokens <= budget:
            return self._take_all()
        self._place_all()
        step = _Filling(budget)
        self._take_aged(step, now)
        if not step.taken:
            self._take_passed_over(step)
        step.mates_room = step.room // 2
        self._take_mates(step)
        for priority in sorted(self._heaps):
            if step.room <= 0:
                break
            self._take_ranked(self._heaps[priority], step)
            if not self._heaps[priority]:
                del self._heaps[priority]
        self._forget()
        return step.taken

    def take_short(self, max_rank: int) -> list[Taken]:
        """Texts of the best class that has any, while their ranks and their sum are that small."""
        step = _Filling(max_rank)
        for priority in sorted(self._heaps):
            heap = self._heaps[priority]
            if self._best(heap) is None:
                continue
            self._take_ranked(heap, step, max_rank=max_rank)
            break
        self._forget()
        return step.taken

    def _count(self, call: OpenCall, num_texts: int, num_tokens: int) -> None:
        call.num_queued += num_texts
        call.queued_tokens += num_tokens
        self.num_queued += num_texts
        self.queued_tokens += num_tokens

    def _push(self, call: OpenCall) -> None:
        """Gives a call with texts its place by the rank of the next one."""
        call.entry = next(self._numbers)
        rank = _served(call) + call.waiting[0].next_tokens
        heapq.heappush(self._heaps.setdefault(call.priority, []), (rank, call.entry, call))

    def _best(self, heap: list[tuple[int, int, OpenCall]]) -> OpenCall | None:
        """The call of lowest rank; stale entries before it go."""
        while heap and heap[0][1] != heap[0][2].entry:
            heapq.heappop(heap)
            self._num_stale -= 1
        return heap[0][2] if heap else None

    def _take_all(self) -> list[Taken]:
        """All texts, those queued together at once, by classes and ranks of calls."""
        taken: list[Taken] = []
        for priority in sorted(self._heaps):
            for _, entry, call in sorted(self._heaps[priority]):
                if entry != call.entry:
                    continue  # stale
                for texts in call.waiting:
                    if texts.place is not None:
                        self._nexts.remove(texts.place)
                    taken.append(Taken(call, texts, 0, texts.num_left))
                    texts.num_left = 0
                call.served_tokens += call.queued_tokens
                self._count(call, -call.num_queued, -call.queued_tokens)
                call.waiting.clear()
                call.entry = -1
        self._forget()
        return taken

    def _take_aged(self, step: _Filling, now: float) -> None:
        """Takes texts beyond the age limit."""
        others = step.room - step.room // 2
        while (oldest := self._oldest()) is not None:
            call, texts = oldest
            common, share = step.in_common(call, texts), step.room - others
            needed = texts.next_tokens - common
            if now - texts.time < self._age_limit_s or (step.taken and share < needed):
                break
            if needed > share:  # a prefix beyond it serves what follows while there is room
                share = max(needed, min(texts.group_tokens - common, step.room))
            self._take_into(step, call, texts, tokens=share, common=common)

    def _oldest(self) -> tuple[OpenCall, QueuedTexts] | None:
        while self._arrivals:
            call, texts = self._arrivals[0]
            if not call.is_dropped and texts.num_left:
                return call, texts
            self._arrivals.popleft()
        return None

    def _take_passed_over(self, step: _Filling) -> None:
        """Takes the text that the last step had no room for, unless a better class waits."""
        call, self._passed_over = self._passed_over, None
        if call is None or not call.waiting:
            return
        for priority in sorted(self._heaps):
            if priority < call.priority and self._best(self._heaps[priority]) is not None:
                return
        texts = call.waiting[0]
        tokens = max(texts.next_tokens, min(texts.group_tokens, step.room))
        self._take_into(step, call, texts, tokens=tokens)

    def _take_ranked(
        self,
        heap: list[tuple[int, int, OpenCall]],
        step: _Filling,
        *,
        max_rank: int | None = None,
    ) -> None:
        """Takes texts of one class by their ranks."""
        passed_over: list[OpenCall] = []
        least = step.room // _LEAST_SHARE
        while step.room > 0 and len(passed_over) < _MAX_PASSED_OVER:
            call = self._best(heap)
            if call is None or (max_rank is not None and heap[0][0] > max_rank):
                break
            heapq.heappop(heap)
            call.entry = -1
            texts = call.waiting[0]
            common = step.in_common(call, texts)
            needed = texts.next_tokens - common
            if needed > step.room and step.taken:
                passed_over.append(call)
                continue
            following = self._best(heap)
            tokens = step.room if following is None else min(step.room, heap[0][0] - _served(call))
            tokens = max(tokens, min(least, step.room), needed)
            step.unmet.clear()
            self._take_into(step, call, texts, tokens=tokens, common=common)
            self._take_mates(step)
        passed_over = [call for call in passed_over if call.waiting]  # some came along as mates
        for call in passed_over:
            if call.entry < 0:
                self._push(call)
        if passed_over and max_rank is None and self._passed_over is None:
            self._passed_over = passed_over[0]

    def _take_mates(self, step: _Filling) -> None:
        """Takes texts of other calls of a class that begin like those that a step has just got,
        those that have the most in common first, and of equal ones those that came first."""
        while step.unmet and step.mates_room > 0 and step.num_mates < _MAX_MATES:
            own, ids = step.unmet.pop()
            near = [
                (common, call, texts)
                for common, (call, texts) in islice(self._nexts.near(ids), _MAX_MATES)
                if call is not own
                and (call.priority, call.pass_key) == (own.priority, own.pass_key)
            ]
            near.sort(key=lambda mate: (-mate[0], mate[1].entry))
            for _, call, texts in near:
                common, room = step.in_common(call, texts), min(step.room, step.mates_room)
                if texts.next_tokens - common > room:
                    continue
                tokens = min(texts.group_tokens - common, room)
                added = self._take_into(step, call, texts, tokens=tokens, common=common)
                step.mates_room -= added
                step.num_mates += 1

    def _take_into(
        self, step: _Filling, call: OpenCall, texts: QueuedTexts, *, tokens: int, common: int = 0
    ) -> int:
        """Takes the last texts, as many as add at most so many tokens to a step; one at least.

        common: tokens of the next one that the step has already.  Returns the tokens that it adds.
        """
        found = self._take_texts(call, texts, tokens=tokens + common)
        added = found.total_tokens - common
        step.taken.append(found)
        step.room -= added
        if self._nexts:
            for ids in found.beginnings(_MAX_BEGINNINGS):
                if self._nexts.has(ids):
                    step.remember(call, ids)
        return added

    def _place_all(self) -> None:
        """Puts what was queued since the last step among the next texts."""
        for call, texts in self._unplaced:
            if not call.is_dropped and texts.place is None:
                self._place(call, texts)
        self._unplaced.clear()

    def _place(self, call: OpenCall, texts: QueuedTexts) -> None:
        texts.place, last = None, texts.num_left - 1
        if last >= 0 and texts.next_tokens > MIN_PREFIX_TOKENS:
            texts.place = self._nexts.put(texts.ids(last), (call, texts))

    def _take_texts(self, call: OpenCall, texts: QueuedTexts, *, tokens: int) -> Taken:
        """Takes the last texts, as many as have at most so many tokens; one at least."""
        stop, before = texts.num_left, texts.left_tokens
        starts, end = texts.cu_tokens[:stop], texts.cu_tokens[stop]
        first = end + texts.shared_with_next(stop) - tokens
        start = min(int(np.searchsorted(starts, first)), stop - 1)
        found = Taken(call, texts, start, stop)
        texts.num_left = start
        if texts.place is not None:
            self._nexts.remove(texts.place)
            self._place(call, texts)
        if not start:
            call.waiting.remove(texts)
        self._count(call, -found.num_texts, texts.left_tokens - before)
        call.served_tokens += found.total_tokens
        if call.entry >= 0:
            call.entry = -1
            self._num_stale += 1
        if call.waiting:
            self._push(call)
        return found

    def _sweep(self) -> None:
        """Rebuilds the heaps where most of their entries are stale."""
        if self._num_stale < 64 or 2 * self._num_stale < self.num_entries:
            return
        for priority, heap in list(self._heaps.items()):
            kept = [entry for entry in heap if entry[1] == entry[2].entry]
            heapq.heapify(kept)
            self._heaps[priority] = kept
            if not kept:
                del self._heaps[priority]
        waiting = ((call, texts) for call, texts in self._arrivals if not call.is_dropped)
        self._arrivals = deque(waiting)
        self._unplaced = [(call, texts) for call, texts in self._unplaced if not call.is_dropped]
        self._num_stale = 0

    def _forget(self) -> None:
        """Lets go of calls that have nothing in the queue, once no call has."""
        if not self.num_queued:
            self._heaps.clear()
            self._arrivals.clear()
            self._unplaced.clear()
            self._num_stale, self._passed_over = 0, None


def longest_first(requests: Requests) -> Requests:
    """The texts of a call in the order in which a step has them."""
    seqlens = requests.seqlens
    if (seqlens[1:] <= seqlens[:-1]).all():
        return requests
    return requests.take(np.argsort(-requests.seqlens, kind="stable"))


def even_share(num_tokens: int, token_budget: int) -> int:
    """Tokens of the next step of so many that wait for no others, at most token_budget.

    Steps get equal shares: a last step of a few texts would cost almost as much as a full one.  A
    share is rounded up to a part of the budget: a device pads steps to few sizes.
    """
    part = max(token_budget // _BUDGET_PARTS, 1)
    share = -(-num_tokens // -(-num_tokens // token_budget))
    return min(-(-share // part) * part, token_budget)


def _served(call: OpenCall) -> int:
    return min(call.served_tokens, _MOST_SERVED_TOKENS)


def waiters_of(calls: Sequence[OpenCall]) -> "list[asyncio.Future[None]]":
    """The waiters of calls that need not wait any more; under the lock."""
    found = []
    for call in calls:
        waiter = call.waiter  # read once: a call that is cancelled takes it away without the lock
        if waiter is not None and call.has_room:
            found.append(waiter)
    return found


def wake(waiters: "Sequence[asyncio.Future[None]]") -> None:
    """Sets the results of waiters: one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, own in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_set_results, own)


def _set_results(waiters: "Sequence[asyncio.Future[None]]") -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
