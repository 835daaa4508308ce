"""Small calls of `embed` that come together run as one: a call costs more than its text."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bytetx.serve.calls import Call, Outcome
from bytetx.tasks.futures import as_it_is, forward

# A larger call gains nothing: it has much to compute.
_MAX_TEXTS, _MAX_CHARACTERS = 32, 4096
_MAX_GROUP_TEXTS = 512
_PART_OF_QUEUE = 4  # a group may be this fraction (1 / 4) of what may wait

Run = Callable[[Sequence[Call]], "Sequence[asyncio.Future[Any]]"]


@dataclass(slots=True)
class _Group:
    """Calls of one turn of the event loop, and who waits for them."""

    run: Run
    calls: list[Call] = field(default_factory=list)
    waiters: list[asyncio.Future[Outcome]] = field(default_factory=list)
    num_texts: int = 0
    num_characters: int = 0


class EmbedGroups:
    """Groups calls that arrive in one turn of the event loop and ask for the same.

    Where the loop is idle a call runs at once and alone; the busier it is, the more calls a turn
    has, and the less each of them costs.
    """

    def __init__(self, outcome_of: Callable[[Any], Outcome] = as_it_is):
        """outcome_of: makes the outcome of a call from what `run` gives for it."""
        self._outcome_of = outcome_of
        self._groups: dict[tuple[str, str], _Group] = {}

    def add(
        self, call: Call, run: Run, *, queue_limits: tuple[int, int]
    ) -> "asyncio.Future[Outcome]":
        """The call's outcome, or its error; cancel it where nobody waits for it any more.

        run: of calls to one model with the same options.  queue_limits: texts and tokens that may
        wait for that model.
        """
        key = call.model, repr(sorted(call.options.items()))
        num_texts, num_characters = len(call.inputs), sum(map(len, call.inputs))
        most_texts = min(_MAX_GROUP_TEXTS, queue_limits[0] // _PART_OF_QUEUE)
        most_characters = queue_limits[1] // _PART_OF_QUEUE  # a token has one or more
        group = self._groups.get(key)
        if (
            group is None
            or group.num_texts + num_texts > most_texts
            or group.num_characters + num_characters > most_characters
        ):
            group = self._groups[key] = _Group(run)
            asyncio.get_running_loop().call_soon(self._start, key, group)
        waiter: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        group.calls.append(call)
        group.waiters.append(waiter)
        group.num_texts += num_texts
        group.num_characters += num_characters
        return waiter

    def _start(self, key: tuple[str, str], group: _Group) -> None:
        if self._groups.get(key) is group:
            del self._groups[key]
        wanted = [
            (call, waiter)
            for call, waiter in zip(group.calls, group.waiters, strict=True)
            if not waiter.done()
        ]
        if not wanted:
            return
        try:
            answers = group.run([call for call, _ in wanted])
        except Exception as error:  # wrong options
            for _, waiter in wanted:
                waiter.set_exception(error)
            return
        for (_, waiter), answer in zip(wanted, answers, strict=True):
            forward(answer, waiter, self._outcome_of)


def is_groupable(call: Call) -> bool:
    """Whether a call of `embed` may wait for those that come with it."""
    options = call.options
    if len(call.inputs) > _MAX_TEXTS or options.get("task") or options.get("left"):
        return False
    return all(type(text) is str for text in call.inputs) and (
        sum(map(len, call.inputs)) <= _MAX_CHARACTERS
    )
