"""Linear layers on packed rows: oneDNN with prepacked weights on a CPU, cuBLAS on CUDA."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bytetx.ops import reference
from bytetx.ops.check import require_contiguous, require_tensor
from bytetx.ops.rows import whole_tiles

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "silu", "tanh")

# Rows that oneDNN lays a prepacked weight out for; a hint, every m runs.
_PREPACK_ROWS = 4096
# (attribute, algorithm) of torch.ops.mkldnn._linear_pointwise for each activation.
_ONEDNN_ACTIVATIONS = {
    "none": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
}


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A layer's weight as `linear` takes it: plain [n, k], or laid out by oneDNN."""

    weight: Tensor
    bias: Tensor | None
    n: int
    k: int
    dtype: torch.dtype
    is_prepacked: bool


def prepare_linear(weight: Tensor, bias: Tensor | None = None, *, prepack: bool) -> LinearWeight:
    """A LinearWeight of weight [n, k] and bias [n]; plain weights are kept without a copy.

    prepack: lay the weight out for oneDNN once (a copy), where that helps: f32 or bf16 on a CPU
    with oneDNN; elsewhere the plain weight is kept.
    """
    require_tensor("weight", weight, shape=(None, None))
    n, k = weight.shape
    if bias is not None:
        require_tensor("bias", bias, shape=(n,), dtypes=(weight.dtype,), device=weight.device)
    is_prepacked = prepack and _has_onednn(weight)
    if is_prepacked:
        dense = weight.detach().contiguous()
        weight = torch.ops.mkldnn._reorder_linear_weight(dense, _PREPACK_ROWS)
    return LinearWeight(weight, bias, n, k, weight.dtype, is_prepacked)


def linear(
    x: Tensor, w: LinearWeight, *, activation: str = "none", residual: Tensor | None = None
) -> Tensor:
    """act(x @ w.T + bias) (+ residual).

    x: [m, k] in w's dtype, contiguous.  activation: one of ACTIVATIONS.  residual: [m, n].
    Returns a new [m, n].  A row's result does not depend on the other rows (oneDNN: bitwise).
    Raises ValueError on shape, dtype or device mismatch, or an unknown activation.
    """
    require_tensor("x", x, shape=(None, w.k), dtypes=(w.dtype,), device=w.weight.device)
    require_contiguous("x", x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if residual is not None:
        shape = (x.shape[0], w.n)
        require_tensor("residual", residual, shape=shape, dtypes=(w.dtype,), device=x.device)
        require_contiguous("residual", residual)
    if not w.is_prepacked and not _has_onednn(w.weight):
        return reference.linear(x, w.weight, w.bias, activation=activation, residual=residual)
    if x.shape[0] == 0:
        return x.new_empty((0, w.n))
    m, rows = x.shape[0], whole_tiles(x)
    if rows.shape[0] == 1:
        # With one row oneDNN takes a matrix-vector kernel that sums in another order: run two, so
        # that a row alone equals the same row in a batch, bit for bit.
        rows = rows.expand(2, -1).contiguous()
    attribute, algorithm = _ONEDNN_ACTIVATIONS[activation]
    d = torch.ops.mkldnn._linear_pointwise(rows, w.weight, w.bias, attribute, [], algorithm)[:m]
    return d if residual is None else d.add_(residual)


def _has_onednn(weight: Tensor) -> bool:
    """Whether torch can run this weight through oneDNN's fused linear."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
