"""Vectors of queries and documents as lists of floats, each with its own prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bytetx.model import Model, load
from bytetx.tasks.task import Overflow

# Names of prompts that are taken where none is named, as sentence-transformers does.
_QUERY_PROMPTS = ("query",)
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# Tasks of checkpoints that have an adapter for each.
_QUERY_TASK, _DOCUMENT_TASK = "retrieval.query", "retrieval.passage"


@dataclass(frozen=True, slots=True)
class RetrievalEmbedder:
    """A model with the prompts of queries and of documents.

    query_prompt_name, document_prompt_name: of the checkpoint's prompts; None takes the one called
    "query", and the first of "document", "passage" and "corpus", where the checkpoint has it.
    Of a checkpoint with an adapter for each task, queries and documents have those of retrieval.
    overflow: what happens to texts beyond the model's positions, as of Model.embed.
    """

    model: Model
    query_prompt_name: str | None = None
    document_prompt_name: str | None = None
    overflow: Overflow = "error"

    def embed_queries(self, texts: Sequence[str]) -> list[list[float]]:
        return self._embed(texts, self.query_prompt_name, _QUERY_PROMPTS, _QUERY_TASK)

    def embed_documents(self, texts: Sequence[str]) -> list[list[float]]:
        return self._embed(texts, self.document_prompt_name, _DOCUMENT_PROMPTS, _DOCUMENT_TASK)

    def _embed(
        self, texts: Sequence[str], name: str | None, usual: Sequence[str], task: str
    ) -> list[list[float]]:
        tasks = self.model.checkpoint.tasks
        if tasks is not None and task in tasks.adapters:
            found = self.model.embed(texts, task=task, prompt_name=name, overflow=self.overflow)
            return _as_lists(found.vectors)
        prompts = self.model.checkpoint.sentence.prompts
        name = name or next((prompt for prompt in usual if prompt in prompts), None)
        # Without its own prompt, a text has none, and not the checkpoint's default.
        prompt = "" if name is None else None
        found = self.model.embed(texts, prompt=prompt, prompt_name=name, overflow=self.overflow)
        return _as_lists(found.vectors)


def _as_lists(vectors: np.ndarray) -> list[list[float]]:
    rows: list[list[float]] = vectors.tolist()
    return rows


def as_model(model: Model | str | Path) -> Model:
    """A loaded model as it is, a path or a hub id loaded."""
    return model if isinstance(model, Model) else load(model)
