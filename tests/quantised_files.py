"""Small models with weights quantised as tools save them, beside the same numbers in float32."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny import save
from tiny_decoders import tiny_decoder

Tensors = dict[str, torch.Tensor]
# Gives for a weight: (tensors by their endings, the numbers that they mean).
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 60}
SKIPPED = "layers.1.mlp.down_proj"
FP8 = torch.float8_e4m3fn


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + math.prod(shape)))


def codes(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(high + math.prod(shape))
    return torch.randint(low, high, shape, generator=generator)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (random(*shape).abs() * 0.02 + 0.01).to(dtype)


def packed(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Codes as int32, the lowest bits first, 32 / bits of them along a dim."""
    each = 32 // bits
    array = np.moveaxis(values.numpy().astype(np.uint32), dim, -1)
    array = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % each)])
    groups = array.reshape(*array.shape[:-1], -1, each)
    found = np.zeros(groups.shape[:-1], np.uint32)
    for i in range(each):
        found |= groups[..., i] << np.uint32(bits * i)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(found, -1, dim)).view(np.int32))


def fp8(scale_shape: str, ending: str = "weight_scale") -> Quantise:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        shape = {"tensor": (), "one": (1,), "channel": (n, 1), "row": (n,)}.get(scale_shape)
        if shape is None:  # a block of rows and columns; the last ones are smaller
            shape = (-(-n // 48), -(-k // 32))
        scale, saved = scales(*shape), weight.to(FP8)
        if len(shape) == 2 and shape[1] > 1:
            whole = scale.repeat_interleave(48, 0)[:n].repeat_interleave(32, 1)[:, :k]
        else:
            whole = scale.reshape(-1, 1)
        return {"weight": saved, ending: scale}, saved.float() * whole

    return quantise


def int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    n, k = weight.shape
    values, scale = codes(128, n, k, low=-128).to(torch.int8), scales(n, 1)
    zeros = codes(20, n, 1, low=-20).to(torch.int8)
    saved = {"weight": values, "weight_scale": scale, "weight_zero_point": zeros}
    return saved, (values.float() - zeros.float()) * scale


def gptq(bits: int, *, group: int = 32, adds_one: bool = True, acts: bool = False) -> Quantise:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        groups = k // group if group > 0 else 1
        values, zeros = codes(1 << bits, k, n), codes(1 << bits, groups, n, low=1)
        scale = scales(groups, n, dtype=torch.float16)
        index = torch.arange(k, dtype=torch.int32) // (k // groups)
        if acts:
            index = index[torch.randperm(k, generator=torch.Generator().manual_seed(1))]
        saved = {
            "qweight": packed(values, bits, 0),
            "qzeros": packed(zeros - int(adds_one), bits, 1),
            "scales": scale,
            "g_idx": index,
        }
        wanted = (values - zeros[index.long()]).float() * scale.float()[index.long()]
        return saved, wanted.t()

    return quantise


def awq(bits: int) -> Quantise:
    order = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}[bits]

    def ordered(values: torch.Tensor) -> torch.Tensor:
        return values.view(len(values), -1, len(order))[:, :, order].reshape(values.shape)

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        values, zeros = codes(1 << bits, k, n), codes(1 << bits, k // 32, n)
        scale = scales(k // 32, n, dtype=torch.float16)
        saved = {
            "qweight": packed(ordered(values), bits, 1),
            "qzeros": packed(ordered(zeros), bits, 1),
            "scales": scale,
        }
        group = torch.arange(k) // 32
        return saved, ((values - zeros[group]).float() * scale.float()[group]).t()

    return quantise


def packed_ints(bits: int, *, group: int = 16, has_zeros: bool = False) -> Quantise:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        half, groups = 1 << bits - 1, k // group if group else 1
        values, scale = codes(half, n, k, low=-half), scales(n, groups)
        saved = {
            "weight_packed": packed(values + half, bits, 1),
            "weight_scale": scale,
            "weight_shape": torch.tensor([n, k]),
        }
        zeros = codes(half, n, groups, low=-half) * int(has_zeros)
        if has_zeros:
            saved["weight_zero_point"] = packed(zeros + half, bits, 0)
        column = torch.arange(k) // (k // groups)
        return saved, (values - zeros[:, column]).float() * scale[:, column]

    return quantise


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4(is_modelopt: bool) -> Quantise:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        values, scale = codes(16, n, k), (scales(n, k // 16) * 1000).to(FP8)
        nibbles = (values[:, ::2] | values[:, 1::2] << 4).to(torch.uint8)
        column = scale.float().repeat_interleave(16, 1)
        if is_modelopt:
            factor = torch.tensor(0.003)
            saved = {"weight": nibbles, "weight_scale": scale, "weight_scale_2": factor}
            return saved, FP4[values] * (column * factor)
        factor = torch.tensor([300.0])
        saved = {"weight_packed": nibbles, "weight_scale": scale, "weight_global_scale": factor}
        return saved, FP4[values] * (column / factor)

    return quantise


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    n, k = weight.shape
    values, scale = codes(16, n, k), codes(124, n, k // 32, low=118).to(torch.uint8)
    nibbles = (values[:, ::2] | values[:, 1::2] << 4).to(torch.uint8)
    powers = 2.0 ** (scale.float() - 127)
    saved = {"weight_packed": nibbles, "weight_scale": scale}
    return saved, FP4[values] * powers.repeat_interleave(32, 1)


def bnb_int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values, scale = codes(128, *weight.shape, low=-127).to(torch.int8), scales(len(weight))
    return {"weight": values, "SCB": scale}, values.float() * scale[:, None] / 127


def bnb_4bit(kind: str, *, is_nested: bool) -> Quantise:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        count, block, nested_block = weight.numel(), 64, 16
        values, table = codes(16, count), random(16, seed=4)
        blocks = -(-count // block)
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": block,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        saved = {
            "weight": (values[::2] << 4 | values[1::2]).to(torch.uint8)[:, None],
            "weight.quant_map": table,
        }
        if is_nested:
            inner, inner_table = codes(256, blocks), random(256, seed=5)
            outer = scales(-(-blocks // nested_block))
            state |= {"nested_blocksize": nested_block, "nested_offset": 0.25}
            absmax = inner_table[inner] * outer.repeat_interleave(nested_block)[:blocks] + 0.25
            saved["weight.absmax"] = inner.to(torch.uint8)
            saved |= {"weight.nested_absmax": outer, "weight.nested_quant_map": inner_table}
        else:
            absmax = saved["weight.absmax"] = scales(blocks)
        text = json.dumps(state).encode()
        name = f"weight.quant_state.bitsandbytes__{kind}"
        saved[name] = torch.tensor(list(text), dtype=torch.uint8)
        wanted = table[values] * absmax.repeat_interleave(block)[:count]
        return saved, wanted.view(weight.shape)

    return quantise


def config(method: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": method, **more}


COMPRESSED = config("compressed-tensors", format="float-quantized")
GPTQ = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}
# Each scheme: quantization_config, how a weight is quantised, the name of the format.
SCHEMES: dict[str, tuple[dict[str, Any], Quantise, str]] = {
    "fp8 per tensor": (COMPRESSED, fp8("tensor"), "FP8"),
    "fp8 per tensor, a row of one": (COMPRESSED, fp8("one"), "FP8"),
    "fp8 per channel": (COMPRESSED, fp8("channel"), "FP8"),
    "fp8 of fbgemm": (config("fbgemm_fp8"), fp8("channel"), "FP8"),
    "fp8 of modelopt": (config("modelopt"), fp8("tensor"), "FP8"),
    "fp8 per block": (
        config("fp8", weight_block_size=[48, 32]),
        fp8("block", "weight_scale_inv"),
        "FP8",
    ),
    "fp8 per block, compressed-tensors": (
        COMPRESSED | {"config_groups": {"a": {"weights": {"block_structure": [48, 32]}}}},
        fp8("block"),
        "FP8",
    ),
    "fp8 one scale": (config("fp8"), fp8("tensor", "weight_scale_inv"), "FP8"),
    "int8": (config("compressed-tensors", format="int-quantized"), int8, "int8"),
    "gptq": (config("gptq", **GPTQ), gptq(4), "GPTQ 4-bit"),
    "gptq 8 bits": (config("gptq", **GPTQ | {"bits": 8}), gptq(8), "GPTQ 8-bit"),
    "gptq one group": (
        config("gptq", **GPTQ | {"group_size": -1}),
        gptq(4, group=-1),
        "GPTQ 4-bit",
    ),
    "gptq by activations": (config("gptq", **GPTQ), gptq(4, acts=True), "GPTQ 4-bit"),
    "gptq v2": (
        config("gptq", **GPTQ, checkpoint_format="gptq_v2"),
        gptq(4, adds_one=False),
        "GPTQ 4-bit",
    ),
    "awq": (config("awq", bits=4, group_size=32, version="gemm"), awq(4), "AWQ 4-bit"),
    "awq 8 bits": (config("awq", bits=8, group_size=32), awq(8), "AWQ 8-bit"),
    "int4 packed": (COMPRESSED | {"format": "pack-quantized"}, packed_ints(4), "int4"),
    "int8 packed": (COMPRESSED | {"format": "pack-quantized"}, packed_ints(8, group=0), "int8"),
    "int4 packed with zeros": (
        COMPRESSED | {"format": "pack-quantized"},
        packed_ints(4, has_zeros=True),
        "int4",
    ),
    "nvfp4": (COMPRESSED | {"format": "nvfp4-pack-quantized"}, nvfp4(False), "NVFP4"),
    "nvfp4 of modelopt": (config("modelopt", quant_algo="NVFP4"), nvfp4(True), "NVFP4"),
    "mxfp4": (COMPRESSED | {"format": "mxfp4-pack-quantized"}, mxfp4, "MXFP4"),
    "bitsandbytes int8": (
        config("bitsandbytes", load_in_8bit=True),
        bnb_int8,
        "bitsandbytes int8",
    ),
    "bitsandbytes nf4": (
        config("bitsandbytes", load_in_4bit=True),
        bnb_4bit("nf4", is_nested=False),
        "bitsandbytes nf4",
    ),
    "bitsandbytes fp4, nested": (
        config("bitsandbytes", load_in_4bit=True),
        bnb_4bit("fp4", is_nested=True),
        "bitsandbytes fp4",
    ),
}


def save_quantised(folder: Path, case: str) -> tuple[Path, Tensors, Path]:
    """(a llama of this scheme, its weights' numbers by name, the same model in float32)"""
    settings, quantise, _ = SCHEMES[case]
    model = tiny_decoder("llama", **SIZES)
    save(model, folder / "plain")
    save(model, folder / "quantised")
    state, saved, wanted = dict(model.state_dict()), {}, {}
    for name, tensor in state.items():
        stem = name.removesuffix("weight")
        if not name.endswith("_proj.weight") or SKIPPED in name:
            saved[name] = tensor
            continue
        tensors, numbers = quantise(tensor)
        saved |= {f"{stem}{ending}": one.contiguous() for ending, one in tensors.items()}
        if case.startswith("fp8"):  # what tools add and weights do not need
            saved[f"{stem}input_scale"] = torch.tensor([0.5])
        state[name] = wanted[name.removeprefix("model.")] = numbers.contiguous()
    save_file(saved, folder / "quantised" / "model.safetensors", metadata={"format": "pt"})
    save_file(state, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder / "quantised", settings)
    return folder / "quantised", wanted, folder / "plain"


def edit_config(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
