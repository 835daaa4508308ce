"""Random calls of the fused ops, on ranks of one process or of several, and what they must give."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from bytetx.ops import comm_plan
from bytetx.ops.comm_gemm import (
    Peers,
    all_gather_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
)
from bytetx.ops.comm_plan import CommPlan, plan_comm
from bytetx.ops.gated import prepare_gated
from bytetx.ops.linear import prepare_linear
from bytetx.ops.norm import NORMS
from bytetx.parallel.layout import shard_offsets

EPS = 1e-5


@dataclass
class Group:
    """The ranks of this process, and the memory that theirs and others write to.

    size: of the group.  devices: of every rank; of one that another process has, where its operands
    are made here, too.  Of uneven shares, so that no plan is a table's, which may be NCCL's.
    """

    peers: dict[int, Peers]
    buffers: list[Tensor]
    devices: list[torch.device] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.devices)

    def poison(self) -> None:
        for buffer in self.buffers:
            buffer.fill_(float("nan"))

    def wait(self) -> None:
        for rank in self.peers:
            torch.cuda.synchronize(self.devices[rank])


@dataclass
class Layer:
    """One call on every rank: call(rank) gives results, expected(rank, dtype) the right ones."""

    name: str
    call: Callable[[int], tuple[Tensor, ...]]
    expected: Callable[[int, torch.dtype], tuple[Tensor, ...]]


def random_offsets(total: int, size: int) -> tuple[int, ...]:
    kind = random.randrange(3)
    if kind == 0:
        return shard_offsets(total, size, step=random.choice([16, 128, 256]))
    return 0, *sorted(random.randint(0, total) for _ in range(size - 1)), total


def randn(group: Group, rank: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=group.devices[rank], dtype=dtype)


def gather_layer(
    group: Group, dtype: torch.dtype, *, max_rows: int, plan: CommPlan | None = None
) -> Layer:
    m, n, k = random.randint(1, max_rows), 64 * random.randint(1, 20), 8 * random.randint(1, 200)
    offsets = random_offsets(m, group.size)
    activation = random.choice(["none", "gelu", "gelu_tanh", "relu", "silu", "gated"])
    ranks = range(group.size)
    own = [offsets[r + 1] - offsets[r] for r in ranks]
    xs = [randn(group, r, own[r], k, dtype=dtype) for r in ranks]
    weights = [randn(group, r, n, k, dtype=dtype) / k**0.5 for r in ranks]
    biases = [randn(group, r, n, dtype=dtype) for r in ranks]
    if activation == "gated":
        ws = [
            prepare_gated(
                w[: n // 2], w[n // 2 :], gate_bias=b[: n // 2], up_bias=b[n // 2 :], prepack=False
            )
            for w, b in zip(weights, biases, strict=True)
        ]
    else:
        ws = [prepare_linear(w, b, prepack=False) for w, b in zip(weights, biases, strict=True)]
    name = "silu" if activation == "gated" else activation

    def call(rank: int) -> tuple[Tensor, ...]:
        options = {"peers": group.peers[rank], "row_offsets": offsets, "plan": plan}
        return (all_gather_gemm(xs[rank], ws[rank], activation=name, **options),)

    def expected(rank: int, to: torch.dtype) -> tuple[Tensor, ...]:
        rows = torch.cat([x.to(group.devices[rank]) for x in xs])
        y = F.linear(rows.to(to), weights[rank].to(to), biases[rank].to(to))
        if activation == "gated":
            return (F.silu(y[:, : n // 2]) * y[:, n // 2 :],)
        if activation == "gelu_tanh":
            return (F.gelu(y, approximate="tanh"),)
        functions = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
        return (functions[name](y) if name in functions else y,)

    return Layer(f"gather {m} {n} {k} {activation} {offsets}", call, expected)


def rms(h: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(h, weight.shape, weight, EPS)


def sum_layer(
    group: Group,
    dtype: torch.dtype,
    *,
    max_rows: int,
    is_sharded: bool,
    plan: CommPlan | None = None,
    n: int | None = None,
    factor: float = 1.0,
) -> Layer:
    """factor: of all that is summed."""
    m, k = random.randint(1, max_rows), 8 * random.randint(1, 200)
    n = n or 32 * random.randint(1, 80)
    ranks, offsets = range(group.size), random_offsets(m, group.size)
    own = [slice(offsets[r], offsets[r + 1]) if is_sharded else slice(0, m) for r in ranks]
    xs = [randn(group, r, m, k, dtype=dtype) * factor for r in ranks]
    weights = [randn(group, r, n, k, dtype=dtype) / (k * group.size) ** 0.5 for r in ranks]
    has_partial, has_bias = random.random() < 0.5, random.random() < 0.5
    partials = [factor * randn(group, r, m, n, dtype=dtype) if has_partial else None for r in ranks]
    residual = randn(group, 0, m, n, dtype=dtype) * factor
    vectors, is_rms = randn(group, 0, 3, n, dtype=dtype), random.random() < 0.5
    vectors[2] *= factor
    residuals = [residual[own[r]].to(group.devices[r]) for r in ranks]
    on_rank = [vectors.to(group.devices[r]) for r in ranks]
    ws = [prepare_linear(w, prepack=False) for w in weights]
    plan = plan if plan or is_sharded else random_all_reduce_plan(group.size, m, n, k)

    def call(rank: int) -> tuple[Tensor, ...]:
        weight, shift, bias = on_rank[rank]
        kind = "rms_norm" if is_rms else "layer_norm"
        options = {
            "peers": group.peers[rank],
            "residual": residuals[rank],
            "bias": bias if has_bias else None,
            "partial": partials[rank],
            "norm": NORMS[kind](weight, None if is_rms else shift, EPS),
            "plan": plan,
        }
        if is_sharded:
            return gemm_reduce_scatter(xs[rank], ws[rank], row_offsets=offsets, **options)
        return gemm_all_reduce(xs[rank], ws[rank], **options)

    def expected(rank: int, to: torch.dtype) -> tuple[Tensor, ...]:
        h, (weight, shift, bias) = residual.to(group.devices[rank], to), on_rank[rank].to(to)
        for x, w, partial in zip(xs, weights, partials, strict=True):
            h = h + F.linear(x.to(h), w.to(h)) + (0 if partial is None else partial.to(h))
        h = h + bias if has_bias else h
        normalized = rms(h, weight) if is_rms else F.layer_norm(h, (n,), weight, shift, EPS)
        return normalized[own[rank]], h[own[rank]]

    return Layer(f"sum {m} {n} {k} sharded {is_sharded} {offsets}", call, expected)


def random_all_reduce_plan(size: int, m: int, n: int, k: int) -> CommPlan:
    """The rule's plan, or sometimes a large tile or a plan with two exchanges."""
    if random.random() < 0.3:
        return CommPlan("fused", "one_shot", random.choice(["128x192", "128x128"]))
    if random.random() < 0.3:
        tiles = ("16x64", "64x128", "128x128")
        plans = [CommPlan("fused_small_m", "two_shot", tile) for tile in tiles]
        return random.choice([CommPlan("linear", "two_shot"), *plans])
    plan = plan_comm(comm_plan.Layer("gemm_all_reduce", size, n, k, is_even=False), m)
    return plan if plan.is_fused else CommPlan("linear", "one_shot")


def random_layer(group: Group, dtype: torch.dtype, *, max_rows: int) -> Layer:
    kind = random.randrange(3)
    if kind == 0:
        return gather_layer(group, dtype, max_rows=max_rows)
    if kind == 1:
        tile = random.choice(["128x192", "128x128"])
        fused = CommPlan("fused", "peer_store", tile, fuse_reduce=True)
        plan = random.choice([None, fused])
        return sum_layer(group, dtype, max_rows=max_rows, is_sharded=True, plan=plan)
    return sum_layer(group, dtype, max_rows=min(max_rows, 300), is_sharded=False)


def assert_right(found: Tensor, exact: Tensor, plain: Tensor, name: str) -> None:
    assert found.shape == exact.shape, name
    if not exact.numel():
        return
    noise = 2 * torch.finfo(found.dtype).eps * exact.abs().max()
    error = (found.double() - exact).abs().max()
    assert error <= 2 * (plain.double() - exact).abs().max() + noise, name


def check_layer(group: Group, layer: Layer, dtype: torch.dtype) -> None:
    group.poison()
    group.wait()
    results = {rank: layer.call(rank) for rank in group.peers}
    group.wait()
    for rank, found in results.items():
        pairs = zip(found, layer.expected(rank, torch.float64), strict=True)
        plain = layer.expected(rank, dtype)
        for which, (ours, exact) in enumerate(pairs):
            assert_right(ours, exact, plain[which], layer.name)
