"""One policy for fields of requests: null, known ones that are not supported, unknown ones.

An optional field may be null, which is its default. A known field that is not supported is refused
by name, unless its value asks for nothing. An unknown field is refused with a suggestion on our
own routes and TEI's, and ignored and counted on those of OpenAI and Cohere, whose clients send
fields of other servers.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticUseDefault, core_schema

from bytetx.errors import shown
from bytetx.serve.errors import ServeError

T = TypeVar("T")

ANY = object()  # every value of a field asks for nothing: it changes no answer
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
