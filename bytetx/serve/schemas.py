"""Requests of every route, as pydantic checks them and the OpenAPI page shows them.

One policy holds for fields: an optional field may be null, which is its default. A known field that
is not supported is refused by name, unless its value asks for nothing. An unknown field is refused
with a suggestion on our own routes and TEI's, and ignored and counted on those of OpenAI and
Cohere, whose clients send fields of other servers.
"""

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, PydanticUseDefault, core_schema

from bytetx.errors import shown
from bytetx.serve.errors import ServeError

ANY = object()  # every value of a field asks for nothing: it changes no answer
T = TypeVar("T")
_MAX_NAME = 80  # characters of a caller's field that are looked at


class _NullIsDefault:
    """The type of a field that is not None by default: null is that default."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_use_default, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), {"type": "null"}]}


def _use_default(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


OrNull = Annotated[T, _NullIsDefault()]


class Fields(BaseModel):
    """A body, or a table in one. Types are exact.

    unsupported: known fields that are not supported, each with the values that ask for nothing.
    refuses_unknown: whether any other field is refused.
    """

    # JSON has no Infinity and no NaN.
    model_config = ConfigDict(
        strict=True, extra="allow", protected_namespaces=(), allow_inf_nan=False
    )
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    refuses_unknown: ClassVar[bool] = True


def unknown_fields(body: Fields) -> Iterator[tuple[str, type[Fields]]]:
    """(path of each field that is neither declared nor known, the table that it is in).

    Raises ServeError for the first known field that is not supported and asks for something.
    """
    return _unknown(body, "")


def _unknown(table: Fields, place: str) -> Iterator[tuple[str, type[Fields]]]:
    kind = type(table)
    for name, value in (table.model_extra or {}).items():
        path = f"{place}{name[:_MAX_NAME]}"
        if name not in kind.unsupported:
            yield path, kind
        elif value is not None and not _asks_nothing(value, kind.unsupported[name]):
            raise ServeError(
                "unsupported",
                f"{path} is not supported, got {shown(value)}; leave it out",
                param=path,
                code="unsupported_parameter",
            )
    for name in kind.model_fields:
        inner = getattr(table, name)
        if isinstance(inner, Fields):
            yield from _unknown(inner, f"{place}{name}.")


def _asks_nothing(value: Any, values: tuple[Any, ...]) -> bool:
    return any(
        one is ANY or (value == one and isinstance(value, bool) == isinstance(one, bool))
        for one in values
    )


def refusal(path: str, kind: type[Fields]) -> ServeError:
    """The error for an unknown field, with the field that was likely meant."""
    name = path.rpartition(".")[2]
    close = get_close_matches(name, kind.model_fields, n=1)
    known = f"did you mean {close[0]}?" if close else f"there are: {', '.join(kind.model_fields)}"
    return ServeError(
        "validation",
        f"the field {shown(path)} is not known; {known} (--ignore-unknown-fields passes over it)",
        param=path,
    )


MAX_PROMPTS = 64  # in one body of /v1/completions


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


def _check_messages(value: object) -> list[dict[str, Any]]:
    """A chat as its template takes it: every key of a message is kept, in its order."""
    if type(value) is not list or not value or not all(type(item) is dict for item in value):
        raise _wrong('a list of messages {"role": "...", "content": "..."}', value)
    return [_checked_message(message, f"[{index}]") for index, message in enumerate(value)]


def _checked_message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if type(role) is not str:
        raise _wrong_at(f"{place}.role", "a string", role)
    if type(content) is list:
        parts = enumerate(content)
        content = [_checked_part(part, f"{place}.content[{index}]") for index, part in parts]
    elif content is not None and type(content) is not str:
        raise _wrong_at(f"{place}.content", "a string or a list of parts", content)
    checked = message if content is None else message | {"content": content}
    if role != "assistant" or calls is None:
        return checked
    if type(calls) is not list:
        raise _wrong_at(f"{place}.tool_calls", "a list", calls)
    if not calls:  # as if there were none, which templates do not take it for
        return {key: checked[key] for key in checked if key != "tool_calls"}
    named = enumerate(calls)
    read = [_checked_call(call, f"{place}.tool_calls[{index}]") for index, call in named]
    return checked | {"tool_calls": read}


def _checked_part(part: object, place: str) -> dict[str, Any]:
    """A part of text; OpenAI's refusals are such."""
    if type(part) is dict:
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind in ("text", "refusal") and type(text) is str:
            return {"type": "text", "text": text} if kind == "refusal" else part
        if kind not in ("text", "refusal"):
            raise _wrong_at(f"{place}.type", "text, as other parts are not supported", kind)
    raise _wrong_at(place, 'a part {"type": "text", "text": "..."}', part)


def _checked_call(call: object, place: str) -> object:
    """A call of a tool. Its arguments come as JSON, of which templates are given the values."""
    if type(call) is not dict or type(call.get("function")) is not dict:
        return call  # the model has a form of its own
    arguments = call["function"].get("arguments") or "{}"
    if type(arguments) is str:
        try:
            arguments = json.loads(arguments, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise _wrong_at(f"{place}.function.arguments", "JSON", arguments) from None
    return call | {"function": call["function"] | {"arguments": arguments}}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _wrong_at(place: str, what: str, value: object) -> PydanticCustomError:
    return PydanticCustomError(
        "wrong_message",
        "{place} must be {what}, got {got}",
        {"place": place, "what": what, "got": shown(value)},
    )


_STRING = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _list_of(*kinds: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": {"anyOf": list(kinds)}, "minItems": 1}


_PARTS = {"type": "array", "items": _STRING, "minItems": 1, "maxItems": 2}
_DOCUMENT = {"type": "object", "properties": {"text": _STRING}, "required": ["text"]}

_NULL, _OBJECT = {"type": "null"}, {"type": "object"}
_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": _STRING}}
_MESSAGE = {
    "type": "object",
    "description": "Every key reaches the chat template.",
    "properties": {
        "role": _STRING,
        "content": {"anyOf": [_STRING, {"type": "array", "items": _PART}, _NULL]},
        "name": {"anyOf": [_STRING, _NULL]},
        "tool_calls": {"anyOf": [{"type": "array", "items": _OBJECT}, _NULL]},
        "tool_call_id": {"anyOf": [_STRING, _NULL]},
        "reasoning_content": {"anyOf": [_STRING, _NULL]},
    },
    "required": ["role"],
}
_CHAT_SCHEMA = {"type": "array", "items": _MESSAGE, "minItems": 1}

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
Messages = Annotated[
    list[dict[str, Any]], PlainValidator(_check_messages), WithJsonSchema(_CHAT_SCHEMA)
]
Direction = Literal["Left", "Right", "left", "right"]

ANY_VALUE = (ANY,)
# One error is told; to collect those of a million entries takes seconds.
ListOf = Annotated[list[T], Field(fail_fast=True)]


class Request(Fields):
    """A body of TEI's routes, or of bytetx's own."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})


class OpenRequest(Fields):
    """A body of OpenAI's or Cohere's routes."""

    refuses_unknown: ClassVar[bool] = False


class TruncatingRequest(OpenRequest):
    """truncate_prompt_tokens and truncation_side are vLLM's."""

    truncate: bool | None = Field(None, description="Cut long texts, as /embed's.")
    truncate_prompt_tokens: Literal[-1] | None = Field(
        None, description="-1 cuts texts to the model's length, as truncate does."
    )
    truncation_side: Literal["left", "right"] | None = None

    @property
    def truncates(self) -> bool | None:
        is_asked = self.truncate is None and self.truncate_prompt_tokens is not None
        return True if is_asked else self.truncate

    @property
    def cuts_left(self) -> bool:
        return self.truncation_side == "left"


class _TeiRequest(Request):
    truncate: bool | None = Field(None, description="Cut long texts; the server's --auto-truncate.")
    truncation_direction: OrNull[Direction] = "Right"
    model: str | None = Field(None, description="A served model; the first one.")

    @property
    def cuts_left(self) -> bool:
        return self.truncation_direction in ("Left", "left")


MAX_QUESTIONS = 64  # in one body, as transformers serve has it
_State = str | dict[str, Any] | list[Any]
_Questions = Annotated[dict[str, Any], Field(min_length=1, max_length=MAX_QUESTIONS)]


class SystemOneRequest(OpenRequest):
    state: _State = Field(description="What the questions are about: any JSON.")
    questions: _Questions = Field(
        description='By name: {"type": "noul", "choice" or "score", "instructions", "criteria"}.'
    )
    assets: OrNull[dict[str, Any]] = Field({}, description="Images, which no model here reads.")
    model: str | None = Field(None, description="A served model; the first one.")


class DecisionsRequest(OpenRequest):
    input: str | ListOf[dict[str, Any]] | None = Field(None, description="A text, or messages.")
    questions: Annotated[ListOf[dict[str, Any]], Field(max_length=MAX_QUESTIONS)] | _Questions = (
        Field(description='{"type": "predicate", "choice" or "score", "name", "instructions", ...}')
    )
    state: _State | None = Field(None, description="In place of input, as for /v1/systemone.")
    assets: OrNull[dict[str, Any]] = {}
    model: str | None = Field(None, description="A served model; the first one.")


class TaskRequest(Request):
    task: str = Field(description="A task of GET /info, such as score.")
    texts: ListOf[str | ListOf[int] | tuple[str, str]] = Field(
        description="Texts, pairs of texts, or token ids."
    )
    options: OrNull[dict[str, Any]] = Field({}, description="Those of the task's Python method.")
    model: str | None = Field(None, description="A served model; the first one.")


class MoveModelRequest(Request):
    model: str | None = Field(None, description="A served model; the first one.")


class UnloadAdapterRequest(Request):
    name: str = Field(description="Of the adapter, without its model.")
    model: str | None = Field(None, description="A served model; the first one.")


class LoadAdapterRequest(UnloadAdapterRequest):
    path: str = Field(description="Folder on the server, or a hub id.")


# Of all texts, or of each.
TaskName = str | ListOf[str | None]


class EmbedRequest(_TeiRequest):
    inputs: Texts
    normalize: OrNull[bool] = Field(True, description="Scale vectors to length 1.")
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None
    task: TaskName | None = Field(None, description="Not TEI's: as of Model.embed.")


class EmbedAllRequest(_TeiRequest):
    inputs: Texts
    prompt_name: str | None = None


class EmbedSparseRequest(_TeiRequest):
    inputs: Texts
    prompt_name: str | None = None
    task: TaskName | None = Field(None, description="Not TEI's: as of Model.embed_sparse.")


class PredictRequest(_TeiRequest):
    inputs: Sequences
    raw_scores: OrNull[bool] = False
    top_k: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Not TEI's: the best labels alone."
    )


class PredictTokensRequest(_TeiRequest):
    inputs: Strings
    aggregation_strategy: OrNull[Literal["none", "simple", "first", "average", "max"]] = "simple"
    stride: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Cut long texts into chunks that share so many tokens."
    )
    ignore_labels: OrNull[ListOf[str]] = ["O"]
    decoding: OrNull[Literal["auto", "argmax", "viterbi"]] = Field(
        "auto", description="Not TEI's: the likeliest tag of each token, or sequence of tags."
    )


class RerankRequest(_TeiRequest):
    query: str
    texts: ListOf[str] | None = None
    raw_scores: OrNull[bool] = False
    return_text: OrNull[bool] = False
    documents: Documents | None = Field(
        None, description="Jina's and vLLM's, in place of texts: the answer is /v1/rerank's."
    )
    top_n: Annotated[int, Field(ge=1)] | None = Field(None, description="Goes with documents.")
    return_documents: bool | None = Field(None, description="Goes with documents.")
    instruction: str | None = Field(
        None, description="Not TEI's: what a causal reranker or a chat model is told."
    )


class SimilarityInput(Request):
    source_sentence: str
    sentences: ListOf[str]


class SimilarityParameters(_TeiRequest):
    prompt_name: str | None = None
    task: TaskName | None = Field(None, description="Not TEI's: as of Model.embed.")


class SimilarityRequest(Request):
    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None
    model: str | None = None


class TokenizeRequest(Request):
    inputs: Strings
    add_special_tokens: OrNull[bool] = True
    prompt_name: str | None = None
    model: str | None = None


class DecodeRequest(Request):
    ids: Ids
    skip_special_tokens: OrNull[bool] = True
    model: str | None = None


class BatchRequest(OpenRequest):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"output_expires_after": ()}
    input_file_id: str
    endpoint: str = Field(description="The route of all lines, such as /v1/embeddings.")
    completion_window: OrNull[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,2}h$")]] = Field(
        "24h", description="Hours after which lines that have not run expire, 1h to 168h."
    )
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None


class VertexRequest(Request):
    """Each instance is a body of POST /."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"parameters": ({},)}
    instances: list[dict[str, Any]]


class OpenAIRerankRequest(TruncatingRequest):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (),
        "activation": (True,),
        "priority": ANY_VALUE,
        "rank_fields": (["text"],),
        "relevant_spans": (False,),
        "return_embeddings": (False,),
        "use_activation": (True,),
    }
    query: str
    documents: Documents
    model: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: OrNull[bool] = False
    raw_scores: OrNull[bool] = Field(False, description="Not Cohere's: logits instead of scores.")
    instruction: str | None = Field(None, description="Not Cohere's: as /rerank's.")
