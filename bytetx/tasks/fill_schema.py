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
from bytetx.tasks.overlaps import Found
from bytetx.tasks.results import (
    AttributedSpan,
    ExtractedSpan,
    Extraction,
    FieldValue,
    Label,
    Relation,
    Results,
    Structure,
)
from bytetx.tasks.schema_call import schema_call
from bytetx.tasks.task import TextOptions, option, task
from bytetx.tasks.text_scores import TextScores


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
    "multi_label", "cls_threshold", "top_k", "class_act", "prompt", "examples"}];
    "entity_attributes": {name: {"labels", "multi_label", "threshold", "applies_to",
    "qualify_labels"}}}. dtype is "list" or "str", which gives the best value alone.
    Spans of one entity or field do not overlap; the one with the highest score stays, or, of a
    model of boundaries (GLiNER2.5), those that its config keeps.
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


def _limits(group: SchemaGroup, threshold: float) -> list[float]:
    """The least chance of each field's spans; none has the chance of an attribute's."""
    limits = [threshold if one.threshold is None else one.threshold for one in group.own_fields]
    return limits + [2.0] * (len(group.fields) - len(limits))


def _value(scores: TextScores, span: Found) -> FieldValue:
    words = scores.alignment.words
    start, end = int(words[span[0], 0]), int(words[span[1], 1])
    return FieldValue(cast(str, scores.alignment.text)[start:end], span[3], start, end)


def _in_order(values: Sequence[FieldValue]) -> list[FieldValue]:
    return sorted(values, key=lambda value: value.start or 0)


def _entities(
    group: SchemaGroup, number: int, scores: TextScores, threshold: float
) -> list[ExtractedSpan]:
    if not scores.num_instances(number):
        return []
    found: list[ExtractedSpan] = []
    fields = scores.spans(number, 0, _limits(group, threshold))
    for field, spans in zip(group.own_fields, fields, strict=False):
        inside = scores.inside(spans)
        for span in inside if field.is_list else inside[:1]:
            own = _value(scores, span)
            parts = (cast(int, own.start), cast(int, own.end), own.text, field.name, own.score)
            if group.attributes:
                attributes = _attributes(group, field, number, span, scores)
                found.append(AttributedSpan(*parts, attributes=attributes))
            else:
                found.append(ExtractedSpan(*parts))
    return sorted(found, key=lambda span: (span.start, span.end))


def _attributes(
    group: SchemaGroup, entity: SchemaField, number: int, span: Found, scores: TextScores
) -> dict[str, list[Label]]:
    found = {}
    for one in group.attributes:
        if one.applies_to is not None and entity.name not in one.applies_to:
            continue
        logits = scores.field_logits(number, span, one.fields)
        chances = sigmoid(logits) if one.multi_label else softmax(logits)
        chosen = [int(chances.argmax())]
        if one.multi_label:
            chosen = np.flatnonzero(chances >= np.float32(one.threshold)).tolist()
        found[one.name] = [
            Label(one.labels[place], float(chances[place]), place) for place in chosen
        ]
    return found


def _relations(
    group: SchemaGroup, number: int, scores: TextScores, threshold: float
) -> Iterable[Relation]:
    limit = group.fields[0].threshold
    pairs = scores.relations(number, threshold if limit is None else limit)
    for head, tail, score in pairs:
        yield Relation(_value(scores, head), _value(scores, tail), score)


def _structures(
    group: SchemaGroup, number: int, scores: TextScores, threshold: float
) -> Iterable[Structure]:
    for instance in range(scores.num_instances(number)):
        spans = scores.spans(number, instance, _limits(group, threshold))
        found: Structure = {}
        for place, (field, own) in enumerate(zip(group.fields, spans, strict=True)):
            values = [_value(scores, span) for span in scores.inside(own)]
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
