"""Measure what moves between this machine's GPUs: collectives, z's copies, and y's fused sums."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bytetx.nn.weight_gather import ShardCopies
from bytetx.ops.comm_gemm import all_gather_gemm, gemm_reduce_scatter
from bytetx.ops.linear import linear, prepare_linear
from bytetx.ops.norm import LayerNorm
from bytetx.parallel.layout import shard_offsets
from bytetx.parallel.planner.machine import Kind, wire_bytes
from bytetx.parallel.tp import GroupCollectives, TpGroup

Timer = Callable[[Callable[[], object]], float]
_PAIRS = 5  # each is a fused product and one alone
_ROW_STEP = 256  # shares of rows are whole tiles of every tiling


@dataclass(frozen=True, slots=True)
class Link:
    """A fit of collectives: latency + bytes / rate.  inner: as of Machine.inside_gbps."""

    inner: int
    size: int
    kind: Kind
    alpha_us: float
    small_us: float
    gbps: float


@dataclass(frozen=True, slots=True)
class SumOfY:
    """A fit of what a gather of rows, or their scattered sum, takes beyond the GEMM that it is
    fused with: us + wire bytes / rate."""

    us: float
    gbps: float


def measure_link(
    collectives: GroupCollectives,
    inner: int,
    kind: Kind,
    payloads: Sequence[int],
    *,
    device: torch.device,
    timer: Timer,
) -> Link:
    """Least squares of relative errors: small messages count as much as large ones."""
    size = collectives.size
    points = []
    for payload in payloads:
        run: Callable[[], object]
        if kind == "all_gather":
            sent = torch.zeros(payload // size, dtype=torch.uint8, device=device)
            received = sent.new_empty(sent.numel() * size)
            run = partial(_gather, collectives, received, sent)
        else:
            run = partial(collectives.all_reduce, torch.zeros(payload // 4, device=device))
        points.append((wire_bytes(kind, payload, size), timer(run)))
    alpha, per_byte = line(points)
    return Link(inner, size, kind, alpha, points[0][1], 1 / per_byte / 1e3)


def measure_copies(collectives: GroupCollectives, *, num_bytes: int, timer: Timer) -> float:
    """GB/s of what a rank gets from the others when all copy a layer's shards at once; 0 where
    they cannot read one another's memory.

    num_bytes: of a layer.
    """
    reads, size = collectives.peer_reads, collectives.size
    if reads is None:
        return 0.0
    peers = reads.connect(reads.allocate(num_bytes // size))
    if peers is None:
        return 0.0
    copies = ShardCopies(peers.views, [0], rank=collectives.rank, owner=peers.owner)
    received = torch.empty(num_bytes // size * size, dtype=torch.uint8, device="cuda")
    us = timer(lambda: copies.start(received, 0).wait())
    return wire_bytes("all_gather", received.nbytes, size) / us / 1e3


def measure_sums(group: TpGroup, *, rows: Sequence[int], features: int, timer: Timer) -> SumOfY:
    """rows: of all ranks, ascending.  features: hidden ones; there are four times as many inner."""
    size, device = group.size, group.device
    inner = 4 * features // size
    randn = partial(torch.randn, device=device, dtype=torch.bfloat16)
    first = prepare_linear(randn(inner, features) * features**-0.5, prepack=False)
    second = prepare_linear(randn(features, inner) * features**-0.5, prepack=False)
    norm = LayerNorm(randn(features), randn(features), 1e-5)
    points = []
    for m in rows:
        offsets = shard_offsets(m, size, step=_ROW_STEP)
        own = offsets[group.rank + 1] - offsets[group.rank]
        shard, whole, activations = randn(own, features), randn(m, features), randn(m, inner)

        def fused(
            offsets: Sequence[int] = offsets, shard: Tensor = shard, x: Tensor = activations
        ) -> None:
            all_gather_gemm(shard, first, peers=group.peers, row_offsets=offsets)
            gemm_reduce_scatter(
                x, second, peers=group.peers, row_offsets=offsets, residual=shard, norm=norm
            )

        def alone(whole: Tensor = whole, x: Tensor = activations) -> None:
            linear(whole, first)
            linear(x, second)

        moved = wire_bytes("all_reduce", whole.nbytes, size)
        points.append((moved, max(_extra_us(timer, fused, alone), 1.0)))
    us, per_byte = line(points)
    return SumOfY(us, 1 / per_byte / 1e3)


def _extra_us(timer: Timer, longer: Callable[[], object], shorter: Callable[[], object]) -> float:
    """How much longer a call takes: the median of pairs in turn, but the first, before which the
    GPUs may have idled and keep a higher clock than later."""
    pairs = [(timer(longer), timer(shorter)) for _ in range(_PAIRS + 1)]
    return statistics.median(a - b for a, b in pairs[1:])


def _gather(collectives: GroupCollectives, received: Tensor, sent: Tensor) -> None:
    collectives.start_all_gather(received, sent).wait()


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of us = a + b * bytes, neither below what a point of its own would say."""
    weights = [1 / us**2 for _, us in points]
    total = sum(weights)
    x = sum(w * num for w, (num, _) in zip(weights, points, strict=True)) / total
    y = sum(w * us for w, (_, us) in zip(weights, points, strict=True)) / total
    cross = sum(w * (n - x) * (us - y) for w, (n, us) in zip(weights, points, strict=True))
    square = sum(w * (n - x) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    largest, longest = points[-1]
    slope = max(cross / square, 0.1 * longest / largest)
    return max(y - slope * x, 0.0), slope
