"""Windows and steps of a caller alone: nothing is lost, nothing runs over the budget."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytetx.arguments import check_token_budget
from bytetx.encode.engine import EncodeEngine
from bytetx.encode.request import Alignment, Failure, Requests, RunCounter, Window
from bytetx.encode.request_queue import OpenCall, even_share
from bytetx.errors import InputError
from bytetx.tasks.run import MAX_WINDOW_STEPS, windows

seqlens_lists = st.lists(st.integers(0, 300), max_size=120)
budgets = st.integers(1, 256)


def requests_of(seqlens: list[int], *, start: int = 0) -> Requests:
    """Texts whose token ids say which text and which place in it they are."""
    rows = [np.arange(seqlen) + 1000 * row for row, seqlen in enumerate(seqlens)]
    return Requests(
        np.arange(start, start + len(seqlens)),
        np.array(seqlens, dtype=np.int32),
        np.concatenate([np.empty(0, np.int32), *rows], dtype=np.int32),
        np.zeros(len(seqlens), dtype=bool),
    )


def plan_steps(requests: Requests, *, token_budget: int) -> list[Requests]:
    """The texts of each step, with the indices of the call."""
    engine = EncodeEngine(SimpleNamespace(prefix_multiple=0), token_budget=token_budget)
    call = OpenCall(SimpleNamespace(key="task"), None)
    steps = engine.plan(call, requests)
    assert all(share.call is call for step in steps for share in step.shares)
    assert call.num_open == len(requests) and not call.num_queued
    found = []
    for step in steps:
        indices = np.concatenate([share.requests.indices for share in step.shares])
        found.append(replace(step.requests, indices=indices))
    return found


@given(seqlens_lists, budgets)
def test_every_request_runs_once_within_the_budget(seqlens: list[int], budget: int) -> None:
    steps = plan_steps(requests_of(seqlens), token_budget=budget)
    indices = [index for step in steps for index in step.indices.tolist()]
    assert sorted(indices) == list(range(len(seqlens)))
    for step in steps:
        assert len(step) and (step.total_tokens <= budget or len(step) == 1)


@given(seqlens_lists, budgets)
def test_a_step_ends_where_the_next_text_exceeds_its_share(seqlens: list[int], budget: int) -> None:
    """The shortest texts come first, as many as have an even share of what is left."""
    waiting = sorted(seqlens)
    for step in plan_steps(requests_of(seqlens), token_budget=budget):
        own, waiting = waiting[: len(step)], waiting[len(step) :]
        assert sorted(step.seqlens.tolist()) == own
        share = even_share(sum(own) + sum(waiting), budget) if any(own + waiting) else 0
        assert sum(own) <= share or len(own) == 1
        assert not waiting or sum(own) + waiting[0] > share
    assert not waiting


@given(st.integers(1, 5000), budgets)
def test_shares_are_even(num_tokens: int, budget: int) -> None:
    share, part = even_share(num_tokens, budget), max(budget // 32, 1)
    num_steps = -(-num_tokens // budget)
    assert share <= budget and share * num_steps >= num_tokens
    assert share < -(-num_tokens // num_steps) + part


@given(seqlens_lists, budgets, st.booleans())
def test_every_column_goes_with_its_text(seqlens: list[int], budget: int, has_all: bool) -> None:
    requests = requests_of(seqlens)
    if has_all:
        requests = replace(
            requests,
            token_type_ids=requests.token_ids % 7,
            prompt_tokens=requests.seqlens // 2,
            is_truncated=requests.indices % 3 == 0,
            alignments=[Alignment(str(index), None, None, []) for index in requests.indices],
        )
    for step in plan_steps(requests, token_budget=budget):
        rows = zip(step.indices.tolist(), step.split(), step.seqlens.tolist(), strict=True)
        for index, ids, seqlen in rows:
            assert seqlen == seqlens[index]
            assert ids.tolist() == list(range(1000 * index, 1000 * index + seqlen))
        if has_all:
            assert (step.token_type_ids == step.token_ids % 7).all()
            assert (step.prompt_tokens == step.seqlens // 2).all()
            assert (step.is_truncated == (step.indices % 3 == 0)).all()
            assert [alignment.text for alignment in step.alignments] == [
                str(index) for index in step.indices
            ]


@given(seqlens_lists)
def test_a_step_alone_has_the_longest_first(seqlens: list[int]) -> None:
    """Ties stay as they came."""
    steps = plan_steps(requests_of(seqlens), token_budget=1 << 20)
    order = sorted(range(len(seqlens)), key=lambda row: -seqlens[row])
    assert [step.indices.tolist() for step in steps] == ([order] if seqlens else [])


@given(st.lists(st.integers(1, 32), min_size=1, max_size=300), st.integers(128, 1024))
def test_short_texts_fill_the_fewest_steps_evenly(seqlens: list[int], budget: int) -> None:
    steps = plan_steps(requests_of(seqlens), token_budget=budget)
    sizes = [step.total_tokens for step in steps]
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


@given(seqlens_lists, st.integers(1, 120))
def test_pad_tokens_are_those_of_batches_of_32(seqlens: list[int], window: int) -> None:
    counter = RunCounter()
    for start in range(0, len(seqlens), window):
        requests = requests_of(seqlens[start : start + window], start=start)
        counter.add(Window(start, len(requests), requests))
    batches = [seqlens[i : i + 32] for i in range(0, len(seqlens), 32)]
    padded = sum(len(batch) * max(batch) for batch in batches)
    assert counter.stats().num_pad_tokens == padded - sum(seqlens)
    assert counter.stats().num_tokens == sum(seqlens)


def test_failures_are_counted_and_the_clock_stops() -> None:
    counter = RunCounter()
    requests = replace(requests_of([2]), is_truncated=np.array([True]))
    counter.add(Window(0, 2, requests, [Failure(1, InputError("bad"))]))
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
