"""Decode steps of a CPU as one native call, for the models whose layers it computes."""

import torch

from bytetx.nn.blocks import LocalBlocks
from bytetx.nn.kv_cache import KvCache, LayerCache
from bytetx.nn.layer import DenseFeedForward, LayerWeights
from bytetx.nn.layers import Layers
from bytetx.nn.transformer import Transformer
from bytetx.ops.cpu_decode_step import CpuDecodeStep, CpuStepWeights, why_no_cpu_step
from bytetx.ops.gated import GatedWeight
from bytetx.ops.grouped_linear import GroupedWeight
from bytetx.ops.linear import LinearWeight, linear
from bytetx.ops.native import has_row_kernel
from bytetx.ops.native_params import CpuStepLayer, PanelMatrix, StepNorm
from bytetx.ops.norm import RmsNorm, RowNorm
from bytetx.ops.paged import PAGED_ATTENTION, PagedCalls
from bytetx.ops.panels import PanelFinder
from bytetx.ops.weight import Weight
from bytetx.packed import PackedBatch

# More rows are bound by multiply-adds, in which oneDNN is as fast, and pay Python once for many.
MAX_SEQUENCES = 64


# Choices of LayerSpec that the kernel computes, or that are in the weights.
_CHOICES = frozenset(
    {
        *("scales_by_layer", "windowed_rotary", "rotary_pattern", "softcap", "alibi"),
        *("norm_bias", "has_first_norm", "norm_offset"),
    }
)


class CpuSteps:
    """Runs a model's layers for the next tokens of some sequences; see `of` for which models.

    Its results have the bits of Transformer.forward.
    """

    def __init__(self, transformer: Transformer, step: CpuDecodeStep):
        self._transformer, self._step = transformer, step

    @classmethod
    def of(cls, transformer: Transformer, cache: KvCache) -> "CpuSteps | None":
        """None where the kernel does not compute what the layers do."""
        weights = step_weights(transformer, cache)
        if weights is None:
            return None
        return cls(transformer, CpuDecodeStep(weights, cache.layers[0].k_cache))

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Transformer.forward with the cache, for a batch of one token a sequence."""
        past = batch.past
        assert past is not None and batch.position_ids is not None  # a decode step has both
        hidden = self._step(
            self._transformer.embed(batch),
            position_ids=batch.position_ids,
            cu_seqlens=batch.cu_seqlens,
            kv_seqlens=past.kv_seqlens,
            slot_mapping=past.slot_mapping,
            page_table=past.page_table,
        )
        project_out = self._transformer.project_out
        return hidden if project_out is None else linear(hidden, project_out)


def step_weights(transformer: Transformer, cache: KvCache) -> CpuStepWeights | None:
    """The model's weights and pages as the kernel takes them; None where its layers do more.

    It has pre-norm layers without experts, whose matrices have panels, and pages of its dtype.
    """
    spec, layers = transformer.spec, transformer.layers
    word = transformer.embeddings.word
    if word.device.type != "cpu" or why_no_cpu_step() is not None or not _is_plain(layers):
        return None
    if transformer.placement is not None or layers.final_norm is None:
        return None
    calls = PagedCalls(
        word.dtype,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        page_size=cache.page_size,
    )
    if cache.has_codes or PAGED_ATTENTION.choose(word.device, calls).name != "native":
        return None
    if not all(
        has_row_kernel(word.device, word.dtype, n) for n in (spec.hidden_size, spec.head_dim)
    ):
        return None
    reader = _LayerReader(layers)
    found = []
    for i, (weights, pages) in enumerate(zip(layers.weights, cache.layers, strict=True)):
        layer = reader.layer(i, weights, pages)
        if layer is None:
            return None
        found.append(layer)
    return CpuStepWeights(
        tuple(found),
        (layers, cache),
        _norm(layers.final_norm),
        dtype=word.dtype,
        hidden_size=spec.hidden_size,
        inner_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        gate_block=layers.weights[0].feed_forward.linears[0].block,
        head_norm_eps=spec.norm_eps,
        softcap=layers.layer_spec.softcap,
        activation=spec.activation,
        alibi_slopes=layers.alibi_slopes,
        batch_invariant=layers.batch_invariant,
    )


def _is_plain(layers: Layers) -> bool:
    spec = layers.layer_spec
    has_dynamic = any(rotation.scaling == "dynamic" for rotation in layers.tables)
    return (
        spec.causal
        and spec.norm_placement in ("pre", "output")
        and spec.chooses_only(_CHOICES)
        and type(layers.blocks) is LocalBlocks
        and not layers.is_interleaved
        and not has_dynamic
    )


class _LayerReader:
    def __init__(self, layers: Layers):
        self._layers = layers
        self._panels = PanelFinder()

    def layer(self, i: int, w: LayerWeights, pages: LayerCache) -> CpuStepLayer | None:
        half = w.feed_forward
        if not isinstance(half, DenseFeedForward) or w.attn_norm is None or w.ffn_norm is None:
            return None
        qkv, attn_out, ffn_in, ffn_out = map(self._matrix, w.linears)
        if qkv is None or attn_out is None or ffn_in is None or ffn_out is None:
            return None
        has_activation = half.first.block == 0 and half.activation != "none"
        if has_activation and not _activates_alike(half.first):
            return None
        rotation = self._layers.layer_spec.rotary_of(i)
        tables = None if rotation is None else self._layers.tables[rotation]
        return CpuStepLayer(
            qkv=qkv,
            attn_out=attn_out,
            ffn_in=ffn_in,
            ffn_out=ffn_out,
            attn_norm=_norm(w.attn_norm),
            attn_out_norm=_norm(w.attn_out_norm),
            ffn_norm=_norm(w.ffn_norm),
            ffn_out_norm=_norm(half.out_norm),
            q_norm=None if w.q_norm is None else w.q_norm.weight,
            k_norm=None if w.k_norm is None else w.k_norm.weight,
            k_cache=pages.k_cache,
            v_cache=pages.v_cache,
            cos=None if tables is None else tables.cos,
            sin=None if tables is None else tables.sin,
            num_positions=0 if tables is None else tables.cos.shape[0],
            num_pairs=0 if tables is None else tables.cos.shape[1],
            is_interleaved=rotation is not None and rotation.is_interleaved,
            window=self._layers.layer_spec.window_of(i),
            softmax_scale=self._layers.layer_spec.softmax_scale_of(i),
        )

    def _matrix(self, w: Weight) -> PanelMatrix | None:
        matrix = w.fused if isinstance(w, GatedWeight) else w
        if isinstance(matrix, GroupedWeight):
            return matrix.panels
        return self._panels.find(matrix) if isinstance(matrix, LinearWeight) else None


def _activates_alike(w: Weight) -> bool:
    """Whether the kernel that runs many rows computes activations as ours do, bit for bit."""
    return isinstance(w, GroupedWeight) or w.dense.weight.dtype == torch.int32  # it is ours


def _norm(norm: RowNorm | None) -> StepNorm:
    if norm is None:
        return StepNorm()
    return StepNorm(norm.weight, norm.bias, norm.eps, isinstance(norm, RmsNorm))
