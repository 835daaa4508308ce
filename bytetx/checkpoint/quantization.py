"""quantization_config of config.json: the method that weights were quantised by, checked."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bytetx.errors import CheckpointError

# quant_method, and how its tools are called.
METHODS = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "fbgemm_fp8": "FBGEMM FP8",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
}
# Formats of compressed-tensors whose weights are dense, but for codes.
_FORMATS = (
    *("dense", "float-quantized", "naive-quantized", "int-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision"),
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's weights were quantised.

    method: a key of METHODS.  bits, group_size: of GPTQ and AWQ, 4 or 8 bits; group_size -1 is one
    group a row.  adds_one: whether GPTQ's saved zero points lack one.  block: rows and columns that
    share a scale, of block FP8; None: one scale a row or a tensor.
    """

    method: str
    bits: int = 4
    group_size: int = -1
    adds_one: bool = True
    block: tuple[int, int] | None = None

    @property
    def tool(self) -> str:
        return METHODS[self.method]


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """The quantisation of a config.json; None for plain weights.

    Raises CheckpointError for a method, or a variant of one, that bytetx does not read.
    """
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if method not in METHODS:
        named = "no method named" if method is None else f"{method!s:.60}"
        raise _refused(named, f"bytetx reads {', '.join(METHODS.values())} and GGUF files")
    match method:
        case "gptq":
            return _gptq(given)
        case "awq":
            return _awq(given)
        case "compressed-tensors":
            return _compressed(given)
        case "fp8":
            block = given.get("weight_block_size")
            return Quantization(method, block=None if block is None else _block(block))
    return Quantization(method)


def _gptq(given: Mapping[str, Any]) -> Quantization:
    bits, group_size = _bits(given, "GPTQ"), _group_size(given, "GPTQ")
    form = given.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise _refused("GPTQ", f"checkpoint_format {form!r:.60} is none of gptq, gptq_v2")
    return Quantization("gptq", bits=bits, group_size=group_size, adds_one=form == "gptq")


def _awq(given: Mapping[str, Any]) -> Quantization:
    version = str(given.get("version") or given.get("format") or "gemm").lower()
    if version != "gemm":
        raise _refused("AWQ", f"version {version!r:.60} has another layout than gemm")
    return Quantization("awq", bits=_bits(given, "AWQ"), group_size=_group_size(given, "AWQ"))


def _bits(given: Mapping[str, Any], tool: str) -> int:
    bits = given.get("bits", given.get("w_bit", 4))
    if bits not in (4, 8) or isinstance(bits, bool):
        raise _refused(tool, f"bits {bits!r:.60} is none of 4, 8")
    return int(bits)


def _group_size(given: Mapping[str, Any], tool: str) -> int:
    size = given.get("group_size", given.get("q_group_size", 128))
    if type(size) is not int or size == 0 or size < -1:
        raise _refused(tool, f"group_size {size!r:.60} must be a positive integer or -1")
    return size


def _block(given: object) -> tuple[int, int]:
    match given:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case str(text) if re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,5}", text):
            first, _, second = text.partition("x")
            return int(first), int(second)
    raise _refused("FP8", f"weight_block_size {given!r:.60} must be two positive integers")


def _compressed(given: Mapping[str, Any]) -> Quantization:
    tool = METHODS["compressed-tensors"]
    groups = given.get("config_groups")
    formats, block = [given.get("format")], None
    for group in groups.values() if isinstance(groups, Mapping) else ():
        formats.append(group.get("format") if isinstance(group, Mapping) else None)
        weights = group.get("weights") if isinstance(group, Mapping) else None
        structure = weights.get("block_structure") if isinstance(weights, Mapping) else None
        block = block if structure is None else _block(structure)
    for form in formats:
        if form is not None and form not in _FORMATS:
            raise _refused(tool, f"format {form!r:.60} is none of {', '.join(_FORMATS)}")
    if given.get("transform_config"):
        raise _refused(tool, "transform_config rotates activations, which bytetx does not")
    sparsity = given.get("sparsity_config")
    form = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if form not in (None, "dense"):
        raise _refused(tool, f"sparsity format {form!r:.60} is not dense")
    return Quantization("compressed-tensors", block=block)


def _refused(tool: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: quantization_config says that the weights are quantised ({tool}), which "
        f"bytetx does not read ({why}); give the checkpoint in float32, float16 or bfloat16 that "
        "they were made from"
    )
