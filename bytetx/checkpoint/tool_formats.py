"""Formats of reasoning and of tool calls in the text of answers, as data."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around the reasoning that comes before an answer."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written: `begin`, calls between `opening` and `closing`, then `end`.

    A call is `head`, the tool's name, `middle`, its arguments in JSON, and `tail`.
    joint: between calls.  is_repeated: each call has its own begin and end.
    is_bare: calls are written without `begin`, at the start of an answer.
    joins: what the parser takes for a joint within one block, if anything.
    is_named: the parser also takes calls as Mistral's later models write them, NAME[ARGS]{...}.
    id_length: characters of a call's id; None is any id.
    """

    name: str
    begin: str
    end: str = ""
    opening: str = ""
    closing: str = ""
    head: str = '{"name": "'
    middle: str = '", "arguments": '
    tail: str = "}"
    joint: str = "\n"
    is_repeated: bool = False
    is_bare: bool = False
    joins: str = ""
    is_named: bool = False
    id_length: int | None = None


_HERMES = ToolFormat(
    "hermes", "<tool_call>", "</tool_call>", head='\n{"name": "', tail="}\n", is_repeated=True
)
_LLAMA = ToolFormat(
    "llama3_json",
    "<|python_tag|>",
    middle='", "parameters": ',
    joint="; ",
    is_bare=True,
    joins=";",
)
_MISTRAL = ToolFormat(
    "mistral",
    "[TOOL_CALLS]",
    opening="[",
    closing="]",
    joint=", ",
    is_named=True,
    id_length=9,  # which its templates check
)
_MISTRAL_NAMED = replace(
    _MISTRAL,
    name="mistral_args",
    opening="",
    closing="",
    head="",
    middle="[ARGS]",
    tail="",
    joint="",
    is_repeated=True,
)
_THINK = ReasoningFormat("<think>", "</think>")

# By the names that vLLM and SGLang have for them, too.
TOOL_FORMATS = {
    "hermes": _HERMES,
    "qwen25": _HERMES,
    "llama3_json": _LLAMA,
    "llama3": _LLAMA,
    "mistral": _MISTRAL,
    "mistral_args": _MISTRAL_NAMED,
}
REASONING_FORMATS = {
    "think": _THINK,
    "qwen3": _THINK,
    "deepseek_r1": _THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
