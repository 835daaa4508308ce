"""GenerationScheduler: which tokens of which sequences the next forward pass computes."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from bytetx.arguments import check_token_budget
from bytetx.errors import InputError, TooLongError
from bytetx.generate.kv_cache import PageAllocator
from bytetx.generate.sequence import SequenceState, Status

_RANK = attrgetter("rank")


class StepRow(NamedTuple):
    """One sequence's part of a step: its tokens start ... start + num_tokens - 1.

    num_logits: how many of these tokens, at the end, need logits.  samples: the last of them is
    the sequence's last one, and the step gives the next.  epoch: the preemptions of the sequence
    before this step; after one more, the token that the step gives counts no longer.
    """

    sequence: SequenceState
    start: int
    num_tokens: int
    num_logits: int
    samples: bool
    epoch: int

    @property
    def is_stale(self) -> bool:
        """Whether the sequence was sent back to start again since."""
        return self.epoch != self.sequence.num_preemptions


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: pieces of prompts and decode rows, behind one another.

    num_preempted: sequences that lost their pages for this step, and start again later.
    seated: those that got their seat for this step.  grown: those that may have got pages.
    """

    rows: tuple[StepRow, ...]
    total_tokens: int
    num_preempted: int
    seated: tuple[SequenceState, ...]
    grown: tuple[SequenceState, ...]


class GenerationScheduler:
    """Continuous batching over a paged cache, under one token budget.

    Decode rows come first in the budget, prompts fill up what is left, cut where they must be.
    Sequences are admitted by priority, then in order of arrival, and none overtakes another one of
    its priority.  Where pages run out, the last in that order gives its own up and starts again
    later (preemption by recompute); the first is never preempted, so every sequence ends.

    A step is taken for run once it is planned: its full pages can be found by other sequences,
    in the same step even, for every layer writes the keys and values of all rows before any row
    reads them, and steps run in order.  `discard` takes that back where a step failed.

    The next step may be planned before `append` has said what the last one sampled: a decode row
    then stands for a token that only the device knows.  Steps run in order, so that pages may be
    given away while a planned step still uses them.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        token_budget: int,
        max_num_seqs: int,
        max_positions: int,
        caches_prefixes: bool = True,
        max_shared_prompt: int | None = None,
    ):
        """token_budget: tokens a step.  max_positions: tokens that the model takes of a sequence.

        max_shared_prompt: longer prompts (tokens) have keys that depend on their length, and share
        no pages with others.

        max_num_seqs: sequences that hold pages at a time, at most token_budget, so that each can
        decode in every step.
        """
        self.pages = PageAllocator(num_pages, page_size=page_size)
        self.token_budget = check_token_budget(token_budget)
        if not 1 <= max_num_seqs <= token_budget:
            raise InputError(
                f"max_num_seqs must be 1 ... token_budget ({token_budget}), got {max_num_seqs}"
            )
        self.max_num_seqs, self.max_positions = max_num_seqs, max_positions
        self._caches_prefixes, self._max_shared_prompt = caches_prefixes, max_shared_prompt
        self._waiting: list[tuple[int, int, SequenceState]] = []  # a heap; finished ones may linger
        self._num_waiting = 0
        self._running: list[SequenceState] = []  # by rank
        self._seats = list(range(max_num_seqs - 1, -1, -1))
        self._num_arrived = 0
        self.num_preempted = 0  # since the start
        self.num_found_tokens = 0  # that were not computed, for pages held them already

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._num_waiting or self._running)

    @property
    def max_tokens(self) -> int:
        """The most tokens of one sequence, prompt and output: positions and pages hold them.

        A page more than the cache has would be needed beyond; the last token needs no place.
        """
        return min(self.max_positions, self.pages.num_pages * self.pages.page_size + 1)

    def add(self, sequence: SequenceState) -> None:
        """Queues a sequence; InputError where it could not run to its end even alone."""
        prompt, cached = sequence.num_prompt_tokens, self.max_tokens
        if not prompt:
            raise InputError(
                "the prompt has no tokens; a sequence needs at least one to start from"
            )
        if sequence.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, got {sequence.max_tokens}")
        if prompt + sequence.max_tokens > cached:
            raise TooLongError(self._too_long(prompt, sequence.max_tokens))
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self._wait(sequence)

    def step(self) -> StepPlan:
        """Plans the next forward pass; without rows where there is no work."""
        step = self._open_step()
        rows, last = step.rows, self.pages.page_size - 1
        for sequence in self._running:  # only the last ones may yield to others meanwhile
            start, num_tokens = sequence.num_computed, sequence.num_tokens
            offset = start & last
            is_within_page = offset and (offset != last or num_tokens > len(sequence.token_ids))
            if not is_within_page or num_tokens - start != 1:
                self._continue(sequence, step)
                continue
            # A decode row without a new page, and none to publish: most rows of most steps.
            rows.append(_new_row(StepRow, (sequence, start, 1, 1, True, sequence.num_preemptions)))
            sequence.num_computed = num_tokens
            sequence.num_tokens = num_tokens + 1
            step.num_decodes -= 1
            step.left -= 1
        if self._num_waiting:
            self._admit(step)
        num_tokens = self.token_budget - step.left
        seated, grown = tuple(step.seated), tuple(step.grown)
        return StepPlan(tuple(rows), num_tokens, step.num_preempted, seated, grown)

    def _open_step(self) -> "_OpenStep":
        """Lets go of sequences whose last token is on its way."""
        ending, num_decodes = [], 0
        for sequence in self._running:
            if sequence.num_tokens >= sequence.max_num_tokens:
                if sequence.num_tokens > len(sequence.token_ids):
                    ending.append(sequence)
            elif sequence.num_tokens - sequence.num_computed == 1:
                num_decodes += 1
        for sequence in ending:
            self._let_end(sequence)
        return _OpenStep(self.token_budget, num_decodes)

    def append(self, sequence: SequenceState, token_id: int) -> bool:
        """The token that a step gave a sequence; the step's row must not be stale.

        Returns whether it may be the last of all.
        """
        token_ids = sequence.token_ids
        assert len(token_ids) < sequence.num_tokens
        token_ids.append(token_id)
        return len(token_ids) >= sequence.max_num_tokens or token_id in sequence.stop_token_ids

    def finish(self, sequence: SequenceState) -> None:
        """Ends a sequence wherever it is and gives its pages back; a second call does nothing."""
        if sequence.status is Status.WAITING:
            self._num_waiting -= 1
            sequence.status = Status.FINISHED
            if 2 * self._num_waiting + 64 < len(self._waiting):
                self._waiting = [w for w in self._waiting if w[2].status is Status.WAITING]
                heapify(self._waiting)
        else:
            if sequence.status is Status.RUNNING:
                self._stop_running(sequence)
            sequence.status = Status.FINISHED

    def discard(self, sequences: Iterable[SequenceState]) -> None:
        """Ends sequences whose step failed: what they wrote is not to be trusted, nor found.

        Others that found it already start again.
        """
        failed = list(sequences)
        written = {page for sequence in failed for page in sequence.own_pages}
        self.pages.withdraw(written)
        for sequence in failed:
            self.finish(sequence)
        for sequence in [s for s in self._running if not written.isdisjoint(s.pages)]:
            self._start_again(sequence)

    def _continue(self, sequence: SequenceState, step: "_OpenStep") -> None:
        """The next piece of a running sequence, its one token in decode."""
        if sequence.num_left == 1:
            step.num_decodes -= 1
            wanted = 1
        else:
            self._find_pages(sequence)
            wanted = min(sequence.num_left, step.left - step.num_decodes)
        num_tokens = min(wanted, self._make_room(sequence, wanted, step))
        if num_tokens > 0:
            self._schedule(sequence, num_tokens, step)

    def _make_room(self, sequence: SequenceState, num_tokens: int, step: "_OpenStep") -> int:
        """How many more tokens there are pages for, after all behind the sequence had to yield.

        A sequence without room keeps its pages and waits: the ones before it will end.
        """
        pages = self.pages
        needed = pages.pages_for(sequence.num_computed + num_tokens) - len(sequence.pages)
        while needed > pages.num_available and self._running[-1] is not sequence:
            self._start_again(self._running[-1])
            step.num_preempted += 1
        held = len(sequence.pages) + pages.num_available
        return held * pages.page_size - sequence.num_computed

    def _admit(self, step: "_OpenStep") -> None:
        """Starts waiting sequences, the first in order until one does not fit.

        One fits when there are pages for all its tokens beside those that running prompts still
        need, and one page more a running sequence: else the next steps would preempt it again.
        """
        pages = self.pages
        promised = sum(self._pages_missing(s) for s in self._running)
        while step.left and self._seats:
            sequence = self._first_waiting()
            if sequence is None:
                return
            self._find_pages(sequence)
            needed = self._pages_missing(sequence)
            if needed + promised + len(self._running) > pages.num_available:
                self.num_found_tokens -= sequence.num_computed
                pages.release(sequence.pages)
                sequence.forget_pages()
                return
            heappop(self._waiting)
            self._num_waiting -= 1
            sequence.status = Status.RUNNING
            sequence.seat = self._seats.pop()
            step.seated.append(sequence)
            insort(self._running, sequence, key=_RANK)
            self._schedule(sequence, min(sequence.num_left, step.left), step)
            promised += self._pages_missing(sequence)

    def _find_pages(self, sequence: SequenceState) -> None:
        """Takes over pages that hold the sequence's next tokens already, all but its last token."""
        page_size, first = self.pages.page_size, len(sequence.pages)
        is_at_page = sequence.num_computed == first * page_size
        if not (self._shares(sequence) and is_at_page) or sequence.num_left == 1:
            return
        if sequence.scores_prompt and sequence.num_scored < sequence.num_prompt_tokens - 1:
            return
        last = (len(sequence.token_ids) - 1) // page_size
        found = self.pages.find(sequence.page_keys(first, last, page_size=page_size))
        if found:
            sequence.pages += found
            sequence.skip_to(first + len(found), page_size=page_size)
            self.num_found_tokens += len(found) * page_size

    def _schedule(self, sequence: SequenceState, num_tokens: int, step: "_OpenStep") -> None:
        start, pages = sequence.num_computed, self.pages
        end = sequence.num_computed = start + num_tokens
        missing = pages.pages_for(end) - len(sequence.pages)
        if missing > 0:
            taken = pages.take(missing)
            sequence.pages += taken
            sequence.own_pages += taken
        step.grown.append(sequence)
        if self._shares(sequence):
            self._publish(sequence)
        samples = end == sequence.num_tokens
        num_logits = int(samples)
        last_scored = min(end, sequence.num_prompt_tokens - 1)
        if sequence.scores_prompt and last_scored > sequence.num_scored:
            num_logits += last_scored - max(start, sequence.num_scored)
            sequence.num_scored = last_scored
        epoch = sequence.num_preemptions
        step.rows.append(StepRow(sequence, start, num_tokens, num_logits, samples, epoch))
        sequence.num_tokens += samples
        step.left -= num_tokens

    def _shares(self, sequence: SequenceState) -> bool:
        limit = self._max_shared_prompt
        return self._caches_prefixes and (limit is None or sequence.num_prompt_tokens <= limit)

    def _publish(self, sequence: SequenceState) -> None:
        page_size = self.pages.page_size
        num_full = min(sequence.num_computed, len(sequence.token_ids)) // page_size
        fresh = sequence.take_unpublished(num_full)
        if fresh:
            keys = sequence.page_keys(fresh.start, fresh.stop, page_size=page_size)
            for page, key in zip(sequence.pages[fresh.start : fresh.stop], keys, strict=True):
                self.pages.publish(page, key)

    def _pages_missing(self, sequence: SequenceState) -> int:
        num_tokens = max(len(sequence.token_ids), sequence.num_computed)
        return self.pages.pages_for(num_tokens) - len(sequence.pages)

    def _wait(self, sequence: SequenceState) -> None:
        sequence.status = Status.WAITING
        heappush(self._waiting, (*sequence.rank, sequence))
        self._num_waiting += 1

    def _first_waiting(self) -> SequenceState | None:
        while self._waiting and self._waiting[0][2].status is not Status.WAITING:
            heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None

    def _start_again(self, sequence: SequenceState) -> None:
        sequence.num_preemptions += 1
        self.num_preempted += 1
        self._stop_running(sequence)
        self._wait(sequence)

    def _stop_running(self, sequence: SequenceState) -> None:
        self._leave(sequence)
        sequence.forget_pages()

    def _let_end(self, sequence: SequenceState) -> None:
        """Its pages are for the steps after those that are planned; `discard` may yet want them."""
        self._leave(sequence)
        sequence.pages, sequence.seat, sequence.status = [], -1, Status.ENDING

    def _leave(self, sequence: SequenceState) -> None:
        del self._running[bisect_left(self._running, sequence.rank, key=_RANK)]
        self._seats.append(sequence.seat)
        self.pages.release(sequence.pages)

    def _too_long(self, num_prompt_tokens: int, max_tokens: int) -> str:
        pages = self.pages
        return (
            f"a prompt of {num_prompt_tokens} tokens and max_tokens {max_tokens} need "
            f"{num_prompt_tokens + max_tokens} places; the model has {self.max_positions} positions"
            f" and the cache holds {pages.num_pages * pages.page_size} tokens "
            f"({pages.num_pages} pages of {pages.page_size}): shorten the prompt, lower "
            "max_tokens, or give the cache more memory"
        )


@dataclass(slots=True)
class _OpenStep:
    """A step while it is planned.

    num_decodes: decode rows ahead, which the budget is kept for; a preempted one still counts.
    """

    left: int
    num_decodes: int
    num_preempted: int = 0
    rows: list[StepRow] = field(default_factory=list)
    seated: list[SequenceState] = field(default_factory=list)
    grown: list[SequenceState] = field(default_factory=list)


_new_row = tuple.__new__  # StepRow's own takes three times as long
