"""What one checkpoint is: its family's facts from models/*.toml, its config.json's sizes."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from bytetx.errors import CheckpointError

# Hugging Face's activation names, and the function that each one means.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}

_SECTIONS = {
    "config": {
        "hidden_size",
        "embedding_size",
        "num_layers",
        "num_heads",
        "intermediate_size",
        "max_position_embeddings",
        "num_token_types",
        "relative_bias_buckets",
        "activation",
        "norm_eps",
    },
    "defaults": None,
    "architecture": {
        "norm_placement",
        "norm",
        "positions",
        "position_offset",
        "relative_bias_max_distance",
    },
    "embeddings": {"word", "position", "token_type", "norm", "relative_bias", "project"},
    "layer": {"q", "k", "v", "attn_out", "attn_norm", "ffn_in", "ffn_out", "ffn_norm"},
    "heads": {"pooler", "sequence_classification", "token_classification", "masked_lm"},
}
_HEAD_KEYS = {"dense", "activation", "norm", "norm_eps", "decoder", "bias", "out"}
_CLOSED_VALUES = {"norm_placement": ("post",), "norm": ("layer_norm",), "positions": ("learned",)}


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """One head: first token or every token -> dense -> activation -> norm -> out.

    Each field is a tensor-name stem without `.weight`/`.bias`, or None where the head lacks it;
    `decoder` and `bias` (masked_lm) are whole tensor names.
    """

    dense: str | None = None
    activation: str | None = None
    norm: str | None = None
    norm_eps: float | None = None
    decoder: str | None = None
    bias: str | None = None
    out: str | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes, choices and tensor names of one checkpoint; all that the forward pass asks.

    max_positions: the most tokens a sequence may have (position_offset already taken off).
    num_token_types: 0 where the family has none.
    relative_bias_buckets: 0 where attention has no relative position bias.
    embeddings, layer: tensor names without the base model's prefix; `{i}` is the layer's index.
    """

    family: str
    model_type: str
    prefix: str
    hidden_size: int
    embedding_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    position_offset: int
    num_token_types: int
    relative_bias_buckets: int
    relative_bias_max_distance: int
    activation: str
    norm_eps: float
    pad_token_id: int
    tie_word_embeddings: bool
    architectures: tuple[str, ...]
    id2label: Mapping[int, str]
    problem_type: str | None
    embeddings: Mapping[str, str]
    layer: Mapping[str, str]
    heads: Mapping[str, HeadSpec] = field(default_factory=dict)

    @property
    def num_labels(self) -> int:
        return len(self.id2label)

    def workspace_bytes(self, total_tokens: int, itemsize: int) -> int:
        """Bytes of activations that a forward pass of `total_tokens` holds at its peak.

        x, and the larger of qkv + attention output + projection, and FFN inner + outer rows.
        """
        attention = 5 * self.hidden_size
        ffn = self.intermediate_size + 2 * self.hidden_size
        return total_tokens * itemsize * (self.hidden_size + max(attention, ffn))


def build_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The ModelSpec of a checkpoint's config.json (already parsed).

    Raises CheckpointError for an unknown model_type (with the known ones), and for sizes that are
    missing, of the wrong type, or that contradict each other.
    """
    family, table = _family_of(config.get("model_type"))
    _refuse_variants(config)
    values = _Values(config, table)
    hidden_size = values.size("hidden_size")
    num_heads = values.size("num_heads")
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config.json: hidden size {hidden_size} is no multiple of {num_heads} attention heads"
        )
    offset = _position_offset(table["architecture"]["position_offset"], values)
    activation, norm_eps = values.activation(), values.norm_eps()
    return ModelSpec(
        family=family,
        model_type=config["model_type"],
        prefix=table["prefix"],
        hidden_size=hidden_size,
        embedding_size=values.size("embedding_size", default=hidden_size),
        num_layers=values.size("num_layers"),
        num_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=values.size("intermediate_size"),
        vocab_size=values.common_size("vocab_size"),
        max_positions=_usable_positions(values, offset),
        position_offset=offset,
        num_token_types=values.size("num_token_types", default=0),
        relative_bias_buckets=values.size("relative_bias_buckets", default=0),
        relative_bias_max_distance=table["architecture"].get("relative_bias_max_distance", 0),
        activation=activation,
        norm_eps=norm_eps,
        pad_token_id=values.pad_token_id(),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
        architectures=tuple(config.get("architectures") or ()),
        id2label=_labels(config),
        problem_type=config.get("problem_type"),
        embeddings=table["embeddings"],
        layer=table["layer"],
        heads=_heads(table, activation, norm_eps),
    )


@cache
def families() -> dict[str, dict[str, Any]]:
    """Every models/*.toml by its file's stem, checked against the closed list of keys."""
    tables = {}
    for path in sorted(_models_folder().glob("*.toml")):
        with path.open("rb") as file:
            tables[path.stem] = _checked(tomllib.load(file), path.name)
    return tables


def known_model_types() -> list[str]:
    """Every model_type that can be loaded, sorted."""
    return sorted(name for table in families().values() for name in table["model_types"])


def _models_folder() -> Path:
    package = Path(__file__).parent
    installed = package / "models"
    return installed if installed.is_dir() else package.parent / "models"


def _family_of(model_type: object) -> tuple[str, dict[str, Any]]:
    for family, table in families().items():
        if model_type in table["model_types"]:
            return family, table
    raise CheckpointError(
        f"config.json: model_type {model_type!r} is not one bytetx knows; "
        f"known: {', '.join(known_model_types())}"
    )


def _checked(table: dict[str, Any], file_name: str) -> dict[str, Any]:
    """Refuses keys outside the closed list: a misspelt key must not change a model in silence."""
    for section, content in table.items():
        if section in ("model_types", "prefix"):
            continue
        if section not in _SECTIONS:
            raise CheckpointError(f"models/{file_name}: unknown section [{section}]")
        allowed = _SECTIONS[section]
        for key in content if allowed is not None else ():
            if key not in allowed:
                raise CheckpointError(f"models/{file_name}: unknown key {section}.{key}")
    for head, content in table.get("heads", {}).items():
        for key in content.keys() - _HEAD_KEYS:
            raise CheckpointError(f"models/{file_name}: unknown key heads.{head}.{key}")
    for key, allowed in _CLOSED_VALUES.items():
        if table["architecture"][key] not in allowed:
            raise CheckpointError(
                f"models/{file_name}: architecture.{key} is {table['architecture'][key]!r}, "
                f"must be one of {allowed}"
            )
    return table


def _refuse_variants(config: Mapping[str, Any]) -> None:
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise CheckpointError(
            "config.json: is_decoder/add_cross_attention is set; this family runs as encoder only"
        )
    position_kind = config.get("position_embedding_type", "absolute")
    if position_kind not in (None, "absolute"):
        raise CheckpointError(
            f"config.json: position_embedding_type {position_kind!r} is not supported; "
            "only 'absolute' is"
        )


def _position_offset(rule: int | str, values: "_Values") -> int:
    if isinstance(rule, int):
        return rule
    if rule == "after_pad_token":
        return values.pad_token_id() + 1
    raise CheckpointError(f"models: architecture.position_offset {rule!r} is not known")


def _labels(config: Mapping[str, Any]) -> dict[int, str]:
    labels = config.get("id2label")
    if labels is None:
        return {i: f"LABEL_{i}" for i in range(config.get("num_labels") or 2)}
    try:
        return {int(key): str(label) for key, label in labels.items()}
    except (AttributeError, ValueError) as error:
        raise CheckpointError(
            f"config.json: id2label must map integers to labels: {error}"
        ) from error


def _usable_positions(values: "_Values", offset: int) -> int:
    max_positions = values.size("max_position_embeddings") - offset
    if max_positions < 1:
        raise CheckpointError(
            f"config.json: max_position_embeddings leaves {max_positions} usable positions "
            f"after the family's offset of {offset}"
        )
    return max_positions


def _heads(table: Mapping[str, Any], activation: str, norm_eps: float) -> dict[str, HeadSpec]:
    """The family's heads; "config" stands for the checkpoint's own activation or epsilon."""
    heads = {}
    for name, entry in table.get("heads", {}).items():
        resolved = dict(entry)
        if resolved.get("activation") == "config":
            resolved["activation"] = activation
        if resolved.get("norm_eps") == "config":
            resolved["norm_eps"] = norm_eps
        heads[name] = HeadSpec(**resolved)
    return heads


class _Values:
    """Reads config.json by the family's key names, with the family's defaults."""

    def __init__(self, config: Mapping[str, Any], table: Mapping[str, Any]):
        self.config, self.names, self.defaults = config, table["config"], table["defaults"]

    def size(self, name: str, default: int | None = None) -> int:
        if name not in self.names:
            if default is None:
                raise CheckpointError(f"models: config.{name} is missing")
            return default
        return self.common_size(self.names[name])

    def common_size(self, key: str) -> int:
        value = self._read(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"config.json: {key} must be a positive integer, got {value!r}")
        return value

    def activation(self) -> str:
        key = self.names["activation"]
        name = self._read(key)
        if name not in ACTIVATIONS:
            raise CheckpointError(
                f"config.json: {key} {name!r} is not supported; known: {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]

    def norm_eps(self) -> float:
        key = self.names["norm_eps"]
        value = self._read(key) if isinstance(key, str) else key
        if not isinstance(value, int | float) or not 0 < value < 1:
            raise CheckpointError(f"config.json: {key} must lie between 0 and 1, got {value!r}")
        return float(value)

    def pad_token_id(self) -> int:
        value = self._read("pad_token_id")
        if value is None:
            value = self.defaults["pad_token_id"]
        if not isinstance(value, int) or value < 0:
            raise CheckpointError(
                f"config.json: pad_token_id must be an integer from 0, got {value!r}"
            )
        return value

    def _read(self, key: str) -> Any:
        if key in self.config:
            return self.config[key]
        return self.defaults.get(key)
