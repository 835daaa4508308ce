"""The expert that every token goes through beside those that its router chooses."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from bytetx.checkpoint.layer_spec import ExpertSpec
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.weight import Weight


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """sigmoid(gate . h) * out(act(first(h))), a gated feed-forward whose result has a gate, too.

    gate: [1, hidden_size].
    """

    first: Weight
    out: Weight
    gate: Tensor

    @property
    def num_bytes(self) -> int:
        return self.first.num_bytes + self.out.num_bytes + self.gate.nbytes

    def run(self, h: Tensor, activation: str) -> Tensor:
        """f32 [rows, hidden_size] of h [rows, hidden_size]."""
        found = self.out.matmul(self.first.matmul(h, activation=activation))
        # Row by row, so that batch mates change no bit; the product with one column would.
        gates = (h.float() * self.gate.float()).sum(-1, keepdim=True)
        return gates.sigmoid() * found.float()


def load_shared_expert(
    names: Mapping[str, str], load: TensorLoader, hidden_size: int, experts: ExpertSpec
) -> SharedExpert:
    """A layer's, of named tensors; raises as TensorLoader does."""
    inner = experts.shared_size
    gate, up = (
        load.matrix(f"{names[key]}.weight", (inner, hidden_size))
        for key in ("shared_gate", "shared_in")
    )
    out = load.matrix(f"{names['shared_out']}.weight", (hidden_size, inner))
    return SharedExpert(
        load.gated(gate, up, None, None),
        load.weight_from(out, None),
        load.tensor(f"{names['shared_router']}.weight", (1, hidden_size)),
    )
