"""Entities, classes, structures and relations of texts by a schema: GLiNER2's models."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from bytetx.arguments import check_threshold
from bytetx.requests.schema import (
    Classification,
    ExtractionSchema,
    SchemaField,
    SchemaGroup,
    read_schema,
)
from bytetx.tasks.call import TaskCall
from bytetx.tasks.classify import sigmoid, softmax
from bytetx.tasks.context import TaskContext
from bytetx.tasks.results import (
    ExtractedSpan,
    Extraction,
    FieldValue,
    Label,
    Relation,
    Results,
    Structure,
)
from bytetx.tasks.schema_scores import Found, TextScores, schema_call
from bytetx.tasks.task import TextOptions, option, task


@dataclass(frozen=True, kw_only=True)
class FillSchemaOptions(TextOptions):
    """Options of fill_schema."""

    threshold: float = option(
        0.5, "The least score of spans and choices whose part of the schema names none, 0 to 1."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_threshold(self.threshold)


@task(item=Extraction)
def fill_schema(
    context: TaskContext,
    texts: Iterable[str],
    schema: Mapping[str, Any],
    options: FillSchemaOptions,
) -> TaskCall[Results[Extraction]]:
    """The answers of each text to a schema (GLiNER2), as gliner2's Schema.from_dict takes it.

    schema: {"entities": names, or a table of descriptions or of {"description", "dtype",
    "threshold"}; "structures": {name: {"fields": [{"name", "dtype", "choices", "description",
    "threshold"}]}}; "relations": as entities, without dtype; "classifications": [{"task", "labels",
    "multi_label", "cls_threshold", "top_k", "class_act", "prompt", "examples"}]}. dtype is "list"
    or "str", which gives the best value alone.
    Spans of one entity or field do not overlap; the one with the highest score stays.
    A text whose first word is cut away by truncate=True has no answers, and no classes.
    Raises InputError where the schema is none, or the checkpoint reads no schemas.
    """
    read = read_schema(schema)
    threshold = float(options.threshold)

    def extraction(scores: TextScores) -> Extraction:
        return _extraction(read, scores, threshold)

    return schema_call(context, "fill_schema", texts, read, options, extraction, key=threshold)


def _extraction(schema: ExtractionSchema, scores: TextScores, threshold: float) -> Extraction:
    found = Extraction([], {}, {}, {})
    for number, group in enumerate(schema.groups):
        if group.is_entities:
            found.entities.extend(_entities(group, number, scores, threshold))
        elif group.is_relation:
            found.relations[group.name] = list(_relations(group, number, scores, threshold))
        else:
            found.structures[group.name] = list(_structures(group, number, scores, threshold))
    start = 0
    for one in schema.classifications:
        stop = start + len(one.labels)
        found.classifications[one.name] = _labels(one, scores.logits[start:stop])
        start = stop
    return found


def _labels(one: Classification, logits: np.ndarray) -> list[Label]:
    if not len(logits):
        return []
    chances = sigmoid(logits) if one.is_sigmoid else softmax(logits)
    order = np.argsort(-chances, kind="stable").tolist()
    chosen = order[:1]
    if one.multi_label:
        above = [place for place in order if chances[place] >= np.float32(one.threshold)]
        chosen = (above or chosen)[: one.top_k]
    return [Label(one.labels[place].name, float(chances[place]), place) for place in chosen]


def _values(
    group: SchemaGroup, number: int, instance: int, scores: TextScores, threshold: float
) -> list[list[FieldValue]]:
    """Spans of each field, without those that overlap better ones, the best one first."""
    limits = [threshold if one.threshold is None else one.threshold for one in group.fields]
    by_field: list[list[Found]] = [[] for _ in group.fields]
    for span in scores.spans(number, instance, limits):
        by_field[span[2]].append(span)
    text, words = cast(str, scores.alignment.text), scores.alignment.words.tolist()
    return [list(_disjoint(spans, text, words)) for spans in by_field]


def _disjoint(
    spans: Sequence[Found], text: str, words: Sequence[tuple[int, int]]
) -> Iterable[FieldValue]:
    is_taken = bytearray(len(words))
    for first, last, _, score in sorted(spans, key=lambda span: -span[3]):
        if any(is_taken[first : last + 1]):
            continue
        is_taken[first : last + 1] = b"\1" * (last + 1 - first)
        start, end = words[first][0], words[last][1]
        if start < end:  # else it is the end of a sentence that the text has not
            yield FieldValue(text[start:end], score, start, end)


def _in_order(values: Sequence[FieldValue]) -> list[FieldValue]:
    return sorted(values, key=lambda value: value.start or 0)


def _entities(
    group: SchemaGroup, number: int, scores: TextScores, threshold: float
) -> list[ExtractedSpan]:
    if not scores.groups[number].shape[2]:
        return []
    found = [
        ExtractedSpan(
            cast(int, value.start), cast(int, value.end), value.text, field.name, value.score
        )
        for field, values in zip(
            group.fields, _values(group, number, 0, scores, threshold), strict=True
        )
        for value in (values if field.is_list else values[:1])
    ]
    return sorted(found, key=lambda span: (span.start, span.end))


def _relations(
    group: SchemaGroup, number: int, scores: TextScores, threshold: float
) -> Iterable[Relation]:
    for instance in range(scores.groups[number].shape[2]):
        head, tail = _values(group, number, instance, scores, threshold)
        if head and tail:
            yield Relation(head[0], tail[0])


def _structures(
    group: SchemaGroup, number: int, scores: TextScores, threshold: float
) -> Iterable[Structure]:
    for instance in range(scores.groups[number].shape[2]):
        spans = _values(group, number, instance, scores, threshold)
        found: Structure = {}
        for place, (field, values) in enumerate(zip(group.fields, spans, strict=True)):
            if field.choices:
                values = _choices(field, number, instance, place, scores, threshold)
            elif field.is_list:
                values = _in_order(values)
            found[field.name] = values if field.is_list else next(iter(values), None)
        if any(found.values()):
            yield found


def _choices(
    field: SchemaField, number: int, instance: int, place: int, scores: TextScores, threshold: float
) -> list[FieldValue]:
    """Choices above the threshold: in the schema's order, or the best one first."""
    least = np.float32(threshold if field.threshold is None else field.threshold)
    found = []
    for choice in dict.fromkeys(field.choices):
        score = scores.choice(number, instance, place, choice)
        if score is not None and score >= least:
            found.append(FieldValue(choice, score))
    return found if field.is_list else sorted(found, key=lambda value: -value.score)
