"""Windows and steps: pure Python, nothing is lost, nothing runs over the budget."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytetx.engine.request import Failure, Request, RunCounter
from bytetx.engine.scheduler import MAX_WINDOW_STEPS, check_token_budget, plan_steps, windows
from bytetx.errors import InputError

seqlens_lists = st.lists(st.integers(0, 300), max_size=120)
budgets = st.integers(1, 256)


def requests_of(seqlens: list[int]) -> list[Request]:
    return [Request(index, range(seqlen)) for index, seqlen in enumerate(seqlens)]


@given(seqlens_lists, budgets)
def test_every_request_runs_once_within_the_budget(seqlens: list[int], budget: int) -> None:
    steps = plan_steps(requests_of(seqlens), token_budget=budget)
    assert sorted(request.index for step in steps for request in step) == list(range(len(seqlens)))
    for step in steps:
        num_tokens = sum(request.num_tokens for request in step)
        assert step and (num_tokens <= budget or len(step) == 1)


@given(seqlens_lists, budgets)
def test_steps_take_the_longest_first(seqlens: list[int], budget: int) -> None:
    steps = plan_steps(requests_of(seqlens), token_budget=budget)
    planned = [request.num_tokens for step in steps for request in step]
    assert planned == sorted(seqlens, reverse=True)


@given(st.lists(st.integers(1, 32), min_size=1, max_size=300), st.integers(128, 1024))
def test_short_texts_fill_the_fewest_steps_evenly(seqlens: list[int], budget: int) -> None:
    sizes = [
        sum(request.num_tokens for request in step)
        for step in plan_steps(requests_of(seqlens), token_budget=budget)
    ]
    fewest = -(-sum(seqlens) // budget)
    assert len(sizes) <= fewest + 1 + fewest * 32 // budget
    if len(sizes) == fewest:
        assert max(sizes) - min(sizes) <= 2 * 32 * fewest


@given(st.lists(st.integers(1, 50), max_size=400), st.integers(1, 64))
def test_windows_keep_the_order_and_stay_small(costs: list[int], budget: int) -> None:
    cut = list(windows(costs, estimate_tokens=lambda cost: cost, token_budget=budget))
    assert [cost for window in cut for cost in window] == costs
    for number, window in enumerate(cut):
        limit = min(2**number, MAX_WINDOW_STEPS) * budget
        assert window and sum(window[:-1]) < limit


def test_windows_pull_only_what_is_asked_for() -> None:
    pulled = []

    def endless() -> Iterator[int]:
        while True:
            pulled.append(len(pulled))
            yield pulled[-1]

    cut = windows(endless(), estimate_tokens=lambda _: 1, token_budget=4)
    assert (next(cut), next(cut)) == ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11])
    assert len(pulled) == 12


@given(seqlens_lists)
def test_pad_tokens_are_those_of_batches_of_32(seqlens: list[int]) -> None:
    counter = RunCounter()
    for request in requests_of(seqlens):
        counter.add(request)
    batches = [seqlens[i : i + 32] for i in range(0, len(seqlens), 32)]
    padded = sum(len(batch) * max(batch) for batch in batches)
    assert counter.stats().num_pad_tokens == padded - sum(seqlens)
    assert counter.stats().num_tokens == sum(seqlens)


def test_failures_are_counted_and_the_clock_stops() -> None:
    counter = RunCounter()
    counter.add(Request(0, [1, 2], is_truncated=True))
    counter.add(Failure(1, InputError("bad")))
    counter.stop()
    stats = counter.stats()
    assert (stats.num_texts, stats.num_tokens, stats.num_truncated, stats.num_errors) == (
        2,
        2,
        1,
        1,
    )
    assert stats.seconds == counter.stats().seconds > 0


@pytest.mark.parametrize("token_budget", [0, -1, 1.5, True])
def test_budget_must_be_a_positive_integer(token_budget: object) -> None:
    with pytest.raises(InputError, match="token_budget must be a positive integer"):
        check_token_budget(token_budget)
