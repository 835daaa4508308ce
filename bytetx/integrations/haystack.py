"""Haystack's text and document embedders over a bytetx model."""

from dataclasses import replace
from functools import cached_property
from typing import Any

try:
    from haystack import Document, component
except ImportError as error:
    raise ImportError(
        "bytetx.integrations.haystack needs haystack-ai: pip install haystack-ai"
    ) from error

from bytetx.integrations.retrieval import RetrievalEmbedder, as_model
from bytetx.tasks.task import Overflow


class _Embedder:
    """model: a folder or a hub id, loaded by warm_up or by the first run."""

    def __init__(self, model: str, prompt_name: str | None = None, overflow: Overflow = "error"):
        self.model, self.prompt_name, self.overflow = model, prompt_name, overflow

    @cached_property
    def _embedder(self) -> RetrievalEmbedder:
        name = self.prompt_name
        return RetrievalEmbedder(as_model(self.model), name, name, self.overflow)

    def warm_up(self) -> None:
        _ = self._embedder


@component
class BytetxTextEmbedder(_Embedder):
    """The vector of a query."""

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, Any]:
        return {"embedding": self._embedder.embed_queries([text])[0]}


@component
class BytetxDocumentEmbedder(_Embedder):
    """Documents with the vectors of their contents."""

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        vectors = self._embedder.embed_documents([one.content or "" for one in documents])
        pairs = zip(documents, vectors, strict=True)
        return {"documents": [replace(one, embedding=vector) for one, vector in pairs]}
