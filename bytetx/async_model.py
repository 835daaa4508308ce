"""AsyncModel: Model's tasks, awaitable, with the requests of all callers in one queue."""

import asyncio
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, Literal, TypeVar

import numpy.typing as npt
import torch

from bytetx.arguments import check_draft_size, check_integer, check_positive, check_seconds
from bytetx.checkpoint.chat_template import checked_options
from bytetx.encode.engine import EncodeEngine
from bytetx.encode.request import Span
from bytetx.errors import DeadlineError
from bytetx.model import Model
from bytetx.requests.prompts import Prompt, is_chat
from bytetx.sampling_params import SamplingParams
from bytetx.tasks.async_stats import AsyncStats, engine_stats
from bytetx.tasks.call import Call
from bytetx.tasks.call_run import CallRun
from bytetx.tasks.chunks import Overflow
from bytetx.tasks.embed_all import AllEmbeddings
from bytetx.tasks.futures import in_own_thread
from bytetx.tasks.generation_stream import AsyncGeneration, GenerationThread, PromptGroup
from bytetx.tasks.grouped_run import GroupedRun
from bytetx.tasks.options import OnError, Pairs, Texts
from bytetx.tasks.precision import Precision
from bytetx.tasks.reading_pool import ReadingPool
from bytetx.tasks.results import Embeddings, Hit, Results
from bytetx.tasks.search import Packed, Vectors
from bytetx.tasks.vectors import SparseEmbeddings, TokenEmbeddings

T = TypeVar("T")

# Those of `embed` where a caller gives none.
_EMBED_OPTIONS = {
    name: parameter.default
    for name, parameter in signature(Model.embed).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name in signature(Model._embed_call).parameters
}
# Options with which texts are cut or results depend on all texts, or that read an adapter first.
_CUT_OR_JOINED = {"task", "overflow", "stride", "precision", "ranges"}


class AsyncModel:
    """A Model whose methods are awaited; texts of all callers and tasks are batched together.

    Methods may be awaited in any number of event loops and threads at once, and the Model may be
    used directly meanwhile.  The routes of a checkpoint with a Router are models of their own, and
    each has a queue.  Options and results are those of Model's methods, and
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
        num_speculative_tokens: int = 0,
    ):
        """max_queued_requests, max_queued_tokens: of texts and prompts that wait; where they are
        reached, a call gets a QueueFullError at once. An empty queue takes a call of any size.
        tokenizer_threads: None is one for every two CPUs, at most 8.
        age_limit_s: a text that has waited so long goes before shorter ones and other priorities.
        kv_cache_tokens, max_num_seqs, num_speculative_tokens: as of Model.engine, for generate.
        Threads start with the first call.
        """
        check_positive("max_queued_requests", max_queued_requests)
        check_positive("max_queued_tokens", max_queued_tokens)
        if tokenizer_threads is not None:
            check_positive("tokenizer_threads", tokenizer_threads)
        check_seconds("age_limit_s", age_limit_s)
        check_draft_size(num_speculative_tokens)
        self._model, self._max_queued_requests = model, max_queued_requests
        self._max_queued_tokens = max_queued_tokens
        self._max_window_texts = max(max_queued_requests // 4, 1)
        self._is_bounded = False
        self._group: PromptGroup | None = None
        threads = tokenizer_threads or min(max(len(os.sched_getaffinity(0)) // 2, 1), 8)
        self._pool = ReadingPool(threads)
        self._engines = {
            one._runner: EncodeEngine(
                one._runner,
                token_budget=one.token_budget,
                max_queued_requests=max_queued_requests,
                max_queued_tokens=max_queued_tokens,
                age_limit_s=age_limit_s,
            )
            for one in (model, *model._routes.values())
        }
        self._generation = GenerationThread(
            partial(
                model.engine,
                kv_cache_tokens=kv_cache_tokens,
                max_num_seqs=max_num_seqs,
                num_speculative_tokens=num_speculative_tokens,
            ),
            max_outputs=max_queued_requests,
            max_tokens=max_queued_tokens,
        )

    @property
    def model(self) -> Model:
        return self._model

    def _cutting_left(self) -> "AsyncModel":
        """The same queue for texts and pairs that lose their beginning where they are truncated."""
        view = copy(self)
        view._model = self._model._cutting_left()
        return view

    def _bounded(self, group: PromptGroup | None = None) -> "AsyncModel":
        """The same queue for calls that get a TooLargeError where they exceed its limits alone.

        Calls that others wait beside would be refused for ever, and admitted by luck.
        group: of the prompts that are given to `generate`; None is one for each.
        """
        view = copy(self)
        view._is_bounded, view._group = True, group
        return view

    @property
    def queue_limits(self) -> tuple[int, int]:
        """(texts and prompts, tokens) that may wait."""
        return self._max_queued_requests, self._max_queued_tokens

    @property
    def is_broken(self) -> bool:
        """Whether an error has ended a thread: no later call to it can be answered."""
        return self._generation.is_broken or any(one.is_broken for one in self._engines.values())

    async def __aenter__(self) -> "AsyncModel":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self, *, drain_s: float | None = None) -> None:
        """Takes no more calls and ends the threads; the Model stays open.

        drain_s: seconds in which open calls may still be answered; the others get a ClosedError.
        None: all of them get it, but for those whose forward passes run already.
        """
        check_seconds("drain_s", drain_s)
        drain = drain_s or 0.0
        await asyncio.gather(
            *(asyncio.to_thread(one.close, drain_s=drain) for one in self._engines.values()),
            asyncio.to_thread(self._generation.close, drain_s=drain),
        )
        self._pool.close()  # what it still has to tokenise was dropped

    def stats(self) -> AsyncStats:
        """What runs and waits now, totals, and the last forward passes of one-pass tasks."""
        engines = [engine_stats(engine) for engine in self._engines.values()]
        num_draft_tokens, num_accepted_tokens = self._generation.draft_counts
        return replace(
            AsyncStats.total(engines),
            num_generating=self._generation.num_open,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
        )

    async def embed(
        self,
        texts: Texts,
        *,
        task: str | None = None,
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

        def start(model: Model) -> Call[Embeddings]:
            return model._embed_call(
                texts,
                task=task,
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
            )

        return await self._run_task(start, task, priority=priority, timeout_s=timeout_s)

    def embed_each(
        self, calls: Sequence[Sequence[Any]], **options: Any
    ) -> "list[asyncio.Future[Embeddings]]":
        """Several calls of `embed` with the same options, for the host's work of little over one.

        calls: the texts of each.  options: those of `embed`, but on_error, priority and timeout_s.
        Call it in an event loop. The futures have what `embed` gives, as soon as it is there:
        a call waits neither for the others' texts nor fails with them, but for a full queue, which
        refuses all. Stats have no num_pad_tokens, and the mean seconds of all that are done.
        """
        if len(calls) < 2 or _CUT_OR_JOINED & options.keys():
            return [asyncio.ensure_future(self.embed(call, **options)) for call in calls]
        texts = [text for call in calls for text in call]
        model = self._model._route(None)
        run = GroupedRun(
            model._embed_call(texts, **_EMBED_OPTIONS | options | {"on_error": "return"}),
            self._engines[model._runner],
            self._pool,
            alone=lambda number: self.embed(calls[number], **options),
            sizes=[len(call) for call in calls],
            token_budget=model.token_budget,
            max_window_texts=self._max_window_texts,
        )
        return run.start()

    async def embed_all(
        self,
        texts: Texts,
        *,
        task: str | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AllEmbeddings:
        """As Model.embed_all."""

        def start(model: Model) -> Call[AllEmbeddings]:
            return model._all_call(
                texts,
                task=task,
                prompt=prompt,
                prompt_name=prompt_name,
                truncate=truncate,
                on_error=on_error,
            )

        return await self._run_task(start, task, priority=priority, timeout_s=timeout_s)

    async def embed_chunks(
        self,
        texts: Texts,
        *,
        stride: int = 0,
        task: str | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        precision: Precision = "float32",
        ranges: npt.ArrayLike | None = None,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> TokenEmbeddings:
        """As Model.embed_chunks."""

        def start(model: Model) -> Call[TokenEmbeddings]:
            return model._chunks_call(
                texts,
                stride=stride,
                task=task,
                prompt=prompt,
                prompt_name=prompt_name,
                dimensions=dimensions,
                pooling=pooling,
                normalize=normalize,
                precision=precision,
                ranges=ranges,
                on_error=on_error,
            )

        return await self._run_task(start, task, priority=priority, timeout_s=timeout_s)

    async def embed_spans(
        self,
        texts: Sequence[str],
        spans: Sequence[Sequence[Span]],
        *,
        task: str | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        pooling: str | Sequence[str] = "mean",
        normalize: bool | None = None,
        precision: Precision = "float32",
        ranges: npt.ArrayLike | None = None,
        truncate: bool = False,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> TokenEmbeddings:
        """As Model.embed_spans."""

        def start(model: Model) -> Call[TokenEmbeddings]:
            return model._spans_call(
                texts,
                spans,
                task=task,
                prompt=prompt,
                prompt_name=prompt_name,
                dimensions=dimensions,
                pooling=pooling,
                normalize=normalize,
                precision=precision,
                ranges=ranges,
                truncate=truncate,
                on_error=on_error,
            )

        return await self._run_task(start, task, priority=priority, timeout_s=timeout_s)

    async def embed_sparse(
        self,
        texts: Texts,
        *,
        task: str | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_active_dims: int | None = None,
        truncate: bool = False,
        on_error: OnError = "raise",
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> SparseEmbeddings:
        """As Model.embed_sparse."""

        def start(model: Model) -> Call[SparseEmbeddings]:
            return model._sparse_call(
                texts,
                task=task,
                prompt=prompt,
                prompt_name=prompt_name,
                max_active_dims=max_active_dims,
                truncate=truncate,
                on_error=on_error,
            )

        return await self._run_task(start, task, priority=priority, timeout_s=timeout_s)

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
        call = self._model._tokens_call(
            texts,
            task=task,
            prompt=prompt,
            prompt_name=prompt_name,
            normalize=normalize,
            precision=precision,
            ranges=ranges,
            truncate=truncate,
            on_error=on_error,
        )
        return await self._run(call, self._model, priority=priority, timeout_s=timeout_s)

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
        call = self._model._classify_call(
            texts,
            top_k=top_k,
            raw_scores=raw_scores,
            overflow=overflow,
            stride=stride,
            truncate=truncate,
            on_error=on_error,
        )
        return await self._run(call, self._model, priority=priority, timeout_s=timeout_s)

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
        call = self._model._tag_call(
            texts,
            aggregation=aggregation,
            ignore_labels=ignore_labels,
            overflow=overflow,
            stride=stride,
            truncate=truncate,
            on_error=on_error,
        )
        return await self._run(call, self._model, priority=priority, timeout_s=timeout_s)

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
        call = self._model._fill_mask_call(
            texts,
            top_k=top_k,
            targets=targets,
            truncate=truncate,
            on_error=on_error,
        )
        return await self._run(call, self._model, priority=priority, timeout_s=timeout_s)

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
        call = self._model._score_call(texts, truncate=truncate, on_error=on_error)
        return await self._run(call, self._model, priority=priority, timeout_s=timeout_s)

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
        call = self._model._answer_call(
            texts,
            top_k=top_k,
            max_answer_tokens=max_answer_tokens,
            allow_no_answer=allow_no_answer,
            whole_words=whole_words,
            chunk_tokens=chunk_tokens,
            stride=stride,
            on_error=on_error,
        )
        return await self._run(call, self._model, priority=priority, timeout_s=timeout_s)

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
        call = self._model._hidden_states_call(
            texts,
            layers=layers,
            truncate=truncate,
            on_error=on_error,
        )
        return await self._run(call, self._model, priority=priority, timeout_s=timeout_s)

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
        make = partial(
            self._model._rerank_call,
            query,
            documents,
            top_k=top_k,
            raw_scores=raw_scores,
            instruction=instruction,
            truncate=truncate,
            on_error=on_error,
        )
        # The prompts of a causal reranker are tokenised while the call is made, and documents that
        # are no list are pulled.
        self._engines[self._model._runner].check_open()
        is_quick = isinstance(documents, list | tuple) and not self._model._reranks_by_logits
        call = make() if is_quick else await in_own_thread(make)
        return await self._run(call, self._model, priority=priority, timeout_s=timeout_s)

    async def similarity(self, a: Vectors | Packed, b: Vectors | Packed) -> torch.Tensor:
        """As Model.similarity, in a thread."""
        return await self._in_thread(partial(self._model.similarity, a, b))

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGeneration:
        """The pieces of the outputs of one prompt as they are generated, params.n outputs.

        prompt: a str, token ids, or a chat.  chat_template_kwargs: as of Model.generate.
        Iterate over what is returned with `async for`; each
        piece is the new part of the output that its `index` names.  Its aclose, or cancelling the
        task that waits for it, ends the generation.
        """
        params = SamplingParams() if params is None else params
        self._model._check(params)
        options = {"chat_template_kwargs": checked_options(chat_template_kwargs)}
        check_integer("priority", priority)
        check_seconds("timeout_s", timeout_s)
        return AsyncGeneration(
            self._generation,
            lambda: self._model.encode_prompts([prompt], **options)[0],
            params,
            is_chat=is_chat(prompt),
            priority=priority,
            timeout_s=timeout_s,
            group=(self._group or PromptGroup()) if self._is_bounded else None,
        )

    async def _run_task(
        self,
        start: Callable[[Model], Call[T]],
        task: str | None,
        *,
        priority: int,
        timeout_s: float | None,
    ) -> T:
        """Runs a call on the model of its task's route.

        That of a named task may read the weights of its adapter, and is made in a thread then.
        """
        model = self._model._route(task)
        call = start(model) if task is None else await asyncio.to_thread(start, model)
        return await self._run(call, model, priority=priority, timeout_s=timeout_s)

    async def _run(
        self, call: Call[T], model: Model, *, priority: int, timeout_s: float | None
    ) -> T:
        check_integer("priority", priority)
        check_seconds("timeout_s", timeout_s)
        run = CallRun(
            call,
            self._engines[model._runner],
            self._pool,
            token_budget=model.token_budget,
            max_window_texts=self._max_window_texts,
            priority=priority,
            is_bounded=self._is_bounded,
        )
        if timeout_s is None:
            return await run.result()
        try:
            async with asyncio.timeout(timeout_s):
                return await run.result()
        except TimeoutError as error:
            raise DeadlineError(
                f"the results were not there after timeout_s ({timeout_s:g} s)"
            ) from error

    @contextmanager
    def reserved(self, num_texts: int, tokens: int) -> Iterator[None]:
        """Counts a caller's own work on texts against the limits of the queue while it runs.

        Raises QueueFullError where they are reached, TooLargeError where it exceeds them alone.
        """
        with self._engines[self._model._runner].reserve(num_texts, tokens):
            yield

    async def _in_thread(self, function: Callable[[], T]) -> T:
        self._engines[self._model._runner].check_open()
        return await asyncio.to_thread(function)
