"""GGUF files: blocks as the gguf package decodes them, every architecture as its own checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType
from gguf_files import fields_of, tensors_of, write_gguf
from safetensors.torch import load_file
from tiny import load, one_thread, random_ids, save, tiny_model
from tiny_decoders import expected, tiny_decoder
from torch import nn

from bytetx.checkpoint.files import resolve_checkpoint
from bytetx.checkpoint.gguf.blocks import DECODERS
from bytetx.checkpoint.gguf.formats import FORMATS
from bytetx.checkpoint.layer_spec import LayerSpec
from bytetx.checkpoint.model_spec import ModelSpec

__all__ = ["one_thread"]  # a fixture


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of GGUF files are kept below it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("name", DECODERS)
def test_blocks_are_decoded_to_the_numbers_of_the_gguf_package(name: str) -> None:
    kind = GGMLQuantizationType[name]
    rng = np.random.default_rng(kind.value)
    raw = rng.integers(0, 256, (1000, FORMATS[kind.value].num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales are not all finite
        theirs = gguf.quants.dequantize(raw, kind)
    np.testing.assert_array_equal(DECODERS[name](torch.from_numpy(raw)).numpy(), theirs)


def test_names_and_sizes_of_formats_are_those_of_the_gguf_package() -> None:
    for number, one in FORMATS.items():
        kind = GGMLQuantizationType(number)
        assert kind.name == one.name
        assert gguf.GGML_QUANT_SIZES[kind] == (one.numbers, one.num_bytes)


def write_model(path: Path, arch: MODEL_ARCH, model: nn.Module, **more: Any) -> Path:
    fields = fields_of(model.config, **more.pop("fields", {}))
    tensors = tensors_of(model.state_dict(), model.config, arch) | more.pop("tensors", {})
    return write_gguf(path, gguf.MODEL_ARCH_NAMES[arch], fields, tensors, **more)


def plain_layers(spec: ModelSpec) -> LayerSpec:
    """The layers, with one way to say that none has a window."""
    layers = spec.layer_spec
    return layers if any(layers.window_pattern) else replace(layers, window_pattern=())


def assert_same_model(saved: Path, file: Path) -> None:
    """The same spec, and the same numbers in every tensor."""
    ours, theirs = load(resolve_checkpoint(file)), load(saved)
    assert plain_layers(ours.spec) == plain_layers(theirs.spec)
    for field in ("family", "hidden_size", "num_kv_heads", "head_dim", "norm_eps"):
        assert getattr(ours.spec, field) == getattr(theirs.spec, field), field
    for field in ("max_positions", "vocab_size", "activation", "tie_word_embeddings"):
        assert getattr(ours.spec, field) == getattr(theirs.spec, field), field
    for field in ("logits_softcap", "embedding_multiplier", "residual_multiplier"):
        assert getattr(ours.spec, field) == pytest.approx(getattr(theirs.spec, field)), field
    assert set(ours.weights) <= set(theirs.weights)  # poolers are left out
    for name in ours.weights:
        tensor = theirs.weights[name]
        offset = 1e-6 if "norm" in name else 0  # Gemma's norms are saved with one more
        torch.testing.assert_close(ours.weights[name], tensor, rtol=0, atol=offset)
    ids = random_ids([9, 2])
    for one, other in zip(ours.rows(ids), theirs.rows(ids), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


A = MODEL_ARCH
GEMMA_HEADS = {"ARCH.attention.key_length": 16, "ARCH.attention.value_length": 16}
GRANITE = {
    "ARCH.embedding_scale": 3.0,
    "ARCH.residual_scale": 0.4,
    "ARCH.attention.scale": 0.2,
    "ARCH.logit_scale": 5.0,
}
LINEAR = {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 2.0}
YARN = {
    "ARCH.rope.scaling.type": "yarn",
    "ARCH.rope.scaling.factor": 4.0,
    "ARCH.rope.scaling.original_context_length": 24,
}
DECODER_FILES: dict[str, tuple[str, MODEL_ARCH, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", A.LLAMA, {}, {}),
    "llama tied": ("llama-tied", A.LLAMA, {}, {}),
    "llama biases": ("llama-biases", A.LLAMA, {}, {}),
    "llama heads": ("llama-wide-heads", A.LLAMA, {}, {"ARCH.attention.key_length": 20}),
    "llama linear": ("llama-linear", A.LLAMA, {}, LINEAR),
    "llama yarn": ("llama-yarn", A.LLAMA, {}, YARN),
    "mistral": ("mistral", A.LLAMA, {}, {}),
    "qwen2": ("qwen2", A.QWEN2, {}, {}),
    "qwen3": ("qwen3", A.QWEN3, {}, {"ARCH.attention.key_length": 16}),
    "gemma": ("gemma", A.GEMMA, {}, GEMMA_HEADS),
    "gemma2": ("gemma2", A.GEMMA2, {"query_pre_attn_scalar": 16}, GEMMA_HEADS),
    "gemma3": (
        "gemma3",
        A.GEMMA3,
        {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
        GEMMA_HEADS
        | {"ARCH.rope.freq_base_swa": 300.0, "ARCH.rope.scaling.type": "linear"}
        | {"ARCH.rope.scaling.factor": 4.0},
    ),
    "phi3": ("phi3", A.PHI3, {}, {}),
    "gpt2": ("gpt2", A.GPT2, {}, {"tokenizer.ggml.padding_token_id": 0}),
    "granite": ("granite", A.GRANITE, {}, GRANITE),
    "olmo2": ("olmo2", A.OLMO2, {}, {}),
    "smollm3": ("smollm3", A.SMOLLM3, {"no_rope_layer_interval": 4}, {}),
    "stablelm": ("stablelm-biases", A.STABLELM, {}, {"ARCH.rope.dimension_count": 6}),
    "starcoder2": ("starcoder2", A.STARCODER2, {}, {}),
}


@pytest.mark.feature("Checkpoints", "GGUF")
@pytest.mark.parametrize("case", DECODER_FILES)
def test_a_decoder_in_gguf_is_the_one_in_safetensors(case: str, tmp_path: Path) -> None:
    name, arch, config, fields = DECODER_FILES[case]
    model = tiny_decoder(name, **config)
    file = write_model(tmp_path / "model.gguf", arch, model, fields=fields)
    assert_same_model(save(model, tmp_path / "saved"), file)


def test_factors_of_frequencies_are_those_of_llama_3(tmp_path: Path) -> None:
    """GGUF has a number for each frequency in place of Llama 3's parameters."""
    model = tiny_decoder("llama3")
    theta = 1.0 / 500.0 ** (torch.arange(0, 12, 2).float() / 12)
    inverse = model.model.rotary_emb.inv_freq
    factors = {"rope_freqs.weight": (theta / inverse).numpy()}
    file = write_model(tmp_path / "model.gguf", A.LLAMA, model, tensors=factors)
    ids = random_ids([40])[0]
    rows = load(resolve_checkpoint(file)).rows([ids])[0]
    wanted = expected(model, ids).hidden_states[-1][0]
    torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "arch", "config"),
    [
        ("bert", A.BERT, {}),
        ("nomic_bert", A.NOMIC_BERT, {}),
    ],
)
def test_an_encoder_in_gguf_is_the_one_in_safetensors(
    family: str, arch: MODEL_ARCH, config: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(family, **config)
    saved = save(model, tmp_path / "saved")
    tensors = tensors_of(load_file(saved / "model.safetensors"), model.config, arch)
    fields = fields_of(model.config, **{"ARCH.attention.causal": False})
    name = gguf.MODEL_ARCH_NAMES[arch]
    file = write_gguf(tmp_path / "model.gguf", name, fields, tensors)
    assert_same_model(saved, file)
