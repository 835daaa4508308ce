"""Which texts run together: windows of the input, and steps of at most a budget of tokens."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from bytetx.engine.request import Request
from bytetx.errors import InputError

T = TypeVar("T")

# Steps that one window holds at most: enough to order lengths in and to keep the last, partly
# filled step of a window rare, few enough that streaming stays prompt and memory small.
MAX_WINDOW_STEPS = 8


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
        if num_tokens >= num_steps * token_budget:
            yield window
            window, num_tokens = [], 0
            num_steps = min(2 * num_steps, MAX_WINDOW_STEPS)
    if window:
        yield window


def plan_steps(requests: Sequence[Request], *, token_budget: int) -> list[list[Request]]:
    """Splits requests into steps of at most token_budget tokens, longest texts first.

    The steps get nearly equal numbers of tokens: a last step of a few texts would cost almost as
    much as a full one.  A request longer than the budget is a step of its own.
    """
    ordered = sorted(requests, key=lambda request: request.num_tokens, reverse=True)
    tokens_left = sum(request.num_tokens for request in ordered)
    steps: list[list[Request]] = []
    step: list[Request] = []
    step_tokens = 0
    target = _even_share(tokens_left, token_budget)
    for request in ordered:
        is_full = step_tokens >= target or step_tokens + request.num_tokens > token_budget
        if step and is_full:
            steps.append(step)
            tokens_left -= step_tokens
            step, step_tokens = [], 0
            target = _even_share(tokens_left, token_budget)
        step.append(request)
        step_tokens += request.num_tokens
    if step:
        steps.append(step)
    return steps


def check_token_budget(token_budget: object) -> int:
    """The budget itself; InputError where it is no positive integer."""
    is_integer = isinstance(token_budget, int) and not isinstance(token_budget, bool)
    if not is_integer or token_budget < 1:
        raise InputError(f"token_budget must be a positive integer, got {token_budget!r}")
    return token_budget


def _even_share(num_tokens: int, token_budget: int) -> float:
    """Tokens a step should take, so that the fewest possible steps share num_tokens evenly."""
    return num_tokens / max(1, -(-num_tokens // token_budget))
