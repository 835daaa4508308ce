"""AsyncModel: Model's tasks, awaitable, with the requests of all callers in one queue."""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from bytetx.arguments import check_draft_size, check_integer, check_positive, check_seconds
from bytetx.encode.engine import EncodeEngine
from bytetx.errors import DeadlineError
from bytetx.model import Model
from bytetx.requests.prompts import is_chat
from bytetx.tasks.async_stats import AsyncStats, engine_stats
from bytetx.tasks.call import TaskCall
from bytetx.tasks.catalog import AsyncModelTasks
from bytetx.tasks.embed_group import EmbedGroup
from bytetx.tasks.generate import PromptCall
from bytetx.tasks.generation_stream import (
    AsyncGeneration,
    GenerationThread,
    PromptGroup,
    ReadPrompt,
)
from bytetx.tasks.results import Embeddings
from bytetx.tasks.run import AsyncRun, ReadingPool, in_own_thread
from bytetx.tasks.search import Packed, Vectors
from bytetx.tasks.task import TASKS, TaskSpec

T = TypeVar("T")

# Options with which texts are cut or results depend on all texts.
_CUT_OR_JOINED = {"overflow", "stride", "precision", "ranges"}
# Options that one value has for all texts of a call, or a list one for each.
_OF_EACH = ("adapter", "task")
# The event loop, the model, the priority and the options of calls that may run as one.
_GroupKey = tuple[asyncio.AbstractEventLoop, Model, int, str]


class AsyncModel(AsyncModelTasks):
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
        # Options of every call: the adapter or the task that a view is of.
        self._own: dict[str, str] = {}
        self._priority = 0  # where a call names none
        self._groups: dict[_GroupKey, EmbedGroup] = {}
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

    def _adapted(self, *, adapter: str | None = None, task: str | None = None) -> "AsyncModel":
        """The same queue for calls that run with an adapter of the model, or with one of its tasks,
        where they can have one."""
        view, given = copy(self), {"adapter": adapter, "task": task}
        view._own = {name: value for name, value in given.items() if value is not None}
        return view

    def _prioritised(self, priority: int) -> "AsyncModel":
        """The same queue for calls of that priority."""
        view = copy(self)
        view._priority = priority
        return view

    def with_own(self, spec: TaskSpec, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options of a task, and those of all calls of this view."""
        own = {name: value for name, value in self._own.items() if name in spec.fields}
        return {**given, **own}

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

    async def add_adapter(self, name: str, path: str | Path) -> None:
        """As Model.add_adapter, in a thread; requests run meanwhile."""
        await self._in_thread(partial(self._model.add_adapter, name, path))

    def remove_adapter(self, name: str) -> None:
        """As Model.remove_adapter: requests that run with it end, and later ones are refused."""
        self._model.remove_adapter(name)

    def stats(self) -> AsyncStats:
        """Running and waiting work, totals, and the last forward passes of one-pass tasks."""
        engines = [engine_stats(engine) for engine in self._engines.values()]
        num_draft_tokens, num_accepted_tokens = self._generation.draft_counts
        return replace(
            AsyncStats.total(engines),
            num_generating=self._generation.num_open,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
        )

    def embed_soon(self, texts: Sequence[Any], **options: Any) -> "asyncio.Future[Embeddings]":
        """`embed` in the next turn of the event loop, for the host's work of little over one call.

        Calls of one turn with the same options run as one.
        options: those of `embed`, but on_error, priority and timeout_s.
        Call it in an event loop. The future has what `embed` gives, as soon as it is there: a call
        waits neither for the others' texts nor fails with them, but for a full queue, which
        refuses all. Stats have no num_pad_tokens, and the mean seconds of all that are done.
        """
        loop = asyncio.get_running_loop()
        options = {**options, **self._own}
        has_one = all(isinstance(options.get(name), str | None) for name in _OF_EACH)
        if _CUT_OR_JOINED & options.keys() or not has_one:
            return loop.create_task(self.embed(texts, **options))
        key = loop, self._model, self._priority, repr(sorted(options.items()))
        group = self._groups.get(key)
        answer = None if group is None else group.add(texts)
        if answer is None:
            run_of, alone = partial(self._joined, options), partial(self.embed, **options)
            group = self._groups[key] = EmbedGroup(run_of, alone, queue_limits=self.queue_limits)
            loop.call_soon(self._start_group, key, group)
            answer = group.add(texts)
            assert answer is not None  # a first call is taken
        return answer

    def _start_group(self, key: _GroupKey, group: EmbedGroup) -> None:
        if self._groups.get(key) is group:  # else it was full, and another one follows
            del self._groups[key]
        group.start()

    def _joined(self, options: Mapping[str, Any], texts: Sequence[Any]) -> AsyncRun[Embeddings]:
        """The run of all texts of a group."""
        engine, call = self.embed_call(texts, options)
        return AsyncRun(
            call,
            engine,
            self._pool,
            max_window_texts=self._max_window_texts,
            priority=self._priority,
        )

    def embed_call(
        self, texts: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[EncodeEngine, TaskCall[Embeddings]]:
        """A call of `embed` that keeps errors for their texts, and the engine that runs it."""
        spec = TASKS["embed"]
        bound = spec.bind((texts,), {**options, **self._own, "on_error": "return"})
        model, call = self._model._call(spec, *bound)
        return self._engines[model._runner], call

    async def similarity(self, a: Vectors | Packed, b: Vectors | Packed) -> torch.Tensor:
        """As Model.similarity, in a thread."""
        return await self._in_thread(partial(self._model.similarity, a, b))

    def _run_one(
        self, spec: TaskSpec, inputs: tuple[Any, ...], given: dict[str, Any]
    ) -> AsyncGeneration:
        priority = given.pop("priority", self._priority)
        timeout_s = given.pop("timeout_s", None)
        bound, options = spec.bind(inputs, self.with_own(spec, given))
        call: PromptCall[AsyncGeneration] = spec.start(self._model.context, *bound, options)
        check_integer("priority", priority)
        check_seconds("timeout_s", timeout_s)

        def read() -> ReadPrompt:
            template, ends = call.template_kwargs, call.ends
            encode = self._model.encode_prompts
            (token_ids,) = encode([call.prompt], chat_template_kwargs=template)
            params = ends.params(call.params, call.prompt, token_ids)
            return ReadPrompt(token_ids, params, ends.opens_reasoning(call.prompt, token_ids))

        adapter = None if call.adapter is None else self._model.loras.get(call.adapter).adapter
        return AsyncGeneration(
            self._generation,
            read,
            call.params,
            is_chat=is_chat(call.prompt),
            priority=priority,
            timeout_s=timeout_s,
            group=(self._group or PromptGroup()) if self._is_bounded else None,
            adapter=adapter,
        )

    async def _run_task(
        self, spec: TaskSpec, inputs: tuple[Any, ...], given: dict[str, Any]
    ) -> Any:
        has_run_options = "priority" in given or "timeout_s" in given
        priority = given.pop("priority", self._priority)
        timeout_s = given.pop("timeout_s", None)
        bound, options = spec.bind(inputs, self.with_own(spec, given))
        make = partial(self._model._call, spec, bound, options)
        if spec.is_slow(self._model.context, *bound, options):
            self._engines[self._model._runner].check_open()
            model, call = await in_own_thread(make)
        else:
            model, call = make()
        if has_run_options:
            check_integer("priority", priority)
            check_seconds("timeout_s", timeout_s)
        run = AsyncRun(
            call,
            self._engines[model._runner],
            self._pool,
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
