"""Hooks: what one family alone has, read from its config.json after all that families share.

A family's file names one by `hook`; it takes the spec without it and returns the complete one.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from bytetx.checkpoint.config import Values, positive_number
from bytetx.checkpoint.layer_spec import (
    AttendedSpec,
    ConvolutionSpec,
    DisentangledSpec,
    HeadSizes,
    LayerInputSpec,
    QueryGrowth,
    ValueTableSpec,
    read_alibi,
)
from bytetx.checkpoint.mixer_spec import read_mixer
from bytetx.checkpoint.model_spec import ModelSpec
from bytetx.checkpoint.rope_spec import read_rotary, rotary_positions
from bytetx.errors import CheckpointError

# Terms of disentangled attention, by their names in config.json.
_RELATIVE_TERMS = {"c2p": "pos_k", "p2c": "pos_q"}


def _layers(spec: ModelSpec, **changes: Any) -> ModelSpec:
    return replace(spec, layer_spec=replace(spec.layer_spec, **changes))


def albert(values: Values, spec: ModelSpec) -> ModelSpec:
    """Layers share sets of weights; the embedding is projected whatever its width."""
    groups = values.common_size("num_hidden_groups")
    per_group = values.common_size("inner_group_num")
    if groups > spec.num_layers:
        raise CheckpointError(
            f"config.json: num_hidden_groups {groups} is more than the {spec.num_layers} layers "
            "that share them"
        )
    return replace(
        spec,
        num_layers=spec.num_layers * per_group,
        num_layer_groups=groups,
        layers_per_group=per_group,
        always_projects=True,
    )


def deberta(values: Values, spec: ModelSpec) -> ModelSpec:
    """Scores compare contents with relative positions; v2 may have a convolution."""
    terms = _relative_terms(values)
    relative = _disentangled(values, terms)
    named = set() if relative is None or relative.shares_projections else relative.terms
    unused = {"pos_k", "pos_q"} - named
    embeddings, heads = dict(spec.embeddings), dict(spec.heads)
    if not values.flag("position_biased_input"):
        del embeddings["position"]
    if "masked_lm" in heads and not values.flag("legacy"):
        stem = "lm_predictions.lm_head"
        heads["masked_lm"] = replace(
            heads["masked_lm"],
            dense=f"{stem}.dense",
            norm=f"{stem}.LayerNorm",
            decoder=f"{stem}.decoder.weight",
            bias=f"{stem}.bias",
        )
    scale = spec.layer_spec.softmax_scale / (1 + len(terms)) ** 0.5
    spec = _layers(
        spec, disentangled=relative, convolution=_convolution(values), softmax_scale=scale
    )
    layer = {key: stem for key, stem in spec.layer.items() if key not in unused}
    return replace(spec, embeddings=embeddings, heads=heads, layer=layer)


def _relative_terms(values: Values) -> frozenset[str]:
    """Return the terms of scores besides q . k: config.json lists it, or joins it with "|"."""
    given = values.read("pos_att_type")
    named = given.lower().split("|") if isinstance(given, str) else given or []
    stripped = [name.strip() if isinstance(name, str) else name for name in named]
    if unknown := [name for name in stripped if name not in _RELATIVE_TERMS]:
        raise CheckpointError(
            f"config.json: pos_att_type names {unknown[0]!r:.120}; bytetx runs "
            f"{' and '.join(_RELATIVE_TERMS)}"
        )
    return frozenset(_RELATIVE_TERMS[name] for name in stripped)


def _disentangled(values: Values, terms: frozenset[str]) -> DisentangledSpec | None:
    if not values.flag("relative_attention") or not terms:
        return None
    distance = values.integer("max_relative_positions")
    is_v2 = "position_buckets" in values.defaults
    buckets = max(values.integer("position_buckets"), 0) if is_v2 else 0
    if distance < 1:
        distance = values.size("max_position_embeddings")
    if buckets and not 2 < buckets < 2 * (distance - 1):
        raise CheckpointError(
            f"config.json: position_buckets must be from 3 to {2 * (distance - 1) - 1} for "
            f"distances up to {distance}, got {buckets}"
        )
    return DisentangledSpec(
        terms=terms,
        log_buckets=buckets,
        max_distance=distance,
        shares_projections=is_v2 and values.flag("share_att_key"),
        has_norm=is_v2 and "layer_norm" in str(values.read("norm_rel_ebd")).lower().split("|"),
    )


def _convolution(values: Values) -> ConvolutionSpec | None:
    if "conv_kernel_size" not in values.defaults or values.integer("conv_kernel_size") <= 0:
        return None
    size, groups = values.integer("conv_kernel_size"), values.integer("conv_groups")
    if size % 2 == 0 or groups != 1:
        raise CheckpointError(
            f"config.json: a convolution of {size} tokens in {groups} groups is not supported; its "
            "size must be odd and its groups 1"
        )
    activation = values.activation("conv_act")
    return ConvolutionSpec(size, activation, "encoder.conv.conv", "encoder.conv.LayerNorm")


def embedding_gemma2(values: Values, spec: ModelSpec) -> ModelSpec:
    """A window is as wide on either side; the last layer has none. Layers without one have heads
    of their own, values are normed, and each layer adds of the embedded tokens."""
    layers, last = spec.layer_spec, spec.num_layers - 1
    windowed = tuple(layers.window_of(i) > 0 and i < last for i in range(spec.num_layers))
    return _layers(
        spec,
        window=layers.window and layers.window + 1,
        window_pattern=windowed,
        full_heads=(full := _full_heads(values, spec, windowed)),
        rotary=read_rotary(values, full.head_dim),
        norms_values=True,
        layer_input=LayerInputSpec(
            size=values.common_size("hidden_size_per_layer_input"),
            project="ple.per_layer_model_projection",
            project_norm="ple.per_layer_projection_norm",
            gate="layers.{i}.ple_block.per_layer_input_gate",
            out="layers.{i}.ple_block.per_layer_projection",
            out_norm="layers.{i}.ple_block.post_per_layer_input_norm",
            scale="layers.{i}.layer_scalar",
        ),
    )


def _full_heads(values: Values, spec: ModelSpec, windowed: tuple[bool, ...]) -> HeadSizes:
    """The heads of layers without a window, of which config.json has a table for each."""
    given, sizes = values.read("per_layer_config"), set()
    if given is None:
        full = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        given = {
            i: {key: values.common_size(name) for key, name in full.items()}
            for i, has_window in enumerate(windowed)
            if not has_window
        }
    tables = _layer_tables(given)
    own = {"head_dim": spec.head_dim, "num_key_value_heads": spec.num_kv_heads}
    for i, has_window in enumerate(windowed):
        table = tables.get(i, {})
        found = {**own, **table} if isinstance(table, Mapping) else {}
        if found.keys() != own.keys() or not all(type(n) is int and n > 0 for n in found.values()):
            raise CheckpointError(
                f"config.json: per_layer_config must give layer {i} head_dim and "
                f"num_key_value_heads alone, got {table!r:.120}"
            )
        if not has_window:
            sizes.add(HeadSizes(found["num_key_value_heads"], found["head_dim"]))
        elif found != own:
            raise CheckpointError(
                f"config.json: per_layer_config gives layer {i} other heads than the other layers "
                "with a window have, which is not supported"
            )
    if len(sizes) > 1:
        raise CheckpointError(
            "config.json: per_layer_config must give all layers without a window the same heads, "
            f"got {str(given)[:200]}"
        )
    full_heads = next(iter(sizes))  # the last layer has no window
    if spec.num_heads % full_heads.num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {spec.num_heads} is no multiple of the "
            f"{full_heads.num_kv_heads} key heads that per_layer_config gives"
        )
    return full_heads


def falcon(values: Values, spec: ModelSpec) -> ModelSpec:
    """Norms of each half where layers are new or not parallel; one key head in the old ones;
    Falcon RW's slopes, which are rounded, and scaled as scores are."""
    layers, is_new = spec.layer_spec, values.flag("new_decoder_architecture")
    if not is_new and values.flag("multi_query"):
        spec = replace(spec, num_kv_heads=1)
    if not is_new and not values.flag("parallel_attn"):
        layers = replace(layers, norm_placement="pre")
        norms = {"ffn_norm": "h.{i}.post_attention_layernorm"}
        spec = replace(spec, layer={**spec.layer, **norms})
    if is_new and values.read("num_ln_in_parallel_attn") in (None, 2):
        norms = {"attn_norm": "h.{i}.ln_attn", "ffn_norm": "h.{i}.ln_mlp"}
        spec = replace(spec, layer={**spec.layer, **norms})
    if values.flag("alibi"):
        alibi = replace(read_alibi(values), dtype="bfloat16", scale=layers.softmax_scale)
        layers = replace(layers, rotary=None, alibi=alibi)
    return replace(spec, layer_spec=layers)


def gemma(values: Values, spec: ModelSpec) -> ModelSpec:
    """The first releases' files say gelu, which transformers takes for the tanh."""
    is_legacy = values.read("hidden_act") == "gelu"
    return replace(spec, activation="gelu_tanh") if is_legacy else spec


def gemma2(values: Values, spec: ModelSpec) -> ModelSpec:
    """Scores and logits are cut off softly; scores are scaled by a number of config.json."""
    spec = _layers(
        spec,
        softmax_scale=values.positive("query_pre_attn_scalar") ** -0.5,
        softcap=_positive_or_zero(values, "attn_logit_softcapping"),
    )
    return replace(spec, logits_softcap=_positive_or_zero(values, "final_logit_softcapping"))


def gemma3(values: Values, spec: ModelSpec) -> ModelSpec:
    """Positions are counted after scaling; EmbeddingGemma's windows have half on either side."""
    spec = replace(gemma2(values, spec), max_positions=values.max_positions(0))
    window = spec.layer_spec.window  # without a causal mask: that of each side, and the token
    if not window or not values.flag("use_bidirectional_attention"):
        return spec
    half = (window - 1) // 2 + 1
    return _layers(spec, window=half if values.flag("is_causal") else half + 1)


def _positive_or_zero(values: Values, key: str) -> float:
    return 0.0 if values.read(key) is None else values.positive(key)


def gpt2(values: Values, spec: ModelSpec) -> ModelSpec:
    """Scores may be left unscaled, or be divided by the layer's number, too."""
    spec = _scale_switch(values, spec)
    return _layers(spec, scales_by_layer=values.flag("scale_attn_by_inverse_layer_idx"))


def gpt_bigcode(values: Values, spec: ModelSpec) -> ModelSpec:
    """All query heads share one key head, unless config.json says otherwise."""
    spec = _scale_switch(values, spec)
    return replace(spec, num_kv_heads=1) if values.flag("multi_query") else spec


def _scale_switch(values: Values, spec: ModelSpec) -> ModelSpec:
    return spec if values.flag("scale_attn_weights") else _layers(spec, softmax_scale=1.0)


def gpt_neo(values: Values, spec: ModelSpec) -> ModelSpec:
    """Layers are local or global, as a list of (kinds, repeats) says."""
    groups, kinds = values.read("attention_types"), []
    for group in groups if isinstance(groups, list) else ():
        match group:
            case [[*names], int(repeats)] if 0 <= repeats * len(names) <= spec.num_layers:
                kinds += names * repeats
            case _:
                kinds = []
                break
    if len(kinds) != spec.num_layers or any(kind not in ("local", "global") for kind in kinds):
        raise CheckpointError(
            f"config.json: attention_types must name {spec.num_layers} layers' attention, each one "
            f"of local, global, got {str(groups)[:200]}"
        )
    return _layers(spec, window_pattern=tuple(kind == "local" for kind in kinds))


def gpt_neox(values: Values, spec: ModelSpec) -> ModelSpec:
    """The feed-forward layer is beside attention, or follows it."""
    is_parallel = values.flag("use_parallel_residual")
    return spec if is_parallel else _layers(spec, norm_placement="pre")


def granite(values: Values, spec: ModelSpec) -> ModelSpec:
    """Embeddings, residuals, scores and logits are scaled."""
    return replace(
        _layers(spec, softmax_scale=values.positive("attention_multiplier")),
        embedding_multiplier=values.positive("embedding_multiplier"),
        residual_multiplier=values.positive("residual_multiplier"),
        logits_divisor=values.positive("logits_scaling"),
    )


# What transformers' classes take where config.json says nothing.
_PRIVACY_FILTER_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_PRIVACY_TAGS = (
    *("account_number", "private_address", "private_date", "private_email"),
    *("private_person", "private_phone", "private_url", "secret"),
)
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def lfm2(values: Values, spec: ModelSpec) -> ModelSpec:
    """The feed-forward's size is computed; older files list the layers that have attention."""
    if values.flag("block_auto_adjust_ff_dim"):
        size = 2 * spec.intermediate_size // 3
        if values.read("block_ffn_dim_multiplier") is not None:
            multiple = values.common_size("block_multiple_of")
            size = int(values.positive("block_ffn_dim_multiplier") * size)
            size = -(-size // multiple) * multiple
        spec = replace(spec, intermediate_size=size)
    if values.read("layer_types") is not None or values.read("full_attn_idxs") is None:
        return spec
    indices, num_layers = values.read("full_attn_idxs"), spec.num_layers
    known = range(num_layers)
    if not isinstance(indices, list) or any(type(i) is not int or i not in known for i in indices):
        raise CheckpointError(
            f"config.json: full_attn_idxs must list some of {num_layers} layers, got "
            f"{str(indices)[:200]}"
        )
    kinds = ["full_attention" if i in indices else "conv" for i in range(num_layers)]
    mixer = read_mixer(values, spec.family_table, num_layers=num_layers, layer_types=kinds)
    return _layers(spec, mixer=mixer)


def ministral3(values: Values, spec: ModelSpec) -> ModelSpec:
    """Queries are multiplied by a number that grows with their position."""
    spec, given = _with_rope(values, spec, _MINISTRAL3_ROPE)
    if given is None:
        return spec
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: rope_parameters must be a table, got {given!r:.120}")
    if not given.get("llama_4_scaling_beta"):
        return spec
    period = given.get("original_max_position_embeddings")
    if type(period) is not int or period < 1:
        raise CheckpointError(
            "config.json: rope original_max_position_embeddings must be a positive integer, got "
            f"{period!r:.120}"
        )
    beta = positive_number("rope llama_4_scaling_beta", given["llama_4_scaling_beta"])
    return _layers(spec, query_growth=QueryGrowth(beta, period))


def _with_rope(
    values: Values, spec: ModelSpec, rope: Mapping[str, Any]
) -> tuple[ModelSpec, object]:
    """The spec with `rope` where config.json says nothing of rotary positions, and the
    rope_parameters that count; None where it has older keys instead."""
    config = values.config
    given = config.get("rope_parameters")
    if given is not None:
        return spec, given
    if config.get("rope_theta") is not None or config.get("rope_scaling") is not None:
        return spec, None
    values = copy(values)
    values.config = {**config, "rope_parameters": rope}
    rotary = read_rotary(values, spec.head_dim)
    assert rotary is not None
    # Positions were counted without it.
    positions = rotary_positions(rotary, spec.max_positions)
    return replace(_layers(spec, rotary=rotary), max_positions=positions), rope


def modernbert(values: Values, spec: ModelSpec) -> ModelSpec:
    """The first layer has no norm before it; a window has half of it on either side."""
    window = spec.layer_spec.window and spec.layer_spec.window // 2 + 1
    has_bias = values.flag("norm_bias")
    return _layers(spec, has_first_norm=False, norm_bias=has_bias, window=window)


# transformers' defaults by the kind of a layer: the base, and the share of a head that is rotated.
_NEOMME_ROPE = {"full_attention": (1000000.0, 0.25), "sliding_attention": (10000.0, 1.0)}
_NEOMME_LONG_WINDOW = 1024


def neomme(values: Values, spec: ModelSpec) -> ModelSpec:
    """Windows differ and are as wide on either side; layers mix in the embedded tokens, change what
    was attended to, scale what they add, and some add values of the vocabulary."""
    num_layers, pattern = spec.num_layers, spec.layer_spec.window_pattern
    pattern = pattern or tuple((i + 1) % 6 > 0 and i + 1 < num_layers for i in range(num_layers))
    if all(pattern):
        raise CheckpointError("config.json: layer_types must have a layer of full_attention")
    values = _with_neomme_rope(values)
    full = [i for i, has_window in enumerate(pattern) if not has_window]
    rotary = read_rotary(values, spec.head_dim)
    windowed = read_rotary(values, spec.head_dim, windowed=True)
    for rotation in (rotary, windowed):
        if rotation is not None and rotation.dim % 4:
            raise CheckpointError(
                f"config.json: partial_rotary_factor rotates {rotation.dim} features of a head; "
                "they must be a multiple of 4"
            )
    given = values.read("residual_multiplier")
    scale = (2 * num_layers) ** -0.5 if given is None else values.positive("residual_multiplier")
    spec = _layers(
        spec,
        rotary=rotary,
        windowed_rotary=windowed,
        window=0,
        window_pattern=(),
        windows=_neomme_windows(values, pattern),
        mixing="layers.{i}.lambdas",
        attended=AttendedSpec(
            alpha="layers.{i}.self_attn.exclusive_self_attention.alpha",
            gate="layers.{i}.self_attn.output_projection.gate_proj",
        ),
        value_table=ValueTableSpec("value_embeddings.weight", frozenset((full[0], full[-1]))),
    )
    return replace(spec, residual_multiplier=scale, always_projects=True)


def _with_neomme_rope(values: Values) -> Values:
    """The values with all that rope_parameters may leave out."""
    given = values.read("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: rope_parameters must be a table, got {given!r:.120}")
    theta, filled = values.config.get("rope_theta"), {}
    for kind, (base, share) in _NEOMME_ROPE.items():
        own = given.get(kind) or {}
        if not isinstance(own, Mapping):
            raise CheckpointError(f"config.json: rope_parameters: {kind} must be a table")
        base = base if theta is None else theta
        filled[kind] = {"rope_theta": base, "partial_rotary_factor": share, **own}
    values = copy(values)
    values.config = {**values.config, "rope_parameters": filled}
    return values


def _neomme_windows(values: Values, pattern: tuple[bool, ...]) -> tuple[int, ...]:
    """The window of each layer, 0 for none: its own of per_layer_config, or that of all; without
    tables every second one with a window has a longer one."""
    given = values.read("per_layer_config")
    if given is None:
        odd = [i for i, has_window in enumerate(pattern) if has_window][1::2]
        given = {i: {"sliding_window": _NEOMME_LONG_WINDOW} for i in odd}
    tables = _layer_tables(given)
    windows = []
    for i, has_window in enumerate(pattern):
        own = tables.get(i, {})
        if not isinstance(own, Mapping) or own.keys() - {"sliding_window"}:
            raise CheckpointError(
                f"config.json: per_layer_config must give layer {i} sliding_window alone, got "
                f"{own!r:.120}"
            )
        radius = own.get("sliding_window", values.read("sliding_window") if has_window else None)
        is_fitting = type(radius) is int and radius > 0 if has_window else radius is None
        if not is_fitting:
            raise CheckpointError(
                f"config.json: the sliding_window of layer {i} must be "
                f"{'a positive integer' if has_window else 'null'}, got {radius!r:.120}"
            )
        windows.append(radius + 1 if has_window else 0)
    return tuple(windows)


def _layer_tables(given: object) -> dict[int, Any]:
    """per_layer_config by the number of a layer, which files write as "5" and, of ten, as "05"."""
    if not isinstance(given, Mapping) or not all(str(i).isdecimal() for i in given):
        raise CheckpointError(
            f"config.json: per_layer_config must have a table for each layer, got {given!r:.120}"
        )
    return {int(i): table for i, table in given.items()}


def opt(values: Values, spec: ModelSpec) -> ModelSpec:
    """The table of positions begins with two unused rows; OPT-350m norms after each half."""
    spec = replace(spec, first_position_row=2)
    is_pre = values.flag("do_layer_norm_before")
    return spec if is_pre else _layers(spec, norm_placement="post")


def openai_privacy_filter(values: Values, spec: ModelSpec) -> ModelSpec:
    """A window has all of it on either side; the gates of experts are cut off."""
    spec, _ = _with_rope(values, spec, _PRIVACY_FILTER_ROPE)
    assert spec.experts is not None  # the family has experts in every layer
    experts = replace(
        spec.experts,
        routes_in_f32=True,
        gate_limit=values.positive("swiglu_limit"),
        gate_alpha=values.positive("swiglu_alpha"),
    )
    if values.config.get("id2label") is None:
        labels = ["O", *(f"{prefix}-{tag}" for tag in _PRIVACY_TAGS for prefix in "BIES")]
        if values.config.get("num_labels", len(labels)) == len(labels):
            spec = replace(spec, id2label=dict(enumerate(labels)))
    window = spec.layer_spec.window
    return replace(_layers(spec, window=window and window + 1), experts=experts)


def qwen3_5(values: Values, spec: ModelSpec) -> ModelSpec:
    """Attended values have gates, whose rows are beside the queries'; one layer in so many has
    attention where no list says it."""
    spec = _layers(spec, gates_queries=True)
    if values.read("layer_types") is not None:
        return spec
    period, num_layers = values.common_size("full_attention_interval"), spec.num_layers
    kinds = [
        "linear_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)
    ]
    mixer = read_mixer(values, spec.family_table, num_layers=num_layers, layer_types=kinds)
    return _layers(spec, mixer=mixer)


def qwen3_5_moe(values: Values, spec: ModelSpec) -> ModelSpec:
    """As qwen3_5, with experts in every layer and one that all tokens share."""
    return _with_shared_expert(values, qwen3_5(values, spec))


def qwen3_next(values: Values, spec: ModelSpec) -> ModelSpec:
    """As qwen3_5_moe, but for layers that have no experts."""
    return _with_shared_expert(values, qwen3_moe(values, qwen3_5(values, spec)))


def _with_shared_expert(values: Values, spec: ModelSpec) -> ModelSpec:
    if spec.experts is None:
        return spec
    size, shared = (
        values.common_size(f"{name}intermediate_size") for name in ("moe_", "shared_expert_")
    )
    return replace(spec, experts=replace(spec.experts, size=size, shared_size=shared))


def qwen3_moe(values: Values, spec: ModelSpec) -> ModelSpec:
    """Experts have a size of their own, and some layers none."""
    if spec.experts is None:
        return spec
    dense = values.read("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise CheckpointError(
            f"config.json: mlp_only_layers must list layers, got {str(dense)[:200]}"
        )
    size = values.common_size("moe_intermediate_size")
    pattern = tuple(has and i not in dense for i, has in enumerate(spec.experts.pattern))
    experts = replace(spec.experts, size=size, pattern=pattern) if any(pattern) else None
    return replace(spec, experts=experts)


def smollm3(values: Values, spec: ModelSpec) -> ModelSpec:
    """Some layers rotate nothing: a list says which, or one in so many."""
    given, num_layers = values.read("no_rope_layers"), spec.num_layers
    if given is None:
        period = values.common_size("no_rope_layer_interval")
        return _layers(spec, rotary_pattern=tuple((i + 1) % period > 0 for i in range(num_layers)))
    if not isinstance(given, list) or len(given) != num_layers or set(given) - {0, 1}:
        raise CheckpointError(
            f"config.json: no_rope_layers must have 1 or 0 for each of {num_layers} layers, "
            f"got {str(given)[:200]}"
        )
    return _layers(spec, rotary_pattern=tuple(map(bool, given)))


def ultrabert(values: Values, spec: ModelSpec) -> ModelSpec:
    """A window has all of it on either side; older files list one for each layer."""
    windows = values.layer_windows() or ()
    window = next((size for size in windows if size), spec.layer_spec.window)
    return _layers(spec, window=window and window + 1)


Hook = Callable[[Values, ModelSpec], ModelSpec]
_HOOKS: tuple[Hook, ...] = (
    albert,
    deberta,
    embedding_gemma2,
    falcon,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_bigcode,
    gpt_neo,
    gpt_neox,
    granite,
    lfm2,
    ministral3,
    modernbert,
    neomme,
    openai_privacy_filter,
    opt,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    smollm3,
    ultrabert,
)
HOOKS = {hook.__name__: hook for hook in _HOOKS}
