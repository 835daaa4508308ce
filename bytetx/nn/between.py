"""The way from the sum that a layer ends in to the rows that the next one reads."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bytetx.checkpoint.layer_spec import LayerInputSpec, numbered
from bytetx.checkpoint.saved_tensor import Part
from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.linear import LinearWeight, linear
from bytetx.ops.norm import RowNorm


class Between(Protocol):
    """A kind is a frozen dataclass with this member; layers without one have the norm alone."""

    def run(self, x: Tensor, embedded: Tensor, norm: RowNorm | None) -> tuple[Tensor, Tensor]:
        """(what the next linear layer reads, the residual) of a layer's sum x.

        embedded: the tokens as the first layer got them.  All three [total_tokens, hidden_size].
        norm: of the next layer, or the last one; None: the layer reads the residual itself.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayerInput:
    """(x + out_norm(out(activation(gate(x)) * project_norm(project(embedded))))) * scale.

    project, gate: hidden_size -> size.  out: size -> hidden_size.  scale: [1].
    Source: EmbeddingGemma 2's per-layer embeddings that are projected alone.
    """

    project: LinearWeight
    project_norm: RowNorm
    gate: LinearWeight
    out: LinearWeight
    out_norm: RowNorm
    activation: str
    scale: Tensor

    def run(self, x: Tensor, embedded: Tensor, norm: RowNorm | None) -> tuple[Tensor, Tensor]:
        own = linear(embedded, self.project)
        inner = linear(x, self.gate, activation=self.activation)
        inner *= self.project_norm(own, out=own)
        added = linear(inner, self.out)
        added = self.out_norm(added, out=added)
        added += x
        added *= self.scale
        return (added if norm is None else norm(added)), added


@dataclass(frozen=True, slots=True)
class Mixing:
    """The next layer's attention reads norm(w[0] * x + w[1] * embedded); the sum stays.

    w: [2].  Source: NeoMME.
    """

    w: Tensor

    def run(self, x: Tensor, embedded: Tensor, norm: RowNorm | None) -> tuple[Tensor, Tensor]:
        mixed = x * self.w[0]
        mixed += embedded * self.w[1]
        return (mixed if norm is None else norm(mixed, out=mixed)), x


def load_between(spec: ModelSpec, load: TensorLoader) -> list[Between | None]:
    """Each layer's way to the next, before them that to the first; raises as TensorLoader does."""
    layers, indices = spec.layer_spec, range(spec.num_layers)
    if layers.mixing:
        names = [numbered(layers.mixing, i) for i in indices]
        return [*(Mixing(load.tensor(name, (2,))) for name in names), None]
    own = layers.layer_input
    if own is None:
        return [None] * (spec.num_layers + 1)
    return [None, *(_layer_input(spec, own, load, i) for i in indices)]


def _layer_input(spec: ModelSpec, own: LayerInputSpec, load: TensorLoader, i: int) -> LayerInput:
    hidden, eps, kind = spec.hidden_size, spec.norm_eps, spec.layer_spec.norm
    gate, out, out_norm, scale = own.names(i)
    shape = (spec.num_layers * own.size, hidden)
    rows = Part(0, (range(i * own.size, (i + 1) * own.size),))
    project = load.tensor(f"{own.project}.weight", shape, part=rows)
    return LayerInput(
        project=load.linear_from(project, None),
        # The projection is divided by the root of hidden_size, and so is its norm's input.
        project_norm=load.norm(own.project_norm, own.size, eps=eps * hidden, kind=kind),
        gate=load.linear_from(load.tensor(gate, (own.size, hidden)), None),
        out=load.linear_from(load.tensor(out, (hidden, own.size)), None),
        out_norm=load.norm(out_norm.removesuffix(".weight"), hidden, eps=eps, kind=kind),
        activation=spec.activation,
        scale=load.tensor(scale, (1,)),
    )
