"""CUDA graphs of whole steps, from the block of integers to the outputs, captured on demand.

A step runs eagerly the first time, which also loads kernels and initialises libraries. The second
step with the same key is captured, and later ones are one graph launch. Two steps with the same key
may only differ in the integers of their block: kernels read the actual lengths from there, on the
device.

All graphs of a cache share one memory pool for intermediate tensors: they run one after another on
one stream, so that each can use all of it. The pool is reserved for a power of two of tokens at a
time; otherwise every new, slightly larger bucket would leave blocks that are slightly too small.
Each graph owns its input block and its outputs.

Graphs are captured on a stream that nothing else uses. On the stream that they run on, other
threads free pinned memory meanwhile: torch then records events there, which would become part of
the capture, and later queries of these events would fail.

Where there are too many graphs, the least recently used one is evicted. A capture that fails is not
tried again, and its steps run eagerly.
"""

import gc
import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from bytetx.runtime.on_stream import OnStream

logger = logging.getLogger("bytetx")

MAX_GRAPHS = 192
_MAX_OUTPUT_BYTES = 256 << 20  # all graphs together
_MAX_SEEN = 4096

# torch allows one capture at a time in a process; models in several threads take turns.
_CAPTURING = threading.Lock()

# From the block of integers on the device to the outputs; reads nothing else that changes.
Compute = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph with its input and outputs.  keep: an object that must live as long as the graph."""

    graph: torch.cuda.CUDAGraph
    block: torch.Tensor
    outputs: tuple[torch.Tensor, ...]
    keep: object

    @property
    def output_bytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Graphs in a cycle would be destroyed by the thread that captures, which ends the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _end_generator_capture(device: torch.device) -> None:
    """torch's generator stays in a capture that became invalid, and gives no more numbers."""
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


class GraphCache:
    """The graphs of one device and stream. Not thread-safe: the owner has a lock."""

    def __init__(self, *, device: torch.device, workspace_bytes: Callable[[int], int]):
        """workspace_bytes: the bytes of intermediate tensors, from the number of tokens."""
        self._device, self._workspace_bytes = device, workspace_bytes
        self._graphs: OrderedDict[Hashable, CapturedStep] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        self._pool: Any = None  # torch.cuda.graph_pool_handle()
        self._reserved: list[torch.cuda.CUDAGraph] = []
        self._reserved_tokens = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def find_or_capture(
        self, key: Hashable, capture: Callable[[], CapturedStep | None]
    ) -> CapturedStep | None:
        """The graph to replay; None where the step runs eagerly, as it does the first time.

        capture: calls `capture` for the key.
        """
        captured = self._graphs.get(key)
        if captured is not None:
            self._graphs.move_to_end(key)
            return captured
        if key in self._seen:
            return None if key in self._refused else capture()
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen.add(key)
        return None

    def capture(
        self,
        key: Hashable,
        compute: Compute,
        num_ints: int,
        total_tokens: int,
        *,
        keep: object = None,
    ) -> CapturedStep | None:
        """Captures a new graph; None where that fails. The current stream must be the cache's.

        num_ints: int32s of the block.  total_tokens: rows of the step.
        """
        try:
            with _CAPTURING:
                self._reserve(total_tokens)
                block = torch.zeros(num_ints, dtype=torch.int32, device=self._device)
                captured = self._capture(block, compute, keep)
        except RuntimeError as error:  # from torch or a kernel, or the memory is too small
            self._refused.add(key)
            text = str(error).partition("\n")[0]
            logger.warning("no CUDA graph for %s tokens: %s; they run eagerly", total_tokens, text)
            return None
        self._graphs[key] = captured
        self._evict()
        return captured

    def clear(self) -> bool:
        """Waits for all graphs and frees them with their memory; False where there was none."""
        if not self._graphs and not self._reserved:
            return False
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._reserved.clear()
        self._seen.clear()  # each step runs eagerly once before it is captured again
        self._pool, self._reserved_tokens = None, 0
        return True

    def finish(self) -> None:
        """For the owner's __del__: frees the graphs before the tensors that they read and write.

        A graph must not be destroyed while it runs; clear() waits for it.
        """
        if not sys.is_finalizing():
            with suppress(RuntimeError):
                self.clear()

    def _capture(self, block: torch.Tensor, compute: Compute, keep: object) -> CapturedStep:
        graph = torch.cuda.CUDAGraph()
        # The cuBLAS workspaces belong to the process: a graph must not use one that can be freed.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with self._captured_by(graph):
                outputs = compute(block)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return CapturedStep(graph, block, outputs, keep)

    def _reserve(self, total_tokens: int) -> None:
        """Adds memory for steps of this size to the pool, with a graph that frees it at its end."""
        if total_tokens <= self._reserved_tokens:
            return
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        tokens = 1 << (total_tokens - 1).bit_length()
        num_bytes = self._workspace_bytes(tokens)
        graph = torch.cuda.CUDAGraph()
        with self._captured_by(graph):
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device)[:1].zero_()
        self._reserved.append(graph)
        self._reserved_tokens = tokens

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    @contextmanager
    def _captured_by(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Captures what is launched inside; other threads may allocate and wait meanwhile."""
        with OnStream(self._stream), _no_garbage_collection():
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    yield
                finally:
                    graph.capture_end()
            except BaseException:
                _end_generator_capture(self._device)
                raise

    def _evict(self) -> None:
        output_bytes = sum(captured.output_bytes for captured in self._graphs.values())
        while len(self._graphs) > MAX_GRAPHS or (
            output_bytes > _MAX_OUTPUT_BYTES and len(self._graphs) > 1
        ):
            torch.cuda.current_stream(self._device).synchronize()  # it may still run
            key, oldest = self._graphs.popitem(last=False)
            self._seen.discard(key)  # so that it is not captured again at once
            output_bytes -= oldest.output_bytes


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return the run's kernels as a graph, after a first run that sets everything up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph
