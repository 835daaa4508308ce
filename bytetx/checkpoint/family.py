"""Family tables: models/*.toml, read once and checked against a closed list of keys."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bytetx.checkpoint.family_hooks import HOOKS
from bytetx.checkpoint.mixer_spec import LAYER_TYPES
from bytetx.checkpoint.norm_kinds import NORM_KINDS, NormKind
from bytetx.errors import CheckpointError

# What a feed-forward or a head may apply; bytetx.ops.linear runs each of them.
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")

# Keys of causal families only; nothing reads them for an encoder.
_CAUSAL_KEYS = {"heads": {"lm", "ranking"}}

# Sizes whose keys most families call alike; [config] names the others.
_COMMON_NAMES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
}

# section -> (keys it must have, keys it may have).
_SECTIONS = {
    "config": (
        {"norm_eps"},
        {
            *_COMMON_NAMES,
            "activation",
            "gated_activation",
            "embedding_size",
            "output_size",
            "num_token_types",
            "num_kv_heads",
            "head_dim",
            "relative_bias_rows",
            "relative_bias_buckets",
            "relative_bias_max_distance",
            "rotary_theta",
            "windowed_rotary_theta",
            "rotary_fraction",
            "rotary_dim",
            "window",
            "uses_window",
            "first_windowed_layer",
            "layer_types",
            "layer_windows",
            "global_attention_period",
            "attention_bias",
            "qkv_bias",
            "ffn_bias",
            "linear_bias",
            "is_causal",
            "is_bidirectional",
            "num_experts",
            "experts_per_token",
            "normalizes_experts",
            "sparse_period",
            "classifier_activation",
            "conv_size",
            "mixer_bias",
        },
    ),
    "architecture": (
        {"norm_placement", "norm", "positions", "position_offset"},
        {
            "causal",
            "rotary_layout",
            "qkv",
            "qk_norm",
            "weight_layout",
            "expert_layout",
            "global_layer",
            "biases",
            "intermediate_multiple",
            "softmax_scale",
            "half_dtype",
            "norm_offset",
            "norm_scale",
            "scales_words",
            "scaled_layers",
            "mixer",
        },
    ),
    "embeddings": (
        {"word"},
        {"position", "norm", "token_type", "relative_bias", "project"}
        | {"relative", "relative_norm", "project_in", "projected_norm"},
    ),
    "layer": (
        {"attn_out"},
        {"q", "k", "v", "qkv", "q_norm", "k_norm", "q_bias", "v_bias", "pos_k", "pos_q", "sinks"}
        | {"attn_norm", "attn_out_norm", "ffn_out_norm"}
        | {"ffn_norm", "ffn_in", "ffn_gate", "ffn_gate_up", "ffn_up_gate", "ffn_out"},
    ),
    "ungated_layer": ({"ffn_in"}, set()),
    # expert_*: stems of one expert's tensors; experts_*: whole names of those of all experts.
    "sparse_layer": (
        {"router"},
        {"expert_gate", "expert_in", "expert_out", "experts_in", "experts_out", "experts_bias"}
        | {"experts_gate_up", "experts_down", "experts_gate_up_bias", "experts_down_bias"}
        | {"router_bias", "shared_router", "shared_gate", "shared_in", "shared_out"},
    ),
    "mixer_layer": (
        {"mixer_in", "conv", "mixer_out"},
        {"mixer_gate", "mixer_beta", "mixer_decay", "mixer_norm", "decay_log", "decay_bias"},
    ),
    "final": ({"norm"}, {"project_out"}),
    "heads": (
        set(),
        {"pooler", "sequence_classification", "token_classification", "question_answering"}
        | {"masked_lm"}
        | _CAUSAL_KEYS["heads"],
    ),
}
# Sections that a family may leave out.
_OPTIONAL_SECTIONS = {"heads", "final", "fixed", "aliases", "ungated_layer", "sparse_layer"}
_OPTIONAL_SECTIONS |= {"mixer_layer"}
# Keys outside of the sections that a family may leave out.
_OPTIONAL_KEYS = {"hook", "marker", "own_code", "keyed_code", "bidirectional"}
_OPTIONAL_KEYS |= {"unsupported", "modules", "nested", "task_adapters", "task_prompts"}
_CLASSIFIER_KEYS = {"dense", "dense_bias", "activation", "norm", "norm_eps"}
_HEADS = {
    "pooler": ({"dense", "activation"}, set()),
    "sequence_classification": ({"out"}, _CLASSIFIER_KEYS | {"pooling", "out_bias"}),
    "token_classification": ({"out"}, _CLASSIFIER_KEYS),
    "question_answering": ({"out"}, _CLASSIFIER_KEYS),
    "masked_lm": (
        {"decoder"},
        _CLASSIFIER_KEYS | {"second_dense", "inner_size", "bias", "decoder_bias", "projection"},
    ),
    "lm": ({"decoder"}, {"bias"}),
    "ranking": ({"dense", "activation", "out"}, set()),
}
# A key's allowed values, the default first.
_CLOSED_VALUES = {
    "norm_placement": ("post", "pre", "output", "parallel"),
    "norm": tuple(NORM_KINDS),
    "positions": ("learned", "rotary", "none", "disentangled", "alibi"),
    "rotary_layout": ("halves", "pairs"),
    "qkv": ("separate", "stacked", "interleaved"),
    # An RMS norm of each head, or of all heads of a token together.
    "qk_norm": ("head", "projection"),
    "weight_layout": ("linear", "conv1d"),
    "expert_layout": ("linear", "conv1d"),
    "causal": (False, True),
    # Which layer of each global_attention_period has no window.
    "global_layer": ("first", "last"),
    # What is added to the weights of norms that have an offset.
    "norm_offset": (0, 1),
    # Whether norms have weights.
    "norm_scale": (True, False),
    "scales_words": (False, True),
    # The layers that a rope_scaling without layer types is for.
    "scaled_layers": ("all", "global"),
    "half_dtype": ("saved", "bfloat16"),
    # What the layers of [mixer_layer] have in place of attention.
    "mixer": tuple(LAYER_TYPES),
}
# Keys of config.json without which something else is taken, or nothing.
_NULLABLE = {
    "intermediate_size",
    "embedding_size",
    "num_kv_heads",
    "head_dim",
    "window",
    "layer_types",
    "layer_windows",
}

_SHARED = ("router", "gate", "in")
# Keys that need each other: a size in config.json, and the tensor or facts that use it.
_PAIRS = (
    (("config", "num_token_types"), ("embeddings", "token_type")),
    (("config", "relative_bias_rows"), ("embeddings", "relative_bias")),
    (("config", "relative_bias_rows"), ("config", "relative_bias_buckets")),
    (("config", "relative_bias_rows"), ("config", "relative_bias_max_distance")),
    (("config", "gated_activation"), ("ungated_layer", "ffn_in")),
    (("config", "num_experts"), ("sparse_layer", "router")),
    (("config", "conv_size"), ("mixer_layer", "conv")),
    (("architecture", "mixer"), ("mixer_layer", "conv")),
    (("config", "num_experts"), ("config", "experts_per_token")),
    (("sparse_layer", "expert_in"), ("sparse_layer", "expert_out")),
    (("sparse_layer", "experts_in"), ("sparse_layer", "experts_out")),
    (("sparse_layer", "experts_gate_up"), ("sparse_layer", "experts_down")),
    (("sparse_layer", "experts_gate_up_bias"), ("sparse_layer", "experts_down_bias")),
    *((("sparse_layer", "shared_out"), ("sparse_layer", f"shared_{key}")) for key in _SHARED),
    (("layer", "q_norm"), ("layer", "k_norm")),
    (("layer", "q_bias"), ("layer", "v_bias")),
    (("layer", "pos_k"), ("layer", "pos_q")),
    (("layer", "pos_k"), ("embeddings", "relative")),
)


def is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def named_file(path: Path) -> str:
    """A file of families as errors name it."""
    return f"models/{path.name}" if path.parent == models_folder() else str(path)


def read_family(path: Path) -> dict[str, Any]:
    """One family's table; a misspelt key is an error, for it would change a model in silence.

    Raises CheckpointError naming the file and the key that is unknown, missing or not allowed.
    """
    return checked_family(path, parse_family(path))


def parse_family(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{named_file(path)} cannot be read as TOML: {error}") from error


def checked_family(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    where = f"{named_file(path)}:"
    if isinstance(given := table.get("config"), dict):
        table = {**table, "config": _COMMON_NAMES | given}
    try:
        _check_table(where, table)
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        # A value of another type than every check expects, as a number in place of a name.
        raise CheckpointError(
            f"{where} a value has the wrong type or an unknown name ({error}); compare it with the "
            "files of models/"
        ) from error
    return table


def _check_table(where: str, table: dict[str, Any]) -> None:
    sections = {"names", "model_types", "prefix", "defaults", *_SECTIONS}
    _check_keys(where, table, sections - _OPTIONAL_SECTIONS, _OPTIONAL_SECTIONS | _OPTIONAL_KEYS)
    for section, (required, optional) in _SECTIONS.items():
        if section in table:
            _check_keys(f"{where} [{section}]", table[section], required, optional)
    for head, content in table.get("heads", {}).items():
        _check_keys(f"{where} [heads.{head}]", content, *_HEADS[head])
        for key, value in content.items():
            if isinstance(value, list | dict):
                raise CheckpointError(
                    f"{where} [heads.{head}] {key} must be one value, got {value!r:.200}"
                )
    _check_types(where, table)
    _check_names(where, table)
    _check_values(where, table)
    _check_modules(where, table)


def models_folder() -> Path:
    package = Path(__file__).parents[1]
    installed = package / "models"
    return installed if installed.is_dir() else package.parent / "models"


def _check_keys(where: str, content: Any, required: set[str], optional: set[str]) -> None:
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} must be a table of keys, got {content!r}")
    if unknown := content.keys() - required - optional:
        raise CheckpointError(
            f"{where} unknown key {', '.join(sorted(unknown))}; "
            f"known: {', '.join(sorted(required | optional))}"
        )
    if missing := required - content.keys():
        raise CheckpointError(f"{where} missing key {', '.join(sorted(missing))}")


# Tables whose values are names: of tensors, of keys of config.json, of tasks.
_NAMES = {"embeddings", "layer", "ungated_layer", "sparse_layer", "mixer_layer", "final"}
_NAMES |= {"aliases", "nested", "keyed_code", "task_adapters", "task_prompts"}


def _check_types(where: str, table: dict[str, Any]) -> None:
    """Checks the types of what a section holds; a number in [config] is fixed in the family."""
    if not isinstance(table["names"], str):
        raise CheckpointError(f"{where} names must be a text, got {table['names']!r:.200}")
    for key in ("defaults", "fixed", "heads", *_NAMES):
        if not isinstance(content := table.get(key, {}), dict):
            raise CheckpointError(f"{where} {key} must be a table, got {content!r:.200}")
    for section in _NAMES | {"config"}:
        wanted = (str, int, float) if section == "config" else str
        for key, value in table.get(section, {}).items():
            if not isinstance(value, wanted) or isinstance(value, bool) or value == "":
                raise CheckpointError(
                    f"{where} [{section}] {key} must be a name, got {value!r:.200}"
                )


def _check_names(where: str, table: dict[str, Any]) -> None:
    """Checks what stands outside of the sections."""
    for key in ("model_types", "marker", "own_code", "unsupported", "bidirectional"):
        names = table.get(key, ["-"])
        if not is_names(names) or not names:
            raise CheckpointError(f"{where} {key} must be a list of names, got {names!r:.200}")
    hook = table.get("hook")
    if hook is not None and hook not in HOOKS:
        raise CheckpointError(f"{where} hook is {hook!r:.200}, must be one of {', '.join(HOOKS)}")
    if (table["architecture"]["positions"] == "disentangled") != (hook == "deberta"):
        raise CheckpointError(
            f"{where} [architecture] positions disentangled and hook deberta go together; one of "
            "them is missing"
        )
    prefix, nested = table["prefix"], table.get("nested", {})
    prefixes = [prefix] if isinstance(prefix, str) else prefix
    if not isinstance(prefixes, list) or not all(isinstance(name, str) for name in prefixes):
        raise CheckpointError(f"{where} prefix must be a text or a list of them, got {prefix!r}")
    if strange := nested.keys() - set(table["model_types"]):
        raise CheckpointError(
            f"{where} nested names {', '.join(sorted(strange))}, which model_types has not"
        )


def _check_values(where: str, table: dict[str, Any]) -> None:
    _check_architecture(f"{where} [architecture]", table["architecture"])
    named = {
        key
        for name, key in table["config"].items()
        if isinstance(key, str) and name not in _NULLABLE
    }
    if "intermediate_multiple" not in table["architecture"]:
        named.add(table["config"]["intermediate_size"])
    if missing := (named | {"vocab_size", "pad_token_id"}) - table["defaults"].keys():
        raise CheckpointError(f"{where} [defaults] missing key {', '.join(sorted(missing))}")
    index = "{group}" if table.get("hook") == "albert" else "{i}"
    for section in ("layer", "ungated_layer", "sparse_layer", "mixer_layer"):
        for key, stem in table.get(section, {}).items():
            if index not in stem:
                raise CheckpointError(f"{where} [{section}] {key} is {stem!r}, must hold {index}")
            if key.startswith("expert_") and "{e}" not in stem:
                raise CheckpointError(f"{where} [{section}] {key} is {stem!r}, must hold {{e}}")
    for head, content in table.get("heads", {}).items():
        known = ("config", "classifier", *ACTIVATIONS)
        if content.get("activation", "config") not in known:
            raise CheckpointError(
                f"{where} [heads.{head}] activation is {content['activation']!r}, must be one of "
                f"{', '.join(known)}"
            )
    for (section, key), (other_section, other) in _PAIRS:
        if (key in table.get(section, {})) != (other in table.get(other_section, {})):
            raise CheckpointError(
                f"{where} [{section}] {key} and [{other_section}] {other} go together; "
                "one of them is missing"
            )
    _check_tensors(where, table)


def _check_architecture(where: str, architecture: dict[str, Any]) -> None:
    for key, allowed in _CLOSED_VALUES.items():
        value = architecture.get(key, allowed[0])
        if value not in allowed:
            raise CheckpointError(
                f"{where} {key} is {value!r}, must be one of {', '.join(map(str, allowed))}"
            )
    multiple = architecture.get("intermediate_multiple", 1)
    if not isinstance(multiple, int) or multiple < 1:
        raise CheckpointError(
            f"{where} intermediate_multiple is {multiple!r:.200}, must be an integer from 1"
        )
    offset = architecture["position_offset"]
    if offset != "after_pad_token" and (not isinstance(offset, int) or offset < 0):
        raise CheckpointError(
            f"{where} position_offset is {offset!r}, must be an integer from 0 or 'after_pad_token'"
        )


def _check_modules(where: str, table: dict[str, Any]) -> None:
    """Checks the names of transformers' modules: a complete [layer], with separate projections."""
    if "modules" not in table:
        return
    modules = table["modules"]
    _check_keys(f"{where} [modules]", modules, {"layer"}, {"embeddings", "sparse_layer"})
    for section in modules.keys() & {"layer", "sparse_layer"}:
        _check_keys(f"{where} [modules.{section}]", modules[section], *_SECTIONS[section])
    if ("sparse_layer" in modules) != ("sparse_layer" in table):
        raise CheckpointError(f"{where} [modules.sparse_layer] goes with [sparse_layer]")
    if strange := modules.get("embeddings", {}).keys() - table["embeddings"].keys():
        raise CheckpointError(
            f"{where} [modules.embeddings] names {', '.join(sorted(strange))}, which [embeddings] "
            "has not"
        )
    architecture = table["architecture"] | {"qkv": "separate"}
    architecture.pop("biases", None)
    layers = {key: modules[key] for key in ("layer", "sparse_layer") if key in modules}
    parts = {**layers, "architecture": architecture}
    _check_values(f"{where} [modules]", table | parts)


def _check_tensors(where: str, table: dict[str, Any]) -> None:
    """Checks that a family has exactly the tensors that its architecture needs."""
    architecture, embeddings = table["architecture"], table["embeddings"]
    is_causal = architecture.get("causal", False)
    is_disentangled = architecture["positions"] == "disentangled"
    is_learned = architecture["positions"] in ("learned", "disentangled")
    is_rotary = architecture["positions"] == "rotary"
    is_alibi = architecture["positions"] == "alibi"
    is_plain = _norm_kind(table).has_shift and "project_in" not in embeddings
    separate = architecture.get("qkv", "separate") == "separate"
    placement = architecture["norm_placement"]
    needed = [
        ("embeddings", "position", is_learned, not is_learned),
        # Of causal families, one of embedded words, by layer_norm.
        ("embeddings", "norm", not is_causal and placement == "post", is_causal and not is_plain),
        # Of a family with rotary positions or ALiBi, as config.json says.
        ("config", "rotary_theta", is_rotary, not is_rotary and not is_alibi),
        ("embeddings", "relative", is_disentangled, not is_disentangled),
        ("embeddings", "relative_norm", False, not is_disentangled),
        ("layer", "q_bias", False, separate),
        ("layer", "sinks", False, is_causal or is_disentangled),
        *(("layer", key, separate, not separate) for key in ("q", "k", "v")),
        ("layer", "qkv", not separate, separate),
        ("layer", "attn_norm", placement != "output", False),
        ("layer", "ffn_norm", placement not in ("parallel", "output"), False),
        *(
            ("layer", key, placement == "output", placement != "output")
            for key in ("attn_out_norm", "ffn_out_norm")
        ),
        *(("config", key, False, not is_causal) for key in ("is_causal", "is_bidirectional")),
        ("config", "windowed_rotary_theta", False, not is_rotary),
    ]
    _check_needed(where, table, needed)
    _check_choices(where, table)
    _check_feed_forward(where, table)
    if strange := set(architecture.get("biases", ())) - table["layer"].keys():
        raise CheckpointError(
            f"{where} [architecture] biases names {', '.join(sorted(strange))}, which [layer] has "
            "not"
        )
    projects = {"project_in"} if is_causal else {"project", "project_in"}
    if ("embedding_size" in table["config"]) != bool(projects & embeddings.keys()):
        raise CheckpointError(
            f"{where} [config] embedding_size and [embeddings] {' or '.join(sorted(projects))} go "
            "together; one of them is missing"
        )
    into, behind = "project_in" in embeddings and is_causal, "project_out" in table.get("final", {})
    if behind != (into or "output_size" in table["config"]):
        raise CheckpointError(
            f"{where} [embeddings] project_in and [final] project_out go together, or [config] "
            "output_size and project_out; one of them is missing"
        )
    if (placement != "post") != ("final" in table):
        raise CheckpointError(
            f"{where} [final] goes with norm_placement pre, output or parallel; one of them is "
            "missing"
        )
    if is_causal:
        return
    for section, keys in _CAUSAL_KEYS.items():
        if found := keys & table.get(section, {}).keys():
            raise CheckpointError(
                f"{where} [{section}] {', '.join(sorted(found))}: only a causal family may have it"
            )


def _norm_kind(table: dict[str, Any]) -> NormKind:
    return NORM_KINDS[table["architecture"]["norm"]]


def _check_choices(where: str, table: dict[str, Any]) -> None:
    """Checks that choices are there only where something reads them."""
    config, architecture = table["config"], table["architecture"]
    is_pre = architecture["norm_placement"] == "pre"
    needed = [
        ("architecture", "norm_offset", False, not _norm_kind(table).has_offset),
        ("architecture", "mixer", False, not (is_pre and architecture.get("causal"))),
        ("config", "mixer_bias", False, "mixer" not in architecture),
        ("architecture", "global_layer", False, "global_attention_period" not in config),
        ("architecture", "scaled_layers", False, "windowed_rotary_theta" not in config),
    ]
    _check_needed(where, table, needed)


def _check_feed_forward(where: str, table: dict[str, Any]) -> None:
    """Checks the tensors between a layer's two feed-forward products, or those of its experts."""
    config, layer, sparse = table["config"], table["layer"], table.get("sparse_layer", {})
    architecture = table["architecture"]
    is_chosen, is_sparse = "gated_activation" in config, bool(sparse)
    is_fused = bool({"ffn_gate_up", "ffn_up_gate"} & layer.keys())
    has_dense = not is_sparse or "sparse_period" in config
    needed = [
        ("config", "activation", not is_chosen, is_chosen),
        ("layer", "ffn_gate", is_chosen, is_fused),
        ("layer", "ffn_in", has_dense and not is_fused, is_fused or not has_dense),
        ("layer", "ffn_out", has_dense, not has_dense),
        ("layer", "ffn_up_gate", False, "ffn_gate_up" in layer),
        *(("config", key, False, not is_sparse) for key in ("normalizes_experts", "sparse_period")),
    ]
    _check_needed(where, table, needed)
    layouts = {"expert_in", "experts_in", "experts_gate_up"} & sparse.keys()
    if is_sparse and len(layouts) != 1:
        raise CheckpointError(
            f"{where} [sparse_layer] must have one of expert_in and expert_out, experts_in and "
            "experts_out, experts_gate_up and experts_down"
        )
    holds_all = "experts_gate_up" in sparse
    if not holds_all and ("experts_down_bias" in sparse or "expert_layout" in architecture):
        raise CheckpointError(
            f"{where} [sparse_layer] experts_down_bias and [architecture] expert_layout go with "
            "experts_gate_up and experts_down"
        )
    if is_sparse and architecture["norm_placement"] not in ("pre", "post"):
        raise CheckpointError(f"{where} [sparse_layer] goes with norm_placement pre or post")


def _check_needed(
    where: str, table: dict[str, Any], needed: Iterable[tuple[str, str, bool, bool]]
) -> None:
    """needed: (section, key, whether it must be there, whether it must not be)"""
    for section, key, is_needed, is_wrong in needed:
        is_there = key in table[section]
        if (is_needed and not is_there) or (is_wrong and is_there):
            missing = "is missing" if is_needed else "does not belong to how this family computes"
            raise CheckpointError(f"{where} [{section}] {key} {missing}")
