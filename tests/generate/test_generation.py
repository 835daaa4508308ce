"""The scheduler of generation over random traces: budgets, pages, order, and the same answers."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from fake_model import FakeModel
from hypothesis import given
from hypothesis import strategies as st

from bytetx.errors import InputError, TooLongError
from bytetx.generate.scheduler import Scheduler, SchedulerOutput, SequenceState, Status
from bytetx.sampling_params import SamplingParams


@dataclass(slots=True)
class Run:
    """A scheduler and the model that its steps run on, checked at every step.

    runs_ahead: what a step gave is known once the next one is planned.
    """

    scheduler: Scheduler
    model: FakeModel
    runs_ahead: bool = False
    num_steps: int = 0
    num_preempted: int = 0
    num_computed: int = 0
    started: dict[SequenceState, None] = field(default_factory=dict)  # in order
    in_flight: list[tuple[SchedulerOutput, list[int | None]]] = field(default_factory=list)

    def step(self) -> SchedulerOutput:
        """Plans, checks and runs a step; sequences that have their last token end."""
        plan = self.scheduler.schedule()
        check_plan(plan, self.scheduler)
        self.started |= dict.fromkeys(row.sequence for row in plan.rows)
        self.num_steps += 1
        self.num_preempted += plan.num_preempted
        self.num_computed += plan.total_tokens
        self.in_flight.append((plan, self.model.next_tokens(plan)))
        while len(self.in_flight) > bool(self.runs_ahead and plan.rows):
            self.collect(*self.in_flight.pop(0))
        return plan

    def collect(self, plan: SchedulerOutput, tokens: list[int | None]) -> None:
        for row, token in zip(plan.rows, tokens, strict=True):
            sequence = row.sequence
            if token is None or row.is_stale or sequence.status is Status.FINISHED:
                continue
            self.scheduler.append(sequence, token)
            is_stop = sequence.stop_token_ids and token in sequence.stop_token_ids
            if is_stop or sequence.num_output_tokens == sequence.max_tokens:
                self.scheduler.finish(sequence)

    def finish(self) -> "Run":
        while self.scheduler.has_work or self.in_flight:
            self.step()
        assert self.scheduler.pages.num_available == self.scheduler.pages.num_pages
        assert (self.scheduler.num_waiting, self.scheduler.num_running) == (0, 0)
        return self


def run_of(
    *,
    num_pages: int = 16,
    page_size: int = 4,
    token_budget: int = 16,
    max_num_seqs: int = 4,
    caches_prefixes: bool = True,
    runs_ahead: bool = False,
) -> Run:
    scheduler = Scheduler(
        num_pages=num_pages,
        page_size=page_size,
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
        max_positions=1 << 20,
        caches_prefixes=caches_prefixes,
    )
    return Run(scheduler, FakeModel(num_pages=num_pages, page_size=page_size), runs_ahead)


def check_plan(plan: SchedulerOutput, scheduler: Scheduler) -> None:
    """Check what holds for every plan, whatever the load."""
    rows = plan.rows
    assert rows or not scheduler.has_work
    assert plan.total_tokens == sum(row.num_tokens for row in rows) <= scheduler.token_budget
    assert len(rows) <= scheduler.num_running <= scheduler.max_num_seqs
    assert len({row.sequence.slot_index for row in rows}) == len(rows)
    writers: Counter[int] = Counter()
    page_size = scheduler.pages.page_size
    for row in rows:
        sequence, end = row.sequence, row.start + row.num_tokens
        assert row.num_tokens > 0 and sequence.status is Status.RUNNING
        assert end == sequence.num_computed
        assert (
            row.samples == (sequence.num_tokens > len(sequence.token_ids))
            and sequence.num_uncomputed > 0
        )
        assert len(sequence.pages) == scheduler.pages.pages_for(end)
        assert len(set(sequence.pages)) == len(sequence.pages)
        writers.update(sequence.pages[row.start // page_size :])
    assert max(writers.values(), default=1) == 1  # nobody else holds what a row writes to
    holders = Counter(page for row in rows for page in row.sequence.pages)
    for row in rows:  # a page that is not full yet has one holder
        is_full = row.sequence.num_computed % page_size == 0
        assert is_full or holders[row.sequence.pages[-1]] == 1


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=24)  # few tokens: prefixes are shared
requests = st.tuples(prompts, st.integers(1, 12), st.integers(0, 2), st.integers(0, 6))
request_lists = st.lists(requests, min_size=1, max_size=12)
sizes = st.fixed_dictionaries(
    {
        "num_pages": st.integers(9, 30),
        "page_size": st.just(4),
        "token_budget": st.integers(4, 20),
        "max_num_seqs": st.integers(1, 4),
        "caches_prefixes": st.booleans(),
        "runs_ahead": st.booleans(),
    }
)


def answer(run: Run, trace: list, order: list[int]) -> dict[int, list[int]]:
    """The output of each request of the trace, added in `order` between steps."""
    sequences = {}
    for number in order:
        prompt, max_tokens, priority, steps_before = trace[number]
        for _ in range(steps_before):
            run.step()
        sequences[number] = SequenceState(list(prompt), max_tokens, priority)
        run.scheduler.add(sequences[number])
    run.finish()
    return {number: sequence.output_ids for number, sequence in sequences.items()}


@given(request_lists, sizes, st.randoms(use_true_random=False))
def test_any_order_of_arrival_gives_the_answers_alone(
    trace: list, size: dict, rng: random.Random
) -> None:
    expected = {
        number: FakeModel(num_pages=1, page_size=1).alone(prompt, max_tokens)
        for number, (prompt, max_tokens, _, _) in enumerate(trace)
    }
    order = list(range(len(trace)))
    assert answer(run_of(**size), trace, order) == expected
    rng.shuffle(order)
    assert answer(run_of(**size), trace, order) == expected


@given(request_lists, sizes)
def test_no_sequence_overtakes_another_one_of_its_priority(trace: list, size: dict) -> None:
    run = run_of(**size)
    answer(run, trace, list(range(len(trace))))
    for priority in range(3):
        arrivals = [s.arrival for s in run.started if s.priority == priority]
        assert arrivals == sorted(arrivals)


def test_a_lower_priority_number_starts_first() -> None:
    run = run_of(max_num_seqs=1)
    late, early = SequenceState([1], 2, priority=1), SequenceState([2], 2, priority=0)
    run.scheduler.add(late)
    run.scheduler.add(early)
    run.finish()
    assert list(run.started) == [early, late]


@pytest.mark.parametrize("size", [{"max_num_seqs": 2}, {"num_pages": 10, "page_size": 4}])
def test_a_better_class_waits_no_longer_than_a_step_for_a_slot_or_pages(size: dict) -> None:
    run = run_of(**size)
    bulk = [SequenceState([number] * 8, 12, priority=1) for number in (1, 2)]
    for sequence in bulk:
        run.scheduler.add(sequence)
    run.step()
    first = SequenceState([3] * 16, 4)
    run.scheduler.add(first)
    plan = run.step()
    assert plan.rows[0].sequence is first and plan.num_preempted == 1
    run.finish()
    expected = [FakeModel(num_pages=1, page_size=1).alone([n] * 8, 12) for n in (1, 2)]
    assert [sequence.output_ids for sequence in bulk] == expected


def test_a_better_class_takes_its_tokens_of_a_step_before_long_prompts_of_worse_ones() -> None:
    run = run_of(num_pages=64, token_budget=8)
    short, long = SequenceState([1], 9, priority=1), SequenceState(list(range(40)), 1, priority=1)
    run.scheduler.add(short)
    run.scheduler.add(long)
    run.step()
    first, second = SequenceState([3] * 9, 2), SequenceState([4] * 2, 1)
    run.scheduler.add(first)
    run.scheduler.add(second)
    plans = [[(row.sequence, row.num_tokens) for row in run.step().rows] for _ in range(3)]
    assert plans[0] == [(first, 7), (short, 1)]  # who decodes goes on
    assert plans[1] == [(first, 2), (second, 2), (short, 1), (long, 3)]
    assert plans[2] == [(first, 1), (short, 1), (long, 6)]
    run.finish()
    assert long.output_ids == FakeModel(num_pages=1, page_size=1).alone(list(range(40)), 1)


def test_nobody_is_preempted_for_a_sequence_that_has_no_room_even_then() -> None:
    run = run_of(num_pages=10, page_size=4)
    better, worse = SequenceState([1] * 24, 4), SequenceState([2] * 4, 8, priority=1)
    run.scheduler.add(better)
    run.scheduler.add(worse)
    run.step()
    first = SequenceState([3] * 20, 1)
    run.scheduler.add(first)
    while better.status is Status.RUNNING:
        assert run.step().num_preempted == 0
    run.step()
    assert first in run.started
    run.finish()
    assert worse.num_preemptions <= 1


def test_pages_that_a_waiting_sequence_shares_need_no_room() -> None:
    run = run_of(num_pages=9, page_size=4, token_budget=64)
    bulk = [SequenceState([*range(20), number], 8, priority=1) for number in (1, 2)]
    for sequence in bulk:
        run.scheduler.add(sequence)
    run.step()
    first = SequenceState([*range(20), 3], 4)
    run.scheduler.add(first)
    plan = run.step()
    assert plan.rows[0].sequence is first and plan.rows[0].num_tokens == 1
    assert plan.num_preempted == 1
    run.finish()


def test_prompts_are_cut_and_share_steps_with_decode_rows() -> None:
    run = run_of(num_pages=32, token_budget=8)
    short, long = SequenceState([1, 2], 8), SequenceState(list(range(30)), 1)
    run.scheduler.add(short)
    run.scheduler.add(long)
    pieces = []
    for _ in range(5):
        plan = run.scheduler.schedule()
        pieces.append([row.num_tokens for row in plan.rows])
        for row, token in zip(plan.rows, run.model.next_tokens(plan), strict=True):
            if token is not None:
                run.scheduler.append(row.sequence, token)
    assert pieces == [[2, 6], [1, 7], [1, 7], [1, 7], [1, 3]]


@pytest.mark.feature("Generation", "prefix cache")
def test_a_shared_prefix_is_computed_once_even_in_one_step() -> None:
    prefix = list(range(40, 72))
    alone, shared = run_of(num_pages=64, token_budget=64), run_of(num_pages=64, token_budget=64)
    alone.scheduler.add(SequenceState(prefix + [1], 1))
    alone.finish()
    for last in range(4):
        shared.scheduler.add(SequenceState([*prefix, last], 1))
    shared.finish()
    assert (alone.num_computed, shared.num_computed) == (33, 33 + 3)
    assert shared.num_steps == 1
    shared.scheduler.add(SequenceState([*prefix, 9], 1))  # and it is there long after
    shared.finish()
    assert shared.num_computed == 33 + 4


def test_a_prompt_in_pieces_is_followed_by_one_that_shares_it() -> None:
    run = run_of(num_pages=64, token_budget=16)
    prompt = list(range(48))
    for _ in range(3):
        run.scheduler.add(SequenceState(list(prompt), 1))
    run.finish()
    assert run.num_computed <= 48 + 2 * 8  # at most two pages twice


def test_scored_prompts_get_every_logit_once_in_spite_of_the_cache() -> None:
    run = run_of(num_pages=12, token_budget=7, max_num_seqs=4)
    scored = [
        SequenceState([1] * 21, 3, params=SamplingParams(prompt_logprobs=0)) for _ in range(4)
    ]
    logits: Counter[tuple[int, int]] = Counter()
    for sequence in scored:
        run.scheduler.add(sequence)
    while run.scheduler.has_work:
        for row in run.step().rows:
            end = row.start + row.num_tokens
            logits.update((row.sequence.arrival, p) for p in range(end - row.num_logits, end))
    assert logits == Counter({(a, p): 1 for a in range(4) for p in range(23)})


def test_a_prompt_that_is_preempted_while_it_is_scored_gets_no_logit_twice() -> None:
    run = run_of(num_pages=12, token_budget=5, max_num_seqs=2, caches_prefixes=False)
    growing = SequenceState([1, 2, 3], 36)  # pieces are of 4 tokens beside it, then of 5
    scored = SequenceState([3] * 40, 1, params=SamplingParams(prompt_logprobs=0))
    run.scheduler.add(growing)
    run.scheduler.add(scored)
    logits: Counter[int] = Counter()
    while run.scheduler.has_work:
        for row in run.step().rows:
            if row.sequence is scored:
                end = row.start + row.num_tokens
                logits.update(range(end - row.num_logits, end))
    assert scored.num_preemptions > 0 and logits == Counter(range(40))


def test_pages_are_inserted_again_after_a_preemption() -> None:
    sequence = SequenceState([1] * 9, 1)
    assert [*sequence.take_uncached(2)] == [0, 1] and not sequence.take_uncached(2)
    sequence.reset_progress()
    assert [*sequence.take_uncached(2)] == [0, 1]


def test_pages_that_run_out_preempt_the_last_and_the_answers_stay() -> None:
    run = run_of(num_pages=8, token_budget=32, caches_prefixes=False)
    sequences = [SequenceState([number] * 6, 20) for number in range(4)]
    for sequence in sequences:
        run.scheduler.add(sequence)
    run.finish()
    assert run.num_preempted > 0 and sequences[0].num_preemptions == 0
    for sequence in sequences:
        assert sequence.output_ids == run.model.alone(sequence.token_ids[:6], 20)


def test_a_cache_that_is_too_small_for_all_costs_little() -> None:
    """Each needs 7 pages and all want to start with 2: without a page kept free for each, the
    last ones would start over and over (27 preemptions here, half of all tokens again)."""
    run = run_of(num_pages=24, token_budget=64, max_num_seqs=8, caches_prefixes=False)
    for number in range(24):
        run.scheduler.add(SequenceState([number] * 6, 20))
    run.finish()
    assert run.num_preempted <= 14 and run.num_computed <= 1.3 * 24 * 25


def test_what_a_failed_step_wrote_is_not_found() -> None:
    run = run_of(token_budget=32)
    bad, mate, other, late = (SequenceState([n] * 9, 4) for n in (5, 5, 6, 5))
    for sequence in (bad, mate, other):
        run.scheduler.add(sequence)
    plan = run.scheduler.schedule()
    assert [row.num_tokens for row in plan.rows] == [9, 1, 9]  # the mate found its pages
    run.model.next_tokens(replace(plan, rows=plan.rows[2:], total_tokens=9))
    run.scheduler.discard([bad])
    assert (mate.num_preemptions, other.num_preemptions) == (1, 0)
    run.scheduler.append(other, run.model.alone([6] * 9, 1)[0])
    run.scheduler.add(late)
    run.finish()
    assert mate.output_ids == late.output_ids == run.model.alone([5] * 9, 4)
    assert other.output_ids == run.model.alone([6] * 9, 4)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "message"),
    [
        ([], 1, InputError, "the prompt has no tokens"),
        ([1], 0, InputError, "max_tokens must be at least 1, got 0"),
        ([1] * 60, 6, TooLongError, "the cache holds 64 tokens \\(16 pages of 4\\)"),
    ],
)
def test_a_request_that_can_never_fit_fails_alone(
    prompt: list[int], max_tokens: int, error: type[Exception], message: str
) -> None:
    run = run_of()
    fits = SequenceState([1] * 60, 5)
    run.scheduler.add(fits)
    with pytest.raises(error, match=message):
        run.scheduler.add(SequenceState(prompt, max_tokens))
    run.finish()
    assert fits.output_ids == run.model.alone([1] * 60, 5)


def test_more_sequences_than_the_budget_are_refused() -> None:
    with pytest.raises(InputError, match=r"max_num_seqs must be 1 ... token_budget \(4\), got 5"):
        run_of(token_budget=4, max_num_seqs=5)


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "ahead"])
def test_soak(runs_ahead: bool) -> None:
    """5 000 requests with stops, aborts and preemptions: every page free, every answer as alone."""
    rng = random.Random(4)
    run = run_of(
        num_pages=100, page_size=4, token_budget=128, max_num_seqs=32, runs_ahead=runs_ahead
    )
    scheduler, open_sequences, num_checked, num_aborted = run.scheduler, [], 0, 0
    heads = [[rng.randrange(97) for _ in range(rng.randrange(60))] for _ in range(20)]
    for _ in range(5000):
        prompt = rng.choice(heads) + [rng.randrange(97) for _ in range(rng.randrange(1, 30))]
        sequence = SequenceState(prompt, rng.randrange(1, 60), priority=rng.randrange(3))
        if rng.random() < 0.2:
            sequence.stop_token_ids = frozenset(rng.sample(range(97), 4))
        scheduler.add(sequence)
        open_sequences.append(sequence)
        if rng.random() < 0.15:
            aborted = rng.choice(open_sequences[-60:])
            num_aborted += aborted.status is not Status.FINISHED
            scheduler.finish(aborted)
        while scheduler.num_waiting > rng.randrange(60):
            run.step()
        if len(open_sequences) > 200:
            num_checked += check_answers(open_sequences, run.model)
            open_sequences = [s for s in open_sequences if s.status is not Status.FINISHED]
    run.finish()
    num_checked += check_answers(open_sequences, run.model)
    assert num_checked == 5000 and min(num_aborted, run.num_preempted) > 300


def check_answers(sequences: list[SequenceState], model: FakeModel) -> int:
    """Compares what each finished sequence has, were it cut short, with the answer alone."""
    finished = [s for s in sequences if s.status is Status.FINISHED]
    for sequence in finished:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert sequence.output_ids == model.alone(prompt, sequence.num_output_tokens)
    return len(finished)
