"""Decode steps of one sequence as one kernel, for the models that have it."""

from torch import Tensor

from bytetx.nn.blocks import LocalBlocks
from bytetx.nn.kv_cache import KvCache, LayerCache
from bytetx.nn.layer import LayerWeights
from bytetx.nn.transformer import Transformer
from bytetx.ops.decode_step import StepLayer, StepWeights, decode_step, make_workspace
from bytetx.ops.gated import BLOCK
from bytetx.ops.weight import Weight
from bytetx.packed import PackedBatch

# Choices of LayerSpec that are in the weights, or that step_weights looks at itself.
_CHOICES = frozenset(
    {
        *("scales_by_layer", "windowed_rotary", "rotary_pattern"),
        *("norm_bias", "has_first_norm", "norm_offset"),
    }
)


class OneSequence:
    """Runs a model's layers for the new token of one sequence; see `of` for which models.

    Its steps run one after another, on one stream.
    """

    def __init__(self, transformer: Transformer, weights: StepWeights):
        self._transformer, self._weights = transformer, weights
        self._workspace = make_workspace(weights)

    @classmethod
    def of(cls, transformer: Transformer, cache: KvCache) -> "OneSequence | None":
        """None where the kernel does not compute what the layers do, or has not their sizes."""
        weights = step_weights(transformer, cache)
        if weights is None or weights.workspace_bytes == 0:
            return None
        return cls(transformer, weights)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Transformer.forward with the cache, which it writes: hidden states [1, hidden_size]."""
        past = batch.past
        assert past is not None and batch.position_ids is not None  # a decode step has both
        return decode_step(
            self._transformer.embed(batch),
            self._weights,
            position_ids=batch.position_ids,
            kv_seqlens=past.kv_seqlens,
            slot_mapping=past.slot_mapping,
            page_table=past.page_table,
            workspace=self._workspace,
        )


def step_weights(transformer: Transformer, cache: KvCache) -> StepWeights | None:
    """The model's weights and pages as the kernel takes them; None where its layers do more.

    It has pre-norm layers with RMS norms and a SiLU gate, without biases but qkv's, windows or
    experts, whose heads turn by one rotary table; all weights in this process, and pages of their
    dtype.
    """
    spec, layers = transformer.spec, transformer.layers
    layer_spec, numbers = layers.layer_spec, range(spec.num_layers)
    rotations = {layer_spec.rotary_of(i) for i in numbers}
    scales = {layer_spec.softmax_scale_of(i) for i in numbers}
    rotation = rotations.pop()
    is_plain = (
        layer_spec.causal
        and layer_spec.norm_placement == "pre"
        and layer_spec.norm == "rms_norm"
        and spec.activation == "silu"
        and layer_spec.chooses_only(_CHOICES)
        and not any(layer_spec.window_of(i) for i in numbers)
        and layers.relative_bias is None
        and spec.experts is None
        and not cache.has_codes
    )
    is_local = (
        type(layers.blocks) is LocalBlocks
        and not layers.is_interleaved
        and not layers.batch_invariant
        and transformer.project_out is None
        and spec.residual_multiplier == 1.0
    )
    if not is_plain or not is_local or rotations or len(scales) > 1 or rotation is None:
        return None
    if rotation.is_interleaved or rotation.scaling == "dynamic":
        return None
    of_layers = [
        _step_layer(weights, pages)
        for weights, pages in zip(layers.weights, cache.layers, strict=True)
    ]
    found = tuple(layer for layer in of_layers if layer is not None)
    if len(found) < len(of_layers) or layers.final_norm is None:
        return None
    tables = layers.tables[rotation]
    return StepWeights(
        found,
        layers.final_norm.weight,
        tables.cos,
        tables.sin,
        eps=spec.norm_eps,
        softmax_scale=scales.pop(),
    )


def _step_layer(w: LayerWeights, pages: LayerCache) -> StepLayer | None:
    first, *rest = w.linears
    qkv, (attn_out, ffn_in, ffn_out) = _matrix(first), map(_plain, rest)
    if qkv is None or attn_out is None or ffn_in is None or ffn_out is None:
        return None
    if w.feed_forward.linears[0].block != BLOCK:
        return None
    if w.attn_norm is None or w.ffn_norm is None:
        return None
    return StepLayer(
        qkv,
        attn_out,
        ffn_in,
        ffn_out,
        w.attn_norm.weight,
        w.ffn_norm.weight,
        None if w.q_norm is None else w.q_norm.weight,
        None if w.k_norm is None else w.k_norm.weight,
        w.qkv.dense.bias,
        pages.k_cache,
        pages.v_cache,
    )


def _plain(w: Weight) -> Tensor | None:
    """The matrix of a weight without a bias."""
    matrix = _matrix(w)
    return None if matrix is None or w.dense.bias is not None else matrix


def _matrix(w: Weight) -> Tensor | None:
    """The matrix, where it has the layout that the kernel takes."""
    return w.dense.weight if w.is_plain else None
