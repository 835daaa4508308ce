"""GLiNER's heads: scores of spans of words, or of the words themselves, for each label.

All of it is in f32. A span's representation is a sum over its two ends before the last
activation, so each end is projected once for each word, and not once for each span.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from bytetx.checkpoint.extraction import ExtractionSpec
from bytetx.checkpoint.model_spec import ModelSpec
from bytetx.checkpoint.weights import Weights
from bytetx.errors import CheckpointError
from bytetx.nn.label_encoder import (
    FusionLayer,
    LabelEncoder,
    fuse,
    load_fusion,
    load_labels_encoder,
)
from bytetx.nn.relations import Perceptron, RelationScorer, load_relations
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.linear import LinearWeight, linear

# Elements of the hidden layer that is computed at a time: 4 MiB stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 20
# Features of a hidden layer for each of its input; "marker" alone has fewer.
_EXPANSION = 4
_STEM = "span_rep_layer.span_rep_layer"


@dataclass(frozen=True, slots=True)
class WordLstm:
    """A bidirectional LSTM over the words of each text.

    params: as torch.lstm takes them, of all layers and directions.  num_features: of a word.
    """

    params: tuple[torch.Tensor, ...]
    num_layers: int
    num_features: int

    def __call__(self, words: torch.Tensor, num_words: Sequence[int]) -> torch.Tensor:
        """words: f32 [total_words, num_features].  num_words: of each text."""
        lengths = np.array(num_words, dtype=np.int64)
        if not lengths.any():
            return words
        order = np.argsort(-lengths, kind="stable")
        starts, longest = (np.cumsum(lengths) - lengths)[order], int(lengths.max())
        batch_sizes = np.searchsorted(-lengths[order], -np.arange(longest), side="left")
        steps = np.repeat(np.arange(longest), batch_sizes)
        rows = np.arange(len(steps)) - np.repeat(np.cumsum(batch_sizes) - batch_sizes, batch_sizes)
        places = torch.from_numpy(starts[rows] + steps).to(words.device)
        shape = (2 * self.num_layers, int(batch_sizes[0]), self.num_features // 2)
        zeros = words.new_zeros(shape)
        found, _, _ = torch.lstm(
            words[places],
            torch.from_numpy(batch_sizes),
            (zeros, zeros),
            list(self.params),
            True,  # biases
            self.num_layers,
            0.0,
            False,  # training
            True,  # bidirectional
        )
        out = torch.empty_like(words)
        out[places] = found
        return out


@dataclass(frozen=True, slots=True)
class SpanScorer:
    """Scores of each span of at most max_width words.

    starts, ends: of the two ends of a span.  first, second: what follows the ReLU of these, halves
    of one linear layer; mean: of the mean of a text's words, a third part (markerV1).
    out: the last layer, [hidden_size, 4 * hidden_size]; None where `first` is the last one.
    folded: its transpose without a bias, for labels.
    labels: of the labels' rows; None takes them as they are.
    """

    max_width: int
    starts: Perceptron
    ends: Perceptron
    first: LinearWeight
    second: LinearWeight
    mean: LinearWeight | None
    out: LinearWeight | None
    folded: LinearWeight | None
    labels: Perceptron | None

    def rows_of(self, num_words: int) -> int:
        """Rows of scores of a text: of spans by their first word, then by their width."""
        return num_words * self.max_width

    def __call__(
        self, words: torch.Tensor, labels: torch.Tensor, num_words: Sequence[int]
    ) -> torch.Tensor:
        """words: f32 [total_words, hidden_size].  labels: f32 [num_texts, num_labels, hidden_size],
        or of one text where all have the same.

        Returns the scores, f32 [total_rows, num_labels]; those of spans that end behind a text's
        last word have no meaning.
        """
        num_texts, num_labels, size = labels.shape
        first, second = self.halves(words)
        found = labels.reshape(-1, size)
        found = found if self.labels is None else self.labels(found)
        wide = self.wide(found)
        out = words.new_empty((self.max_width * len(words), num_labels))
        row, start = 0, 0
        for text, count in enumerate(num_words):
            if not count:
                continue
            stop, end = row + self.rows_of(count), start + count
            own, begin = first[start:end], text * num_labels if num_texts > 1 else 0
            rows = slice(begin, begin + num_labels)
            if self.mean is not None:
                average = torch.relu(words[start:end].mean(dim=0, keepdim=True))
                own = own + linear(average, self.mean)
            own_wide = None if wide is None else wide[rows]
            self.score_text(own, second[start:end], found[rows], own_wide, out[row:stop])
            row, start = stop, end
        return out

    def halves(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each word's part of the spans that it begins, and to those that it ends."""
        first = linear(torch.relu(self.starts(words)), self.first)
        return first, linear(torch.relu(self.ends(words)), self.second)

    def represent(
        self, words: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor
    ) -> torch.Tensor:
        """f32 [num_spans, hidden_size], what labels are multiplied with.

        words: f32 [n, hidden_size], of one text.  starts, stops: int64 [num_spans], the first and
        the last words of spans.
        """
        first, second = self.halves(words)
        if self.mean is not None:
            first = first + linear(torch.relu(words.mean(dim=0, keepdim=True)), self.mean)
        spans = first[starts] + second[stops]
        return spans if self.out is None else linear(spans.relu_(), self.out)

    def wide(self, labels: torch.Tensor) -> torch.Tensor | None:
        """Labels multiplied by the last layer."""
        return None if self.folded is None else linear(labels, self.folded)

    def score_text(
        self,
        first: torch.Tensor,
        second: torch.Tensor,
        labels: torch.Tensor,
        wide: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Writes the scores of one text's spans, f32 [n * max_width, num_labels].

        first, second: halves of its n words.  wide: of the labels.
        """
        # Behind the last word are rows of zeros, so that every span has an end.
        last = F.pad(second, (0, 0, 0, self.max_width - 1))
        folds = wide is not None and self._folds(len(out), len(labels))
        self._score(first, last, labels, wide if folds else None, out)

    def _score(
        self,
        first: torch.Tensor,
        last: torch.Tensor,
        labels: torch.Tensor,
        wide: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Writes the scores of one text.  first: [n, k].  last: [n + max_width - 1, k].

        wide: the labels multiplied by `out`, where the spans are multiplied by these.
        """
        (n, k), width, weight = first.shape, self.max_width, self.out
        ends = last.as_strided((n, width, k), (k, k, 1))
        bias = None
        if wide is not None and weight is not None and weight.bias is not None:
            bias = labels @ weight.bias
        block = max(_BLOCK_ELEMENTS // (width * k), 1)
        for begin in range(0, n, block):
            stop = min(begin + block, n)
            spans = first.new_empty((stop - begin, width, k))
            torch.add(first[begin:stop, None], ends[begin:stop], out=spans)
            spans = spans.view(-1, k)
            if weight is not None:
                spans = spans.relu_()
                spans = spans if wide is not None else linear(spans, weight)
            rows = out[begin * width : stop * width]
            if bias is None or wide is None:
                torch.mm(spans, labels.t(), out=rows)
            else:
                torch.addmm(bias, spans, wide.t(), out=rows)

    def _folds(self, num_spans: int, num_labels: int) -> bool:
        """Whether fewer products are needed where the labels are multiplied by `out` first."""
        assert self.out is not None
        n, k = self.out.n, self.out.k
        return num_labels * k * (n + num_spans) < num_spans * n * (k + num_labels)


@dataclass(frozen=True, slots=True)
class WordScorer:
    """Scores of each word as a start, an end, and inside of a span, for each label.

    words, labels: to two parts each, of which the second ones are multiplied.  first, label_part,
    product: of the words' first part, of the labels' and of the product, thirds of one linear
    layer.  out: [3, 4 * hidden_size].  prompts: of the labels' rows before all this; None takes
    them as they are.
    """

    words: LinearWeight
    labels: LinearWeight
    first: LinearWeight
    label_part: LinearWeight
    product: LinearWeight
    out: LinearWeight
    prompts: Perceptron | None = None

    def rows_of(self, num_words: int) -> int:
        """Rows of scores of a text: of its words, each with starts, ends and insides."""
        return 3 * num_words

    def __call__(
        self, words: torch.Tensor, labels: torch.Tensor, num_words: Sequence[int]
    ) -> torch.Tensor:
        """As SpanScorer; of each word three rows: as a start, as an end, inside."""
        num_texts, num_labels, size = labels.shape
        own, other = linear(words, self.words).split(size, dim=1)
        given = labels.reshape(-1, size)
        given = given if self.prompts is None else self.prompts(given)
        named, factors = linear(given, self.labels).split(size, dim=1)
        first = linear(own.contiguous(), self.first)
        label_part = linear(named.contiguous(), self.label_part).view(num_texts, num_labels, -1)
        factors = factors.reshape(num_texts, num_labels, size)
        out = words.new_empty((len(words), 3, num_labels))
        block = max(_BLOCK_ELEMENTS // (num_labels * _EXPANSION * size), 1)
        end = 0
        for text, count in enumerate(num_words):
            start, end = end, end + count
            own_labels = text if num_texts > 1 else 0
            for begin in range(start, end, block):
                stop = min(begin + block, end)
                products = (other[begin:stop, None] * factors[own_labels]).view(-1, size)
                hidden = linear(products, self.product).view(stop - begin, num_labels, -1)
                hidden += first[begin:stop, None]
                hidden += label_part[own_labels]
                scores = linear(hidden.relu_().view(-1, hidden.shape[2]), self.out)
                out[begin:stop] = scores.view(stop - begin, num_labels, 3).transpose(1, 2)
        return out.view(-1, num_labels)


@dataclass(frozen=True, slots=True)
class ExtractionHead:
    """A GLiNER head. projection: of the encoder's rows, where their size is another one.

    labels: the encoder of these, where they have one of their own.  relations: between spans.
    """

    spec: ExtractionSpec
    projection: LinearWeight | None
    lstm: WordLstm | None
    scorer: SpanScorer | WordScorer
    labels: LabelEncoder | None = None
    fusion: tuple[FusionLayer, ...] = ()
    relations: RelationScorer | None = None

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """The encoder's rows [n, in_features] -> f32 [n, hidden_size]."""
        rows = rows.float()
        return rows if self.projection is None else linear(rows, self.projection)

    @torch.inference_mode()
    def read(
        self, words: torch.Tensor, labels: torch.Tensor, num_words: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Words and labels as `scorer` takes them, which gives scores before the sigmoid.

        words: f32 [total_words, hidden_size], of the words of each text.
        labels: f32 [num_texts, num_labels, hidden_size], or of one text where all have the same.
        """
        if self.fusion:
            own = words.split(list(num_words))
            every = labels.expand(len(own), -1, -1)
            fused = [fuse(self.fusion, *pair) for pair in zip(own, every, strict=True)]
            words = torch.cat([pair[0] for pair in fused])
            labels = torch.stack([pair[1] for pair in fused])
        if self.lstm is not None:
            words = self.lstm(words, num_words)
        return words, labels


def load_extraction(spec: ExtractionSpec, load: TensorLoader, encoder: ModelSpec) -> ExtractionHead:
    """The head of a GLiNER checkpoint. Raises CheckpointError where tensors are missing or wrong.

    encoder: of texts.
    """
    assert isinstance(load.tensors, Weights)
    labels = None if spec.labels is None else load_labels_encoder(spec, spec.labels, load)
    load = load.in_float32()
    projection, size = None, spec.hidden_size
    if encoder.output_size != size:
        projection = load.linear("token_rep_layer.projection", size, encoder.output_size)
    lstm = _load_lstm(spec, load) if spec.num_lstm_layers else None
    is_span = spec.max_width is not None
    scorer = _load_span_scorer(spec, load) if is_span else _load_word_scorer(spec, load)
    fusion = load_fusion(spec, load, num_heads=encoder.num_heads)
    relations = None
    if spec.relations is not None:
        spans = scorer if isinstance(scorer, SpanScorer) else _load_span_scorer(spec, load)
        relations = load_relations(spec.relations, load, spec.hidden_size, spans.represent)
    return ExtractionHead(spec, projection, lstm, scorer, labels, fusion, relations)


def _load_lstm(spec: ExtractionSpec, load: TensorLoader) -> WordLstm:
    size, params = spec.hidden_size, []
    if size % 2:
        raise CheckpointError(f"gliner_config.json: hidden_size {size} must be even for an LSTM")
    rows = 2 * size  # four gates, each half the size
    for layer in range(spec.num_lstm_layers):
        for direction in ("", "_reverse"):
            for kind, shape in (
                ("weight_ih", (rows, size)),
                ("weight_hh", (rows, size // 2)),
                ("bias_ih", (rows,)),
                ("bias_hh", (rows,)),
            ):
                name = f"rnn.lstm.{kind}_l{layer}{direction}"
                params.append(load.tensor(name, shape))
    return WordLstm(tuple(params), spec.num_lstm_layers, size)


def _perceptron(
    load: TensorLoader, stem: str, size: int, *, expansion: int = _EXPANSION
) -> Perceptron:
    hidden = expansion * size
    return Perceptron(
        load.linear(f"{stem}.0", hidden, size), load.linear(f"{stem}.3", size, hidden)
    )


def _load_span_scorer(spec: ExtractionSpec, load: TensorLoader) -> SpanScorer:
    """That of spans, or what represents those of a model that scores words."""
    labels = _perceptron(load, "prompt_rep_layer", spec.hidden_size)
    return load_span_scorer(
        load,
        _STEM,
        size=spec.hidden_size,
        markers="markerV0" if spec.max_width is None else spec.markers,
        max_width=spec.max_width or 1,
        labels=labels,
    )


def load_span_scorer(
    load: TensorLoader,
    prefix: str,
    *,
    size: int,
    markers: str,
    max_width: int,
    labels: Perceptron | None,
) -> SpanScorer:
    """Raises CheckpointError where tensors are missing or wrong.

    prefix: what their names begin with.  markers: as of ExtractionSpec.
    """
    is_plain = markers == "marker"
    expansion = 2 if is_plain else _EXPANSION
    num_parts = 3 if markers == "markerV1" else 2
    rows = size if is_plain else _EXPANSION * size
    stem = f"{prefix}.out_project" + ("" if is_plain else ".0")
    parts = _parts(load, stem, rows, size, num_parts)
    out = folded = None
    if not is_plain:
        out = load.linear(f"{prefix}.out_project.3", size, rows)
        matrix = load.tensor(f"{prefix}.out_project.3.weight", (size, rows))
        folded = load.linear_from(matrix.t().contiguous(), None)
    return SpanScorer(
        max_width=max_width,
        starts=_perceptron(load, f"{prefix}.project_start", size, expansion=expansion),
        ends=_perceptron(load, f"{prefix}.project_end", size, expansion=expansion),
        first=parts[0],
        second=parts[1],
        mean=parts[2] if num_parts == 3 else None,
        out=out,
        folded=folded,
        labels=labels,
    )


def _load_word_scorer(spec: ExtractionSpec, load: TensorLoader) -> WordScorer:
    size, hidden = spec.hidden_size, _EXPANSION * spec.hidden_size
    first, label_part, product = _parts(load, "scorer.out_mlp.0", hidden, size, 3)
    return WordScorer(
        load.linear("scorer.proj_token", 2 * size, size),
        load.linear("scorer.proj_label", 2 * size, size),
        first,
        label_part,
        product,
        load.linear("scorer.out_mlp.3", 3, hidden),
        None if spec.relations is None else _perceptron(load, "prompt_rep_layer", size),
    )


def _parts(
    load: TensorLoader, stem: str, rows: int, size: int, num_parts: int
) -> list[LinearWeight]:
    """A linear layer by the parts of its input; the first one has the bias."""
    weight = load.tensor(f"{stem}.weight", (rows, num_parts * size))
    bias = load.tensor(f"{stem}.bias", (rows,))
    return [
        load.linear_from(part.contiguous(), None if place else bias)
        for place, part in enumerate(weight.split(size, dim=1))
    ]
