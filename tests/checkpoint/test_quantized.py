"""Quantised weights in safetensors: each scheme's numbers, by its own tool or by its formula."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import load, one_thread, save
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.checkpoint import quantized_tensors
from bytetx.checkpoint.saved_tensor import DecodedTensor, Part
from bytetx.errors import CheckpointError
from bytetx.hf import FallbackWarning

__all__ = ["one_thread"]  # a fixture

Tensors = dict[str, torch.Tensor]
# Of a weight: (tensors by their endings, the numbers that they mean).
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


@pytest.mark.feature("Checkpoints", "FP8, GPTQ, AWQ, bitsandbytes, MXFP4, NVFP4, packed integers")
@pytest.mark.parametrize("case", SCHEMES)
def test_each_weight_has_the_numbers_that_its_scheme_means(case: str, tmp_path: Path) -> None:
    folder, wanted, plain = save_quantised(tmp_path, case)
    ours, theirs = load(folder), load(plain)
    assert set(ours.weights) == set(theirs.weights) and not ours.weights.unused()[3:]
    weights = ours.weights.cast(torch.float32)
    for name, numbers in wanted.items():
        assert weights.shape(name) == numbers.shape
        assert torch.equal(weights[name], numbers), name
        rows, columns = Part(0, (range(3, 17), range(20, 21))), Part(1, (range(8, 30),))
        taken = torch.cat([numbers[3:17], numbers[20:21]])
        assert torch.equal(weights.read(name, rows), taken)
        assert torch.equal(weights.read(name, columns), numbers[:, 8:30])
        assert torch.equal(ours.weights.cast(torch.bfloat16)[name], numbers.bfloat16())
    model, other = bytetx.load(folder, device="cpu"), bytetx.load(plain, device="cpu")
    assert (model.embed([[5, 6, 7]]).vectors == other.embed([[5, 6, 7]]).vectors).all()
    info = model.info()
    assert list(info["weights_formats"]) and SCHEMES[case][2] in info["weights_formats"]
    assert info["num_parameters"] == other.info()["num_parameters"]
    assert info["weights_bits"] < 24 and info["unused_tensors"] == []


def test_the_experts_of_gpt_oss_are_decoded_as_transformers_does(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from bytetx.checkpoint.quantization import Quantization
    from bytetx.checkpoint.quantized_tensors import decode_quantized
    from bytetx.checkpoint.weights import read_header

    blocks = codes(256, 3, 8, 2, 16).to(torch.uint8)
    exponents = codes(130, 3, 8, 2, low=120).to(torch.uint8)
    path = tmp_path / "model.safetensors"
    save_file(
        {"experts.gate_up_proj_blocks": blocks, "experts.gate_up_proj_scales": exponents}, path
    )
    found = {one.name: one for one in read_header(path)}
    named = decode_quantized(found, Quantization("mxfp4"), is_transposed=False)
    weight = named["experts.gate_up_proj"]
    assert isinstance(weight, DecodedTensor) and weight.shape == (3, 64, 8)
    theirs = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    assert torch.equal(weight.read(torch.float32), theirs)


@pytest.mark.parametrize(("kind", "is_nested"), [("nf4", False), ("nf4", True), ("fp4", True)])
def test_4_bit_weights_of_bitsandbytes_are_those_that_it_decodes(
    kind: str, is_nested: bool, tmp_path: Path
) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = tiny_decoder("llama", **SIZES)
    folder = save(model, tmp_path)
    tensors, wanted = dict(model.state_dict()), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        packed, state = bnb.functional.quantize_4bit(
            tensors.pop(name), blocksize=64, quant_type=kind, compress_statistics=is_nested
        )
        sides = state.as_dict(packed=True)
        tensors |= {name: packed, **{f"{name}.{key}": value for key, value in sides.items()}}
        wanted[name.removeprefix("model.")] = bnb.functional.dequantize_4bit(packed, state)
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, config("bitsandbytes", load_in_4bit=True))
    weights = load(folder).weights.cast(torch.float32)
    for name, numbers in wanted.items():
        torch.testing.assert_close(weights[name], numbers.float(), rtol=1e-6, atol=1e-7)


def test_packed_integers_are_those_of_compressed_tensors() -> None:
    tool = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (4, 8):
        half = 1 << bits - 1
        values = codes(half, 24, 40, low=-half).to(torch.int8)
        for dim in (0, 1):
            theirs = tool.pack_to_int32(values, bits, packed_dim=dim)
            assert torch.equal(packed(values.long() + half, bits, dim), theirs)


def damaged(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, path)


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("case", "ending", "message"),
    [
        ("fp8 per channel", "weight_scale", "weight_scale is not there"),
        ("fp8 per block", "weight_scale_inv", "is not there"),
        ("gptq", "scales", "scales is not there"),
        ("gptq", "qzeros", "qzeros is not there"),
        ("awq", "scales", "scales is not there"),
        ("int4 packed", "weight_shape", "weight_shape is not there"),
        ("nvfp4", "weight_scale", "weight_scale is not there"),
        ("mxfp4", "weight_scale", "weight_scale is not there"),
        ("bitsandbytes int8", "SCB", "is not there"),
        ("bitsandbytes nf4", "weight.absmax", "absmax is not there"),
        ("bitsandbytes nf4", "weight.quant_map", "quant_map is not there"),
        ("bitsandbytes nf4", "weight.quant_state.bitsandbytes__nf4", "quant_state"),
    ],
)
def test_a_missing_part_of_a_weight_is_named(
    case: str, ending: str, message: str, tmp_path: Path
) -> None:
    folder, _, _ = save_quantised(tmp_path, case)
    damaged(folder, lambda tensors: tensors.pop(f"{Q}{ending}"))
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value) and "q_proj" in str(caught.value)


@pytest.mark.parametrize(
    ("case", "ending", "value"),
    [
        ("fp8 per channel", "weight_scale", torch.ones(3, 1)),
        ("fp8 per channel", "weight_scale", torch.ones(64, 1, dtype=torch.int32)),
        ("fp8 per block", "weight_scale_inv", torch.ones(5, 5)),
        ("gptq", "scales", torch.ones(3, 64)),
        ("gptq", "qzeros", torch.ones(2, 7, dtype=torch.int32)),
        ("gptq", "g_idx", torch.full((64,), 2, dtype=torch.int32)),
        ("gptq", "g_idx", torch.full((64,), -1, dtype=torch.int32)),
        ("gptq", "qweight", torch.ones(8, 64)),
        ("awq", "qweight", torch.ones(64, 7, dtype=torch.int32)),
        ("int4 packed", "weight_shape", torch.tensor([64, 63])),
        ("int4 packed", "weight_scale", torch.ones(63, 4)),
        ("nvfp4", "weight_scale", torch.ones(64, 4)),
        ("nvfp4", "weight_global_scale", torch.ones(2)),
        ("mxfp4", "weight_scale", torch.ones(64, 3, dtype=torch.uint8)),
        ("bitsandbytes int8", "SCB", torch.ones(63)),
        ("bitsandbytes nf4", "weight.absmax", torch.ones(63)),
        ("bitsandbytes nf4", "weight.quant_map", torch.ones(15)),
        (
            "bitsandbytes nf4",
            "weight.quant_state.bitsandbytes__nf4",
            torch.tensor(list(b'{"shape": [9, 9]}'), dtype=torch.uint8),
        ),
    ],
)
def test_a_damaged_part_of_a_weight_is_one_clear_error(
    case: str, ending: str, value: torch.Tensor, tmp_path: Path
) -> None:
    folder, _, _ = save_quantised(tmp_path, case)
    damaged(folder, lambda tensors: tensors.update({f"{Q}{ending}": value}))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert "q_proj" in str(caught.value) or "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("method", ["hqq", "aqlm", "eetq", "quip", "quark", "torchao", "vptq"])
def test_methods_that_are_not_read_are_refused_by_name(method: str, tmp_path: Path) -> None:
    folder = save(tiny_decoder("llama"), tmp_path)
    edit_config(folder, config(method))
    with pytest.raises(CheckpointError, match=rf"quantised \({method}\).*bytetx reads AWQ"):
        load(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config("gptq", bits=3, group_size=32), "bits 3 is none of 4, 8"),
        (config("gptq", bits=4, group_size=0), "group_size 0 must be"),
        (config("gptq", bits=4, group_size=32, checkpoint_format="marlin"), "'marlin'"),
        (config("awq", bits=4, version="gemv"), "'gemv'"),
        (config("awq", bits="4"), "bits '4' is none"),
        (config("fp8", weight_block_size=[128]), "must be two positive integers"),
        (config("compressed-tensors", format="marlin-24"), "'marlin-24'"),
        (
            config("compressed-tensors", sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity format",
        ),
        (config("compressed-tensors", transform_config={"a": 1}), "transform_config"),
    ],
)
def test_variants_that_are_not_read_are_refused_by_name(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save(tiny_decoder("llama"), tmp_path)
    edit_config(folder, settings)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_config_that_says_quantised_beside_plain_weights(tmp_path: Path) -> None:
    folder = save(tiny_decoder("llama"), tmp_path)
    edit_config(folder, config("gptq", **GPTQ))
    with pytest.raises(CheckpointError, match=r"quantised \(GPTQ\), and .* holds none that are"):
        load(folder)


def test_a_quantised_conv1d_is_refused(tmp_path: Path) -> None:
    model = tiny_decoder("gpt2")
    folder = save(model, tmp_path)
    tensors = dict(model.state_dict())
    tensors.pop("lm_head.weight")
    name = "transformer.h.0.attn.c_proj."
    tensors[f"{name}weight"] = tensors[f"{name}weight"].to(FP8)
    tensors[f"{name}weight_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, COMPRESSED)
    with pytest.raises(CheckpointError, match=r"weights as \[in, out\]"):
        load(folder)


def test_a_wrapped_model_with_quantised_weights_runs_its_own_forward() -> None:
    model = tiny_decoder("llama")
    model.config.quantization_config = config("gptq", **GPTQ)
    wrapped = bytetx.wrap(model)
    why = r"quantised \(GPTQ\).*bytetx.load\(path\) reads"
    with pytest.warns(FallbackWarning, match=why), torch.no_grad():
        wrapped(torch.tensor([[5, 6]]))


@pytest.mark.parametrize("case", ["gptq by activations", "awq 8 bits", "bitsandbytes fp4, nested"])
def test_a_weight_is_decoded_a_piece_at_a_time(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers, whatever the pieces; integers of all codes would take several weights."""
    monkeypatch.setattr(quantized_tensors, "_PIECE_NUMBERS", 1000)
    folder, wanted, _ = save_quantised(tmp_path, case)
    weights = load(folder).weights.cast(torch.float32)
    for name, numbers in wanted.items():
        assert torch.equal(weights[name], numbers), name
