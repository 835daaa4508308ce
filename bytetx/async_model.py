"""AsyncModel: Model's tasks, awaitable, with the requests of all callers in one queue."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy.typing as npt
import torch

from bytetx.encode.request import RunStats
from bytetx.errors import ClosedError, DeadlineError, QueueFullError
from bytetx.generate.async_engine import AsyncEngine
from bytetx.generate.outputs import RequestOutput
from bytetx.model import Model
from bytetx.requests.prompts import Prompt
from bytetx.sampling_params import SamplingParams
from bytetx.tasks.chunks import Overflow
from bytetx.tasks.embed_all import AllEmbeddings
from bytetx.tasks.options import OnError, Pairs, Texts
from bytetx.tasks.precision import Precision
from bytetx.tasks.results import Embeddings, Hit, Results
from bytetx.tasks.search import Packed, Vectors
from bytetx.tasks.vectors import SparseEmbeddings, TokenEmbeddings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepStats:
    """One forward pass.

    time: of its end, as time.time().  padded_tokens: tokens of the same batch padded to its
    longest text.  seconds: from its start to its results.
    """

    time: float
    num_sequences: int
    total_tokens: int
    padded_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AsyncStats:
    """What an AsyncModel does now, and what it has done since it was made.

    num_queued, queued_tokens: texts that wait, those that are tokenised among them.  num_running:
    texts in forward passes.  num_calls: calls that are not answered.  num_generating: prompts.
    tokens_per_second: of the last forward passes.  num_done, num_failed, num_dropped: texts that
    have a result, an error, or were cancelled or late.  num_refused: calls with a QueueFullError.
    total_tokens, padded_tokens, num_steps: sums over all forward passes.
    recent: the last forward passes, oldest first.
    """

    num_queued: int = 0
    queued_tokens: int = 0
    num_running: int = 0
    num_calls: int = 0
    num_generating: int = 0
    tokens_per_second: float = 0.0
    num_done: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    num_refused: int = 0
    total_tokens: int = 0
    padded_tokens: int = 0
    num_steps: int = 0
    recent: Sequence[StepStats] = ()


class AsyncModel:
    """A Model whose methods are awaited; texts of all callers and tasks are batched together.

    Methods may be awaited in any number of event loops and threads at once, and the Model may be
    used directly meanwhile.  Options and results are those of Model's methods, and
    priority: lower numbers run first.  timeout_s: seconds until a DeadlineError.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_queued_requests: int = 8192,
        max_queued_tokens: int = 1 << 20,
        tokenizer_threads: int | None = None,
        age_limit_s: float = 2.0,
        kv_cache_tokens: int | None = None,
        max_num_seqs: int | None = None,
    ):
        self._model = model
        self._max_queued_requests = max_queued_requests
        self._pool = ThreadPoolExecutor(64, "bytetx-async")
        self._sizes = {"kv_cache_tokens": kv_cache_tokens, "max_num_seqs": max_num_seqs}
        self._engine: AsyncEngine | None = None
        self._num_calls = self._num_generating = 0
        self._is_closed = False

    @property
    def model(self) -> Model:
        return self._model

    async def __aenter__(self) -> "AsyncModel":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self, *, drain_s: float | None = None) -> None:
        """Ends the engine; the Model stays open.

        drain_s: seconds in which calls that were made before may still be answered; the others get
        a ClosedError.  None: all of them get it at once, but for those that are computed already.
        """
        self._is_closed = True
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    def stats(self) -> AsyncStats:
        """What runs and waits now, totals, and the last forward passes."""
        return AsyncStats(num_calls=self._num_calls, num_generating=self._num_generating)

    async def embed(
        self,
        texts: Texts,
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        precision: Precision = "float32",
        ranges: npt.ArrayLike | None = None,
        overflow: Overflow | None = None,
        stride: int = 0,
        truncate: bool = False,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """As Model.embed."""
        return await self._call(
            functools.partial(
                self._model.embed,
                texts,
                prompt=prompt,
                prompt_name=prompt_name,
                dimensions=dimensions,
                pooling=pooling,
                normalize=normalize,
                precision=precision,
                ranges=ranges,
                overflow=overflow,
                stride=stride,
                truncate=truncate,
                on_error=on_error,
            ),
            timeout_s,
        )

    async def embed_all(
        self,
        texts: Texts,
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AllEmbeddings:
        """As Model.embed_all."""
        return await self._call(
            functools.partial(
                self._model.embed_all,
                texts,
                prompt=prompt,
                prompt_name=prompt_name,
                truncate=truncate,
                on_error=on_error,
            ),
            timeout_s,
        )

    async def embed_sparse(
        self,
        texts: Texts,
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_active_dims: int | None = None,
        truncate: bool = False,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> SparseEmbeddings:
        """As Model.embed_sparse."""
        return await self._call(
            functools.partial(
                self._model.embed_sparse,
                texts,
                prompt=prompt,
                prompt_name=prompt_name,
                max_active_dims=max_active_dims,
                truncate=truncate,
                on_error=on_error,
            ),
            timeout_s,
        )

    async def embed_tokens(
        self,
        texts: Texts,
        *,
        task: Literal["query", "document"] = "document",
        prompt: str | None = None,
        prompt_name: str | None = None,
        normalize: bool | None = None,
        precision: Precision = "float32",
        ranges: npt.ArrayLike | None = None,
        truncate: bool = False,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> TokenEmbeddings:
        """As Model.embed_tokens."""
        return await self._call(
            functools.partial(
                self._model.embed_tokens,
                texts,
                task=task,
                prompt=prompt,
                prompt_name=prompt_name,
                normalize=normalize,
                precision=precision,
                ranges=ranges,
                truncate=truncate,
                on_error=on_error,
            ),
            timeout_s,
        )

    async def classify(
        self,
        texts: Texts,
        *,
        top_k: int | None = None,
        raw_scores: bool = False,
        overflow: Overflow | None = None,
        stride: int = 0,
        truncate: bool = False,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[Any]:
        """As Model.classify: list[Label] a text, or its InputError."""
        return await self._call(
            functools.partial(
                self._model.classify,
                texts,
                top_k=top_k,
                raw_scores=raw_scores,
                overflow=overflow,
                stride=stride,
                truncate=truncate,
                on_error=on_error,
            ),
            timeout_s,
        )

    async def tag(
        self,
        texts: Texts,
        *,
        aggregation: str = "simple",
        ignore_labels: Collection[str] = ("O",),
        overflow: Overflow | None = None,
        stride: int = 0,
        truncate: bool = False,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[Any]:
        """As Model.tag: list[Entity] a text, or its InputError."""
        return await self._call(
            functools.partial(
                self._model.tag,
                texts,
                aggregation=aggregation,
                ignore_labels=ignore_labels,
                overflow=overflow,
                stride=stride,
                truncate=truncate,
                on_error=on_error,
            ),
            timeout_s,
        )

    async def fill_mask(
        self,
        texts: Texts,
        *,
        top_k: int = 5,
        targets: Sequence[str] | None = None,
        truncate: bool = False,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[Any]:
        """As Model.fill_mask: list[Fill] a text, or its InputError."""
        return await self._call(
            functools.partial(
                self._model.fill_mask,
                texts,
                top_k=top_k,
                targets=targets,
                truncate=truncate,
                on_error=on_error,
            ),
            timeout_s,
        )

    async def score(
        self,
        texts: Texts,
        *,
        truncate: bool = False,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[Any]:
        """As Model.score: a Likelihood a text, or its InputError."""
        return await self._call(
            functools.partial(self._model.score, texts, truncate=truncate, on_error=on_error),
            timeout_s,
        )

    async def answer(
        self,
        texts: Pairs,
        *,
        top_k: int = 1,
        max_answer_tokens: int = 15,
        allow_no_answer: bool = False,
        whole_words: bool = True,
        chunk_tokens: int | None = None,
        stride: int = 128,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[Any]:
        """As Model.answer: list[Answer] a pair, or its InputError."""
        return await self._call(
            functools.partial(
                self._model.answer,
                texts,
                top_k=top_k,
                max_answer_tokens=max_answer_tokens,
                allow_no_answer=allow_no_answer,
                whole_words=whole_words,
                chunk_tokens=chunk_tokens,
                stride=stride,
                on_error=on_error,
            ),
            timeout_s,
        )

    async def hidden_states(
        self,
        texts: Texts,
        *,
        layers: Sequence[int] = (-1,),
        truncate: bool = False,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[Any]:
        """As Model.hidden_states: an array a text, or its InputError."""
        return await self._call(
            functools.partial(
                self._model.hidden_states,
                texts,
                layers=layers,
                truncate=truncate,
                on_error=on_error,
            ),
            timeout_s,
        )

    async def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        top_k: int | None = None,
        raw_scores: bool = False,
        instruction: str | None = None,
        truncate: bool = False,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Results[Hit]:
        """As Model.rerank."""
        return await self._call(
            functools.partial(
                self._model.rerank,
                query,
                documents,
                top_k=top_k,
                raw_scores=raw_scores,
                instruction=instruction,
                truncate=truncate,
                on_error=on_error,
            ),
            timeout_s,
        )

    async def similarity(self, a: Vectors | Packed, b: Vectors | Packed) -> torch.Tensor:
        """As Model.similarity, in a thread."""
        return await self._call(functools.partial(self._model.similarity, a, b), None)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> "AsyncGeneration":
        """The pieces of the outputs of one prompt as they are generated, params.n of them.

        prompt: a str, token ids, or a chat.  Iterate over the result with `async for`; closing it,
        or cancelling the task that waits for it, ends the generation.
        """
        params = SamplingParams() if params is None else params
        return AsyncGeneration(self, prompt, params, priority=priority, timeout_s=timeout_s)

    async def _call(self, function: Callable[[], T], timeout_s: float | None) -> T:
        if self._is_closed:
            raise ClosedError("the AsyncModel is closed")
        if self._num_calls >= self._max_queued_requests:
            raise QueueFullError("the queue is full", retry_after_s=1.0)
        self._num_calls += 1
        loop = asyncio.get_running_loop()
        try:
            future = loop.run_in_executor(self._pool, function)
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError as error:
            raise DeadlineError(f"no result within timeout_s ({timeout_s:g} s)") from error
        finally:
            self._num_calls -= 1

    def _generation_engine(self) -> AsyncEngine:
        if self._is_closed:
            raise ClosedError("the AsyncModel is closed")
        if self._engine is None:
            self._engine = AsyncEngine(self._model.engine(**self._sizes))
        return self._engine


class AsyncGeneration(AsyncIterator[RequestOutput]):
    """The RequestOutputs of one prompt; `stats` and `num_prompt_tokens` are known once it runs."""

    def __init__(
        self,
        owner: AsyncModel,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int,
        timeout_s: float | None,
    ):
        self._owner, self._prompt, self._params = owner, prompt, params
        self._priority, self._timeout_s = priority, timeout_s
        self._pieces: AsyncIterator[RequestOutput] | None = None
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0

    @property
    def stats(self) -> RunStats:
        return RunStats(num_texts=1, num_tokens=self.num_prompt_tokens + self.num_generated_tokens)

    def __aiter__(self) -> "AsyncGeneration":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._pieces is None:
            engine = await asyncio.to_thread(self._owner._generation_engine)
            (ids,) = await asyncio.to_thread(self._owner.model.encode_prompts, [self._prompt])
            self.num_prompt_tokens = len(ids)
            self._pieces = engine.generate(ids, self._params, priority=self._priority)
        piece = await anext(self._pieces)
        self.num_generated_tokens += len(piece.token_ids)
        return piece

    async def aclose(self) -> None:
        """Ends the generation early."""
        if self._pieces is not None:
            await self._pieces.aclose()  # type: ignore[attr-defined]
