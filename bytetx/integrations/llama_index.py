"""LlamaIndex's BaseEmbedding over a bytetx model."""

import asyncio
from pathlib import Path

try:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import PrivateAttr
except ImportError as error:
    raise ImportError(
        "bytetx.integrations.llama_index needs llama-index-core: pip install llama-index-core"
    ) from error

from bytetx.checkpoint.names import checkpoint_name
from bytetx.integrations.retrieval import RetrievalEmbedder, as_model
from bytetx.model import Model
from bytetx.tasks.task import Overflow


class BytetxEmbedding(BaseEmbedding):
    """Vectors for LlamaIndex's indexes and retrievers."""

    _embedder: RetrievalEmbedder = PrivateAttr()

    def __init__(
        self,
        model: Model | str | Path,
        *,
        query_prompt_name: str | None = None,
        document_prompt_name: str | None = None,
        overflow: Overflow = "error",
        embed_batch_size: int = 2048,
    ):
        """model: a loaded model, a folder or a hub id.  embed_batch_size: texts of one call.

        query_prompt_name, document_prompt_name, overflow: as of RetrievalEmbedder.
        """
        loaded = as_model(model)
        name = checkpoint_name(loaded.checkpoint.folder)
        super().__init__(model_name=name, embed_batch_size=embed_batch_size)
        self._embedder = RetrievalEmbedder(
            loaded, query_prompt_name, document_prompt_name, overflow
        )

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._embedder.embed_queries([query])[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._embedder.embed_documents(texts)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
