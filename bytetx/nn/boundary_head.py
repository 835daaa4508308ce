"""GLiNER2.5's head: spans of any length, made of the boundaries between words.

A text of n words has n + 1 boundaries. Each field of a schema says of each boundary how likely a
span begins or ends there, and the likeliest pairs of all fields are a text's candidates, which
every field scores. All of it is in f32; only candidates depend on the text as a whole.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from bytetx.checkpoint.schema_spec import BoundarySpec
from bytetx.nn.boundary_relations import BoundaryRelations, load_boundary_relations
from bytetx.nn.schema_head import SchemaHead, load_classifier
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.linear import LinearWeight, linear
from bytetx.ops.norm import layer_norm

_EPS = 1e-5  # torch's default
_HEAD = "boundary_head"
_POOL, _SCORER = f"{_HEAD}.shared_pool_builder", f"{_HEAD}.shared_pool_scorer"
_FILM_SIZE = 64  # features of the hidden layer that a field conditions
# The pairs that a field chooses come before the others, whose scores are far below.
_CHOSEN = 5000.0
# Elements of the hidden layer that is computed at a time: 4 MiB stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 20

Norm = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class BoundaryAttention:
    """A layer of attention among the boundaries of a text."""

    norm: Norm
    qkv: LinearWeight
    out: LinearWeight
    num_heads: int
    window: int

    def __call__(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """x: f32 [total_boundaries, size].  lengths: boundaries of each text."""
        rows = linear(layer_norm(x, *self.norm, eps=_EPS), self.qkv)
        qkv = rows.view(len(x), 3, self.num_heads, -1).permute(1, 2, 0, 3)
        parts = (part.split(lengths, 1) for part in qkv)
        mixed = [self._text(*own) for own in zip(*parts, strict=True)]
        whole = torch.cat(mixed, dim=1).transpose(0, 1).reshape(x.shape)
        return linear(whole, self.out, residual=x)

    def _text(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        near = None
        if 0 < self.window < q.shape[1] - 1:
            places = torch.arange(q.shape[1], device=q.device)
            near = (places[:, None] - places).abs() <= self.window
        return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


@dataclass(frozen=True, slots=True)
class BoundaryMlp:
    """A gated layer behind a norm, with a residual."""

    norm: Norm
    up: LinearWeight
    down: LinearWeight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = linear(layer_norm(x, *self.norm, eps=_EPS), self.up).chunk(2, dim=1)
        return linear(value * F.silu(gate), self.down, residual=x)


@dataclass(frozen=True, slots=True)
class BoundaryEncoder:
    """Rows of boundaries, of the words on both sides.

    before, behind: f32 [hidden_size], in place of a word where the text begins and ends.
    """

    before: torch.Tensor
    behind: torch.Tensor
    left: LinearWeight
    right: LinearWeight
    both: LinearWeight
    norm: Norm
    attention: tuple[BoundaryAttention, ...]
    mlps: tuple[BoundaryMlp, ...]

    def __call__(self, words: torch.Tensor, num_words: Sequence[int]) -> torch.Tensor:
        """words: f32 [total_words, hidden_size].  Returns f32 [total_words + num_texts, size]."""
        counts = np.array(num_words, dtype=np.int64)
        ends = np.cumsum(counts + 1)
        left = np.arange(-1, ends[-1] - 1) - np.repeat(np.arange(len(counts)), counts + 1)
        right = left + 1
        left[ends - counts - 1] = len(words)
        right[ends - 1] = len(words)
        sides = [
            linear(torch.cat([words, edge[None]]), weight)[_on(places, words)]
            for edge, weight, places in (
                (self.before, self.left, left),
                (self.behind, self.right, right),
            )
        ]
        x = layer_norm(linear(torch.cat(sides, dim=1), self.both), *self.norm, eps=_EPS)
        for layer in self.attention:
            x = layer(x, (counts + 1).tolist())
        for mlp in self.mlps:
            x = mlp(x)
        return x


@dataclass(frozen=True, slots=True)
class SpanContent:
    """Features of the words inside a span: their mean, and their largest, smoothly.

    takes_largest: whether the second is there.
    """

    values: LinearWeight
    takes_largest: bool
    norm: Norm
    out: LinearWeight

    def prefixes(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums of all words before each boundary of a text, and logarithms of sums."""
        values = linear(words, self.values)
        sums = F.pad(values.cumsum(0), (0, 0, 1, 0))
        if not self.takes_largest:
            return sums, None
        floor = torch.finfo(torch.float32).min / 4
        return sums, F.pad(torch.logcumsumexp(values, dim=0), (0, 0, 1, 0), value=floor)

    def __call__(
        self,
        prefixes: tuple[torch.Tensor, torch.Tensor | None],
        starts: torch.Tensor,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        """starts, ends: int64 [n], boundaries.  Returns f32 [n, pair_size]."""
        sums, logs = prefixes
        found = (sums[ends] - sums[starts]) / (ends - starts).clamp_min(1)[:, None]
        if logs is not None:
            less = (logs[starts] - logs[ends]).clamp(max=-1e-6)
            most = logs[ends] + torch.log1p(-torch.exp(less))
            found = torch.cat([found, most.nan_to_num(neginf=0.0, posinf=0.0)], dim=1)
        return linear(layer_norm(found, *self.norm, eps=_EPS), self.out)


@dataclass(frozen=True, slots=True)
class Marginals:
    """Scores of a text's boundaries and words for each field.

    starts, ends: f32 [num_fields, num_words + 1].  inside: f32 [num_fields, num_words + 1], sums of
    the words before each boundary, less their mean; mean: f32 [num_fields, 1]. None are not read.
    """

    starts: torch.Tensor
    ends: torch.Tensor
    inside: torch.Tensor | None
    mean: torch.Tensor | None

    def of(self, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """f32 [n, num_fields], a part of the scores of n spans."""
        score = self.starts[:, starts] + self.ends[:, ends]
        if self.inside is not None and self.mean is not None:
            lengths = ends - starts
            inside = self.inside[:, ends] - self.inside[:, starts] + self.mean * lengths
            score = score + inside / lengths.clamp_min(1).sqrt()
        return score.t()


@dataclass(frozen=True, slots=True)
class PairScorer:
    """Scores of spans for each field.

    film: of a field, the scale and the shift of the hidden layer's inputs.  hidden, hidden_bias:
    f32 [64, pair_size], [64].  last, last_bias: f32 [64], [1].
    """

    starts: LinearWeight
    ends: LinearWeight
    lengths: LinearWeight
    prior: LinearWeight
    content: SpanContent | None
    norm: Norm
    queries: LinearWeight
    film: LinearWeight
    hidden: torch.Tensor
    hidden_bias: torch.Tensor
    last: torch.Tensor
    last_bias: torch.Tensor

    def __call__(self, spans: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """f32 [n, num_fields], without the marginals.

        spans: f32 [n, pair_size].  queries: f32 [num_fields, pair_size].
        """
        scale, shift = linear(queries, self.film).chunk(2, dim=1)
        score = spans @ queries.t() / math.sqrt(spans.shape[1])
        block = max(_BLOCK_ELEMENTS // max(len(spans) * _FILM_SIZE, 1), 1)
        for first in range(0, len(queries), block):
            own = slice(first, first + block)
            weight = self.hidden * (1 + scale[own])[:, None]  # [block, 64, pair_size]
            bias = shift[own] @ self.hidden.t() + self.hidden_bias
            hidden = torch.addmm(bias.view(-1), spans, weight.view(-1, spans.shape[1]).t())
            found = F.gelu(hidden).view(len(spans), -1, _FILM_SIZE) @ self.last
            score[:, own] += found + self.last_bias
        return score


@dataclass(frozen=True, slots=True)
class TextCandidates:
    """The spans of a text that fields are asked of, and what they say.

    spans: int64 [n, 2], boundaries; a place without a candidate has an end that is no later than
    its start, and 0 as logits.  logits: f32 [n, num_fields], before the temperature.
    """

    spans: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class BoundaryHead(SchemaHead):
    """The head of a GLiNER2.5 model.

    boundary_queries: of the starts and ends, for boundaries; inside: for words.  pool: of starts
    and ends that are paired.  null: of a field's row, that the text has none; None is not asked.
    """

    spec: BoundarySpec
    encoder: BoundaryEncoder
    boundaries: tuple[LinearWeight, LinearWeight]
    boundary_queries: tuple[LinearWeight, LinearWeight]
    inside: tuple[LinearWeight, LinearWeight] | None
    pool: tuple[LinearWeight, LinearWeight]
    scorer: PairScorer
    null: LinearWeight | None
    relations: BoundaryRelations | None

    def absent(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of fields, f32 [n, hidden_size], to the logits of texts without them, f32 [n]; 0
        where the model does not say so."""
        if self.null is None:
            return rows.new_zeros(len(rows))
        return linear(rows, self.null)[:, 0]

    def num_candidates(self, num_words: int) -> int:
        return min(self.spec.pool_size, min(self.spec.top_k, num_words + 1) ** 2)

    def candidates(
        self,
        words: torch.Tensor,
        fields: torch.Tensor,
        num_words: Sequence[int],
        extra: torch.Tensor,
    ) -> list[TextCandidates]:
        """The spans of each text.

        words: f32 [total_words, hidden_size].  fields: f32 [num_texts, num_fields, hidden_size].
        extra: int64 [n, 2], spans of every text that come behind its own ones.
        """
        own = self.encoder(words, num_words)
        rows = fields.flatten(0, 1)
        both = [linear(own, weight) for weight in self.boundaries]
        ends = [linear(own, weight) for weight in self.pool]
        pairs = [linear(own, weight) for weight in (self.scorer.starts, self.scorer.ends)]
        asked = [linear(rows, weight) for weight in self.boundary_queries]
        asked.append(linear(rows, self.scorer.queries))
        if self.inside is not None:
            asked.append(linear(rows, self.inside[1]))
        num_fields, found = fields.shape[1], []
        first = begin = 0
        for text, count in enumerate(num_words):
            mine = slice(begin, begin + count + 1)
            query = [part[text * num_fields : (text + 1) * num_fields] for part in asked]
            read = words[first : first + count]
            marginals = self._marginals([part[mine] for part in both], read, query)
            starts, stops = (part[mine] for part in ends)
            spans = self._pool(starts, stops, marginals)
            spans = torch.cat([spans, extra])
            prior = (starts[spans[:, 0]] * stops[spans[:, 1]]).sum(1) / math.sqrt(self.spec.size)
            represented = self._represent([part[mine] for part in pairs], read, spans, prior)
            logits = self.scorer(represented, query[2]) + marginals.of(spans[:, 0], spans[:, 1])
            is_none = spans[:, 1] <= spans[:, 0]
            found.append(TextCandidates(spans, logits.masked_fill_(is_none[:, None], 0)))
            first, begin = first + count, begin + count + 1
        return found

    def _marginals(
        self, own: Sequence[torch.Tensor], words: torch.Tensor, query: Sequence[torch.Tensor]
    ) -> Marginals:
        scale = 1 / math.sqrt(self.spec.size)
        starts, ends = (asked @ rows.t() * scale for asked, rows in zip(query, own, strict=False))
        if self.inside is None:
            return Marginals(starts, ends, None, None)
        inside = query[3] @ linear(words, self.inside[0]).t() * scale
        mean = inside.mean(dim=1, keepdim=True)
        return Marginals(starts, ends, F.pad((inside - mean).cumsum(dim=1), (1, 0)), mean)

    def _pool(self, starts: torch.Tensor, ends: torch.Tensor, marginals: Marginals) -> torch.Tensor:
        """int64 [num_candidates, 2].  starts, ends: f32 [num_words + 1, size]."""
        num_boundaries = len(starts)
        k = min(self.spec.top_k, num_boundaries)
        likeliest = [
            part.amax(dim=0).sort(descending=True, stable=True)
            for part in (marginals.starts, marginals.ends)
        ]
        (first, first_at), (last, last_at) = ((v[:k], at[:k]) for v, at in likeliest)
        compatible = starts[first_at] @ ends[last_at].t() / math.sqrt(self.spec.size)
        is_span = (last_at > first_at[:, None]).flatten()
        score = (compatible + first[:, None] + last).flatten()
        quota = min(self.spec.min_pool, k * k)
        if quota:
            own = (
                compatible + marginals.starts[:, first_at, None] + marginals.ends[:, None, last_at]
            )
            own = own.flatten(1).masked_fill(~is_span, -math.inf)
            chosen = own.sort(dim=1, descending=True, stable=True).indices[:, :quota]
            rank = torch.arange(quota, 0, -1, dtype=score.dtype, device=score.device) + _CHOSEN
            score.scatter_reduce_(0, chosen.flatten(), rank.repeat(len(own)), "amax")
        score.masked_fill_(~is_span, -math.inf)
        keys = (first_at[:, None] * num_boundaries + last_at).flatten()
        keys, order = keys.sort()
        best = score[order].sort(descending=True, stable=True).indices[: self.spec.pool_size]
        keys = torch.where(is_span[order[best]], keys[best], 0)
        return torch.stack([keys // num_boundaries, keys % num_boundaries], dim=1)

    def _represent(
        self,
        pairs: Sequence[torch.Tensor],
        words: torch.Tensor,
        spans: torch.Tensor,
        prior: torch.Tensor,
    ) -> torch.Tensor:
        """f32 [n, pair_size].  prior: f32 [n], how well the ends of each span go together."""
        scorer, (starts, ends) = self.scorer, spans.unbind(1)
        length = (ends - starts).clamp_min(1).float()
        features = torch.stack([length.log1p(), length / max(len(words), 1), length.rsqrt()], 1)
        found = pairs[0][starts] + pairs[1][ends]
        found = linear(features, scorer.lengths, residual=found)
        found = linear(prior[:, None].contiguous(), scorer.prior, residual=found)
        if scorer.content is not None:
            found = found + scorer.content(scorer.content.prefixes(words), starts, ends)
        return layer_norm(found, *scorer.norm, eps=_EPS)


def load_boundary_head(spec: BoundarySpec, load: TensorLoader, *, size: int) -> BoundaryHead:
    """Raises CheckpointError where tensors are missing or wrong.  size: of the encoder's rows."""
    load = load.in_float32()
    own, query = spec.size, f"{_HEAD}.boundary_query_head"
    inside = None
    if spec.reads_inside:
        inside = (
            load.linear(f"{query}.inside_text_projection", own, size),
            load.linear(f"{query}.inside_query_projection", own, size),
        )
    return BoundaryHead(
        spec=spec,
        classifier=load_classifier(load, size),
        encoder=_load_encoder(spec, load, size),
        boundaries=(
            load.linear(f"{query}.start_boundary_projection", own, own),
            load.linear(f"{query}.end_boundary_projection", own, own),
        ),
        boundary_queries=(
            load.linear(f"{query}.start_query_projection", own, size),
            load.linear(f"{query}.end_query_projection", own, size),
        ),
        inside=inside,
        pool=(
            load.linear(f"{_POOL}.start_projection", own, own),
            load.linear(f"{_POOL}.end_projection", own, own),
        ),
        scorer=_load_scorer(spec, load, size),
        null=(
            None
            if spec.abstains_above is None
            else load.linear(f"{_HEAD}.null_projection", 1, size)
        ),
        relations=(
            None if spec.relations is None else load_boundary_relations(spec.relations, load, size)
        ),
    )


def _load_encoder(spec: BoundarySpec, load: TensorLoader, size: int) -> BoundaryEncoder:
    stem, own = f"{_HEAD}.boundary_encoder", spec.size
    attention = tuple(
        BoundaryAttention(
            _load_norm(load, f"{stem}.attention_blocks.{number}.norm", own),
            load.linear(f"{stem}.attention_blocks.{number}.qkv_projection", 3 * own, own),
            load.linear(f"{stem}.attention_blocks.{number}.output_projection", own, own),
            spec.num_heads,
            spec.window,
        )
        for number in range(spec.num_attention_layers)
    )
    mlps = tuple(
        BoundaryMlp(
            _load_norm(load, f"{stem}.refinement_blocks.{number}.norm", own),
            load.linear(f"{stem}.refinement_blocks.{number}.input_projection", 2 * inner, own),
            load.linear(f"{stem}.refinement_blocks.{number}.output_projection", own, inner),
        )
        for number, inner in enumerate(spec.inner_sizes)
    )
    return BoundaryEncoder(
        load.tensor(f"{stem}.bos_state", (size,)),
        load.tensor(f"{stem}.eos_state", (size,)),
        load.linear(f"{stem}.left_projection", own, size),
        load.linear(f"{stem}.right_projection", own, size),
        load.linear(f"{stem}.output_projection", own, 2 * own),
        _load_norm(load, f"{stem}.layer_norm", own),
        attention,
        mlps,
    )


def _load_scorer(spec: BoundarySpec, load: TensorLoader, size: int) -> PairScorer:
    own, pair = spec.size, spec.pair_size
    content = None
    if spec.content_size:
        stem = f"{_SCORER}.content_pooler"
        inner = spec.content_size * (2 if spec.takes_largest else 1)
        content = SpanContent(
            load.linear(f"{stem}.value_projection", spec.content_size, size),
            spec.takes_largest,
            _load_norm(load, f"{stem}.layer_norm", inner),
            load.linear(f"{_SCORER}.content_projection", pair, inner),
        )
    return PairScorer(
        load.linear(f"{_SCORER}.start_projection", pair, own),
        load.linear(f"{_SCORER}.end_projection", pair, own),
        load.linear(f"{_SCORER}.length_projection", pair, 3),
        load.linear(f"{_SCORER}.prior_projection", pair, 1),
        content,
        _load_norm(load, f"{_SCORER}.candidate_norm", pair),
        load.linear(f"{_SCORER}.query_projection", pair, size),
        load.linear(f"{_SCORER}.film", 2 * pair, pair),
        load.tensor(f"{_SCORER}.film_output.0.weight", (_FILM_SIZE, pair)),
        load.tensor(f"{_SCORER}.film_output.0.bias", (_FILM_SIZE,)),
        load.tensor(f"{_SCORER}.film_output.3.weight", (1, _FILM_SIZE))[0],
        load.tensor(f"{_SCORER}.film_output.3.bias", (1,)),
    )


def _load_norm(load: TensorLoader, stem: str, size: int) -> Norm:
    return load.tensor(f"{stem}.weight", (size,)), load.tensor(f"{stem}.bias", (size,))


def _on(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(rows).to(like.device)
