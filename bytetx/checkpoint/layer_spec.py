"""The layers of a model: norms, positions, windows, biases, the layout of tensors."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from bytetx.checkpoint.config import Values
from bytetx.checkpoint.mixer_spec import (
    CONVOLUTIONS,
    LAYER_TYPES,
    MIXER_LINEARS,
    MixerSpec,
    read_mixer,
)
from bytetx.checkpoint.rope_spec import RotarySpec, read_rotary
from bytetx.errors import CheckpointError

# Layer keys of [layer] that are linear layers, by the part that one choice of biases covers.
QKV_LINEARS = ("q", "k", "v", "qkv")
ATTENTION_LINEARS = (*QKV_LINEARS, "attn_out")
FFN_LINEARS = ("ffn_gate", "ffn_gate_up", "ffn_up_gate", "ffn_in", "ffn_out")
RELATIVE_LINEARS = ("pos_k", "pos_q")
LINEARS = (*ATTENTION_LINEARS, *FFN_LINEARS, *RELATIVE_LINEARS, *MIXER_LINEARS, *CONVOLUTIONS)
# Of [sparse_layer]: stems with {e} for an expert; whole names of tensors of all experts.
EXPERT_LINEARS = ("expert_gate", "expert_in", "expert_out")
EXPERT_TENSORS = (
    *("experts_in", "experts_out", "experts_gate_up", "experts_down", "experts_bias"),
    *("experts_gate_up_bias", "experts_down_bias", "router_bias"),
)
# Keys of [layer] that are whole names of tensors, each with a number or more for a head.
HEAD_TENSORS = ("q_bias", "v_bias", "sinks")

# Activations that a gate may have; bytetx.ops.gated runs each of them.
_GATES = ("gelu", "gelu_tanh", "silu")

# Each head has a number for each distance, and no tensor confirms how many there are.
_MAX_ALIBI_POSITIONS = 1 << 20

_LOCAL = "sliding_attention"


@dataclass(frozen=True, slots=True)
class DisentangledSpec:
    """Relative positions of disentangled attention; see ops.disentangled.

    terms: those of "pos_k" and "pos_q" that scores have.  log_buckets: of one direction, 0 where
    every distance is a bucket of its own.  max_distance: the largest distance that differs from
    those beyond it.  shares_projections: positions take the layer's own projections of q and k.
    has_norm: whether the table of positions has a norm.
    """

    terms: frozenset[str]
    log_buckets: int
    max_distance: int
    shares_projections: bool
    has_norm: bool

    @property
    def num_buckets(self) -> int:
        """Rows of the table of positions."""
        return 2 * (self.log_buckets or self.max_distance)


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A convolution over the embedded tokens, added to the output of the first layer.

    size: tokens, odd.  linear, norm: tensor-name stems.
    """

    size: int
    activation: str
    linear: str
    norm: str


@dataclass(frozen=True, slots=True)
class AlibiSpec:
    """By how much scores fall with the distance of two tokens, by a slope of each head.

    dtype: that the slopes are rounded to.  scale: that they are multiplied by then.
    """

    dtype: str = "float32"
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Rotated queries are multiplied by 1 + beta * ln(1 + floor(position / period))."""

    beta: float
    period: int


def numbered(name: str, layer: int) -> str:
    """A layer's name of a tensor; families write {i} for the layer."""
    return name.replace("{i}", str(layer))


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Heads of keys and values, and the features of each head."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LayerInputSpec:
    """A part of the embedded tokens that ends each layer: see nn.between.LayerInput.

    size: features of a token that a layer has of its own.  project, project_norm: tensor-name
    stems, the first one's rows those of the first layer, then of the second.  gate, out, out_norm:
    stems, and scale a whole name, with {i} for the layer.
    """

    size: int
    project: str
    project_norm: str
    gate: str
    out: str
    out_norm: str
    scale: str

    def names(self, layer: int) -> tuple[str, ...]:
        """The tensors that this layer has of its own."""
        stems = (self.gate, self.out, self.out_norm)
        names = (*(f"{stem}.weight" for stem in stems), self.scale)
        return tuple(numbered(name, layer) for name in names)


@dataclass(frozen=True, slots=True)
class AttendedSpec:
    """Changes of attended values before they are projected: see nn.attended.Attended.

    alpha: a whole name, gate: a stem, with {i} for the layer.
    """

    alpha: str
    gate: str

    def names(self, layer: int) -> tuple[str, str]:
        """The tensors of a layer: alpha, and the gate's weight."""
        return numbered(self.alpha, layer), f"{numbered(self.gate, layer)}.weight"


@dataclass(frozen=True, slots=True)
class ValueTableSpec:
    """A table of the vocabulary's values, which some layers add to their own.

    name: of the tensor [vocab_size, features of all key heads].
    """

    name: str
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Choices of a model's layers, beyond the sizes of ModelSpec.

    causal: no token attends to a later one.  norm_placement: pre, post, output or parallel.
    norm: layer_norm or rms_norm.  norm_bias: whether layer norms have a bias.
    has_first_norm: whether the first layer has a norm before its attention, of pre-norm layers.
    rotary: None without rotary positions.  windowed_rotary: of windowed layers, where it differs.
    rotary_pattern: whether each layer rotates, or empty where all do.
    qkv: separate, stacked or interleaved.  qk_norm: of each head, or of the whole projection.
    weight_layout: linear [n, k] or conv1d [k, n].
    biases: layer keys whose linear layers have one.
    window: of windowed layers, as of ops.attention, 0 where none is; window_pattern: whether each
    layer is windowed, or empty where all from first_windowed_layer on are.
    softmax_scale: of the first layer; scales_by_layer: that of layer i is 1 / (i + 1) of it.
    final: stems of the last norm and projection.
    disentangled: None where scores compare contents alone.
    softcap: of attention scores, as of ops.attention; 0: none.
    norm_offset: what is added to the weights of RMS norms.
    alibi: None where scores do not fall with the distance of two tokens.
    query_growth: None where queries do not grow with their position.
    full_heads: of layers without a window, where these have other heads than ModelSpec says.
    norms_values: whether each head of values has an RMS norm without a weight.
    layer_input: None where layers do not add of the embedded tokens.
    norm_scale: whether norms have weights.
    windows: of each layer, in place of window and its pattern; empty: these say it.
    mixing: the tensor [2] of each layer, with {i} for it, that its attention's norm reads the sum
    and the embedded tokens by; "": the sum alone.
    attended: None where attended values are projected as they are.
    value_table: None where no layer adds values of the vocabulary.
    has_sinks: whether the softmax of a row's scores has one more, a number of each head.
    mixer: of the layers without attention; None where every layer has it.
    gates_queries: whether rows of q are a head's queries and then as many gates of its result.
    """

    causal: bool
    norm_placement: str
    norm: str
    rotary: RotarySpec | None
    qkv: str
    weight_layout: str
    biases: frozenset[str]
    window: int
    window_pattern: tuple[bool, ...]
    first_windowed_layer: int
    softmax_scale: float
    final: Mapping[str, str]
    scales_by_layer: bool = False
    windowed_rotary: RotarySpec | None = None
    rotary_pattern: tuple[bool, ...] = ()
    norm_bias: bool = True
    has_first_norm: bool = True
    qk_norm: str = "head"
    disentangled: DisentangledSpec | None = None
    convolution: ConvolutionSpec | None = None
    softcap: float = 0.0
    norm_offset: float = 0.0
    alibi: AlibiSpec | None = None
    query_growth: QueryGrowth | None = None
    full_heads: HeadSizes | None = None
    norms_values: bool = False
    layer_input: LayerInputSpec | None = None
    norm_scale: bool = True
    windows: tuple[int, ...] = ()
    mixing: str = ""
    attended: AttendedSpec | None = None
    value_table: ValueTableSpec | None = None
    has_sinks: bool = False
    mixer: MixerSpec | None = None
    gates_queries: bool = False

    def chooses_only(self, known: Collection[str]) -> bool:
        """Whether every choice that may be left out is left out, but those of these names.

        A kernel of whole layers names what it computes; a choice that is added later it refuses.
        """
        optional = (field for field in fields(self) if field.default is not MISSING)
        return all(f.name in known or getattr(self, f.name) == f.default for f in optional)

    @property
    def norms_projections(self) -> bool:
        """Whether q_norm and k_norm are of all heads together, and not of each head."""
        return self.qk_norm == "projection"

    @property
    def can_share(self) -> bool:
        """Whether ranks can have parts of the layers."""
        extras = (self.full_heads, self.layer_input, self.attended, self.value_table)
        return not self.mixing and all(extra is None for extra in extras)

    @property
    def reads_embedded(self) -> bool:
        """Whether layers read the embedded tokens beside the sum of those before them."""
        return bool(self.mixing) or self.layer_input is not None

    @property
    def can_divide_hidden(self) -> bool:
        """Whether ranks can have a part of the hidden features each (the axis x)."""
        return self.disentangled is None and self.convolution is None and self.mixer is None

    def mixer_of(self, layer: int) -> MixerSpec | None:
        """The mixer of a layer in place of attention; None where it has attention."""
        return self.mixer if self.mixer is not None and self.mixer.pattern[layer] else None

    def window_of(self, layer: int) -> int:
        """The window of this layer, as of ops.attention.varlen_attention; 0: no limit."""
        if self.windows:
            return self.windows[layer]
        if self.window_pattern:
            return self.window if self.window_pattern[layer] else 0
        return self.window if layer >= self.first_windowed_layer else 0

    def rotary_of(self, layer: int) -> RotarySpec | None:
        if self.rotary_pattern and not self.rotary_pattern[layer]:
            return None
        is_windowed = self.window_of(layer) > 0 and self.windowed_rotary is not None
        return self.windowed_rotary if is_windowed else self.rotary

    def softmax_scale_of(self, layer: int) -> float:
        return self.softmax_scale / (layer + 1) if self.scales_by_layer else self.softmax_scale


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """The experts of layers whose feed-forward is a mixture of them.

    size: features inside an expert.  top_k: experts of a token.  normalizes: whether a token's
    weights of its experts are divided by their sum.  pattern: whether each layer has experts.
    layer: names of their tensors, with {i} for the layer and {e} for an expert.
    is_transposed: whether tensors that hold all experts are [experts, inputs, outputs].
    routes_in_f32: whether routers multiply in float32, whatever the dtype.
    gate_limit, gate_alpha: as of ops.gated.clamped_gate, where the limit is not 0.
    shared_size: features inside an expert that every token goes through besides; 0: there is none.
    """

    num_experts: int
    top_k: int
    size: int
    normalizes: bool
    pattern: tuple[bool, ...]
    layer: Mapping[str, str]
    is_transposed: bool = False
    routes_in_f32: bool = False
    gate_limit: float = 0.0
    gate_alpha: float = 1.0
    shared_size: int = 0

    @property
    def are_apart(self) -> bool:
        """Whether each expert's matrices are tensors of their own."""
        return "expert_in" in self.layer

    @property
    def is_gated(self) -> bool:
        return bool({"expert_gate", "experts_gate_up"} & self.layer.keys())


def read_experts(
    values: Values, table: Mapping[str, Any], *, num_layers: int, intermediate_size: int
) -> ExpertSpec | None:
    """The experts that config.json asks for; None for a family without, or where no layer has
    some."""
    if "sparse_layer" not in table:
        return None
    num_experts, top_k = values.size("num_experts"), values.size("experts_per_token")
    if values.activation() == "relu2":
        raise CheckpointError(f"config.json: {values.activation_key} relu2 is not for experts")
    if top_k > num_experts:
        raise CheckpointError(
            f"config.json: {values.names['experts_per_token']} {top_k} is more than the "
            f"{num_experts} experts"
        )
    period = values.size("sparse_period", default=1)
    pattern = tuple((i + 1) % period == 0 for i in range(num_layers))
    if not any(pattern):
        return None
    return ExpertSpec(
        num_experts=num_experts,
        top_k=top_k,
        size=intermediate_size,
        normalizes=values.switch("normalizes_experts", True),
        pattern=pattern,
        layer=table["sparse_layer"],
        is_transposed=table["architecture"].get("expert_layout") == "conv1d",
    )


def read_layers(
    values: Values, table: Mapping[str, Any], *, num_layers: int, head_dim: int, activation: str
) -> LayerSpec:
    """The choices of a checkpoint's layers. Raises CheckpointError for those that nothing runs."""
    architecture = table["architecture"]
    has_gate = is_gated(table["layer"]) or "expert_gate" in table.get("sparse_layer", {})
    if has_gate and activation not in _GATES:
        raise CheckpointError(
            f"config.json: {values.activation_key} means {activation!r}, this family's gate "
            f"must be one of {', '.join(_GATES)}"
        )
    scale = architecture.get("softmax_scale", head_dim**-0.5)
    causal = architecture.get("causal", False)
    pattern = _window_pattern(values, num_layers)
    return LayerSpec(
        causal=causal and not is_bidirectional(values, table),
        norm_placement=architecture["norm_placement"],
        norm=architecture["norm"],
        rotary=read_rotary(values, head_dim, pattern=pattern),
        windowed_rotary=read_rotary(values, head_dim, windowed=True, pattern=pattern),
        qk_norm=architecture.get("qk_norm", "head"),
        qkv=architecture.get("qkv", "separate"),
        weight_layout=architecture.get("weight_layout", "linear"),
        biases=_biases(values, {**table["layer"], **table.get("mixer_layer", {})}),
        window=_window(values, is_unmasked=causal and is_bidirectional(values, table)),
        window_pattern=pattern,
        first_windowed_layer=_first_windowed_layer(values),
        softmax_scale=scale,
        final=table.get("final", {}),
        norm_offset=float(architecture.get("norm_offset", 0)),
        norm_scale=architecture.get("norm_scale", True),
        alibi=read_alibi(values) if architecture["positions"] == "alibi" else None,
        has_sinks="sinks" in table["layer"],
        mixer=read_mixer(values, table, num_layers=num_layers, layer_types=None),
    )


def is_bidirectional(values: Values, table: Mapping[str, Any]) -> bool:
    """Whether a causal family's config.json says that every token sees its whole sequence: by its
    keys, or by the names of code that computes so."""
    if not values.switch("is_causal", True) or values.switch("is_bidirectional", False):
        return True
    names = table.get("bidirectional", ())
    auto_map, classes = values.read("auto_map"), values.read("architectures")
    codes = auto_map.values() if isinstance(auto_map, Mapping) else ()
    given = [values.read("model_type"), *(classes if isinstance(classes, list | tuple) else ())]
    given += [str(code).rpartition("--")[2].rpartition(".")[2] for code in codes]
    return any(str(name).startswith(tuple(names)) for name in given)


def is_gated(layer: Mapping[str, str]) -> bool:
    """Whether the feed-forward of a family's [layer] has a gate."""
    return bool({"ffn_gate", "ffn_gate_up", "ffn_up_gate"} & layer.keys())


def _biases(values: Values, layer: Mapping[str, str]) -> frozenset[str]:
    """The family's own list, then what config.json switches on or off for a part."""
    present = {key for key in LINEARS if key in layer}
    found = present & set(values.architecture.get("biases", LINEARS))
    parts = {
        "attention_bias": ATTENTION_LINEARS,
        "qkv_bias": QKV_LINEARS,
        "ffn_bias": FFN_LINEARS,
        "linear_bias": LINEARS,
        "mixer_bias": (*MIXER_LINEARS, *CONVOLUTIONS),
    }
    for name, keys in parts.items():
        if name in values.names:
            part = present & set(keys)
            found = found | part if values.switch(name, True) else found - part
    return frozenset(found)


def _window(values: Values, *, is_unmasked: bool) -> int:
    """is_unmasked: a causal family's, whose window then has tokens on both sides."""
    window = values.size_or_none("window") if values.switch("uses_window", True) else None
    if window is None:
        return 0
    return window + 1 if is_unmasked else window


def _first_windowed_layer(values: Values) -> int:
    key = values.names.get("first_windowed_layer")
    if key is None:
        return 0
    value = values.read(key)
    if type(value) is not int or value < 0:
        raise CheckpointError(f"config.json: {key} must be an integer from 0, got {value!r}")
    return value


def _window_pattern(values: Values, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer is windowed, where config.json lists the layers; else empty."""
    key = values.names.get("layer_types")
    given = None if key is None else values.read(key)
    windows = values.layer_windows()
    if given is None and windows is not None:
        return tuple(window > 0 for window in windows)
    if given is None and "global_attention_period" in values.names:
        period = values.size("global_attention_period")
        first = 1 if values.architecture.get("global_layer") == "last" else 0
        return tuple((i + first) % period > 0 for i in range(num_layers))
    if given is None:
        return ()
    kinds = given if isinstance(given, list) else None
    known = [_LOCAL, "full_attention"]
    if (mixer := values.architecture.get("mixer")) is not None:
        known.append(LAYER_TYPES[mixer])
    if kinds is None or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise CheckpointError(
            f"config.json: {key} must name {num_layers} layers' attention, each one of "
            f"{', '.join(known)}, got {str(given)[:200]}"
        )
    pattern = tuple(kind == _LOCAL for kind in kinds)
    if any(pattern) and "window" in values.names and not _window(values, is_unmasked=False):
        raise CheckpointError(
            f"config.json: {key} has {_LOCAL}, and {values.names['window']}, or the switch beside "
            "it, says that no layer has a window; correct one of them"
        )
    if windows is not None and pattern != tuple(window > 0 for window in windows):
        raise CheckpointError(
            f"config.json: {key} and {values.names['layer_windows']} differ in the layers that "
            f"have a window, got {str(given)[:200]} and {str(windows)[:200]}; leave one of them out"
        )
    return pattern


def read_alibi(values: Values) -> AlibiSpec:
    """Raises CheckpointError for more positions than slopes are computed for."""
    positions = values.max_positions(0)
    if positions > _MAX_ALIBI_POSITIONS:
        raise CheckpointError(
            f"config.json: {values.names['max_position_embeddings']} must be at most "
            f"{_MAX_ALIBI_POSITIONS} with ALiBi, got {positions}"
        )
    return AlibiSpec()
