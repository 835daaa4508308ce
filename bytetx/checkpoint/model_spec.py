"""ModelSpec: sizes, choices and tensor names of one checkpoint, which the forward pass asks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bytetx.checkpoint.layer_spec import (
    ATTENTION_LINEARS,
    FFN_LINEARS,
    ExpertSpec,
    HeadSizes,
    LayerSpec,
    is_gated,
    numbered,
)
from bytetx.checkpoint.quantization import Quantization


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """One head: some rows -> dense -> activation -> norm -> out or decoder.

    second_dense: a layer that reads what dense gives after the activation, and ends in the same
    one.  inner_size: features between the two.
    dense, norm, out: tensor-name stems without `.weight`/`.bias`, or None where the head lacks it.
    decoder, bias (masked_lm, lm): whole tensor names.  dense_bias: whether dense has a bias.
    pooling: the rows of sequence_classification: "cls", the first token; "mean", the mean of all;
    "late", every token, and the mean of their logits; "last", the last token.
    out_bias: whether out has a bias.
    projection: stem of the weight [hidden_size, embedding_size] whose columns lead to the decoder;
    that of the embedding, where the decoder is.
    """

    dense: str | None = None
    second_dense: str | None = None
    inner_size: int = 0
    dense_bias: bool = True
    pooling: str = "cls"
    activation: str | None = None
    norm: str | None = None
    norm_eps: float | None = None
    decoder: str | None = None
    bias: str | None = None
    out: str | None = None
    out_bias: bool = True
    projection: str | None = None


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
    projected_size: features that `project_out` leads to, 0 where that is embedding_size.
    quantization: of the weights in the files; None where they are plain.
    family_table: what the family's TOML file holds.
    num_layers: 0 where the model is a table of token vectors.
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
    first_position_row: int = 0
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
    projected_size: int = 0
    quantization: Quantization | None = None
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

        A layer with experts has theirs in place of a feed-forward's, with {e} for an expert, and
        one with another mixer has its in place of attention's.
        """
        if not self.num_layer_groups:
            stems = dict(self.layer)
            if (experts := self.experts_of(layer)) is not None:
                stems = {key: stem for key, stem in stems.items() if key not in FFN_LINEARS}
                stems |= experts.layer
            if (mixer := self.layer_spec.mixer_of(layer)) is not None:
                attention = {*ATTENTION_LINEARS, "q_norm", "k_norm"}
                stems = {key: stem for key, stem in stems.items() if key not in attention}
                stems |= mixer.layer
            return {key: numbered(stem, layer) for key, stem in stems.items()}
        repeat, inner = divmod(layer, self.layers_per_group)
        repeats = self.num_layers // self.layers_per_group
        group = repeat * self.num_layer_groups // repeats
        return {key: stem.format(group=group, inner=inner) for key, stem in self.layer.items()}

    def experts_of(self, layer: int) -> ExpertSpec | None:
        """The experts that a layer's feed-forward mixes; None where it is dense."""
        return self.experts if self.experts is not None and self.experts.pattern[layer] else None

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention, which have keys and values."""
        mixer = self.layer_spec.mixer
        return self.num_layers - (0 if mixer is None else sum(mixer.pattern))

    @property
    def takes_drafts(self) -> bool:
        """Whether generation can undo a rejected guess: not in a layer without attention."""
        return self.layer_spec.mixer is None

    @property
    def extra_layer(self) -> str | None:
        """The weight that a checkpoint with more layers than config.json says would hold; None
        where no checkpoint of its kind has layers."""
        stem = self.layer.get("attn_out")
        if stem is None:
            return None
        return f"{stem.format(i=self.num_layers, group=self.num_layer_groups, inner=0)}.weight"

    @property
    def num_labels(self) -> int:
        return len(self.id2label)

    @property
    def output_size(self) -> int:
        """Features of the last layer's rows; OPT-350m projects them to embedding_size."""
        if self.projected_size:
            return self.projected_size
        is_projected = "project_out" in self.layer_spec.final
        return self.embedding_size if is_projected else self.hidden_size

    def head_sizes(self, window: int) -> HeadSizes:
        """The heads of layers with this window; 0: without one."""
        full = self.layer_spec.full_heads
        own = HeadSizes(self.num_kv_heads, self.head_dim)
        return own if window or full is None else full

    @property
    def head_dims(self) -> frozenset[int]:
        """Features of a head, in any of the layers."""
        windows = map(self.layer_spec.window_of, range(self.num_layers))
        return frozenset(self.head_sizes(window).head_dim for window in windows)

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
        parallel layer's feed-forward the attention's half, too.  Attention adds qkv and its
        output, the feed-forward the inner rows, a gated one its gates and values as well, before
        they are multiplied by a kernel.  Behind them are the sum and, unless it takes the sum's
        place, its norm.  The embedding holds its sum and what it is projected to.  Five ids a
        token, of four bytes.  Scratch of the kernels' threads (below 1 MiB each, whatever the
        batch) comes on top.
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        sizes = [self.head_sizes(window) for window in (0, 1)]
        qkv = max((self.num_heads + 2 * own.num_kv_heads) * own.head_dim for own in sizes)
        attended = self.num_heads * max(own.head_dim for own in sizes)
        if (mixer := self.layer_spec.mixer) is not None:
            qkv = max(qkv, mixer.in_features(hidden))
            attended = max(attended, mixer.mixed_features(hidden) + mixer.held_features(hidden))
        match self.layer_spec.norm_placement:
            case "post":
                before, half, behind = hidden, 0, 2 * hidden
            case "pre" | "output":
                before, half, behind = 2 * hidden, 0, 4 * hidden
            case _:  # parallel
                before, half, behind = 2 * hidden, hidden, 5 * hidden
        gated = 3 if self.is_gated else 1
        row = max(
            before + qkv + attended,
            before + half + gated * inner,
            behind + max(attended, inner),
            hidden + self.embedding_size,
        )
        if self.experts is not None:
            # Rows for each expert of a token: what they read, both layers' results, and those in
            # the tokens' order; the sum of a token's is in f32.
            width = 3 * hidden + (4 if self.experts.is_gated else 1) * self.experts.size
            if self.experts.gate_limit:  # gates and values in f32, and their sigmoid
                width += 4 * self.experts.size * 4 // itemsize
            # An expert of all tokens runs when the sum is there; its result is in f32, too.
            shared = self.experts.shared_size and 3 * self.experts.shared_size + 2 * hidden
            found = max(self.experts.top_k * width, shared + hidden * 4 // itemsize)
            row = max(row, before + half + found + hidden * 4 // itemsize)
        if (own := self.layer_spec.layer_input) is not None:
            row = max(row, 3 * hidden + 2 * own.size)
        if self.layer_spec.reads_embedded:
            row += hidden
        if self.layer_spec.attended is not None:  # values, their units and the gates, in f32
            row = max(row, before + qkv + 4 * attended)
        return total_tokens * (itemsize * row + 5 * 4)
