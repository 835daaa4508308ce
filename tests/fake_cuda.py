"""Stand-ins for streams, events and graphs of a GPU."""

from collections.abc import Callable
from functools import partial

import torch

from bytetx.runtime import cuda_graphs as graphs
from bytetx.runtime.cuda_graphs import CapturedStep


class FakeStream:
    def __init__(self, device: torch.device | None = None):
        self.stream_id, self.device_index, self.device_type = id(self), 0, 1

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


class FakeEvent(FakeStream):
    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True


class FakeGraph:
    """Replay as a captured graph does: the same work again, into the same outputs."""

    def __init__(self, compute: Callable[[], tuple[torch.Tensor, ...]]):
        self.compute, self.outputs, self.num_replays = compute, [], 0

    def replay(self) -> None:
        self.num_replays += 1
        computed = self.compute()
        self.outputs += computed[len(self.outputs) :]  # all of them at the first time
        for output, value in zip(self.outputs, computed, strict=True):
            output.copy_(value)


def fake_capture(
    cache: graphs.GraphCache, block: torch.Tensor, compute: graphs.Compute, keep: object
) -> CapturedStep:
    graph = FakeGraph(partial(compute, block))
    return CapturedStep(graph, block, graph.outputs, keep)
