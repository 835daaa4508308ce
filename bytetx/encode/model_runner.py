"""Texts of calls -> EncodeStep -> PackedBatch -> forward pass -> rows on the host, also where the
device fails."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bytetx.adapter_rows import AdapterRows
from bytetx.encode.cuda_queue import CudaQueue
from bytetx.encode.prefix_cache import CacheUse, PrefixCache
from bytetx.encode.prefixes import SharedRows, share_prefixes
from bytetx.encode.request import Failure, Requests, join_requests
from bytetx.encode.request_queue import OpenCall, Taken
from bytetx.encode.step import Computation, SharedPass, Step, Task, TaskRows, is_head
from bytetx.errors import DeviceMemoryError, StepError
from bytetx.nn.executor import Executor
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch, SharedPrefixes, pack_columns, prefix_sums
from bytetx.runtime import faults

logger = logging.getLogger("bytetx")

# Parameters of a layer times tokens that take a GPU about as long as it takes the host to find the
# prefixes and to launch a layer's kernels one by one instead of a graph of them all (H200, Qwen3
# 0.6B: 2900 tokens; a cached prefix of 2048 took 13 ms against 7, one of 4096 8 against 12).
_LEAST_GPU_WORK = 40 * 10**9
# A step is long where calls with at least so many tokens in it have half of its tokens. A call is
# short beside it where the largest of these shares is so many times as long.
_LONG_TOKENS, _SHORT = 256, 8


@dataclass(frozen=True, slots=True)
class StartedPass:
    """A forward pass that was started.

    keep: what the device still uses, besides the tensors.  prefixes: what is to be done with those
    that the step has, as soon as it is done.  computed_tokens: with each common prefix once, and
    none that was kept.
    """

    step: Step
    tensors: tuple[torch.Tensor, ...]
    device: torch.device
    is_done: torch.cuda.Event | None = None
    keep: object = None
    prefixes: "_StepPrefixes | None" = None
    computed_tokens: int = 0

    def outputs(self) -> tuple[np.ndarray, ...]:
        if self.is_done is not None:
            try:
                self.is_done.synchronize()
            except RuntimeError as error:
                raise faults.lost_error(error, len(self.step.requests), self.device) from error
        outputs = tuple(tensor.numpy() for tensor in self.tensors)
        return outputs if self.prefixes is None else self.prefixes.finish(outputs, self.step)


@dataclass(frozen=True, slots=True)
class _StepPrefixes:
    """The prefixes of a step that came from the cache, were found in it, or are to be added."""

    cache: PrefixCache
    use: CacheUse
    found: SharedRows | None

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> tuple[np.ndarray, ...]:
        """Tells the cache of a pass that is done. Returns the outputs of the task alone."""
        kept = [] if step.shared is None else step.shared.kept
        own = len(outputs) - len(kept)
        self.cache.finish(self.use, self.found, kept, [bool(one) for one in outputs[own:]])
        return outputs[:own]


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose forward pass was started; `outputs_by_pass()` waits until it is done.

    failures: requests that the device could not run.  passes: one, or several where the step did
    not fit the device's memory.
    executor: what tells why a rank or the device is lost.
    """

    failures: tuple[Failure, ...]
    passes: tuple[StartedPass, ...]
    executor: Executor

    def is_ready(self) -> bool:
        """Whether `outputs_by_pass()` returns at once."""
        return all(one.is_done is None or one.is_done.query() for one in self.passes)

    @property
    def shares_prefixes(self) -> bool:
        """Whether common prefixes of its texts are computed once."""
        return any(one.step.shared is not None for one in self.passes)

    def outputs_by_pass(self) -> list[tuple[np.ndarray, ...]]:
        """Rows of the requests of each pass. Raises DeviceLostError."""
        try:
            return [one.outputs() for one in self.passes]
        finally:
            if self.executor.has_workers:
                self.executor.check()  # it knows why the device is lost


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


class Runner:
    """Runs a model's steps on one device; may be called from several threads.

    token_budget: tokens of the steps to come.  Longer ones run too, without a graph.
    cuda_graphs: whether steps are captured where the device's kernels allow it.
    prefix_cache_bytes: of prefixes that later steps take from there; 0 keeps none.
    """

    def __init__(
        self,
        transformer: Transformer,
        *,
        executor: Executor,
        device: torch.device,
        token_budget: int,
        cuda_graphs: bool = True,
        prefix_cache_bytes: int = 0,
    ):
        self.transformer, self.executor, self.device = transformer, executor, device
        # Tokens of which common prefixes have a multiple; 0 where none is shared.
        self.prefix_multiple = transformer.prefix_multiple
        # Tokens that a step has to save, where it loses its graph for that.
        self._least_saved = 0
        if device.type == "cuda" and cuda_graphs and transformer.is_capturable:
            spec = transformer.spec
            layer_size = spec.hidden_size * (4 * spec.hidden_size + 3 * spec.intermediate_size)
            self._least_saved = _LEAST_GPU_WORK // layer_size
        self.prefix_cache: PrefixCache | None = None
        if self.prefix_multiple and prefix_cache_bytes:
            self.prefix_cache = PrefixCache(
                prefix_cache_bytes,
                bytes_per_token=_bytes_per_token(transformer),
                multiple=self.prefix_multiple,
                least_saved=self._least_saved,
            )
        self._queue: CudaQueue | None = None
        if device.type == "cuda" and not transformer.embeddings.word.is_meta:
            self._queue = CudaQueue(
                transformer, device=device, max_tokens=token_budget, has_graphs=cuda_graphs
            )

    @property
    def is_interruptible(self) -> bool:
        """Whether a step computes in `launch`, on the caller's thread, and may stop for others."""
        return self._queue is None and not self.executor.has_workers

    def launch(
        self,
        requests: Requests,
        task: Computation,
        *,
        between_layers: Callable[[], None] | None = None,
    ) -> Launched:
        """Starts the forward pass of a step.

        between_layers: called before each linear layer where the runner is interruptible; it may
        launch other steps.
        A step that does not fit the device's memory is cut in two, down to single requests; what
        cannot run becomes a Failure. Raises DeviceLostError where the device no longer answers.
        """
        passes: list[StartedPass] = []
        failures: list[Failure] = []
        waiting, may_release_graphs = [requests], True
        while waiting:
            some = waiting.pop()
            try:
                passes.append(self._start(some, task, between_layers))
            except (RuntimeError, MemoryError) as error:
                where = self._examine(error, some)
                if faults.is_out_of_memory(error) and may_release_graphs:
                    may_release_graphs = False  # captured again, they would fill it again
                    if self._release_memory():
                        waiting.append(some)
                        continue
                waiting += self._after(error, some, failures, where=where)
        return Launched(tuple(failures), tuple(passes), self.executor)

    def _start(
        self, requests: Requests, task: Computation, between_layers: Callable[[], None] | None
    ) -> StartedPass:
        spec, prompts = self.transformer.spec, requests.prompt_tokens
        batch = partial(
            pack_columns,
            requests.token_ids,
            requests.seqlens,
            token_type_ids=requests.token_type_ids,
            has_token_types=spec.num_token_types > 0,
            position_offset=spec.position_offset,
        )
        if requests.adapters is not None and self._queue is None:  # a queue finds them itself
            batch = partial(_with_adapters, batch, requests)
        shared, prefixes = self._share(requests, batch) if self.prefix_multiple else (None, None)
        # On the host; a GPU's queue takes the requests, and hardly ever the batch.
        step = Step(
            requests,
            batch if shared is None else shared,
            None if prompts is None else torch.from_numpy(prompts),
        )
        computed = requests.total_tokens
        if shared is not None and shared.shared is not None:
            computed = shared.shared.batch.total_tokens
        if self._queue is None:
            transformer = self.transformer
            if between_layers is not None and self.is_interruptible:
                transformer = transformer.interrupted_by(between_layers)
            outputs = task.compute(transformer, step)
            if shared is not None and shared.shared is not None:
                outputs = (*outputs, *shared.shared.are_kept_finite())
            return StartedPass(
                step, outputs, self.device, prefixes=prefixes, computed_tokens=computed
            )
        copies, is_done, keep = self._queue.start(step, task)
        return StartedPass(step, copies, self.device, is_done, keep, prefixes, computed)

    def _release_memory(self) -> bool:
        """Frees what a GPU holds to be faster; False where that is nothing."""
        had_prefixes = self.prefix_cache is not None and self.prefix_cache.clear()
        had_graphs = self._queue is not None and self._queue.release_memory()
        return had_prefixes or had_graphs

    def _share(
        self, requests: Requests, pack: Callable[[], PackedBatch]
    ) -> tuple[PackedBatch | None, _StepPrefixes | None]:
        """The step's batch with each common prefix once, and what the cache has to know of it.

        No batch where the texts have no common prefixes, and none is in the cache.
        """
        if self.transformer.spec.num_token_types:
            return None, None
        cache, multiple = self.prefix_cache, self.prefix_multiple
        use = None if cache is None else cache.find(requests)
        found = share_prefixes(
            requests,
            multiple=multiple,
            words=None if use is None else use.words,
            roots=None if use is None else use.roots,
            least_saved=0 if use is not None and use.kept else max(self._least_saved, 1),
        )
        prefixes = None if cache is None or use is None else _StepPrefixes(cache, use, found)
        if found is None:
            return None, prefixes
        batch, tree = pack(), found.tree
        own = PackedBatch(
            input_ids=torch.from_numpy(requests.token_ids[found.kept]),
            position_ids=batch.position_ids[torch.from_numpy(found.kept)],
            token_type_ids=None,
            cu_seqlens=torch.from_numpy(prefix_sums(tree.seqlens)),
            seqlens=torch.from_numpy(tree.seqlens),
            max_seqlen=batch.max_seqlen,
            tree=tree,
            computed=() if use is None else use.computed,
        )
        if requests.adapters is not None:
            # A sequence of the tree is of one text, or of several with one adapter.
            starts = tree.starts[: tree.num_query_sequences + 1]
            first = found.kept[np.minimum(starts[:-1], len(found.kept) - 1)]
            texts = np.searchsorted(requests.cu_seqlens, first, side="right") - 1
            own = replace(own, adapters=AdapterRows.of(requests.adapters[texts].tolist(), starts))
        rows = torch.from_numpy(found.rows)
        kept_rows: tuple[torch.Tensor, ...] = ()
        if use is not None:
            starts = requests.cu_seqlens
            kept_rows = tuple(rows[starts[text] : starts[text] + size] for text, size in use.kept)
        shared = SharedPrefixes(own, rows, kept_rows)
        return replace(batch, shared=shared), prefixes

    def _examine(self, error: Exception, requests: Requests) -> str:
        """Where a step failed. Raises what is not the device's doing, or a DeviceLostError."""
        if not faults.is_of_device(error, self.device):
            raise error
        where = faults.failed_op(error)
        if self._queue is not None:
            try:
                self._queue.recover()
            except RuntimeError as dead:
                raise faults.lost_error(dead, len(requests), self.device) from error
        return where

    def _after(
        self, error: Exception, requests: Requests, failures: list[Failure], *, where: str
    ) -> list[Requests]:
        """The requests to run instead of a step that failed, the last first."""
        is_short = faults.is_out_of_memory(error)
        if is_short and len(requests) > 1:
            return requests.cut([0, len(requests) // 2, len(requests)])[::-1]
        describe = memory_error if is_short else step_error
        failure = describe(error, requests, self.device, where=where)
        logger.debug("%s", failure, exc_info=error)
        # Its traceback holds frames, and these the step, its outputs and, in a ring, the failure.
        failure.__cause__ = error.with_traceback(None)
        failures += [Failure(int(index), failure) for index in requests.indices]
        return []


def _with_adapters(pack: Callable[[], PackedBatch], requests: Requests) -> PackedBatch:
    return replace(pack(), adapters=requests.adapter_rows)


def _bytes_per_token(transformer: Transformer) -> int:
    """Keys and values of all layers, and the last hidden states."""
    spec, blocks = transformer.spec, transformer.blocks
    kv_size = spec.num_layers * 2 * blocks.num_kv_heads * spec.head_dim
    return (kv_size + spec.output_size) * transformer.embeddings.word.element_size()


def memory_error(
    error: Exception, requests: Requests, device: torch.device, *, where: str
) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"{_describe_step(requests)} does not fit the memory of {device}, not even alone in a "
        f"step ({where}: {faults.first_line(error)}); free memory there, cut the text "
        "(truncate=True), or load the model in float16 or on another device"
    )


def step_error(
    error: Exception, requests: Requests, device: torch.device, *, where: str
) -> StepError:
    return StepError(
        f"a kernel failed on {device} in a step of {_describe_step(requests)}, {where}: "
        f"{faults.first_line(error)}; other steps are not affected. `bytetx info` lists the "
        "kernels; cuda_graphs=False and a smaller token_budget rule out two causes"
    )


def _describe_step(requests: Requests) -> str:
    texts = f"text {requests.indices[0]}" if len(requests) == 1 else f"{len(requests)} texts"
    return f"{texts} with {requests.total_tokens} tokens"
