"""Schemas of GLiNER2: what is looked for in a text, checked, and as the tokens before it."""

import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from bytetx.arguments import is_share, text_fault
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.errors import CheckpointError, InputError, TooLongError, shown
from bytetx.requests.words import LabelPrompt

_STRUCTURE, _TEXT, _PARENT = "[SEP_STRUCT]", "[SEP_TEXT]", "[P]"
_DESCRIPTION, _EXAMPLE, _OUTPUT = "[DESCRIPTION]", "[EXAMPLE]", "[OUTPUT]"
_FIELD, _ENTITY, _RELATION, _CLASS = "[C]", "[E]", "[R]", "[L]"
_MARKERS = (_STRUCTURE, _TEXT, _PARENT, _FIELD, _ENTITY, _RELATION, _CLASS)
_MOST_NAMES = 1 << 12  # a schema's; the prompt of one with more fits no model


@dataclass(frozen=True, slots=True)
class SchemaField:
    """One thing that is looked for.

    is_list: every span of it, else the best one.  threshold: None is the call's.
    choices: the answer is one of these, or some where is_list.
    """

    name: str
    description: str | None = None
    is_list: bool = True
    threshold: float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AttributeGroup:
    """Labels of which an entity has one, or some where multi_label is true.

    fields: the number of each label's field among those of the entities.  threshold: of several.
    applies_to: names of entities; None is all.
    """

    name: str
    labels: tuple[str, ...]
    fields: tuple[int, ...]
    multi_label: bool
    threshold: float
    applies_to: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class SchemaGroup:
    """Fields whose values go together: a structure, a relation's head and tail, or all entities.

    prompt: more about it, for the model.  attributes: of entities; their labels are read as fields
    behind those of the entities.
    """

    name: str
    fields: tuple[SchemaField, ...]
    marker: str
    prompt: str | None = None
    attributes: tuple[AttributeGroup, ...] = ()

    @property
    def own_fields(self) -> tuple[SchemaField, ...]:
        """Those that are looked for."""
        first = min((min(one.fields) for one in self.attributes), default=len(self.fields))
        return self.fields[:first]

    @property
    def is_entities(self) -> bool:
        return self.marker == _ENTITY

    @property
    def is_relation(self) -> bool:
        return self.marker == _RELATION


@dataclass(frozen=True, slots=True)
class Classification:
    """Classes of a text.

    labels: with descriptions or None.  is_sigmoid: of the scores; a softmax else.
    threshold, top_k: of a text's classes where it may have several.
    examples: texts with their classes.
    """

    name: str
    labels: tuple[SchemaField, ...]
    multi_label: bool = False
    threshold: float = 0.5
    top_k: int | None = None
    is_sigmoid: bool = False
    prompt: str | None = None
    examples: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ExtractionSchema:
    """groups: structures, then entities, then relations, as they stand in a prompt."""

    groups: tuple[SchemaGroup, ...]
    classifications: tuple[Classification, ...]


def entity_schema(labels: Mapping[str, str | None]) -> ExtractionSchema:
    """Entities alone.  labels: with descriptions or None."""
    fields = tuple(SchemaField(name, description) for name, description in labels.items())
    if not fields:
        return ExtractionSchema((), ())
    return ExtractionSchema((SchemaGroup("entities", fields, _ENTITY),), ())


def read_schema(given: object) -> ExtractionSchema:
    """A schema as gliner2's Schema.from_dict takes it. Raises InputError that says where."""
    table = _table("schema", given, _SECTIONS)
    structures = _names("structures", table.get("structures"))
    groups = [_read_structure(name, own) for name, own in structures.items()]
    entities = _names("entities", table.get("entities"))
    attributes = _names("entity_attributes", table.get("entity_attributes"))
    if attributes and not entities:
        raise InputError("schema: entity_attributes are of entities; name some of these, too")
    if entities:
        groups.append(_read_entities(entities, attributes))
    for one in _read_named("relations", _names("relations", table.get("relations"))):
        ends = tuple(SchemaField(end, threshold=one.threshold) for end in ("head", "tail"))
        groups.append(SchemaGroup(one.name, ends, _RELATION, one.description))
    items = table.get("classifications") or []
    if not isinstance(items, list | tuple):
        raise InputError(f"schema: classifications must be a list of tables, got {shown(items)}")
    classifications = [_read_classification(place, item) for place, item in enumerate(items)]
    _check_unique("classifications", [one.name for one in classifications])
    schema = ExtractionSchema(tuple(groups), tuple(classifications))
    if not groups and not classifications:
        raise InputError(
            f"schema names nothing to look for; give it one or more of {', '.join(_SECTIONS)}"
        )
    num_names = sum(len(group.fields) for group in groups)
    if num_names + sum(len(one.labels) for one in classifications) > _MOST_NAMES:
        raise InputError(f"schema has more than {_MOST_NAMES} names; give fewer")
    return schema


_SECTIONS = ("entities", "structures", "relations", "classifications", "entity_attributes")
_ATTRIBUTES = ("labels", "multi_label", "threshold", "applies_to", "qualify_labels")
_CLASSIFICATION = (
    "task",
    "labels",
    "multi_label",
    "cls_threshold",
    "top_k",
    "class_act",
    "prompt",
    "examples",
)


def _table(where: str, given: object, keys: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError(f"{where} must be a table with {', '.join(keys)}, got {shown(given)}")
    for key in given:
        if key not in keys:
            raise InputError(f"{where}: {shown(key)} is not known; it takes {', '.join(keys)}")
    return given


def _text(where: str, given: object) -> str:
    fault = text_fault(given)
    if fault is not None:
        raise InputError(f"{where}: {shown(given)} {fault}")
    text = str(given)
    if not text.strip():
        raise InputError(f"{where}: a text must not be empty")
    return text


def _check_unique(where: str, names: Sequence[str]) -> None:
    known: set[str] = set()
    for name in names:
        if name in known:
            raise InputError(f"schema: {where} names {shown(name)} twice; give each name once")
        known.add(name)


def _names(where: str, given: object) -> Mapping[str, Any]:
    """Names of a list or a table, with what the table says of each."""
    if given is None:
        return {}
    if isinstance(given, list | tuple):
        names = [_text(f"schema: {where}", name) for name in given]
        _check_unique(where, names)
        return dict.fromkeys(names)
    if not isinstance(given, Mapping):
        raise InputError(f"schema: {where} must be a list of names or a table, got {shown(given)}")
    return {_text(f"schema: {where}", name): own for name, own in given.items()}


def _read_named(where: str, given: Mapping[str, Any], *more: str) -> tuple[SchemaField, ...]:
    fields = []
    for name, own in given.items():
        place = f"schema: {where}.{name}"
        if own is None or isinstance(own, str):
            own = {"description": own or None}
        fields.append(
            _read_field(place, name, _table(place, own, ("description", "threshold", *more)))
        )
    return tuple(fields)


def _read_field(where: str, name: str, given: Mapping[str, Any]) -> SchemaField:
    dtype = given.get("dtype") or "list"
    if dtype not in ("list", "str"):
        raise InputError(f"{where}: dtype must be 'list' or 'str', got {shown(dtype)}")
    choices = given.get("choices")
    if choices is not None and (not isinstance(choices, list | tuple) or not choices):
        raise InputError(f"{where}: choices must be a list of texts, got {shown(choices)}")
    description = given.get("description")
    return SchemaField(
        name,
        None if description is None else _text(f"{where}.description", description),
        dtype == "list",
        _threshold(f"{where}.threshold", given.get("threshold")),
        tuple(_text(f"{where}.choices", choice) for choice in choices or ()),
    )


def _read_entities(given: Mapping[str, Any], attributes: Mapping[str, Any]) -> SchemaGroup:
    own = _read_named("entities", given, "dtype")
    known = {field.name for field in own}
    tables = {
        name: _table(f"schema: entity_attributes.{name}", table, _ATTRIBUTES)
        for name, table in attributes.items()
    }
    labels = {name: _names_of(name, table) for name, table in tables.items()}
    _check_unique("entity_attributes", [label for some in labels.values() for label in some])
    # A label is read with the name of its group where the group says so.
    read = {
        label: f"{name}: {label}" if tables[name].get("qualify_labels") else label
        for name, some in labels.items()
        for label in some
    }
    places = {label: len(own) + place for place, label in enumerate(sorted({*read.values()}))}
    for label in places:
        if label in known:
            raise InputError(
                f"schema: entity_attributes and entities both name {shown(label)}; rename one, or "
                "pass qualify_labels"
            )
    groups = tuple(
        _read_attributes(name, table, labels[name], [places[read[one]] for one in labels[name]])
        for name, table in tables.items()
    )
    for group in groups:
        for name in group.applies_to or ():
            if name not in known:
                raise InputError(
                    f"schema: entity_attributes.{group.name}.applies_to names {shown(name)}, "
                    "which is no entity"
                )
    fields = own + tuple(SchemaField(label) for label in places)
    return SchemaGroup("entities", fields, _ENTITY, attributes=groups)


def _names_of(name: str, table: Mapping[str, Any]) -> tuple[str, ...]:
    where = f"entity_attributes.{name}.labels"
    if not isinstance(table.get("labels"), list | tuple) or not table["labels"]:
        raise InputError(
            f"schema: {where} must be a list of texts, got {shown(table.get('labels'))}"
        )
    return tuple(_names(where, table["labels"]))


def _read_attributes(
    name: str, table: Mapping[str, Any], labels: tuple[str, ...], fields: Sequence[int]
) -> AttributeGroup:
    where = f"schema: entity_attributes.{name}"
    for key in ("multi_label", "qualify_labels"):
        if not isinstance(table.get(key, False), bool):
            raise InputError(f"{where}.{key} must be true or false, got {shown(table[key])}")
    given = table.get("applies_to")
    threshold = _threshold(f"{where}.threshold", table.get("threshold"))
    return AttributeGroup(
        name,
        labels,
        tuple(fields),
        table.get("multi_label", False),
        0.5 if threshold is None else threshold,
        None if given is None else tuple(_names(f"entity_attributes.{name}.applies_to", given)),
    )


def _threshold(where: str, given: object) -> float | None:
    if given is None:
        return None
    if not is_share(given):
        raise InputError(f"{where} must be a number from 0 to 1, got {shown(given)}")
    return float(given)


def _read_structure(name: str, given: object) -> SchemaGroup:
    where = f"schema: structures.{name}"
    items = _table(where, given, ("fields",)).get("fields")
    if not isinstance(items, list | tuple) or not items:
        raise InputError(f"{where}: fields must be a list of tables, got {shown(items)}")
    fields = []
    for place, item in enumerate(items):
        here = f"{where}.fields[{place}]"
        keys = ("name", "dtype", "choices", "description", "threshold")
        table = _table(here, item, keys)
        fields.append(_read_field(here, _text(f"{here}.name", table.get("name")), table))
    _check_unique(f"structures.{name}", [field.name for field in fields])
    return SchemaGroup(name, tuple(fields), _FIELD)


def _read_classification(place: int, given: object) -> Classification:
    where = f"schema: classifications[{place}]"
    table = _table(where, given, _CLASSIFICATION)
    labels = _names(f"classifications[{place}].labels", table.get("labels"))
    if len(labels) < 2:
        raise InputError(f"{where}: labels must be two or more, got {len(labels)}")
    multi_label, top_k = table.get("multi_label", False), table.get("top_k")
    if not isinstance(multi_label, bool):
        raise InputError(f"{where}: multi_label must be true or false, got {shown(multi_label)}")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise InputError(f"{where}: top_k must be 1 or more, got {shown(top_k)}")
    activation = table.get("class_act") or "auto"
    if activation not in ("auto", "sigmoid", "softmax"):
        raise InputError(
            f"{where}: class_act must be auto, sigmoid or softmax, got {shown(activation)}"
        )
    prompt, examples = table.get("prompt"), table.get("examples") or []
    if not isinstance(examples, list | tuple):
        raise InputError(f"{where}: examples must be a list of pairs, got {shown(examples)}")
    for pair in examples:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[1], str)
        if not is_pair or pair[1] not in labels:
            raise InputError(
                f"{where}: examples must be pairs of a text and a label, got {shown(pair)}"
            )
    threshold = _threshold(f"{where}.cls_threshold", table.get("cls_threshold"))
    return Classification(
        _text(f"{where}.task", table.get("task")),
        _read_named(f"classifications[{place}].labels", labels),
        multi_label,
        0.5 if threshold is None else threshold,
        top_k,
        activation == "sigmoid" or (activation == "auto" and multi_label),
        None if prompt is None else _text(f"{where}.prompt", prompt),
        tuple((_text(f"{where}.examples", text), label) for text, label in examples),
    )


@dataclass(frozen=True, slots=True)
class SchemaPrompt(LabelPrompt):
    """The tokens of a schema; labels are its markers: each group's or classification's own, then
    those of its fields or labels.

    choices: the number of each choice's word before a text, by its lower case.
    """

    choices: Mapping[str, int] = field(default_factory=dict)


def schema_prompt(schema: ExtractionSchema, tokenizer: Tokenizer, *, most: int) -> SchemaPrompt:
    """The prompt of a schema.  most: tokens that a text may have.

    Raises CheckpointError where the tokenizer lacks a marker, TooLongError for a long schema.
    """
    lacks = [one for one in _MARKERS if tokenizer.backend.token_to_id(one) is None]
    if lacks:
        raise CheckpointError(
            f"{tokenizer.name} has no token {lacks[0]!r}, which marks schemas; save the model "
            "again with the gliner2 package"
        )
    words: list[str] = []
    marks: list[int] = []
    for parts in _parts(schema):
        words += [_STRUCTURE] if words else []
        marks += [len(words) + 1, *range(len(words) + 4, len(words) + len(parts) - 2, 2)]
        words += parts
    words.append(_TEXT)
    before = _choice_words(schema)
    ids = tokenizer.untruncated().encode_all_plain([*words, *before])
    lengths = np.array([len(own) for own in ids], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    choices: dict[str, int] = {}
    kept = lengths[len(words) :] > 0
    for number, word in enumerate(
        word for word, is_kept in zip(before, kept, strict=True) if is_kept
    ):
        choices.setdefault(word.lower(), number)
    prompt = SchemaPrompt(
        np.array([token for own in ids for token in own], dtype=np.int32),
        np.empty(0, dtype=np.int32),
        starts[np.array(marks, dtype=np.int64)],
        words=lengths[len(words) :][kept],
        choices=choices,
    )
    if prompt.num_tokens >= most:
        raise TooLongError(
            f"schema has {prompt.num_tokens} tokens, and the model takes {most} with those of a "
            "text; give a shorter one"
        )
    return prompt


def _parts(schema: ExtractionSchema) -> Iterable[list[str]]:
    for group in schema.groups:
        yield _part(group.name, group.marker, group.fields, prompt=group.prompt)
    for one in schema.classifications:
        text = _part(one.name, _CLASS, one.labels, prompt=one.prompt)
        text[2] += "".join(
            f" {_EXAMPLE} {example} {_OUTPUT} {label}" for example, label in one.examples
        )
        yield text


def _part(
    name: str, marker: str, fields: Sequence[SchemaField], *, prompt: str | None
) -> list[str]:
    text = name if prompt is None else f"{name}: {prompt}"
    for one in fields:
        if one.description is not None:
            text += f" {_DESCRIPTION} {one.name}: {one.description}"
    marked = [part for field in fields for part in (marker, field.name)]
    return ["(", _PARENT, text, "(", *marked, ")", ")"]


def _choice_words(schema: ExtractionSchema) -> list[str]:
    """The words before a text that name the choices of fields."""
    words: list[str] = []
    for group in schema.groups:
        inner: list[str] = []
        for one in group.fields:
            if one.choices:
                named = [part for choice in one.choices for part in (choice, "|")][:-1]
                inner += [one.name, "(", *named, ")", ","]
        words += ["(", f"{group.name}:", *inner[:-1], ")"] if inner else []
    return words


@cache
def schema_words() -> re.Pattern[str]:
    """Addresses, names with @, words with marks that combine, hyphens and underscores, and single
    characters that are none."""
    marks = "".join(
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)).startswith("M")
    )
    letter = rf"[\w{marks}\u200c\u200d]"
    patterns = (
        r"https?://\S+",
        r"www\.\S+",
        r"[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}",
        r"@[a-z0-9_]+",
        rf"{letter}+(?:[-_]{letter}+)*",
        r"\S",
    )
    return re.compile("|".join(patterns), re.IGNORECASE)
