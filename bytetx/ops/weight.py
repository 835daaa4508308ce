"""Weight: a linear layer of any kind, as the layers of a model multiply by it."""

from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from bytetx.ops import reference
from bytetx.ops.linear import LinearWeight, tensors_bytes

W = TypeVar("W")


class Weight(Protocol):
    """A linear layer n <- k of any kind; a kind is a frozen dataclass with these members.

    dtype: of rows and results.
    has_kernel: whether the Hopper kernel of 16-bit products takes it.
    is_plain: whether dense is the matrix as it was loaded, [n, k].
    block: rows of gates that take turns with as many of values; 0 where there is no gate.
    sum_bias: of a rank's share of the inputs, the bias that the sum over ranks gets.
    num_bytes: that this process holds of it.
    dense: the matrix, of the kinds that hold one of floats: kernels read it, and other kinds are
    made of it. Raises TypeError for the others.
    """

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def has_kernel(self) -> bool: ...

    @property
    def is_plain(self) -> bool: ...

    @property
    def block(self) -> int: ...

    @property
    def sum_bias(self) -> Tensor | None: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def dense(self) -> LinearWeight: ...

    def with_matrix(self, matrix: "Weight") -> "Weight":
        """The same layer with another matrix of the same meaning, of any kind."""
        ...

    def shard(self, *, outputs: range | None = None, inputs: range | None = None) -> "Weight":
        """A rank's share of the outputs, of the inputs, or of both; None: all.

        Of some inputs, the bias becomes sum_bias.
        """
        ...

    def matmul(
        self, x: Tensor, *, activation: str = "none", residual: Tensor | None = None
    ) -> Tensor:
        """act(x @ w.T + bias) (+ residual), or the gated product; a new [m, n]."""
        ...

    def product(
        self, x: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x @ w.T (+ bias) (+ residual) with all rows of a weight that has no bias of its own."""
        ...

    def activated(self, product: Tensor, activation: str) -> Tensor:
        """Return the result of matmul from the product with all of the weight's rows and bias."""
        ...


class QuantizedWeight:
    """Members that the kinds without a matrix of floats share; a kind is a dataclass of tensors."""

    __slots__ = ()
    has_kernel: ClassVar[bool] = False
    is_plain: ClassVar[bool] = False
    block: ClassVar[int] = 0

    @property
    def num_bytes(self) -> int:
        return tensors_bytes(self)

    @property
    def dense(self) -> LinearWeight:
        raise TypeError(
            f"{type(self).__name__} holds no matrix of floats; load the model in float32, float16 "
            "or bfloat16"
        )

    def with_matrix(self, matrix: W) -> W:
        return matrix

    def product(
        self: Weight, x: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        d = self.matmul(x, residual=residual)
        return d if bias is None else d.add_(bias)

    def activated(self, product: Tensor, activation: str) -> Tensor:
        return reference.activate(product, activation)
