"""Integers that GPTQ, AWQ and compressed-tensors pack: the weights that they mean, and their codes.

All products and sums are in f32.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bytetx.checkpoint.quantization import Quantization
from bytetx.checkpoint.saved_tensor import (
    FLOAT_DTYPES,
    DecodedTensor,
    SavedCodes,
    SavedTensor,
    StoredTensor,
)
from bytetx.errors import CheckpointError
from bytetx.ops.codes import Codes

Saved = Mapping[str, SavedTensor]
FLOATS = ("F32", "F16", "BF16", "F64")
_PIECE_NUMBERS = 1 << 20  # that are decoded at a time
_ROWS_AT_A_TIME = 1024  # whose codes are unpacked; a multiple of 8
_AWQ_ORDER = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}
_Rows = Callable[[range], torch.Tensor]


@dataclass(frozen=True, slots=True)
class QuantizedModule:
    """The tensors of one module; name is the weight's, as the error of a damaged one says it."""

    name: str
    saved: Saved
    quantization: Quantization

    def __getitem__(self, ending: str) -> SavedTensor:
        return self.saved[ending]

    def get(self, ending: str) -> SavedTensor | None:
        return self.saved.get(ending)

    def stored(
        self,
        scheme: str,
        shape: tuple[int, ...],
        decode: _Rows,
        *,
        is_whole: bool = False,
        codes: SavedCodes | None = None,
    ) -> DecodedTensor:
        """The weight in the dtype of its scales where these have a half one, else bfloat16."""
        first = next(iter(self.saved.values()))
        scales = [one.dtype for one in self.saved.values() if one.dtype in ("F16", "BF16")]
        dtype = FLOAT_DTYPES[scales[0]] if scales else torch.bfloat16
        return DecodedTensor(
            first.path, self.name, shape, scheme, self.saved, dtype, decode, is_whole, codes=codes
        )

    def wrong(self, ending: str, needs: str) -> CheckpointError:
        one = self.saved[ending]
        return CheckpointError(
            f"{one.path}: tensor {one.name!r:.200} is {one.dtype} {list(one.shape)}, and must be "
            f"{needs}; the checkpoint is damaged, or its quantization_config is of another one"
        )

    def check(self, ending: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> SavedTensor:
        """One of the tensors, of one of these dtypes and shapes."""
        one = self.saved[ending]
        if one.dtype not in dtypes or one.shape not in shapes:
            known = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.wrong(ending, f"{' or '.join(dtypes)} {known}")
        return one


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, columns] -> codes int32 [rows, columns, 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    return (packed[:, :, None] >> shifts).bitwise_and_((1 << bits) - 1)


def decode_gptq(module: QuantizedModule) -> StoredTensor:
    """Codes of 32 / bits inputs in an integer, [k / 8, n]; groups of inputs share a scale and a
    zero point, and g_idx says of each input its group."""
    bits, each = module.quantization.bits, 32 // module.quantization.bits
    scale, codes = module["scales"], module["qweight"]
    if len(codes.shape) != 2 or codes.dtype != "I32" or len(scale.shape) != 2:
        raise module.wrong("qweight", f"I32 [inputs / {each}, outputs]")
    n, k, groups = codes.shape[1], codes.shape[0] * each, scale.shape[0]
    size = _group_size(module, k, groups)
    module.check("scales", FLOATS, (groups, n))
    module.check("qzeros", ("I32",), (groups, -(-n // each)))
    index = module.get("g_idx")
    if index is not None:
        module.check("g_idx", ("I32",), (k,))
    added = 1 if module.quantization.adds_one else 0

    def group_of_inputs() -> torch.Tensor:
        return torch.arange(k) // size if index is None else _read_groups(module, "g_idx", groups)

    def read(wanted: range, device: torch.device) -> Codes | None:
        order, is_held = _order_of(group_of_inputs(), size)
        if not is_held:
            return None
        packed = codes.read_raw().to(device)
        zeros = _unpacked(module["qzeros"].read_raw().to(device), bits).view(groups, -1)[:, :n]
        scales = scale.read_raw().to(device).float().t()

        def some(outputs: slice) -> torch.Tensor:
            return _unpacked(packed[:, outputs], bits).transpose(1, 2).reshape(k, -1).t()

        return _coded(wanted, some, scales, (zeros + added).t(), size, order=order)

    def decode(wanted: range) -> torch.Tensor:
        packed, scales = codes.read_raw(), scale.read_raw().float()
        zeros = _unpacked(module["qzeros"].read_raw(), bits).view(groups, -1)[:, :n] + added
        group = group_of_inputs()

        def some(outputs: slice) -> torch.Tensor:
            values = _unpacked(packed[:, outputs], bits).transpose(1, 2).reshape(k, -1)
            values -= zeros[:, outputs][group]
            return values.float().mul_(scales[:, outputs][group]).t()

        return _in_pieces(wanted, k, some)

    kept = SavedCodes(bits, size, read, has_zeros=True)
    return module.stored(f"GPTQ {bits}-bit", (n, k), decode, is_whole=True, codes=kept)


def _read_groups(module: QuantizedModule, ending: str, groups: int) -> torch.Tensor:
    """The group of each input, int64."""
    group = module[ending].read_raw().long()
    if not 0 <= int(group.min()) <= int(group.max()) < groups:
        raise module.wrong(ending, f"groups from 0 to {groups - 1}")
    return group


def _order_of(group: torch.Tensor, size: int) -> tuple[torch.Tensor | None, bool]:
    """(the inputs in the order of their groups, None where they are in it; whether all groups but
    the last have `size` of them)"""
    k = len(group)
    if torch.equal(group, torch.arange(k) // size):
        return None, True
    counts = torch.bincount(group, minlength=-(-k // size))
    is_held = k % size == 0 and bool((counts == size).all())
    return torch.argsort(group, stable=True), is_held


def _coded(
    wanted: range,
    some: Callable[[slice], torch.Tensor],
    scales: torch.Tensor,
    zeros: torch.Tensor,
    size: int,
    *,
    order: torch.Tensor | None = None,
) -> Codes:
    """Codes of rows, of which `some` gives a few as int32 [rows, k]; numbers [n, groups]."""
    rows = slice(wanted.start, wanted.stop)
    pieces = [
        some(slice(start, min(start + _ROWS_AT_A_TIME, wanted.stop))).to(torch.uint8)
        for start in range(wanted.start, wanted.stop, _ROWS_AT_A_TIME)
    ]
    found = torch.cat(pieces)
    if order is not None:
        order = order.to(found.device)
        found = found[:, order]
    return Codes(found, scales[rows].float(), size, zeros[rows].float(), order=order)


def _in_pieces(wanted: range, k: int, some: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """Rows f32 [len(wanted), k] of some outputs at a time: codes as integers take several times the
    bytes of the weight.  Pieces begin at multiples of 8, wanted at 0."""
    found = torch.empty(len(wanted), k)
    each = max(8, _PIECE_NUMBERS // k // 8 * 8)
    for start in range(0, len(wanted), each):
        outputs = slice(start, min(start + each, len(wanted)))
        found[outputs] = some(outputs)
    return found


def _group_size(module: QuantizedModule, k: int, groups: int) -> int:
    """Inputs that share a scale; their number of groups is checked."""
    given = module.quantization.group_size
    size = k if given == -1 else given
    if groups != -(-k // size):
        raise module.wrong("scales", f"of {-(-k // size)} groups of {size} of {k} inputs")
    return size


def decode_awq(module: QuantizedModule) -> StoredTensor:
    """Codes of 32 / bits outputs in an integer, [k, n / 8], in an order of their own."""
    bits, each = module.quantization.bits, 32 // module.quantization.bits
    codes, scale = module["qweight"], module["scales"]
    if len(codes.shape) != 2 or codes.dtype != "I32" or len(scale.shape) != 2:
        raise module.wrong("qweight", f"I32 [inputs, outputs / {each}]")
    k, n, groups = codes.shape[0], codes.shape[1] * each, scale.shape[0]
    size = _group_size(module, k, groups)
    module.check("scales", FLOATS, (groups, n))
    module.check("qzeros", ("I32",), (groups, n // each))
    order = list(_AWQ_ORDER[bits])

    def decode(wanted: range) -> torch.Tensor:
        packed, scales = codes.read_raw(), scale.read_raw().float()
        zeros = _unpacked(module["qzeros"].read_raw(), bits)[:, :, order].reshape(groups, n)
        group = torch.arange(k) // size

        def some(outputs: slice) -> torch.Tensor:
            columns = slice(outputs.start // each, -(-outputs.stop // each))
            values = _unpacked(packed[:, columns], bits)[:, :, order].reshape(k, -1)
            values -= zeros[:, outputs][group]
            return values.float().mul_(scales[:, outputs][group]).t()

        return _in_pieces(wanted, k, some)

    def read(wanted: range, device: torch.device) -> Codes:
        packed = codes.read_raw().to(device)
        zeros = _unpacked(module["qzeros"].read_raw().to(device), bits)[:, :, order]

        def some(outputs: slice) -> torch.Tensor:
            columns = slice(outputs.start // each, -(-outputs.stop // each))
            return _unpacked(packed[:, columns], bits)[:, :, order].reshape(k, -1).t()

        scales = scale.read_raw().to(device).t()
        return _coded(wanted, some, scales, zeros.reshape(groups, n).t(), size)

    kept = SavedCodes(bits, size, read, has_zeros=True)
    return module.stored(f"AWQ {bits}-bit", (n, k), decode, is_whole=True, codes=kept)


def decode_packed(module: QuantizedModule) -> StoredTensor:
    """compressed-tensors' integers: codes of 32 / bits inputs in an integer, [n, k / 8], with the
    sign bit turned; groups of inputs share a scale and may share a zero point, packed by rows."""
    shape = module.check("weight_shape", ("I64", "I32"), (2,)).read_raw().tolist()
    codes, scale = module["weight_packed"], module["weight_scale"]
    n, k = (int(size) for size in shape)
    if n < 1 or k < 1 or codes.dtype != "I32" or len(codes.shape) != 2:
        raise module.wrong("weight_packed", f"I32 of a weight {shape}")
    sizes = [bits for bits in (4, 8, 2) if codes.shape == (n, -(-k * bits // 32))]
    if not sizes:
        raise module.wrong("weight_packed", f"4 or 8 bits of a weight {shape}")
    bits = sizes[0]
    is_one = math.prod(scale.shape) == 1
    is_matrix = len(scale.shape) == 2 and scale.shape[0] == n and scale.shape[1] > 0
    if scale.dtype not in FLOATS or not (is_one or is_matrix):
        raise module.wrong("weight_scale", f"a float [{n}, groups]")
    groups = 1 if is_one else scale.shape[1]
    zeros, index = module.get("weight_zero_point"), module.get("weight_g_idx")
    if zeros is not None:  # older versions did not pack them
        is_packed = zeros.dtype == "I32"
        rows = -(-n * bits // 32) if is_packed else n
        module.check("weight_zero_point", ("I32", "I8"), (rows, groups))
    if index is not None:
        module.check("weight_g_idx", ("I32", "I64"), (k,))
    half = 1 << (bits - 1)

    def group_of_inputs() -> torch.Tensor:
        # Before a tool gives inputs their groups, all are -1.
        if index is not None and int(index.read_raw().max()) >= 0:
            return _read_groups(module, "weight_g_idx", groups)
        if k % groups:
            raise module.wrong("weight_scale", f"of groups that divide {k} inputs")
        return torch.arange(k) // (k // groups)

    def numbers(wanted: range) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and zero points of rows, [len(wanted), groups]."""
        scales = scale.read_raw().float().view(-1, groups).expand(n, groups)
        scales = scales[wanted.start : wanted.stop]
        if zeros is None:
            return scales, None
        points = zeros.read_raw()
        if is_packed:
            points = _unpacked(points, bits).transpose(1, 2).reshape(-1, groups)[:n] - half
        return scales, points[wanted.start : wanted.stop]

    def read(wanted: range, device: torch.device) -> Codes | None:
        size = -(-k // groups)
        order, is_held = _order_of(group_of_inputs(), size)
        if not is_held:
            return None
        scales, points = numbers(wanted)
        found = _unpacked(codes.read_raw(wanted).to(device), bits).view(len(wanted), -1)[:, :k]
        found = found.to(torch.uint8)
        if order is not None:
            order = order.to(device)
            found = found[:, order]
        zero = float(half) if points is None else (points.float() + half).to(device)
        return Codes(found, scales.to(device), size, zero, order=order)

    def decode(wanted: range) -> torch.Tensor:
        values = _unpacked(codes.read_raw(wanted), bits).view(len(wanted), -1)[:, :k] - half
        group, (scales, points) = group_of_inputs(), numbers(wanted)
        if points is not None:
            values -= points[:, group]
        return values.float().mul_(scales[:, group])

    kept = SavedCodes(bits, -(-k // groups), read, has_zeros=zeros is not None)
    return module.stored(f"int{bits}", (n, k), decode, codes=kept)
