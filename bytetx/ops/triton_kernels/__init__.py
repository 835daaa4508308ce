"""Kernels in Triton, for CUDA GPUs that the native core has no code for; each op's host function.

They take checked arguments and launch by sizes alone, so that a CUDA graph can hold them. Import
this package through ops.triton_backend, which says whether it can be.
"""

from bytetx.ops.triton_kernels.attention import tree_attention, tree_tile_rows, varlen_attention
from bytetx.ops.triton_kernels.convolution import short_conv
from bytetx.ops.triton_kernels.delta_rule import gated_delta_rule, gated_norm
from bytetx.ops.triton_kernels.disentangled import disentangled_attention
from bytetx.ops.triton_kernels.gemm import linear
from bytetx.ops.triton_kernels.grouped import grouped_linear, grouped_rows
from bytetx.ops.triton_kernels.kv_codes import restore_pages, write_codes
from bytetx.ops.triton_kernels.late_interaction import (
    MAX_ONE_QUERY,
    maxsim,
    maxsim_of_one,
    tiles_of,
)
from bytetx.ops.triton_kernels.low_rank import start_low_rank
from bytetx.ops.triton_kernels.norms import embed, norm
from bytetx.ops.triton_kernels.padding import count_tokens, pack_padded, unpack_padded
from bytetx.ops.triton_kernels.paged import paged_attention
from bytetx.ops.triton_kernels.rows import gate_rows, pool, rotary, write_kv
from bytetx.ops.triton_kernels.sampling import argmax, sample
from bytetx.ops.triton_kernels.sequences import sequence_bounds

__all__ = [
    "MAX_ONE_QUERY",
    "start_low_rank",
    "argmax",
    "count_tokens",
    "disentangled_attention",
    "embed",
    "gate_rows",
    "gated_delta_rule",
    "gated_norm",
    "grouped_linear",
    "grouped_rows",
    "linear",
    "maxsim",
    "maxsim_of_one",
    "norm",
    "pack_padded",
    "paged_attention",
    "pool",
    "restore_pages",
    "rotary",
    "sample",
    "sequence_bounds",
    "short_conv",
    "tiles_of",
    "tree_attention",
    "tree_tile_rows",
    "unpack_padded",
    "varlen_attention",
    "write_codes",
    "write_kv",
]
