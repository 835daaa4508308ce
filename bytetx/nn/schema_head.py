"""GLiNER2's head: classes of a text, and spans of words for each field of a schema.

All of it is in f32. Structures and relations have as many instances as the head counts, each with
its own query for each field, which a recurrent layer makes of the field's row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from bytetx.checkpoint.schema_spec import SchemaSpec, SpanSchemaSpec
from bytetx.nn.extraction import SpanScorer, load_span_scorer
from bytetx.nn.relations import Perceptron
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.linear import LinearWeight, linear
from bytetx.ops.norm import layer_norm
from bytetx.ops.pooling import largest

_MAX_COUNT = 20  # instances that the head has learnt to count, with none
_SPANS = "span_rep.span_rep_layer"
_EPS = 1e-5  # torch's default
# Of count_lstm_v2 and count_lstm_moe, which no config names.
_FIELD_SIZE, _FIELD_HEADS, _FIELD_LAYERS = 128, 4, 2
_EXPERTS, _EXPERT_EXPANSION = 4, 2

# f32 [n, num_fields, hidden_size], queries of the recurrent layer and rows of fields -> queries.
Refine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class InstanceQueries:
    """Queries of each field for each instance of a structure.

    inputs: f32 [20, 3 * hidden_size], the recurrent layer's gates by the number of the instance.
    hidden: of its state.
    """

    inputs: torch.Tensor
    hidden: LinearWeight
    refine: Refine

    def __call__(self, fields: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """fields: f32 [num_texts, num_fields, hidden_size].  counts: instances of each text.

        Returns f32 [count, num_fields, hidden_size] for each text.
        """
        order = sorted(range(len(counts)), key=lambda text: -counts[text])
        own = fields[torch.tensor(order, device=fields.device)]
        state, steps, rows = own, [], []
        size = fields.shape[2]
        for step in range(counts[order[0]] if order else 0):
            active = sum(count > step for count in counts)
            state = self._step(step, state[:active].reshape(-1, size)).view(active, -1, size)
            steps.append(state)
            rows.append(own[:active])
        if not steps:
            return [fields.new_empty((0, *fields.shape[1:])) for _ in counts]
        refined = self.refine(torch.cat(steps), torch.cat(rows))
        by_step = refined.split([len(step) for step in steps])
        found = dict.fromkeys(range(len(counts)), fields.new_empty((0, *fields.shape[1:])))
        for place, text in enumerate(order):
            if counts[text]:
                found[text] = torch.stack([step[place] for step in by_step[: counts[text]]])
        return [found[text] for text in range(len(counts))]

    def _step(self, number: int, state: torch.Tensor) -> torch.Tensor:
        """A gated recurrent unit.  state: f32 [n, hidden_size]."""
        reset, update, new = self.inputs[number].chunk(3)
        own_reset, own_update, own_new = linear(state, self.hidden).chunk(3, dim=1)
        keep = torch.sigmoid(update + own_update)
        candidate = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
        return candidate + keep * (state - candidate)


@dataclass(frozen=True, slots=True)
class SchemaHead:
    """The head of a GLiNER2 model.  classifier: of a class's row."""

    spec: SchemaSpec
    classifier: Perceptron

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.float()

    def classify(self, rows: torch.Tensor) -> torch.Tensor:
        """f32 [n, hidden_size] -> f32 [n]"""
        return self.classifier(rows.contiguous())[:, 0]


@dataclass(frozen=True, slots=True)
class SpanSchemaHead(SchemaHead):
    """The head that scores every span of few words.

    counter: of a structure's row, to 20 logits.
    """

    spec: SpanSchemaSpec
    counter: Perceptron
    queries: InstanceQueries
    scorer: SpanScorer

    def count(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """f32 [n, hidden_size], rows of structures -> (int64 [n], how many instances each has;
        f32 [n], `largest` of each one's logits: a count of logits that are NaN says nothing)."""
        logits = self.counter(rows.contiguous())
        return logits.argmax(dim=1), largest(logits)

    def score(
        self, words: torch.Tensor, queries: Sequence[torch.Tensor], num_words: Sequence[int]
    ) -> torch.Tensor:
        """Scores of each text's spans before the sigmoid, one text behind the other.

        words: f32 [total_words, hidden_size].  queries: f32 [num_queries, hidden_size] of each.
        """
        sizes = [self.scorer.rows_of(n) * len(q) for n, q in zip(num_words, queries, strict=True)]
        out = words.new_empty(sum(sizes))
        if not sum(sizes):
            return out
        first, second = self.scorer.halves(words)
        wide = self.scorer.wide(torch.cat(list(queries)))
        begin = start = row = 0
        for count, own, size in zip(num_words, queries, sizes, strict=True):
            end, stop = start + count, row + len(own)
            if size:
                self.scorer.score_text(
                    first[start:end],
                    second[start:end],
                    own,
                    None if wide is None else wide[row:stop],
                    out[begin : begin + size].view(-1, len(own)),
                )
            begin, start, row = begin + size, end, stop
        return out


def load_schema_head(spec: SpanSchemaSpec, load: TensorLoader, *, size: int) -> SpanSchemaHead:
    """Raises CheckpointError where tensors are missing or wrong.  size: of the encoder's rows."""
    load = load.in_float32()
    scorer = load_span_scorer(
        load, _SPANS, size=size, markers="markerV0", max_width=spec.max_width, labels=None
    )
    counter = Perceptron(
        load.linear("count_pred.0", 2 * size, size),
        load.linear("count_pred.2", _MAX_COUNT, 2 * size),
    )
    queries = _load_queries(spec, load, size)
    return SpanSchemaHead(spec, load_classifier(load, size), counter, queries, scorer)


def load_classifier(load: TensorLoader, size: int) -> Perceptron:
    """The second layer's number counts a dropout where the model was trained with one."""
    last = "classifier.3" if "classifier.3.weight" in load.tensors else "classifier.2"
    return Perceptron(load.linear("classifier.0", 2 * size, size), load.linear(last, 1, 2 * size))


def _load_queries(spec: SpanSchemaSpec, load: TensorLoader, size: int) -> InstanceQueries:
    table = load.tensor("count_embed.pos_embedding.weight", (_MAX_COUNT, size))
    weight = load.tensor("count_embed.gru.weight_ih_l0", (3 * size, size))
    bias = load.tensor("count_embed.gru.bias_ih_l0", (3 * size,))
    hidden = load.linear_from(
        load.tensor("count_embed.gru.weight_hh_l0", (3 * size, size)),
        load.tensor("count_embed.gru.bias_hh_l0", (3 * size,)),
    )
    loaders = {
        "count_lstm": _load_concatenated,
        "count_lstm_v2": _load_attended,
        "count_lstm_moe": _load_experts,
    }
    return InstanceQueries(table @ weight.t() + bias, hidden, loaders[spec.counter](load, size))


def _load_concatenated(load: TensorLoader, size: int) -> Refine:
    up = load.linear("count_embed.projector.0", 4 * size, 2 * size)
    perceptron = Perceptron(up, load.linear("count_embed.projector.2", size, 4 * size))

    def refine(states: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
        both = torch.cat([states, fields], dim=2)
        return perceptron(both.view(-1, 2 * size)).view(states.shape)

    return refine


def _load_experts(load: TensorLoader, size: int) -> Refine:
    inner = _EXPERT_EXPANSION * size
    up = load.tensor("count_embed.w1", (_EXPERTS, size, inner))
    up_bias = load.tensor("count_embed.b1", (_EXPERTS, inner))[:, None]
    down = load.tensor("count_embed.w2", (_EXPERTS, inner, size))
    down_bias = load.tensor("count_embed.b2", (_EXPERTS, size))[:, None]
    router = load.linear("count_embed.router.0", size, size)
    gates = load.linear("count_embed.router.2", _EXPERTS, size)

    def refine(states: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
        rows = states.reshape(-1, size)
        shares = linear(F.gelu(linear(rows, router)), gates).softmax(dim=1)
        found = F.gelu(rows @ up + up_bias) @ down + down_bias  # [experts, rows, size]
        return torch.einsum("re,ers->rs", shares, found).view(states.shape)

    return refine


@dataclass(frozen=True, slots=True)
class _FieldLayer:
    """A layer of attention among the fields of an instance, with norms behind its residuals."""

    qkv: LinearWeight
    out: LinearWeight
    mlp: Perceptron
    norms: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: f32 [n, num_fields, 128]."""
        n, num_fields, size = x.shape
        rows = x.reshape(-1, size)
        qkv = linear(rows, self.qkv).view(n, num_fields, 3, _FIELD_HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, size)
        first, second = self.norms
        rows = layer_norm(linear(mixed, self.out), *first, eps=_EPS, residual=rows)
        return layer_norm(self.mlp(rows), *second, eps=_EPS, residual=rows).view(x.shape)


def _load_attended(load: TensorLoader, size: int) -> Refine:
    stem, inner = "count_embed.transformer", _FIELD_SIZE
    narrow = load.linear(f"{stem}.in_projector", inner, size)
    layers = [
        _load_field_layer(load, f"{stem}.transformer.layers.{number}", inner)
        for number in range(_FIELD_LAYERS)
    ]
    up = load.linear(f"{stem}.out_projector.0", size, inner + size)
    middle = load.linear(f"{stem}.out_projector.2", size, size)
    out = load.linear(f"{stem}.out_projector.4", size, size)

    def refine(states: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
        whole = states + fields
        x = linear(whole.view(-1, size), narrow).view(*whole.shape[:2], inner)
        for layer in layers:
            x = layer(x)
        both = torch.cat([x, whole], dim=2).view(-1, inner + size)
        hidden = linear(linear(both, up, activation="relu"), middle, activation="relu")
        return linear(hidden, out).view(whole.shape)

    return refine


def _load_field_layer(load: TensorLoader, stem: str, size: int) -> _FieldLayer:
    qkv = load.linear_from(
        load.tensor(f"{stem}.self_attn.in_proj_weight", (3 * size, size)),
        load.tensor(f"{stem}.self_attn.in_proj_bias", (3 * size,)),
    )
    norms = tuple(
        (
            load.tensor(f"{stem}.{name}.weight", (size,)),
            load.tensor(f"{stem}.{name}.bias", (size,)),
        )
        for name in ("norm1", "norm2")
    )
    return _FieldLayer(
        qkv,
        load.linear(f"{stem}.self_attn.out_proj", size, size),
        Perceptron(
            load.linear(f"{stem}.linear1", 2 * size, size),
            load.linear(f"{stem}.linear2", size, 2 * size),
        ),
        norms,
    )
