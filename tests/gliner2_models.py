"""Small random GLiNER2 checkpoints, made by the classes of the gliner2 package."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TOKENIZERS, make_tokenizer
from tiny import randomize, tiny_model

# pip install --no-deps gliner2, beside peft.
gliner2 = pytest.importorskip("gliner2")

logging.getLogger("gliner2").setLevel(logging.ERROR)


def save_gliner2(folder: Path, family: str = "deberta-v2", **config: Any) -> Any:
    """The gliner2 package's model, saved into a folder; config: of its config.json."""
    from gliner2.configuration import ExtractorConfig

    tokenizer = make_tokenizer(TOKENIZERS[family], max_tokens=64)
    encoder = tiny_model(family).config
    encoder.vocab_size, encoder.max_position_embeddings = len(tokenizer), 1 << 10
    torch.manual_seed(0)
    given = ExtractorConfig(**{"model_name": "none", "max_width": 4, **config})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = gliner2.GLiNER2(given, encoder_config=encoder, tokenizer=tokenizer)
    randomize(model)
    with torch.no_grad():  # counts of 1 to 4, each as likely
        model.count_pred[2].weight *= 8
        model.count_pred[2].bias[[0, *range(5, 20)]] = -1e4
        for parameter in model.span_rep.span_rep_layer.out_project[3].parameters():
            parameter *= 0.02  # few chances are 0 or 1
    model.eval()
    model.save_pretrained(str(folder))
    return model


# The published models' heads, small.
BOUNDARY = {
    "boundary_dim": 16,
    "pair_dim": 16,
    "candidate_pool": "shared",
    "candidate_attention_layers": 0,
    "query_attention_layers": 0,
    "enable_span_content": True,
    "content_dim": 8,
    "enable_records": False,
}


def save_boundary(folder: Path, family: str = "deberta-v2", **head: Any) -> Any:
    """The package's model of boundaries, saved into a folder; head: of its boundary_head."""
    from gliner2.configuration import ExtractorConfig
    from gliner2.models.boundary.engine import BoundaryExtractor

    tokenizer = make_tokenizer(TOKENIZERS[family], max_tokens=64)
    encoder = tiny_model(family).config
    encoder.vocab_size, encoder.max_position_embeddings = len(tokenizer), 1 << 10
    torch.manual_seed(0)
    given = ExtractorConfig(
        model_name="none", architecture="boundary", boundary_head={**BOUNDARY, **head}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = BoundaryExtractor(given, encoder_config=encoder, tokenizer=tokenizer)
    randomize(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("boundary_head.", "relation_scorer.", "classifier.")):
                parameter *= 0.3  # few chances are 0 or 1
        if model.boundary_head.null_projection is not None:  # some fields are absent, not all
            model.boundary_head.null_projection.bias.fill_(-0.5)
    model.eval()
    model.save_pretrained(str(folder))
    return model


def package_results(
    model: Any, texts: list[str], schema: dict[str, Any], *, threshold: float = 0.5
) -> list[dict[str, Any]]:
    """The package's extractions from each text alone, in the form of `as_plain`."""
    from gliner2.inference.schema import Schema

    built = Schema.from_dict(schema)
    options = {"threshold": threshold, "include_confidence": True, "include_spans": True}
    found = [
        model.batch_extract([text], built, format_results=False, **options)[0] for text in texts
    ]
    return [_plain(one, schema) for one in found]


def _plain(found: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    attributes = schema.get("entity_attributes", {})
    entities = [
        (value["start"], value["end"], name, value["confidence"], _attributes(value, attributes))
        for name, values in (found.get("entities") or [{}])[0].items()
        for value in (values if isinstance(values, list) else [values])
        if value
    ]
    classes = {}
    for one in schema.get("classifications", []):
        own = found[one["task"]]
        own = [own] if isinstance(own, tuple) else own
        classes[one["task"]] = sorted(own, key=lambda pair: -pair[1])
    structures = {
        name: [{key: _values(own) for key, own in one.items()} for one in found.get(name) or []]
        for name in schema.get("structures", {})
    }
    relations = {
        name: [
            (_values(one["head"]), _values(one["tail"]), one.get("confidence"))
            for one in found.get(name) or []
        ]
        for name in schema.get("relations", [])
    }
    return {
        "entities": sorted(entities, key=str),
        "classifications": classes,
        "structures": structures,
        "relations": relations,
    }


def _attributes(value: dict[str, Any], groups: dict[str, Any]) -> dict[str, Any]:
    found = {name: value[name] for name in groups if name in value}
    lists = {name: own if isinstance(own, list) else [own] for name, own in found.items()}
    return {name: [(one["label"], one["confidence"]) for one in own] for name, own in lists.items()}


def _values(own: Any) -> Any:
    """(text, start, end, score) of a value, or a list of these."""
    if isinstance(own, list):
        return sorted(map(_values, own), key=str)
    if own is None:
        return None
    return own["text"], own.get("start"), own.get("end"), own["confidence"]


def as_plain(found: Any) -> dict[str, Any]:
    """An Extraction as tuples, in an order of its own."""

    def values(own: Any) -> Any:
        if isinstance(own, list):
            return sorted(map(values, own), key=str)
        return None if own is None else (own.text, own.start, own.end, own.score)

    def attributes(one: Any) -> dict[str, Any]:
        own = getattr(one, "attributes", {})
        return {name: [(x.label, x.score) for x in labels] for name, labels in own.items()}

    return {
        "entities": sorted(
            ((one.start, one.end, one.label, one.score, attributes(one)) for one in found.entities),
            key=str,
        ),
        "classifications": {
            name: [(one.label, one.score) for one in own]
            for name, own in found.classifications.items()
        },
        "structures": {
            name: [{key: values(own) for key, own in one.items()} for one in instances]
            for name, instances in found.structures.items()
        },
        "relations": {
            name: [(values(one.head), values(one.tail), one.score) for one in own]
            for name, own in found.relations.items()
        },
    }
