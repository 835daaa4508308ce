"""Vectors of queries and documents as lists of floats, each with its own prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bytetx.model import Model, load
from bytetx.tasks.task import Overflow

# Names of prompts that are taken where none is named, as sentence-transformers does.
_QUERY_PROMPTS = ("query",)
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


@dataclass(frozen=True, slots=True)
class RetrievalEmbedder:
    """A model with the prompts of queries and of documents.

    query_prompt_name, document_prompt_name: of the checkpoint's prompts; None takes the one called
    "query", and the first of "document", "passage" and "corpus", where the checkpoint has it.
    overflow: what happens to texts beyond the model's positions, as of Model.embed.
    """

    model: Model
    query_prompt_name: str | None = None
    document_prompt_name: str | None = None
    overflow: Overflow = "error"

    def embed_queries(self, texts: Sequence[str]) -> list[list[float]]:
        return self._embed(texts, self.query_prompt_name, _QUERY_PROMPTS)

    def embed_documents(self, texts: Sequence[str]) -> list[list[float]]:
        return self._embed(texts, self.document_prompt_name, _DOCUMENT_PROMPTS)

    def _embed(
        self, texts: Sequence[str], name: str | None, usual: Sequence[str]
    ) -> list[list[float]]:
        prompts = self.model.checkpoint.sentence.prompts
        name = name or next((prompt for prompt in usual if prompt in prompts), None)
        # Without its own prompt, a text has none, and not the checkpoint's default.
        prompt = "" if name is None else None
        found = self.model.embed(texts, prompt=prompt, prompt_name=name, overflow=self.overflow)
        rows: list[list[float]] = found.vectors.tolist()
        return rows


def as_model(model: Model | str | Path) -> Model:
    """A loaded model as it is, a path or a hub id loaded."""
    return model if isinstance(model, Model) else load(model)
