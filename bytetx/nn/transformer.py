"""The forward pass of every family, top to bottom, on packed tokens."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.checkpoint.weights import Part
from bytetx.errors import CheckpointError
from bytetx.nn.blocks import Blocks, NormWeight, OutWeight, Rows, WholeBlocks
from bytetx.nn.decoder import Decoder
from bytetx.nn.decoder_weights import load_decoder
from bytetx.nn.decoder_weights import tensor_names as decoder_tensor_names
from bytetx.nn.fp8 import Fp8Layer, quantize_layer, run_layers
from bytetx.nn.kv_cache import KvCache
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.attention import varlen_attention
from bytetx.ops.attention_plan import AttentionPlan, is_planned, plan_attention
from bytetx.ops.embedding import embed
from bytetx.ops.linear import LinearWeight, linear
from bytetx.packed import PackedBatch
from bytetx.parallel.layout import ModelSplit, features


@dataclass(frozen=True, slots=True)
class EmbeddingWeights:
    word: torch.Tensor  # [vocab_size, embedding_size]
    position: torch.Tensor | None  # [max_positions + position_offset, embedding_size]
    token_type: torch.Tensor | None  # [num_token_types, embedding_size]
    norm: NormWeight | None
    project: LinearWeight | None  # embedding_size -> hidden_size


@dataclass(frozen=True, slots=True)
class LayerWeights:
    qkv: LinearWeight  # rows of q, then k, then v: [3 * hidden_size, hidden_size]
    attn_out: OutWeight
    attn_norm: NormWeight
    ffn_in: LinearWeight
    ffn_out: OutWeight
    ffn_norm: NormWeight


class Transformer:
    """A model's weights and its forward pass. Holds no state between calls.

    layers: an encoder's.  fp8_layers: the same with E4M3 weights, instead of `layers`.
    decoder: a causal model's layers; then both are empty.
    blocks: how the layers run; where a group shares them, every rank calls forward.
    project_out: hidden_size -> embedding_size, where a causal model ends in the words' width.
    """

    has_followers = False  # whether other ranks run its passes because this one does

    def __init__(
        self,
        spec: ModelSpec,
        embeddings: EmbeddingWeights,
        layers: list[LayerWeights],
        relative_bias: torch.Tensor | None,
        *,
        fp8_layers: Sequence[Fp8Layer] = (),
        decoder: Decoder | None = None,
        project_out: LinearWeight | None = None,
        blocks: Blocks | None = None,
    ):
        self.spec = spec
        self.blocks = WholeBlocks(spec) if blocks is None else blocks
        self.embeddings = embeddings
        self.layers, self.fp8_layers = layers, fp8_layers
        self.relative_bias = relative_bias
        self.decoder, self.project_out = decoder, project_out
        self.all_layers = layers if decoder is None else decoder.layers

    @classmethod
    def from_tensors(
        cls,
        spec: ModelSpec,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        prepack: bool,
        blocks: Blocks | None = None,
        shares: bool = False,
        fp8: bool = False,
    ) -> "Transformer":
        """Builds the model from named tensors (names as in spec.embeddings and spec.layer).

        blocks: of a rank of a group; of layers that are split, only its share is read.
        prepack: reorder linear weights for the CPU's GEMM.  shares: keep the tensors given in the
        layout that they have, so that a caller who owns them does not hold them twice.
        fp8: an encoder's layers multiply E4M3 rows; dtype is that of everything else, f16 or bf16.
        Raises CheckpointError naming every missing tensor, or the first of a wrong shape, of a
        dtype that is not floating, or with a value that is not finite.
        """
        load = TensorLoader(tensors, dtype=dtype, device=device, prepack=prepack, shares=shares)
        load.require(_tensor_names(spec))
        extra = f"{spec.layer['attn_out'].format(i=spec.num_layers)}.weight"
        if extra in tensors:
            raise CheckpointError(
                f"the checkpoint has more layers than the {spec.num_layers} of config.json: it "
                f"holds {extra!r}"
            )
        blocks = WholeBlocks(spec) if blocks is None else blocks
        table = _embedding_weights(spec, load, blocks.split)
        if spec.decoder is not None:
            more = {"project_out": _project_out(spec, load), "blocks": blocks}
            decoder = load_decoder(spec, load, blocks=blocks)
            return cls(spec, table, [], None, decoder=decoder, **more)
        bias = _relative_bias(spec, load)
        if fp8:
            weights = (_layer_weights(spec, load, i, None) for i in range(spec.num_layers))
            return cls(spec, table, [], bias, fp8_layers=[_fp8_layer(w) for w in weights])
        layers = [_layer_weights(spec, load, i, blocks.split) for i in range(spec.num_layers)]
        if bias is not None and blocks.split is not None:
            bias = bias[blocks.split.heads.start : blocks.split.heads.stop].contiguous()
        return cls(spec, table, layers, bias, blocks=blocks)

    @property
    def is_capturable(self) -> bool:
        """Whether no kernel's shape depends on the lengths, as a CUDA graph for any needs."""
        word, layers = self.embeddings.word, self.decoder or self.blocks
        fits = is_planned(word.dtype, self.spec.head_dim, word.device)
        return fits and layers.is_capturable

    def check(self) -> None:
        """Raises a GroupError where a rank is gone, and with it what the device still computed."""

    def decode_step(
        self, cache: KvCache, *, num_rows: int, num_pages: int, is_greedy: bool, is_captured: bool
    ) -> AbstractContextManager[None]:
        """Around a decode step that other ranks run, too; is_greedy: with the language model head,
        is_captured: as a graph once it comes again."""
        return nullcontext()

    def share(self, *tensors: torch.Tensor) -> None:
        """What the other ranks of a decode step read first, in this order."""

    @torch.inference_mode()
    def forward(
        self,
        batch: PackedBatch,
        *,
        cache: KvCache | None = None,
        on_layer: Callable[[torch.Tensor], None] | None = None,
        on_kv: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Hidden states [total_tokens, spec.output_size] of the last layer.

        cache: a causal model's keys and values, with batch.past; this step's are added to it.
        on_layer: called with the embedding's and then each layer's output.  on_kv: with each
        layer's keys and values, of a causal model.
        """
        rows = self.blocks.begin(batch.total_tokens)
        if self.decoder is not None:
            embed_tokens = partial(self._embed_causal, batch, rows)
            calls = {"on_layer": on_layer, "on_kv": on_kv}
            x = self.decoder.run(embed_tokens, batch, rows, cache=cache, **calls)
            return x if self.project_out is None else linear(x, self.project_out)
        if cache is not None:
            raise ValueError("cache must be None: an encoder has no past")
        return self.encode(lambda: self._embed(batch, rows), batch, rows, on_layer=on_layer)

    def encode(
        self,
        embed_tokens: Callable[[], torch.Tensor],
        batch: PackedBatch,
        rows: Rows | None = None,
        *,
        on_layer: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """An encoder's layers alone, from what embed_tokens returns: [own rows, hidden_size].

        It is called here, so that no frame above holds the embedding while the layers run.
        on_layer: as in forward, which says what this returns and runs it in inference mode.
        """
        rows = self.blocks.begin(batch.total_tokens) if rows is None else rows
        x = embed_tokens()
        if on_layer:
            on_layer(rows.whole(x))
        plan = plan_attention(
            batch.cu_seqlens,
            total_tokens=batch.total_tokens,
            head_dim=self.spec.head_dim,
            has_bias=self.relative_bias is not None,
        )
        if self.fp8_layers:
            attend = partial(self._attend, batch=batch, plan=plan)
            options = {"activation": self.spec.activation, "eps": self.spec.norm_eps}
            return run_layers(x, self.fp8_layers, attend, **options, on_layer=on_layer)
        for weights in self.layers:
            # Two steps, so that the first one's activations are gone when the second one runs.
            x = self._attention(x, weights, batch, rows, plan)
            x = self._feed_forward(x, weights, rows)
            if on_layer:
                on_layer(rows.whole(x))
        return rows.whole(x)

    def _embed(self, batch: PackedBatch, rows: Rows) -> torch.Tensor:
        table = self.embeddings
        assert table.norm is not None  # an encoder's families say so
        x = rows.embed(
            batch.input_ids,
            batch.position_ids,
            batch.token_type_ids,
            word=table.word,
            position=table.position,
            token_type=table.token_type,
            norm_weight=table.norm.weight,
            norm_bias=table.norm.bias,
            eps=self.spec.norm_eps,
            inputs_embeds=batch.inputs_embeds,
            bad_ids=batch.bad_ids,
        )
        return x if table.project is None else linear(x, table.project)

    def _embed_causal(self, batch: PackedBatch, rows: Rows) -> torch.Tensor:
        """Words, projected where the table is narrower than the layers, and then positions."""
        table, ids, positions = self.embeddings, batch.input_ids, batch.position_ids
        given = {"inputs_embeds": batch.inputs_embeds, "bad_ids": batch.bad_ids}
        given["word"] = table.word
        if table.project is None:
            return rows.embed(ids, positions, None, position=table.position, **given)
        words = linear(rows.embed(ids, None, None, **given), table.project)
        if table.position is None:
            return words
        given |= {"word": table.position, "position": table.position, "inputs_embeds": words}
        return embed(rows.own(ids), rows.own(positions), None, **given)

    def _attention(
        self,
        x: torch.Tensor,
        weights: LayerWeights,
        batch: PackedBatch,
        rows: Rows,
        plan: AttentionPlan | None,
    ) -> torch.Tensor:
        attended = self._attend(rows.column(x, weights.qkv), batch, plan)
        return rows.project_norm(attended, weights.attn_out, residual=x, norm=weights.attn_norm)

    def _attend(
        self, qkv: torch.Tensor, batch: PackedBatch, plan: AttentionPlan | None
    ) -> torch.Tensor:
        """qkv: [total_tokens, 3 * num_heads * head_dim], dropped on return."""
        heads = (self.blocks.num_heads, self.spec.head_dim)
        q, k, v = qkv.unflatten(1, (3, *heads)).unbind(1)
        attended = varlen_attention(
            q,
            k,
            v,
            batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            relative_bias=self.relative_bias,
            bias_positions=batch.bias_positions,
            plan=plan,
        )
        return attended.flatten(1)

    def _feed_forward(self, x: torch.Tensor, weights: LayerWeights, rows: Rows) -> torch.Tensor:
        inner = rows.column(x, weights.ffn_in, activation=self.spec.activation)
        return rows.project_norm(inner, weights.ffn_out, residual=x, norm=weights.ffn_norm)


def _tensor_names(spec: ModelSpec) -> Iterator[str]:
    """Every name the base model needs, lazily: a damaged config may ask for 10**9 layers."""
    yield spec.embeddings["word"]
    if "position" in spec.embeddings:
        yield spec.embeddings["position"]
    if spec.decoder is not None:
        if spec.embedding_size != spec.hidden_size:
            yield f"{spec.embeddings['project_in']}.weight"
            yield f"{spec.decoder.final['project_out']}.weight"
        yield from decoder_tensor_names(spec)
        return
    if spec.num_token_types:
        yield spec.embeddings["token_type"]
    if spec.relative_bias_rows:
        yield spec.embeddings["relative_bias"]
    stems = [spec.embeddings["norm"]]
    if spec.embedding_size != spec.hidden_size:
        stems.append(spec.embeddings["project"])
    layers = (stem.format(i=i) for i in range(spec.num_layers) for stem in spec.layer.values())
    for stem in chain(stems, layers):
        yield f"{stem}.weight"
        yield f"{stem}.bias"


def _embedding_weights(
    spec: ModelSpec, load: TensorLoader, split: ModelSplit | None
) -> EmbeddingWeights:
    names, width = spec.embeddings, spec.embedding_size
    token_type = project = norm = None
    if spec.num_token_types:
        token_type = load.tensor(names["token_type"], (spec.num_token_types, width))
    if width != spec.hidden_size:
        project = _project_in(spec, load)
    if "norm" in names:
        norm = load.norm(names["norm"], width)
    return EmbeddingWeights(
        word=_word_table(spec, load, split),
        position=_position_table(spec, load),
        token_type=token_type,
        norm=norm,
        project=project,
    )


def _word_table(spec: ModelSpec, load: TensorLoader, split: ModelSplit | None) -> torch.Tensor:
    """All words; a rank's words, and behind them a row of zeros for those of other ranks."""
    name, shape = spec.embeddings["word"], (spec.vocab_size, spec.embedding_size)
    if split is None:
        return load.tensor(name, shape)
    own = load.tensor(name, shape, part=Part(0, (split.vocab,)))
    return torch.cat([own, own.new_zeros((1, shape[1]))])


def _position_table(spec: ModelSpec, load: TensorLoader) -> torch.Tensor | None:
    """The learned positions from the first one that a token may have; None where they turn."""
    if "position" not in spec.embeddings:
        return None
    # A causal model adds its positions to what the words were projected to.
    width = spec.embedding_size if spec.decoder is None else spec.hidden_size
    rows = spec.first_position_row + spec.max_positions + spec.position_offset
    return load.tensor(spec.embeddings["position"], (rows, width))[spec.first_position_row :]


def _project_in(spec: ModelSpec, load: TensorLoader) -> LinearWeight:
    names, width = spec.embeddings, spec.embedding_size
    if spec.decoder is None:
        return load.linear([names["project"]], spec.hidden_size, width)
    shape = (spec.hidden_size, width)
    return load.linear_from(load.tensor(f"{names['project_in']}.weight", shape), None)


def _project_out(spec: ModelSpec, load: TensorLoader) -> LinearWeight | None:
    if spec.decoder is None or spec.embedding_size == spec.hidden_size:
        return None
    name, shape = (
        f"{spec.decoder.final['project_out']}.weight",
        (
            spec.embedding_size,
            spec.hidden_size,
        ),
    )
    return load.linear_from(load.tensor(name, shape), None)


def _layer_weights(
    spec: ModelSpec, load: TensorLoader, i: int, split: ModelSplit | None
) -> LayerWeights:
    names = {key: stem.format(i=i) for key, stem in spec.layer.items()}
    hidden, inner = spec.hidden_size, spec.intermediate_size
    own_heads = None if split is None else features(split.heads, spec.head_dim)
    own_inner = None if split is None else split.inner
    qkv = [names["q"], names["k"], names["v"]]
    return LayerWeights(
        qkv=load.linear(qkv, 3 * hidden, hidden, outputs=own_heads),
        attn_out=load.out_linear(names["attn_out"], hidden, hidden, inputs=own_heads),
        attn_norm=load.norm(names["attn_norm"], hidden),
        ffn_in=load.linear([names["ffn_in"]], inner, hidden, outputs=own_inner),
        ffn_out=load.out_linear(names["ffn_out"], hidden, inner, inputs=own_inner),
        ffn_norm=load.norm(names["ffn_norm"], hidden),
    )


def _fp8_layer(w: LayerWeights) -> Fp8Layer:
    return quantize_layer(w.qkv, w.attn_out, w.attn_norm, w.ffn_in, w.ffn_out, w.ffn_norm)


def _relative_bias(spec: ModelSpec, load: TensorLoader) -> torch.Tensor | None:
    """The learned bucket table spread over distances: f32 [num_heads, 2 * max_positions - 1].

    Column d + max_positions - 1 is the bias for key position minus query position = d.
    Source: T5 (arXiv 1910.10683), section 2.1, the bidirectional buckets.
    """
    if not spec.relative_bias_rows:
        return None
    shape = (spec.relative_bias_rows, spec.num_heads)
    table = load.tensor(spec.embeddings["relative_bias"], shape).float()
    span = spec.max_positions + spec.position_offset  # a wrapped model may use every position
    distance = torch.arange(-(span - 1), span, device=table.device)
    return table[_bucket(distance, spec)].T.contiguous()


def _bucket(distance: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Half the buckets for keys before the query, half for keys after; exact up to a quarter of
    them, then logarithmic up to relative_bias_max_distance."""
    half = spec.relative_bias_buckets // 2
    exact = half // 2
    size = distance.abs()
    ratio = torch.log(size.float().clamp(min=1) / exact)
    ratio = ratio / math.log(spec.relative_bias_max_distance / exact) * (half - exact)
    far = (exact + ratio.to(torch.long)).clamp(max=half - 1)
    return torch.where(size < exact, size, far) + (distance > 0) * half
