"""A model's layers from named tensors, all of them or the shard of one rank."""

from functools import partial
from typing import TYPE_CHECKING

import torch

from bytetx.checkpoint.layer_spec import ExpertSpec, HeadSizes
from bytetx.checkpoint.mixer_spec import MixerSpec
from bytetx.checkpoint.saved_tensor import Part
from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.alibi import model_slopes
from bytetx.nn.attended import load_attended
from bytetx.nn.between import load_between
from bytetx.nn.blocks import Blocks
from bytetx.nn.convolution import load_convolution
from bytetx.nn.head_rows import separate_heads
from bytetx.nn.layer import DenseFeedForward, ExpertFeedForward, FeedForward, LayerWeights
from bytetx.nn.layers import Layers
from bytetx.nn.mixers import load_mixer, rows_in_order
from bytetx.nn.quantization import weight_format
from bytetx.nn.relative_positions import load_buckets, load_positions, project_positions
from bytetx.nn.rotary import rotary_tables
from bytetx.nn.shared_expert import load_shared_expert
from bytetx.nn.tensors import Matrix, TensorLoader
from bytetx.ops.coded_rows import GROUP
from bytetx.ops.experts import ExpertsWeight, stack_experts
from bytetx.ops.gated import GatedWeight, in_turn
from bytetx.ops.group_rows import GroupRows
from bytetx.ops.linear import prepack_linear
from bytetx.ops.norm import RowNorm
from bytetx.ops.weight import Weight
from bytetx.parallel.layout import features

if TYPE_CHECKING:  # it imports what only processes that share a model need
    from bytetx.nn.weight_gather import LayerShard

# Weight and bias of a linear layer.
_Tensors = tuple[Matrix, torch.Tensor | None]


def load_layers(
    spec: ModelSpec,
    load: TensorLoader,
    *,
    blocks: Blocks,
    relative_bias: torch.Tensor | None = None,
    quantization: str | None = None,
) -> Layers:
    """The layers from named tensors, which tensor_names lists; raises as TensorLoader does.

    blocks: of layers that are sharded, only the local shard is read.
    quantization: of what the layers multiply.
    """
    layer_spec, final_norm, indices = spec.layer_spec, None, range(spec.num_layers)
    positions = load_positions(spec, load)
    reader = _LayerReader(spec, load, blocks, positions=positions, quantization=quantization)
    if layer_spec.norm_placement != "post":
        final_norm = reader.norm(layer_spec.final["norm"], spec.hidden_size)
    weights = reader.layers()
    # Made last: by now the tensors have shown that the sizes are true.
    rotations = {layer_spec.rotary_of(i) for i in indices} - {None}
    tables = {
        rotation: rotary_tables(rotation, max_positions=spec.max_positions, device=load.device)
        for rotation in rotations
        if rotation is not None
    }
    return Layers(
        spec,
        weights,
        blocks=blocks,
        final_norm=final_norm,
        tables=tables,
        relative_bias=relative_bias,
        alibi_slopes=_alibi_slopes(spec, load, blocks),
        buckets=load_buckets(spec, load.device),
        convolution=load_convolution(spec, load),
        between=load_between(spec, load),
        is_interleaved=load.shares and layer_spec.qkv == "interleaved",
        batch_invariant=load.batch_invariant,
    )


def _alibi_slopes(spec: ModelSpec, load: TensorLoader, blocks: Blocks) -> torch.Tensor | None:
    """ALiBi's slopes of this rank's heads."""
    slopes, shard = model_slopes(spec, load.device), blocks.shard
    if slopes is None or shard is None:
        return slopes
    return slopes[shard.heads.start : shard.heads.stop].contiguous()


# Norms of whole rows.
_NORMS = ("attn_norm", "attn_out_norm", "ffn_norm", "ffn_out_norm")


class _LayerReader:
    """Reads one layer after the other in the layout that the family saves."""

    def __init__(
        self,
        spec: ModelSpec,
        load: TensorLoader,
        blocks: Blocks,
        *,
        positions: torch.Tensor | None = None,
        quantization: str | None = None,
    ):
        """positions: the table of relative positions of disentangled attention."""
        self.positions = positions
        values = spec.layer_spec.value_table
        self.value_layers = frozenset() if values is None else values.layers
        self.values: torch.Tensor | None = None
        if values is not None:
            width = spec.num_kv_heads * spec.head_dim
            self.values = load.tensor(values.name, (spec.vocab_size, width))
        self.spec, self.layer_spec, self.shard = spec, spec.layer_spec, blocks.shard
        self.hidden, self.weight_gather = blocks.hidden, blocks.weight_gather
        self.format = None if quantization is None else weight_format(quantization, spec)
        # Plain weights are divided, or rounded, before they are laid out for a CPU.
        is_last_layout = (self.format, self.hidden, self.weight_gather) == (None, None, None)
        self.load = load if is_last_layout else load.plain()
        bits = None if self.format is None else self.format.coded_bits
        if bits is not None and self._takes_codes():
            self.load, self.format = self.load.coded(bits), None
        keeps_fp8 = self.format is not None and self.format.keeps_fp8
        if keeps_fp8 and spec.experts is None and self._takes_rows():
            self.load = self.load.in_fp8()
        if self.format is not None and self.format.keeps_codes and self._takes_rows():
            self.load, self.format = self.load.keeping_codes(), None
        self.prepack = load.prepack and self.format is None and self.weight_gather is None
        # Features that are read; None: all.
        self.heads: range | None = None
        self.kv_heads: range | None = None
        self.inner: range | None = None
        self.expert_inner: range | None = None
        if self.shard is not None:
            self.heads = features(self.shard.heads, spec.head_dim)
            self.kv_heads = features(self.shard.kv_heads, spec.head_dim)
            self.inner, self.expert_inner = self.shard.inner, self.shard.expert_inner

    def _takes_codes(self) -> bool:
        """Whether matrices may be read as rows of codes in whole groups, on a CPU."""
        spec = self.spec
        attended = [spec.num_heads * head_dim for head_dim in spec.head_dims]
        widths = {spec.hidden_size, *attended, spec.intermediate_size}
        if spec.experts is not None:
            widths |= {spec.experts.size, spec.experts.shared_size}
        if (mixer := self.layer_spec.mixer) is not None:
            widths.add(mixer.mixed_features(spec.hidden_size))
        is_cpu = torch.device(self.load.device).type == "cpu"
        return is_cpu and self._takes_rows() and all(width % GROUP == 0 for width in widths)

    def _takes_rows(self) -> bool:
        """Whether matrices may be read as rows of codes: they are in this process alone, and
        nothing else is computed of them."""
        return (
            self.shard is None
            and self.hidden is None
            and self.weight_gather is None
            and self.positions is None
            and (self.spec.experts is None or self.spec.experts.are_apart)
            and self.layer_spec.weight_layout != "conv1d"
        )

    def layers(self) -> list[LayerWeights]:
        """All layers; those that share their tensors share what is read."""
        layers = map(self.spec.layer_names, range(self.spec.num_layers))
        names = [names.get("attn_out") or names["mixer_out"] for names in layers]
        last = None if self.format is None else self.spec.num_layers - 1
        keys = [(name, i == last) for i, name in enumerate(names)]
        gather, num_kept = self.weight_gather, len(set(keys))
        read: dict[tuple[str, bool], LayerWeights] = {}
        shards: dict[tuple[str, bool], LayerShard] = {}
        for i, key in enumerate(keys):
            if key in read or key in shards:
                continue
            layer = self._in_format(self.layer(i), is_last=i == last)
            if gather is None:
                read[key] = layer
            else:
                shards[key] = gather.keep(layer, num_layers=num_kept)
        if gather is None:
            return [read[key] for key in keys]
        return [gather.place(shards[key]) for key in keys]

    def _in_format(self, layer: LayerWeights, *, is_last: bool) -> LayerWeights:
        """A layer with plain weights in the kinds that are asked for."""
        if self.format is not None:
            layer = self.format.quantize(layer, is_last)
        if self.hidden is None:
            return layer
        layer = layer.shard(self.hidden)
        return layer.converted(prepack_linear) if self.prepack else layer

    def layer(self, i: int) -> LayerWeights:
        spec = self.spec
        names = spec.layer_names(i)
        if i == 0 and not self.layer_spec.has_first_norm:
            del names["attn_norm"]
        norms = {key: self.norm(names[key], spec.hidden_size) for key in _NORMS if key in names}
        if (mixer := self.layer_spec.mixer_of(i)) is not None:
            return self._mixer_layer(names, mixer, spec.experts_of(i), norms)
        layers = self.layer_spec
        own = spec.head_sizes(layers.window_of(i))
        parts = self._qkv_parts(names, own)
        qkv = self._qkv(names, parts)
        pos_k, pos_q = self._relative(names, parts)
        attended = spec.num_heads * own.head_dim
        attn_out, feed_forward = self._halves(
            names, spec.experts_of(i), norms.get("ffn_out_norm"), attended
        )
        v_norm = None
        if layers.norms_values:
            v_norm = self.load.plain_norm(own.head_dim, eps=spec.norm_eps)
        return LayerWeights(
            attn_norm=norms.get("attn_norm"),
            attn_out_norm=norms.get("attn_out_norm"),
            qkv=qkv,
            q_norm=self._head_norm(names, "q_norm", spec.num_heads, own.head_dim, self.heads),
            k_norm=self._head_norm(names, "k_norm", own.num_kv_heads, own.head_dim, self.kv_heads),
            v_norm=v_norm,
            attn_out=attn_out,
            ffn_norm=norms.get("ffn_norm"),
            feed_forward=feed_forward,
            pos_k=pos_k,
            pos_q=pos_q,
            value_table=self.values if i in self.value_layers else None,
            attended=load_attended(spec, self.load, i),
            sinks=self._sinks(names),
        )

    def _mixer_layer(
        self,
        names: dict[str, str],
        mixer: MixerSpec,
        experts: ExpertSpec | None,
        norms: dict[str, RowNorm],
    ) -> LayerWeights:
        """A layer with a mixer in place of attention; of a whole model."""
        spec, hidden = self.spec, self.spec.hidden_size
        if experts is not None:
            half: FeedForward = self._mixture(names, experts, None)
        else:
            ffn_out = self._tensors(names, "ffn_out", hidden, spec.intermediate_size)
            half = DenseFeedForward(
                self._ffn_in(names), self.load.weight_from(*ffn_out), spec.activation
            )
        first = [self._tensors(names, key, n, hidden) for key, n in mixer.parts(hidden).items()]
        if mixer.is_interleaved:
            first = rows_in_order(first, mixer)
        last = self._tensors(names, "mixer_out", hidden, mixer.mixed_features(hidden))
        return LayerWeights(
            qkv=self.load.fused_linear(first),
            attn_out=self.load.weight_from(*last),
            attn_norm=norms["attn_norm"],
            ffn_norm=norms["ffn_norm"],
            feed_forward=half,
            mixer=load_mixer(spec, mixer, names, self.load),
        )

    def norm(self, stem: str, size: int) -> RowNorm:
        if not self.layer_spec.norm_scale:
            return self.load.plain_norm(size, eps=self.spec.layer_norm_eps)
        return self.load.norm(
            stem,
            size,
            eps=self.spec.layer_norm_eps,
            kind=self.layer_spec.norm,
            has_bias=self.layer_spec.norm_bias,
            offset=self.layer_spec.norm_offset,
            part=None if self.hidden is None else Part(0, (self.hidden,)),
        )

    def _head_norm(
        self, names: dict[str, str], key: str, num_heads: int, head_dim: int, local: range | None
    ) -> RowNorm | None:
        """The norm of each head, or of all heads together; None where the family has none.

        local: this rank's features of all heads.
        """
        if key not in names:
            return None
        part, size = None, head_dim
        if self.layer_spec.qk_norm == "projection":
            size *= num_heads
            part = None if local is None else Part(0, (local,))
        offset, eps = self.layer_spec.norm_offset, self.spec.norm_eps
        if not self.layer_spec.norm_scale:
            return self.load.plain_norm(size, eps=eps)
        return self.load.norm(names[key], size, eps=eps, kind="rms_norm", offset=offset, part=part)

    def _qkv_parts(self, names: dict[str, str], own: HeadSizes) -> list[_Tensors]:
        """(weight, bias) of q, k and v; empty where one weight holds all three."""
        spec = self.spec
        if self.layer_spec.qkv != "separate":
            return []
        q_rows, kv_rows = spec.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
        kinds = (
            ("q", q_rows, self.heads),
            ("k", kv_rows, self.kv_heads),
            ("v", kv_rows, self.kv_heads),
        )
        parts = [
            self._tensors(names, key, n, spec.hidden_size, outputs=_ranges(local))
            for key, n, local in kinds
            if key != "q" or not self.layer_spec.gates_queries  # which has rows of gates, too
        ]
        if self.layer_spec.gates_queries:
            both = self._tensors(names, "q", 2 * q_rows, spec.hidden_size)[0]

            def queries_of(rows: torch.Tensor) -> torch.Tensor:
                pairs: torch.Tensor = rows.unflatten(0, (-1, 2, own.head_dim))
                return pairs[:, 0].flatten(0, 1)

            queries = both.mapped(queries_of) if isinstance(both, GroupRows) else queries_of(both)
            parts.insert(0, (queries, None))
        return parts

    def _qkv(self, names: dict[str, str], parts: list[_Tensors]) -> Weight:
        """The linear layer of q, k and v; parts: _qkv_parts'."""
        if parts:
            return self.load.fused_linear(parts)
        spec = self.spec
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        rows = q_rows + 2 * kv_rows
        outputs = self._fused_outputs(q_rows, kv_rows)
        weight, bias = self._tensors(names, "qkv", rows, spec.hidden_size, outputs=outputs)
        if self.layer_spec.qkv == "interleaved" and not self.load.shares:
            order = partial(separate_heads, spec=spec, shard=self.shard)
            weight = weight.mapped(order) if isinstance(weight, GroupRows) else order(weight)
            bias = None if bias is None else separate_heads(bias, spec, self.shard)
        if "q_bias" in names:
            bias = self._separate_biases(names, q_rows)
        return self.load.weight_from(weight, bias)

    def _separate_biases(self, names: dict[str, str], rows: int) -> torch.Tensor:
        """The bias of q, k and v from those of q and v, in the order of the weight's rows."""
        part = None if self.heads is None else Part(0, (self.heads,))
        q, v = (self.load.tensor(names[key], (rows,), part=part) for key in ("q_bias", "v_bias"))
        bias = torch.stack([q, torch.zeros_like(q), v])  # [3, local rows]
        if self.layer_spec.qkv == "interleaved" and self.load.shares:
            bias = bias.unflatten(1, (-1, self.spec.head_dim)).transpose(0, 1)
        return bias.flatten()

    def _relative(
        self, names: dict[str, str], parts: list[_Tensors]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(pos_k, pos_q) of disentangled attention, of this rank's heads; see LayerWeights."""
        relative = self.layer_spec.disentangled
        if relative is None or self.positions is None:
            return None, None
        found: dict[str, torch.Tensor] = {}
        for key, part in (("pos_k", 1), ("pos_q", 0)):  # keys of positions come from k's weight
            if key not in relative.terms:
                continue
            if relative.shares_projections:
                weight, bias = parts[part]
            else:
                rows, hidden = self.spec.num_heads * self.spec.head_dim, self.spec.hidden_size
                outputs = _ranges(self.heads)
                weight, bias = self._tensors(names, key, rows, hidden, outputs=outputs)
            assert isinstance(weight, torch.Tensor)  # _takes_rows says so
            head_dim = self.spec.head_dim
            found[key] = project_positions(self.positions, weight, bias, head_dim=head_dim)
        return found.get("pos_k"), found.get("pos_q")

    def _sinks(self, names: dict[str, str]) -> torch.Tensor | None:
        """f32: those of this rank's heads."""
        if "sinks" not in names:
            return None
        part = None if self.shard is None else Part(0, (self.shard.heads,))
        shape = (self.spec.num_heads,)
        return self.load.in_float32().tensor(names["sinks"], shape, part=part).contiguous()

    def _fused_outputs(self, q_rows: int, kv_rows: int) -> tuple[range, ...] | None:
        """This rank's rows of a weight that holds q, k and v of all heads."""
        if self.shard is None or self.heads is None or self.kv_heads is None:
            return None
        if self.layer_spec.qkv == "interleaved":
            group = self.spec.num_heads // self.spec.num_kv_heads
            return (features(self.shard.kv_heads, (group + 2) * self.spec.head_dim),)
        kinds = ((self.heads, 0), (self.kv_heads, q_rows), (self.kv_heads, q_rows + kv_rows))
        return tuple(range(local.start + first, local.stop + first) for local, first in kinds)

    def _ffn_in(self, names: dict[str, str]) -> Weight:
        sizes = (self.spec.intermediate_size, self.spec.hidden_size)
        outputs = _ranges(self.inner)
        if "ffn_gate_up" in names:
            return self._gate_up(names, "ffn_gate_up", gate_first=True)
        if "ffn_up_gate" in names:
            return self._gate_up(names, "ffn_up_gate", gate_first=False)
        if "ffn_gate" not in names:
            return self.load.weight_from(*self._tensors(names, "ffn_in", *sizes, outputs=outputs))
        gate, gate_bias = self._tensors(names, "ffn_gate", *sizes, outputs=outputs)
        up, up_bias = self._tensors(names, "ffn_in", *sizes, outputs=outputs)
        return self.load.gated(gate, up, gate_bias, up_bias)

    def _gate_up(self, names: dict[str, str], key: str, *, gate_first: bool) -> GatedWeight:
        """Gate and up projection that are saved as one weight, the gate's rows first or last."""
        inner, hidden = self.spec.intermediate_size, self.spec.hidden_size
        outputs = None
        if self.inner is not None:
            up = range(inner + self.inner.start, inner + self.inner.stop)
            outputs = (self.inner, up)
        both, bias = self._tensors(names, key, 2 * inner, hidden, outputs=outputs)
        order = slice(None) if gate_first else slice(None, None, -1)
        rows, up_rows = both.chunk(2)[order]
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)[order]
        return self.load.gated(rows, up_rows, gate_bias, up_bias)

    def _experts(self, names: dict[str, str], experts: ExpertSpec) -> ExpertsWeight:
        """A layer's router and its experts; of a shard, some of each expert's inner features."""
        hidden, count = self.spec.hidden_size, experts.num_experts
        load = self.load.in_float32() if experts.routes_in_f32 else self.load
        router = load.tensor(f"{names['router']}.weight", (count, hidden))
        router_bias = (
            load.tensor(names["router_bias"], (count,)) if "router_bias" in names else None
        )
        stacks = first_bias = out_bias = None
        if "experts_gate_up" in names:
            first, out, stacks = self._experts_of_modules(names, experts)
            if "experts_gate_up_bias" in names:
                first_bias, out_bias = self._expert_biases(names, experts, first[0])
        else:
            read = self._stacked_expert if "experts_in" in names else self._expert
            first, out = zip(
                *(read(names, experts, e) for e in range(experts.num_experts)), strict=True
            )
        bias = None
        if "experts_bias" in names:
            bias = self.load.tensor(names["experts_bias"], (hidden,))
        weight = ExpertsWeight(
            router=load.linear_from(router, router_bias),
            first=first,
            out=out,
            top_k=experts.top_k,
            normalizes=experts.normalizes,
            bias=bias,
            first_bias=first_bias,
            out_bias=out_bias,
            gate_limit=experts.gate_limit,
            gate_alpha=experts.gate_alpha,
        )
        return stack_experts(weight, stacks=stacks)

    def _expert(self, names: dict[str, str], experts: ExpertSpec, e: int) -> tuple[Weight, Weight]:
        """One expert whose tensors are its own."""
        local = _ranges(self.expert_inner)

        def read(key: str, n: int, k: int, dim: int) -> Matrix:
            part = None if local is None else Part(dim, local)
            name = f"{names[key].replace('{e}', str(e))}.weight"
            return self.load.matrix(name, (n, k), part=part)

        hidden, inner = self.spec.hidden_size, experts.size
        first = read("expert_in", inner, hidden, 0)
        out = self.load.weight_from(read("expert_out", hidden, inner, 1), None)
        if "expert_gate" not in names:
            return self.load.weight_from(first, None), out
        gate = read("expert_gate", inner, hidden, 0)
        return self.load.gated(gate, first, None, None), out

    def _stacked_expert(
        self, names: dict[str, str], experts: ExpertSpec, e: int
    ) -> tuple[Weight, Weight]:
        """One expert of tensors [num_experts * inner, hidden_size] that hold all of them; both
        have a row for each inner feature."""
        local = range(experts.size) if self.expert_inner is None else self.expert_inner
        first = e * experts.size
        part = Part(0, (range(first + local.start, first + local.stop),))
        shape = (experts.num_experts * experts.size, self.spec.hidden_size)
        w1, w2 = (
            self.load.tensor(names[key], shape, part=part) for key in ("experts_in", "experts_out")
        )
        return self.load.linear_from(w1, None), self.load.linear_from(w2.t().contiguous(), None)

    def _experts_of_modules(
        self, names: dict[str, str], experts: ExpertSpec
    ) -> tuple[tuple[Weight, ...], tuple[Weight, ...], tuple[torch.Tensor, torch.Tensor] | None]:
        """(first, out, both layers' tensors where they are the weights) of two tensors that hold
        all experts: [num_experts, 2 * inner, hidden_size], gates first, and
        [num_experts, hidden_size, inner]; or both transposed."""
        count, hidden, inner = experts.num_experts, self.spec.hidden_size, experts.size
        rows = self._gate_up_rows(experts)
        gate_up = self._stack(
            names["experts_gate_up"], (count, 2 * inner, hidden), experts, 1, rows
        )
        columns = _ranges(self.expert_inner)
        down = self._stack(names["experts_down"], (count, hidden, inner), experts, 2, columns)
        half = gate_up.shape[1] // 2
        first = tuple(self.load.gated(both[:half], both[half:], None, None) for both in gate_up)
        out = tuple(self.load.linear_from(one, None) for one in down)
        return first, out, (gate_up, down) if self.load.shares else None

    def _stack(
        self,
        name: str,
        shape: tuple[int, int, int],
        experts: ExpertSpec,
        dim: int,
        ranges: tuple[range, ...] | None,
    ) -> torch.Tensor:
        """A tensor that holds a matrix [n, k] of each expert; ranges: what is read of dim."""
        if experts.is_transposed:
            shape, dim = (shape[0], shape[2], shape[1]), 3 - dim
        part = None if ranges is None else Part(dim, ranges)
        tensor = self.load.tensor(name, shape, part=part)
        return tensor.transpose(1, 2).contiguous() if experts.is_transposed else tensor

    def _gate_up_rows(self, experts: ExpertSpec) -> tuple[range, ...] | None:
        """This rank's rows of gates, and of values behind them; None: all."""
        local, size = self.expert_inner, experts.size
        return None if local is None else (local, range(size + local.start, size + local.stop))

    def _expert_biases(
        self, names: dict[str, str], experts: ExpertSpec, first: Weight
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(first, out): a row for each expert, the first one's in the order of the weight's rows.

        Of ranks that share the experts, the first one adds the second bias.
        """
        count, hidden, rows = (
            experts.num_experts,
            self.spec.hidden_size,
            self._gate_up_rows(experts),
        )
        part = None if rows is None else Part(1, rows)
        both = self.load.tensor(names["experts_gate_up_bias"], (count, 2 * experts.size), part=part)
        assert isinstance(first, GatedWeight)
        halves = both.chunk(2, dim=1)
        if first.block != first.n:
            gates, values = (half.t() for half in halves)
            both = in_turn(gates, values, first.block).t().contiguous()
        is_first = self.expert_inner is None or self.expert_inner.start == 0
        out = self.load.tensor(names["experts_down_bias"], (count, hidden)) if is_first else None
        return both, out

    def _halves(
        self,
        names: dict[str, str],
        experts: ExpertSpec | None,
        out_norm: RowNorm | None,
        attended: int,
    ) -> tuple[Weight, FeedForward]:
        """The last linear layer of the attention, and the feed-forward half.

        attended: features of all query heads.
        """
        activation = self.spec.activation
        if experts is not None:
            return self._attn_out(names, attended), self._mixture(names, experts, out_norm)
        attn_out, out = self._out_linears(names, attended)
        return attn_out, DenseFeedForward(self._ffn_in(names), out, activation, out_norm)

    def _mixture(
        self, names: dict[str, str], experts: ExpertSpec, out_norm: RowNorm | None
    ) -> ExpertFeedForward:
        shared = None
        if experts.shared_size:
            shared = load_shared_expert(names, self.load, self.spec.hidden_size, experts)
        mixture = self._experts(names, experts)
        return ExpertFeedForward(mixture, self.spec.activation, out_norm, shared)

    def _attn_out(self, names: dict[str, str], attended: int) -> Weight:
        weight, bias = self._tensors(
            names, "attn_out", self.spec.hidden_size, attended, inputs=_ranges(self.heads)
        )
        return self.load.out_linear_from(weight, bias, is_sharded=self.shard is not None)

    def _out_linears(self, names: dict[str, str], attended: int) -> tuple[Weight, Weight]:
        """(the attention's, the feed-forward's); sharded parallel layers have one bias for both."""
        spec, is_sharded = self.spec, self.shard is not None
        inner = spec.intermediate_size
        of_heads = self._tensors(
            names, "attn_out", spec.hidden_size, attended, inputs=_ranges(self.heads)
        )
        of_inner = self._tensors(
            names, "ffn_out", spec.hidden_size, inner, inputs=_ranges(self.inner)
        )
        if is_sharded and self.layer_spec.norm_placement == "parallel":
            biases = [bias for _, bias in (of_heads, of_inner) if bias is not None]
            of_heads = (of_heads[0], None)
            of_inner = (of_inner[0], torch.stack(biases).sum(0) if biases else None)
        return (
            self.load.out_linear_from(*of_heads, is_sharded=is_sharded),
            self.load.out_linear_from(*of_inner, is_sharded=is_sharded),
        )

    def _tensors(
        self,
        names: dict[str, str],
        key: str,
        n: int,
        k: int,
        *,
        outputs: tuple[range, ...] | None = None,
        inputs: tuple[range, ...] | None = None,
    ) -> _Tensors:
        """Weight [n, k] and bias [n] or None, in whichever layout the weight is saved.

        outputs, inputs: of n, or of k, those that are read.
        """
        is_transposed = self.layer_spec.weight_layout == "conv1d"
        part = bias_part = None
        if outputs is not None:
            part, bias_part = Part(int(is_transposed), outputs), Part(0, outputs)
        elif inputs is not None:
            part = Part(int(not is_transposed), inputs)
        shape = (k, n) if is_transposed else (n, k)
        weight = self.load.matrix(f"{names[key]}.weight", shape, part=part)
        if is_transposed:
            assert isinstance(weight, torch.Tensor)  # _takes_rows says so
            weight = weight.t().contiguous()
        if key not in self.layer_spec.biases:
            return weight, None
        return weight, self.load.tensor(f"{names[key]}.bias", (n,), part=bias_part)


def _ranges(local: range | None) -> tuple[range, ...] | None:
    return None if local is None else (local,)
