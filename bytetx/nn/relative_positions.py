"""The keys and queries of relative positions that disentangled attention compares with."""

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.disentangled import log_buckets


def load_positions(spec: ModelSpec, load: TensorLoader) -> torch.Tensor | None:
    """The table of relative positions after its norm, f32 [num_buckets, hidden_size].

    None where attention is not disentangled.  Raises as TensorLoader does.
    """
    relative = spec.layer_spec.disentangled
    if relative is None:
        return None
    shape = (relative.num_buckets, spec.hidden_size)
    table = load.tensor(spec.embeddings["relative"], shape).float()
    if not relative.has_norm:
        return table
    norm = load.norm(spec.embeddings["relative_norm"], spec.hidden_size, eps=spec.norm_eps)
    return norm.in_torch(table)


def project_positions(
    positions: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, head_dim: int
) -> torch.Tensor:
    """positions [num_buckets, hidden_size] -> [num_buckets, heads, head_dim], weight's dtype.

    weight: [heads * head_dim, hidden_size].  Computed in f32, once a model.
    """
    projected = positions @ weight.float().T
    if bias is not None:
        projected += bias.float()
    return projected.to(weight.dtype).view(projected.shape[0], -1, head_dim)


def load_buckets(spec: ModelSpec, device: torch.device | str) -> torch.Tensor | None:
    """The bucket of each distance of two tokens, int32 [2 * span - 1]; None without them."""
    relative = spec.layer_spec.disentangled
    if relative is None:
        return None
    span = spec.max_positions + spec.position_offset  # a wrapped model may use every position
    return log_buckets(relative.log_buckets, relative.max_distance, span).to(device)
