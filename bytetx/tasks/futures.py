"""One future's result for who waits for another."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def forward(
    source: "asyncio.Future[S]", target: "asyncio.Future[T]", change: Callable[[S], T]
) -> None:
    """The target gets the source's result as `change` makes it, its error, or its cancellation.

    Cancelling the target cancels the source. Both are of one event loop; what `change` raises is
    the target's error.
    """

    def pass_on(_: object) -> None:
        if source.cancelled():
            target.cancel()
            return
        error = source.exception()  # seen, even where nobody waits any more
        if target.done():
            return
        if error is not None:
            target.set_exception(error)
            return
        try:
            target.set_result(change(source.result()))
        except Exception as raised:
            target.set_exception(raised)

    source.add_done_callback(pass_on)
    target.add_done_callback(lambda _: source.cancel())


def as_it_is(result: T) -> T:
    """The change of a result that is passed on as it is."""
    return result
