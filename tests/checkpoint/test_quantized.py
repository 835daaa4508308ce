"""Quantised weights in safetensors: each scheme's numbers, by its own tool or by its formula."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_files import (
    COMPRESSED,
    FP8,
    GPTQ,
    SCHEMES,
    SIZES,
    Tensors,
    codes,
    config,
    edit_config,
    packed,
    save_quantised,
)
from safetensors.torch import load_file, save_file
from tiny import load, one_thread, save
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.checkpoint import quantized_tensors
from bytetx.checkpoint.saved_tensor import DecodedTensor, Part
from bytetx.errors import CheckpointError
from bytetx.hf import FallbackWarning

__all__ = ["one_thread"]  # a fixture


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
        ("int4 packed", "weight_scale", torch.ones(64, 3)),
        ("int4 packed", "weight_g_idx", torch.arange(64, dtype=torch.int32)),
        ("int4 packed", "weight_g_idx", torch.full((64,), 1 << 40)),
        ("int4 packed", "weight_g_idx", torch.arange(-1, 63, dtype=torch.int32) // 16),
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


def test_an_index_of_groups_that_is_not_set_counts_as_none(tmp_path: Path) -> None:
    folder, wanted, _ = save_quantised(tmp_path, "int4 packed")
    unset = torch.full((64,), -1, dtype=torch.int32)
    damaged(folder, lambda tensors: tensors.update({f"{Q}weight_g_idx": unset}))
    name = "layers.0.self_attn.q_proj.weight"
    assert torch.equal(load(folder).weights.cast(torch.float32)[name], wanted[name])
    uneven = torch.ones(64, 3)  # groups of 64 inputs
    damaged(folder, lambda tensors: tensors.update({f"{Q}weight_scale": uneven}))
    with pytest.raises(CheckpointError, match="of groups that divide 64 inputs"):
        load(folder)


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
