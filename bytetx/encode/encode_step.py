"""EncodeStep: texts of several calls that run together, and the steps that a queue's texts make."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bytetx.encode.model_runner import Launched
from bytetx.encode.request import Requests, join_requests
from bytetx.encode.request_queue import OpenCall, Taken
from bytetx.encode.step import SharedPass, Task, TaskRows, is_head

# A step is long where calls with at least so many tokens in it have half of its tokens. A call is
# short beside it where the largest of these shares is so many times as long.
_LONG_TOKENS, _SHORT = 256, 8


@dataclass(slots=True, eq=False)
class Share:
    """Texts of one call in a step, its rows start to stop.

    requests: with the call's indices.  num_tokens: to compute, common prefixes once.
    queued_time: when they were queued.
    """

    call: OpenCall
    requests: Requests
    num_tokens: int
    queued_time: float
    start: int = 0
    stop: int = 0


@dataclass(slots=True, eq=False)
class EncodeStep:
    """Texts that run together.

    requests: the texts of all shares, numbered from 0.
    short_tokens: of a call that is short beside the step; 0 where none is.
    nested_tokens, nested_seconds: of short steps that ran between its layers.
    launched: None until it was started, and where that failed.
    """

    shares: list[Share]
    calls: list[OpenCall]
    requests: Requests
    task: Task[Any] | SharedPass
    short_tokens: int = 0
    start_time: float = 0.0
    nested_tokens: int = 0
    nested_seconds: float = 0.0
    launched: Launched | None = None

    def is_ready(self) -> bool:
        """Whether `EncodeEngine.collect` returns at once."""
        return self.launched is None or self.launched.is_ready()


def steps_of(taken: Sequence[Taken]) -> list[EncodeStep]:
    """Steps of texts: one of all tasks that share a pass, and one of each other task."""
    by_key: dict[Any, list[Share]] = {}
    for some in taken:
        share = Share(some.call, some.requests(), some.total_tokens, some.texts.time)
        by_key.setdefault(share.call.key, []).append(share)
    sharing: list[list[Share]] = []
    steps: list[EncodeStep] = []
    for group in by_key.values():
        if is_head(group[0].call.task):
            sharing.append(group)
        else:
            steps.append(step_of([group]))
    return [step_of(sharing), *steps] if sharing else steps


def step_of(groups: Sequence[Sequence[Share]]) -> EncodeStep:
    """The texts of some tasks, those of each task together."""
    parts: list[TaskRows] = []
    tokens: dict[OpenCall, int] = {}
    start = 0
    for group in groups:
        first = start
        for share in group:
            share.start, start = start, start + len(share.requests)
            share.stop = start
            tokens[share.call] = tokens.get(share.call, 0) + share.num_tokens
        parts.append(TaskRows(group[0].call.task, first))
    shares = [share for group in groups for share in group]
    requests = join_requests([share.requests for share in shares])
    large = [count for count in tokens.values() if count >= _LONG_TOKENS]
    is_long = 2 * sum(large) >= sum(tokens.values())
    short_tokens = max(large, default=0) // _SHORT if is_long else 0
    task = SharedPass(parts) if len(parts) > 1 else parts[0].task
    return EncodeStep(shares, list(tokens), requests, task, short_tokens)
