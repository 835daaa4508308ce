"""The fused ops' reference, and the collectives under it, against one process."""

import json
from dataclasses import dataclass, replace
from importlib.resources import files

import pytest
import torch
from ranks import on_ranks
from tiny import one_thread  # noqa: F401  (a fixture)
from torch import Tensor
from torch.nn import functional as F

from bytetx.ops import comm_kernels
from bytetx.ops.comm_copies import CopyMemory
from bytetx.ops.comm_gemm import (
    Peers,
    all_gather_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
)
from bytetx.ops.comm_plan import CommPlan
from bytetx.ops.comm_workspace import Workspace
from bytetx.ops.gated import gated_linear, prepare_gated
from bytetx.ops.linear import LinearWeight, linear, prepare_linear
from bytetx.ops.norm import NORMS, LayerNorm, RmsNorm, RowNorm
from bytetx.parallel.layout import local_range, shard_offsets
from bytetx.parallel.tp import TpGroup

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 2, 3, 4]
# Fewer rows than ranks, none, a part of a tile, and shares that differ.
TOTALS = [0, 1, 15, 16, 17, 70]


def own_rows(x: Tensor, offsets: tuple[int, ...], rank: int) -> Tensor:
    return x[offsets[rank] : offsets[rank + 1]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32])
def test_collectives_on_ragged_shares(size: int, dtype: torch.dtype) -> None:
    whole = {total: torch.randint(-9, 9, (total, 6)).to(dtype) for total in TOTALS}

    def do(group: TpGroup) -> None:
        collectives = group.collectives
        for total, x in whole.items():
            offsets = shard_offsets(total, size, step=16)
            gathered = collectives.all_gather(own_rows(x, offsets, group.rank), offsets)
            assert torch.equal(gathered, x)
            columns = shard_offsets(6, size)
            own = x[:, columns[group.rank] : columns[group.rank + 1]]
            if total:
                assert torch.equal(collectives.all_gather_columns(own, columns), x)
            sent = x.clone() if group.rank == 0 else torch.zeros_like(x)
            assert torch.equal(collectives.broadcast(sent), x)
            if dtype != torch.int32:
                summed = collectives.all_reduce(x.clone())
                assert torch.equal(summed, (size * x).to(summed.dtype))
                part = collectives.reduce_scatter(x.clone(), offsets)
                assert torch.equal(part, own_rows(summed, offsets, group.rank))

    on_ranks(size, do)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("activation", ["none", "gelu", "gated"])
@pytest.mark.parametrize("total", TOTALS)
def test_all_gather_gemm(size: int, activation: str, total: int) -> None:
    k, n = 24, 64
    x, weight, up = torch.randn(total, k), torch.randn(n, k), torch.randn(n, k)
    bias, up_bias = torch.randn(n), torch.randn(n)
    offsets = shard_offsets(total, size, step=16)

    def layer(own: range, x: Tensor, group: TpGroup | None = None) -> Tensor:
        part = slice(own.start, own.stop)
        options = {"peers": group.peers, "row_offsets": offsets} if group else {}
        if activation == "gated":
            w = prepare_gated(
                weight[part], up[part], gate_bias=bias[part], up_bias=up_bias[part], prepack=False
            )
            run = all_gather_gemm if group else gated_linear
            return run(x, w, activation="silu", **options)
        w = prepare_linear(weight[part].clone(), bias[part].clone(), prepack=False)
        return (all_gather_gemm if group else linear)(x, w, activation=activation, **options)

    wanted = layer(range(n), x)
    features = shard_offsets(n, size, step=16)

    def do(group: TpGroup) -> Tensor:
        rows = own_rows(x, offsets, group.rank).contiguous()
        return layer(local_range(features, group.rank), rows, group)

    found = torch.cat(on_ranks(size, do), dim=1)
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_partial", [False, True])
def test_sums_with_bias_residual_and_norm(
    size: int, kind: str, dtype: torch.dtype, has_partial: bool
) -> None:
    """Within twice the error of one process in the same dtype, against f64."""
    cases = [Case.random(total, size, kind, dtype, has_partial=has_partial) for total in TOTALS]
    results = on_ranks(size, lambda group: [run_sums(case, group) for case in cases])
    for number, case in enumerate(cases):
        of_ranks = [result[number] for result in results]
        for which in range(2):
            exact, plain = case.expected(torch.float64)[which], case.expected(dtype)[which]
            scattered = torch.cat([scattered[which] for scattered, _ in of_ranks])
            for found in (scattered, *(reduced[which] for _, reduced in of_ranks)):
                assert found.dtype == dtype
                assert_right(found, exact, plain)
            assert all(torch.equal(of_ranks[0][1][which], r[which]) for _, r in of_ranks)


@dataclass(frozen=True)
class Case:
    x: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor
    partials: Tensor | None  # one a rank
    norm: RowNorm

    @staticmethod
    def random(
        total: int, size: int, kind: str, dtype: torch.dtype, *, has_partial: bool
    ) -> "Case":
        k, n = 64, 32
        shift = None if kind == "rms_norm" else torch.randn(n, dtype=dtype)
        return Case(
            torch.randn(total, k, dtype=dtype),
            torch.randn(n, k, dtype=dtype),
            torch.randn(n, dtype=dtype),
            torch.randn(total, n, dtype=dtype),
            torch.randn(size, total, n, dtype=dtype) if has_partial else None,
            NORMS[kind](torch.randn(n, dtype=dtype), shift, 1e-5),
        )

    def expected(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        h = F.linear(self.x.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
        if self.partials is not None:
            h = h + self.partials.to(dtype).sum(0)
        h, norm = h + self.residual.to(dtype), self.norm
        shape, weight = h.shape[1:], norm.weight.to(dtype)
        if norm.bias is None:
            return F.rms_norm(h, shape, weight, norm.eps), h
        return F.layer_norm(h, shape, weight, norm.bias.to(dtype), norm.eps), h


def run_sums(case: Case, group: TpGroup) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(this rank's rows of the reduce-scatter, all rows of the all-reduce)"""
    inputs = local_range(shard_offsets(case.x.shape[1], group.size, step=16), group.rank)
    own = slice(inputs.start, inputs.stop)
    offsets = shard_offsets(len(case.x), group.size, step=16)
    x, w = (
        case.x[:, own].contiguous(),
        prepare_linear(case.weight[:, own].contiguous(), prepack=False),
    )
    options = {"peers": group.peers, "bias": case.bias, "norm": case.norm}

    def partial() -> Tensor | None:
        return None if case.partials is None else case.partials[group.rank].clone()

    rows = own_rows(case.residual, offsets, group.rank).clone()
    scattered = gemm_reduce_scatter(
        x, w, row_offsets=offsets, residual=rows, partial=partial(), **options
    )
    reduced = gemm_all_reduce(x, w, residual=case.residual.clone(), partial=partial(), **options)
    return scattered, reduced


def assert_right(found: Tensor, exact: Tensor, plain: Tensor) -> None:
    if not exact.numel():
        assert found.shape == exact.shape
        return
    noise = torch.finfo(found.dtype).eps * exact.abs().max()
    error = (found.double() - exact).abs().max()
    assert error <= 2 * (plain.double() - exact).abs().max() + noise


def test_wrong_arguments() -> None:
    def do(group: TpGroup) -> None:
        w = prepare_linear(torch.randn(8, 4), torch.randn(8), prepack=False)
        x, norm = torch.randn(3, 4), RmsNorm(torch.ones(8), None, 1e-5)
        with pytest.raises(ValueError, match="row_offsets must be 3 row numbers from 0"):
            all_gather_gemm(x, w, peers=group.peers, row_offsets=(0, 3))
        with pytest.raises(ValueError, match=r"x must have shape \[2, 4\]"):
            all_gather_gemm(x, w, peers=group.peers, row_offsets=(0, 2, 4))
        with pytest.raises(ValueError, match="w must have no bias"):
            gemm_all_reduce(x, w, peers=group.peers, residual=torch.randn(3, 8), norm=norm)

    on_ranks(2, do)


def test_sums_of_rows_that_all_ranks_have_fit_the_staging_buffer() -> None:
    """Up to where row_schemes.json begins to shard them; four ranks and more use two exchanges."""
    schemes = json.loads(files("bytetx.parallel").joinpath("row_schemes.json").read_text())["cuda"]
    for n, tp, most in [(s["hidden_size"], s["tp"], s["shard_from_tokens"] - 1) for s in schemes]:
        weight = torch.empty(n, 64, dtype=torch.bfloat16, device="meta")
        w = LinearWeight(weight, None, n, 64, torch.bfloat16, is_prepacked=False, has_kernel=True)
        for size in (2,) if tp == 2 else (3, 4, 5, 8):
            assert comm_kernels.fits_staging(w, rows=most, size=size, is_two_shot=size > 2)


@pytest.mark.parametrize(
    "plan",
    [
        CommPlan("fused", "peer_store", "128x192"),
        CommPlan("fused", "peer_store", "128x128", fuse_reduce=True),
        CommPlan("cublas", "copy_engine"),
    ],
    ids=str,
)
def test_rows_that_no_kernel_sums_go_through_a_collective(plan: CommPlan) -> None:
    """Rows have 16416 features, where a kernel takes 16384."""

    class Alone:
        def reduce_scatter(self, partial: Tensor, row_offsets: tuple[int, ...]) -> Tensor:
            return partial

    n, k, m = 16416, 8, 3
    size = {"buffer_bytes": 1 << 30, "num_flags": 0}
    region = torch.zeros(1 << 20, dtype=torch.uint8)
    copies = CopyMemory(object(), (0,), region, None, 0)
    unused = torch.zeros(0, dtype=torch.int32)
    workspace = Workspace((0,), (0,), *size.values(), unused, object(), unused, copies)
    x, weight, residual, vector = (torch.randn(*s) for s in ((m, k), (n, k), (m, n), (n,)))
    w = replace(prepare_linear(weight, prepack=False), has_kernel=True)
    h = F.linear(x, weight) + residual
    normalized, found = gemm_reduce_scatter(
        x,
        w,
        peers=Peers(0, 1, Alone(), workspace),
        row_offsets=(0, m),
        residual=residual.clone(),
        norm=LayerNorm(vector, vector, 1e-5),
        plan=plan,
    )
    assert torch.allclose(found, h, atol=1e-4)
    assert torch.allclose(normalized, F.layer_norm(h, (n,), vector, vector), atol=1e-3)
