"""Changes of attended values before they are projected: less of the own value, and a gate."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.linear import LinearWeight
from bytetx.ops.weight import Weight

Project = Callable[[Tensor, Weight], Tensor]


@dataclass(frozen=True, slots=True)
class Attended:
    """(o - scale * (o . u) * u) * sigmoid(gate(h)), u the unit of a token's own value.

    scale: [num_heads, 1].  gate: hidden_size -> num_heads * head_dim.
    Source: NeoMME's exclusive self-attention and output gate.
    """

    scale: Tensor
    gate: LinearWeight

    def run(self, attended: Tensor, v: Tensor, h: Tensor, project: Project) -> Tensor:
        """[total_tokens, num_heads * head_dim].

        attended: [total_tokens, num_heads, head_dim], overwritten.  v: [total_tokens,
        num_kv_heads, head_dim], the values that were attended to.  h: what the attention read.
        project: multiplies the pass's rows with a linear layer.
        """
        wide = v.float()
        unit = wide / wide.norm(dim=2, keepdim=True).clamp(min=1e-12)
        grouped = attended.unflatten(1, (v.shape[1], -1))  # [rows, key heads, their queries, dim]
        unit = unit.to(attended.dtype)[:, :, None]
        along = (grouped * unit).sum(3, keepdim=True)
        along *= self.scale.view(v.shape[1], -1, 1)
        grouped -= along * unit
        gates = project(h, self.gate).sigmoid_()
        return gates.mul_(attended.flatten(1))


@dataclass(frozen=True, slots=True)
class OutputGate:
    """o * sigmoid(gate(h)).  gate: hidden_size -> num_heads * head_dim."""

    gate: LinearWeight

    def run(self, attended: Tensor, v: Tensor, h: Tensor, project: Project) -> Tensor:
        """As of Attended."""
        return project(h, self.gate).sigmoid_().mul_(attended.flatten(1))


def load_attended(spec: ModelSpec, load: TensorLoader, layer: int) -> Attended | OutputGate | None:
    """A layer's; None where attended values are projected as they are."""
    if spec.layer_spec.gates_queries:
        rows = spec.num_heads * spec.head_dim
        name = f"{spec.layer_names(layer)['q']}.weight"
        both = load.tensor(name, (2 * rows, spec.hidden_size))
        gate = both.unflatten(0, (-1, 2, spec.head_dim))[:, 1].flatten(0, 1)
        return OutputGate(load.linear_from(gate.contiguous(), None))
    own = spec.layer_spec.attended
    if own is None:
        return None
    alpha, gate = own.names(layer)
    scale = torch.tanh(load.tensor(alpha, (spec.num_heads,)))[:, None]
    weight = load.tensor(gate, (spec.num_heads * spec.head_dim, spec.hidden_size))
    return Attended(scale, load.linear_from(weight, None))
