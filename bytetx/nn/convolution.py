"""A convolution over the tokens of each packed sequence, as a linear layer on their neighbours."""

from dataclasses import dataclass

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.linear import LinearWeight, linear
from bytetx.ops.norm import RowNorm


@dataclass(frozen=True, slots=True)
class Convolution:
    """norm(x + activation(convolution of the embedded tokens)).

    linear: size * hidden_size features of a token and its neighbours -> hidden_size.
    """

    size: int
    activation: str
    linear: LinearWeight
    norm: RowNorm

    def forward(self, around: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """around: rows of neighbors().  x, result: [the same rows, hidden_size]."""
        y = linear(around, self.linear, activation=self.activation)
        return self.norm(y, residual=x)


def neighbors(x: torch.Tensor, cu_seqlens: torch.Tensor, size: int) -> torch.Tensor:
    """[total_tokens, size * features] of x [total_tokens, features]: each token's neighbours.

    The middle one is the token itself; those outside of its sequence are zeros.  size: odd.
    cu_seqlens: int32 [batch_size + 1]; rows past its end are padding of any content.
    """
    at = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    after = torch.searchsorted(cu_seqlens, at, right=True).clamp(max=cu_seqlens.shape[0] - 1)
    start, end = cu_seqlens[after - 1], cu_seqlens[after]
    neighbor_rows = []
    for offset in range(-(size // 2), size // 2 + 1):
        index = at + offset
        is_inside = (index >= start) & (index < end)
        rows = x[index.clamp(0, max(x.shape[0] - 1, 0))]
        neighbor_rows.append(torch.where(is_inside[:, None], rows, 0))
    return torch.cat(neighbor_rows, dim=1)


def load_convolution(spec: ModelSpec, load: TensorLoader) -> Convolution | None:
    """None where the model has none. Raises as TensorLoader does."""
    convolution, hidden = spec.layer_spec.convolution, spec.hidden_size
    if convolution is None:
        return None
    shape = (hidden, hidden, convolution.size)
    weight = load.tensor(f"{convolution.linear}.weight", shape)
    bias = load.tensor(f"{convolution.linear}.bias", (hidden,))
    by_neighbor = weight.permute(0, 2, 1).reshape(hidden, -1).contiguous()
    return Convolution(
        size=convolution.size,
        activation=convolution.activation,
        linear=load.linear_from(by_neighbor, bias),
        norm=load.norm(convolution.norm, hidden, eps=spec.norm_eps),
    )
