"""Quantised weights of safetensors files: which tensors belong together, and the numbers they mean.

Each scheme is one row of SCHEMES: the ending of the tensor that holds the codes, the endings of
those beside it, and a function that makes a weight of them. Layers that a tool left alone have a
plain weight and need no row. All products and sums are in f32.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from bytetx.checkpoint.packed_codes import (
    FLOATS,
    QuantizedModule,
    Saved,
    decode_awq,
    decode_gptq,
    decode_packed,
)
from bytetx.checkpoint.quantization import Quantization
from bytetx.checkpoint.saved_tensor import (
    SavedCodes,
    SavedTensor,
    StoredTensor,
)
from bytetx.errors import CheckpointError
from bytetx.ops.codes import Codes

# The dtypes of codes, which no plain weight has.
_FP8 = ("F8_E4M3", "F8_E5M2")
FP8 = "FP8"  # the scheme of codes that have one scale a row, or a block
# Scales of activations and of the key-value cache, and notes of the tools: weights need none.
_IGNORED = (
    *("input_scale", "activation_scale", "input_scale_ub", "input_zero_point", "weight_format"),
    *("k_scale", "v_scale", "q_scale"),
    *("output_scale", "input_global_scale", "weight_observer"),
)
# The values of 4-bit floats (E2M1), by their codes.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to save a quantised weight.

    codes: the ending, behind the module's name, of the tensor with the codes.
    needed: endings that must be beside it.  optional: that may be.
    make: of the tensors by their endings -> the weight.
    fits: whether the tensor with the codes is of this scheme; None: by its ending alone.
    """

    name: str
    codes: str
    needed: tuple[str, ...]
    make: Callable[["QuantizedModule"], StoredTensor]
    optional: tuple[str, ...] = ()
    fits: Callable[[SavedTensor, Saved], bool] | None = None
    weight: str = "weight"


def decode_quantized(
    found: Saved, quantization: Quantization | None, *, is_transposed: bool
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, each quantised weight in place of what it was saved as.

    found: by canonical name.  is_transposed: of a family whose files hold weights as [in, out].
    Raises CheckpointError where tensors of a weight are missing or contradict each other, where
    config.json names a method that no tensor follows, and for codes of an unknown scheme.
    """
    named: dict[str, StoredTensor] = {}
    used: set[str] = set()
    method = quantization or Quantization("compressed-tensors")
    for name, tensor in found.items():
        for scheme in SCHEMES:
            stem = name.removesuffix(scheme.codes)
            if stem == name or not (stem.endswith(".") or scheme.codes.startswith("_")):
                continue
            saved = _beside(found, stem, scheme)
            if scheme.fits is not None and not scheme.fits(tensor, saved):
                continue
            if quantization is None and not saved:
                continue  # integers, but no quantised weight
            if missing := [ending for ending in scheme.needed if ending not in saved]:
                raise CheckpointError(
                    f"{tensor.path}: tensor {tensor.name!r:.200} is quantised ({scheme.name}) and "
                    f"{', '.join(stem + ending for ending in missing)} is not there; save or "
                    "download the checkpoint again"
                )
            module = QuantizedModule(tensor.name, {scheme.codes: tensor, **saved}, method)
            if is_transposed:
                raise CheckpointError(
                    f"{tensor.path}: tensor {tensor.name!r:.200} is quantised ({scheme.name}) in a "
                    "family whose files hold weights as [in, out], which bytetx does not read; "
                    "give the checkpoint in float32, float16 or bfloat16"
                )
            named[f"{stem}{scheme.weight}"] = scheme.make(module)
            used |= {name, *(f"{stem}{ending}" for ending in saved)}
            break
    if quantization is not None and not named:
        some = next(iter(found.values()), None)
        where = "the checkpoint" if some is None else some.path.parent
        raise CheckpointError(
            f"config.json says that the weights are quantised ({quantization.tool}), and {where} "
            "holds none that are; save the checkpoint again, or remove quantization_config where "
            "the weights are float32, float16 or bfloat16"
        )
    left = {name: tensor for name, tensor in found.items() if name not in used}
    if named:
        left = {name: one for name, one in left.items() if name.rpartition(".")[2] not in _IGNORED}
    for name, tensor in left.items():
        _refuse_codes(name, tensor, has_quantised=bool(named))
    return {**left, **named}


def _beside(found: Saved, stem: str, scheme: Scheme) -> dict[str, SavedTensor]:
    endings = {e: found[f"{stem}{e}"] for e in scheme.needed if f"{stem}{e}" in found}
    return endings | {e: found[f"{stem}{e}"] for e in scheme.optional if f"{stem}{e}" in found}


def _refuse_codes(name: str, tensor: SavedTensor, *, has_quantised: bool) -> None:
    """Raises CheckpointError for tensors of a quantised checkpoint that no scheme has read."""
    last = name.rpartition(".")[2]
    is_weight = has_quantised and last == "weight"
    if last in _TOOLS or (is_weight and tensor.dtype in (*_FP8, "I8", "U8", "I32")):
        tool = _TOOLS.get(last, f"a tool that saves {tensor.dtype}")
        raise CheckpointError(
            f"{tensor.path} holds weights quantised by {tool} (tensor {name!r}), which bytetx does "
            "not read; give the checkpoint in float32, float16 or bfloat16"
        )


# The last part of the names of quantised tensors, and the tools that write them.
_TOOLS = {
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "SCB": "bitsandbytes",
    "absmax": "bitsandbytes",
    "weight_scale": "compressed-tensors or an FP8 tool",
    "weight_scale_inv": "an FP8 tool",
    "weight_packed": "compressed-tensors",
    "W_q": "HQQ",
    "codebooks": "AQLM",
    "codes": "AQLM",
    "Qidxs": "QuIP#",
    "qweight_scales": "EETQ",
}


_PIECE_NUMBERS = 1 << 20  # that are decoded at a time


def _scaled(module: QuantizedModule) -> StoredTensor:
    """Codes of 8 bits, [n, k], times scales: one, one a row, one a group of a row, or one a block
    of rows and columns; integers may have zero points of the same shape."""
    codes = module["weight"]
    ending = "weight_scale_inv" if module.get("weight_scale_inv") else "weight_scale"
    scale = module[ending]
    if len(codes.shape) != 2 or scale.dtype not in (*FLOATS, "F8_E8M0"):
        raise module.wrong(ending, f"a float for {codes.dtype} codes of 2 dims")
    rows, columns = codes.shape
    block = _block_of(module, ending)
    zeros = module.get("weight_zero_point")
    if zeros is not None and zeros.shape != scale.shape:
        raise module.wrong("weight_zero_point", f"of the scales' shape {list(scale.shape)}")

    def decode(wanted: range) -> torch.Tensor:
        values = codes.read_raw(wanted).float()
        grid = -(-rows // block[0]), -(-columns // block[1])
        scales = (_powers if scale.dtype == "F8_E8M0" else torch.Tensor.float)(scale.read_raw())
        scales = scales.reshape(grid)
        own = torch.arange(wanted.start, wanted.stop) // block[0]
        if zeros is not None:
            offsets = zeros.read_raw().float().reshape(scales.shape)
            values -= _spread(offsets[own], block[1], columns)
        return values.mul_(_spread(scales[own], block[1], columns))

    def saved_rows(wanted: range) -> torch.Tensor:
        own = torch.arange(wanted.start, wanted.stop) // block[0]
        scales = (_powers if scale.dtype == "F8_E8M0" else torch.Tensor.float)(scale.read_raw())
        own_scales = scales.reshape(-1)[own].view(torch.uint8).view(len(own), -1)
        return torch.cat([codes.read_raw(wanted).view(torch.uint8), own_scales], 1)

    def read(wanted: range, device: torch.device) -> Codes:
        grid = -(-rows // block[0]), -(-columns // block[1])
        own = torch.arange(wanted.start, wanted.stop) // block[0]
        scales = scale.read_raw().float().reshape(grid)[own].to(device)
        found = codes.read_raw(wanted).to(device).view(torch.uint8).bitwise_xor_(128)
        zero: torch.Tensor | float = 128.0
        if zeros is not None:
            zero = zeros.read_raw().float().reshape(grid)[own].add_(128).to(device)
        return Codes(found, scales, block[1], zero)

    if codes.dtype == "I8":
        kept = SavedCodes(8, block[1], read, has_zeros=zeros is not None)
        return module.stored("int8", codes.shape, decode, codes=kept)
    stored = module.stored(FP8, codes.shape, decode)
    keeps_rows = codes.dtype == "F8_E4M3" and block[1] >= columns and zeros is None
    return replace(stored, saved_rows=saved_rows) if keeps_rows else stored


def _spread(scales: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    """Each column of scales for `width` columns of a weight; one column is left to broadcasting."""
    if scales.shape[1] == 1:
        return scales
    return scales.repeat_interleave(width, dim=1)[:, :columns]


def _block_of(module: QuantizedModule, ending: str) -> tuple[int, int]:
    """Rows and columns that share a scale, by the shape of the scales."""
    (rows, columns), shape = module["weight"].shape, module[ending].shape
    given = module.quantization.block
    if math.prod(shape) == 1:
        return rows, columns
    if shape in ((rows,), (rows, 1)):
        return 1, columns
    if given is not None and shape == (-(-rows // given[0]), -(-columns // given[1])):
        return given
    if given is None and len(shape) == 2 and 0 < shape[1] <= columns:
        if shape[0] == rows and columns % shape[1] == 0:
            return 1, columns // shape[1]
        for size in (128, 64, 32, 16):
            if shape == (-(-rows // size), -(-columns // size)):
                return size, size
    raise module.wrong(ending, f"one scale for {rows} rows of {columns}, or for rows or blocks")


def _fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] -> f32 [..., 2 n], the low half of a byte first."""
    values = torch.tensor([*_FP4, *(-value for value in _FP4)])
    codes = torch.stack([packed & 15, packed >> 4], dim=-1)
    return values[codes.long()].flatten(-2)


def _nvfp4(module: QuantizedModule) -> StoredTensor:
    """4-bit floats, [n, k / 2], 16 of which share a scale in FP8, and all of which one in f32: the
    tools of compressed-tensors divide by it, ModelOpt multiplies."""
    ending = "weight_packed" if module.get("weight_packed") else "weight"
    codes = module.check(ending, ("U8",), module[ending].shape)
    if len(codes.shape) != 2:
        raise module.wrong(ending, "U8 [n, k / 2]")
    n, k = codes.shape[0], codes.shape[1] * 2
    scale = module.check("weight_scale", ("F8_E4M3",), (n, k // 16))
    divides = module.get("weight_global_scale") is not None
    whole = module["weight_global_scale" if divides else "weight_scale_2"]
    if math.prod(whole.shape) != 1 or whole.dtype not in FLOATS:
        raise module.wrong("weight_global_scale" if divides else "weight_scale_2", "one float")

    def decode(wanted: range) -> torch.Tensor:
        factor = whole.read_raw().float().reshape(())
        scales = scale.read_raw(wanted).float()
        scales = scales / factor if divides else scales * factor
        values = _fp4_values(codes.read_raw(wanted)).view(len(wanted), k // 16, 16)
        return values.mul_(scales[:, :, None]).view(len(wanted), k)

    return module.stored("NVFP4", (n, k), decode)


def _mxfp4(module: QuantizedModule) -> StoredTensor:
    """4-bit floats, 32 of which share a power of two: compressed-tensors' [n, k / 2]."""
    codes = module["weight_packed"]
    if len(codes.shape) != 2 or codes.dtype != "U8":
        raise module.wrong("weight_packed", "U8 [n, k / 2]")
    n, k = codes.shape[0], codes.shape[1] * 2
    scale = module.check("weight_scale", ("U8", "F8_E8M0"), (n, k // 32))

    def decode(wanted: range) -> torch.Tensor:
        values = _fp4_values(codes.read_raw(wanted)).view(len(wanted), k // 32, 32)
        powers = _powers(scale.read_raw(wanted))
        return values.mul_(powers[:, :, None]).view(len(wanted), k)

    return module.stored("MXFP4", (n, k), decode)


def _powers(scales: torch.Tensor) -> torch.Tensor:
    """Powers of two of 8-bit exponents, f32; ldexp is exact where 2.0 ** x need not be."""
    exponents = scales.view(torch.uint8).int() - 127
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


def _mxfp4_blocks(module: QuantizedModule) -> StoredTensor:
    """gpt-oss's experts: blocks U8 [experts, n, k / 32, 16], as [experts, k, n] in the model."""
    codes, scale = module["_blocks"], module["_scales"]
    if len(codes.shape) < 3 or codes.shape[-1] != 16 or codes.dtype != "U8":
        raise module.wrong("_blocks", "U8 [..., n, k / 32, 16]")
    module.check("_scales", ("U8", "F8_E8M0"), codes.shape[:-1])
    *experts, n, groups = codes.shape[:-1]

    def decode(wanted: range) -> torch.Tensor:
        values = _fp4_values(codes.read_raw(wanted))
        values.mul_(_powers(scale.read_raw(wanted))[..., None])
        rows = values.flatten(-2)
        return rows.transpose(-1, -2) if experts else rows

    shape = (*experts, groups * 32, n) if experts else (n, groups * 32)
    return module.stored("MXFP4", shape, decode)


def _bnb_int8(module: QuantizedModule) -> StoredTensor:
    """Integers [n, k], each row scaled to its largest magnitude (SCB)."""
    codes = module["weight"]
    scale = module.check("SCB", FLOATS, codes.shape[:1])

    def decode(wanted: range) -> torch.Tensor:
        scales = scale.read_raw(wanted).float()[:, None]
        return codes.read_raw(wanted).float().mul_(scales).div_(127)

    def read(wanted: range, device: torch.device) -> Codes:
        scales = scale.read_raw(wanted).to(device).float()[:, None] / 127
        found = codes.read_raw(wanted).to(device).view(torch.uint8).bitwise_xor_(128)
        return Codes(found, scales, codes.shape[1], 128.0)

    kept = SavedCodes(8, codes.shape[1], read) if len(codes.shape) == 2 else None
    return module.stored("bitsandbytes int8", codes.shape, decode, codes=kept)


def _bnb_4bit(module: QuantizedModule) -> StoredTensor:
    """4-bit codes of a table, the high half of a byte first; blocks share a scale, and the scales
    of nested quantisation are codes of a table, too."""
    ending = next((one for one in _STATES if module.get(one)), None)
    if ending is None:
        raise module.wrong("weight.absmax", "beside a quant_state of nf4 or fp4, which is missing")
    state, codes = _state(module, ending), module["weight"]
    shape, block = tuple(state["shape"]), int(state["blocksize"])
    count = math.prod(shape)
    if math.prod(codes.shape) != -(-count // 2) or codes.dtype != "U8":
        raise module.wrong("weight", f"U8, two codes of a weight {list(shape)} each")
    blocks = -(-count // block)
    nested = module.get("weight.nested_absmax")
    dtypes = ("U8",) if nested is not None else FLOATS
    scale = module.check("weight.absmax", dtypes, (blocks,))
    table = module.check("weight.quant_map", FLOATS, (16,))
    if nested is not None:
        groups = -(-blocks // int(state["nested_blocksize"]))
        module.check("weight.nested_absmax", FLOATS, (groups,))
        module.check("weight.nested_quant_map", FLOATS, (256,))

    def scales() -> torch.Tensor:
        if nested is None:
            return scale.read_raw().float()
        size = int(state["nested_blocksize"])
        values = module["weight.nested_quant_map"].read_raw().float()[scale.read_raw().long()]
        outer = nested.read_raw().float().repeat_interleave(size)[:blocks]
        return values.mul_(outer).add_(float(state["nested_offset"]))

    def decode(wanted: range) -> torch.Tensor:
        packed, factors = codes.read_raw().view(-1), scales()
        values = table.read_raw().float()
        found = torch.empty(blocks * block)
        each = max(1, _PIECE_NUMBERS // block) * block
        for start in range(0, count, each):
            some = packed[start // 2 : (start + each) // 2]
            both = torch.stack([some >> 4, some & 15], dim=-1).view(-1)
            found[start : start + len(both)] = values[both.long()]
        found.view(blocks, block).mul_(factors[:, None])
        return found[:count].view(shape)[wanted.start : wanted.stop]

    return module.stored(f"bitsandbytes {state['quant_type']}", shape, decode, is_whole=True)


_STATES = frozenset(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))


def _state(module: QuantizedModule, ending: str) -> dict[str, Any]:
    """The JSON object that bitsandbytes saves as bytes, checked."""
    try:
        state = json.loads(bytes(module[ending].read_raw().tolist()).decode())
        shape = state["shape"]
        is_sound = (
            all(type(size) is int and size > 0 for size in shape)
            and type(state["blocksize"]) is int
            and state["blocksize"] > 0
            and state["blocksize"] % 2 == 0
            and isinstance(state["quant_type"], str)
        )
        if module.get("weight.nested_absmax") is not None:
            module["weight.nested_quant_map"]
            is_sound &= type(state["nested_blocksize"]) is int and state["nested_blocksize"] > 0
            is_sound &= isinstance(state["nested_offset"], float)
    except (ValueError, KeyError, TypeError) as error:
        raise module.wrong(ending, f"bitsandbytes' state of a weight ({error})") from error
    if not is_sound:
        raise module.wrong(ending, "bitsandbytes' state of a weight")
    found: dict[str, Any] = state
    return found


def _is_code(*dtypes: str) -> Callable[[SavedTensor, Saved], bool]:
    return lambda tensor, beside: tensor.dtype in dtypes


def _with(*endings: str) -> Callable[[SavedTensor, Saved], bool]:
    return lambda tensor, beside: all(ending in beside for ending in endings)


_BNB_SIDES = ("weight.nested_absmax", "weight.nested_quant_map", *_STATES)
_ZEROS = ("weight_zero_point",)
SCHEMES = (
    Scheme(
        "GPTQ or AWQ",
        "qweight",
        ("scales", "qzeros"),
        lambda module: (decode_awq if module.quantization.method == "awq" else decode_gptq)(module),
        optional=("g_idx",),
    ),
    Scheme(
        "packed integers",
        "weight_packed",
        ("weight_scale", "weight_shape"),
        decode_packed,
        optional=(*_ZEROS, "weight_g_idx"),
        fits=_is_code("I32"),
    ),
    Scheme(
        "NVFP4",
        "weight_packed",
        ("weight_scale", "weight_global_scale"),
        _nvfp4,
        fits=lambda tensor, beside: "weight_global_scale" in beside,
    ),
    Scheme("MXFP4", "weight_packed", ("weight_scale",), _mxfp4, fits=_is_code("U8")),
    Scheme("MXFP4", "_blocks", ("_scales",), _mxfp4_blocks, weight=""),
    Scheme(
        "NVFP4",
        "weight",
        ("weight_scale", "weight_scale_2"),
        _nvfp4,
        fits=lambda tensor, beside: tensor.dtype == "U8" and "weight_scale_2" in beside,
    ),
    Scheme(
        "bitsandbytes 4-bit",
        "weight",
        ("weight.absmax", "weight.quant_map"),
        _bnb_4bit,
        optional=_BNB_SIDES,
        fits=lambda tensor, beside: (
            tensor.dtype == "U8" and ("weight.absmax" in beside or not _STATES.isdisjoint(beside))
        ),
    ),
    Scheme("bitsandbytes int8", "weight", ("SCB",), _bnb_int8, fits=_with("SCB")),
    Scheme(
        "FP8",
        "weight",
        ("weight_scale_inv",),
        _scaled,
        fits=lambda tensor, beside: tensor.dtype in _FP8 and "weight_scale_inv" in beside,
    ),
    Scheme(
        "FP8 or int8",
        "weight",
        ("weight_scale",),
        _scaled,
        optional=_ZEROS,
        fits=_is_code(*_FP8, "I8"),
    ),
)
