"""A model's layers on packed tokens: encoders and causal models, sharded or not, cached or not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bytetx.checkpoint.layer_spec import HeadSizes, QueryGrowth
from bytetx.checkpoint.rope_spec import RotarySpec
from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.between import Between
from bytetx.nn.blocks import Blocks
from bytetx.nn.convolution import Convolution, neighbors
from bytetx.nn.kv_cache import KvCache, LayerCache
from bytetx.nn.layer import DenseFeedForward, LayerWeights, RowPass, Rows
from bytetx.nn.rotary import RotaryTables
from bytetx.ops.attention import VARLEN_ATTENTION, AttentionCalls, require_bias
from bytetx.ops.attention_plan import (
    TREE_KEY_STEP,
    AttentionPlan,
    plan_attention,
    tree_tables,
    tree_tile_rows,
)
from bytetx.ops.check import require_contiguous, require_tensor
from bytetx.ops.disentangled import DISENTANGLED_ATTENTION, has_disentangled_kernel, require_span
from bytetx.ops.embedding import embed
from bytetx.ops.gated import GatedWeight
from bytetx.ops.linear import MAX_FEW_ROWS, LinearWeight
from bytetx.ops.linear_rotary import HeadRotation
from bytetx.ops.norm import RowNorm
from bytetx.ops.paged import PAGED_ATTENTION, WRITE_KV, PagedCalls, fits_restored
from bytetx.ops.paged_plan import EarlyRead, PagedPlan, plan_paged_attention
from bytetx.ops.panels import PanelFinder
from bytetx.ops.rotary_kv import NORM_ROTARY, ROTARY_WRITE_KV, norm_heads
from bytetx.packed import PackedBatch
from bytetx.sequence_tree import SequenceTree

OnLayer = Callable[[torch.Tensor], None]
OnKv = Callable[[torch.Tensor, torch.Tensor], None]
Pause = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Pass(RowPass):
    """State that the layers of one forward pass share."""

    batch: PackedBatch
    # cos, sin, rows of them
    rotations: dict[RotarySpec, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    # By window: what computes attention, chosen once for all layers, and its plan.
    attention: dict[int, tuple[Callable[..., torch.Tensor], AttentionPlan | PagedPlan | None]]
    cache: KvCache | None
    on_kv: OnKv | None
    # [total_tokens, 1, 1], what queries are multiplied by after their rotation; None: nothing.
    growth: torch.Tensor | None


# To look into what oneDNN has laid out takes as long as some short texts; a model that is loaded
# for one of them does without.
_FEW_PASSES = 2


def _is_dense(layer: LayerWeights) -> bool:
    """Whether all matrices of a layer are floats."""
    matrices = [w.fused if isinstance(w, GatedWeight) else w for w in layer.linears]
    is_dense = isinstance(layer.feed_forward, DenseFeedForward)
    return is_dense and all(isinstance(w, LinearWeight) for w in matrices)


def _captures(layer: LayerWeights) -> bool:
    """Whether nothing in place of attention needs the sequence lengths of a step."""
    return layer.mixer is None or layer.mixer.is_capturable


def _cache_places(weights: Sequence[LayerWeights]) -> tuple[list[int], int]:
    """(each layer's place among those that remember alike, in pages or in a state; the number of
    states)"""
    is_mixer = [layer.mixer is not None for layer in weights]
    places = [is_mixer[:i].count(is_mixer[i]) for i in range(len(is_mixer))]
    return places, sum(is_mixer)


def _query_growth(growth: QueryGrowth, batch: PackedBatch, dtype: torch.dtype) -> torch.Tensor:
    """As of _Pass, by the position of each token."""
    periods = torch.log1p((batch.position_ids // growth.period).float())
    return periods.mul_(growth.beta).add_(1).to(dtype)[:, None, None]


def _with_computed(
    k: torch.Tensor, v: torch.Tensor, layer: int, batch: PackedBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v, and behind them those of sequences that earlier steps computed."""
    computed = [one.kv[layer] for one in batch.computed]
    return torch.cat([k, *(kv[0] for kv in computed)]), torch.cat([v, *(kv[1] for kv in computed)])


class Layers:
    """The layers of a model, from embedded tokens to the last norm.

    spec.layer_spec says what each layer computes.  With a cache, a token also attends to the keys
    that the cache holds of its sequence.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Sequence[LayerWeights],
        *,
        blocks: Blocks,
        final_norm: RowNorm | None = None,
        tables: dict[RotarySpec, RotaryTables] | None = None,
        relative_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        buckets: torch.Tensor | None = None,
        convolution: Convolution | None = None,
        between: Sequence[Between | None] = (),
        is_interleaved: bool = False,
        batch_invariant: bool = False,
    ):
        """final_norm: None where the layers are post-norm.  tables: of each rotation that
        spec.layer_spec names.  relative_bias: f32 [num_heads, 2 * max_positions - 1], see
        varlen_attention.  alibi_slopes: f32 [num_heads], the same bias of causal layers over keys
        in pages.  buckets: of disentangled attention, int32 [2 * max_positions - 1].
        between: what comes before the first layer, and follows each; empty: the norms alone.
        is_interleaved: qkv has rows of one key head's q, k and v after another.
        batch_invariant: attention takes one kernel for all batches; the weights say it of theirs.
        """
        self.spec, self.layer_spec, self.blocks = spec, spec.layer_spec, blocks
        self.weights, self.final_norm = list(weights), final_norm
        self.tables = {} if tables is None else tables
        self.relative_bias, self.alibi_slopes = relative_bias, alibi_slopes
        self.is_interleaved = is_interleaved
        self.buckets, self.convolution = buckets, convolution
        self.before, *self.between = list(between) or [None] * (len(self.weights) + 1)
        self._reads_embedded = convolution is not None or spec.layer_spec.reads_embedded
        self.batch_invariant = batch_invariant
        self._norms_projections = spec.layer_spec.norms_projections
        self._places, self._num_states = _cache_places(self.weights)
        self._few_passes = 0
        layer_spec, indices = spec.layer_spec, range(len(self.weights))
        self._scales = [layer_spec.softmax_scale_of(i) for i in indices]
        self._windows = [layer_spec.window_of(i) for i in indices]
        self.windows = set(self._windows)  # 0 where a layer has none
        self._heads = {window: self._head_sizes(window) for window in self.windows}
        self._rotations = [layer_spec.rotary_of(i) for i in indices]
        rotates = [rotation is not None for rotation in self._rotations]
        norms_heads = [layer.q_norm is not None for layer in self.weights]
        # Whether a layer's q and k are not what the product gives; and whether, without pages, they
        # are rotated where they are computed: side by side, and without a norm between.
        self._changes_heads = [norms_heads[i] or rotates[i] for i in indices]
        self._turns = [rotates[i] and not norms_heads[i] and not is_interleaved for i in indices]
        # The norm after each layer: its ffn_norm, or the first norm of the next one, if any.
        self._last_norms = [layer.ffn_norm for layer in self.weights]
        if layer_spec.norm_placement != "post":
            self._last_norms = [*(layer.attn_norm for layer in self.weights[1:]), final_norm]

    def _head_sizes(self, window: int) -> HeadSizes:
        """This rank's heads of layers with a window; 0: without one."""
        own = self.spec.head_sizes(window)
        is_local = self.layer_spec.can_share
        return HeadSizes(self.blocks.num_kv_heads, own.head_dim) if is_local else own

    @property
    def is_capturable(self) -> bool:
        """Dynamic rotary scaling needs the sequence lengths of a step, experts their rows.

        So does disentangled attention in plain torch.
        """
        if self.spec.experts is not None or not all(map(_captures, self.weights)):
            return False
        if self.buckets is not None and not has_disentangled_kernel(self.buckets.device):
            return False
        has_fixed_tables = all(spec.scaling != "dynamic" for spec in self.tables)
        return has_fixed_tables and self.blocks.is_capturable

    def prefix_multiple(self, dtype: torch.dtype, device: torch.device) -> int:
        """As of Transformer, for hidden states of a dtype."""
        has_bias = self.relative_bias is not None or self.buckets is not None
        if not self.layer_spec.causal or has_bias or self.convolution is not None:
            return 0
        if self._num_states:  # a prefix would leave its state, too
            return 0
        calls = AttentionCalls(
            dtype,
            self.spec.head_dim,
            changes_scores=self.layer_spec.softcap > 0,
            has_mask=True,
            is_aligned=self.spec.head_dim * dtype.itemsize % 16 == 0,
            has_tree=True,
        )
        if VARLEN_ATTENTION.choose(device, calls).name not in ("native", "triton"):
            return 0
        if not self.batch_invariant or device.type == "cpu":
            return 1
        # A GPU's steps of keys begin at a sequence's start, but at a tile's in a window.
        return 0 if any(self._windows) else TREE_KEY_STEP

    def tree_tile_rows(self, device: torch.device) -> int:
        """Query rows of a tile of attention in a tree; 0 where there are no tiles."""
        return tree_tile_rows(
            self.spec.head_dim,
            device,
            softcap=self.layer_spec.softcap,
            batch_invariant=self.batch_invariant,
        )

    def tree_tables(
        self, tree: SequenceTree, tile_rows: int, num_tiles: int
    ) -> dict[int, np.ndarray]:
        """By window, int32: the plan of attention in a tree, with places for so many tiles."""
        make = partial(tree_tables, tree, tile_rows, num_tiles=num_tiles)
        return {
            window: make(window=window, batch_invariant=self.batch_invariant)
            for window in self.windows
        }

    def run(
        self,
        embed_tokens: Callable[[], torch.Tensor],
        batch: PackedBatch,
        rows: Rows | None = None,
        *,
        cache: KvCache | None = None,
        on_layer: OnLayer | None = None,
        on_kv: OnKv | None = None,
        pause: Pause | None = None,
        read_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[local rows, hidden_size] -> [total_tokens, hidden_size], after the last norm.

        embed_tokens: returns the embedded tokens; called here, so that no frame above holds them
        while the layers run.  on_layer: called with them and then with each layer's output, the
        last one's after the last norm.  on_kv: without a cache, called with each layer's keys and
        values after rotation, [total_tokens, num_kv_heads, head_dim]; views of all of qkv. Those of
        batch.computed are behind them.
        pause: called before each linear layer; a layer has four.  read_rows: as of
        Transformer.forward; of post-norm layers in one process.
        """
        rows = self.blocks.begin(batch.total_tokens) if rows is None else rows
        self._check(batch, cache)
        placement = self.layer_spec.norm_placement
        gather = self.blocks.weight_gather
        if self._few_passes < _FEW_PASSES and batch.total_tokens <= MAX_FEW_ROWS:
            self._count_few_rows()
        if gather is not None:
            gather.begin()
        x = rows.enter(embed_tokens())
        step = self._prepare(batch, rows, x.dtype, cache, on_kv, pause)
        if on_layer:
            on_layer(self._sums(rows.gather(x)))
        # x is the residual; h is what the next linear layer reads: x itself after a post-norm.
        first_norm = None if placement == "post" else self.weights[0].attn_norm
        h = x if first_norm is None else rows.norm(x, first_norm)
        if self.before is not None:
            h, x = self.before.run(x, x, first_norm)
        convolution = self.convolution
        embedded = x if self._reads_embedded else None
        partial = None
        for i, layer in enumerate(self.weights):
            is_last = i + 1 == len(self.weights)
            if gather is not None:
                gather.enter(i)
            if placement == "parallel":
                partial = self._attention_partial(h, i, step)
                if layer.ffn_norm is not None:
                    h = rows.norm(x, layer.ffn_norm)
            else:
                own = read_rows if is_last and step.is_post else None
                h, x = self._attention_half(h, x, i, step, own)
            # A call of its own, so that the attention's activations are freed before it.
            between, norm = self.between[i], self._last_norms[i]
            sum_norm = norm if between is None else None
            h, x = layer.feed_forward.run(h, x, sum_norm, step, partial=partial)
            partial = None  # the next layer runs without its memory
            if between is not None and embedded is not None:
                h, x = between.run(x, embedded, norm)
            if convolution is not None and embedded is not None:  # DeBERTa's are post-norm
                around = neighbors(rows.gather(embedded), batch.cu_seqlens, convolution.size)
                h = x = convolution.forward(rows.local(around), x)
                embedded = convolution = None
            if on_layer:
                on_layer(rows.gather(h) if is_last else self._sums(rows.gather(x)))
        if gather is not None:
            gather.end()
        if read_rows is not None and len(h) < batch.total_tokens:
            whole = h.new_zeros((batch.total_tokens, h.shape[1]))
            return whole.index_copy_(0, read_rows, h)
        return rows.gather(h)

    def _count_few_rows(self) -> None:
        """Count a pass of few rows; from the last that counts on they run faster, if they can."""
        self._few_passes += 1
        if self._few_passes == _FEW_PASSES:
            finder = PanelFinder()
            for layer in filter(_is_dense, self.weights):
                for w in layer.linears:
                    if w.dense.dtype == torch.float32:
                        finder.find_few_rows(w.dense)

    def _sums(self, x: torch.Tensor) -> torch.Tensor:
        """The sums that x stands for, which the layers divide by residual_multiplier."""
        multiplier = self.spec.residual_multiplier
        return x if multiplier == 1.0 else x * multiplier

    def _check(self, batch: PackedBatch, cache: KvCache | None) -> None:
        if cache is not None and not self.layer_spec.causal:
            raise ValueError("cache must be None: an encoder has no past")
        if (cache is None) != (batch.past is None):
            raise ValueError("cache and batch.past must be given both, or neither")
        rows = {"cu_seqlens": batch.cu_seqlens, "position_ids": batch.position_ids}
        if batch.past is not None:
            past = batch.past
            rows |= {"page_table": past.page_table, "kv_seqlens": past.kv_seqlens}
            rows["slot_mapping"] = past.slot_mapping
        for name, t in rows.items():  # kernels read them by their addresses
            if t is not None and not (t.dtype is torch.int32 and t.is_contiguous()):
                require_tensor(name, t, shape=t.shape, dtypes=(torch.int32,))
                require_contiguous(name, t)
        if cache is not None:
            self._check_cache(batch, cache)
        if self.buckets is not None:
            require_span(self.buckets, batch.max_seqlen)
        if self.relative_bias is not None and cache is None:  # pages have slopes
            require_bias(
                self.relative_bias,
                batch.bias_positions,
                num_heads=self.blocks.num_heads,
                total_tokens=batch.total_tokens,
                max_seqlen=batch.max_seqlen,
                device=batch.device,
            )

    def _check_cache(self, batch: PackedBatch, cache: KvCache) -> None:
        num_layers = len(self.weights) - self._num_states
        if len(cache.layers) != num_layers:
            raise ValueError(
                f"cache must have the model's {num_layers} layers, got {len(cache.layers)}"
            )
        slots = None if batch.past is None else batch.past.state_slots
        if self._num_states and (len(cache.states) != self._num_states or slots is None):
            raise ValueError(
                f"cache must have states of {self._num_states} layers, and batch.past the slots of "
                f"its sequences; got {len(cache.states)} and {slots}"
            )

    def _prepare(
        self,
        batch: PackedBatch,
        rows: Rows,
        dtype: torch.dtype,
        cache: KvCache | None,
        on_kv: OnKv | None,
        pause: Pause | None,
    ) -> _Pass:
        """Choose and plan once what all layers do."""
        rotations = {spec: tables.of(batch) for spec, tables in self.tables.items()}
        attention = {}
        for window in self.windows:
            attention[window] = self._choose_attention(batch, dtype, window, cache)
        is_post = self.layer_spec.norm_placement == "post"
        grows = self.layer_spec.query_growth
        growth = None if grows is None else _query_growth(grows, batch, dtype)
        return _Pass(rows, is_post, pause, batch, rotations, attention, cache, on_kv, growth)

    def _choose_attention(
        self, batch: PackedBatch, dtype: torch.dtype, window: int, cache: KvCache | None
    ) -> tuple[Callable[..., torch.Tensor], AttentionPlan | PagedPlan | None]:
        device, own = batch.device, self._heads[window]
        head_dim = own.head_dim
        heads = (self.blocks.num_heads, own.num_kv_heads, head_dim)
        is_aligned = head_dim * dtype.itemsize % 16 == 0
        has_scale = min(self._scales, default=1.0) > 0
        has_work = batch.total_tokens > 0 and batch.cu_seqlens.shape[0] > 1
        if self.buckets is not None:
            calls = (dtype, head_dim, is_aligned, has_work)
            return DISENTANGLED_ATTENTION.choose(device, *calls).run, None
        if cache is not None and batch.past is not None:
            pages, has_codes = cache.layers[0].k_cache, cache.layers[0].k_scales is not None
            paged = PagedCalls(
                dtype,
                *heads,
                page_size=pages.shape[1],
                decodes=batch.max_seqlen <= 1,
                is_aligned=is_aligned,
                has_scale=has_scale,
                has_work=has_work,
                has_codes=has_codes,
                restores=has_codes
                and fits_restored(pages, len(batch.past.kv_seqlens), batch.past.max_kv_seqlen),
            )
            return PAGED_ATTENTION.choose(device, paged).run, self._plan(batch, window)
        has_bias = self.relative_bias is not None
        packed = AttentionCalls(
            dtype,
            head_dim,
            changes_scores=has_bias or self.layer_spec.softcap > 0,
            has_mask=self.layer_spec.causal or window > 0 or heads[0] != heads[1],
            is_aligned=is_aligned,
            has_scale=has_scale,
            has_work=has_work,
            has_tree=batch.tree is not None,
            has_sinks=self.layer_spec.has_sinks,
        )
        return VARLEN_ATTENTION.choose(device, packed).run, self._plan(batch, window)

    def _plan(self, batch: PackedBatch, window: int) -> AttentionPlan | PagedPlan | None:
        if batch.past is None:
            return plan_attention(
                batch.cu_seqlens,
                total_tokens=batch.total_tokens,
                head_dim=self._heads[window].head_dim,
                causal=self.layer_spec.causal,
                window=window,
                has_bias=self.relative_bias is not None,
                softcap=self.layer_spec.softcap,
                has_sinks=self.layer_spec.has_sinks,
                batch_invariant=self.batch_invariant,
                tree=batch.tree,
                tables=None if batch.tree_tables is None else batch.tree_tables[window],
            )
        return plan_paged_attention(
            batch.cu_seqlens,
            batch.past.kv_seqlens,
            total_tokens=batch.total_tokens,
            max_seqlen=batch.max_seqlen,
            max_kv_seqlen=batch.past.max_kv_seqlen,
            num_heads=self.blocks.num_heads,
            num_kv_heads=self._heads[window].num_kv_heads,
            head_dim=self._heads[window].head_dim,
            window=window,
            batch_invariant=self.batch_invariant,
        )

    def _attention_half(
        self,
        h: torch.Tensor,
        x: torch.Tensor,
        i: int,
        step: _Pass,
        read_rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """read_rows: those of the result, the others are left out; None: all."""
        layer = self.weights[i]
        norm = layer.attn_norm if step.is_post else layer.ffn_norm
        if step.pause is not None:
            step.pause()
        if layer.mixer is None:
            attended = self._attention(h, layer, i, step)
        else:
            state = None if step.cache is None else step.cache.states[self._places[i]]
            projected = step.rows.column_parallel(h, layer.qkv)
            attended = layer.mixer.mix(projected, step.batch, state)
        if read_rows is not None:
            attended, x = attended.index_select(0, read_rows), x.index_select(0, read_rows)
        return step.add_and_norm(attended, layer.attn_out, x, norm, layer.attn_out_norm)

    def _attention_partial(self, h: torch.Tensor, i: int, step: _Pass) -> torch.Tensor:
        """The attention's half of a parallel layer, which its other half adds."""
        if step.pause is not None:
            step.pause()
        attended = self._attention(h, self.weights[i], i, step)
        if step.pause is not None:
            step.pause()
        return step.rows.row_parallel_partial(attended, self.weights[i].attn_out)

    def _project(
        self, h: torch.Tensor, layer: LayerWeights, i: int, step: _Pass, *, turns: bool
    ) -> tuple[torch.Tensor, ...]:
        """A layer's q, k and v, each [total_tokens, heads, head_dim]; views of one tensor.

        turns: whether q and k are rotated here.
        """
        own = self._heads[self._windows[i]]
        if turns:
            qkv = step.rows.project_heads(h, layer.qkv, self._head_rotation(i, step))
        else:
            qkv = step.rows.column_parallel(h, layer.qkv)
        if self.is_interleaved:
            qkv = self._separate(qkv)
        heads = [self.blocks.num_heads, own.num_kv_heads, own.num_kv_heads]
        q, k, v = qkv.unflatten(1, (-1, own.head_dim)).split(heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None and self._norms_projections:
            q, k = step.rows.norm_projections(q, k, layer.q_norm, layer.k_norm)
        if layer.v_norm is not None:
            v = norm_heads(v, layer.v_norm.weight, layer.v_norm.eps)
        if layer.value_table is not None:
            ids, bad_ids = step.batch.input_ids, step.batch.bad_ids
            v = v + embed(ids, None, None, word=layer.value_table, bad_ids=bad_ids).view(v.shape)
        return q, k, v

    def _attention(self, h: torch.Tensor, layer: LayerWeights, i: int, step: _Pass) -> torch.Tensor:
        """Attended values [total_tokens, num_heads * head_dim], before the output projection."""
        batch, turns = step.batch, step.cache is None and self._turns[i]
        q, k, v = self._project(h, layer, i, step, turns=turns)
        attend, plan = step.attention[self._windows[i]]
        if self.buckets is not None:
            tables = (layer.pos_k, layer.pos_q, self.buckets, batch.cu_seqlens)
            return attend(q, k, v, *tables, softmax_scale=self._scales[i]).flatten(1)
        options = {
            "max_seqlen": batch.max_seqlen,
            "softmax_scale": self._scales[i],
            "window": self._windows[i],
            "softcap": self.layer_spec.softcap,
            "plan": plan,
            "out": None,
        }
        if step.cache is not None:
            past, cache = batch.past, step.cache.layers[self._places[i]]
            assert past is not None  # _check has seen to it
            q = self._write_kv(q, k, v, layer, i, step, cache)
            q = q if step.growth is None else q * step.growth
            attended = attend(
                q,
                cache.k_cache,
                cache.v_cache,
                cu_seqlens=batch.cu_seqlens,
                page_table=past.page_table,
                kv_seqlens=past.kv_seqlens,
                max_kv_seqlen=past.max_kv_seqlen,
                alibi_slopes=self.alibi_slopes,
                k_scales=cache.k_scales,
                v_scales=cache.v_scales,
                batch_invariant=self.batch_invariant,
                # The kernel right before this one is _write_kv's, which waits for those before it.
                early_read=EarlyRead.KEYS if past.allows_early_read else EarlyRead.TABLES,
                **options,
            )
        else:
            if self._changes_heads[i] and not turns:
                q, k = self._rotate(q, k, layer, i, step)
            q = q if step.growth is None else q * step.growth
            if batch.computed:
                k, v = _with_computed(k, v, i, batch)
            if step.on_kv is not None:
                step.on_kv(k, v)
            attended = attend(
                q,
                k,
                v,
                batch.cu_seqlens,
                causal=self.layer_spec.causal,
                relative_bias=self.relative_bias,
                bias_positions=batch.bias_positions,
                sinks=layer.sinks,
                **options,
            )
        if layer.attended is None:
            return attended.flatten(1)
        return layer.attended.run(attended, v, h, step.rows.column_parallel)

    def _head_rotation(self, i: int, step: _Pass) -> HeadRotation:
        """That of a layer's q and k, which lie side by side."""
        rotation = self._rotations[i]
        assert rotation is not None  # _turns says so
        own = self._heads[self._windows[i]]
        return HeadRotation(
            *step.rotations[rotation],
            num_heads=self.blocks.num_heads + own.num_kv_heads,
            head_dim=own.head_dim,
            is_interleaved=rotation.is_interleaved,
        )

    def _separate(self, qkv: torch.Tensor) -> torch.Tensor:
        """Features of q, then k, then v, of a weight whose groups of heads take turns."""
        num_kv_heads, head_dim = self.spec.num_kv_heads, self.spec.head_dim
        group = self.spec.num_heads // num_kv_heads
        by_group = qkv.view(-1, num_kv_heads, group + 2, head_dim)
        return torch.cat([part.flatten(1) for part in by_group.split([group, 1, 1], dim=2)], 1)

    def _rotate(
        self, q: torch.Tensor, k: torch.Tensor, layer: LayerWeights, i: int, step: _Pass
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k after their norms and the rotation."""
        rotation, eps = self._rotations[i], self.spec.norm_eps
        norms = (self._head_weight(layer.q_norm), self._head_weight(layer.k_norm))
        if rotation is not None:
            run, angles = NORM_ROTARY.choose(q.device).run, step.rotations[rotation]
            q, k = run(q, k, *angles, is_interleaved=rotation.is_interleaved, norms=norms, eps=eps)
        elif norms[0] is not None and norms[1] is not None:
            q, k = norm_heads(q, norms[0], eps), norm_heads(k, norms[1], eps)
        return q, k

    def _write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: LayerWeights,
        i: int,
        step: _Pass,
        cache: LayerCache,
    ) -> torch.Tensor:
        """q after its norm and rotation; writes k, after the same, and v into their pages."""
        assert step.batch.past is not None  # _check has seen to it
        slots, has_codes = step.batch.past.slot_mapping, cache.k_scales is not None
        rotation = self._rotations[i]
        if rotation is None:
            q, k = self._rotate(q, k, layer, i, step)
            pages = (cache.k_cache, cache.v_cache, slots, cache.k_scales, cache.v_scales)
            WRITE_KV.choose(k.device, has_codes).run(k, v, *pages)
            return q
        rotated: torch.Tensor = ROTARY_WRITE_KV.choose(q.device, has_codes).run(
            q,
            k,
            v,
            *step.rotations[rotation],
            cache.k_cache,
            cache.v_cache,
            slots,
            is_interleaved=rotation.is_interleaved,
            q_norm=self._head_weight(layer.q_norm),
            k_norm=self._head_weight(layer.k_norm),
            eps=self.spec.norm_eps,
            k_scales=cache.k_scales,
            v_scales=cache.v_scales,
        )
        return rotated

    def _head_weight(self, norm: RowNorm | None) -> torch.Tensor | None:
        """The weight of a norm of each head; None where there is none."""
        return None if norm is None or self._norms_projections else norm.weight
