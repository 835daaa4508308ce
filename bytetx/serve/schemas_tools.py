"""Tools of chats as OpenAI's clients send them, and which of them an answer must call."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from bytetx.checkpoint.answer_format import TOOL_NAME, TOOL_NAME_HELP
from bytetx.errors import shown

MAX_TOOLS = 1024


def _wrong(place: str, what: str, value: object) -> PydanticCustomError:
    return PydanticCustomError(
        "wrong_tool",
        "{place} must be {what}, got {got}",
        {"place": place, "what": what, "got": shown(value)},
    )


def _check_tools(value: object) -> list[dict[str, Any]] | None:
    """The tools as they came: templates write all that a tool has, in its order."""
    if value is None:
        return None
    if type(value) is not list or not all(type(tool) is dict for tool in value):
        what = 'a list of tools {"type": "function", "function": {"name": "...", ...}}'
        raise _wrong("tools", what, value)
    if len(value) > MAX_TOOLS:
        raise PydanticCustomError(
            "wrong_tool",
            "there are {given} tools, and at most {most} are taken; send those that the chat needs",
            {"given": len(value), "most": MAX_TOOLS},
        )
    names: set[str] = set()
    for index, tool in enumerate(value):
        name = _check_tool(tool, f"[{index}]")
        if name in names:
            raise _wrong(f"[{index}].function.name", "another name than those before it", name)
        names.add(name)
    return value


def _check_tool(tool: dict[str, Any], place: str) -> str:
    """The name of the tool's function."""
    function = tool.get("function")
    if tool.get("type", "function") != "function":
        raise _wrong(f"{place}.type", "function, as other tools are not supported", tool["type"])
    if type(function) is not dict:
        raise _wrong(f"{place}.function", 'an object {"name": "...", ...}', function)
    place = f"{place}.function"
    name, parameters = function.get("name"), function.get("parameters")
    if type(name) is not str or not TOOL_NAME.fullmatch(name):
        raise _wrong(f"{place}.name", TOOL_NAME_HELP, name)
    if parameters is not None and type(parameters) is not dict:
        raise _wrong(f"{place}.parameters", "a JSON schema of an object", parameters)
    for key, kinds, what in (
        ("description", str, "a string"),
        ("strict", bool, "true or false"),
    ):
        if function.get(key) is not None and type(function[key]) is not kinds:
            raise _wrong(f"{place}.{key}", what, function[key])
    return name


class NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    """A tool_choice: the only tool that is called."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["function"] = "function"
    function: NamedFunction


_TOOL_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"type": "boolean"},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
Tools = Annotated[
    list[dict[str, Any]] | None,
    PlainValidator(_check_tools),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": _TOOL_SCHEMA, "maxItems": MAX_TOOLS},
                {"type": "null"},
            ]
        }
    ),
]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
