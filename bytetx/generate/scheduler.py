"""Scheduler: which tokens of which sequences the next forward pass computes."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import islice
from operator import attrgetter
from typing import NamedTuple, Protocol

from bytetx.adapter_rows import SlottedAdapter
from bytetx.arguments import check_num_seqs, check_token_budget
from bytetx.errors import InputError, TooLongError
from bytetx.generate.guidance import Guide
from bytetx.generate.kv_cache import PageAllocator, page_hashes
from bytetx.generate.ngram_drafter import NgramDrafter
from bytetx.sampling_params import SamplingParams

_SORT_KEY = attrgetter("sort_key")

# Of the running sequences, to plan no step ahead: that costs all of them the host's time of a step,
# some tenth of it, and a draft saves one sequence a step or two.
_MIN_SHARE = 0.125


class Status(Enum):
    """The state of a sequence; preemption moves it from RUNNING back to WAITING.

    ENDING: its last token is being computed, and its pages are freed already.
    """

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    FINISHED = "finished"


class SequenceAdapter(SlottedAdapter, Protocol):
    """An adapter of a model, as the scheduler knows it."""

    @property
    def uid(self) -> bytes:
        """16 bytes that no other adapter has."""
        ...


@dataclass(slots=True, eq=False)
class SequenceState:
    """Tokens, pages and progress of one sequence; only the scheduler changes it.

    token_ids: the prompt, then what was generated; it only grows.
    num_tokens: token_ids, and the tokens that planned steps will sample but that the host does not
    know yet.  max_tokens: the most tokens that are generated; max_num_tokens counts the prompt too.
    priority: lower numbers run first.
    num_computed: tokens whose keys and values are in the pages once the planned steps have run.
    num_scored: prompt tokens whose logits were requested for prompt_logprobs.
    stop_token_ids: these end the output.  eos_token_ids: the checkpoint's; min_tokens forbids both.
    written_pages: the pages that this sequence wrote itself, without those found in the cache.
    slot_index: a number below max_num_seqs that belongs to this sequence while it is running.  A
    model runner keeps per-sequence state there (the last token, the sampling parameters).
    drafter: guesses its next tokens; None where it gets no drafts.
    adapter: what runs it beside the model, None: nothing; sequences with different ones share no
    pages.
    guide: the grammar of its output; None where it has none.
    """

    token_ids: list[int]
    max_tokens: int
    priority: int = 0
    params: SamplingParams = SamplingParams()
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    arrival: int = -1
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    num_computed: int = 0
    num_scored: int = 0
    num_preemptions: int = 0
    pages: list[int] = field(default_factory=list)
    written_pages: list[int] = field(default_factory=list)
    slot_index: int = -1
    status: Status = Status.WAITING
    drafter: NgramDrafter | None = None
    adapter: SequenceAdapter | None = None
    guide: Guide | None = None
    _page_hashes: list[bytes] = field(default_factory=list)
    _num_inserted: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        self.max_num_tokens = self.num_prompt_tokens + self.max_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether logits of the prompt's tokens are needed, too."""
        return self.params.prompt_logprobs is not None

    @property
    def sort_key(self) -> tuple[int, int]:
        """The order of scheduling: the lower priority number first, then the earlier arrival."""
        return self.priority, self.arrival

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are not computed yet: 1 in decode."""
        return self.num_tokens - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def page_hashes(self, start: int, stop: int, *, page_size: int) -> list[bytes]:
        """Hashes of the full pages start ... stop - 1; each is computed once."""
        hashes = self._page_hashes
        if len(hashes) < stop:
            tokens = self.token_ids[len(hashes) * page_size : stop * page_size]
            root = b"" if self.adapter is None else self.adapter.uid
            parent = hashes[-1] if hashes else root
            hashes += page_hashes(tokens, page_size=page_size, parent=parent)
        return hashes[start:stop]

    def take_uncached(self, num_full_pages: int) -> range:
        """The full pages that no earlier call returned: they are not in the prefix cache yet."""
        uncached = range(self._num_inserted, num_full_pages)
        self._num_inserted = max(self._num_inserted, num_full_pages)
        return uncached

    def skip_cached(self, num_pages: int, *, page_size: int) -> None:
        """Counts the first pages as computed, because they were found in the prefix cache."""
        self.num_computed = num_pages * page_size
        self._num_inserted = num_pages

    def reset_progress(self) -> None:
        """Forgets the pages and what was computed; the tokens and their page hashes stay."""
        self.pages, self.written_pages = [], []
        self.num_computed = self._num_inserted = 0
        self.num_tokens = len(self.token_ids)
        self.slot_index = -1


class ScheduledRow(NamedTuple):
    """One sequence's part of a step: its tokens start ... start + num_tokens - 1.

    num_logits: how many of these tokens, at the end, need logits.  samples: whether the last of
    them is the sequence's last token, so that the step samples the next one.
    epoch: how often the sequence was preempted before this step.  After another preemption the
    token that this step samples is dropped.
    draft: guesses of the tokens that follow the sequence's last one, the last of num_tokens.  The
    step samples behind the last token and behind each of these.
    """

    sequence: SequenceState
    start: int
    num_tokens: int
    num_logits: int
    samples: bool
    epoch: int
    draft: Sequence[int] = ()

    @property
    def is_stale(self) -> bool:
        """Whether the sequence was preempted since this step was planned."""
        return self.epoch != self.sequence.num_preemptions


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One forward pass: prefill chunks and decode rows, one after another.

    num_preempted: sequences that lost their pages for this step; they are recomputed later.
    admitted: sequences that started to run in this step, each with a new slot index.
    with_new_pages: sequences that may have got pages in this step.
    has_drafts: whether a row has a draft.  The next step is planned after `append` and `accept`
    have delivered the tokens of this one.
    """

    rows: tuple[ScheduledRow, ...]
    total_tokens: int
    num_preempted: int
    admitted: tuple[SequenceState, ...]
    with_new_pages: tuple[SequenceState, ...]
    has_drafts: bool = False


class Scheduler:
    """Continuous batching over a paged cache, under one token budget.

    Decode rows come first; prompts fill the rest of the budget and are cut into prefill chunks
    where they do not fit.  Sequences are admitted by priority, then in order of arrival, and never
    overtake another one of the same priority.  When pages run out, or one of a better class waits
    for a slot or for pages, the last sequence in that order is preempted: it loses its pages and is
    recomputed later.  The first one is never preempted, so every sequence ends.

    The pages that a step fills are in the prefix cache as soon as the step is planned.  Other
    sequences may use them even in the same step, because every layer writes the keys and values of
    all rows before any row reads them, and steps run in order.  `discard` removes them where a step
    failed.

    The next step may be planned before `append` has delivered the tokens of the last one (async
    scheduling): a decode row then stands for a token that only the device knows.  Because steps
    run in order, pages may be reused while a planned step still reads them.

    A decode row whose sequence's tokens are all known may have a draft: guesses of the next tokens,
    which the step computes with it. What they write lies behind the sequence's num_computed tokens,
    so that later steps write over it, and no page is in the prefix cache because of them. `accept`
    moves num_computed over the guesses that were right.
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
        num_speculative_tokens: int = 0,
        max_draft_step: int | None = None,
    ):
        """token_budget: tokens per step.  max_positions: the most tokens of a sequence.

        max_num_seqs: the most sequences that run at a time; at most token_budget, so that each can
        decode in every step.  caches_prefixes: whether sequences share the pages of equal prefixes.
        max_shared_prompt: prompts with more tokens share no pages, because their keys depend on
        their length.  num_speculative_tokens: the most tokens of a draft; 0: there are none.
        max_draft_step: the most tokens of a step with drafts, all of its tokens counted; None: the
        token budget.
        """
        self.pages = PageAllocator(num_pages, page_size=page_size)
        self.token_budget = check_token_budget(token_budget)
        check_num_seqs(max_num_seqs, token_budget)
        self.max_num_seqs, self.max_positions = max_num_seqs, max_positions
        self._caches_prefixes, self._max_shared_prompt = caches_prefixes, max_shared_prompt
        self._max_draft = num_speculative_tokens
        self._max_draft_step = min(max_draft_step or token_budget, token_budget)
        # A heap; finished sequences stay in it until they are popped.
        self._waiting: list[tuple[int, int, SequenceState]] = []
        self._num_waiting = 0
        self._running: list[SequenceState] = []  # sorted by sort_key
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._num_arrived = 0
        self.num_preempted = 0  # since the start
        self.num_cached_tokens = 0  # found in the prefix cache instead of computed
        self._next_drafted = 0  # the row of a step that has the first draft
        # Tokens of all drafts, and those of them that were right.
        self.num_draft_tokens = self.num_accepted_tokens = 0

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
        """The most tokens of one sequence, prompt and output, that positions and pages allow.

        The last token needs no slot in a page, because nothing attends to it.
        """
        return min(self.max_positions, self.pages.num_pages * self.pages.page_size + 1)

    def add(self, sequence: SequenceState) -> None:
        """Queues a sequence; InputError where it could not run to its end even alone."""
        prompt = sequence.num_prompt_tokens
        if not prompt:
            raise InputError(
                "the prompt has no tokens; a sequence needs at least one to start from"
            )
        if sequence.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, got {sequence.max_tokens}")
        if prompt + sequence.max_tokens > self.max_tokens:
            raise TooLongError(self._too_long(prompt, sequence.max_tokens))
        if self._max_draft and _may_have_drafts(sequence.params):
            sequence.drafter = NgramDrafter()
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self._enqueue(sequence)

    def schedule(self) -> SchedulerOutput:
        """Plans the next forward pass; it has no rows where there is no work."""
        step = self._begin_step()
        better = self._yield_to_waiting(step) if self._num_waiting else None
        running = self._running if better is None else self._by_class(better, step)
        rows, last = step.rows, self.pages.page_size - 1
        for sequence in running:  # only those at the end are preempted meanwhile
            start, num_tokens = sequence.num_computed, sequence.num_tokens
            offset = start & last
            is_within_page = offset and (offset != last or num_tokens > len(sequence.token_ids))
            if not is_within_page or num_tokens - start != 1:
                self._schedule_running(sequence, step)
                continue
            # A decode row that neither needs a page nor fills one: most rows of most steps.
            fields = (sequence, start, 1, 1, True, sequence.num_preemptions, ())
            rows.append(_new_row(ScheduledRow, fields))
            sequence.num_computed = num_tokens
            sequence.num_tokens = num_tokens + 1
            step.num_decodes -= 1
            step.budget_left -= 1
        if self._num_waiting:
            self._schedule_waiting(step)
        has_drafts = bool(self._max_draft) and self._add_drafts(step)
        num_tokens = self.token_budget - step.budget_left
        admitted, with_new_pages = tuple(step.admitted), tuple(step.with_new_pages)
        return SchedulerOutput(
            tuple(rows), num_tokens, step.num_preempted, admitted, with_new_pages, has_drafts
        )

    def _by_class(self, better: int, step: "_StepBuilder") -> Iterator[SequenceState]:
        """The running sequences; those that wait are admitted between that class and worse ones."""
        yield from islice(self._running, self._num_up_to(better))
        self._schedule_waiting(step, better)
        yield from islice(self._running, self._num_up_to(better), None)

    def _begin_step(self) -> "_StepBuilder":
        """Frees the pages of sequences whose last token is being computed."""
        ending, num_decodes = [], 0
        for sequence in self._running:
            if sequence.num_tokens >= sequence.max_num_tokens:
                if sequence.num_tokens > len(sequence.token_ids):
                    ending.append(sequence)
            elif sequence.num_tokens - sequence.num_computed == 1:
                num_decodes += 1
        for sequence in ending:
            self._free_before_end(sequence)
        return _StepBuilder(self.token_budget, num_decodes)

    def append(self, sequence: SequenceState, token_id: int) -> bool:
        """Appends the token that a step sampled; the step's row must not be stale.

        Returns whether it may be the sequence's last token.
        """
        token_ids = sequence.token_ids
        assert len(token_ids) < sequence.num_tokens
        token_ids.append(token_id)
        return len(token_ids) >= sequence.max_num_tokens or token_id in sequence.stop_token_ids

    def accept(self, sequence: SequenceState) -> None:
        """Counts the last token as computed: it was drafted, and the step sampled the next one."""
        assert sequence.num_computed < len(sequence.token_ids) == sequence.num_tokens
        sequence.num_computed += 1
        sequence.num_tokens += 1
        is_full = sequence.num_computed % self.pages.page_size == 0
        if is_full and self._uses_prefix_cache(sequence):
            self._insert_full_pages(sequence)

    def count_accepted(self, sequence: SequenceState, num_accepted: int) -> None:
        """Counts a draft's tokens that were right; call it before they are appended."""
        assert sequence.drafter is not None
        sequence.drafter.count(num_accepted, len(sequence.token_ids) + 1)
        self.num_accepted_tokens += num_accepted

    def expects_drafts(self) -> bool:
        """Whether to wait for the tokens of the steps in flight, which drafts need.

        Text that repeats itself shows before these tokens are known, so that only the first draft
        of a repetition comes a step late.
        """
        if not self._max_draft or len(self._running) >= self._max_draft_step:
            return False
        num_expected = sum(
            sequence.drafter is not None
            and sequence.num_tokens > len(sequence.token_ids)
            and bool(sequence.drafter.draft(sequence.token_ids, 1))
            for sequence in self._running
        )
        return num_expected > 0 and num_expected >= _MIN_SHARE * len(self._running)

    def finish(self, sequence: SequenceState) -> None:
        """Ends a sequence in any state and frees its pages; a second call does nothing."""
        if sequence.status is Status.WAITING:
            self._num_waiting -= 1
            sequence.status = Status.FINISHED
            if 2 * self._num_waiting + 64 < len(self._waiting):
                self._waiting = [w for w in self._waiting if w[2].status is Status.WAITING]
                heapify(self._waiting)
        else:
            if sequence.status is Status.RUNNING:
                self._remove_running(sequence)
            sequence.status = Status.FINISHED

    def discard(self, sequences: Iterable[SequenceState]) -> None:
        """Ends sequences whose step failed and removes the pages they wrote from the prefix cache.

        Running sequences that share such a page are preempted.
        """
        failed = list(sequences)
        written = {page for sequence in failed for page in sequence.written_pages}
        self.pages.invalidate(written)
        for sequence in failed:
            self.finish(sequence)
        for sequence in [s for s in self._running if not written.isdisjoint(s.pages)]:
            self._preempt(sequence)

    def _schedule_running(self, sequence: SequenceState, step: "_StepBuilder") -> None:
        """Adds the next chunk of a running sequence: one token in decode."""
        if sequence.num_uncomputed == 1:
            step.num_decodes -= 1
            wanted = 1
        else:
            self._reuse_cached_pages(sequence)
            wanted = min(sequence.num_uncomputed, step.budget_left - step.num_decodes)
        num_tokens = min(wanted, self._make_room(sequence, wanted, step))
        if num_tokens > 0:
            self._add_row(sequence, num_tokens, step)

    def _make_room(self, sequence: SequenceState, num_tokens: int, step: "_StepBuilder") -> int:
        """How many more tokens there are pages for, after preempting sequences behind this one.

        A sequence without room keeps its pages and waits until a sequence before it ends.
        """
        pages = self.pages
        needed = pages.pages_for(sequence.num_computed + num_tokens) - len(sequence.pages)
        while needed > pages.num_available and self._running[-1] is not sequence:
            self._preempt(self._running[-1])
            step.num_preempted += 1
        held = len(sequence.pages) + pages.num_available
        return held * pages.page_size - sequence.num_computed

    def _yield_to_waiting(self, step: "_StepBuilder") -> int | None:
        """Preempts running sequences of worse classes until the first waiting one has room.

        Returns its class where worse ones run: it is admitted before them.  None, and nothing is
        preempted, where even all of them would not do.
        """
        first, running = self._peek_waiting(), self._running
        if first is None or not running or first.priority >= running[-1].priority:
            return None
        self._reuse_cached_pages(first)
        num_better = self._num_up_to(first.priority)
        held = sum(len(one.pages) for one in running[num_better:])
        most = self.pages.num_available + held
        has_room = self._has_room(first, running[:num_better], most)
        while has_room and len(running) > num_better:
            if self._free_slots and self._has_room(first, running, self.pages.num_available):
                break
            self._preempt(running[-1])
            step.num_preempted += 1
        self._drop_reused(first)
        return first.priority if has_room else None

    def _has_room(
        self, sequence: SequenceState, running: Sequence[SequenceState], num_available: int
    ) -> bool:
        """Whether so many pages are enough for a sequence beside those that run."""
        missing = sum(self._num_pages_missing(one) for one in (sequence, *running))
        return missing + len(running) <= num_available

    def _num_up_to(self, priority: int) -> int:
        """Running sequences of that class and of better ones, which come first."""
        return bisect_left(self._running, (priority + 1,), key=_SORT_KEY)

    def _schedule_waiting(self, step: "_StepBuilder", worst: int | None = None) -> None:
        """Admits waiting sequences in order until one does not fit.

        worst: the last class that is admitted, before worse ones that run; None: all are.

        A sequence fits when there are pages for all its tokens, beside those that running prompts
        still need and one page for each running sequence. With fewer pages the next steps would
        preempt it again.
        """
        pages = self.pages
        reserved = sum(self._num_pages_missing(s) for s in self._running)
        kept = 0 if worst is None else step.num_decodes
        while step.budget_left > kept and self._free_slots:
            sequence = self._peek_waiting()
            if sequence is None or (worst is not None and sequence.priority > worst):
                return
            self._reuse_cached_pages(sequence)
            needed = self._num_pages_missing(sequence)
            if needed + reserved + len(self._running) > pages.num_available:
                self._drop_reused(sequence)
                return
            heappop(self._waiting)
            self._num_waiting -= 1
            sequence.status = Status.RUNNING
            sequence.slot_index = self._free_slots.pop()
            step.admitted.append(sequence)
            insort(self._running, sequence, key=_SORT_KEY)
            most = step.budget_left - kept
            self._add_row(sequence, min(sequence.num_uncomputed, most), step)
            reserved += self._num_pages_missing(sequence)

    def _reuse_cached_pages(self, sequence: SequenceState) -> None:
        """Adds cached pages that hold the next tokens; the last token is always computed."""
        page_size, first = self.pages.page_size, len(sequence.pages)
        is_at_page = sequence.num_computed == first * page_size
        if not (self._uses_prefix_cache(sequence) and is_at_page) or sequence.num_uncomputed == 1:
            return
        if sequence.scores_prompt and sequence.num_scored < sequence.num_prompt_tokens - 1:
            return
        last = (len(sequence.token_ids) - 1) // page_size
        found = self.pages.find_cached(sequence.page_hashes(first, last, page_size=page_size))
        if found:
            sequence.pages += found
            sequence.skip_cached(first + len(found), page_size=page_size)
            self.num_cached_tokens += len(found) * page_size

    def _drop_reused(self, sequence: SequenceState) -> None:
        """Takes back what `_reuse_cached_pages` gave a waiting sequence."""
        self.num_cached_tokens -= sequence.num_computed
        self.pages.free(sequence.pages)
        sequence.reset_progress()

    def _add_row(self, sequence: SequenceState, num_tokens: int, step: "_StepBuilder") -> None:
        start, pages = sequence.num_computed, self.pages
        end = sequence.num_computed = start + num_tokens
        missing = pages.pages_for(end) - len(sequence.pages)
        if missing > 0:
            taken = pages.allocate(missing)
            sequence.pages += taken
            sequence.written_pages += taken
        step.with_new_pages.append(sequence)
        if self._uses_prefix_cache(sequence):
            self._insert_full_pages(sequence)
        samples = end == sequence.num_tokens
        num_logits = int(samples)
        last_scored = min(end, sequence.num_prompt_tokens - 1)
        if sequence.scores_prompt and last_scored > sequence.num_scored:
            num_logits += last_scored - max(start, sequence.num_scored)
            sequence.num_scored = last_scored
        epoch = sequence.num_preemptions
        step.rows.append(ScheduledRow(sequence, start, num_tokens, num_logits, samples, epoch))
        sequence.num_tokens += samples
        step.budget_left -= num_tokens

    def _add_drafts(self, step: "_StepBuilder") -> bool:
        """Adds drafts to decode rows, from what budget and pages are left. Whether there are any.

        They take only pages beyond one for each running sequence, so that no sequence is preempted
        for them.
        """
        pages, rows, has_drafts = self.pages, step.rows, False
        budget_left = self._max_draft_step - (self.token_budget - step.budget_left)
        if budget_left < 1 or not rows:
            return False
        # Even shares, because a draft's first tokens are right most often; or one token, in turns.
        most_each = min(self._max_draft, max(budget_left // len(rows), 1))
        spare_pages = max(pages.num_available - len(self._running), 0)
        first = self._next_drafted % len(rows)
        for index in (*range(first, len(rows)), *range(first)):
            if budget_left < 1:
                self._next_drafted = index
                break
            row = rows[index]
            sequence, num_known = row.sequence, row.start + 1
            is_decode = row.num_tokens == row.num_logits == 1 and row.samples
            if not is_decode or sequence.drafter is None or num_known != len(sequence.token_ids):
                continue
            free_slots = (len(sequence.pages) + spare_pages) * pages.page_size - num_known
            # The last token needs no slot in a page.
            tokens_left = sequence.max_num_tokens - num_known - 1
            most = min(most_each, budget_left, free_slots, tokens_left)
            draft = sequence.drafter.draft(sequence.token_ids, most)
            if not draft:
                continue
            missing = pages.pages_for(num_known + len(draft)) - len(sequence.pages)
            if missing > 0:
                taken = pages.allocate(missing)
                sequence.pages += taken
                sequence.written_pages += taken
                step.with_new_pages.append(sequence)
                spare_pages -= missing
            num_tokens = 1 + len(draft)
            rows[index] = row._replace(num_tokens=num_tokens, num_logits=num_tokens, draft=draft)
            step.budget_left -= len(draft)
            budget_left -= len(draft)
            self.num_draft_tokens += len(draft)
            has_drafts = True
        return has_drafts

    def _uses_prefix_cache(self, sequence: SequenceState) -> bool:
        limit = self._max_shared_prompt
        return self._caches_prefixes and (limit is None or sequence.num_prompt_tokens <= limit)

    def _insert_full_pages(self, sequence: SequenceState) -> None:
        page_size = self.pages.page_size
        num_full = min(sequence.num_computed, len(sequence.token_ids)) // page_size
        uncached = sequence.take_uncached(num_full)
        if uncached:
            start, stop = uncached.start, uncached.stop
            hashes = sequence.page_hashes(start, stop, page_size=page_size)
            for page, page_hash in zip(sequence.pages[start:stop], hashes, strict=True):
                self.pages.insert(page, page_hash)

    def _num_pages_missing(self, sequence: SequenceState) -> int:
        num_tokens = max(len(sequence.token_ids), sequence.num_computed)
        missing = self.pages.pages_for(num_tokens) - len(sequence.pages)
        return max(missing, 0)  # a draft may have taken one more than its sequence needs

    def _enqueue(self, sequence: SequenceState) -> None:
        sequence.status = Status.WAITING
        heappush(self._waiting, (*sequence.sort_key, sequence))
        self._num_waiting += 1

    def _peek_waiting(self) -> SequenceState | None:
        while self._waiting and self._waiting[0][2].status is not Status.WAITING:
            heappop(self._waiting)
        return self._waiting[0][2] if self._waiting else None

    def _preempt(self, sequence: SequenceState) -> None:
        sequence.num_preemptions += 1
        self.num_preempted += 1
        self._remove_running(sequence)
        self._enqueue(sequence)

    def _remove_running(self, sequence: SequenceState) -> None:
        self._free_resources(sequence)
        sequence.reset_progress()

    def _free_before_end(self, sequence: SequenceState) -> None:
        """Frees the pages for later steps; written_pages stays, because `discard` may need it."""
        self._free_resources(sequence)
        sequence.pages, sequence.slot_index, sequence.status = [], -1, Status.ENDING

    def _free_resources(self, sequence: SequenceState) -> None:
        del self._running[bisect_left(self._running, sequence.sort_key, key=_SORT_KEY)]
        self._free_slots.append(sequence.slot_index)
        self.pages.free(sequence.pages)

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
class _StepBuilder:
    """A step while it is planned.

    num_decodes: decode rows that are not planned yet; prefill chunks leave this much of the budget
    to them.  A preempted decode row still counts.
    """

    budget_left: int
    num_decodes: int
    num_preempted: int = 0
    rows: list[ScheduledRow] = field(default_factory=list)
    admitted: list[SequenceState] = field(default_factory=list)
    with_new_pages: list[SequenceState] = field(default_factory=list)


def _may_have_drafts(params: SamplingParams) -> bool:
    """Whether the choice behind each token of a draft is known in one step.

    It depends on that token where tokens are counted, or given to a logits processor.
    """
    return not (params.has_penalties or params.logits_processors)


_new_row = tuple.__new__  # ScheduledRow(...) takes three times as long
