"""Requests of every route, as pydantic checks them and the OpenAPI page shows them."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from bytetx.errors import shown

MAX_PROMPTS = 64  # of one /v1/completions


def _wrong(what: str, value: object) -> PydanticCustomError:
    return PydanticCustomError(
        "wrong_input", "must be {what}, got {got}", {"what": what, "got": shown(value)}
    )


def _are_ids(value: object) -> bool:
    return type(value) is list and bool(value) and all(type(i) is int for i in value)


class Batch(list[Any]):
    """Inputs as a list; `is_single` where the request gave one that was no list of them."""

    def __init__(self, items: list[Any], *, is_single: bool):
        super().__init__(items)
        self.is_single = is_single


def _check_texts(value: object) -> Batch:
    """A str, token ids, or a list of either."""
    if type(value) is str or _are_ids(value):
        return Batch([value], is_single=True)
    if type(value) is list and all(type(item) is str or _are_ids(item) for item in value):
        return Batch(value, is_single=False)
    raise _wrong("a string, a list of token ids, or a list of these", value)


def _check_sequences(value: object) -> Batch:
    """As TEI's /predict: a str, a pair as a list of two str, or a list of lists of one or two."""
    if type(value) is str:
        return Batch([value], is_single=True)
    if _is_sequence(value):
        return Batch([_sequence(value)], is_single=True)
    if type(value) is list and all(type(item) is str or _is_sequence(item) for item in value):
        return Batch([_sequence(item) for item in value], is_single=False)
    raise _wrong('a string, a pair ["a", "b"], or a list of lists of one or two strings', value)


def _is_sequence(value: object) -> bool:
    return type(value) is list and 1 <= len(value) <= 2 and all(type(part) is str for part in value)


def _sequence(value: Any) -> str | tuple[str, str]:
    if type(value) is str:
        return value
    return value[0] if len(value) == 1 else (value[0], value[1])


def _check_strings(value: object) -> Batch:
    if type(value) is str:
        return Batch([value], is_single=True)
    if type(value) is list and all(type(item) is str for item in value):
        return Batch(value, is_single=False)
    raise _wrong("a string or a list of strings", value)


def _check_ids(value: object) -> Batch:
    if _are_ids(value):
        return Batch([value], is_single=True)
    if type(value) is list and value and all(map(_are_ids, value)):
        return Batch(value, is_single=False)
    raise _wrong("a list of token ids, or a list of these", value)


def _check_documents(value: object) -> list[str]:
    """Strings, or Cohere's objects with the key text."""
    if type(value) is list:
        texts: list[Any] = [item.get("text") if type(item) is dict else item for item in value]
        if all(type(text) is str for text in texts):
            return texts
    raise _wrong('a list of strings, or of objects {"text": "..."}', value)


_STRING = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _list_of(*kinds: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": {"anyOf": list(kinds)}, "minItems": 1}


_PARTS = {"type": "array", "items": _STRING, "minItems": 1, "maxItems": 2}
_DOCUMENT = {"type": "object", "properties": {"text": _STRING}, "required": ["text"]}

Texts = Annotated[
    Batch,
    PlainValidator(_check_texts),
    WithJsonSchema({"anyOf": [_STRING, _IDS, _list_of(_STRING, _IDS)]}),
]
Sequences = Annotated[
    Batch,
    PlainValidator(_check_sequences),
    WithJsonSchema({"anyOf": [_STRING, _PARTS, _list_of(_PARTS)]}),
]
Strings = Annotated[
    Batch, PlainValidator(_check_strings), WithJsonSchema({"anyOf": [_STRING, _list_of(_STRING)]})
]
Ids = Annotated[
    Batch, PlainValidator(_check_ids), WithJsonSchema({"anyOf": [_IDS, _list_of(_IDS)]})
]
Documents = Annotated[
    list[str], PlainValidator(_check_documents), WithJsonSchema(_list_of(_STRING, _DOCUMENT))
]
Direction = Literal["Left", "Right", "left", "right"]


T = TypeVar("T")
# One error is told; to collect those of a million entries takes seconds.
_List = Annotated[list[T], Field(fail_fast=True)]


class _Request(BaseModel):
    """Unknown fields are ignored, as the servers whose routes these are do; types are exact."""

    # JSON has no Infinity and no NaN.
    model_config = ConfigDict(
        strict=True, extra="ignore", protected_namespaces=(), allow_inf_nan=False
    )


class _TeiRequest(_Request):
    truncate: bool | None = Field(None, description="Cut long texts; the server's --auto-truncate.")
    truncation_direction: Direction = "Right"
    model: str | None = Field(None, description="A served model; the first one.")

    @property
    def cuts_left(self) -> bool:
        return self.truncation_direction in ("Left", "left")


class EmbedRequest(_TeiRequest):
    inputs: Texts
    normalize: bool | None = Field(True, description="Scale vectors to length 1.")
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None


class EmbedAllRequest(_TeiRequest):
    inputs: Texts
    prompt_name: str | None = None


class EmbedSparseRequest(_TeiRequest):
    inputs: Texts
    prompt_name: str | None = None


class PredictRequest(_TeiRequest):
    inputs: Sequences
    raw_scores: bool = False
    top_k: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Not TEI's: the best labels alone."
    )


class PredictTokensRequest(_TeiRequest):
    inputs: Strings
    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] = "simple"
    stride: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Cut long texts into chunks that share so many tokens."
    )
    ignore_labels: _List[str] = ["O"]


class RerankRequest(_TeiRequest):
    query: str
    texts: _List[str]
    raw_scores: bool = False
    return_text: bool = False


class SimilarityInput(_Request):
    source_sentence: str
    sentences: _List[str]


class SimilarityParameters(_TeiRequest):
    prompt_name: str | None = None


class SimilarityRequest(_Request):
    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None
    model: str | None = None


class TokenizeRequest(_Request):
    inputs: Strings
    add_special_tokens: bool = True
    prompt_name: str | None = None
    model: str | None = None


class DecodeRequest(_Request):
    ids: Ids
    skip_special_tokens: bool = True
    model: str | None = None


class EmbeddingsRequest(_Request):
    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    prompt_name: str | None = Field(None, description="Not OpenAI's: a prompt of the checkpoint.")
    truncate: bool | None = Field(None, description="Not OpenAI's: as /embed's.")


class OpenAIRerankRequest(_Request):
    query: str
    documents: Documents
    model: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False
    raw_scores: bool = Field(False, description="Not Cohere's: logits instead of scores.")
    truncate: bool | None = Field(None, description="Not Cohere's: as /rerank's.")


class StreamOptions(_Request):
    include_usage: bool = False


class _GenerationRequest(_Request):
    """What completions and chats have in common; top_k to stop_token_ids are vLLM's names."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = 1
    temperature: float | None = Field(None, description="The checkpoint's, else 1.")
    top_p: float | None = Field(None, description="The checkpoint's, else 1.")
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | _List[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: _List[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None


class CompletionRequest(_GenerationRequest):
    prompt: Texts
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The checkpoint's, else 16."
    )
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None


class ChatMessage(_Request):
    role: str
    content: str | _List[dict[str, Any]] | None = None
    name: str | None = None


class ChatRequest(_GenerationRequest):
    messages: Annotated[_List[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None
