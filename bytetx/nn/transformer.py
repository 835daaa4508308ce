"""The forward pass of every family, top to bottom, on packed tokens."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from bytetx.checkpoint.saved_tensor import Part
from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import CheckpointError
from bytetx.nn.adapted_rows import AdaptedRows
from bytetx.nn.alibi import alibi_bias, model_slopes
from bytetx.nn.blocks import Blocks, LocalBlocks
from bytetx.nn.kv_cache import KvCache
from bytetx.nn.layer import Rows
from bytetx.nn.layer_names import tensor_names as layer_tensor_names
from bytetx.nn.layer_weights import load_layers
from bytetx.nn.layers import Layers, OnKv, OnLayer, Pause
from bytetx.nn.quantization import weight_format
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.attention_plan import is_planned
from bytetx.ops.coded_linear import CodedWeight
from bytetx.ops.embedding import embed
from bytetx.ops.linear import LinearWeight, linear
from bytetx.ops.norm import RowNorm
from bytetx.ops.paged_plan import launches_by_sizes
from bytetx.ops.pooling import mean_words
from bytetx.packed import ComputedTokens, PackedBatch, SharedPrefixes
from bytetx.parallel.layout import ModelShard


@dataclass(frozen=True, slots=True)
class EmbeddingWeights:
    word: torch.Tensor  # [vocab_size, embedding_size], without rows where `coded` holds them
    position: torch.Tensor | None  # [max_positions + position_offset, embedding_size]
    token_type: torch.Tensor | None  # [num_token_types, embedding_size]
    norm: RowNorm | None
    project: LinearWeight | None  # embedding_size -> hidden_size
    projected_norm: RowNorm | None = None  # behind it
    coded: CodedWeight | None = None  # the word table in 8 bits
    # Of tokens that share rows of `word`: the row of each token, int32 [vocab_size].
    places: torch.Tensor | None = None
    scales: torch.Tensor | None = None  # what its row is multiplied by, [vocab_size]

    def word_rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """word[input_ids], also of codes; [total_tokens, embedding_size]."""
        coded = self.coded
        return F.embedding(input_ids, self.word) if coded is None else coded.rows(input_ids)


class Placement(ABC):
    """Runs the passes of a transformer that does not run them in this process alone, or at once.

    is_shared: whether other ranks run a part of each pass; then nothing but forward may be called.
    is_capturable, captures_decode_steps: whether steps around its passes may be CUDA graphs.
    """

    is_shared = False
    is_capturable = True
    captures_decode_steps = True

    @abstractmethod
    def forward(
        self,
        batch: PackedBatch,
        *,
        cache: KvCache | None = None,
        on_layer: OnLayer | None = None,
        on_kv: OnKv | None = None,
    ) -> torch.Tensor:
        """Run a pass; arguments and result as of Transformer.forward."""


class Interrupted(Placement):
    """Calls `pause` before each linear layer of a pass."""

    def __init__(self, local: "Transformer", pause: Pause):
        self._local, self._pause = local, pause

    def forward(
        self,
        batch: PackedBatch,
        *,
        cache: KvCache | None = None,
        on_layer: OnLayer | None = None,
        on_kv: OnKv | None = None,
    ) -> torch.Tensor:
        return self._local.forward(
            batch, cache=cache, on_layer=on_layer, on_kv=on_kv, pause=self._pause
        )


class Transformer:
    """A model's weights and its forward pass. Calls leave no state.

    Where a group of ranks shares the layers, every rank calls forward.
    project_out: hidden_size -> output_size, where a causal model's embedding is narrower, or
    where all models of the family have such a layer.
    placement: runs its passes; None: this process does, all of each pass.
    """

    def __init__(
        self,
        spec: ModelSpec,
        embeddings: EmbeddingWeights,
        layers: Layers,
        *,
        project_out: LinearWeight | None = None,
        placement: Placement | None = None,
    ):
        self.spec, self.embeddings, self.placement = spec, embeddings, placement
        self.layers, self.blocks = layers, layers.blocks
        self.project_out = project_out
        # transformers multiplies by a tensor of the table's dtype.
        scale = torch.tensor(spec.hidden_size**0.5, dtype=embeddings.word.dtype)
        self.word_scale: float = scale.item()

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
        quantization: str | None = None,
        batch_invariant: bool = False,
    ) -> "Transformer":
        """Builds the model from named tensors (names as in spec.embeddings and spec.layer).

        blocks: of a rank of a group; of layers that are sharded, only its shard is read.
        prepack: reorder linear weights for the CPU's GEMM.  shares: keep the tensors given in the
        layout that they have, so that a caller who owns them does not hold them twice.
        quantization: of what the layers multiply, and of a causal model's word table; dtype is that
        of everything else: f16 or bf16 with fp8, f32 or bf16 with int8 and int4.
        batch_invariant: a sequence's bits do not depend on its batch (nn/batch_invariance.py).
        Raises CheckpointError naming every missing tensor, or the first of a wrong shape, of a
        dtype that is not floating, or with a value that is not finite.
        """
        load = TensorLoader(
            tensors,
            dtype=dtype,
            device=device,
            prepack=prepack,
            shares=shares,
            batch_invariant=batch_invariant,
        )
        load.require(_tensor_names(spec))
        if spec.extra_layer in tensors:
            raise CheckpointError(
                f"the checkpoint has more layers than the {spec.num_layers} of config.json: it "
                f"holds {spec.extra_layer!r}"
            )
        if blocks is None:
            blocks = LocalBlocks(spec)
        coded = _coded_table(spec, load, blocks.shard, quantization)
        embeddings = _embedding_weights(spec, load, blocks.shard, coded=coded)
        project_out = _project_out(spec, load)
        bias = _relative_bias(spec, load, blocks.shard)
        layers = load_layers(
            spec, load, blocks=blocks, relative_bias=bias, quantization=quantization
        )
        return cls(spec, embeddings, layers, project_out=project_out)

    def placed(self, placement: Placement) -> "Transformer":
        """The same weights, whose passes a placement runs."""
        return Transformer(
            self.spec,
            self.embeddings,
            self.layers,
            project_out=self.project_out,
            placement=placement,
        )

    @property
    def is_shared(self) -> bool:
        """Whether other ranks run a part of each pass; see Placement."""
        return self.placement is not None and self.placement.is_shared

    @property
    def is_capturable(self) -> bool:
        """Whether no kernel's shape depends on the lengths, as a CUDA graph for any needs."""
        if self.placement is not None and not self.placement.is_capturable:
            return False
        word, head_dim = self.embeddings.word, self.spec.head_dim
        fits = all(is_planned(word.dtype, dim, word.device) for dim in self.spec.head_dims)
        if self.spec.is_causal:  # its steps over pages hold prefill chunks of any length
            fits = fits and launches_by_sizes(
                word.dtype,
                num_heads=self.blocks.num_heads,
                num_kv_heads=self.blocks.num_kv_heads,
                head_dim=head_dim,
                max_seqlen=self.spec.max_positions,
                device=word.device,
            )
        return fits and self.layers.is_capturable

    @property
    def prefix_multiple(self) -> int:
        """Passes may compute common prefixes of a multiple of so many tokens once; 0: never."""
        if self.placement is not None or any(
            rotation.scaling == "dynamic" for rotation in self.layers.tables
        ):
            return 0  # a dynamic rotation depends on how long the whole sequence is
        return self.layers.prefix_multiple(self.embeddings.word.dtype, self.embeddings.word.device)

    @property
    def captures_decode_steps(self) -> bool:
        """Whether its decode steps may be CUDA graphs, with kernels that take pages."""
        is_free = self.placement is None or self.placement.captures_decode_steps
        return is_free and self.layers.is_capturable

    def interrupted_by(self, run: Pause) -> "Transformer":
        """The same model, whose forward calls `run` before each linear layer; one that has a
        placement stays as it is.

        `run` may use the model itself, as for a short batch that should not wait for a long one.
        """
        return self if self.placement is not None else self.placed(Interrupted(self, run))

    @torch.inference_mode()
    def forward(
        self,
        batch: PackedBatch,
        *,
        cache: KvCache | None = None,
        on_layer: OnLayer | None = None,
        on_kv: OnKv | None = None,
        pause: Pause | None = None,
        read_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [total_tokens, spec.output_size] of the last layer.

        cache: a causal model's keys and values, with batch.past; this step's are added to it.
        on_layer: called with the embedding's and then each layer's output.  on_kv: without a
        cache, called with each layer's keys and values.  pause: called before each linear layer,
        without a placement.  read_rows: int64 [n], increasing, the rows of the result that are
        read; the last layer may leave out the others, which have no meaning then.
        """
        if self.placement is not None:
            return self.placement.forward(batch, cache=cache, on_layer=on_layer, on_kv=on_kv)
        if batch.shared is not None and on_layer is None and on_kv is None:
            return self._forward_shared(batch.shared, pause)
        rows = self.blocks.begin(batch.total_tokens)
        if batch.adapters is not None or not isinstance(self.blocks, LocalBlocks) or on_layer:
            read_rows = None
        if batch.adapters is not None:
            rows = AdaptedRows(batch.adapters, batch.total_tokens, batch.device)
        x = self.layers.run(
            lambda: self._embed(batch, rows),
            batch,
            rows,
            cache=cache,
            on_layer=on_layer,
            on_kv=on_kv,
            pause=pause,
            read_rows=None if len(self.layers.weights) < 2 else read_rows,
        )
        return x if self.project_out is None else linear(x, self.project_out)

    def _forward_shared(self, shared: SharedPrefixes, pause: Pause | None) -> torch.Tensor:
        """Hidden states of the tokens that a batch with a tree stands for."""
        if shared.hidden_states is not None:
            return shared.hidden_states.index_select(0, shared.rows)
        batch, num_layers = shared.batch, self.spec.num_layers
        kept_kv: list[torch.Tensor] = []
        layers = iter(range(num_layers))

        def keep(k: torch.Tensor, v: torch.Tensor) -> None:
            layer = next(layers)
            for index, rows in enumerate(shared.kept_rows):
                if layer == 0:
                    kept_kv.append(k.new_empty((num_layers, 2, len(rows), *k.shape[1:])))
                torch.index_select(k, 0, rows, out=kept_kv[index][layer, 0])
                torch.index_select(v, 0, rows, out=kept_kv[index][layer, 1])

        hidden = self.forward(batch, on_kv=keep if shared.kept_rows else None, pause=pause)
        if batch.computed:
            hidden = torch.cat([hidden, *(some.hidden_states for some in batch.computed)])
        for kv, rows in zip(kept_kv, shared.kept_rows, strict=True):
            shared.kept.append(ComputedTokens(kv, hidden.index_select(0, rows)))
        return hidden.index_select(0, shared.rows)

    @cached_property
    def is_table(self) -> bool:
        """Whether its hidden states are rows of an f32 table of words on a CPU, scaled at most."""
        table = self.embeddings
        others = (table.position, table.token_type, table.norm, table.project, table.coded)
        return (
            not self.spec.num_layers
            and self.placement is None
            and self.project_out is None
            and all(other is None for other in others)
            and not self.spec.scales_words
            and self.spec.embedding_multiplier == self.spec.residual_multiplier
            and table.word.dtype == torch.float32
            and table.word.device.type == "cpu"
        )

    def mean_words(self, ids: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """f32 [batch_size, hidden_size]: the mean of each text's hidden states, of a table."""
        table = self.embeddings
        scales = None if table.scales is None else table.scales.index_select(0, ids)
        places = ids if table.places is None else table.places.index_select(0, ids)
        return mean_words(table.word, places, cu_seqlens, scales=scales)

    @torch.inference_mode()
    def embed(self, batch: PackedBatch) -> torch.Tensor:
        """The embedded tokens that the layers begin with; of all layers in this process."""
        return self._embed(batch, self.blocks.begin(batch.total_tokens))

    def _embed(self, batch: PackedBatch, rows: Rows) -> torch.Tensor:
        """ELECTRA projects the sum of its tables, OPT-350m its words before it adds positions."""
        table, norm = self.embeddings, self.embeddings.norm
        projects_words = table.project is not None and self.spec.is_causal
        embeds = batch.inputs_embeds
        if embeds is None and (table.coded is not None or rows.changes_words):
            embeds = rows.changed_words(table.word_rows(batch.input_ids), batch.input_ids)
        places, scales = table.places, table.scales
        x = rows.embed(
            batch.input_ids if places is None else places.index_select(0, batch.input_ids),
            batch.position_ids,
            batch.token_type_ids,
            word=table.word,
            position=None if projects_words else table.position,
            token_type=table.token_type,
            norm_weight=None if norm is None else norm.weight,
            norm_bias=None if norm is None else norm.bias,
            eps=self.spec.norm_eps,
            inputs_embeds=embeds,
            bad_ids=batch.bad_ids,
        )
        if scales is not None:
            x *= scales.index_select(0, batch.input_ids)[:, None]
        if self.spec.scales_words and batch.inputs_embeds is None:
            x *= self.word_scale
        if table.project is not None:
            x = rows.project(x, table.project)
        if table.projected_norm is not None:
            x = table.projected_norm(x, out=x)
        # The layers' sums are divided by residual_multiplier; see ModelSpec.layer_norm_eps.
        multiplier = self.spec.embedding_multiplier / self.spec.residual_multiplier
        if multiplier != 1.0:
            x = x * multiplier
        if table.position is None or not projects_words:
            return x
        return embed(
            rows.local(batch.input_ids),
            rows.local(batch.position_ids),
            None,
            word=table.position,
            position=table.position,
            inputs_embeds=x,
            bad_ids=batch.bad_ids,
        )


def _tensor_names(spec: ModelSpec) -> Iterator[str]:
    """Every name the base model needs, lazily: a damaged config may ask for 10**9 layers."""
    names, is_projected = spec.embeddings, spec.is_projected
    yield names["word"]
    if "position" in names:
        yield names["position"]
    if spec.num_token_types:
        yield names["token_type"]
    if spec.relative_bias_rows:
        yield names["relative_bias"]
    if "norm" in names:
        parts = ("weight", "bias") if spec.layer_spec.norm_bias else ("weight",)
        yield from (f"{names['norm']}.{part}" for part in parts)
    if _projects_out(spec):
        yield f"{spec.layer_spec.final['project_out']}.weight"
    if is_projected and "project_in" in names:
        yield f"{names['project_in']}.weight"
    elif is_projected:
        yield from (f"{names['project']}.{part}" for part in ("weight", "bias"))
    yield from layer_tensor_names(spec)


def _coded_table(
    spec: ModelSpec, load: TensorLoader, shard: ModelShard | None, quantization: str | None
) -> CodedWeight | None:
    """The word table in few bits, where the quantization keeps it so."""
    kept = None if quantization is None else weight_format(quantization, spec)
    if kept is None or shard is not None:
        return None
    shape = (spec.vocab_size, spec.embedding_size)
    if kept.keeps_codes:
        return load.kept_table(spec.embeddings["word"], shape)
    if kept.table_bits is None:
        return None
    return load.grouped(spec.embeddings["word"], shape, bits=kept.table_bits)


def _embedding_weights(
    spec: ModelSpec,
    load: TensorLoader,
    shard: ModelShard | None,
    *,
    coded: CodedWeight | None,
) -> EmbeddingWeights:
    names, width = spec.embeddings, spec.embedding_size
    token_type = project = norm = None
    if spec.num_token_types:
        token_type = load.tensor(names["token_type"], (spec.num_token_types, width))
    if spec.is_projected:
        project = _project_in(spec, load)
    if "norm" in names:
        has_bias = spec.layer_spec.norm_bias
        norm = load.norm(names["norm"], width, eps=spec.norm_eps, has_bias=has_bias)
    no_words = torch.empty((0, width), dtype=load.dtype, device=load.device)
    word = _word_table(spec, load, shard) if coded is None else no_words
    places = scales = None
    if "word_places" in names:
        places = load.row_numbers(names["word_places"], spec.vocab_size, num_rows=len(word))
    if "word_scales" in names:
        scales = load.tensor(names["word_scales"], (spec.vocab_size,))
    return EmbeddingWeights(
        word=word,
        position=_position_table(spec, load),
        token_type=token_type,
        norm=norm,
        project=project,
        projected_norm=_projected_norm(spec, load),
        coded=coded,
        places=places,
        scales=scales,
    )


def _word_table(spec: ModelSpec, load: TensorLoader, shard: ModelShard | None) -> torch.Tensor:
    """All words; or a rank's words, and behind them a row of zeros for those of other ranks."""
    name, shape = spec.embeddings["word"], (spec.vocab_size, spec.embedding_size)
    if "word_places" in spec.embeddings:  # rows that tokens share
        shape = (load.shape(name)[0], spec.embedding_size)
    if shard is None:
        return load.tensor(name, shape)
    local = load.tensor(name, shape, part=Part(0, (shard.vocab,)))
    return torch.cat([local, local.new_zeros((1, shape[1]))])


def _position_table(spec: ModelSpec, load: TensorLoader) -> torch.Tensor | None:
    """The learned positions from the first one that a token may have; None without learned ones."""
    if "position" not in spec.embeddings:
        return None
    # A causal model adds its positions to what the words were projected to.
    width = spec.hidden_size if spec.is_causal else spec.embedding_size
    rows = spec.first_position_row + spec.max_positions + spec.position_offset
    return load.tensor(spec.embeddings["position"], (rows, width))[spec.first_position_row :]


def _project_in(spec: ModelSpec, load: TensorLoader) -> LinearWeight:
    names, shape = spec.embeddings, (spec.hidden_size, spec.embedding_size)
    if "project_in" not in names:
        return load.linear(names["project"], *shape)
    return load.linear_from(load.tensor(f"{names['project_in']}.weight", shape), None)


def _projected_norm(spec: ModelSpec, load: TensorLoader) -> RowNorm | None:
    """A norm without weights, which is all that a family has there."""
    if "projected_norm" not in spec.embeddings:
        return None
    return load.plain_norm(spec.hidden_size, eps=spec.norm_eps)


def _project_out(spec: ModelSpec, load: TensorLoader) -> LinearWeight | None:
    if not _projects_out(spec):
        return None
    stem, shape = spec.layer_spec.final["project_out"], (spec.output_size, spec.hidden_size)
    return load.linear_from(load.tensor(f"{stem}.weight", shape), None)


def _projects_out(spec: ModelSpec) -> bool:
    """OPT does not where its embedding is as wide as its layers."""
    is_named = "project_out" in spec.layer_spec.final
    return is_named and (spec.projected_size > 0 or spec.is_projected)


def _relative_bias(
    spec: ModelSpec, load: TensorLoader, shard: ModelShard | None
) -> torch.Tensor | None:
    """The bias of each distance of two tokens: f32 [local heads, 2 * max_positions - 1].

    Column d + max_positions - 1 is the bias for key position minus query position = d: that of a
    learned table's bucket, or of ALiBi.
    Source: T5 (arXiv 1910.10683), section 2.1, the bidirectional buckets.
    """
    slopes = model_slopes(spec, load.device)
    if not spec.relative_bias_rows and slopes is None:
        return None
    span = spec.max_positions + spec.position_offset  # a wrapped model may use every position
    distance = torch.arange(-(span - 1), span, device=load.device)
    if slopes is not None:
        bias = alibi_bias(slopes, distance)
    else:
        shape = (spec.relative_bias_rows, spec.num_heads)
        table = load.tensor(spec.embeddings["relative_bias"], shape).float()
        bias = table[_bucket(distance, spec)].T
    if shard is not None:
        bias = bias[shard.heads.start : shard.heads.stop]
    return bias.contiguous()


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
