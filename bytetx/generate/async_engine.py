"""AsyncEngine: runs a GenerationEngine in its own thread, for callers in an event loop."""

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Thread

from bytetx.errors import ClosedError, ForkError
from bytetx.generate.engine import GenerationEngine
from bytetx.generate.guidance import made_guide
from bytetx.generate.outputs import RequestOutput
from bytetx.generate.scheduler import SequenceAdapter
from bytetx.sampling_params import SamplingParams


@dataclass(slots=True)
class _Listener:
    """The caller of a request, and how many of the request's outputs have not ended."""

    put: Callable[[RequestOutput | BaseException], None]
    num_open: int


class AsyncEngine:
    """Runs steps while there is work and sleeps otherwise; used as a context manager.

    A caller that stops listening aborts its request. An error that no request caused ends all
    requests with that error and closes the engine.
    """

    def __init__(self, engine: GenerationEngine):
        self._engine = engine
        self._changed = Condition()
        self._calls: deque[Callable[[], None]] = deque()  # for the thread, in order
        self._is_closed = False
        self._error: BaseException | None = None
        self._listeners: dict[int, _Listener] = {}  # only the thread uses it
        self._pid = os.getpid()  # a forked child has a copy of this object, but not the thread
        self._thread = Thread(target=self._run, name="bytetx-generation", daemon=True)
        self._thread.start()

    @property
    def draft_counts(self) -> tuple[int, int]:
        """Tokens that were drafted so far, and those of them that were right."""
        return self._engine.draft_counts

    @property
    def is_broken(self) -> bool:
        """Whether an error has closed the engine."""
        return self._error is not None

    def __enter__(self) -> "AsyncEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread after the current step; open requests end with a ClosedError."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        adapter: SequenceAdapter | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the request's outputs as they are generated, until all of them have ended.

        Raises InputError where the request could never run. Closing the iterator, or cancelling
        the task that waits for it, aborts the request.
        """
        loop = asyncio.get_running_loop()
        guide = None
        if params.structured_outputs is not None:
            compiling = self._engine.compile_guide(params.structured_outputs)
            try:  # shielded, because other requests may wait for this grammar, too
                guide = made_guide(await asyncio.shield(asyncio.wrap_future(compiling)))
            except asyncio.CancelledError:
                self._engine.leave_guide(compiling)
                raise
        queue: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()
        request_ids: list[int] = []  # written by the thread, once

        def put(item: RequestOutput | BaseException) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def add() -> None:
            try:
                request_id = self._engine.add_request(
                    prompt_ids, params, priority=priority, adapter=adapter, guide=guide
                )
            except Exception as error:  # the engine took nothing of the request
                put(error)
                return
            request_ids.append(request_id)
            self._listeners[request_id] = _Listener(put, params.n)

        self._call(add)
        num_open = params.n
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, BaseException):
                    num_open = 0
                    raise item
                num_open -= item.finish_reason is not None
                yield item
        finally:
            if num_open:
                self._call(lambda: self._abort(request_ids), quietly=True)

    def _call(self, function: Callable[[], None], *, quietly: bool = False) -> None:
        """Has the thread call a function before its next step.

        quietly: does nothing where there is no thread any more, instead of raising.
        """
        if os.getpid() != self._pid:
            if quietly:
                return
            raise ForkError(
                "the engine's thread runs in the process that this one was forked from; make an "
                "AsyncEngine in this process"
            )
        with self._changed:
            if self._is_closed and not quietly:
                raise ClosedError("the engine is closed") from self._error
            self._calls.append(function)
            self._changed.notify()

    def _abort(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            self._listeners.pop(request_id, None)
            self._engine.abort(request_id)

    def _run(self) -> None:
        try:
            while self._wait():
                for output in self._engine.step():
                    self._post(output)
            error: BaseException = ClosedError("the engine was closed before the outputs ended")
        except BaseException as raised:
            error = self._error = raised
        with self._changed:
            self._is_closed = True
            calls, self._calls = self._calls, deque()
        for call in calls:  # requests that came too late get the same error
            call()
        for request_id, listener in self._listeners.items():
            self._engine.abort(request_id)
            listener.put(error)
        self._listeners.clear()

    def _wait(self) -> bool:
        """Runs the calls and waits until there is work; False once the engine is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._calls or self._is_closed or self._engine.has_work
                )
                if self._is_closed:
                    return False
                calls, self._calls = self._calls, deque()
            for call in calls:
                call()
            if self._engine.has_work:
                return True

    def _post(self, output: RequestOutput) -> None:
        listener = self._listeners.get(output.request_id)
        if listener is None:
            return
        listener.put(output)
        listener.num_open -= output.finish_reason is not None
        if not listener.num_open:
            del self._listeners[output.request_id]
