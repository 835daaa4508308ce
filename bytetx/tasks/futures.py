"""Results for who waits in an event loop: of another future, and of a caller's own code."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from threading import Thread
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


async def in_own_thread(function: Callable[[], T]) -> T:
    """Runs a caller's code, which may block for as long as it likes, even for ever.

    The thread is its own, for those of asyncio.to_thread are few, and the interpreter waits for
    them at its end.
    """
    loop, context = asyncio.get_running_loop(), copy_context()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # T may be None

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(function)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, result, error)

    Thread(target=run, name="bytetx-input", daemon=True).start()
    return await future
