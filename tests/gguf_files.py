"""GGUF files of small models, written by the gguf package as llama.cpp's converter writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tiny_decoders import tiny_decoder

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
F32 = GGMLQuantizationType.F32


def write_gguf(
    path: Path,
    architecture: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
    raw: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """kinds: formats that tensors are quantised to.  raw: of those that are bytes of blocks."""
    writer = GGUFWriter(path, architecture)
    for key, value in fields.items():
        _add(writer, key.replace("ARCH", architecture), value)
    for name, array in tensors.items():
        if kind := (raw or {}).get(name):
            writer.add_tensor(name, array, raw_dtype=kind)
        elif (kind := (kinds or {}).get(name, F32)) == F32:
            writer.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def fields_of(config: Any, **more: Any) -> dict[str, Any]:
    """The sizes of a config of transformers, by GGUF's keys."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    heads = config.num_attention_heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    eps = {
        "ARCH.attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "ARCH.attention.layer_norm_epsilon": next(
            (
                float(getattr(config, key))
                for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
                if getattr(config, key, None) is not None
            ),
            None,
        ),
    }
    found = {
        "ARCH.context_length": config.max_position_embeddings,
        "ARCH.embedding_length": config.hidden_size,
        "ARCH.block_count": config.num_hidden_layers,
        "ARCH.feed_forward_length": inner or 4 * config.hidden_size,
        "ARCH.attention.head_count": heads,
        "ARCH.attention.head_count_kv": getattr(config, "num_key_value_heads", heads),
        "ARCH.rope.freq_base": rope.get("rope_theta"),
        "ARCH.attention.sliding_window": getattr(config, "sliding_window", None),
        "ARCH.attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "ARCH.final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        **eps,
    }
    return {key: value for key, value in (found | more).items() if value is not None}


def tensors_of(
    state: Mapping[str, torch.Tensor], config: Any, arch: gguf.MODEL_ARCH
) -> dict[str, np.ndarray]:
    """A checkpoint's tensors under GGUF's names and in its layout, as the converter makes them."""
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    is_tied = getattr(config, "tie_word_embeddings", False)
    for name, tensor in state.items():
        if name.startswith("pooler.") or (is_tied and name == "lm_head.weight"):
            continue  # the converter leaves them out
        stem, _, ending = name.removeprefix("roberta.").rpartition(".")
        own = table.get_name(stem)
        assert own is not None, f"gguf has no name for {name}"
        if arch == gguf.MODEL_ARCH.BERT and own == "position_embd":
            tensor = tensor[len(tensor) - config.max_position_embeddings :]
        found[f"{own}.{ending}"] = in_gguf_layout(arch, own, ending, tensor.float(), config).numpy()
    return found


def in_gguf_layout(
    arch: gguf.MODEL_ARCH, own: str, ending: str, tensor: torch.Tensor, config: Any
) -> torch.Tensor:
    arches = gguf.MODEL_ARCH
    stem = own.rpartition(".")[2]
    if arch in (arches.LLAMA, arches.GRANITE, arches.SMOLLM3) and stem in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if stem == "attn_q" else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if "GEMMA" in arch.name and own.endswith("norm"):
        return tensor + 1
    if (
        arch == arches.GPT2
        and ending == "weight"
        and stem
        in (
            "attn_qkv",
            "attn_output",
            "ffn_up",
            "ffn_down",
        )
    ):
        return tensor.T
    return tensor


# Scales by which random codes give weights near 0.05; K formats multiply them by codes again.
SCALES = {"Q2_K": 3e-3, "Q3_K": 1e-3, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 6e-5, "Q8_0": 7e-4}
SCALES |= {"Q5_0": 5e-3, "Q5_1": 5e-3}


def blocks_of(name: str, n: int, k: int) -> np.ndarray:
    """Rows of random codes for weights near 0.05, uint8 [n, bytes of a row]."""
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    rng = np.random.default_rng(n)
    blocks = rng.integers(0, 256, (n, k // numbers, size), dtype=np.uint8)
    scale = SCALES.get(name, 0.01)
    scales = rng.uniform(scale / 2, 2 * scale, (n, k // numbers, 2))
    scales = scales.astype(np.float16).view(np.uint8)
    first = {"Q6_K": 208, "Q3_K": 108, "Q2_K": 80}.get(name, 0)
    count = 4 if name in ("Q4_1", "Q4_K", "Q5_1", "Q5_K", "Q2_K") else 2
    blocks[..., first : first + count] = scales[..., :count]
    return blocks.reshape(n, -1)


def write_blocks(path: Path, kinds: dict[str, str]) -> Path:
    """A llama of random blocks; kinds: formats of matrices by a part of their names."""
    model = tiny_decoder("llama", **WIDE, num_hidden_layers=2)
    tensors, raw = tensors_of(model.state_dict(), model.config, gguf.MODEL_ARCH.LLAMA), {}
    for name, array in tensors.items():
        if array.ndim == 2:
            kind = next(kinds[part] for part in kinds if part in name)
            tensors[name] = blocks_of(kind, *array.shape)
            raw[name] = gguf.GGMLQuantizationType[kind]
    fields = fields_of(model.config, **{"ARCH.attention.key_length": 64})
    return write_gguf(path, "llama", fields, tensors, raw=raw)
