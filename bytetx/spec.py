"""What one checkpoint is: its family's facts and the sizes and choices of its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bytetx.errors import CheckpointError
from bytetx.family import families, known_model_types

# Hugging Face's activation names, and the function that each one means.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")

# More classes than any head has; a number of labels beyond it is a damaged config, not a model.
_MAX_LABELS = 1 << 20


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
    relative_bias_rows: rows of the saved bias table, 0 where attention has no relative position
        bias; the first relative_bias_buckets of them are used.
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
    relative_bias_rows: int
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
        """Bytes of activations and ids that a forward pass of `total_tokens` holds at its peak.

        Attention holds x, qkv and its output; the feed-forward x, the inner and the outer row;
        the embedding its sum and what it is projected to.  Five ids a token, of four bytes.
        Scratch of the kernels' threads (below 1 MiB each, whatever the batch) comes on top.
        """
        hidden = self.hidden_size
        row = max(5 * hidden, 2 * hidden + self.intermediate_size, hidden + self.embedding_size)
        return total_tokens * (itemsize * row + 5 * 4)


def build_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The ModelSpec of a checkpoint's config.json (already parsed).

    Raises CheckpointError for an unknown model_type (with the known ones), and for sizes that are
    missing, of the wrong type, or that contradict each other.
    """
    family, table = _family_of(config.get("model_type"))
    _refuse_variants(config)
    values = _Values(config, table)
    activation, norm_eps = values.activation(), values.norm_eps()
    return ModelSpec(
        family=family,
        model_type=config["model_type"],
        prefix=table["prefix"],
        **_sizes(values, table["architecture"]),
        activation=activation,
        norm_eps=norm_eps,
        pad_token_id=values.pad_token_id(),
        tie_word_embeddings=_tie_word_embeddings(config),
        architectures=_architectures(config),
        id2label=_labels(config),
        problem_type=_problem_type(config),
        embeddings=table["embeddings"],
        layer=table["layer"],
        heads=_heads(table, activation, norm_eps),
    )


def _sizes(values: "_Values", architecture: Mapping[str, Any]) -> dict[str, int]:
    hidden_size, num_heads, head_dim = values.head_sizes()
    offset = _position_offset(architecture["position_offset"], values)
    buckets = architecture.get("relative_bias_buckets", 0)
    return {
        "hidden_size": hidden_size,
        "embedding_size": values.size("embedding_size", default=hidden_size),
        "num_layers": values.size("num_layers"),
        "num_heads": num_heads,
        "head_dim": head_dim,
        "intermediate_size": values.size("intermediate_size"),
        "vocab_size": values.common_size("vocab_size"),
        "max_positions": values.max_positions(offset),
        "position_offset": offset,
        "num_token_types": values.size("num_token_types", default=0),
        "relative_bias_rows": values.bias_rows(buckets),
        "relative_bias_buckets": buckets,
        "relative_bias_max_distance": architecture.get("relative_bias_max_distance", 0),
    }


def _family_of(model_type: object) -> tuple[str, dict[str, Any]]:
    for family, table in families().items():
        if model_type in table["model_types"]:
            return family, table
    given = "lacks model_type" if model_type is None else f"has model_type {model_type!r}"
    raise CheckpointError(f"config.json {given}; bytetx knows: {', '.join(known_model_types())}")


def _refuse_variants(config: Mapping[str, Any]) -> None:
    """What changes the computation and would otherwise give wrong numbers in silence."""
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise CheckpointError(
            "config.json: is_decoder/add_cross_attention is set; this family runs as an "
            "encoder only"
        )
    position_kind = config.get("position_embedding_type", "absolute")
    if position_kind not in (None, "absolute"):
        raise CheckpointError(
            f"config.json: position_embedding_type {position_kind!r} is not supported; "
            "only 'absolute' is"
        )
    if config.get("quantization_config"):
        raise CheckpointError(
            "config.json: quantization_config is set; quantised weights are not supported, "
            "give the checkpoint in float32, float16 or bfloat16"
        )


def _position_offset(rule: int | str, values: "_Values") -> int:
    return values.pad_token_id() + 1 if rule == "after_pad_token" else int(rule)


def _tie_word_embeddings(config: Mapping[str, Any]) -> bool:
    value = config.get("tie_word_embeddings", True)
    if not isinstance(value, bool):
        raise CheckpointError(
            f"config.json: tie_word_embeddings must be true or false, got {value!r}"
        )
    return value


def _architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("architectures")
    if names is None:
        return ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config.json: architectures must list class names, got {names!r}")
    return tuple(names)


def _problem_type(config: Mapping[str, Any]) -> str | None:
    value = config.get("problem_type")
    if value is not None and value not in PROBLEM_TYPES:
        raise CheckpointError(
            f"config.json: problem_type must be one of {', '.join(PROBLEM_TYPES)}, got {value!r}"
        )
    return value


def _labels(config: Mapping[str, Any]) -> dict[int, str]:
    """id2label with integer keys, in their order; Hugging Face's default names where it is absent.

    Holes are kept: heads refuse them when they are asked for, other tasks do not care.
    """
    labels = config.get("id2label")
    if labels is None:
        count = config.get("num_labels", 2)
        if type(count) is not int or not 0 < count <= _MAX_LABELS:
            raise CheckpointError(
                f"config.json: num_labels must be an integer from 1 to {_MAX_LABELS}, got {count!r}"
            )
        return {i: f"LABEL_{i}" for i in range(count)}
    try:
        return dict(sorted((int(key), str(label)) for key, label in labels.items()))
    except (AttributeError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"config.json: id2label must map integers to labels: {error}"
        ) from error


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
        """A size by bytetx's name for it; `default` where the family has no such size."""
        if name not in self.names and default is not None:
            return default
        return self.common_size(self.names[name])

    def common_size(self, key: str) -> int:
        """A size by its key in config.json."""
        value = self._read(key)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"config.json: {key} must be a positive integer, got {value!r}")
        return value

    def head_sizes(self) -> tuple[int, int, int]:
        """(hidden_size, num_heads, head_dim)"""
        hidden_size, num_heads = self.size("hidden_size"), self.size("num_heads")
        if hidden_size % num_heads:
            raise CheckpointError(
                f"config.json: {self.names['hidden_size']} {hidden_size} is no multiple of "
                f"{self.names['num_heads']} {num_heads}"
            )
        return hidden_size, num_heads, hidden_size // num_heads

    def max_positions(self, offset: int) -> int:
        """Usable positions: the table's rows less those before a sequence's first token."""
        rows = self.size("max_position_embeddings")
        if rows <= offset:
            raise CheckpointError(
                f"config.json: {self.names['max_position_embeddings']} {rows} leaves no usable "
                f"position, the family's first one is {offset}"
            )
        return rows - offset

    def bias_rows(self, buckets: int) -> int:
        rows = self.size("relative_bias_rows", default=0)
        if rows < buckets:
            raise CheckpointError(
                f"config.json: {self.names['relative_bias_rows']} is {rows}, but this family's "
                f"distances fall into {buckets} buckets whatever it says; at least {buckets} "
                "are needed"
            )
        return rows

    def activation(self) -> str:
        key = self.names["activation"]
        name = self._read(key)
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise CheckpointError(
                f"config.json: {key} {name!r} is not supported; known: {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]

    def norm_eps(self) -> float:
        key = self.names["norm_eps"]
        value = self._read(key) if isinstance(key, str) else key
        if not isinstance(value, float) or not 0 < value < 1:
            raise CheckpointError(f"config.json: {key} must lie between 0 and 1, got {value!r}")
        return float(value)

    def pad_token_id(self) -> int:
        value = self._read("pad_token_id")
        if value is None:
            value = self.defaults["pad_token_id"]
        if type(value) is not int or value < 0:
            raise CheckpointError(
                f"config.json: pad_token_id must be an integer from 0, got {value!r}"
            )
        return value

    def _read(self, key: str) -> Any:
        if key in self.config:
            return self.config[key]
        return self.defaults.get(key)
