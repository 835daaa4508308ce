"""The queue of all callers: order, priorities, ageing, bounded steps, and what it forgets."""

import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytetx.encode.request import Requests
from bytetx.encode.request_queue import OpenCall, RequestQueue, Taken

AGE_LIMIT_S = 10.0


def new_call(priority: int = 0) -> OpenCall:
    """One that never runs."""
    return OpenCall(None, None, priority=priority)


def requests(seqlens: Sequence[int], *, first_index: int = 0) -> Requests:
    """Texts whose tokens are their own indices."""
    lengths = np.array(seqlens, dtype=np.int32)
    indices = np.arange(first_index, first_index + len(lengths))
    return Requests(
        indices,
        lengths,
        np.repeat(indices.astype(np.int32), lengths),
        np.zeros(len(lengths), dtype=bool),
    )


def new_queue(*, age_limit_s: float = AGE_LIMIT_S) -> RequestQueue:
    return RequestQueue(age_limit_s=age_limit_s)


def add(
    queue: RequestQueue,
    *seqlens: int,
    priority: int = 0,
    now: float = 0.0,
    call: OpenCall | None = None,
) -> OpenCall:
    call = new_call(priority) if call is None else call
    queue.add(call, requests(seqlens), now)
    return call


def lengths(taken: Sequence[Taken]) -> list[int]:
    return [length for some in taken for length in some.requests().seqlens.tolist()]


def tokens(taken: Sequence[Taken]) -> int:
    return sum(some.total_tokens for some in taken)


def test_single_texts_run_the_shortest_first() -> None:
    queue = new_queue()
    for length in (50, 10, 40, 20, 30):
        add(queue, length)
    assert lengths(queue.take(60, 0.0)) == [10, 20, 30]
    assert lengths(queue.take(60, 0.0)) == [40]  # 50 does not fit behind it
    assert lengths(queue.take(60, 0.0)) == [50]
    assert not queue and queue.take(60, 0.0) == []


def test_equal_texts_run_in_the_order_of_their_calls() -> None:
    queue = new_queue()
    calls = [add(queue, 5) for _ in range(8)]
    assert [some.call for some in queue.take(20, 0.0)] == calls[:4]
    assert [some.call for some in queue.take(20, 0.0)] == calls[4:]


def test_all_that_fits_is_taken_as_it_was_queued() -> None:
    """With nothing to choose, a call's texts stay together."""
    queue = new_queue()
    late = add(queue, 4, priority=1)
    calls = [add(queue, *[5] * 8) for _ in range(4)]
    dropped = add(queue, 7)
    queue.drop(dropped)
    taken = queue.take(164, 0.0)
    assert [some.call for some in taken] == [*calls, late]
    assert [some.num_texts for some in taken] == [8, 8, 8, 8, 1]
    assert not queue and queue.queued_tokens == 0 and queue.num_entries == 0


def test_bulk_calls_take_turns_by_shares_of_a_step() -> None:
    queue = new_queue()
    calls = [add(queue, *[5] * 100) for _ in range(4)]
    taken = queue.take(640, 0.0)
    assert tokens(taken) == 640
    assert {some.call for some in taken} == set(calls)
    assert max(some.total_tokens for some in taken) <= 160
    assert len(taken) <= 640 // 80


def test_lower_priorities_run_first_whatever_their_length() -> None:
    queue = new_queue()
    slow, fast = add(queue, 5, priority=1), add(queue, 90, priority=-1)
    middle = add(queue, 20)
    assert [some.call for some in queue.take(95, 0.0)] == [fast, slow]  # what fits joins it
    assert [some.call for some in queue.take(95, 0.0)] == [middle]


def test_a_call_of_many_texts_comes_after_single_ones() -> None:
    """Every text of 10: the bulk call has one, then others that came later, then it goes on."""
    queue = new_queue()
    bulk = add(queue, *[10] * 1000)
    assert tokens(queue.take(100, 0.0)) == 100
    singles = [add(queue, 10) for _ in range(5)]
    step = queue.take(100, 0.0)
    assert [some.call for some in step] == [*singles, bulk]
    assert tokens(step) == 100


def test_bulk_calls_take_turns_once_both_had_much() -> None:
    queue = new_queue()
    first = add(queue, *[100] * 2000)
    second = None
    had = {}
    for step in range(1700):
        if step == 800:
            second = add(queue, *[100] * 2000)
        for some in queue.take(100, 0.0):
            had[some.call] = had.get(some.call, 0) + some.total_tokens
    assert had[first] >= 80_000
    assert had[second] >= 65_536  # it caught up to where calls count as equal


def test_a_long_text_waits_for_one_step_at_most_once_it_was_passed_over() -> None:
    """Short texts keep coming; the long one has every second step at the latest."""
    queue = new_queue()
    long = add(queue, 500)
    add(queue, *[5] * 10)
    seen = []
    for _ in range(3):
        add(queue, 5)
        seen.append([some.call for some in queue.take(100, 0.0)])
    assert [long in step for step in seen] == [False, True, False]
    assert seen[1] == [long]


def test_the_short_texts_behind_a_long_one_wait_for_one_step() -> None:
    queue = new_queue()
    for _ in range(20):
        add(queue, 500)
    assert lengths(queue.take(100, 0.0)) == [500]
    add(queue, 7)
    assert lengths(queue.take(100, 0.0)) == [7]
    assert lengths(queue.take(100, 0.0)) == [500]


def test_old_texts_go_first_in_half_of_a_step() -> None:
    queue = new_queue()
    old = [add(queue, 40, now=0.0, priority=5) for _ in range(4)]
    late = AGE_LIMIT_S + 1
    for _ in range(20):
        add(queue, 10, now=late)
    step = queue.take(100, late)
    assert step[0].call is old[0]
    assert lengths(step) == [40, *[10] * 6]
    assert queue.take(100, late)[0].call is old[1]


def test_nothing_starves_under_short_texts_of_a_better_class() -> None:
    queue = new_queue()
    waiting = {add(queue, length, priority=3) for length in (30, 300, 90)}
    for now in range(40):
        add(queue, *[10] * 10, now=float(now), priority=0)
        waiting -= {some.call for some in queue.take(50, float(now))}
        if not waiting:
            break
    assert not waiting and AGE_LIMIT_S <= now <= AGE_LIMIT_S + 3


def test_dropped_calls_leave_nothing() -> None:
    queue = new_queue()
    kept = add(queue, 10)
    calls = [add(queue, 5, 6, 7, call=new_call()) for _ in range(5000)]
    refs = [weakref.ref(call) for call in calls]
    for call in calls:
        queue.drop(call)
    assert (queue.num_queued, queue.queued_tokens) == (1, 10)
    assert queue.num_entries < 200
    del calls, call
    gc.collect()
    assert sum(ref() is not None for ref in refs) < 200
    assert [some.call for some in queue.take(100, 0.0)] == [kept]
    assert queue.take(100, 0.0) == []


def test_a_dropped_call_is_not_taken_though_it_was_passed_over() -> None:
    queue = new_queue()
    add(queue, 60)
    long = add(queue, 80)
    assert lengths(queue.take(100, 0.0)) == [60]
    queue.drop(long)
    assert queue.take(100, 0.0) == []


def test_short_texts_alone_between_layers() -> None:
    queue = new_queue()
    add(queue, 60)
    add(queue, 4)
    add(queue, 5)
    assert lengths(queue.take_short(8)) == [4]  # both together are more
    assert lengths(queue.take_short(8)) == [5]
    assert queue.take_short(8) == []
    assert lengths(queue.take(100, 0.0)) == [60]


def test_between_layers_a_better_class_is_not_overtaken() -> None:
    queue = new_queue()
    add(queue, 60, priority=0)
    add(queue, 4, priority=1)
    assert queue.take_short(8) == []


@given(
    calls=st.lists(
        st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(-1, 1)),
        max_size=20,
    ),
    budget=st.integers(1, 100),
    dropped=st.sets(st.integers(0, 19)),
)
def test_every_text_is_taken_once_in_bounded_steps(
    calls: list[tuple[list[int], int]], budget: int, dropped: set[int]
) -> None:
    queue = new_queue(age_limit_s=3.0)
    queued: dict[OpenCall, list[int]] = {}
    for number, (seqlens, priority) in enumerate(calls):
        call = add(queue, *seqlens, priority=priority, now=float(number % 3))
        if number in dropped:
            queue.drop(call)
        else:
            queued[call] = sorted(seqlens)
    assert queue.num_queued == sum(map(len, queued.values()))
    now, got = 0.0, {call: [] for call in queued}
    while queue:
        step = queue.take(budget, now)
        assert step and (tokens(step) <= budget or len(lengths(step)) == 1)
        for some in step:
            part = some.requests()
            got[some.call] += part.seqlens.tolist()[::-1]  # the longest of a step first
            assert part.total_tokens == some.total_tokens
        now += 1.0
    assert got == queued
    assert (queue.num_queued, queue.queued_tokens) == (0, 0)


@pytest.mark.parametrize("age_limit_s", [0.0, 5.0])
def test_an_empty_piece_is_nothing(age_limit_s: float) -> None:
    queue = new_queue(age_limit_s=age_limit_s)
    add(queue)
    assert not queue and queue.take(10, 100.0) == []
