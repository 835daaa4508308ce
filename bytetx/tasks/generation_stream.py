"""AsyncGeneration: the output of one prompt, piece by piece, from an engine that others use too."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from threading import Condition, Lock, Thread
from typing import NamedTuple

from bytetx.encode.request import RunStats
from bytetx.errors import ClosedError, DeadlineError, QueueFullError, TooLargeError
from bytetx.generate.async_engine import AsyncEngine
from bytetx.generate.engine import GenerationEngine
from bytetx.generate.outputs import RequestOutput
from bytetx.nn.adapted_rows import Adapter
from bytetx.runtime.forking import OwnProcess
from bytetx.sampling_params import SamplingParams

_RETRY_S = 1.0


@dataclass(slots=True, weakref_slot=True)
class PromptGroup:
    """Sums over the prompts of one request, each output's counted.

    A group that exceeds a limit by itself is refused, even if nothing else is open.
    """

    num_outputs: int = 0
    num_tokens: int = 0


_NUM_READERS = 2
_LAST_READ_S = 1.0  # what closing waits for a reader, at most


class GenerationThread:
    """The engine of all prompts of an AsyncModel, made for the first one, and their number.

    Each of a prompt's outputs counts as a request, and has the prompt's tokens in the engine.
    """

    def __init__(
        self, build_engine: Callable[[], GenerationEngine], *, max_outputs: int, max_tokens: int
    ):
        self._build_engine, self._max_outputs = build_engine, max_outputs
        self._max_tokens = max_tokens
        self._engine: AsyncEngine | None = None
        self._building, self._changed = Lock(), Condition()
        self._is_closed = False
        self._process: OwnProcess | None = None
        self.num_open = 0
        # Chats may wait for their template for seconds, and other prompts not for chats. So many
        # long prompts are tokenised at a time.
        self.readers = {
            is_chat: ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="bytetx-prompts")
            for is_chat in (False, True)
        }
        self._num_outputs = self._num_tokens = 0

    def engine(self) -> AsyncEngine:
        """Builds it where there is none; takes as long as allocating the cache."""
        with self._building:
            if self._engine is None:
                if self._is_closed:
                    raise _closed()
                self._process = OwnProcess()
                self._engine = AsyncEngine(self._build_engine())
            return self._engine

    @property
    def draft_counts(self) -> tuple[int, int]:
        """Tokens that were drafted so far, and those of them that were right."""
        return (0, 0) if self._engine is None else self._engine.draft_counts

    @property
    def is_broken(self) -> bool:
        """Whether an error has ended it: every later prompt gets a ClosedError."""
        return self._engine is not None and self._engine.is_broken

    @contextmanager
    def opened(self, num_outputs: int, group: PromptGroup | None) -> Iterator[None]:
        """Around a prompt. Raises QueueFullError where too much is open beside it, or ClosedError.

        A prompt alone is never too much, unless it is of a group: TooLargeError.
        """
        if self._process is not None:
            self._process.check("an AsyncModel that was used")
        with self._changed:
            if self._is_closed:
                raise _closed()
            if group is not None:
                group.num_outputs += num_outputs
                if group.num_outputs > self._max_outputs:
                    raise TooLargeError(
                        f"the request has {group.num_outputs} outputs (n x prompts) or more, and "
                        f"at most {self._max_outputs} may be open (max_queued_requests): lower n, "
                        "or send fewer prompts at a time"
                    )
            if self.num_open and self._num_outputs + num_outputs > self._max_outputs:
                raise _full(
                    f"{self.num_open} prompts are open with {self._num_outputs} outputs, and at "
                    f"most {self._max_outputs} outputs may be (max_queued_requests)"
                )
            self.num_open += 1
            self._num_outputs += num_outputs
        try:
            yield
        finally:
            with self._changed:
                self.num_open -= 1
                self._num_outputs -= num_outputs
                self._changed.notify_all()

    @contextmanager
    def holding(self, num_tokens: int, group: PromptGroup | None) -> Iterator[None]:
        """Around a prompt's time in the engine; errors as of `opened`.

        num_tokens: of the prompt, for each of its outputs.
        """
        with self._changed:
            if group is not None:
                group.num_tokens += num_tokens
                if group.num_tokens > self._max_tokens:
                    raise TooLargeError(
                        f"the prompts of the request have {group.num_tokens} tokens or more, each "
                        f"output's counted (n), and at most {self._max_tokens} may be open "
                        "(max_queued_tokens): lower n, or send fewer or shorter prompts at a time"
                    )
            if self._num_tokens and self._num_tokens + num_tokens > self._max_tokens:
                raise _full(
                    f"the open prompts have {self._num_tokens} tokens, each output's counted, this "
                    f"one {num_tokens}, and at most {self._max_tokens} may be open "
                    "(max_queued_tokens)"
                )
            self._num_tokens += num_tokens
        try:
            yield
        finally:
            with self._changed:
                self._num_tokens -= num_tokens

    def close(self, *, drain_s: float) -> None:
        """Takes no more prompts, waits for open ones that long, and ends the others."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self.num_open, drain_s)
        with self._building:
            if self._engine is not None:
                self._engine.close()
        for reader in self.readers.values():
            # A reader's last frames hold its prompt's error, and with it the model. They end right
            # away, but for a prompt that was given up while it is read.
            ending = Thread(target=reader.shutdown, daemon=True)
            ending.start()
            ending.join(_LAST_READ_S)


class ReadPrompt(NamedTuple):
    """A prompt's token ids, and the params of its answer.

    is_reasoning: whether the prompt has opened the reasoning of the answer.
    """

    token_ids: list[int]
    params: SamplingParams
    is_reasoning: bool


class AsyncGeneration(AsyncIterator[RequestOutput]):
    """The RequestOutputs of one prompt as they are generated, of params.n outputs by their index.

    num_prompt_tokens, is_reasoning (whether a chat's template has opened the reasoning of the
    answer): known with the first piece.
    """

    def __init__(
        self,
        thread: GenerationThread,
        read_prompt: Callable[[], ReadPrompt],
        params: SamplingParams,
        *,
        is_chat: bool,
        priority: int,
        timeout_s: float | None,
        group: PromptGroup | None,
        adapter: Adapter | None = None,
    ):
        """read_prompt: it runs in a thread, as does building the engine.

        group: of the request, for GenerationThread.
        """
        self._is_chat, self._adapter = is_chat, adapter
        self._thread, self._read_prompt, self._params = thread, read_prompt, params
        self._priority, self._timeout_s, self._group = priority, timeout_s, group
        self._pieces: AsyncGenerator[RequestOutput, None] | None = None
        self._start = self._read = self._first = self._last = 0.0
        self._num_tokens = 0
        self.num_prompt_tokens, self.is_reasoning = 0, False

    @property
    def stats(self) -> RunStats:
        """Counts so far, of prompt and outputs.

        queue_seconds: from the token ids to the first piece; compute_seconds: from there on.
        """
        return RunStats(
            num_texts=1,
            num_tokens=self.num_prompt_tokens + self._num_tokens,
            seconds=self._last - self._start,
            tokenize_seconds=self._read - self._start,
            queue_seconds=max(self._first - self._read, 0.0),
            compute_seconds=self._last - self._first if self._first else 0.0,
        )

    def __aiter__(self) -> "AsyncGeneration":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._pieces is None:
            self._start = self._read = self._last = time.perf_counter()
            self._pieces = self._run()
        if self._timeout_s is None:
            return await anext(self._pieces)
        left = self._timeout_s - (time.perf_counter() - self._start)
        try:
            async with asyncio.timeout(left):
                return await anext(self._pieces)
        except TimeoutError as error:
            raise DeadlineError(
                f"the outputs had not ended after timeout_s ({self._timeout_s:g} s)"
            ) from error

    async def aclose(self) -> None:
        """Ends the generation where it has not ended."""
        if self._pieces is not None:
            await self._pieces.aclose()

    async def _run(self) -> AsyncGenerator[RequestOutput, None]:
        with self._thread.opened(self._params.n, self._group):
            reader = self._thread.readers[self._is_chat]
            loop = asyncio.get_running_loop()
            token_ids, params, self.is_reasoning = await loop.run_in_executor(
                reader, self._read_prompt
            )
            self._read = time.perf_counter()
            self.num_prompt_tokens = len(token_ids)
            engine = await asyncio.to_thread(self._thread.engine)
            with self._thread.holding(len(token_ids) * self._params.n, self._group):
                outputs = engine.generate(
                    token_ids, params, priority=self._priority, adapter=self._adapter
                )
                async with aclosing(outputs) as pieces:
                    async for piece in pieces:
                        self._last = time.perf_counter()
                        self._first = self._first or self._last
                        self._num_tokens += len(piece.token_ids)
                        yield piece


def _full(message: str) -> QueueFullError:
    return QueueFullError(f"{message}; try again in {_RETRY_S:.2f} s", retry_after_s=_RETRY_S)


def _closed() -> ClosedError:
    return ClosedError("the AsyncModel is closed; make a new one of the Model")
