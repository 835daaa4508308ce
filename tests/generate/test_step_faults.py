"""A step that fails: whether its rows alone end, or the device is lost."""

from contextlib import nullcontext

import pytest
import torch

from bytetx.errors import DeviceLostError, GroupError, StepError
from bytetx.generate.model_runner import ModelRunner
from bytetx.generate.scheduler import SchedulerOutput
from bytetx.nn.executor import Executor


class Batches:
    """Fails as a launch on a GPU does."""

    def build(self, plan: SchedulerOutput) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")


class Stream:
    def __init__(self, error: str | None):
        self.error = error

    def synchronize(self) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)


class Ranks(Executor):
    """error: what its check knows of a lost rank."""

    def __init__(self, error: Exception | None = None):
        self.error = error

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def start(monkeypatch: pytest.MonkeyPatch, *, stream: Stream, ranks: Ranks) -> None:
    runner = ModelRunner.__new__(ModelRunner)
    runner.device, runner._stream, runner._executor = torch.device("cuda:0"), stream, ranks
    runner._input_batches = Batches()
    monkeypatch.setattr(runner, "_on_stream", nullcontext)
    runner.start(SchedulerOutput((), 0, 0, (), ()))


def test_a_device_that_answers_loses_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StepError, match=r"a kernel failed on cuda:0 .*illegal memory access"):
        start(monkeypatch, stream=Stream(None), ranks=Ranks())


def test_a_device_that_answers_no_longer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Stream("CUDA error: unspecified launch failure")
    with pytest.raises(DeviceLostError, match=r"cuda:0 failed for good .*unspecified.* restart"):
        start(monkeypatch, stream=dead, ranks=Ranks())


def test_a_lost_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Stream("CUDA error: unspecified launch failure")
    with pytest.raises(GroupError, match="rank 1 ended"):
        start(monkeypatch, stream=dead, ranks=Ranks(GroupError("rank 1 ended")))
