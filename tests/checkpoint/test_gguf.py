"""GGUF files: blocks as the gguf package decodes them, every architecture as its own checkpoint."""

import contextlib
import sys
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

import bytetx
from bytetx.checkpoint.files import load_config, resolve_checkpoint
from bytetx.checkpoint.gguf import folder as folder_module
from bytetx.checkpoint.gguf.blocks import BLOCK_FORMATS
from bytetx.checkpoint.gguf.formats import FORMATS
from bytetx.checkpoint.layer_spec import LayerSpec
from bytetx.checkpoint.model_spec import ModelSpec
from bytetx.checkpoint.saved_tensor import Part
from bytetx.checkpoint.spec import build_spec
from bytetx.checkpoint.weights import Weights
from bytetx.errors import CheckpointError

__all__ = ["one_thread"]  # a fixture


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of GGUF files are kept below it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_are_decoded_to_the_numbers_of_the_gguf_package(name: str) -> None:
    kind = GGMLQuantizationType[name]
    rng = np.random.default_rng(kind.value)
    raw = rng.integers(0, 256, (1000, FORMATS[kind.value].num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales are not all finite
        theirs = gguf.quants.dequantize(raw, kind)
    np.testing.assert_array_equal(BLOCK_FORMATS[name].values(torch.from_numpy(raw)).numpy(), theirs)


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


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


def quantised(
    path: Path, kind: GGMLQuantizationType
) -> tuple[Path, nn.Module, dict[str, torch.Tensor]]:
    """(a llama whose matrices are of this format, the same model in f32, random blocks' numbers)"""
    model = tiny_decoder("llama", **WIDE, num_hidden_layers=1)
    tensors = tensors_of(model.state_dict(), model.config, A.LLAMA)
    rng = np.random.default_rng(kind.value)
    numbers, size = FORMATS[kind.value].numbers, FORMATS[kind.value].num_bytes
    wanted, raw = {}, {}
    for name, array in tensors.items():
        if array.ndim == 1:
            continue
        blocks = rng.integers(0, 256, (len(array), array.shape[1] // numbers, size), dtype=np.uint8)
        # The high byte of each float16 scale, which keeps numbers finite and small.
        blocks[..., 1::2] &= 0x2B if kind.name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1") else 0x2F
        blocks = blocks.reshape(len(array), -1)
        raw[name], tensors[name] = kind, blocks
        with np.errstate(all="ignore"):
            wanted[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    fields = fields_of(model.config, **{"ARCH.attention.key_length": 64})
    return write_gguf(path, "llama", fields, tensors, raw=raw), model, wanted


@pytest.mark.parametrize("name", [*BLOCK_FORMATS, "IQ4_NL", "IQ4_XS", "IQ2_S", "TQ2_0"])
def test_quantised_tensors_and_their_parts(name: str, tmp_path: Path) -> None:
    """Read by rows and by columns, as ranks do; q and k in the order of transformers' rows."""
    file, _, wanted = quantised(tmp_path / "model.gguf", GGMLQuantizationType[name])
    folder = resolve_checkpoint(file)
    spec = build_spec(load_config(folder))
    weights = Weights(folder, spec).cast(torch.float32)
    names = {
        "blk.0.attn_q.weight": "q",
        "blk.0.attn_k.weight": "k",
        "blk.0.ffn_down.weight": "ffn_out",
    }
    for own, role in names.items():
        numbers = wanted[own]
        if role in ("q", "k"):
            pairs = numbers.view(-1, 32, 2, numbers.shape[1])
            numbers = pairs.transpose(1, 2).reshape(numbers.shape)
        saved = f"{spec.layer[role].replace('{i}', '0')}.weight"
        torch.testing.assert_close(weights[saved], numbers, rtol=0, atol=0, equal_nan=True)
        rows, columns = Part(0, (range(5, 70), range(100, 101))), Part(1, (range(10, 200),))
        taken = torch.cat([numbers[5:70], numbers[100:101]])
        torch.testing.assert_close(weights.read(saved, rows), taken, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(
            weights.read(saved, columns), numbers[:, 10:200], rtol=0, atol=0, equal_nan=True
        )


def test_a_format_with_codebooks_needs_the_gguf_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _, _ = quantised(tmp_path / "model.gguf", GGMLQuantizationType.IQ4_NL)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"is in IQ4_NL.*pip install -U 'bytetx\[gguf\]'"):
        bytetx.load(file)


def test_a_quantised_file_generates_as_its_numbers_do(tmp_path: Path) -> None:
    model = tiny_decoder("llama", **WIDE, num_hidden_layers=2)
    tensors = tensors_of(model.state_dict(), model.config, A.LLAMA)
    kinds = {name: GGMLQuantizationType.Q8_0 for name, one in tensors.items() if one.ndim == 2}
    fields = fields_of(model.config, **{"ARCH.attention.key_length": 64})
    file = write_gguf(tmp_path / "model.gguf", "llama", fields, tensors, kinds=kinds)
    ours = bytetx.load(file, device="cpu", dtype="float32")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(load(resolve_checkpoint(file)).weights[name.removeprefix("model.")])
    ids = random_ids([9])[0]
    found = ours.generate([ids], bytetx.SamplingParams(max_tokens=8, temperature=0))
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    assert list(found[0].outputs[0].token_ids) == theirs[0].tolist()[len(ids) :]
    info = ours.info()
    assert set(info["weights_formats"]) == {"Q8_0", "F32"} and 8.4 < info["weights_bits"] < 9
    assert info["unused_tensors"] == [] and info["path"] == str(file.resolve())


def split(file: Path, model: nn.Module) -> list[Path]:
    """The model of a file in three, as llama-gguf-split writes them."""
    tensors = list(tensors_of(model.state_dict(), model.config, A.LLAMA).items())
    paths = []
    for number in range(3):
        path = file.with_name(f"big-{number + 1:05d}-of-00003.gguf")
        fields = fields_of(model.config) if number == 0 else {}
        fields = fields | {"split.count": 3, "split.no": number}
        paths.append(write_gguf(path, "llama", fields, dict(tensors[number::3])))
    return paths


def test_a_model_of_several_files_is_read_from_any_of_them(tmp_path: Path) -> None:
    model = tiny_decoder("llama")
    saved = save(model, tmp_path / "saved")
    (tmp_path / "parts").mkdir()
    paths = split(tmp_path / "parts" / "x", model)
    for given in (paths[0], paths[2], tmp_path / "parts"):
        assert_same_model(saved, given)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match="big-00002-of-00003.gguf are not beside it"):
        resolve_checkpoint(paths[0])


def test_several_models_in_a_folder_are_named(tmp_path: Path) -> None:
    model = tiny_decoder("llama")
    for name in ("a-q4.gguf", "b-q8.gguf"):
        write_model(tmp_path / name, A.LLAMA, model)
    with pytest.raises(CheckpointError, match="2 GGUF models: a-q4.gguf, b-q8.gguf; give the path"):
        resolve_checkpoint(tmp_path)
    (tmp_path / "a-q4.gguf").unlink()
    assert resolve_checkpoint(tmp_path).name == tmp_path.name


def test_the_folder_of_a_file_is_made_once_and_anew_where_the_file_changes(
    tmp_path: Path, home: Path
) -> None:
    file = write_model(tmp_path / "model.gguf", A.LLAMA, tiny_decoder("llama"))
    first = resolve_checkpoint(file)
    assert home in first.parents and resolve_checkpoint(file) == first
    assert resolve_checkpoint(first) == first  # replicas and ranks are given the folder
    write_model(file, A.LLAMA, tiny_decoder("llama-tied"))
    assert resolve_checkpoint(file) != first


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setattr(folder_module, "_temporary", lambda: tmp_path / "other")
    file = write_model(tmp_path / "model.gguf", A.LLAMA, tiny_decoder("llama"))
    assert tmp_path / "other" in resolve_checkpoint(file).parents


def test_pooling_templates_sampling_and_ends_come_out_of_the_file(tmp_path: Path) -> None:
    model = tiny_decoder("qwen3")
    words = ["a", "b", "ab", *(f"t{i}" for i in range(54))]
    tokens = [*words, "<|im_end|>", "<|endoftext|>", "c"]
    fields = {
        "ARCH.attention.key_length": 16,
        "ARCH.pooling_type": 3,
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        "tokenizer.chat_template.tool_use": "tools {{ messages[0]['content'] }}",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1] * 57 + [3, 3, 1],
        "tokenizer.ggml.eos_token_id": 57,
    }
    file = write_model(tmp_path / "m.gguf", A.QWEN3, model, fields=fields)
    ours = bytetx.load(file, device="cpu", dtype="float32")
    assert ours.checkpoint.generation.eos_token_ids == (57, 58)
    assert ours.info()["generation_defaults"] == {"temperature": 0.6, "top_k": 20}
    assert ours.info()["pooling"] == ["lasttoken"]
    ids = random_ids([9])[0]
    vector = torch.from_numpy(np.asarray(ours.embed([ids]).vectors))[0]
    with torch.no_grad():
        last = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
    torch.testing.assert_close(vector, last / last.norm(), rtol=1e-4, atol=1e-5)
    template = ours.checkpoint.chat_template
    assert template is not None
    folder = ours.checkpoint.folder
    assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()


def damage(raw: bytearray, what: str) -> bytes:
    match what:
        case "cut in the header":
            return bytes(raw[:200])
        case "cut in the data":
            return bytes(raw[:-400])
        case "no magic":
            raw[:4] = b"GGML"
        case "version 1":
            raw[4] = 1
        case "big-endian":
            raw[4:8] = b"\0\0\0\3"
        case "many tensors":
            raw[8:16] = b"\xff" * 8
        case "many fields":
            raw[16:24] = b"\xff" * 8
        case "a long text":
            raw[24:32] = b"\xff" * 8
        case "empty":
            return b""
    return bytes(raw)


@pytest.mark.parametrize(
    "what",
    [
        *("cut in the header", "cut in the data", "no magic", "version 1", "big-endian"),
        *("many tensors", "many fields", "a long text", "empty"),
    ],
)
def test_a_damaged_file_is_one_clear_error(what: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", A.LLAMA, tiny_decoder("llama"))
    file.write_bytes(damage(bytearray(file.read_bytes()), what))
    with pytest.raises(CheckpointError, match="model.gguf") as caught:
        bytetx.load(file)
    assert "\n" not in str(caught.value)


def test_random_damage_is_a_checkpoint_error_or_none(tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", A.LLAMA, tiny_decoder("llama"))
    raw, rng = file.read_bytes(), np.random.default_rng(3)
    for _ in range(150):
        broken = bytearray(raw)
        for place in rng.integers(0, 3000, rng.integers(1, 4)):
            broken[place] = rng.integers(0, 256)
        file.write_bytes(broken)
        with contextlib.suppress(CheckpointError):
            folder = resolve_checkpoint(file)
            Weights(folder, build_spec(load_config(folder)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.type": "adapter"}, "holds no language model, but adapter"),
        ({"ARCH.expert_count": 8}, "has a mixture of experts"),
        ({"ARCH.rope.scaling.type": "longrope", "ARCH.rope.scaling.factor": 2.0}, "LongRoPE"),
        ({"ARCH.attention.value_length": 8, "ARCH.attention.key_length": 12}, "different sizes"),
        ({"ARCH.attention.head_count_kv": [2, 1, 2]}, "layers that differ in attention.head_count"),
        ({"ARCH.block_count": 2}, "tensor 'blk.2.* is none that bytetx knows"),
        ({"ARCH.embedding_length": "wide"}, "embedding_length must be an integer from 1"),
    ],
)
def test_files_that_are_not_run_are_refused_by_name(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = tiny_decoder("llama")
    file = write_model(tmp_path / "model.gguf", A.LLAMA, model, fields=fields)
    with pytest.raises(CheckpointError, match=message):
        bytetx.load(file)


def test_an_architecture_and_a_tensor_that_are_not_known(tmp_path: Path) -> None:
    fields, tensors = (
        fields_of(tiny_decoder("llama").config),
        {"token_embd.weight": np.ones((4, 48))},
    )
    file = write_gguf(tmp_path / "a.gguf", "mamba", fields, tensors)
    with pytest.raises(CheckpointError, match="architecture 'mamba' is none .*known: llama"):
        resolve_checkpoint(file)
    strange = {"blk.0.attn_sinks.weight": np.ones(4)}
    file = write_model(tmp_path / "b.gguf", A.LLAMA, tiny_decoder("llama"), tensors=strange)
    with pytest.raises(CheckpointError, match="'blk.0.attn_sinks.weight' is none that bytetx"):
        bytetx.load(file)


def test_jina_bert_joins_the_halves_of_its_gate(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def some(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.2, shape).astype(np.float32)

    tensors = {"token_embd.weight": some(60, 48), "token_types.weight": some(2, 48)}
    linears = {"attn_q": (48, 48), "attn_k": (48, 48), "attn_v": (48, 48)}
    linears |= {"attn_output": (48, 48), "ffn_down": (48, 80)}
    norms = ["token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"]
    for name, shape in linears.items():
        tensors |= {f"blk.0.{name}.weight": some(*shape), f"blk.0.{name}.bias": some(shape[0])}
    for name in norms:
        tensors |= {f"{name}.weight": some(48), f"{name}.bias": some(48)}
    tensors |= {"blk.0.ffn_gate.weight": some(80, 48), "blk.0.ffn_up.weight": some(80, 48)}
    fields = {
        "ARCH.context_length": 64,
        "ARCH.embedding_length": 48,
        "ARCH.block_count": 1,
        "ARCH.feed_forward_length": 80,
        "ARCH.attention.head_count": 3,
        "ARCH.attention.layer_norm_epsilon": 1e-12,
        "ARCH.pooling_type": 1,
    }
    file = write_gguf(tmp_path / "jina.gguf", "jina-bert-v2", fields, tensors)
    loaded = load(resolve_checkpoint(file))
    assert loaded.spec.family == "jina_bert"
    joined = loaded.weights["encoder.layer.0.mlp.gated_layers.weight"].numpy()
    both = [tensors["blk.0.ffn_gate.weight"], tensors["blk.0.ffn_up.weight"]]
    np.testing.assert_array_equal(joined, np.concatenate(both))
    part = loaded.weights.read("encoder.layer.0.mlp.gated_layers.weight", Part(0, (range(70, 90),)))
    np.testing.assert_array_equal(part.numpy(), joined[70:90])
    assert bytetx.load(file, device="cpu").info()["pooling"] == ["mean"]


def test_weights_in_onnx_are_refused_by_name(tmp_path: Path) -> None:
    folder = save(tiny_model("bert"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "onnx").mkdir()
    file = folder / "onnx" / "model_quantized.onnx"
    file.write_bytes(b"onnx")
    with pytest.raises(
        CheckpointError, match=r"weights in ONNX only \(onnx/model_quantized.onnx\)"
    ):
        bytetx.load(folder)
    with pytest.raises(CheckpointError, match="model_quantized.onnx: bytetx does not read ONNX"):
        bytetx.load(file)
