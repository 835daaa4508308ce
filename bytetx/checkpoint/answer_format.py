"""AnswerFormat: how a checkpoint writes reasoning and calls of tools into the text of an answer.

It is the inverse of the chat template: found by what the template writes of earlier answers. Its
grammars hold an answer to calls that fit the tools; AnswerParser takes an answer apart.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bytetx.checkpoint.answer_parser import AnswerParser, AssistantMessage
from bytetx.checkpoint.tool_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
)
from bytetx.errors import InputError, OptionError, shown
from bytetx.sampling_params import StructuredOutputsParams

# Without an upper limit a model could write space for ever.
_SPACE = r"[ \n\r\t]{0,20}"
_GAP = r"[ \n\r\t]{0,4}"  # between reasoning and what follows it
TAIL_TOKENS = 16  # a prompt's last, among which a marker of reasoning is looked for
TOOL_NAME, TOOL_NAME_HELP = (
    re.compile(r"[a-zA-Z0-9_.\-]{1,128}"),
    ("1 to 128 letters, digits, '_', '-' and '.'"),
)
_OBJECT = {"type": "object"}


# Other formats between the same markers.
_NO_HERMES = ("<function=", "<arg_key>", "<parameter=")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """tool_calls, reasoning: names in TOOL_FORMATS and REASONING_FORMATS; "none" is switched off,
    and empty where nothing was found.

    special_tokens: the tokenizer's, id by text.
    """

    tool_calls: str = ""
    reasoning: str = ""
    special_tokens: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def tools(self) -> ToolFormat | None:
        return TOOL_FORMATS.get(self.tool_calls)

    @property
    def thinking(self) -> ReasoningFormat | None:
        return REASONING_FORMATS.get(self.reasoning)

    @property
    def special_ids(self) -> dict[str, int]:
        """The ids of those markers that are special tokens, by text."""
        tools, thinking = self.tools, self.thinking
        markers = [] if tools is None else [tools.begin, tools.end, tools.middle]
        markers += [] if thinking is None else [thinking.begin, thinking.end]
        known = self.special_tokens
        return {text: known[text] for text in markers if text in known}

    def changed(self, *, tool_calls: str = "auto", reasoning: str = "auto") -> "AnswerFormat":
        """The same with other formats: names, "none", or "auto" for what it has.

        Raises OptionError for a name that is not known.
        """
        _check_name("tool calls", tool_calls, TOOL_FORMATS)
        _check_name("reasoning", reasoning, REASONING_FORMATS)
        return replace(
            self,
            tool_calls=self.tool_calls if tool_calls == "auto" else tool_calls,
            reasoning=self.reasoning if reasoning == "auto" else reasoning,
        )

    def parser(
        self,
        *,
        has_tools: bool = True,
        is_reasoning: bool = False,
        names: Collection[str] | None = None,
    ) -> AnswerParser:
        """A parser of one answer as it comes.

        has_tools: whether calls are looked for.  is_reasoning: whether the prompt has opened the
        reasoning.  names: of the tools; where calls have no marker, others are no calls.
        """
        tools = self.tools if has_tools else None
        return AnswerParser(tools, self.thinking, is_reasoning=is_reasoning, names=names)

    def parse(
        self,
        text: str,
        *,
        has_tools: bool = True,
        is_reasoning: bool = False,
        names: Collection[str] | None = None,
    ) -> AssistantMessage:
        """A whole answer taken apart; arguments as of `parser`."""
        parser = self.parser(has_tools=has_tools, is_reasoning=is_reasoning, names=names)
        return AssistantMessage.of([parser.feed(text), parser.finish()])

    def opens_reasoning(self, tail: str) -> bool:
        """Whether a prompt that ends so has opened the reasoning of its answer."""
        thinking = self.thinking
        return thinking is not None and tail.rstrip().endswith(thinking.begin)

    def begin(self, tail: str) -> str | None:
        """Rules of what an answer has before its form, as StructuredOutputsParams.begin.

        tail: the end of the prompt's text, special tokens included.  None where the answer to it
        has no reasoning.
        """
        thinking = self.thinking
        if thinking is None or tail.rstrip().endswith(thinking.end):
            return None
        opened = "begin" if self.opens_reasoning(tail) else "opened"
        first = "" if opened == "begin" else f"{self._lark(thinking.begin)} "
        start = [] if opened == "begin" else ["begin: opened?"]
        end = self.special_ids.get(thinking.end)
        thought = (
            [f"thought[lazy]: /(.|\\n)*{_pattern(thinking.end)}/"]
            if end is None
            else [f"thought: THOUGHT <[{end}]>", "THOUGHT: /(.|\\n)*/"]
        )
        return "\n".join([*start, f"{opened}: {first}thought gap", *thought, f"gap: /{_GAP}/"])

    def tool_grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        choice: str = "required",
        name: str | None = None,
        parallel: bool = True,
        answer: object = None,
    ) -> StructuredOutputsParams:
        """The form of an answer that calls tools, each with arguments that fit its schema.

        tools: as OpenAI has them, with names of letters, digits, '_', '-' and '.'.
        choice: "required": one call or more; "auto": text that may hold calls, of which those of
        tools that are not `strict` have any object as arguments.  name: the only tool, if any.
        parallel: whether there may be several calls.  answer: of choice "auto", the JSON schema of
        an answer that calls no tool.
        Raises InputError where the format is not known, or the tools cannot be written in it.
        """
        format = self.tools
        if format is None:
            raise InputError(
                "no format of tool calls is known for this checkpoint: its chat template has none "
                f"of {', '.join(sorted(TOOL_FORMATS))}"
            )
        functions = list(map(_function, tools))
        if name is not None:
            functions = [one for one in functions if one["name"] == name][:1]
        if not functions:
            raise InputError(f"there is no tool {shown(name)}" if name else "tools are empty")
        is_free = choice == "auto"
        rules = self._call_rules(format, functions, is_free=is_free)
        if not is_free:
            rules += self._required(format, parallel=parallel)
        elif answer is not None:
            rules += self._required(format, parallel=parallel, start="calls")
            rules += ["start: calls | answer", f"answer: {_json_rule(answer)}"]
        else:
            rules += self._auto(format, parallel=parallel)
        return StructuredOutputsParams(grammar="\n".join(rules))

    def _call_rules(
        self, format: ToolFormat, functions: Sequence[Mapping[str, Any]], *, is_free: bool
    ) -> list[str]:
        """`call`: head to tail of a call of any of the functions."""
        rules, calls = [], []
        for number, function in enumerate(functions):
            calls.append(f"call_{number}")
            start = f"{format.head}{function['name']}{format.middle}"
            is_any = is_free and not function.get("strict")
            schema = _OBJECT if is_any else arguments_schema(function)
            rules.append(f"call_{number}: {self._lark(start)} arguments_{number}{self._tail()}")
            rules.append(f"arguments_{number}: {_json_rule(schema)}")
        return [f"call: {' | '.join(calls)}", *rules]

    def _tail(self) -> str:
        format = self.tools
        return f" {self._lark(format.tail)}" if format is not None and format.tail else ""

    def _required(self, format: ToolFormat, *, parallel: bool, start: str = "start") -> list[str]:
        begin = "" if format.is_bare else self._lark(format.begin)
        more = self._blocks(format, begin, parallel=parallel)
        return [f"{start}: {begin} block{more}", *self._block_rules(format, parallel=parallel)]

    def _auto(self, format: ToolFormat, *, parallel: bool) -> list[str]:
        """Text, and calls from where the begin marker is written on."""
        rules = self._block_rules(format, parallel=parallel)
        if format.is_bare:
            more = self._blocks(format, "", parallel=parallel)
            plain = r"PLAIN: /([ \n\r\t]*[^{ \n\r\t](.|\n)*)?/"
            return [f"start: block{more} | PLAIN", plain, *rules]
        number = self.special_ids.get(format.begin)
        head = (
            ["begun: head block", f"head[lazy]: TEXT {self._lark(format.begin)}"]
            if number is None
            else [f"begun: TEXT <[{number}]> block"]
        )
        start = "start: begun* TEXT" if parallel else "start: begun | TEXT"
        return [start, *head, r"TEXT: /(.|\n)*/", *rules]

    def _blocks(self, format: ToolFormat, begin: str, *, parallel: bool) -> str:
        """The blocks that may follow the first one, where each call is one."""
        if not (parallel and format.is_repeated):
            return ""
        return f" ({self._lark(format.joint + format.begin)} block)*"

    def _block_rules(self, format: ToolFormat, *, parallel: bool) -> list[str]:
        """`block`: all that stands behind the begin marker."""
        more = ""
        if parallel and not format.is_repeated:
            more = f" ({self._lark(format.joint)} call)*"
        opening = f'" "? {self._lark(format.opening)} ' if format.opening else ""
        return [f"block: {opening}call{more} {self._lark(format.closing + format.end)}"]

    def _lark(self, text: str) -> str:
        """The text as llguidance's Lark takes it; a special token by its id."""
        if not text:
            return ""
        ids = self.special_ids
        if not ids:
            return _literal(text)
        special = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
        parts = [part for part in re.split(f"({special})", text) if part]
        return " ".join(f"<[{ids[p]}]>" if p in ids else _literal(p) for p in parts)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool. InputError where it is none, or its name cannot be written."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise InputError(
            'a tool must be {"type": "function", "function": {"name": "...", ...}}, got '
            f"{shown(tool)}"
        )
    if not TOOL_NAME.fullmatch(name):
        raise InputError(f"the name of a tool must be {TOOL_NAME_HELP}, got {shown(name)}")
    return function


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a function's arguments; InputError where they are no object."""
    given = function.get("parameters")
    if given is None:
        return {**_OBJECT, "additionalProperties": False}
    if given.get("type", "object") != "object":
        raise InputError(
            f"tools: the parameters of {function['name']} must be a schema of an object, got type "
            f"{shown(given['type'])}"
        )
    return {**_OBJECT, **given}


def find_answer_format(templates: Iterable[str], special: Mapping[str, int]) -> AnswerFormat:
    """The format of answers that a checkpoint's chat templates write.

    templates: their sources.  special: the ids of special tokens, by text.
    """
    source = "\0".join(templates)
    if not source:
        return AnswerFormat()
    tools = ""
    if "[TOOL_CALLS]" in source or "[TOOL_CALLS]" in special:
        tools = "mistral_args" if "[ARGS]" in source else "mistral"
    elif "<tool_call>" in source and not any(other in source for other in _NO_HERMES):
        tools = "hermes"
    elif "<|python_tag|>" in source or (
        "<|start_header_id|>" in source and '"parameters": ' in source
    ):
        tools = "llama3_json"
    reasoning = ""
    if "[/THINK]" in source:
        reasoning = "mistral"
    elif "</think>" in source or "<think>" in source:
        reasoning = "think"
    return AnswerFormat(tools, reasoning, dict(special))


def _check_name(what: str, name: str, known: Iterable[str]) -> None:
    if name not in ("auto", "none", *known):
        raise OptionError(
            f"the format of {what} must be auto, none or one of {', '.join(known)}, got "
            f"{shown(name)}"
        )


def _json_rule(schema: object) -> str:
    """A schema within Lark. "::=" would be read as a sign of llama.cpp's grammars."""
    given = schema if isinstance(schema, dict) else {"allOf": [schema]}
    options = {"whitespace_pattern": _SPACE}
    try:
        text = json.dumps({**given, "x-guidance": options}, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"tools: the parameters are no JSON: {error}") from None
    return f"%json {text}".replace("::=", ":\\u003a=")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """A regex of the text alone, within slashes."""
    return re.escape(text).replace("/", r"\/")
