"""Linear layers with weights of 8 or 4 bits in groups of features, which stay so on a GPU.

Rows stay in f16 or bf16. A step of few tokens decodes codes on their way to the matrix unit, so
that it reads 5 or 8.5 bits a weight; for many tokens the matrix is written out once a product.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bytetx.ops import native, triton_backend
from bytetx.ops.check import is_aligned, is_operand, require_contiguous, require_tensor
from bytetx.ops.coded_rows import GROUP
from bytetx.ops.group_rows import (
    FORMS,
    LEAST,
    SYMMETRIC,
    ZERO,
    GroupRows,
    number_count,
)
from bytetx.ops.grouped_rounding import (
    in_whole_groups,
    output_factors,
    require_plain,
    round_groups,
)
from bytetx.ops.linear import (
    ACTIVATIONS,
    DTYPE_NAMES,
    LinearWeight,
    prepare_linear,
    taken_biases,
)
from bytetx.ops.registry import Operation
from bytetx.ops.weight import QuantizedWeight

# Of csrc/cuda/grouped_codes.cuh: outputs and features of a block, and what is in it.
_OUTPUTS, _FEATURES = 64, 64
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK = 1 << 26  # weights that are rounded at a time
# Of each backend; for more tokens, writing the matrix out and the GEMM of 16-bit weights take less
# time. The native kernel for many tokens stores whole strips of outputs.
_MOST_FUSED_TOKENS = {"native": 1 << 31, "triton": 128}
_STRIP, _MOST_TOKENS_OF_RESTS = 16, 512
_TILE = 0  # as GroupedLinearParams.tile of csrc/grouped_ops.h

# Shape class: dtype and features. run(x, w, *, activation, residual, is_gated) as of GroupedBlocks.
GROUPED_LINEAR = Operation("grouped_linear", "cuda")
# Shape class: dtype and features. run(w, indices) as of GroupedBlocks.rows; None: all rows.
GROUPED_ROWS = Operation("grouped_rows", "cuda")


@dataclass(frozen=True, slots=True)
class GroupedBlocks(QuantizedWeight):
    """A layer's weight [n, k] of codes and of numbers that groups of 32 features share.

    blocks: uint8 [ceil(n / 64), ceil(k / 64), bytes]: codes and numbers of 64 outputs and 64
    features, as csrc/cuda/grouped_codes.cuh says; numbers are of dtype.
    factor: f32 [n].  bias: [n] of dtype, or None.  bits: of a code, 8 or 4.
    dtype: of rows and results, f16 or bf16.
    form: how numbers and codes make weights, as of GroupRows.
    order: int64 [k], column i of the blocks is feature order[i]; None: they are in order.
    batch_invariant: a row's bits do not depend on the other rows.
    Other members: as of bytetx.ops.weight.Weight.
    """

    blocks: Tensor
    factor: Tensor
    bias: Tensor | None
    n: int
    k: int
    bits: int
    dtype: torch.dtype
    form: str
    order: Tensor | None = None
    batch_invariant: bool = False
    sum_bias: Tensor | None = None

    @property
    def codes(self) -> Tensor:
        """All that it holds but factors and biases."""
        return self.blocks

    @property
    def restored(self) -> Tensor:
        """The matrix that it stands for, f32 [n, k]."""
        return self._group_rows().values

    def rows(self, indices: Tensor | None = None) -> Tensor:
        """Those rows of the blocks, a new [len(indices), k] of dtype; None: all of them.

        Columns are those of the blocks, in_order's.
        The row of an index outside of the matrix is NaN: no host looks at ids on a GPU.
        """
        found: Tensor = GROUPED_ROWS.choose(self.blocks.device, self.dtype, self.k).run(
            self, indices
        )
        return found

    def written_out(self) -> LinearWeight:
        """The layer with a matrix of 16-bit numbers, for one product with rows from in_order."""
        return prepare_linear(
            self.rows(), self.bias, prepack=False, batch_invariant=self.batch_invariant
        )

    def in_order(self, x: Tensor) -> Tensor:
        """Rows x [m, k] with their features in the order of the blocks' columns."""
        return x if self.order is None else x.index_select(1, self.order)

    def shard(
        self, *, outputs: range | None = None, inputs: range | None = None
    ) -> "GroupedBlocks":
        """Raises ValueError for inputs that are not whole groups, or not in order."""
        rows = self._group_rows().taken(outputs=outputs, inputs=inputs)
        bias, sum_bias = taken_biases(self.bias, self.sum_bias, outputs=outputs, inputs=inputs)
        return blocks_from_rows(
            rows, bias, self.dtype, batch_invariant=self.batch_invariant, sum_bias=sum_bias
        )

    def matmul(
        self,
        x: Tensor,
        *,
        activation: str = "none",
        residual: Tensor | None = None,
        is_gated: bool = False,
    ) -> Tensor:
        """is_gated: the gated product of rows of gates and values in turn, 32 of each."""
        if not is_operand(x, (*x.shape[:1], self.k), self.dtype, self.blocks.get_device()):
            device = self.blocks.device
            require_tensor("x", x, shape=(None, self.k), dtypes=(self.dtype,), device=device)
            require_contiguous("x", x)
        x = self.in_order(x)
        d: Tensor = GROUPED_LINEAR.choose(self.blocks.device, self.dtype, self.k).run(
            x, self, activation=activation, residual=residual, is_gated=is_gated
        )
        return d

    def decodes(self, m: int) -> bool:
        """Whether products of m rows decode the codes as they multiply."""
        return self._fuses(GROUPED_LINEAR.choose(self.blocks.device, self.dtype, self.k).name, m)

    def _fuses(self, backend: str, m: int) -> bool:
        most = _MOST_FUSED_TOKENS.get(backend, -1)
        if self.n % _STRIP:
            most = min(most, _MOST_TOKENS_OF_RESTS)
        return m <= most and not self.batch_invariant

    def _parts(self) -> tuple[Tensor, Tensor]:
        """(codes, numbers) of the blocks, [blocks of n, of k, bytes] and of dtype."""
        num_bytes = _OUTPUTS * _FEATURES * self.bits // 8
        return self.blocks[..., :num_bytes], self.blocks[..., num_bytes:].view(self.dtype)

    def _group_rows(self) -> GroupRows:
        """The reverse of blocks_from_rows."""
        codes, numbers = self._parts()
        blocks_n, blocks_k, _ = codes.shape
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1)
            # strip, r, t, group, half, e, i
            codes = codes.view(blocks_n, blocks_k, 4, 8, 4, 2, 2, 2, 4)
            codes = codes.permute(0, 2, 6, 3, 1, 5, 8, 4, 7)
        else:  # strip, group, r, t, half, i, e
            codes = codes.view(blocks_n, blocks_k, 4, 2, 8, 4, 2, 4, 2)
            codes = codes.permute(0, 2, 6, 4, 1, 3, 7, 5, 8)
        rows = codes.reshape(blocks_n * _OUTPUTS, 2 * blocks_k, GROUP)[: self.n]
        # strip, r, group, half, number
        numbers = numbers.view(blocks_n, blocks_k, 4, 8, 2, 2, -1).permute(0, 2, 5, 3, 1, 4, 6)
        found = numbers.reshape(blocks_n * _OUTPUTS, 2 * blocks_k, -1)[: self.n].float()
        groups = -(-self.k // GROUP)
        rows, found = rows[:, :groups], found[:, :groups]
        first, second = found[..., :1], found[..., 1:]
        if self.form == ZERO:
            second = second - _zero_base(self.bits, self.dtype)
        elif self.form == SYMMETRIC:
            second = torch.zeros_like(first)
        more = (self.factor, self.k, self.bits, self.form, self.order)
        return GroupRows(rows, first, second, *more)


def blocks_from_rows(
    rows: GroupRows,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
    sum_bias: Tensor | None = None,
) -> GroupedBlocks:
    """A weight of rows of codes, whose numbers are rounded to dtype."""
    blocks = _in_blocks(rows, dtype)
    shape = (len(rows.factor), rows.k, rows.bits, dtype, rows.form, rows.order)
    return GroupedBlocks(blocks, rows.factor, bias, *shape, batch_invariant, sum_bias)


def prepare_grouped_blocks(plain: LinearWeight, *, bits: int) -> GroupedBlocks:
    """A plain weight, f16 or bf16 on a GPU, rounded to 8 or 4 bits in groups of 32 features.

    Raises ValueError for another weight.
    """
    require_plain(plain, _DTYPES)
    n, k, dtype = plain.n, plain.k, plain.dtype
    factor = output_factors(plain.weight)
    step = max(_CHUNK // max(k, 1) // _OUTPUTS * _OUTPUTS, _OUTPUTS)
    form = LEAST if bits == 4 else SYMMETRIC
    blocks = []
    for weight, scale in zip(plain.weight.split(step), factor.split(step), strict=True):
        padded = in_whole_groups(weight.float() / scale[:, None]).contiguous()
        found = round_groups(padded, bits, numbers=dtype)
        blocks.append(_in_blocks(GroupRows(*found, scale, k, bits, form), dtype))
    shape = (n, k, bits, dtype, form, None, plain.batch_invariant)
    return GroupedBlocks(torch.cat(blocks), factor, plain.bias, *shape, sum_bias=plain.sum_bias)


def why_no_coded_kernel(device: torch.device) -> str | None:
    """Why products with these weights have no kernel on a GPU; None where they have one."""
    if native.why_no_kernel("grouped_linear", device) is None:
        return None
    return triton_backend.why_no_triton(device)


def _takes(device: torch.device, dtype: torch.dtype, features: int) -> bool:
    return dtype in DTYPE_NAMES and features % 8 == 0


@GROUPED_LINEAR.native_kernel("cuda", takes=_takes)
def _run_kernel(
    x: Tensor, w: GroupedBlocks, *, activation: str, residual: Tensor | None, is_gated: bool
) -> Tensor:
    m = x.shape[0]
    if not w._fuses("native", m):
        return _run_torch(x, w, activation=activation, residual=residual, is_gated=is_gated)
    x = x if is_aligned(x) else x.clone()
    d = x.new_empty((m, w.n // 2 if is_gated else w.n))
    fuses = residual is not None and not is_gated and is_aligned(residual)
    native.require_kernel("grouped_linear", x.device)(
        x=x,
        codes=w.blocks,
        factor=w.factor,
        bias=w.bias,
        residual=residual if fuses else None,
        d=d,
        m=m,
        n=w.n,
        k=w.k,
        activation=ACTIVATIONS.index(activation),
        gated=is_gated,
        bits=w.bits,
        form=FORMS.index(w.form),
        dtype=native.DTYPE_CODES[w.dtype],
        tile=_TILE,
        launch=native.launch_args(x.device),
    )
    return d if residual is None or fuses else d.add_(residual)


@GROUPED_LINEAR.triton_kernel(takes=lambda device, dtype, features: dtype in DTYPE_NAMES)
def _run_triton(
    x: Tensor, w: GroupedBlocks, *, activation: str, residual: Tensor | None, is_gated: bool
) -> Tensor:
    if not w._fuses("triton", len(x)):
        return _run_torch(x, w, activation=activation, residual=residual, is_gated=is_gated)
    d: Tensor = triton_backend.kernels(x.device).grouped_linear(
        x,
        w.blocks,
        w.factor,
        w.bias,
        bits=w.bits,
        form=w.form,
        activation=activation,
        residual=residual,
        is_gated=is_gated,
    )
    return d


@GROUPED_LINEAR.in_torch()
def _run_torch(
    x: Tensor, w: GroupedBlocks, *, activation: str, residual: Tensor | None, is_gated: bool
) -> Tensor:
    if is_gated:
        raise ValueError("a product that is written out is gated by GatedWeight")
    return w.written_out().matmul(x, activation=activation, residual=residual)


@GROUPED_ROWS.native_kernel("cuda", takes=_takes)
def _rows_by_kernel(w: GroupedBlocks, indices: Tensor | None) -> Tensor:
    num_rows = w.n if indices is None else len(indices)
    out = torch.empty((num_rows, w.k), dtype=w.dtype, device=w.blocks.device)
    native.require_kernel("grouped_rows", w.blocks.device)(
        codes=w.blocks,
        factor=w.factor,
        indices=None if indices is None else indices.long().contiguous(),
        out=out,
        num_rows=num_rows,
        n=w.n,
        k=w.k,
        bits=w.bits,
        form=FORMS.index(w.form),
        dtype=native.DTYPE_CODES[w.dtype],
        launch=native.launch_args(w.blocks.device),
    )
    return out


@GROUPED_ROWS.triton_kernel(takes=lambda device, dtype, features: dtype in DTYPE_NAMES)
def _rows_by_triton(w: GroupedBlocks, indices: Tensor | None) -> Tensor:
    index = None if indices is None else indices.long().contiguous()
    rows: Tensor = triton_backend.kernels(w.blocks.device).grouped_rows(
        w.blocks, w.factor, index, k=w.k, bits=w.bits, form=w.form, dtype=w.dtype
    )
    return rows


@GROUPED_ROWS.in_torch()
def _rows_in_torch(w: GroupedBlocks, indices: Tensor | None) -> Tensor:
    """Decodes the whole matrix, in f32."""
    rows = replace(w, order=None).restored.to(w.dtype)
    if indices is None:
        return rows
    index = indices.long()
    is_there = (index >= 0) & (index < w.n)
    found = rows[index.clamp(0, w.n - 1)]
    return torch.where(is_there[:, None], found, torch.nan)


def _zero_base(bits: int, dtype: torch.dtype) -> float:
    """Added to zero points in blocks, as kernels decode codes: ones count from there on."""
    if dtype == torch.float16:
        return 1024.0
    return 128.0 if bits == 4 else 0.0


def _in_blocks(rows: GroupRows, dtype: torch.dtype) -> Tensor:
    codes, first, second = rows.codes, rows.first, rows.second
    if rows.form == ZERO:
        second = second + _zero_base(rows.bits, dtype)
    n, num_groups, _ = codes.shape
    more = (0, 0, 0, num_groups % 2, 0, -n % _OUTPUTS)
    codes, first, second = (torch.nn.functional.pad(t, more) for t in (codes, first, second))
    blocks_n = codes.shape[0] // _OUTPUTS
    # strip, half of its outputs, r, block of k, group, and of 32 features i, t, e
    codes = codes.to(torch.uint8).view(blocks_n, 4, 2, 8, -1, 2, 4, 4, 2)
    if rows.bits == 4:
        codes = codes.permute(0, 4, 1, 3, 7, 5, 2, 8, 6)  # strip, r, t, group, half, e, i
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    else:
        codes = codes.permute(0, 4, 1, 5, 3, 7, 2, 6, 8)  # strip, group, r, t, half, i, e
    numbers = torch.cat((first, second)[: number_count(rows.form)], 2).to(dtype)
    numbers = numbers.view(blocks_n, 4, 2, 8, -1, 2, numbers.shape[2])
    numbers = numbers.permute(0, 4, 1, 3, 5, 2, 6)  # strip, r, group, half, number
    both = (codes.flatten(2), numbers.flatten(2).contiguous().view(torch.uint8))
    return torch.cat(both, 2).contiguous()
