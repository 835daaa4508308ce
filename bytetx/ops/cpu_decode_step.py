"""All layers of a decoder for the next tokens of a few sequences, as one call on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bytetx.ops import native
from bytetx.ops.check import require_contiguous, require_tensor
from bytetx.ops.linear import ACTIVATIONS
from bytetx.ops.native_params import CpuStepLayer, StepNorm
from bytetx.ops.panel_linear import why_no_panels
from bytetx.ops.registry import Operation

_CPU = torch.device("cpu")
_INT32 = (torch.int32,)


@dataclass(frozen=True, slots=True)
class CpuStepWeights:
    """layers: their matrices in panels, norms and pages, as csrc/cpu_step_ops.h says.

    tensors: what holds the memory that they point to.
    gate_block: gates and values of ffn_in take turns in blocks of so many rows; 0: no gates.
    activation: of gates, or of ffn_in.  alibi_slopes: f32 [num_heads], or None.
    """

    layers: Sequence[CpuStepLayer]
    tensors: object
    final_norm: StepNorm
    dtype: torch.dtype
    hidden_size: int
    inner_size: int
    num_heads: int
    gate_block: int
    head_norm_eps: float
    softcap: float
    activation: str
    alibi_slopes: Tensor | None
    batch_invariant: bool


def why_no_cpu_step() -> str | None:
    """Why this machine cannot run cpu_decode_step, or None where it can."""
    return native.why_no_kernel("cpu_decode_step", _CPU) or why_no_panels()


class CpuDecodeStep:
    """Runs the layers; a call is forward of the model's pass without embedding and head.

    Results have the bits of one operation after another: a sequence's do not depend on the other
    sequences, nor on the number of threads.
    """

    def __init__(self, w: CpuStepWeights, k_cache: Tensor):
        """k_cache: of any layer, for the sizes of the pages."""
        self._weights = w
        self._num_pages, self._page_size, self._num_kv_heads, self._head_dim = k_cache.shape
        self._layers = native.cpu_step_layers(w.layers)

    def __call__(
        self,
        x: Tensor,
        *,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        kv_seqlens: Tensor,
        slot_mapping: Tensor,
        page_table: Tensor,
        isa: str = "auto",
    ) -> Tensor:
        """The hidden states after the last norm, [batch_size, hidden_size].

        x: [batch_size, hidden_size], the embedded tokens, one a sequence.  position_ids,
        kv_seqlens (the new tokens count), slot_mapping (-1: nowhere): int32 [batch_size].
        cu_seqlens: int32 [batch_size + 1].  page_table: int32 [batch_size, pages].  Keys and values
        are written to their slots of every layer.  isa: a key of native.ISA_CODES.
        Raises ValueError on shape or dtype mismatch, and where a number is outside its table.
        """
        w, batch_size = self._weights, x.shape[0]
        require_tensor("x", x, shape=(None, w.hidden_size), dtypes=(w.dtype,), device=_CPU)
        ints: dict[str, tuple[Tensor, tuple[int | None, ...]]] = {
            "position_ids": (position_ids, (batch_size,)),
            "kv_seqlens": (kv_seqlens, (batch_size,)),
            "slot_mapping": (slot_mapping, (batch_size,)),
            "cu_seqlens": (cu_seqlens, (batch_size + 1,)),
            "page_table": (page_table, (batch_size, None)),
        }
        require_contiguous("x", x)
        for name, (t, shape) in ints.items():
            require_tensor(name, t, shape=shape, dtypes=_INT32, device=_CPU)
            require_contiguous(name, t)
        launch = native.launch_args(_CPU, isa)
        dtype = native.DTYPE_CODES[w.dtype]
        sizes: dict[str, Any] = {
            "layers": self._layers,
            "cu_seqlens": cu_seqlens,
            "kv_seqlens": kv_seqlens,
            "batch_size": batch_size,
            "hidden_size": w.hidden_size,
            "inner_size": w.inner_size,
            "num_heads": w.num_heads,
            "num_kv_heads": self._num_kv_heads,
            "head_dim": self._head_dim,
            "gate_block": w.gate_block,
            "dtype": dtype,
            "batch_invariant": w.batch_invariant,
        }
        num_bytes = native.require_kernel("cpu_decode_step_workspace_bytes", _CPU)(
            **sizes, num_threads=launch.num_threads
        )
        out = torch.empty_like(x)
        native.require_kernel("cpu_decode_step", _CPU)(
            layers=self._layers,
            x=x,
            out=out,
            final_norm=w.final_norm,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            kv_seqlens=kv_seqlens,
            slot_mapping=slot_mapping,
            page_table=page_table,
            alibi_slopes=w.alibi_slopes,
            workspace=torch.empty(num_bytes, dtype=torch.uint8),
            workspace_bytes=num_bytes,
            batch_size=batch_size,
            num_pages=self._num_pages,
            max_pages=page_table.shape[1],
            page_size=self._page_size,
            hidden_size=w.hidden_size,
            inner_size=w.inner_size,
            num_heads=w.num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim,
            gate_block=w.gate_block,
            head_norm_eps=w.head_norm_eps,
            softcap=w.softcap,
            activation=ACTIVATIONS.index(w.activation),
            dtype=dtype,
            batch_invariant=w.batch_invariant,
            launch=launch,
        )
        return out


Operation("cpu_decode_step", "cpu").register(
    "native", "cpu", why_missing=lambda device: why_no_cpu_step()
)(CpuDecodeStep)
