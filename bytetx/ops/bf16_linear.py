"""Linear layers of bf16 by a kernel of our own, for CPUs: a result is one chain of f32 sums."""

import torch
from torch import Tensor

from bytetx.ops import native
from bytetx.ops.registry import Operation

_CPU = torch.device("cpu")


def why_no_bf16_linear() -> str | None:
    """Why this machine cannot run bf16_linear, or None where it can."""
    reason = native.why_no_kernel("bf16_linear_isa", _CPU)
    if reason is None and bf16_linear_isa() is None:
        return "it needs a CPU with AVX2 or NEON"
    return reason


def bf16_linear_isa() -> str | None:
    """The instruction set that bf16_linear runs with here, for people; None where it cannot."""
    isa = native.kernel("bf16_linear_isa", _CPU)
    return None if isa is None else isa()


def bf16_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    n: int,
    activation: int,
    is_packed: bool,
    isa: str = "auto",
) -> Tensor:
    """act(x @ weight.T + bias) of checked arguments: x bf16 [m, k], contiguous.

    weight: bf16 [n, k], contiguous, or with is_packed what panel_linear.pack_weight made of it.
    activation: its index in ops.linear.ACTIVATIONS, computed in f32.  isa: a key of
    native.ISA_CODES.  Every result is one chain of f32 sums in the order of k, so that a row's bits
    depend on neither the other rows nor the number of threads.
    Returns a new [m, n], bf16.
    """
    m, k = x.shape
    d = x.new_empty((m, n))
    launch = native.launch_args(_CPU, isa)
    num_bytes = native.require_kernel("bf16_linear_workspace_bytes", _CPU)(
        k=k, num_threads=launch.num_threads
    )
    native.require_kernel("bf16_linear", _CPU)(
        x=x,
        weight=weight,
        bias=bias,
        d=d,
        workspace=torch.empty(num_bytes, dtype=torch.uint8),
        workspace_bytes=num_bytes,
        m=m,
        n=n,
        k=k,
        activation=activation,
        is_packed=is_packed,
        launch=launch,
    )
    return d


native.register(
    bf16_linear, without=["isa"], fake=lambda x, *_, n, **__: x.new_empty((x.shape[0], n))
)
Operation("bf16_linear").register("native", "cpu", why_missing=lambda device: why_no_bf16_linear())(
    bf16_linear
)
