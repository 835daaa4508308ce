"""LangChain's Embeddings over a bytetx model."""

from pathlib import Path

try:
    from langchain_core.embeddings import Embeddings
except ImportError as error:
    raise ImportError(
        "bytetx.integrations.langchain needs langchain-core: pip install langchain-core"
    ) from error

from bytetx.integrations.retrieval import RetrievalEmbedder, as_model
from bytetx.model import Model
from bytetx.tasks.task import Overflow


class BytetxEmbeddings(Embeddings):
    """Vectors for LangChain's vector stores and retrievers."""

    def __init__(
        self,
        model: Model | str | Path,
        *,
        query_prompt_name: str | None = None,
        document_prompt_name: str | None = None,
        overflow: Overflow = "error",
    ):
        """model: a loaded model, a folder or a hub id.

        query_prompt_name, document_prompt_name, overflow: as of RetrievalEmbedder.
        """
        self.embedder = RetrievalEmbedder(
            as_model(model), query_prompt_name, document_prompt_name, overflow
        )

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.embedder.embed_documents(texts)

    def embed_query(self, text: str) -> list[float]:
        return self.embedder.embed_queries([text])[0]
