"""Threads that read one another's memory, as GPUs of a host do; see bytetx.parallel.symmetric."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from threading import Barrier

import pytest
import torch
from fake_cuda import FakeStream

from bytetx.nn import weight_gather


@dataclass
class Regions:
    """The memory of all ranks of a group."""

    size: int
    found: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arrived = Barrier(self.size)


@dataclass
class Views:
    views: list[torch.Tensor]
    owner: object = None


@dataclass
class SharedReads:
    """As PeerReads. works: whether ranks find one another's memory."""

    regions: Regions
    rank: int
    works: bool = True

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)  # NaN, until it is written

    def connect(self, memory: torch.Tensor) -> Views | None:
        self.regions.found[self.rank] = memory
        self.regions.arrived.wait(60)
        if not self.works:
            return None
        return Views([self.regions.found[rank] for rank in range(self.regions.size)])


def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies run at once."""
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(weight_gather, "OnStream", lambda stream: nullcontext())
