"""Linear layers of which some columns are heads that rotary angles turn."""

from dataclasses import dataclass

from torch import Tensor

from bytetx.ops import native
from bytetx.ops.check import is_aligned
from bytetx.ops.linear import DTYPE_NAMES, LinearWeight
from bytetx.ops.linear_plan import plan_rotary
from bytetx.ops.rotary_kv import ROTARY
from bytetx.ops.weight import Weight

_HEAD_DIM = 64  # the Hopper kernel turns whole heads of this size, not interleaved


@dataclass(frozen=True, slots=True)
class HeadRotation:
    """The rotation of a row's first heads, by the angles of its token's position.

    cos, sin, position_ids, is_interleaved: as of bytetx.ops.rotary_kv.rotary.  num_heads, head_dim:
    of those that are turned, which come first in a row.
    """

    cos: Tensor
    sin: Tensor
    position_ids: Tensor
    num_heads: int
    head_dim: int
    is_interleaved: bool = False

    def turn(self, rows: Tensor) -> None:
        """Turn the heads of rows [total_tokens, at least num_heads * head_dim], in place."""
        heads = rows[:, : self.num_heads * self.head_dim].unflatten(1, (-1, self.head_dim))
        run = ROTARY.choose(rows.device, rows.dtype).run
        run(heads, self.cos, self.sin, self.position_ids, is_interleaved=self.is_interleaved)


def linear_rotary(x: Tensor, w: Weight, rotation: HeadRotation) -> Tensor:
    """x @ w.T + bias with its first heads turned; a new [m, n].

    x: [m, k] in w's dtype, contiguous.  The same bits as of the product and the rotation in turn,
    where the product is cut alike.
    """
    fused = _fused(x, w, rotation) if w.has_kernel and isinstance(w, LinearWeight) else None
    if fused is not None:
        return fused
    d = w.matmul(x)
    rotation.turn(d)
    return d


def _fused(x: Tensor, w: LinearWeight, rotation: HeadRotation) -> Tensor | None:
    """linear_rotary by one kernel; None where it is not there or not faster."""
    is_whole = rotation.head_dim == _HEAD_DIM == 2 * rotation.cos.shape[1]
    if not is_whole or rotation.is_interleaved or w.n % _HEAD_DIM or not is_aligned(x):
        return None
    if w.backend.name != "native" or native.kernel("linear_rotary", x.device) is None:
        return None
    dtype, m = DTYPE_NAMES[w.dtype], x.shape[0]
    plan = plan_rotary(m, w.n, w.k, dtype=dtype, batch_invariant=w.batch_invariant)
    return None if plan.tiling is None else run_kernel(x, w, rotation, tiling=plan.tiling)


def run_kernel(x: Tensor, w: LinearWeight, rotation: HeadRotation, *, tiling: int) -> Tensor:
    """The Hopper kernel on checked arguments."""
    d = x.new_empty((x.shape[0], w.n))
    native.require_kernel("linear_rotary", x.device)(
        a=x,
        b=w.weight,
        bias=w.bias,
        cos=rotation.cos,
        sin=rotation.sin,
        position_ids=rotation.position_ids,
        d=d,
        m=x.shape[0],
        n=w.n,
        k=w.k,
        rotated_columns=rotation.num_heads * rotation.head_dim,
        tiling=tiling,
        dtype=native.DTYPE_CODES[x.dtype],
        launch=native.launch_args(x.device),
    )
    return d
