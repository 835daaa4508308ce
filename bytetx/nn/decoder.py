"""Causal blocks on packed rows: pre-norm, post-norm and parallel, with a past or without."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.blocks import Blocks, NormWeight, OutWeight, Rows
from bytetx.nn.kv_cache import KvCache, LayerCache
from bytetx.nn.rotary import RotaryTables
from bytetx.ops.attention import varlen_attention
from bytetx.ops.attention_plan import AttentionPlan, plan_attention
from bytetx.ops.gated import GatedWeight
from bytetx.ops.linear import LinearWeight
from bytetx.ops.paged import paged_attention, write_kv
from bytetx.ops.paged_plan import PagedPlan, Settled, plan_paged_attention
from bytetx.ops.rotary import rotary
from bytetx.ops.rotary_kv import norm_heads, rotary_write_kv
from bytetx.packed import PackedBatch

OnLayer = Callable[[torch.Tensor], None]
OnKv = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights; ffn_norm is None where a parallel block has one norm for both halves."""

    attn_norm: NormWeight
    qkv: LinearWeight  # rows of q, then k, then v, unless the decoder is_interleaved
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    attn_out: OutWeight
    ffn_norm: NormWeight | None
    ffn_in: LinearWeight | GatedWeight
    ffn_out: OutWeight


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the layers of one forward pass share."""

    batch: PackedBatch
    rows: Rows
    rotation: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # cos, sin, rows of them
    plans: dict[int, AttentionPlan | PagedPlan | None]  # by window; paged with a cache
    cache: KvCache | None
    on_kv: OnKv | None


class Decoder:
    """The layers of a causal model, from embedded tokens to the last norm.

    A row sees the rows before it in its sequence and, with a cache, the keys that it holds of them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: list[DecoderLayer],
        *,
        final_norm: NormWeight | None,
        tables: RotaryTables | None,
        blocks: Blocks,
        is_interleaved: bool = False,
    ):
        """is_interleaved: qkv has rows of q, k and v of each head in turn."""
        assert spec.decoder is not None
        self.blocks = blocks
        self.spec, self.own, self.layers = spec, spec.decoder, layers
        self.final_norm, self.tables = final_norm, tables
        self.is_interleaved = is_interleaved

    @property
    def is_capturable(self) -> bool:
        """Dynamic rotary scaling asks for the lengths of a step's texts."""
        has_fixed_tables = self.own.rotary is None or self.own.rotary.scaling != "dynamic"
        return has_fixed_tables and self.blocks.is_capturable

    def run(
        self,
        embed_tokens: Callable[[], torch.Tensor],
        batch: PackedBatch,
        rows: Rows,
        *,
        cache: KvCache | None = None,
        on_layer: OnLayer | None = None,
        on_kv: OnKv | None = None,
    ) -> torch.Tensor:
        """[own rows, hidden_size] -> [total_tokens, hidden_size], after the last norm.

        embed_tokens: gives the first rows; called where they are used up, so that no frame above
        holds them.  on_layer: called with them and then each layer's output, the last one's after
        the last norm.  on_kv: without a cache, called with each layer's keys and values, rotated,
        [total_tokens, num_kv_heads, head_dim]; what it keeps of them keeps the whole rows.
        """
        step = self._prepare(batch, rows, cache, on_kv)
        run = self._run_post if self.own.norm_placement == "post" else self._run_pre
        return rows.whole(run(embed_tokens, step, on_layer))

    def _prepare(
        self, batch: PackedBatch, rows: Rows, cache: KvCache | None, on_kv: OnKv | None
    ) -> _Pass:
        if (cache is None) != (batch.past is None):
            raise ValueError("cache and batch.past must be given both, or neither")
        if cache is not None and len(cache.layers) != len(self.layers):
            raise ValueError(
                f"cache must have the model's {len(self.layers)} layers, got {len(cache.layers)}"
            )
        windows = {self.own.window_of(i) for i in range(len(self.layers))}
        plans = {window: self._plan(batch, window) for window in windows}
        rotation = None if self.tables is None else self.tables.of(batch)
        return _Pass(batch, rows, rotation, plans, cache, on_kv)

    def _plan(self, batch: PackedBatch, window: int) -> AttentionPlan | PagedPlan | None:
        sizes = {"total_tokens": batch.total_tokens, "head_dim": self.spec.head_dim}
        if batch.past is None:
            return plan_attention(batch.cu_seqlens, causal=True, window=window, **sizes)
        return plan_paged_attention(
            batch.cu_seqlens,
            batch.past.kv_seqlens,
            max_seqlen=batch.max_seqlen,
            max_kv_seqlen=batch.past.max_kv_seqlen,
            num_heads=self.blocks.num_heads,
            num_kv_heads=self.blocks.num_kv_heads,
            window=window,
            **sizes,
        )

    def _run_pre(
        self, embed_tokens: Callable[[], torch.Tensor], step: _Pass, on_layer: OnLayer | None
    ) -> torch.Tensor:
        """Pre-norm and parallel: x is the sum so far, and each norm adds what came before it."""
        assert self.final_norm is not None  # families say so
        rows, x = step.rows, embed_tokens()
        if on_layer:
            on_layer(rows.whole(x))
        is_parallel = self.own.norm_placement == "parallel"
        normed = rows.norm(x, self.layers[0].attn_norm)
        for i, layer in enumerate(self.layers):
            is_last = i + 1 == len(self.layers)
            following = self.final_norm if is_last else self.layers[i + 1].attn_norm
            attended = self._attention(normed, layer, i, step)
            if is_parallel:
                if layer.ffn_norm is not None:
                    normed = rows.norm(x, layer.ffn_norm)
                inner = rows.column(normed, layer.ffn_in, activation=self.spec.activation)
                half = rows.partial(attended, layer.attn_out)
                options = {"residual": x, "norm": following, "partial": half}
            else:
                assert layer.ffn_norm is not None
                options = {"residual": x, "norm": layer.ffn_norm}
                normed, x = rows.project(attended, layer.attn_out, **options)
                inner = rows.column(normed, layer.ffn_in, activation=self.spec.activation)
                options = {"residual": x, "norm": following}
            normed, x = rows.project(inner, layer.ffn_out, **options)
            if on_layer:
                on_layer(rows.whole(normed if is_last else x))
        return normed

    def _run_post(
        self, embed_tokens: Callable[[], torch.Tensor], step: _Pass, on_layer: OnLayer | None
    ) -> torch.Tensor:
        rows, x = step.rows, embed_tokens()
        if on_layer:
            on_layer(rows.whole(x))
        for i, layer in enumerate(self.layers):
            assert layer.ffn_norm is not None
            attended = self._attention(x, layer, i, step)
            x, _ = rows.project(attended, layer.attn_out, residual=x, norm=layer.attn_norm)
            inner = rows.column(x, layer.ffn_in, activation=self.spec.activation)
            x, _ = rows.project(inner, layer.ffn_out, residual=x, norm=layer.ffn_norm)
            if on_layer:
                on_layer(rows.whole(x))
        return x

    def _attention(
        self, normed: torch.Tensor, layer: DecoderLayer, i: int, step: _Pass
    ) -> torch.Tensor:
        """Attended values [total_tokens, num_heads * head_dim], before the output projection."""
        batch, blocks = step.batch, self.blocks
        heads = [blocks.num_heads, blocks.num_kv_heads, blocks.num_kv_heads]
        qkv = self._by_kind(step.rows.column(normed, layer.qkv))
        q, k, v = qkv.unflatten(1, (-1, self.spec.head_dim)).split(heads, dim=1)  # views
        scale, window = self.own.softmax_scale_of(i), self.own.window_of(i)
        if step.cache is not None:
            cache = step.cache.layers[i]
            q = self._write(q, k, v, layer, step, cache)
            attended = _attend_paged(q, step, cache, scale=scale, window=window)
        else:
            q, k = self._turn(q, k, layer, step)
            if step.on_kv is not None:
                step.on_kv(k, v)
            attended = varlen_attention(
                q,
                k,
                v,
                batch.cu_seqlens,
                max_seqlen=batch.max_seqlen,
                softmax_scale=scale,
                causal=True,
                window=window,
                plan=step.plans[window],
            )
        return attended.flatten(1)

    def _by_kind(self, qkv: torch.Tensor) -> torch.Tensor:
        """Features of q, then k, then v, wherever the weight has them."""
        if not self.is_interleaved:
            return qkv
        by_head = qkv.view(-1, self.spec.num_heads, 3, self.spec.head_dim)
        return by_head.transpose(1, 2).reshape(qkv.shape)

    def _turn(
        self, q: torch.Tensor, k: torch.Tensor, layer: DecoderLayer, step: _Pass
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k, normed and turned."""
        if layer.q_norm is not None and layer.k_norm is not None:
            norms, eps = (layer.q_norm, layer.k_norm), self.spec.norm_eps
            q, k = (norm_heads(x, n.weight, eps) for x, n in zip((q, k), norms, strict=True))
        if step.rotation is not None and self.own.rotary is not None:
            for x in (q, k):
                rotary(x, *step.rotation, is_interleaved=self.own.rotary.is_interleaved)
        return q, k

    def _write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: DecoderLayer,
        step: _Pass,
        cache: LayerCache,
    ) -> torch.Tensor:
        """q, normed and turned; k, normed and turned, and v are in their pages then."""
        assert step.batch.past is not None  # _prepare saw to it
        places = (cache.k_cache, cache.v_cache, step.batch.past.slot_mapping)
        if step.rotation is None or self.own.rotary is None:
            q, k = self._turn(q, k, layer, step)
            write_kv(k, v, *places)
            return q
        return rotary_write_kv(
            q,
            k,
            v,
            *step.rotation,
            *places,
            is_interleaved=self.own.rotary.is_interleaved,
            q_norm=None if layer.q_norm is None else layer.q_norm.weight,
            k_norm=None if layer.k_norm is None else layer.k_norm.weight,
            eps=self.spec.norm_eps,
        )


def _attend_paged(
    q: torch.Tensor, step: _Pass, cache: LayerCache, *, scale: float, window: int
) -> torch.Tensor:
    """Attention over all keys that lie in the pages, this step's among them."""
    batch, past = step.batch, step.batch.past
    assert past is not None  # _prepare saw to it
    return paged_attention(
        q,
        cache.k_cache,
        cache.v_cache,
        cu_seqlens=batch.cu_seqlens,
        page_table=past.page_table,
        kv_seqlens=past.kv_seqlens,
        max_seqlen=batch.max_seqlen,
        max_kv_seqlen=past.max_kv_seqlen,
        softmax_scale=scale,
        window=window,
        plan=step.plans[window],
        # Right before this runs _write's kernel, which waits for those before it.
        settled=Settled.KEYS if past.is_settled else Settled.TABLES,
    )
