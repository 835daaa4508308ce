"""Results of runs that are replayed from a CUDA graph."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def captured(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """(the graph of a run, what its replays write); nothing has been replayed yet."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return graph, outputs


def assert_replays_give_the_same_bits(run: Callable[[], Tensor]) -> None:
    """Replay a run that gives a new tensor: over and over, with results poisoned before."""
    eager = run()
    graph, output = captured(run)
    for _ in range(3):
        output.fill_(float("nan"))
        graph.replay()
        assert torch.equal(output, eager)
