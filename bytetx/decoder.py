"""Causal blocks on packed rows: pre-norm, post-norm and parallel, with a past or without."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bytetx.cache import KvCache, LayerCache
from bytetx.decoder_spec import LINEARS
from bytetx.ops.attention import varlen_attention
from bytetx.ops.attention_plan import AttentionPlan, plan_attention
from bytetx.ops.gated import GatedWeight, gated_linear
from bytetx.ops.linear import LinearWeight, fuses_residual, linear
from bytetx.ops.norm import layer_norm, rms_norm
from bytetx.ops.paged import paged_attention, write_kv
from bytetx.ops.rotary import rotary
from bytetx.packed import PackedBatch
from bytetx.rotary import RotaryTables, rotary_tables
from bytetx.spec import ModelSpec
from bytetx.tensors import NormWeight, TensorLoader

OnLayer = Callable[[torch.Tensor], None]
OnKv = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights; ffn_norm is None where a parallel block has one norm for both halves."""

    attn_norm: NormWeight
    qkv: LinearWeight  # rows of q, then k, then v, unless the decoder is_interleaved
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    attn_out: LinearWeight
    ffn_norm: NormWeight | None
    ffn_in: LinearWeight | GatedWeight
    ffn_out: LinearWeight


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the layers of one forward pass share."""

    batch: PackedBatch
    rotation: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # cos, sin, rows of them
    plans: dict[int, AttentionPlan | None]  # by window
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
        is_interleaved: bool = False,
    ):
        """is_interleaved: qkv has rows of q, k and v of each head in turn."""
        assert spec.decoder is not None
        self.spec, self.own, self.layers = spec, spec.decoder, layers
        self.final_norm, self.tables = final_norm, tables
        self.is_interleaved = is_interleaved

    @property
    def is_capturable(self) -> bool:
        """Dynamic rotary scaling asks for the lengths of a step's texts."""
        return self.own.rotary is None or self.own.rotary.scaling != "dynamic"

    def run(
        self,
        embed_tokens: Callable[[], torch.Tensor],
        batch: PackedBatch,
        *,
        cache: KvCache | None = None,
        on_layer: OnLayer | None = None,
        on_kv: OnKv | None = None,
    ) -> torch.Tensor:
        """[total_tokens, hidden_size] -> the same, after the last norm.

        embed_tokens: gives the first rows; called where they are used up, so that no frame above
        holds them.  on_layer: called with them and then each layer's output, the last one's after
        the last norm.  on_kv: called with each layer's keys and values, rotated, [total_tokens,
        num_kv_heads, head_dim]; what it keeps of them keeps the whole rows.
        """
        step = self._prepare(batch, cache, on_kv)
        run = self._run_post if self.own.norm_placement == "post" else self._run_pre
        return run(embed_tokens, step, on_layer)

    def _prepare(self, batch: PackedBatch, cache: KvCache | None, on_kv: OnKv | None) -> _Pass:
        if (cache is None) != (batch.past is None):
            raise ValueError("cache and batch.past must be given both, or neither")
        if cache is not None and len(cache.layers) != len(self.layers):
            raise ValueError(
                f"cache must have the model's {len(self.layers)} layers, got {len(cache.layers)}"
            )
        plans = {}
        if cache is None:
            for window in {self.own.window_of(i) for i in range(len(self.layers))}:
                plans[window] = plan_attention(
                    batch.cu_seqlens,
                    total_tokens=batch.total_tokens,
                    head_dim=self.spec.head_dim,
                    has_bias=False,
                    causal=True,
                    window=window,
                )
        rotation = None if self.tables is None else self.tables.of(batch)
        return _Pass(batch, rotation, plans, cache, on_kv)

    def _run_pre(
        self, embed_tokens: Callable[[], torch.Tensor], step: _Pass, on_layer: OnLayer | None
    ) -> torch.Tensor:
        """Pre-norm and parallel: x is the sum so far, and each norm adds what came before it."""
        assert self.final_norm is not None  # families say so
        x = embed_tokens()
        if on_layer:
            on_layer(x)
        is_parallel = self.own.norm_placement == "parallel"
        normed = self._norm(x, self.layers[0].attn_norm)
        for i, layer in enumerate(self.layers):
            following = self.layers[i + 1].attn_norm if i + 1 < len(self.layers) else None
            attended = self._attention(normed, layer, i, step)
            if is_parallel:
                if layer.ffn_norm is not None:
                    normed = self._norm(x, layer.ffn_norm)
                inner = self._feed_forward(normed, layer)
                d = linear(inner, layer.ffn_out, residual=linear(attended, layer.attn_out))
                normed, x = self._add_norm(d, x, following or self.final_norm)
            else:
                assert layer.ffn_norm is not None
                normed, x = self._project(attended, layer.attn_out, x, layer.ffn_norm)
                inner = self._feed_forward(normed, layer)
                normed, x = self._project(inner, layer.ffn_out, x, following or self.final_norm)
            if on_layer:
                on_layer(normed if following is None else x)
        return normed

    def _run_post(
        self, embed_tokens: Callable[[], torch.Tensor], step: _Pass, on_layer: OnLayer | None
    ) -> torch.Tensor:
        x = embed_tokens()
        if on_layer:
            on_layer(x)
        for i, layer in enumerate(self.layers):
            assert layer.ffn_norm is not None
            x, _ = self._project(
                self._attention(x, layer, i, step), layer.attn_out, x, layer.attn_norm
            )
            x, _ = self._project(self._feed_forward(x, layer), layer.ffn_out, x, layer.ffn_norm)
            if on_layer:
                on_layer(x)
        return x

    def _attention(
        self, normed: torch.Tensor, layer: DecoderLayer, i: int, step: _Pass
    ) -> torch.Tensor:
        """Attended values [total_tokens, num_heads * head_dim], before the output projection."""
        q, k, v = self._heads(linear(normed, layer.qkv), layer, step)
        if step.on_kv is not None:
            step.on_kv(k, v)
        batch, cache = step.batch, step.cache
        scale, window = self.own.softmax_scale_of(i), self.own.window_of(i)
        if cache is not None:
            attended = _attend_paged(q, k, v, batch, cache.layers[i], scale=scale, window=window)
        else:
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
        return attended.view(-1, self.spec.num_heads * self.spec.head_dim)

    def _heads(
        self, qkv: torch.Tensor, layer: DecoderLayer, step: _Pass
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v [total_tokens, heads, head_dim]: views of qkv, normed and rotated."""
        spec = self.spec
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        if self.is_interleaved:
            by_head = qkv.view(-1, spec.num_heads, 3, spec.head_dim)
            qkv = by_head.transpose(1, 2).reshape(qkv.shape)
        q, k, v = qkv.unflatten(1, (-1, spec.head_dim)).split(heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm_heads(q, layer.q_norm), self._norm_heads(k, layer.k_norm)
        if step.rotation is not None and self.own.rotary is not None:
            cos, sin, rows = step.rotation
            for x in (q, k):
                rotary(x, cos, sin, rows, is_interleaved=self.own.rotary.is_interleaved)
        return q, k, v

    def _norm_heads(self, x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
        rows = x.reshape(-1, self.spec.head_dim)
        return rms_norm(rows, norm.weight, eps=self.spec.norm_eps).view(x.shape)

    def _feed_forward(self, normed: torch.Tensor, layer: DecoderLayer) -> torch.Tensor:
        """The inner rows [total_tokens, intermediate_size]."""
        activation = self.spec.activation
        if isinstance(layer.ffn_in, GatedWeight):
            return gated_linear(normed, layer.ffn_in, activation=activation)
        return linear(normed, layer.ffn_in, activation=activation)

    def _project(
        self, x: torch.Tensor, weight: LinearWeight, residual: torch.Tensor, norm: NormWeight
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(h), h) of h = x @ weight.T + bias + residual; whichever adds for less adds."""
        if fuses_residual(x.shape[0], weight):
            h = linear(x, weight, residual=residual)
            return self._norm(h, norm), h
        return self._add_norm(linear(x, weight), residual, norm)

    def _add_norm(
        self, d: torch.Tensor, residual: torch.Tensor, norm: NormWeight
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(d + residual), d + residual); the sum takes d's place."""
        return self._norm(d, norm, residual=residual, sum_out=d), d

    def _norm(
        self,
        x: torch.Tensor,
        norm: NormWeight,
        *,
        residual: torch.Tensor | None = None,
        sum_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        options = {"eps": self.spec.norm_eps, "residual": residual, "sum_out": sum_out}
        if self.own.norm == "rms_norm":
            return rms_norm(x, norm.weight, **options)
        return layer_norm(x, norm.weight, norm.bias, **options)


def _attend_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: PackedBatch,
    cache: LayerCache,
    *,
    scale: float,
    window: int,
) -> torch.Tensor:
    """This step's keys and values into their pages, then attention over all that is there."""
    past = batch.past
    assert past is not None  # _prepare saw to it
    write_kv(k, v, cache.k_cache, cache.v_cache, past.slot_mapping)
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
    )


def load_decoder(spec: ModelSpec, load: TensorLoader) -> Decoder:
    """The layers from named tensors, which tensor_names lists; raises as TensorLoader does."""
    assert spec.decoder is not None
    reader = _LayerReader(spec, load)
    rotary_spec, final_norm = spec.decoder.rotary, None
    if spec.decoder.norm_placement != "post":
        final_norm = reader.norm(spec.decoder.final["norm"], spec.hidden_size)
    tables = None
    if rotary_spec is not None:
        options = {"max_positions": spec.max_positions, "device": load.device}
        tables = rotary_tables(rotary_spec, **options)
    layers = [reader.layer(i) for i in range(spec.num_layers)]
    return Decoder(
        spec,
        layers,
        final_norm=final_norm,
        tables=tables,
        is_interleaved=load.shares and spec.decoder.qkv == "interleaved",
    )


def tensor_names(spec: ModelSpec) -> Iterator[str]:
    """Every name that the layers and the last norm need, lazily."""
    own = spec.decoder
    assert own is not None
    has_shift = own.norm == "layer_norm"
    norms = [own.final["norm"]] if own.norm_placement != "post" else []
    for stem in norms:
        yield f"{stem}.weight"
        if has_shift:
            yield f"{stem}.bias"
    for i in range(spec.num_layers):
        for key, stem in spec.layer.items():
            name = stem.format(i=i)
            yield f"{name}.weight"
            is_head_norm = key in ("q_norm", "k_norm")
            if key in own.biases or (key not in LINEARS and has_shift and not is_head_norm):
                yield f"{name}.bias"


class _LayerReader:
    """Reads one layer after the other in the layout that the family saves."""

    def __init__(self, spec: ModelSpec, load: TensorLoader):
        assert spec.decoder is not None
        self.spec, self.own, self.load = spec, spec.decoder, load

    def layer(self, i: int) -> DecoderLayer:
        spec = self.spec
        names = {key: stem.format(i=i) for key, stem in spec.layer.items()}
        hidden, attended = spec.hidden_size, spec.num_heads * spec.head_dim
        norms = {
            key: self.norm(names[key], hidden) for key in ("attn_norm", "ffn_norm") if key in names
        }
        head_norms = {
            key: NormWeight(self.load.tensor(f"{names[key]}.weight", (spec.head_dim,)), None)
            for key in ("q_norm", "k_norm")
            if key in names
        }
        return DecoderLayer(
            attn_norm=norms["attn_norm"],
            qkv=self._qkv(names),
            q_norm=head_norms.get("q_norm"),
            k_norm=head_norms.get("k_norm"),
            attn_out=self._linear(names, "attn_out", hidden, attended),
            ffn_norm=norms.get("ffn_norm"),
            ffn_in=self._ffn_in(names),
            ffn_out=self._linear(names, "ffn_out", hidden, spec.intermediate_size),
        )

    def norm(self, stem: str, size: int) -> NormWeight:
        if self.own.norm == "layer_norm":
            return self.load.norm(stem, size)
        return NormWeight(self.load.tensor(f"{stem}.weight", (size,)), None)

    def _qkv(self, names: dict[str, str]) -> LinearWeight:
        spec = self.spec
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        if self.own.qkv == "separate":
            rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
            parts = [self._tensors(names, key, n, spec.hidden_size) for key, n in rows.items()]
            return self.load.fused_linear(parts)
        weight, bias = self._tensors(names, "qkv", q_rows + 2 * kv_rows, spec.hidden_size)
        if self.own.qkv == "interleaved" and not self.load.shares:
            weight = self._by_kind(weight)
            bias = None if bias is None else self._by_kind(bias)
        return self.load.linear_from(weight, bias)

    def _by_kind(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of (q, k, v) of each head in turn -> all of q, then k, then v; a copy."""
        by_head = rows.unflatten(0, (self.spec.num_heads, 3, self.spec.head_dim))
        return by_head.transpose(0, 1).reshape(rows.shape)

    def _ffn_in(self, names: dict[str, str]) -> LinearWeight | GatedWeight:
        inner, hidden = self.spec.intermediate_size, self.spec.hidden_size
        if "ffn_gate" not in names:
            return self._linear(names, "ffn_in", inner, hidden)
        gate, gate_bias = self._tensors(names, "ffn_gate", inner, hidden)
        up, up_bias = self._tensors(names, "ffn_in", inner, hidden)
        return self.load.gated(gate, up, gate_bias, up_bias)

    def _linear(self, names: dict[str, str], key: str, n: int, k: int) -> LinearWeight:
        return self.load.linear_from(*self._tensors(names, key, n, k))

    def _tensors(
        self, names: dict[str, str], key: str, n: int, k: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [n, k] and bias [n] or None, whichever way round the weight is saved."""
        is_turned = self.own.weight_layout == "conv1d"
        weight = self.load.tensor(f"{names[key]}.weight", (k, n) if is_turned else (n, k))
        if is_turned:
            weight = weight.t().contiguous()
        if key not in self.own.biases:
            return weight, None
        return weight, self.load.tensor(f"{names[key]}.bias", (n,))
