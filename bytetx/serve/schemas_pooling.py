"""Requests of Cohere's embeddings and of vLLM's routes for models without generation."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from bytetx.serve.schemas import (
    ANY_VALUE,
    OpenRequest,
    OrNull,
    Sequences,
    Strings,
    Texts,
)
from bytetx.serve.vector_types import VectorType


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


class _PoolingRequest(OpenRequest):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "cache_salt": (),
        "embed_dtype": ("float32",),
        "endianness": ("little", "native"),
        "messages": (),
        "mm_processor_kwargs": ({},),
        "priority": ANY_VALUE,
        "request_id": ANY_VALUE,
        "softmax": (True,),
        "truncate_prompt_tokens": (),
        "truncation_side": ANY_VALUE,
        "user": ANY_VALUE,
    }
    model: str | None = None
    truncate: bool | None = Field(None, description="Not vLLM's: as /embed's.")


class ScoreRequest(_PoolingRequest):
    text_1: Strings = Field(description="One text for all of text_2, or one for each.")
    text_2: Strings


class ClassifyRequest(_PoolingRequest):
    input: Sequences


class PoolRequest(_PoolingRequest):
    input: Texts
    task: Literal["embed", "token_embed", "classify"] | None = Field(
        None, description="By default what the model is for."
    )
    encoding_format: OrNull[Literal["float", "base64"]] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
