"""Token classification: tags of tokens and words, grouped as Hugging Face groups them."""

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar

import numpy as np
import torch

from bytetx.arguments import check_names
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.encode.request import Alignment
from bytetx.encode.step import Capture, Step, are_finite
from bytetx.errors import InputError, OptionError, shown
from bytetx.nn.heads import ClassificationHead
from bytetx.nn.transformer import Transformer
from bytetx.ops.pooling import largest
from bytetx.tasks.call import TaskCall, list_sink
from bytetx.tasks.classify import softmax
from bytetx.tasks.context import TaskContext
from bytetx.tasks.results import Entity, Results
from bytetx.tasks.tag_scheme import TagDecoder, TagScheme
from bytetx.tasks.task import OverflowOptions, Texts, option, task

# none: every token.  simple: runs of tokens with the same tag.  first, average, max: all tokens of
# a word first get one tag: that of its first token, of its mean scores, or of its highest score.
AGGREGATIONS = ("none", "simple", "first", "average", "max")
DECODINGS = ("auto", "argmax", "viterbi")


@dataclass(frozen=True, kw_only=True)
class TagOptions(OverflowOptions):
    """Options of tag."""

    aggregation: str = option(
        "simple",
        "none (every token), simple (runs of one tag), or first, average, max (one tag per word, "
        "then runs), as Hugging Face's token-classification pipeline.",
    )
    ignore_labels: Collection[str] = option(("O",), "Tags that are left out of the result.")
    decoding: str = option(
        "auto",
        "argmax (the likeliest tag of each token), viterbi (the likeliest sequence of tags that "
        "BIO, BIOES or BILOU allows), or auto: viterbi where the checkpoint has a "
        "viterbi_calibration.json, whose biases of transitions count then.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aggregation not in AGGREGATIONS:
            known = ", ".join(AGGREGATIONS)
            raise OptionError(f"aggregation must be one of {known}, got {shown(self.aggregation)}")
        check_names("ignore_labels", self.ignore_labels)
        if self.decoding not in DECODINGS:
            known = ", ".join(DECODINGS)
            raise OptionError(f"decoding must be one of {known}, got {shown(self.decoding)}")
        if self.overflow == "chunk" and self.aggregation == "none":
            raise OptionError(
                "overflow='chunk' needs an aggregation other than none: chunks overlap, and only "
                "entities are merged"
            )


@task(item=list[Entity])
def tag(context: TaskContext, texts: Texts, options: TagOptions) -> TaskCall[Results[list[Entity]]]:
    """Tags of the tokens of each text, with character offsets.

    Runs of one tag follow the scheme of the model's tags, BIO, BIOES or BILOU: a B, S or U begins
    an entity, an E, L, S or U ends it, and of an ill-formed row every tag counts.
    Entities of chunks are merged as that pipeline merges them with a stride.
    Raises InputError where the checkpoint has no head for token classification, or for viterbi tags
    without prefixes.
    """
    head = context.need_head(context.heads.token, "token classification")
    tokenizer = context.need_tokenizer()
    labels, decoder = context.labels(), _decoder(context, options.decoding)
    job = TagTask(head, tokenizer, labels, options.aggregation, options.ignore_labels, decoder)
    reader = context.reader(options)
    reader.with_alignment = True
    merge = merge_entities if reader.cuts else None
    return TaskCall("tag", texts, job, reader, list_sink, merge=merge)


def _decoder(context: TaskContext, decoding: str) -> TagDecoder | None:
    if decoding == "argmax":
        return None
    biases, labels = context.checkpoint.tag_biases, context.labels()
    if decoding == "auto" and biases is None:
        return None
    decoder = TagDecoder.of(labels, biases)
    if decoder is None and decoding == "viterbi":
        raise InputError(
            f"decoding='viterbi' needs tags with prefixes (BIO, BIOES or BILOU), this model has "
            f"{', '.join(labels)[:200]}; use argmax"
        )
    return decoder


@dataclass(frozen=True, slots=True)
class _Token:
    """A token and its scores f32 [num_labels].  continues: it belongs to the word before it."""

    word: str
    scores: np.ndarray
    start: int | None
    end: int | None
    index: int
    word_id: int | None
    continues: bool


@dataclass(frozen=True, slots=True)
class TagTask:
    """labels: by class id.  ignore_labels: tags that are left out of the result.
    decoder: of the tags of a text; None: each token's likeliest.
    """

    head: ClassificationHead
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    aggregation: str
    ignore_labels: Collection[str]
    decoder: TagDecoder | None = field(default=None, compare=False)
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        choices = (self.aggregation, tuple(self.ignore_labels), self.decoder is not None)
        return ("tag", id(self.head), *choices)

    @property
    def capture(self) -> Capture:
        return Capture(("tag", id(self.head)), rows="tokens")

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(transformer.forward(step.batch), step)

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """(f32 [total_tokens, num_labels], `largest` of each) from the last hidden states."""
        logits = self.head.forward(hidden_states).float()
        return logits, largest(logits)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return are_finite(outputs[1], step.requests.seqlens)

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[list[Entity]]:
        ends = np.cumsum(step.requests.seqlens)[:-1]
        rows = np.split(softmax(outputs[0]), ends)
        alignments = step.requests.alignments
        assert alignments is not None  # InputReader.with_alignment is set
        texts = zip(alignments, step.requests.split(), rows, strict=True)
        return [self._entities(alignment, ids, scores) for alignment, ids, scores in texts]

    def _entities(
        self, alignment: Alignment, token_ids: np.ndarray, scores: np.ndarray
    ) -> list[Entity]:
        entities = self._aggregate(self._tokens(alignment, token_ids.tolist(), scores))
        return [entity for entity in entities if entity.entity not in self.ignore_labels]

    def _tokens(
        self, alignment: Alignment, token_ids: list[int], scores: np.ndarray
    ) -> list[_Token]:
        return [
            self._token(alignment, token_ids[i], i, scores[i])
            for i in range(len(token_ids))
            if not alignment.special_tokens_mask[i]
        ]

    def _token(self, alignment: Alignment, token_id: int, index: int, scores: np.ndarray) -> _Token:
        word = self.tokenizer.token(token_id)
        if alignment.text is None:
            return _Token(word, scores, None, None, index, None, continues=False)
        assert alignment.offsets is not None and alignment.word_ids is not None
        start, end = alignment.offsets[index]
        surface = alignment.text[start:end]
        if token_id == self.tokenizer.unk_token_id:
            word, continues = surface, False
        elif self.tokenizer.is_word_aware:
            continues = len(word) != len(surface)
        else:
            continues = start > 0 and " " not in alignment.text[start - 1 : start + 1]
        return _Token(word, scores, start, end, index, alignment.word_ids[index], continues)

    def _aggregate(self, tokens: list[_Token]) -> list[Entity]:
        if self.aggregation not in ("none", "simple"):
            tokens = [self._word(word) for word in _words(tokens)]
        entities = list(map(self._entity, tokens, self._choose(tokens)))
        if self.aggregation == "none":
            return entities
        runs = TagScheme.of(self.labels).runs([entity.entity for entity in entities])
        return [self._group_entity(entities[run.start : run.stop]) for run in runs]

    def _choose(self, tokens: list[_Token]) -> list[int]:
        """The label of each token or word."""
        if self.decoder is None or not tokens:
            return [int(token.scores.argmax()) for token in tokens]
        chosen: list[int] = self.decoder.decode(np.stack([t.scores for t in tokens])).tolist()
        return chosen

    def _entity(self, token: _Token, label: int) -> Entity:
        return Entity(
            self.labels[label],
            float(token.scores[label]),
            token.word,
            token.start,
            token.end,
            token.index,
            token.word_id,
        )

    def _word(self, tokens: list[_Token]) -> _Token:
        """A word as one token, with its scores."""
        if self.aggregation == "first":
            scores = tokens[0].scores
        elif self.aggregation == "max":
            scores = max(tokens, key=lambda token: token.scores.max()).scores
        else:
            scores = np.mean([token.scores for token in tokens], axis=0)
        word = self.tokenizer.join([token.word for token in tokens])
        return replace(tokens[0], word=word, scores=scores, end=tokens[-1].end)

    def _group_entity(self, entities: list[Entity]) -> Entity:
        first = entities[0]
        return replace(
            first,
            entity=first.entity.split("-", 1)[-1],
            score=float(np.mean([entity.score for entity in entities])),
            word=self.tokenizer.join([entity.word for entity in entities]),
            end=entities[-1].end,
        )


def merge_entities(chunks: list[list[Entity]]) -> list[Entity]:
    """The entities of a text from those of its chunks, as Hugging Face's pipeline with a stride.

    Of entities that overlap, the longest one stays, and of two as long that of the higher score.
    """
    if len(chunks) == 1:
        return chunks[0]
    found: list[Entity] = []
    for entity in sorted(chain.from_iterable(chunks), key=lambda entity: entity.start or 0):
        last = found[-1] if found else None
        if last is None or not _span(last)[0] <= _span(entity)[0] < _span(last)[1]:
            found.append(entity)
        elif (_length(entity), entity.score) > (_length(last), last.score):
            found[-1] = entity
    return found


def _span(entity: Entity) -> tuple[int, int]:
    assert entity.start is not None and entity.end is not None  # only texts are cut
    return entity.start, entity.end


def _length(entity: Entity) -> int:
    start, end = _span(entity)
    return end - start


def _words(tokens: list[_Token]) -> list[list[_Token]]:
    words: list[list[_Token]] = []
    for token in tokens:
        if words and token.continues:
            words[-1].append(token)
        else:
            words.append([token])
    return words
