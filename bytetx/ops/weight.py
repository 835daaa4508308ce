"""Weight: a linear layer of any kind, as the layers of a model multiply by it."""

from typing import Protocol

from torch import Tensor

from bytetx.ops.linear import LinearWeight


class Weight(Protocol):
    """A linear layer n <- k of any kind; a kind is a frozen dataclass with these members.

    has_kernel: whether the Hopper kernel of 16-bit products takes it.
    block: rows of gates that take turns with as many of values; 0 where there is no gate.
    dense: the matrix as it was loaded, of the kinds that hold one: ranks share it, and other kinds
    are made of it. Raises TypeError for the others.
    """

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int: ...

    @property
    def has_kernel(self) -> bool: ...

    @property
    def block(self) -> int: ...

    @property
    def dense(self) -> LinearWeight: ...

    def with_dense(self, dense: LinearWeight) -> "Weight":
        """The same layer with another matrix of the same meaning."""
        ...

    def matmul(
        self, x: Tensor, *, activation: str = "none", residual: Tensor | None = None
    ) -> Tensor:
        """act(x @ w.T + bias) (+ residual), or the gated product; a new [m, n]."""
        ...

    def activated(self, product: Tensor, activation: str) -> Tensor:
        """Return the result of matmul from the product with all of the weight's rows and bias."""
        ...
