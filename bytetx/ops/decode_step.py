"""All layers of a decoder for the next token of one sequence, as one kernel."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bytetx.ops import native
from bytetx.ops.check import is_aligned, require_contiguous, require_tensor
from bytetx.ops.gated import BLOCK

MAX_LAYERS = 64
# With more earlier keys, 16 CTAs share those of a KV head, which costs one exchange more: 24 us of
# a step with 180 keys, 60 with 100 (H100).
ONE_CTA_KEYS = 192
_BF16, _INT32, _FLOAT32 = (torch.bfloat16,), (torch.int32,), (torch.float32,)


class StepLayer(NamedTuple):
    """One layer, bf16 and contiguous: weights of its linear layers and norms, and its pages.

    The fields are those of DecodeStepLayer in csrc/decode_step_ops.h.

    qkv: [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size], rows of q, then k, then v.
    attn_out: [hidden_size, num_heads * head_dim].  ffn_in: [2 * inner_size, hidden_size], rows of
    GatedWeight.  ffn_out: [hidden_size, inner_size].  attn_norm, ffn_norm: [hidden_size].
    q_norm, k_norm: [head_dim], of each head, or None for none.  qkv_bias: of qkv's rows, or None.
    k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim].
    """

    qkv: Tensor
    attn_out: Tensor
    ffn_in: Tensor
    ffn_out: Tensor
    attn_norm: Tensor
    ffn_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv_bias: Tensor | None
    k_cache: Tensor
    v_cache: Tensor


@dataclass(frozen=True, slots=True)
class StepWeights:
    """layers: of a pre-norm decoder with RMS norms and a SiLU gate.  final_norm: [hidden_size].

    cos, sin: f32 [positions, head_dim / 2], of pairs (i, i + head_dim / 2) of every head of q and
    k.
    """

    layers: tuple[StepLayer, ...]
    final_norm: Tensor
    cos: Tensor
    sin: Tensor
    eps: float
    softmax_scale: float

    @property
    def hidden_size(self) -> int:
        return self.layers[0].qkv.shape[1]

    @property
    def inner_size(self) -> int:
        return self.layers[0].ffn_out.shape[1]

    @property
    def num_heads(self) -> int:
        return self.layers[0].attn_out.shape[1] // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].k_cache.shape[2]

    @property
    def head_dim(self) -> int:
        return self.layers[0].k_cache.shape[3]

    @property
    def workspace_bytes(self) -> int:
        """Bytes that make_workspace() allocates; 0 where no kernel takes these weights."""
        return self.bytes_of_sizes if self._has_known_shapes() else 0

    @property
    def bytes_of_sizes(self) -> int:
        """workspace_bytes, where the tensors are what StepLayer says."""
        return native.decode_step_workspace_bytes(
            self.final_norm.device,
            self.hidden_size,
            self.inner_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            has_bias=self.layers[0].qkv_bias is not None,
        )

    def _has_known_shapes(self) -> bool:
        first = self.layers[0]
        hidden, inner, head_dim = self.hidden_size, self.inner_size, self.head_dim
        attended = self.num_heads * head_dim
        qkv_rows = attended + 2 * self.num_kv_heads * head_dim
        shapes = {
            "qkv": (qkv_rows, hidden),
            "attn_out": (hidden, attended),
            "ffn_in": (2 * inner, hidden),
            "ffn_out": (hidden, inner),
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "q_norm": (head_dim,),
            "k_norm": (head_dim,),
            "qkv_bias": (qkv_rows,),
            "k_cache": tuple(first.k_cache.shape),
            "v_cache": tuple(first.k_cache.shape),
        }
        if len(self.layers) > MAX_LAYERS or inner % BLOCK:
            return False
        if any((layer.q_norm is None) != (layer.k_norm is None) for layer in self.layers):
            return False
        if len({layer.qkv_bias is None for layer in self.layers}) > 1:
            return False
        weights = (*self._of_layers(shapes), (self.final_norm, (hidden,)))
        tables = ((t, (None, head_dim // 2)) for t in (self.cos, self.sin))
        return all(_is(t, shape, torch.bfloat16) for t, shape in weights) and all(
            _is(t, (t.shape[0], shape[1]), torch.float32) for t, shape in tables
        )

    def _of_layers(
        self, shapes: dict[str, tuple[int, ...]]
    ) -> tuple[tuple[Tensor, tuple[int, ...]], ...]:
        both = (
            (t, shape)
            for layer in self.layers
            for t, shape in zip(layer, shapes.values(), strict=True)
        )
        return tuple((t, shape) for t, shape in both if t is not None)


def make_workspace(w: StepWeights) -> Tensor:
    """Allocate the scratch memory of decode_step's calls, which run in turn on one stream."""
    return torch.zeros(w.workspace_bytes, dtype=torch.uint8, device=w.final_norm.device)


def decode_step(
    x: Tensor,
    w: StepWeights,
    *,
    position_ids: Tensor,
    kv_seqlens: Tensor,
    slot_mapping: Tensor,
    page_table: Tensor,
    workspace: Tensor,
) -> Tensor:
    """The hidden states after the last norm of a sequence's new token, [1, hidden_size].

    x: [1, hidden_size], the embedded token, bf16.  position_ids, kv_seqlens (the new token
    counts), slot_mapping (-1: nowhere): int32 [1].  page_table: int32 [1, pages].  The token's
    keys and values are written to its slot of every layer.  workspace: make_workspace's.
    Residuals stay in f32 between the layers.  Raises ValueError on shape, dtype or device mismatch.
    Source: "Look Ma, No Bubbles!" (Hazy Research, 2025).
    """
    device = x.device
    require_tensor("x", x, shape=(1, w.hidden_size), dtypes=_BF16, device=w.final_norm.device)
    ints = {"position_ids": position_ids, "kv_seqlens": kv_seqlens, "slot_mapping": slot_mapping}
    for name, t in ints.items():
        require_tensor(name, t, shape=(1,), dtypes=_INT32, device=device)
    require_tensor("page_table", page_table, shape=(1, None), dtypes=_INT32, device=device)
    for name, t in (("x", x), ("page_table", page_table)):
        require_contiguous(name, t)
    if workspace.nbytes < w.bytes_of_sizes:
        raise ValueError(f"workspace must have {w.bytes_of_sizes} bytes, got {workspace.nbytes}")
    out = torch.empty_like(x)
    native.require_kernel("decode_step", device)(
        x=x,
        out=out,
        final_norm=w.final_norm,
        cos=w.cos,
        sin=w.sin,
        position_ids=position_ids,
        kv_seqlens=kv_seqlens,
        slot_mapping=slot_mapping,
        page_table=page_table,
        workspace=workspace,
        page_size=w.layers[0].k_cache.shape[1],
        one_cta_keys=ONE_CTA_KEYS,
        num_layers=len(w.layers),
        hidden_size=w.hidden_size,
        inner_size=w.inner_size,
        num_heads=w.num_heads,
        num_kv_heads=w.num_kv_heads,
        head_dim=w.head_dim,
        eps=w.eps,
        softmax_scale=w.softmax_scale,
        layers=w.layers,
        launch=native.launch_args(device),
    )
    return out


def _is(t: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype) -> bool:
    return tuple(t.shape) == shape and t.dtype == dtype and t.is_contiguous() and is_aligned(t)
