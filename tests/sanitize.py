"""A small run of every GPU kernel, for `compute-sanitizer --tool TOOL python tests/sanitize.py`.

Names choose among them: python tests/sanitize.py attention rows. Nothing is checked here but what
the tool sees; it needs one Hopper GPU.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from paged_steps import make_step
from torch import Tensor

from bytetx.ops import fp8_linear, linear, norm
from bytetx.ops.attention import varlen_attention
from bytetx.ops.embedding import embed
from bytetx.ops.gated import gated_linear, prepare_gated
from bytetx.ops.linear_plan import LinearPlan, tilings
from bytetx.ops.norm import layer_norm, rms_norm
from bytetx.ops.paged import paged_attention
from bytetx.ops.pooling import pool
from bytetx.ops.quantize import empty_fp8_rows, quantize_rows
from bytetx.ops.rotary_kv import rotary_write_kv
from bytetx.ops.sample_tokens import sample_tokens
from bytetx.ops.sampling import Filters, argmax

if TYPE_CHECKING:
    from comm_layers import Group

HALVES = (torch.float16, torch.bfloat16)
LENGTHS = (5, 0, 1, 33, 256, 300, 0, 600)


def some(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Values that differ, by the fewest kernels of torch."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 97 / 97 - 0.5).to(dtype).reshape(shape).cuda()


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).cuda()


def run_attention() -> None:
    """Tiles, a pipeline for long ones, keys split for few tiles; masks and a bias."""
    for lengths in ([7, 0, 20, 1, 65, 129], [1100, 2500], [300]):
        cu_seqlens = ints(*torch.tensor([0, *lengths]).cumsum(0).tolist())
        for head_dim in (64, 128):
            q, k, v = some(sum(lengths), 6, head_dim).split(2, dim=1)
            options = {"max_seqlen": max(lengths)}
            for more in ({}, {"causal": True}, {"causal": True, "window": 50}):
                varlen_attention(q, k, v, cu_seqlens, **options, **more)
            bias = some(2, 2 * max(lengths) - 1, dtype=torch.float32)
            varlen_attention(q, k, v, cu_seqlens, relative_bias=bias, **options)


def run_linear() -> None:
    """Every tiling: more tiles than one a CTA, ragged edges, each split, gates."""
    for m, n, k in ((300, 416, 200), (77, 96, 1032)):
        x, residual = some(m, k), some(m, n)
        w = linear.prepare_linear(some(n, k), some(n), prepack=False)
        for tiling in tilings():
            for split_k in (1, 2, 4, 8) if tiling.is_small_m else (1,):
                plan = LinearPlan(tiling.index, split_k)
                linear.run_kernel(x, w, plan=plan, activation="gelu")
                linear.run_kernel(x, w, plan=plan, residual=residual)
    for n in norm.WIDTHS:
        w = linear.prepare_linear(some(n, 136), some(n), prepack=False)
        for m in (5, 700):
            options = {"norm": (some(n), some(n)), "eps": 1e-5}
            space = norm.fused_workspace(m, n, torch.device("cuda"))
            rest = some(m, n)
            norm.run_fused_kernel(some(m, 136), w, residual=rest, workspace=space, **options)
    for m in (3, 700):
        gates = prepare_gated(some(192, 128), some(192, 128), prepack=False)
        gated_linear(some(m, 128), gates, activation="silu")


def run_fp8() -> None:
    for m in (77, 700):
        rows, scale = quantize_rows(some(m, 256))
        w = fp8_linear.prepare_fp8_linear(some(416, 256), some(416))
        for tiling in fp8_linear.tilings():
            for out_scale in (None, 2.0):
                options = {"activation": "gelu", "out_scale": out_scale}
                fp8_linear.run_kernel(rows, scale, w, tiling.index, **options)


def run_rows() -> None:
    cu_seqlens = ints(*torch.tensor([0, *LENGTHS]).cumsum(0).tolist())
    for width, dtype in (
        (768, HALVES[0]),
        (1032, HALVES[1]),
        (33, torch.float32),
        (384, HALVES[0]),
    ):
        x, residual, weight = (some(n, dtype=dtype) for n in (75 * width, 75 * width, width))
        x, residual = x.view(75, width), residual.view(75, width)
        fp8 = empty_fp8_rows(x) if width % 16 == 0 else None
        layer_norm(x, weight, weight, eps=1e-5, residual=residual, fp8_out=fp8)
        rms_norm(x, weight, eps=1e-5, residual=residual, out=x, sum_out=residual)
        ids, table = ints(*(i % 5 for i in range(75))), some(9, width, dtype=dtype)
        tables = {"word": table, "position": table, "token_type": table}
        embed(ids, ids, ids, **tables, norm_weight=weight, norm_bias=weight)
        embed(ids, ids, ids, word=table)
        rows = some(sum(LENGTHS) + 9, width, dtype=dtype)
        for mode in ("mean", "max", "weightedmean", "lasttoken"):
            pool(rows, cu_seqlens, mode=mode, normalize=True)


def run_paged() -> None:
    """Decode rows and prefill pieces in one step, few (clusters) and many (items of the plan)."""
    few = [(1, 1), (5, 33), (1, 700), (65, 129), (1, 2000), (129, 300)]
    many = few + [(1, 90)] * 60
    for head_dim, num_kv_heads, lengths in ((64, 4, few), (128, 1, few), (64, 4, many)):
        step = make_step(lengths, dtype=HALVES[1], head_dim=head_dim, num_kv_heads=num_kv_heads)
        cache = (step.k_cache.nan_to_num().cuda(), step.v_cache.nan_to_num().cuda())
        options = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in step.lengths().items()}
        for window in (0, 37):
            paged_attention(step.q.cuda(), *cache, window=window, **options)
        heads = some(37, 4 + 2 * num_kv_heads, head_dim, dtype=HALVES[1])
        q, k, v = heads.split([4, num_kv_heads, num_kv_heads], dim=1)
        angles = some(50, head_dim // 2, dtype=torch.float32)
        at = ints(*range(37))
        norms = {"q_norm": q[0, 0].clone(), "k_norm": q[0, 0].clone(), "eps": 1e-6}
        for more in ({}, norms):
            rotary_write_kv(q, k, v, angles, angles, at, *cache, at, is_interleaved=False, **more)


def run_logits() -> None:
    argmax(some(5, 151_936), slot_indices=ints(*range(5)), last_tokens=ints(*range(9)))
    argmax(some(300, 1000, dtype=torch.float32))
    for n, vocab_size, dtype in ((3, 151_936, HALVES[1]), (70, 1000, torch.float32)):
        temperature, top_p, min_p = (some(n, dtype=torch.float32) + 0.6 for _ in range(3))
        top_k = torch.arange(n, device="cuda")
        options = {"seeds": top_k, "positions": top_k}
        for filters in (Filters(), Filters(top_k=top_k, top_p=top_p), Filters(min_p=min_p)):
            logits = some(n, vocab_size, dtype=dtype)
            sample_tokens(logits, temperature, filters, **options)


def run_comm() -> None:
    """The ops of several GPUs in a group of one."""
    from comm_group import make_group
    from comm_layers import gather_layer, sum_layer

    from bytetx.ops.comm_plan import CommPlan

    group = make_group(1)
    for max_rows in (20, 200):
        for dtype in HALVES:
            gather_layer(group, dtype, max_rows=max_rows).call(0)
            sum_layer(group, dtype, max_rows=max_rows, is_sharded=False).call(0)
            fused = CommPlan("fused", "peer_store", fuse_reduce=True)
            for plan in (None, *(replace(fused, tile=tile) for tile in ("128x192", "128x128"))):
                sum_layer(group, dtype, max_rows=max_rows, is_sharded=True, plan=plan).call(0)
            for plan, n in (
                (CommPlan("linear", "one_shot"), None),
                (CommPlan("linear", "two_shot"), 12288),
                (CommPlan("fused_small_m", "two_shot", "16x64"), None),
            ):
                options = {"is_sharded": False, "plan": plan, "n": n}
                sum_layer(group, dtype, max_rows=max_rows, **options).call(0)
    for _ in range(2):
        for rows in (1, 77):
            copy_and_sum(group, some(rows, 416, dtype=HALVES[1]))


def copy_and_sum(group: "Group", rows: Tensor) -> None:
    """Run the transport by copy engines beside cuBLAS, in a group of one rank."""
    from bytetx.ops.comm_epilogue import SumEpilogue
    from bytetx.ops.comm_kernels import sum_copies
    from bytetx.ops.norm import LayerNorm

    workspace, (count, width) = group.peers[0].workspace, rows.shape
    copies, vector = workspace.copies, some(width, dtype=rows.dtype)
    copies.barrier()
    copies.send(rows, 0, 0)
    copies.wait([])
    copies.end()
    epilogue = SumEpilogue(rows, vector, LayerNorm(vector, vector, 1e-5))
    sum_copies(copies.rows(0, count, rows), epilogue, workspace.memory, size=1)


RUNS: dict[str, Callable[[], None]] = {
    name.removeprefix("run_"): run for name, run in list(globals().items()) if name[:4] == "run_"
}

if __name__ == "__main__":
    for name in sys.argv[1:] or RUNS:
        RUNS[name]()
        torch.cuda.synchronize()
        print(f"ran {name}")
