"""A linear layer of several weights whose outputs follow each other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bytetx.ops.weight import QuantizedWeight, Weight


@dataclass(frozen=True, slots=True)
class StackedWeight(QuantizedWeight):
    """The outputs of some weights of any kinds, one behind the other, such as q, k and v.

    parts: of as many inputs and the same dtype, each with its own bias; two or more.
    Other members: as of bytetx.ops.weight.Weight.
    """

    parts: tuple[Weight, ...]

    @property
    def n(self) -> int:
        return sum(part.n for part in self.parts)

    @property
    def k(self) -> int:
        return self.parts[0].k

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def sum_bias(self) -> Tensor | None:
        biases = [part.sum_bias for part in self.parts]
        if all(bias is None for bias in biases):
            return None
        both = zip(self.parts, biases, strict=True)
        device = next(bias.device for bias in biases if bias is not None)
        return torch.cat(
            [
                torch.zeros(part.n, dtype=part.dtype, device=device) if bias is None else bias
                for part, bias in both
            ]
        )

    def shard(self, *, outputs: range | None = None, inputs: range | None = None) -> Weight:
        """As the parts' own."""
        taken: list[Weight] = []
        start = 0
        for part in self.parts:
            own = None
            if outputs is not None:
                first, stop = max(outputs.start - start, 0), min(outputs.stop - start, part.n)
                own = range(first, stop)
            if own is None or len(own):
                taken.append(part.shard(outputs=own, inputs=inputs))
            start += part.n
        return taken[0] if len(taken) == 1 else StackedWeight(tuple(taken))

    def matmul(
        self, x: Tensor, *, activation: str = "none", residual: Tensor | None = None
    ) -> Tensor:
        d = torch.cat([part.matmul(x, activation=activation) for part in self.parts], 1)
        return d if residual is None else d.add_(residual)
