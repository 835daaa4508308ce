"""Requests of Cohere's embeddings and of vLLM's routes for models without generation."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from bytetx.serve.schemas import (
    ANY_VALUE,
    OpenRequest,
    OrNull,
    Strings,
    Texts,
    TruncatingRequest,
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
