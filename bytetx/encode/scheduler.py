"""Chooses the texts of a step: windows of the input, steps of at most token_budget tokens."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from bytetx.encode.request import Requests

T = TypeVar("T")

_BUDGET_PARTS = 32  # granularity of step sizes; the buckets of CUDA graphs have the same
# A window ends a little before its steps are full: tokens are only estimated, and steps get equal
# shares, so that a slight excess adds a step and leaves all of them much emptier.
WINDOW_FILL = 31 / 32
# Steps that one window holds at most: enough to order lengths in and to keep the last, partly
# filled step of a window rare, few enough that streaming stays prompt and memory small.
MAX_WINDOW_STEPS = 4


def windows(
    inputs: Iterable[T], *, estimate_tokens: Callable[[T], int], token_budget: int
) -> Iterator[list[T]]:
    """Cuts the input into windows, pulling no more of it than the window that is asked for.

    The first window is about one step long, so that the first forward pass starts at once; each
    next one is twice as long, up to MAX_WINDOW_STEPS steps.  estimate_tokens: a cheap guess of one
    input's tokens; it must be at least 1, so that a window always ends.
    """
    num_steps = 1
    window: list[T] = []
    num_tokens = 0
    for item in inputs:
        window.append(item)
        num_tokens += estimate_tokens(item)
        if num_tokens >= num_steps * token_budget * WINDOW_FILL:
            yield window
            window, num_tokens = [], 0
            num_steps = min(2 * num_steps, MAX_WINDOW_STEPS)
    if window:
        yield window


def plan_steps(requests: Requests, *, token_budget: int) -> list[Requests]:
    """Splits requests into steps of at most token_budget tokens, longest texts first.

    The steps get nearly equal numbers of tokens: a last step of a few texts would cost almost as
    much as a full one.  A request longer than the budget is a step of its own.
    """
    if len(requests) < 2:
        return [requests] if len(requests) else []
    order = np.argsort(-requests.seqlens, kind="stable")
    bounds = _step_bounds(requests.seqlens[order], token_budget)
    return requests.take(order).cut(bounds)


def _step_bounds(seqlens: np.ndarray, token_budget: int) -> list[int]:
    """Where each step starts among lengths that only fall, and their number at the end.

    Each step reaches the even share of what is left, if the budget allows, and is filled up to the
    next part of the budget: a device pads steps to few sizes, so that it costs the same.
    """
    ends = np.cumsum(seqlens, dtype=np.int64)  # tokens up to and with each text
    total_tokens = int(ends[-1])
    part = max(token_budget // _BUDGET_PARTS, 1)
    bounds, tokens_done = [0], 0
    while bounds[-1] < len(seqlens):
        tokens_left = total_tokens - tokens_done
        share = -(-tokens_left // max(1, -(-tokens_left // token_budget)))
        filled, within = np.searchsorted(
            ends, [tokens_done - (-share // part) * part, tokens_done + token_budget], side="right"
        )
        reached = np.searchsorted(ends, tokens_done + share) + 1
        # A text beyond the budget is a step of its own.
        bound = max(int(min(max(reached, filled), within)), bounds[-1] + 1)
        tokens_done = int(ends[bound - 1])
        bounds.append(bound)
    return bounds
