"""The spec of one checkpoint from its family's facts and the sizes and choices of config.json."""

from collections.abc import Container, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from bytetx.checkpoint.config import Values
from bytetx.checkpoint.families import Families, read_families
from bytetx.checkpoint.family_hooks import HOOKS
from bytetx.checkpoint.layer_spec import is_bidirectional, numbered, read_experts, read_layers
from bytetx.checkpoint.model_spec import HeadSpec, ModelSpec
from bytetx.checkpoint.quantization import read_quantization
from bytetx.checkpoint.rope_spec import rotary_positions
from bytetx.errors import CheckpointError

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")

# Layers that a checkpoint may hold as one tensor, and the modules that they are in memory.
_MODULES_OF = {
    "qkv": ("q", "k", "v"),
    "ffn_gate_up": ("ffn_gate", "ffn_in"),
    "ffn_up_gate": ("ffn_gate", "ffn_in"),
}

# Keys of a config.json that holds the text model's in a table; the other ones are the table's.
_OUTER_KEYS = {"architectures", "auto_map", "model_type", "quantization_config"}
_OUTER_KEYS |= {"id2label", "num_labels", "problem_type", "tie_word_embeddings"}

# More classes than any head has; a number of labels beyond it is a damaged config, not a model.
_MAX_LABELS = 1 << 20


def build_spec(config: Mapping[str, Any], families: Families | None = None) -> ModelSpec:
    """The ModelSpec of a checkpoint's config.json (already parsed).

    families: None are those of models/.
    Raises CheckpointError for an unknown model_type (with the known ones), and for sizes that are
    missing, of the wrong type, or that contradict each other.
    """
    name, table = (families or read_families()).family_of(config)
    config = _unnested(config, table)
    _refuse_variants(config, table)
    values = Values(config, table)
    activation, norm_eps = values.activation(), values.norm_eps()
    sizes = _sizes(values, table["architecture"])
    layer = dict(table["layer"])
    if not values.is_gated():
        del layer["ffn_gate"]
        layer |= table["ungated_layer"]
    layers = read_layers(
        values,
        {**table, "layer": layer},
        num_layers=sizes["num_layers"],
        head_dim=sizes["head_dim"],
        activation=activation,
    )
    experts = read_experts(
        values,
        table,
        num_layers=sizes["num_layers"],
        intermediate_size=sizes["intermediate_size"],
    )
    if layers.rotary is not None:
        sizes["max_positions"] = rotary_positions(layers.rotary, sizes["max_positions"])
    spec = ModelSpec(
        family=name,
        family_table=table,
        model_type=config["model_type"],
        prefixes=(prefix,) if isinstance(prefix := table["prefix"], str) else tuple(prefix),
        **sizes,
        activation=activation,
        norm_eps=norm_eps,
        pad_token_id=values.pad_token_id(),
        tie_word_embeddings=_tie_word_embeddings(values),
        architectures=_architectures(config),
        id2label=_labels(config),
        problem_type=_problem_type(config),
        embeddings=table["embeddings"],
        layer=layer,
        layer_spec=layers,
        heads=_heads(table, values, activation=activation, norm_eps=norm_eps),
        half_dtype=table["architecture"].get("half_dtype", "saved"),
        scales_words=table["architecture"].get("scales_words", False),
        experts=experts,
        is_bidirectional=table["architecture"].get("causal", False) and not layers.causal,
        quantization=read_quantization(config),
    )
    return HOOKS[table["hook"]](values, spec) if "hook" in table else spec


def token_logits_spec(spec: ModelSpec) -> ModelSpec:
    """A causal family's model whose head is read at every token, as a masked language model's is;
    with or without the causal mask. Others stay as they are.

    Raises CheckpointError where logits are not what the head's matrix gives.
    """
    head = spec.family_table.get("heads", {}).get("lm")
    if head is None:
        return spec
    if spec.logits_divisor != 1.0 or spec.logits_softcap:
        raise CheckpointError(
            f"sparse vectors of {spec.family} are not supported: its logits are divided or capped"
        )
    heads = {name: own for name, own in spec.heads.items() if name != "lm"}
    heads["masked_lm"] = HeadSpec(decoder=head["decoder"], bias=head.get("bias"))
    # Whatever class it was saved from: the head is there, or tied.
    return replace(spec, heads=heads, architectures=(f"{spec.family}ForMaskedLM",))


def build_module_spec(config: Mapping[str, Any], families: Families) -> ModelSpec:
    """The ModelSpec of a model in memory: by the modules of transformers' class, not by the tensors
    of its files. Errors as of build_spec."""
    markers = families.markers(config.get("model_type"))
    spec = build_spec({key: value for key, value in config.items() if key not in markers}, families)
    if spec.quantization is not None:
        raise CheckpointError(
            f"the model's weights are quantised ({spec.quantization.tool}), and wrap computes with "
            "the module's own; bytetx.load(path) reads such a checkpoint, or load the module with "
            "dequantised weights"
        )
    modules = spec.family_table.get("modules")
    if modules is None:
        return spec
    biases = (_MODULES_OF.get(key, (key,)) for key in spec.layer_spec.biases)
    layers = replace(
        spec.layer_spec,
        qkv="separate",
        biases=frozenset(chain.from_iterable(biases)) & modules["layer"].keys(),
    )
    experts = spec.experts
    if experts is not None:
        experts = replace(experts, layer=modules["sparse_layer"])
    return replace(
        spec,
        embeddings={**spec.embeddings, **modules.get("embeddings", {})},
        layer=modules["layer"],
        layer_spec=layers,
        experts=experts,
    )


def saved_spec(spec: ModelSpec, names: Container[str]) -> ModelSpec:
    """The same spec, with the names that transformers' class has for experts where the files' names
    are those: checkpoints of one family have one or the other."""
    modules = spec.family_table.get("modules", {}).get("sparse_layer")
    experts = spec.experts
    if experts is None or modules is None or "experts_gate_up" not in modules:
        return spec
    layer = experts.pattern.index(True)
    if numbered(modules["experts_gate_up"], layer) not in names:
        return spec
    return replace(spec, experts=replace(experts, layer=modules))


def _sizes(values: Values, architecture: Mapping[str, Any]) -> dict[str, Any]:
    hidden_size, num_heads, head_dim = values.head_sizes()
    offset = _position_offset(architecture["position_offset"], values)
    buckets = values.size("relative_bias_buckets", default=0)
    return {
        "hidden_size": hidden_size,
        "embedding_size": values.embedding_size(hidden_size),
        "projected_size": values.size("output_size", default=0),
        "num_layers": values.size("num_layers"),
        "num_heads": num_heads,
        "num_kv_heads": values.num_kv_heads(num_heads),
        "head_dim": head_dim,
        "intermediate_size": values.intermediate_size(hidden_size),
        "vocab_size": values.common_size("vocab_size"),
        "max_positions": values.max_positions(offset),
        "position_offset": offset,
        "num_token_types": values.num_token_types(),
        "relative_bias_rows": values.bias_rows(buckets),
        "relative_bias_buckets": buckets,
        "relative_bias_max_distance": values.size("relative_bias_max_distance", default=0),
    }


def _unnested(config: Mapping[str, Any], table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model alone, where config.json has it in a table beside another's."""
    key = table.get("nested", {}).get(config["model_type"])
    if key is None:
        return config
    inner = config.get(key)
    if not isinstance(inner, Mapping | None):
        raise CheckpointError(
            f"config.json: {key} must be a table, the config of the text model, got {inner!r:.120}"
        )
    return {**(inner or {}), **{key: config[key] for key in _OUTER_KEYS & config.keys()}}


def _refuse_variants(config: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    """Refuse options that change the computation and would give wrong numbers in silence."""
    is_causal = table["architecture"].get("causal", False)
    if config.get("add_cross_attention") or (config.get("is_decoder") and not is_causal):
        runs_as = "a decoder without an encoder" if is_causal else "an encoder"
        raise CheckpointError(
            f"config.json: is_decoder/add_cross_attention is set; this family runs as {runs_as} "
            "only"
        )
    for key, value in table.get("fixed", {}).items():
        if key in config and config[key] != value:
            raise CheckpointError(
                f"config.json: {key} {config[key]!r} is not supported; only {value!r} is"
            )
    for key in table.get("unsupported", ()):
        if config.get(key):
            raise CheckpointError(
                f"config.json: {key} is {config[key]!r:.120}, which bytetx does not run in this "
                "family; it must be absent, null, 0 or false"
            )
    position_kind = config.get("position_embedding_type", "absolute")
    is_checked = "position_embedding_type" in table.get("fixed", {})
    if not is_checked and position_kind not in (None, "absolute"):
        raise CheckpointError(
            f"config.json: position_embedding_type {position_kind!r} is not supported; "
            "only 'absolute' is"
        )


def _position_offset(rule: int | str, values: Values) -> int:
    return values.pad_token_id() + 1 if rule == "after_pad_token" else int(rule)


def _tie_word_embeddings(values: Values) -> bool:
    default = values.defaults.get("tie_word_embeddings", True)
    value = values.config.get("tie_word_embeddings", default)
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


def _heads(
    table: Mapping[str, Any], values: Values, *, activation: str, norm_eps: float
) -> dict[str, HeadSpec]:
    """The family's heads.

    "config" stands for the checkpoint's own activation or epsilon, "classifier" for its
    classifier_activation.  dense_bias, decoder_bias and pooling name keys of config.json.
    A causal family's checkpoint without a causal mask predicts no next token: it has no lm head.
    """
    heads, is_unmasked = {}, is_bidirectional(values, table)
    for name, entry in table.get("heads", {}).items():
        resolved = dict(entry)
        if resolved.get("activation") == "config":
            resolved["activation"] = activation
        elif resolved.get("activation") == "classifier":
            resolved["activation"] = values.activation(values.names["classifier_activation"])
        if resolved.get("norm_eps") == "config":
            resolved["norm_eps"] = norm_eps
        if "dense_bias" in resolved:
            resolved["dense_bias"] = values.flag(resolved["dense_bias"])
        if "inner_size" in resolved:
            resolved["inner_size"] = values.common_size(resolved["inner_size"])
        if "decoder_bias" in resolved and not values.flag(resolved.pop("decoder_bias")):
            resolved["bias"] = None
        if resolved.get("pooling", "last") != "last":
            resolved["pooling"] = _pooling(values, resolved["pooling"])
        elif "pooling" in resolved and is_unmasked:
            resolved["pooling"] = _pooling_without_mask(values)
        if name == "lm" and is_unmasked:
            continue
        heads[name] = HeadSpec(**resolved)
    return heads


def _pooling_without_mask(values: Values) -> str:
    """Return the pooling of a bidirectional decoder's sequence classifier: the key of the hub's
    code, which divides its logits by a temperature; transformers' own class reads the last token.
    """
    given = values.read("pooling")
    known = {None: "last", "last": "last", "avg": "mean", "mean": "mean", "cls": "cls"}
    classifies = any(
        name.endswith("ForSequenceClassification") for name in _architectures(values.config)
    )
    if classifies and (not isinstance(given, str | None) or given not in known):
        shown = ", ".join(str(name) for name in known if name)
        raise CheckpointError(f"config.json: pooling must be one of {shown}, got {given!r:.120}")
    if classifies and values.read("temperature") not in (None, 1):
        raise CheckpointError(
            f"config.json: temperature is {values.read('temperature')!r:.120}; bytetx divides no "
            "logits by it, so it must be 1 or absent"
        )
    return known[given] if isinstance(given, str) and given in known else "last"


def _pooling(values: Values, key: str) -> str:
    given, known = values.read(key), {"cls": "cls", "bos": "cls", "mean": "mean", "late": "late"}
    if not isinstance(given, str) or given not in known:
        raise CheckpointError(
            f"config.json: {key} must be one of {', '.join(known)}, got {given!r}"
        )
    return known[given]
