"""Fields of structs of csrc/ops.h that other structs hold, in their order; addresses are ints."""

from typing import NamedTuple


class LinearParams(NamedTuple):
    a: int
    b: int
    bias: int = 0
    residual: int = 0
    d: int = 0
    m: int = 0
    n: int = 0
    k: int = 0
    activation: int = 0
    gated: bool = False
    tiling: int = 0
    split_k: int = 1
    dtype: int = 0


class NormParams(NamedTuple):
    x: int = 0
    residual: int = 0
    out: int = 0
    sum_out: int = 0
    weight: int = 0
    bias: int = 0
    out_fp8: int = 0
    out_scale: int = 0
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
