"""Requests of OpenAI's and Cohere's embeddings, and of vLLM's routes for other models."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from bytetx.serve.schemas import (
    ANY_VALUE,
    OpenRequest,
    OrNull,
    Strings,
    TaskName,
    Texts,
    TruncatingRequest,
)
from bytetx.serve.vector_types import VectorType


def _only_entry(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


_Span = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]


class EmbeddingsRequest(TruncatingRequest):
    """normalized, late_chunking and embedding_type are Jina's, output_dtype, output_dimension and
    input_type Voyage's, the last one NVIDIA's, too."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("little", "native"),
        "messages": (),
        "modality": ("text",),
        "pooling": (),
        "priority": (0,),
        "return_multivector": (False,),
        "use_activation": (True,),
    }
    input: Texts
    model: str | None = None
    encoding_format: OrNull[Literal["float", "base64"]] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, validation_alias=AliasChoices("dimensions", "output_dimension")
    )
    user: str | None = None
    prompt_name: str | None = Field(None, description="Not OpenAI's: a prompt of the checkpoint.")
    input_type: str | None = Field(
        None,
        description="In place of prompt_name: query, document or passage, the checkpoint's prompt "
        "or task for it.",
    )
    task: TaskName | None = Field(None, description="Not OpenAI's: as of Model.embed.")
    normalize: OrNull[bool] = Field(
        True,
        validation_alias=AliasChoices("normalize", "normalized"),
        description="Not OpenAI's: whether vectors have length 1.",
    )
    output_dtype: OrNull[Annotated[VectorType, BeforeValidator(_only_entry)]] = Field(
        "float",
        validation_alias=AliasChoices("output_dtype", "embedding_type"),
        description="Not OpenAI's: numbers of fewer bits; bytes where encoding_format is base64.",
    )
    overflow: Literal["error", "truncate", "chunk"] | None = Field(
        None,
        description="Not OpenAI's: chunk gives a text that is too long the mean of the vectors of "
        "its chunks.",
    )
    stride: OrNull[Annotated[int, Field(ge=0)]] = Field(
        0, description="Tokens that neighbouring chunks share."
    )
    late_chunking: OrNull[bool] = Field(
        False,
        description="Not OpenAI's: the inputs are the parts of one document, which is read as a "
        "whole; each gets a vector.",
    )
    spans: list[list[_Span]] | None = Field(
        None,
        description="Not OpenAI's: for each input [start, end] in characters; a vector for each of "
        "them, from one pass over the input.",
    )


class CohereContent(OpenRequest):
    type: Literal["text"] = Field(description="Images are not supported.")
    text: str


class CohereInput(OpenRequest):
    content: Annotated[list[CohereContent], Field(min_length=1)]


class CohereEmbedRequest(OpenRequest):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "images": ([],),
        "max_tokens": (),
        "priority": ANY_VALUE,
    }
    texts: Strings | None = None
    inputs: list[CohereInput] | None = Field(None, description="In place of texts.")
    model: str | None = None
    input_type: str | None = Field(
        None,
        description="search_query and search_document are the checkpoint's prompts or tasks for "
        "these; any other one the prompt of that name, where the checkpoint has it.",
    )
    embedding_types: Annotated[list[VectorType], Field(min_length=1)] | None = None
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    truncate: OrNull[Literal["NONE", "START", "END"]] = "END"


class _PoolingRequest(TruncatingRequest):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "activation": (True,),
        "add_special_tokens": (True,),
        "cache_salt": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "embed_dtype": ("float32",),
        "endianness": ("little", "native"),
        "label_token_ids": (),
        "messages": (),
        "mm_processor_kwargs": ({},),
        "normalize": (True,),
        "padding": ("do_not_pad",),
        "priority": ANY_VALUE,
        "request_id": ANY_VALUE,
        "softmax": (True,),
        "user": ANY_VALUE,
    }
    model: str | None = None
    use_activation: OrNull[bool] = Field(
        True, description="False: logits instead of probabilities or scores, vectors as they are."
    )


class ScoreRequest(_PoolingRequest):
    text_1: Strings = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"),
        description="One text for all of text_2, or one for each; also as queries or data_1.",
    )
    text_2: Strings = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        description="Also as documents, items or data_2.",
    )


class ClassifyRequest(_PoolingRequest):
    input: Texts


class PoolRequest(_PoolingRequest):
    input: Texts
    task: Literal["embed", "token_embed", "classify"] | None = Field(
        None, description="By default what the model is for."
    )
    encoding_format: OrNull[Literal["float", "base64"]] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
