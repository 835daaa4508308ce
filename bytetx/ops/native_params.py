"""Structs of the native contract (csrc/ops.h and its sisters) that a native call holds as a value.

A field that is a pointer takes an address, a tensor or None. The core compares the names and their
order with its own and refuses others.
"""

from typing import NamedTuple

from torch import Tensor

Pointer = int | Tensor | None


class Launch(NamedTuple):
    """Where a call runs: the CUDA device and stream, or the CPU's threads and instruction set."""

    device: int
    stream: int
    num_threads: int
    isa: int


class LinearParams(NamedTuple):
    a: Pointer = None
    b: Pointer = None
    bias: Pointer = None
    residual: Pointer = None
    d: Pointer = None
    m: int = 0
    n: int = 0
    k: int = 0
    activation: int = 0
    gated: bool = False
    tiling: int = 0
    split_k: int = 1
    dtype: int = 0


class NormParams(NamedTuple):
    x: Pointer = None
    residual: Pointer = None
    out: Pointer = None
    sum_out: Pointer = None
    weight: Pointer = None
    bias: Pointer = None
    out_fp8: Pointer = None
    out_scale: Pointer = None
    total_tokens: int = 0
    hidden_size: int = 0
    eps: float = 0.0
    dtype: int = 0


class PagedPlanParams(NamedTuple):
    cu_seqlens: int
    kv_seqlens: int
    plan: int
    plan_bytes: int
    batch_size: int
    total_tokens: int
    max_seqlen: int
    max_kv_seqlen: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    tile_tokens: int
    batch_invariant: bool = False


class PanelMatrix(NamedTuple):
    weight: Pointer
    bias: Pointer
    factor: Pointer
    n: int
    k: int
    features: int
    columns: int
    chain: int
    format: int


class StepNorm(NamedTuple):
    weight: Pointer = None
    bias: Pointer = None
    eps: float = 0.0
    is_rms: bool = False


class CpuStepLayer(NamedTuple):
    qkv: PanelMatrix
    attn_out: PanelMatrix
    ffn_in: PanelMatrix
    ffn_out: PanelMatrix
    attn_norm: StepNorm
    attn_out_norm: StepNorm
    ffn_norm: StepNorm
    ffn_out_norm: StepNorm
    q_norm: Pointer
    k_norm: Pointer
    k_cache: Pointer
    v_cache: Pointer
    cos: Pointer
    sin: Pointer
    num_positions: int
    num_pairs: int
    is_interleaved: bool
    window: int
    softmax_scale: float


class PaddedMatrix(NamedTuple):
    data: Pointer = None
    row_stride: int = 0
    item_bytes: int = 4
    is_float: bool = False


class StepBlockLayout(NamedTuple):
    cu_seqlens: int
    prompt_tokens: int
    input_ids: int
    position_ids: int
    token_type_ids: int
    num_texts: int
    num_fillers: int
    filler_tokens: int
    total_tokens: int
    position_offset: int
