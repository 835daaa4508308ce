"""Names of the tensors that a model's layers read, and of those that are copied."""

from collections.abc import Iterator

from bytetx.checkpoint.layer_spec import (
    EXPERT_LINEARS,
    EXPERT_TENSORS,
    HEAD_TENSORS,
    LINEARS,
    ExpertSpec,
    numbered,
)
from bytetx.checkpoint.mixer_spec import MIXER_TENSORS
from bytetx.checkpoint.norm_kinds import NORM_KINDS
from bytetx.checkpoint.spec import ModelSpec


def tensor_names(spec: ModelSpec) -> Iterator[str]:
    """Every name that the layers and the last norm need, lazily."""
    layers = spec.layer_spec
    has_shift = NORM_KINDS[layers.norm].has_shift and layers.norm_bias
    has_final = layers.norm_placement != "post" and layers.norm_scale
    norms = [layers.final["norm"]] if has_final else []
    for stem in norms:
        yield f"{stem}.weight"
        if has_shift:
            yield f"{stem}.bias"
    if layers.disentangled is not None:
        yield spec.embeddings["relative"]
        if layers.disentangled.has_norm:
            yield from (f"{spec.embeddings['relative_norm']}.{part}" for part in ("weight", "bias"))
    if layers.convolution is not None:
        stems = (layers.convolution.linear, layers.convolution.norm)
        yield from (f"{stem}.{part}" for stem in stems for part in ("weight", "bias"))
    own = layers.layer_input
    if own is not None:
        yield from (f"{stem}.weight" for stem in (own.project, own.project_norm))
    if layers.value_table is not None:
        yield layers.value_table.name
    for i in range(spec.num_layers):
        if own is not None:
            yield from own.names(i)
        if layers.attended is not None:
            yield from layers.attended.names(i)
        if layers.mixing:
            yield numbered(layers.mixing, i)
        for key, name in spec.layer_names(i).items():
            if key == "attn_norm" and i == 0 and not layers.has_first_norm:
                continue
            if "norm" in key and not layers.norm_scale:
                continue
            if key in HEAD_TENSORS or key in MIXER_TENSORS:
                yield name
                continue
            if spec.experts is not None and key in spec.experts.layer:
                yield from _expert_names(spec.experts, key, name)
                continue
            yield f"{name}.weight"
            is_head_norm = key in ("q_norm", "k_norm")
            if key in layers.biases or (key not in LINEARS and has_shift and not is_head_norm):
                yield f"{name}.bias"


def copied_tensor_names(spec: ModelSpec) -> Iterator[str]:
    """The names whose tensors a Transformer copies, or computes tables of, where it shares the
    memory of all others."""
    layers, relative = spec.layer_spec, spec.layer_spec.disentangled
    if spec.relative_bias_rows:
        yield spec.embeddings["relative_bias"]
    if layers.convolution is not None:
        yield f"{layers.convolution.linear}.weight"
    if layers.norm_offset:
        yield f"{layers.final['norm']}.weight"
    projections: set[str] = set()
    if relative is not None:
        yield spec.embeddings["relative"]
        if relative.has_norm:
            yield from (f"{spec.embeddings['relative_norm']}.{part}" for part in ("weight", "bias"))
        shared = {"pos_k": "k", "pos_q": "q"}
        projections = {shared[t] if relative.shares_projections else t for t in relative.terms}
    routes_in_f32 = spec.experts is not None and spec.experts.routes_in_f32
    reordered = {"q"} if layers.gates_queries else set()
    if layers.mixer is not None and layers.mixer.is_interleaved:
        reordered |= {"mixer_in", "mixer_decay"}
    for i in range(spec.num_layers):
        if layers.attended is not None:
            yield layers.attended.names(i)[0]
        for key, name in spec.layer_names(i).items():
            is_f32 = routes_in_f32 and key in ("router", "router_bias")
            if key in (*HEAD_TENSORS, *MIXER_TENSORS) or (is_f32 and key == "router_bias"):
                yield name
            elif is_f32 or key in reordered or (layers.norm_offset and "norm" in key):
                yield f"{name}.weight"
            elif key in projections:
                yield from (f"{name}.{part}" for part in ("weight", "bias"))


def _expert_names(experts: ExpertSpec, key: str, name: str) -> Iterator[str]:
    if key in EXPERT_TENSORS:
        yield name
    elif key in EXPERT_LINEARS:
        yield from (f"{name.replace('{e}', str(e))}.weight" for e in range(experts.num_experts))
    else:
        yield f"{name}.weight"
