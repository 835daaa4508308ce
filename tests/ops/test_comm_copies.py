"""GEMMs cut by whose rows they are: every rank's part comes to its place, on CPU tensors."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier, Condition

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bytetx.ops.comm_copies import all_gather_gemm, partial_sums
from bytetx.ops.gated import prepare_gated
from bytetx.ops.linear import prepare_linear
from bytetx.ops.reference import activate

TIMEOUT = 20  # seconds
N, K = 64, 48
OFFSETS = {
    2: [(0, 5, 9), (0, 9, 9), (0, 0, 3)],
    4: [(0, 3, 3, 10, 12), (0, 1, 2, 3, 4)],
}


@dataclass
class Host:
    """State that the threads that are ranks share. arrived: (to, from) of each copy."""

    regions: list[Tensor]
    barrier: Barrier
    arrived: set[tuple[int, int]] = field(default_factory=set)
    news: Condition = field(default_factory=Condition)


class Copies:
    """CopyMemory of threads, whose copies come at once."""

    def __init__(self, rank: int, host: Host):
        self.rank, self.size, self._host = rank, len(host.regions), host

    def rows(self, first: int, count: int, like: Tensor) -> Tensor:
        return _rows(self._host.regions[self.rank], like.shape[1])[first : first + count]

    def barrier(self) -> None:
        self._host.barrier.wait(TIMEOUT)

    def send(self, rows: Tensor, to: int, first: int) -> None:
        _rows(self._host.regions[to], rows.shape[1])[first : first + len(rows)] = rows
        with self._host.news:
            assert (to, self.rank) not in self._host.arrived
            self._host.arrived.add((to, self.rank))
            self._host.news.notify_all()

    def wait(self, sources: Iterable[int]) -> None:
        wanted = {(self.rank, source) for source in sources}
        assert (self.rank, self.rank) not in wanted
        with self._host.news:
            assert self._host.news.wait_for(lambda: wanted <= self._host.arrived, TIMEOUT)

    def end(self) -> None:
        self._host.barrier.wait(TIMEOUT)


def _rows(region: Tensor, width: int) -> Tensor:
    return region[: len(region) // width * width].view(-1, width)


def on_ranks(size: int, call) -> list[Tensor]:
    host = Host([torch.full((8192,), float("nan")) for _ in range(size)], Barrier(size))
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda r: call(r, Copies(r, host)), range(size)))


CASES = [(size, offsets) for size, all_offsets in OFFSETS.items() for offsets in all_offsets]


@pytest.mark.parametrize(("size", "offsets"), CASES)
@pytest.mark.parametrize("activation", ["none", "gelu_tanh", "silu", "gated"])
def test_all_gather_gemm(size: int, offsets: tuple[int, ...], activation: str) -> None:
    x, bias = torch.randn(offsets[-1], K), torch.randn(2 * N)
    weights = [torch.randn(2 * N, K) for _ in range(size)]

    def call(rank: int, copies: Copies) -> Tensor:
        w, name = prepare_linear(weights[rank], bias, prepack=False), activation
        if activation == "gated":
            gate, up = weights[rank].split(N)
            w, name = prepare_gated(gate, up, prepack=False), "silu"
        own = x[offsets[rank] : offsets[rank + 1]]
        options = {"row_offsets": offsets, "activation": name}
        return all_gather_gemm(own, w, copies=copies, **options)

    for rank, found in enumerate(on_ranks(size, call)):
        if activation == "gated":
            gates, values = F.linear(x, weights[rank]).split(N, dim=1)
            wanted = F.silu(gates) * values
        else:
            wanted = activate(F.linear(x, weights[rank], bias), activation)
        assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize(("size", "offsets"), CASES)
@pytest.mark.parametrize("has_partial", [False, True])
def test_partial_sums(size: int, offsets: tuple[int, ...], has_partial: bool) -> None:
    xs = [torch.randn(offsets[-1], K) for _ in range(size)]
    weights = [torch.randn(N, K) for _ in range(size)]
    partials = [torch.randn(offsets[-1], N) if has_partial else None for _ in range(size)]

    def call(rank: int, copies: Copies) -> Tensor:
        w = prepare_linear(weights[rank], prepack=False)
        options = {"row_offsets": offsets, "partial": partials[rank]}
        return partial_sums(xs[rank], w, copies=copies, **options).clone()

    for rank, found in enumerate(on_ranks(size, call)):
        own = slice(offsets[rank], offsets[rank + 1])
        for source, part in enumerate(found.view(size, -1, N)):
            wanted = F.linear(xs[source], weights[source])[own]
            wanted = wanted + partials[source][own] if has_partial else wanted
            assert torch.allclose(part, wanted, atol=1e-4)
