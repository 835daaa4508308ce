"""GGUF's architectures that are families of bytetx, and the config.json that a file stands for."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bytetx.checkpoint.families import read_families
from bytetx.checkpoint.gguf.file import GgufFile, GgufTensor
from bytetx.checkpoint.side_files import FLAG, TEXT, Field, either, integer, list_of, number
from bytetx.errors import CheckpointError

Config = dict[str, Any]
_SIZE = integer(1)
_POSITIVE = number(1e-30)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of GGUF's architectures.

    model_type: of config.json.  rearranges_heads: whether the rows of each query and key head are
    saved with the pairs of rotary positions next to each other.  norm_offset: what is added to the
    saved weights of norms.  up_role: the layer of bytetx that ffn_up is.
    config: of the keys that only this architecture has.
    """

    model_type: str
    rearranges_heads: bool = False
    norm_offset: float = 0.0
    up_role: str = "ffn_in"
    config: Callable[["Reader"], Config] = lambda reader: {}


class Reader:
    """Metadata of one architecture, by keys without its name."""

    def __init__(self, file: GgufFile):
        self.file = file
        self.name: str = file.need("general.architecture", TEXT)

    def get(self, key: str, field: Field) -> Any:
        return self.file.get(f"{self.name}.{key}", field)

    def need(self, key: str, field: Field) -> Any:
        return self.file.need(f"{self.name}.{key}", field)

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def rows(self, tensor: str) -> int:
        """Rows of a table; 0 where there is none."""
        found = self.file.tensors.get(tensor)
        return found.shape[0] if found is not None and len(found.shape) == 2 else 0

    def head_dim(self) -> int:
        """Features of a head; CheckpointError where its keys and values differ in size."""
        hidden, heads = self.need("embedding_length", _SIZE), self.count("attention.head_count")
        dims = {self.get(f"attention.{kind}_length", _SIZE) for kind in ("key", "value")} - {None}
        if len(dims) > 1:
            raise self.refused("keys and values of different sizes")
        return int(dims.pop()) if dims else int(hidden // heads)

    def count(self, key: str, default: int | None = None) -> int:
        """A size that may be given for each layer, all of them equal."""
        given = self.get(key, either(_SIZE, list_of(integer(0))))
        if given is None:
            given = self.need(key, _SIZE) if default is None else default
        sizes = set(given) if isinstance(given, list) else {given}
        if len(sizes) != 1 or not min(sizes):
            raise self.refused(f"layers that differ in {key}")
        return int(sizes.pop())

    def refused(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file.path} has {what}, which bytetx does not run in GGUF's architecture "
            f"{self.name!r}; give the checkpoint in safetensors that it was made from"
        )


def read_config(file: GgufFile) -> Config:
    """The config.json of the model in a file.

    Raises CheckpointError for an architecture that is not known, for a file that is no model, and
    for what the architecture's family does not compute.
    """
    architecture, reader = architecture_of(file), Reader(file)
    own = architecture.config(reader)
    marker = {key: value for key, value in own.items() if key != "model_type"}
    config: Config = {"model_type": architecture.model_type, **marker}
    if "model_type" in own:
        config["model_type"] = own["model_type"]
    _, table = read_families().family_of(config)
    names: Mapping[str, Any] = table["config"]

    def put(name: str, value: Any) -> bool:
        """Sets a value by bytetx's name; False where the family has no such key."""
        key = names.get(name)
        if not isinstance(key, str) or value is None:
            return False
        config.setdefault(key, value)
        return True

    hidden, heads = reader.need("embedding_length", _SIZE), reader.count("attention.head_count")
    positions = reader.rows("position_embd.weight") or reader.need("context_length", _SIZE)
    put("hidden_size", hidden)
    put("num_layers", reader.need("block_count", _SIZE))
    put("num_heads", heads)
    put("intermediate_size", reader.count("feed_forward_length"))
    put("max_position_embeddings", positions)
    put("num_token_types", reader.rows("token_types.weight"))
    config.setdefault("vocab_size", reader.rows("token_embd.weight"))
    kv_heads = reader.count("attention.head_count_kv", default=heads)
    if not put("num_kv_heads", kv_heads) and kv_heads != heads:
        raise reader.refused(f"{kv_heads} heads of keys for {heads} of queries")
    head_dim = reader.head_dim()
    if not put("head_dim", head_dim) and head_dim * heads != hidden:
        raise reader.refused(f"heads of {head_dim} features")
    eps = [reader.get(f"attention.layer_norm{kind}_epsilon", _POSITIVE) for kind in ("_rms", "")]
    put("norm_eps", next((_short(value) for value in eps if value is not None), None))
    config.setdefault("tie_word_embeddings", not reader.has("output.weight"))
    _put_rotary(reader, table, config, put, head_dim)
    _put_window(reader, config, put, positions)
    is_decoder = table["architecture"].get("causal", False)
    is_bidirectional = is_decoder and reader.get("attention.causal", FLAG) is False
    if is_bidirectional and not put("is_causal", False):
        raise reader.refused("attention in both directions")
    for kind in ("bos", "eos", "padding"):
        token = file.get(f"tokenizer.ggml.{kind}_token_id", integer(0))
        if token is not None:
            config.setdefault(f"{'pad' if kind == 'padding' else kind}_token_id", token)
    config.setdefault("architectures", _classes(table, config))
    return config


def architecture_of(file: GgufFile) -> Architecture:
    """Raises CheckpointError where a file is no model, or one that bytetx does not run."""
    kind = file.get("general.type", TEXT) or "model"
    name = file.need("general.architecture", TEXT)
    if kind != "model" or name in ("clip", "imatrix"):
        raise CheckpointError(
            f"{file.path} holds no language model, but {name if kind == 'model' else kind!s:.60}; "
            "give the file with the model's weights"
        )
    found = ARCHITECTURES.get(name)
    if found is None:
        raise CheckpointError(
            f"{file.path}: GGUF's architecture {name!r:.120} is none that bytetx reads from GGUF; "
            f"known: {', '.join(ARCHITECTURES)}"
        )
    if file.get(f"{name}.expert_count", integer(0)):
        raise CheckpointError(
            f"{file.path} has a mixture of experts, which bytetx reads from safetensors only; give "
            "the checkpoint that the file was made from"
        )
    return found


def _classes(table: Mapping[str, Any], config: Config) -> list[str]:
    """The class of transformers that says which head there is, by its ending alone."""
    stem = config["model_type"].removesuffix("_text").replace("_", " ").title().replace(" ", "")
    is_lm = table["architecture"].get("causal") and config.get("is_causal", True)
    is_lm = is_lm and not config.get("use_bidirectional_attention")
    return [f"{stem}ForCausalLM" if is_lm else f"{stem}Model"]


def _put_rotary(
    reader: Reader,
    table: Mapping[str, Any],
    config: Config,
    put: Callable[[str, Any], bool],
    head_dim: int,
) -> None:
    if table["architecture"]["positions"] != "rotary":
        return
    base = reader.get("rope.freq_base", _POSITIVE)
    put("rotary_theta", 10000.0 if base is None else _short(base))
    base = reader.get("rope.freq_base_swa", _POSITIVE)
    put("windowed_rotary_theta", None if base is None else _short(base))
    dim = reader.get("rope.dimension_count", _SIZE) or head_dim
    if not put("rotary_fraction", dim / head_dim) and dim != head_dim:
        raise reader.refused(f"{dim} rotated features of {head_dim}")
    config.setdefault("rope_scaling", _scaling(reader, dim))


def _scaling(reader: Reader, dim: int) -> Config | None:
    kind = reader.get("rope.scaling.type", TEXT)
    factor = reader.get("rope.scaling.factor", number(0))
    older = reader.get("rope.scale_linear", number(0))
    if kind is None and factor is None and older:
        kind, factor = "linear", older
    if reader.has("rope_factors_long.weight") or kind == "longrope":
        raise reader.refused("rotary positions of LongRoPE")
    factors = reader.file.tensors.get("rope_freqs.weight")
    if factors is not None:
        return {"rope_type": "factors", "factors": _factors(reader, factors, dim)}
    if kind in (None, "none") or not factor or factor == 1:
        return None
    if kind not in ("linear", "yarn"):
        raise reader.refused(f"rotary positions scaled by {kind!r:.60}")
    found: Config = {"rope_type": kind, "factor": _short(factor)}
    keys = {"original_max_position_embeddings": ("original_context_length", _SIZE)}
    keys |= {"attention_factor": ("attn_factor", _POSITIVE)}
    keys |= {f"beta_{name}": (f"yarn_beta_{name}", _POSITIVE) for name in ("fast", "slow")}
    for key, (saved, field) in keys.items() if kind == "yarn" else ():
        value = reader.get(f"rope.scaling.{saved}", field)
        if value is not None:
            found[key] = value if field is _SIZE else _short(value)
    return found


def _factors(reader: Reader, tensor: GgufTensor, dim: int) -> list[float]:
    """The number that each frequency is divided by (Llama 3.1 and later)."""
    if tensor.shape != (dim // 2,) or tensor.format.name != "F32":
        raise reader.refused(f"factors of frequencies of shape {tensor.shape} for {dim} features")
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            found = np.frombuffer(file.read(tensor.num_bytes), dtype="<f4")
    except OSError as error:
        raise CheckpointError(f"{tensor.path} cannot be read: {error}") from error
    return [_short(value) for value in found.tolist()]


def _put_window(
    reader: Reader, config: Config, put: Callable[[str, Any], bool], positions: int
) -> None:
    window = reader.get("attention.sliding_window", integer(0))
    if window and not put("window", window) and window < positions:
        raise reader.refused(f"attention windows of {window} tokens")


def _short(value: float) -> float:
    """The shortest decimal that is this number in f32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if math.isfinite(value) else value


def _llama(reader: Reader) -> Config:
    """Mistral's models are llamas, too; those with a window are no others."""
    if reader.get("attention.sliding_window", integer(0)):
        return {"model_type": "mistral"}
    biases = reader.has("blk.0.attn_q.bias"), reader.has("blk.0.ffn_up.bias")
    return {"attention_bias": biases[0], "mlp_bias": biases[1]}


def _gemma2(reader: Reader, *, layers_of_27b: int = 46) -> Config:
    """Only the 27B models scale scores by the width of a head that there would be without
    key_length; llama.cpp knows them by their number of layers."""
    hidden, heads = reader.need("embedding_length", _SIZE), reader.count("attention.head_count")
    is_27b = reader.need("block_count", _SIZE) == layers_of_27b
    config: Config = {"query_pre_attn_scalar": hidden // heads if is_27b else reader.head_dim()}
    for key, name in (
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ):
        value = reader.get(key, _POSITIVE)
        if value is not None:
            config[name] = _short(value)
    return config


def _gemma3(reader: Reader) -> Config:
    return _gemma2(reader, layers_of_27b=62)


def _gemma_embedding(reader: Reader) -> Config:
    return {**_gemma3(reader), "use_bidirectional_attention": True}


def _granite(reader: Reader) -> Config:
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    given = {name: reader.get(key, _POSITIVE) for name, key in keys.items()}
    return {name: _short(value) for name, value in given.items() if value is not None}


def _stablelm(reader: Reader) -> Config:
    return {
        "use_qkv_bias": reader.has("blk.0.attn_q.bias"),
        "use_parallel_residual": not reader.has("blk.0.ffn_norm.weight"),
    }


def _bert(reader: Reader) -> Config:
    """Cross-encoders keep the layers of a RoBERTa's head; they are a BERT's pooler and classifier.

    RoBERTa's own tables of positions lose their first two rows in GGUF.
    """
    if not reader.has("cls.output.weight"):
        return {}
    rows = reader.rows("cls.output.weight")
    given = reader.get("classifier.output_labels", list_of(TEXT)) or [
        f"LABEL_{i}" for i in range(rows)
    ]
    return {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {str(i): label for i, label in enumerate(given)},
    }


def _jina_bert(reader: Reader) -> Config:
    """Keys of config.json that tell Jina's models from BERT."""
    return {"feed_forward_type": "geglu", "position_embedding_type": "alibi"}


ARCHITECTURES = {
    "llama": Architecture("llama", rearranges_heads=True, config=_llama),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture("gemma2", norm_offset=1.0, config=_gemma2),
    "gemma3": Architecture("gemma3_text", norm_offset=1.0, config=_gemma3),
    "gemma-embedding": Architecture("gemma3_text", norm_offset=1.0, config=_gemma_embedding),
    "phi3": Architecture("phi3", up_role="ffn_gate_up"),
    "gpt2": Architecture("gpt2"),
    "granite": Architecture("granite", rearranges_heads=True, config=_granite),
    "olmo2": Architecture("olmo2"),
    "smollm3": Architecture("smollm3", rearranges_heads=True),
    "stablelm": Architecture("stablelm", config=_stablelm),
    "starcoder2": Architecture("starcoder2"),
    "bert": Architecture("bert", config=_bert),
    "nomic-bert": Architecture("nomic_bert"),
    "jina-bert-v2": Architecture("bert", config=_jina_bert),
}
