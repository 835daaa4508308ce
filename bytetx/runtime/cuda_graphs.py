"""CUDA graphs of whole steps, from the block of integers to the outputs, captured by need.

A step of some sizes and some work runs eagerly the first time, which also loads kernels and fills
what libraries set up on first use; the second time it is captured; from then on it is one launch.
What differs between two such steps are the integers in their block: kernels read the true lengths
from there, on the device. Nothing else may differ: the caller's key says what makes two the same.

All graphs of a cache share one pool of memory for what lies between input and output: they run one
behind the other on one stream, so that each may use all of it. The pool is laid out for a power of
two of tokens at a time; else every new bucket, a little larger than the last, would leave blocks
behind that are a little too small. Each graph owns its input block and its outputs.

Graphs are captured on a stream that nothing else uses. On the one that they run on, other threads
let go of pinned memory meanwhile: torch then records events there, which would become part of the
capture, and whoever asks for them next would fail.

The least recently used graph goes where there are too many. A capture that fails is not tried
again, and its steps run eagerly.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from bytetx.runtime.on_stream import OnStream

logger = logging.getLogger("bytetx")

MAX_GRAPHS = 64
_MAX_OUTPUT_BYTES = 256 << 20  # of all graphs together
_MAX_SEEN = 4096

# torch allows one capture at a time in a process; models in several threads take turns.
_CAPTURING = threading.Lock()

# Block of integers on the device -> outputs; reads nothing else that a later step may change.
Compute = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph with the memory that it reads and writes; keep: keeps the ids in its key valid."""

    graph: torch.cuda.CUDAGraph
    block: torch.Tensor
    outputs: tuple[torch.Tensor, ...]
    keep: object

    @property
    def output_bytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)


class GraphCache:
    """The graphs of one device and stream. Not thread-safe: its owner has a lock."""

    def __init__(self, *, device: torch.device, workspace_bytes: Callable[[int], int]):
        """workspace_bytes: what a step of so many tokens holds between input and output."""
        self._device, self._workspace_bytes = device, workspace_bytes
        self._graphs: OrderedDict[Hashable, CapturedStep] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        self._pool: tuple[int, int] | None = None
        self._reserved: list[torch.cuda.CUDAGraph] = []
        self._reserved_tokens = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, key: Hashable) -> CapturedStep | None:
        """The graph to replay, if it was captured."""
        captured = self._graphs.get(key)
        if captured is not None:
            self._graphs.move_to_end(key)
        return captured

    def is_due(self, key: Hashable) -> bool:
        """Whether this is the second time that a graph was looked for in vain."""
        if key in self._seen:
            return key not in self._refused
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen.add(key)
        return False

    def capture(
        self,
        key: Hashable,
        compute: Compute,
        *,
        num_ints: int,
        total_tokens: int,
        keep: object = None,
    ) -> CapturedStep | None:
        """A new graph, or None where it cannot be made. The current stream is the cache's.

        num_ints: int32s of the block.  total_tokens: rows of the step.
        """
        try:
            with _CAPTURING:
                self._reserve(total_tokens)
                block = torch.zeros(num_ints, dtype=torch.int32, device=self._device)
                captured = self._capture(block, compute, keep)
        except RuntimeError as error:  # of torch, of a kernel, out of memory
            self._refused.add(key)
            text = str(error).partition("\n")[0]
            logger.warning("no CUDA graph for %s tokens: %s; they run eagerly", total_tokens, text)
            return None
        self._graphs[key] = captured
        self._evict()
        return captured

    def clear(self) -> bool:
        """Lets go of all graphs and their memory; False where there was none. Waits for them."""
        if not self._graphs and not self._reserved:
            return False
        torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._reserved.clear()
        self._seen.clear()  # what is needed now runs eagerly first
        self._pool, self._reserved_tokens = None, 0
        return True

    def _capture(self, block: torch.Tensor, compute: Compute, keep: object) -> CapturedStep:
        graph = torch.cuda.CUDAGraph()
        # cuBLAS workspaces of the process: a graph must not hold one that others may free.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with self._captured_by(graph):
                outputs = compute(block)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return CapturedStep(graph, block, outputs, keep)

    def _reserve(self, total_tokens: int) -> None:
        """Puts memory for steps of this size into the pool, by a graph that frees it at its end."""
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
        """Inside, the graph takes what is launched; other threads may allocate and wait."""
        with OnStream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()

    def _evict(self) -> None:
        output_bytes = sum(captured.output_bytes for captured in self._graphs.values())
        while len(self._graphs) > MAX_GRAPHS or (
            output_bytes > _MAX_OUTPUT_BYTES and len(self._graphs) > 1
        ):
            torch.cuda.current_stream(self._device).synchronize()  # it may still run
            key, oldest = self._graphs.popitem(last=False)
            self._seen.discard(key)  # not at once again, where sizes keep changing
            output_bytes -= oldest.output_bytes
