"""Compiles every Triton kernel for GPUs that need not be there: prints a JSON line a kernel.

python tests/compile_triton.py 90 short long: a compute capability without the dot, and the sizes.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from bytetx.adapter_rows import RowSegments
from bytetx.ops import triton_kernels
from bytetx.ops.low_rank import tiles_on
from bytetx.ops.padded_ids import IdTables, PackedIds, PaddedIds
from bytetx.ops.triton_kernels import (
    attention,
    convolution,
    delta_rule,
    disentangled,
    gemm,
    grouped,
    kv_codes,
    late_interaction,
    launch,
    low_rank,
    norms,
    padding,
    paged,
    rows,
    sampling,
    sequences,
)

MODULES = (
    *(attention, convolution, delta_rule, disentangled, gemm, grouped, kv_codes, late_interaction),
    *(low_rank, norms),
    *(padding, paged, rows, sampling, sequences),
)
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
_ALIGNMENT = 16
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
# dtype, features of a head, mean tokens of a sequence: they choose other tiles
SIZES = {"short": (torch.float16, 64, 100), "long": (torch.bfloat16, 128, 1000)}


class Compiler:
    """Takes launches, and compiles instead."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        meta.pop("key", None)
        options = {name: meta.pop(name) for name in OPTIONS if name in meta}
        names = kernel.arg_names
        signature = {name: type_of(arg) for name, arg in zip(names, args, strict=False)}
        signature |= dict.fromkeys(meta, "constexpr")
        # As the launcher finds: aligned pointers, and sizes that are multiples of 16.
        attributes = {
            (i,): [["tt.divisibility", _ALIGNMENT]]
            for i, arg in enumerate(args)
            if isinstance(arg, torch.Tensor)
            or (isinstance(arg, int) and arg and arg % _ALIGNMENT == 0)
        }
        source = ASTSource(kernel, signature, meta, attributes)
        compiled = triton.compile(source, target=self.target, options=options)
        print(
            json.dumps(
                {
                    "kernel": kernel.__name__,
                    "capability": self.target.arch,
                    "shared_bytes": compiled.metadata.shared,
                    "cubin_bytes": len(compiled.asm["cubin"]),
                }
            )
        )


def type_of(arg: object) -> str:
    if isinstance(arg, torch.Tensor):
        return POINTERS[arg.dtype]
    if isinstance(arg, TensorDescriptor):
        return f"tensordesc<{POINTERS[arg.base.dtype][1:]}{arg.block_shape}>"
    return "fp32" if isinstance(arg, float) else "i32"


def has_tensor_descriptors(capability: int, device: torch.device) -> bool:
    return capability // 10 in launch.DESCRIPTOR_MAJORS


def launch_attention(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, mean_tokens: int) -> None:
    """Every kernel of attention, on [total, heads, head_dim] and four sequences' ends."""
    total, heads, head_dim = q.shape
    bounds = triton_kernels.sequence_bounds(ends, total)
    sinks = {"sinks": torch.zeros(heads), "window": 129}
    for options in ({}, {"causal": True, "window": 128}, {"softcap": 30.0}, sinks):
        triton_kernels.varlen_attention(
            q, k, v, bounds, batch_size=4, softmax_scale=0.1, out=torch.empty_like(q), **options
        )
    if q.dtype != torch.float32:
        wide = torch.empty(total, 1, 512, dtype=q.dtype)
        triton_kernels.varlen_attention(
            wide, wide, wide, bounds, batch_size=4, softmax_scale=1.0, out=torch.empty_like(wide)
        )
    tree_tables = torch.zeros(3, 64, dtype=torch.int32).unbind()
    for options in ({}, {"window": 128, "softcap": 30.0}):
        triton_kernels.tree_attention(
            q, k, v, tree_tables, tile_rows=triton_kernels.tree_tile_rows(head_dim),
            softmax_scale=0.1, out=torch.empty_like(q), **options,
        )  # fmt: skip
    table = torch.empty(64, heads, head_dim, dtype=q.dtype)
    triton_kernels.disentangled_attention(
        q, k, v, table, table, torch.zeros(999, dtype=torch.int32), bounds, softmax_scale=0.1
    )
    cache = torch.empty(9, 16, max(1, heads // 4), head_dim, dtype=q.dtype)
    codes = torch.empty(cache.shape, dtype=torch.uint8)
    scales = torch.empty(9, max(1, heads // 4), 16, dtype=torch.uint8)
    coded = {"k_scales": scales, "v_scales": scales}
    for longest, pages, options in (
        *(((1, 2000), cache, {}), ((1, 2000), codes, coded)),
        *(((mean_tokens, 200), cache, {}), ((mean_tokens, 200), codes, coded)),
    ):
        triton_kernels.paged_attention(
            q[: 4 if longest[0] == 1 else None],
            pages,
            pages,
            cu_seqlens=ends,
            page_table=ends[None],
            kv_seqlens=ends[:4],
            longest=longest,
            softmax_scale=0.1,
            window=0,
            softcap=0.0,
            alibi_slopes=None,
            out=torch.empty_like(q),
            **options,
        )


def launch_mixers(x: Tensor, ends: Tensor) -> None:
    """The kernels of layers without attention, on rows of four sequences."""
    channels = x.shape[1] // 3
    taps, state = x.new_empty(channels, 3), x.new_empty(9, 2, channels)
    for past in ((), (state, ends[:4], ends[:4])):
        triton_kernels.short_conv(
            x, taps, taps[:, 0], ends, is_gated=bool(past), has_silu=not past, past=past
        )


def launch_delta_rules(head_dim: int, dtype: torch.dtype) -> None:
    """In chunks and of one token each."""
    ends, floats, heads = torch.zeros(5, dtype=torch.int32), torch.empty(8), 8
    x = torch.empty(400, heads, head_dim, dtype=dtype)
    memory, gate = torch.empty(9, heads, head_dim, head_dim), x[:, :, 0].contiguous()
    for tokens in (400, 4):
        v, few = x[:tokens], x[:tokens, ::2].contiguous()
        triton_kernels.gated_delta_rule(
            few, few, v, gate[:tokens], gate[:tokens], floats, floats, ends,
            has_one_token=tokens == 4, past=(memory, ends[:4], ends[:4]),
        )  # fmt: skip
    triton_kernels.gated_norm(x, x.flatten(1), x[0, 0], 1e-6)


def launch_low_rank(x: Tensor, total: int, width: int) -> None:
    """Adapters of few rows and of many, of ranks that one kernel holds and that two take."""
    bounds = np.array([0, 1, total - 1, total])
    segments = RowSegments.of(np.array([0, 1, 0]), bounds)
    for size, rank in ((16, 16), (16, 64), (128, 64), (128, 100)):
        tiles = replace(tiles_on(x.device, segments, total), size=size)
        for kind in (x.dtype, torch.float32):
            d = torch.empty(total, 4 * width, dtype=kind)
            _, add = triton_kernels.start_low_rank(
                x.to(kind), tiles, d if kind == x.dtype else None, n=4 * width, max_rank=rank,
                addresses=torch.zeros(2, 4, dtype=torch.int64),
                ranges=torch.zeros(2, 24, 2, dtype=torch.int32), has_bias=kind == x.dtype,
            )  # fmt: skip
            if add is not None:
                add(d)


def launch_codes(width: int, dtype: torch.dtype) -> None:
    for bits, form, block_bytes in (
        *((4, "least", 2560), (4, "zero", 2560), (8, "symmetric", 4352), (8, "least", 4608)),
        *((8, "zero", 4608), (8, "halves", 4608)),
    ):
        codes = torch.zeros((24 * width // 64, width // 64, block_bytes), dtype=torch.uint8)
        for m, n, is_gated in (
            *((1, 4 * width, False), (1, 24 * width, True), (16, 4 * width, True)),
            *((32, 4 * width, False), (32, 24 * width, True)),
            *((64, 4 * width, True), (64, 24 * width, False), (128, 24 * width, True)),
        ):
            factor = torch.empty(n)
            activations = torch.empty(m, width, dtype=dtype)
            triton_kernels.grouped_linear(
                activations, codes, factor, None, bits=bits, form=form, activation="silu",
                residual=None, is_gated=is_gated,
            )  # fmt: skip
        triton_kernels.grouped_rows(codes, factor, None, k=width, bits=bits, form=form, dtype=dtype)


def launch_all(dtype: torch.dtype, head_dim: int, mean_tokens: int) -> None:
    """One call or more of each host function, at sizes of real models."""
    heads, width, total = 768 // head_dim, 768, 4 * mean_tokens
    q, k, v = torch.empty(3, total, heads, head_dim, dtype=dtype).unbind()
    ends = torch.zeros(5, dtype=torch.int32)
    launch_attention(q, k, v, ends, mean_tokens)
    x, weight = torch.empty(total, width, dtype=dtype), torch.empty(width, dtype=dtype)
    triton_kernels.norm(x, weight, weight, is_rms=False, eps=1e-5, residual=x, out=x, sum_out=x)
    ids = torch.zeros(total, dtype=torch.int32)
    triton_kernels.embed(
        (ids, ids, ids), (x, x, x), norm_weight=weight, norm_bias=weight, eps=1e-5,
        inputs_embeds=None, bad_ids=ends,
    )  # fmt: skip
    for m in (1, 32, 200, total, 1 << 14):
        wide = torch.empty(4 * width, width, dtype=dtype)
        activations = torch.empty(m, width, dtype=dtype)
        triton_kernels.linear(activations, wide, wide[:, 0], activation="gelu", residual=None)
    launch_codes(width, dtype)
    launch_low_rank(x, total, width)
    triton_kernels.gate_rows(x, width // 2, block=32, activation="silu")
    cos = torch.empty(99, head_dim // 2)
    triton_kernels.rotary(q, cos, cos, ids, is_interleaved=False)
    triton_kernels.write_kv(q, q, q, q, ids)
    codes = torch.empty(9, 16, *q.shape[1:], dtype=torch.uint8)
    scales = torch.empty(9, q.shape[1], 16, dtype=torch.uint8)
    triton_kernels.write_codes(q, q, codes, codes, ids, scales, scales)
    table = ids.new_zeros(1, 8)
    triton_kernels.restore_pages(
        codes, codes, scales, scales, table, ids[:1], num_columns=4, dtype=dtype
    )
    triton_kernels.pool(x, ends, mode="mean", first_tokens=None, normalize=False)
    tiles = triton_kernels.tiles_of(*[ends.numpy().astype(int)] * 2, dtype, ends.device)
    triton_kernels.maxsim(q[:, 0].contiguous(), k[:, 0].contiguous(), tiles)
    triton_kernels.maxsim_of_one(
        q[:32, 0].contiguous(), k[:, 0].contiguous(), ends, empty_score=0.0
    )
    launch_mixers(x, ends)
    launch_delta_rules(head_dim, dtype)
    floats, longs = torch.empty(total), torch.empty(total, dtype=torch.int64)
    limits = {"top_k": longs, "top_p": floats, "min_p": floats}
    triton_kernels.sample(x, floats, **limits, numbers=floats.double())
    triton_kernels.argmax(x, slot_indices=ends, last_tokens=ends)
    padded, packed = (
        torch.zeros((4, mean_tokens), dtype=torch.int64),
        PackedIds(ends, ids, ids, ids),
    )
    sizes = {"num_texts": 4, "filler_tokens": 64, "position_offset": 2}
    for mask in (None, padded, padded.bool()):
        for seqlens in (None, ends[:4]):
            given = PaddedIds(padded, mask, padded)
            triton_kernels.pack_padded(
                given, packed, **sizes, seqlens=seqlens, tables=IdTables(9, 9, 2), bad_ids=ends
            )
    triton_kernels.unpack_padded(x, ids)
    triton_kernels.count_tokens(padded.bool())


def main(capability: int, sizes: list[str]) -> None:
    for module in (gemm, grouped, paged, late_interaction):
        module.num_multiprocessors = lambda device: 132
    for module in (gemm, delta_rule):
        module.has_tensor_descriptors = partial(has_tensor_descriptors, capability)
    low_rank.launches_early = lambda device: capability >= 90
    for module in MODULES:
        module.launch = Compiler(capability)
    for name in sizes:
        launch_all(*SIZES[name])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
