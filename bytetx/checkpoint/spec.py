"""The spec of one checkpoint: its family's facts and the sizes and choices of its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from bytetx.checkpoint.config import Values
from bytetx.checkpoint.families import Families, read_families
from bytetx.checkpoint.family import select_variants
from bytetx.checkpoint.layer_spec import (
    FFN_LINEARS,
    ExpertSpec,
    LayerSpec,
    is_bidirectional,
    is_gated,
    read_experts,
    read_layers,
)
from bytetx.checkpoint.rope_spec import rotary_positions
from bytetx.errors import CheckpointError

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")

# Layers that a checkpoint may hold as one tensor, and the modules that they are in memory.
_MODULES_OF = {
    "qkv": ("q", "k", "v"),
    "ffn_gate_up": ("ffn_gate", "ffn_in"),
    "ffn_up_gate": ("ffn_gate", "ffn_in"),
}

# quant_method of quantization_config, as its tools are called.
_METHODS = {"gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", None: "no method named"}

# Keys of a config.json that holds the text model's in a table; the other ones are the table's.
_OUTER_KEYS = {"architectures", "auto_map", "model_type", "quantization_config"}
_OUTER_KEYS |= {"id2label", "num_labels", "problem_type", "tie_word_embeddings"}

# More classes than any head has; a number of labels beyond it is a damaged config, not a model.
_MAX_LABELS = 1 << 20


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """One head: some rows -> dense -> activation -> norm -> out or decoder.

    dense, norm, out: tensor-name stems without `.weight`/`.bias`, or None where the head lacks it.
    decoder, bias (masked_lm, lm): whole tensor names.  dense_bias: whether dense has a bias.
    pooling: the rows of sequence_classification: "cls", the first token; "mean", the mean of all;
    "late", every token, and the mean of their logits; "last", the last token.
    out_bias: whether out has a bias.
    """

    dense: str | None = None
    dense_bias: bool = True
    pooling: str = "cls"
    activation: str | None = None
    norm: str | None = None
    norm_eps: float | None = None
    decoder: str | None = None
    bias: str | None = None
    out: str | None = None
    out_bias: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes, choices and tensor names of one checkpoint; all that the forward pass asks.

    max_positions: the most tokens a sequence may have (position_offset already taken off).
    first_position_row: rows of the saved position table that no token reads.
    num_token_types: 0 where the family has none.
    relative_bias_rows: rows of the saved bias table, 0 where attention has no relative position
        bias; the first relative_bias_buckets of them are used.
    embeddings, layer: tensor names without the base model's prefix; `{i}` is the layer's index,
        or `{group}` and `{inner}` its place where layers share their weights (layer_names).
    layer_spec: what the layers compute; layer: how their tensors are called.
    num_layer_groups: sets of weights that the layers share, 0 where each layer has its own; the
        layers of a group take the group's layers_per_group sets in turn.
    always_projects: whether the embedding is projected even to a hidden_size of its own width.
    half_dtype: the half type that "auto" takes on CUDA; "saved": the saved one, else float16.
    embedding_multiplier: of embedded tokens.  residual_multiplier: of what each half of a layer
        adds.  logits_divisor: of next-token logits, and logits_softcap, as of attention scores.
    scales_words: whether rows of the word table are multiplied by the root of hidden_size, rounded
        to their dtype, when they are looked up.
    experts: of layers whose feed-forward is a mixture of experts; None where no layer's is.
    is_bidirectional: a causal family's checkpoint whose tokens see their whole sequence.
    family_table: what the family's TOML file holds.
    """

    family: str
    model_type: str
    prefixes: tuple[str, ...]
    hidden_size: int
    embedding_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    position_offset: int
    first_position_row: int
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
    layer_spec: LayerSpec
    heads: Mapping[str, HeadSpec] = field(default_factory=dict)
    num_layer_groups: int = 0
    layers_per_group: int = 1
    always_projects: bool = False
    half_dtype: str = "saved"
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0
    scales_words: bool = False
    experts: ExpertSpec | None = None
    is_bidirectional: bool = False
    family_table: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def layer_norm_eps(self) -> float:
        """Epsilon of the layers' norms, which read sums divided by residual_multiplier.

        norm(x) with eps is norm(x / m) with eps / m^2: so nothing needs to multiply what the
        halves of a layer add.
        """
        return self.norm_eps / self.residual_multiplier**2

    @property
    def is_projected(self) -> bool:
        """Whether a linear layer leads from the embedding to the first layer."""
        return self.always_projects or self.embedding_size != self.hidden_size

    def layer_names(self, layer: int) -> dict[str, str]:
        """Stems of a layer's tensors by their key; layers of one group have the same ones.

        A layer with experts has theirs in place of a feed-forward's, with {e} for an expert.
        """
        if not self.num_layer_groups:
            stems = dict(self.layer)
            if self.has_experts(layer) and self.experts is not None:
                stems = {key: stem for key, stem in stems.items() if key not in FFN_LINEARS}
                stems |= self.experts.layer
            return {key: stem.replace("{i}", str(layer)) for key, stem in stems.items()}
        repeat, inner = divmod(layer, self.layers_per_group)
        repeats = self.num_layers // self.layers_per_group
        group = repeat * self.num_layer_groups // repeats
        return {key: stem.format(group=group, inner=inner) for key, stem in self.layer.items()}

    def has_experts(self, layer: int) -> bool:
        """Whether the layer's feed-forward is a mixture of experts."""
        return self.experts is not None and self.experts.pattern[layer]

    @property
    def extra_layer(self) -> str:
        """The weight that a checkpoint with more layers than config.json says would hold."""
        stem = self.layer["attn_out"]
        return f"{stem.format(i=self.num_layers, group=self.num_layer_groups, inner=0)}.weight"

    @property
    def num_labels(self) -> int:
        return len(self.id2label)

    @property
    def output_size(self) -> int:
        """Features of the last layer's rows; OPT-350m projects them to embedding_size."""
        is_projected = "project_out" in self.layer_spec.final
        return self.embedding_size if is_projected else self.hidden_size

    @property
    def is_causal(self) -> bool:
        return self.layer_spec.causal

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward layers have a gate."""
        return is_gated(self.layer)

    @property
    def max_plain_prompt(self) -> int | None:
        """Tokens of a prompt beyond which its keys depend on its length; None: they never do."""
        rotary = self.layer_spec.rotary
        if rotary is None or rotary.scaling != "dynamic":
            return None
        return rotary.original_positions

    def workspace_bytes(self, total_tokens: int, itemsize: int) -> int:
        """Bytes of activations and ids that a forward pass of `total_tokens` holds at its peak.

        Both halves of a layer hold x, and its normalized rows unless the layers are post-norm; a
        parallel layer's feed-forward the output of attention, too.  Attention adds qkv and its
        output, the feed-forward the inner rows, a gated one its gates and values as well, before
        and after they are multiplied.  Behind them are the sum and, unless it takes the sum's
        place, its norm.  The embedding holds its sum and what it is projected to.  Five ids a
        token, of four bytes.  Scratch of the kernels' threads (below 1 MiB each, whatever the
        batch) comes on top.
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        attended = self.num_heads * self.head_dim
        match self.layer_spec.norm_placement:
            case "post":
                before, behind = hidden, 2 * hidden
            case "pre" | "output":
                before, behind = 2 * hidden, 4 * hidden
            case _:  # parallel
                before, behind = 2 * hidden + attended, 5 * hidden + attended
        gated = 4 if self.is_gated else 1
        row = max(
            before + qkv + attended,
            before + gated * inner,
            behind + max(attended, inner),
            hidden + self.embedding_size,
        )
        if self.experts is not None:
            # Rows for each expert of a token: what they read, both layers' results, and those in
            # the tokens' order; the sum of a token's is in f32.
            width = 3 * hidden + (4 if self.experts.is_gated else 1) * self.experts.size
            row = max(row, before + self.experts.top_k * width + hidden * 4 // itemsize)
        return total_tokens * (itemsize * row + 5 * 4)


def build_spec(config: Mapping[str, Any], families: Families | None = None) -> ModelSpec:
    """The ModelSpec of a checkpoint's config.json (already parsed).

    families: None are those of models/.
    Raises CheckpointError for an unknown model_type (with the known ones), and for sizes that are
    missing, of the wrong type, or that contradict each other.
    """
    name, family = (families or read_families()).family_of(config)
    config = _unnested(config, family)
    table = select_variants(family, config)
    _refuse_variants(config, table)
    values = Values(config, table)
    activation, norm_eps = values.activation(), values.norm_eps()
    sizes = _sizes(values, table["architecture"])
    layer, embeddings = dict(table["layer"]), dict(table["embeddings"])
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
    for key in ("pos_k", "pos_q"):
        relative = layers.disentangled
        if relative is None or relative.shares_projections or key not in relative.terms:
            layer.pop(key, None)
    if not values.switch("absolute_positions", True):
        del embeddings["position"]
    experts = read_experts(
        values,
        table,
        num_layers=sizes["num_layers"],
        intermediate_size=sizes["intermediate_size"],
    )
    if layers.rotary is not None:
        is_scaled = table["architecture"].get("scaled_positions", False)
        positions = rotary_positions(layers.rotary, sizes["max_positions"], is_scaled=is_scaled)
        sizes["max_positions"] = positions
    return ModelSpec(
        family=name,
        family_table=family,
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
        embeddings=embeddings,
        layer=layer,
        layer_spec=layers,
        heads=_heads(table, values, activation=activation, norm_eps=norm_eps),
        always_projects=table["architecture"].get("always_projects", False),
        half_dtype=table["architecture"].get("half_dtype", "saved"),
        embedding_multiplier=values.multiplier("embedding_multiplier"),
        residual_multiplier=values.multiplier("residual_multiplier"),
        logits_divisor=values.multiplier("logits_divisor"),
        logits_softcap=values.number_or_zero("logits_softcap"),
        scales_words=table["architecture"].get("scales_words", False),
        experts=experts,
        is_bidirectional=table["architecture"].get("causal", False) and not layers.causal,
    )


def build_module_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The ModelSpec of a model in memory: by the modules of transformers' class, not by the tensors
    of its files. Errors as of build_spec."""
    markers = read_families().markers(config.get("model_type"))
    spec = build_spec({key: value for key, value in config.items() if key not in markers})
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


def _sizes(values: Values, architecture: Mapping[str, Any]) -> dict[str, int]:
    hidden_size, num_heads, head_dim = values.head_sizes()
    offset = _position_offset(architecture["position_offset"], values)
    buckets = values.bias_fact("relative_bias_buckets")
    num_layers, groups = values.size("num_layers"), values.size("num_layer_groups", default=0)
    per_group = values.size("layers_per_group", default=1)
    if groups > num_layers:
        raise CheckpointError(
            f"config.json: {values.names['num_layer_groups']} {groups} is more than the "
            f"{num_layers} layers that share them"
        )
    return {
        "hidden_size": hidden_size,
        "embedding_size": values.embedding_size(hidden_size),
        "num_layers": num_layers * per_group,
        "num_layer_groups": groups,
        "layers_per_group": per_group,
        "num_heads": num_heads,
        "num_kv_heads": values.num_kv_heads(num_heads),
        "head_dim": head_dim,
        "intermediate_size": values.intermediate_size(hidden_size),
        "vocab_size": values.common_size("vocab_size"),
        "max_positions": values.max_positions(offset),
        "position_offset": offset,
        "first_position_row": architecture.get("first_position_row", 0),
        "num_token_types": values.num_token_types(),
        "relative_bias_rows": values.bias_rows(buckets),
        "relative_bias_buckets": buckets,
        "relative_bias_max_distance": values.bias_fact("relative_bias_max_distance"),
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
    if quantization := config.get("quantization_config"):
        given = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise CheckpointError(
            f"config.json: quantization_config says that the weights are quantised "
            f"({_METHODS.get(given, given)!s:.60}), which bytetx does not read; give the "
            "checkpoint in float32, float16 or bfloat16 that they were made from"
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
    """The family's heads; that of `otherwise` where config.json switches off what `when` names.

    "config" stands for the checkpoint's own activation or epsilon, "classifier" for its
    classifier_activation.  dense_bias, decoder_bias and pooling name keys of config.json.
    A causal family's checkpoint without a causal mask predicts no next token: it has no lm head.
    """
    heads, is_unmasked = {}, is_bidirectional(values, table)
    for name, entry in table.get("heads", {}).items():
        is_chosen = "when" not in entry or values.flag(entry["when"])
        resolved = dict(entry if is_chosen else table["otherwise"][name])
        resolved.pop("when", None)
        if resolved.get("activation") == "config":
            resolved["activation"] = activation
        elif resolved.get("activation") == "classifier":
            resolved["activation"] = values.activation("classifier_activation")
        if resolved.get("norm_eps") == "config":
            resolved["norm_eps"] = norm_eps
        if "dense_bias" in resolved:
            resolved["dense_bias"] = values.flag(resolved["dense_bias"])
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
