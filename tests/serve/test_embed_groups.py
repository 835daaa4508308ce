"""EmbedGroups: which calls run as one, and what becomes of errors and of clients that leave."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from bytetx.serve.calls import Call, Outcome, Timings
from bytetx.serve.embed_groups import EmbedGroups, is_groupable

LIMITS = (8192, 1 << 20)


class Runs:
    """Runs calls when it is let, and remembers which ones ran together."""

    def __init__(self, error: Exception | None = None):
        self.calls: list[list[Call]] = []
        self.cancelled = 0
        self.may_end = asyncio.Event()
        self.error = error

    def run(self, calls: Sequence[Call]) -> "list[asyncio.Future[Outcome]]":
        self.calls.append(list(calls))
        if self.error is not None:
            raise self.error
        return [asyncio.ensure_future(self._answer(call)) for call in calls]

    async def _answer(self, call: Call) -> Outcome:
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if "bad" in call.inputs:
            raise ValueError(call.inputs[0])
        return Outcome(Timings(len(call.inputs)), arrays=(np.array([len(call.inputs[0])]),))


def call(*texts: str, **options: Any) -> Call:
    return Call("model", "embed", list(texts), options)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def test_calls_of_one_turn_with_the_same_options_run_as_one() -> None:
    async def main() -> None:
        runs, groups = Runs(), EmbedGroups()
        given = [call("a"), call("bb", normalize=True), call("ccc"), call("dddd", "e")]
        waiters = [groups.add(one, runs.run, queue_limits=LIMITS) for one in given]
        runs.may_end.set()
        outcomes = await asyncio.gather(*waiters)
        assert runs.calls == [[given[0], given[2], given[3]], [given[1]]]
        assert [int(outcome.arrays[0][0]) for outcome in outcomes] == [1, 2, 3, 4]
        later = await groups.add(call("f"), runs.run, queue_limits=LIMITS)
        assert later.timings.num_texts == 1 and len(runs.calls) == 3

    run(main())


@pytest.mark.parametrize("limits", [(40, 1 << 20), (8192, 40)])
def test_a_group_is_a_small_part_of_the_queue(limits: tuple[int, int]) -> None:
    async def main() -> None:
        runs, groups = Runs(), EmbedGroups()
        waiters = [groups.add(call("x"), runs.run, queue_limits=limits) for _ in range(25)]
        runs.may_end.set()
        await asyncio.gather(*waiters)
        assert [len(calls) for calls in runs.calls] == [10, 10, 5]

    run(main())


def test_errors() -> None:
    """An error of one call is its alone; an error of all together is each call's."""

    async def main() -> None:
        runs, groups = Runs(), EmbedGroups()
        runs.may_end.set()
        given = [call("a"), call("bad"), call("c")]
        waiters = [groups.add(one, runs.run, queue_limits=LIMITS) for one in given]
        found = await asyncio.gather(*waiters, return_exceptions=True)
        assert [isinstance(one, ValueError) for one in found] == [False, True, False]
        broken = Runs(KeyError("of the engine"))
        broken.may_end.set()
        waiters = [groups.add(one, broken.run, queue_limits=LIMITS) for one in given]
        found = await asyncio.gather(*waiters, return_exceptions=True)
        assert [type(one) for one in found] == [KeyError] * 3

    run(main())


def test_who_leaves_is_not_run() -> None:
    async def main() -> None:
        runs, groups = Runs(), EmbedGroups()
        waiters = [groups.add(call("x"), runs.run, queue_limits=LIMITS) for _ in range(3)]
        waiters[0].cancel()  # before it ran
        while not runs.calls:
            await asyncio.sleep(0)
        assert len(runs.calls[0]) == 2
        await asyncio.sleep(0)
        waiters[1].cancel()
        while not runs.cancelled:
            await asyncio.sleep(0)
        runs.may_end.set()
        assert (await waiters[2]).timings.num_texts == 1

    run(main())


def test_what_is_groupable() -> None:
    assert is_groupable(call("a", "b", truncate=True, left=False))
    assert not is_groupable(call("a", left=True))
    assert not is_groupable(call("a", task="retrieval.query"))
    assert not is_groupable(call("a" * 5000))
    assert not is_groupable(call(*["a"] * 33))
    assert not is_groupable(Call("model", "embed", [[1, 2, 3]], {}))
