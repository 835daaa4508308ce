"""Small random GLiNER checkpoints, made by the classes of the gliner package."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SENTENCES, TOKENIZERS, make_tokenizer
from tiny import randomize, tiny_model

# Its pin of transformers is older than ours: pip install --no-deps gliner.
gliner = pytest.importorskip("gliner")

# Beside the sentences that the vocabularies were trained on.
TEXTS = [
    *SENTENCES,
    "   ",
    "One",
    "Merkel, Zaphod; 日本語 wörds e-mail_x (nested [brackets])",
    "word " * 3 + "Angela Merkel met Zaphod " * 9,
]
LABELS = ["person", "place", "due date"]


def save_gliner(
    folder: Path, family: str = "deberta-v2", *, labels_family: str | None = None, **config: Any
) -> Any:
    """The gliner package's model, saved into a folder; config: of gliner_config.json.

    labels_family: of an encoder of their own for labels.
    """
    backbone = folder / "backbone"
    tokenizer = make_tokenizer(TOKENIZERS[family], max_tokens=config.pop("max_tokens", 1 << 12))
    tokenizer.save_pretrained(backbone)
    torch.manual_seed(0)
    encoder = tiny_model(family).config.to_dict()
    encoder |= {"vocab_size": len(tokenizer), "max_position_embeddings": 1 << 10}
    encoder |= config.pop("encoder", {})
    given = {
        "model_name": str(backbone),
        "hidden_size": 32,
        "max_width": 4,
        "dropout": 0.0,
        "encoder_config": encoder,
        **config,
    }
    if labels_family is not None:
        given |= _labels_encoder(folder / "labels", labels_family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = gliner.GLiNER.from_config(given, backbone_from_pretrained=False)
    randomize(model.model)
    model.eval()
    model.save_pretrained(folder, safe_serialization=True)
    return model


def _labels_encoder(folder: Path, family: str) -> dict[str, Any]:
    tokenizer = make_tokenizer(TOKENIZERS[family], max_tokens=48)
    tokenizer.save_pretrained(folder)
    encoder = tiny_model(family).config.to_dict()
    encoder |= {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    return {"labels_encoder": str(folder), "labels_encoder_config": encoder}


def package_spans(
    model: Any, texts: list[str], labels: Any, **options: Any
) -> list[list[tuple[Any, ...]]]:
    """The spans that the package extracts from each text alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [model.inference([text], labels, **options)[0] for text in texts]
    return [
        [(one["start"], one["end"], one["text"], one["label"], one["score"]) for one in spans]
        for spans in found
    ]


def package_relations(
    model: Any, texts: list[str], labels: Any, relations: list[str], **options: Any
) -> list[tuple[list[tuple[Any, ...]], dict[tuple[Any, ...], float]] | None]:
    """(spans, relations) that the package extracts from each text alone; the score of a relation by
    the ends of its head, those of its tail, and its label. None of a text on which it fails: its
    attention takes no text without spans."""
    results: list[tuple[list[tuple[Any, ...]], dict[tuple[Any, ...], float]] | None] = []
    for text in texts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                spans, related = model.inference([text], labels, relations, **options)
            except AttributeError:
                results.append(None)
                continue
        found = {}
        for one in related[0]:
            ends = [(one[end]["start"], one[end]["end"]) for end in ("head", "tail")]
            if ends[0] != ends[1]:
                found[(*ends, one["relation"])] = one["score"]
        keys = ("start", "end", "text", "label", "score")
        own = [tuple(one[key] for key in keys) for one in spans[0]]
        results.append((own, found))
    return results
