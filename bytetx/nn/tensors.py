"""Named tensors of a checkpoint -> weights in the model's dtype, on its device, checked."""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeAlias

import torch

from bytetx.checkpoint.norm_kinds import NORM_KINDS
from bytetx.checkpoint.quantized_tensors import FP8
from bytetx.checkpoint.saved_tensor import DecodedTensor, Part, take_part
from bytetx.checkpoint.weights import Weights
from bytetx.errors import CheckpointError
from bytetx.nn.coded_tensors import read_coded
from bytetx.nn.kept_codes import read_rows
from bytetx.ops.coded_linear import CodedWeight, prepare_coded_linear
from bytetx.ops.coded_rows import GROUP, are_finite, features_of
from bytetx.ops.fp8_linear import are_finite_rows, fp8_from_rows, fp8_rows, prepare_fp8_linear
from bytetx.ops.gated import GatedWeight, gate_block, in_turn, prepare_gated
from bytetx.ops.group_rows import GroupRows, join_rows
from bytetx.ops.grouped_blocks import GroupedBlocks, blocks_from_rows
from bytetx.ops.grouped_linear import grouped_from_rows
from bytetx.ops.linear import LinearWeight, prepare_linear
from bytetx.ops.norm import NORMS, RmsNorm, RowNorm
from bytetx.ops.stacked_weight import StackedWeight
from bytetx.ops.weight import Weight

# A layer's matrix: floats, or rows of codes of one kind or the other.
Matrix: TypeAlias = torch.Tensor | GroupRows

_ROUNDED_AGAIN = "only F8_E4M3 with one scale a row is kept; rounded again to that"
# Missing tensors that are looked for before the search ends.
_MAX_MISSING = 1000


class TensorLoader:
    """Reads named tensors into the model's dtype and device, and checks every shape."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        prepack: bool,
        shares: bool = False,
        batch_invariant: bool = False,
    ):
        """shares: the tensors are the caller's, and are not held twice for a faster layout.

        batch_invariant: of the linear layers, as of LinearWeight.
        """
        self.tensors, self.dtype, self.device, self.prepack = tensors, dtype, device, prepack
        self.shares, self.batch_invariant = shares, batch_invariant
        # Matrices are read as rows of codes of so many bits; None: as floats.
        self.bits: int | None = None
        # Matrices are read as rows in E4M3.
        self.is_fp8 = False
        # Matrices are read as GroupRows where they are saved as codes, else as floats.
        self.keeps_codes = False

    def in_float32(self) -> "TensorLoader":
        """The same loader, for what is float32 in a model of any dtype; nothing is rounded."""
        loader = copy(self)
        loader.dtype = torch.float32
        if isinstance(self.tensors, Weights):
            loader.tensors = self.tensors.cast(torch.float32)
        return loader

    def plain(self) -> "TensorLoader":
        """The same loader, whose linear layers are not laid out for a CPU."""
        loader = copy(self)
        loader.prepack = False
        return loader

    def coded(self, bits: int) -> "TensorLoader":
        """The same loader, which reads matrices as rows of codes and makes GroupedWeights of them.

        Rows of codes may be put together and in any order, as those of a matrix may.
        """
        loader = copy(self)
        loader.bits = bits
        return loader

    def keeping_codes(self) -> "TensorLoader":
        """The same loader, which makes GroupedBlocks of matrices that are saved as codes."""
        loader = copy(self)
        loader.keeps_codes = True
        return loader

    def in_fp8(self) -> "TensorLoader":
        """The same loader, which reads matrices as rows in E4M3 (bytetx/ops/fp8_linear.py)."""
        loader = copy(self)
        loader.is_fp8 = True
        return loader

    def require(self, names: Iterable[str]) -> None:
        """Raises CheckpointError that lists every name the checkpoint lacks."""
        absent = (name for name in names if name not in self.tensors)
        missing = list(islice(absent, _MAX_MISSING))
        if missing:
            count = f"{len(missing)}{' or more' if len(missing) == _MAX_MISSING else ''}"
            shown = ", ".join(missing[:12]) + (", ..." if len(missing) > 12 else "")
            held = ", ".join(islice(self.tensors, 3)) or "nothing"
            raise CheckpointError(
                f"the checkpoint lacks {count} tensors: {shown}; it holds {held}, ..."
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """As saved; known without reading the tensor."""
        tensors = self.tensors
        return tuple(tensors.shape(name) if isinstance(tensors, Weights) else tensors[name].shape)

    def tensor(
        self, name: str, shape: tuple[int, ...], *, part: Part | None = None
    ) -> torch.Tensor:
        """A tensor in the model's dtype and on its device; shares memory where nothing changes.

        shape: of the complete tensor.  part: what is read of it; nothing else is held in memory.
        """
        self.require([name])
        saved_shape, tensor = self._read(name, part)
        _check_shape(name, saved_shape, shape)
        if not tensor.is_floating_point():
            raise CheckpointError(f"tensor {name!r} has dtype {tensor.dtype}, must be floating")
        tensor = tensor.to(device=self.device, dtype=self.dtype)
        if not is_finite(tensor):
            raise _not_finite(name, self.dtype)
        return tensor

    def row_numbers(self, name: str, length: int, *, num_rows: int) -> torch.Tensor:
        """Rows of a table with num_rows, int32 [length] on the model's device, as the file has
        them in any dtype of integers."""
        self.require([name])
        tensors = self.tensors
        saved = tensors.saved(name).read_raw() if isinstance(tensors, Weights) else tensors[name]
        _check_shape(name, tuple(saved.shape), (length,))
        if length and not 0 <= int(saved.min()) <= int(saved.max()) < num_rows:
            raise CheckpointError(
                f"tensor {name!r} names rows {int(saved.min())} to {int(saved.max())} of a table "
                f"that has {num_rows}; the checkpoint is damaged"
            )
        return saved.to(device=self.device, dtype=torch.int32)

    def matrix(self, name: str, shape: tuple[int, int], *, part: Part | None = None) -> Matrix:
        """A layer's matrix: as tensor(), or its rows of codes."""
        if self.keeps_codes and (found := self._group_rows(name, shape)) is not None:
            return found
        if self.bits is None and not self.is_fp8:
            return self.tensor(name, shape, part=part)
        assert part is None  # layers that are divided have plain weights
        if self.bits is None:
            return self._fp8_rows(name, shape)
        return self._coded_rows(name, shape)

    def _coded_rows(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """A matrix as rows of codes for a CPU (bytetx/ops/coded_rows.py)."""
        assert self.bits is not None
        self.require([name])
        _check_shape(name, self.shape(name), shape)
        rows = read_coded(self.tensors, name, self.bits)
        if not are_finite(rows):
            raise _not_finite(name, torch.float32)
        return rows

    def _group_rows(self, name: str, shape: tuple[int, int]) -> GroupRows | None:
        self.require([name])
        rows = read_rows(self.tensors, name, torch.device(self.device))
        if rows is None:
            return None
        _check_shape(name, self.shape(name), shape)
        if not rows.are_finite:
            raise _not_finite(name, torch.float32)
        return rows

    def kept_table(self, name: str, shape: tuple[int, int]) -> GroupedBlocks | None:
        """A matrix whose rows are looked up, as it is saved; None where that is as floats."""
        rows = self._group_rows(name, shape)
        return None if rows is None or rows.order is not None else self._blocks(rows, None)

    def _blocks(self, rows: GroupRows, bias: torch.Tensor | None) -> GroupedBlocks:
        return blocks_from_rows(rows, bias, self.dtype, batch_invariant=self.batch_invariant)

    def _fp8_rows(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """A matrix as rows in E4M3; those of a file that has one scale a row are kept."""
        self.require([name])
        stored = self.tensors.stored(name) if isinstance(self.tensors, Weights) else None
        saved_rows = None
        if isinstance(stored, DecodedTensor) and stored.scheme == FP8:
            saved_rows = stored.saved_rows
        if stored is None or saved_rows is None:
            if isinstance(self.tensors, Weights) and isinstance(stored, DecodedTensor):
                self.tensors.dequantised[stored.scheme] = _ROUNDED_AGAIN
            return fp8_rows(prepare_fp8_linear(self.tensor(name, shape)))
        _check_shape(name, stored.shape, shape)
        rows = saved_rows(range(shape[0])).to(self.device)
        if not are_finite_rows(rows):
            raise _not_finite(name, torch.float32)
        return rows

    def grouped(self, name: str, shape: tuple[int, int], *, bits: int) -> CodedWeight:
        """A matrix in groups of features, without a bias."""
        if shape[1] % GROUP == 0 and torch.device(self.device).type == "cpu":
            rows = self.coded(bits)._coded_rows(name, shape)
            return grouped_from_rows(rows, None, shape[1], bits, dtype=self.dtype)
        weight = self.plain().linear_from(self.tensor(name, shape), None)
        return prepare_coded_linear(weight, bits=bits)

    def _read(self, name: str, part: Part | None) -> tuple[tuple[int, ...], torch.Tensor]:
        """(shape of the complete tensor, the part of it)"""
        tensors = self.tensors
        if part is not None and isinstance(tensors, Weights):
            shape = tensors.shape(name)
            return shape, tensors.read(name, part) if _has_part(shape, part) else torch.empty(0)
        tensor = tensors[name].detach()
        shape = tuple(tensor.shape)
        if part is None:
            return shape, tensor
        return shape, take_part(tensor, part) if _has_part(shape, part) else torch.empty(0)

    def norm(
        self,
        stem: str,
        size: int,
        *,
        eps: float,
        kind: str = "layer_norm",
        has_bias: bool = True,
        offset: float = 0.0,
        part: Part | None = None,
    ) -> RowNorm:
        """kind: a key of NORMS.  has_bias: of a kind that may have one.  part: as of tensor.
        offset: what is added to the weight in f32, before it is rounded.
        """
        weight = self.tensor(f"{stem}.weight", (size,), part=part)
        if offset:
            weight = add_offset(weight, offset)
        has_bias = has_bias and NORM_KINDS[kind].has_shift
        bias = self.tensor(f"{stem}.bias", (size,), part=part) if has_bias else None
        return NORMS[kind](weight, bias, eps)

    def plain_norm(self, size: int, *, eps: float) -> RowNorm:
        """An RMS norm without weights: they are ones."""
        return RmsNorm(torch.ones(size, dtype=self.dtype, device=self.device), None, eps)

    def linear(self, stem: str, n: int, k: int, *, has_bias: bool = True) -> LinearWeight:
        """A linear layer of n outputs and k inputs."""
        weight = self.tensor(f"{stem}.weight", (n, k))
        return self.linear_from(weight, self.tensor(f"{stem}.bias", (n,)) if has_bias else None)

    def out_linear_from(
        self, weight: Matrix, bias: torch.Tensor | None, *, is_sharded: bool
    ) -> Weight:
        """is_sharded: weight holds some of the inputs; the sum over ranks gets the bias."""
        if is_sharded:
            assert isinstance(weight, torch.Tensor)  # layers that are divided have plain weights
            return replace(self.linear_from(weight, None), sum_bias=bias)
        return self.weight_from(weight, bias)

    def fused_linear(self, parts: list[tuple[Matrix, torch.Tensor | None]]) -> Weight:
        """One linear of (weight [n, k], bias [n]) parts, stacked; a missing bias counts as 0."""
        biases: list[torch.Tensor] | None = None
        if any(bias is not None for _, bias in parts):
            zeros = partial(torch.zeros, dtype=self.dtype, device=self.device)
            biases = [zeros(len(w)) if bias is None else bias for w, bias in parts]
        # Neighbours that one weight holds are one; codes of other kinds are weights of their own.
        runs: list[list[int]] = []
        for i, (own, _) in enumerate(parts):
            before = parts[i - 1][0] if i else None
            is_alike = (
                own.is_like(before)
                if isinstance(own, GroupRows)
                else (isinstance(before, torch.Tensor))
            )
            if is_alike:
                runs[-1].append(i)
            else:
                runs.append([i])
        stacked = []
        for run in runs:
            bias = None if biases is None else fuse_rows([biases[i] for i in run])
            stacked.append(self.weight_from(_joined([parts[i][0] for i in run]), bias))
        return stacked[0] if len(stacked) == 1 else StackedWeight(tuple(stacked))

    def weight_from(self, matrix: Matrix, bias: torch.Tensor | None) -> Weight:
        """A linear of what `matrix` gave, rows in any order, and bias [n]."""
        if isinstance(matrix, GroupRows):
            return self._blocks(matrix, bias)
        if self.is_fp8:
            return fp8_from_rows(matrix, bias, dtype=self.dtype)
        if self.bits is None:
            return self.linear_from(matrix, bias)
        k = features_of(matrix, self.bits)
        return grouped_from_rows(matrix, bias, k, self.bits, dtype=self.dtype)

    def linear_from(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeight:
        """A linear from tensors at hand: weight [n, k], bias [n]."""
        return prepare_linear(
            weight, bias, prepack=self.prepack, batch_invariant=self.batch_invariant
        )

    def gated(
        self,
        gate: Matrix,
        up: Matrix,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
    ) -> GatedWeight:
        """A gated linear of what `matrix` gave: gate, up [n, k], biases [n]."""
        if isinstance(gate, GroupRows) or isinstance(up, GroupRows):
            return self._gated_codes(gate, up, gate_bias, up_bias)
        if self.shares and not self.is_fp8 and (gate_bias is None) == (up_bias is None):
            stacked = self.fused_linear([(gate, gate_bias), (up, up_bias)])
            return GatedWeight(stacked, gate.shape[0], gate.shape[0])
        if self.bits is not None or self.is_fp8:
            n = gate.shape[0]
            block = gate_block(n)
            bias = _biases_in_turn(gate_bias, up_bias, block)
            return GatedWeight(self.weight_from(in_turn(gate, up, block), bias), n, block)
        return prepare_gated(
            gate,
            up,
            gate_bias=gate_bias,
            up_bias=up_bias,
            prepack=self.prepack,
            batch_invariant=self.batch_invariant,
        )

    def _gated_codes(
        self,
        gate: Matrix,
        up: Matrix,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
    ) -> GatedWeight:
        n = len(gate)
        if not isinstance(gate, GroupRows) or not gate.is_like(up) or not isinstance(up, GroupRows):
            parts = [(gate, gate_bias), (up, up_bias)]
            return GatedWeight(self.fused_linear(parts), n, n)
        block = gate_block(n)
        rows = join_rows([gate, up], partial(in_turn, block=block))
        bias = _biases_in_turn(gate_bias, up_bias, block)
        return GatedWeight(self._blocks(rows, bias), n, block)


def _biases_in_turn(
    gate_bias: torch.Tensor | None, up_bias: torch.Tensor | None, block: int
) -> torch.Tensor | None:
    if gate_bias is None or up_bias is None:
        return None
    return in_turn(gate_bias, up_bias, block)


def _joined(parts: list[Matrix]) -> Matrix:
    """Alike parts, one behind the other."""
    rows = [part for part in parts if isinstance(part, GroupRows)]
    if rows:
        return rows[0] if len(rows) == 1 else join_rows(rows)
    return fuse_rows([part for part in parts if isinstance(part, torch.Tensor)])


def _check_shape(name: str, saved: tuple[int, ...], implied: tuple[int, ...]) -> None:
    if saved != implied:
        raise CheckpointError(f"tensor {name!r} has shape {saved}, config.json implies {implied}")


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every value is, of at least one; without a temporary of its size.

    True for tensors without numbers.
    """
    return tensor.is_meta or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _not_finite(name: str, dtype: torch.dtype) -> CheckpointError:
    return CheckpointError(
        f"tensor {name!r} holds values that are not finite in {dtype}; "
        "the file is damaged, or the weights need a wider dtype"
    )


def add_offset(weight: torch.Tensor, offset: float) -> torch.Tensor:
    """weight + offset, a new tensor: the sum is in f32, and rounded to weight's dtype."""
    return (weight.float() + offset).to(weight.dtype)


def _has_part(shape: tuple[int, ...], part: Part) -> bool:
    """False for a shape that `tensor` refuses."""
    return part.dim < len(shape) and part.end <= shape[part.dim]


def fuse_rows(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Tensors stacked along dim 0; no copy where they are already adjacent in memory."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    offset = first.storage_offset()
    for tensor in tensors:
        adjacent = (
            tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and tensor.is_contiguous()
            and tensor.storage_offset() == offset
        )
        if not adjacent:
            return torch.cat(tensors)
        offset += tensor.numel()
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
