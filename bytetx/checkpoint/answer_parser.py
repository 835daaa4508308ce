"""AnswerParser: the text of an answer, as it comes, into reasoning, content and calls of tools.

What it has given never changes, and does not depend on how the text was split: a marker is held
back until it is complete or cannot become one. Text that turns out to be no call is content.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from bytetx.checkpoint.tool_formats import ReasoningFormat, ToolFormat

_MAX_HEAD = 1024  # characters of a call up to its arguments, where these are given as they come
_MAX_NAMED_HEAD = 256
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_NAMED_HEAD = re.compile(
    r"([\w.\-]{1,128})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s{0,8}(?=\{)", re.ASCII
)
_SIGNS = re.compile(r'["{}\[\]]')
_STRING_SIGNS = re.compile(r'["\\]')
_CLOSING = {"{": "}", "[": "]"}


class CallDelta(NamedTuple):
    """A new part of a call.  name: with its first part alone.  arguments: more of their text."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls here
    name: str | None
    arguments: str


class AnswerDelta(NamedTuple):
    """The new parts of an answer; at most one CallDelta for each call."""

    reasoning: str
    content: str
    calls: tuple[CallDelta, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.  arguments: the text that the model wrote: JSON, unless it was cut off."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """An answer taken apart; content and reasoning_content are None where there is none."""

    content: str | None
    reasoning_content: str | None
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, deltas: Iterable[AnswerDelta]) -> "AssistantMessage":
        """The message that deltas add up to."""
        content, reasoning = [], []
        names: list[str] = []
        arguments: list[list[str]] = []
        for delta in deltas:
            content.append(delta.content)
            reasoning.append(delta.reasoning)
            for call in delta.calls:
                if call.name is not None:
                    names.append(call.name)
                    arguments.append([])
                arguments[call.index].append(call.arguments)
        calls = tuple(
            ToolCall(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True)
        )
        return cls("".join(content) or None, "".join(reasoning) or None, calls)


class AnswerParser:
    """Takes one answer apart. Each call of `feed` takes time in proportion to its text.

    Reasoning has no space at its ends; text has none beside reasoning and calls, and is joined by
    line breaks where calls stood between.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        thinking: ReasoningFormat | None,
        *,
        is_reasoning: bool = False,
        names: Collection[str] | None = None,
    ):
        """tools, thinking: None looks for no calls, or no reasoning.

        is_reasoning: whether the prompt has opened the reasoning.  names: of the tools; where calls
        have no marker, an object with another name is no call.
        """
        self._known = names if tools is not None and tools.is_bare else None
        self._tools, self._thinking = tools, thinking
        self._is_reasoning = is_reasoning and thinking is not None
        self._text = ""  # not taken yet
        self._held = ""  # taken for a call; content again where it is none
        self._is_ended = False
        self._has_content = False
        self._drops_space = False  # at the start of what comes next
        self._is_listed = False  # within a list of calls
        self._is_object = False  # whether the call is an object around its arguments
        self._scan, self._num_scanned = _JsonScan(), 0
        self._num_calls = 0
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: dict[int, list[str]] = {}
        self._names: dict[int, str] = {}
        # Takes what it can of the text; whether another state takes the rest.
        self._state: Callable[[], bool] = self._start

    @property
    def has_called(self) -> bool:
        """Whether there are calls, and the last one has all its arguments."""
        return self._num_calls > 0 and self._state != self._arguments

    def feed(self, text: str) -> AnswerDelta:
        """Take more text of the answer; return what it adds."""
        self._text += text
        while self._state():
            pass
        delta = AnswerDelta(
            "".join(self._reasoning),
            "".join(self._content),
            tuple(
                CallDelta(index, self._names.pop(index, None), "".join(parts))
                for index, parts in self._calls.items()
            ),
        )
        self._reasoning, self._content, self._calls = [], [], {}
        return delta

    def finish(self) -> AnswerDelta:
        """Return what was held back, at the end of the answer."""
        self._is_ended = True
        return self.feed("")

    def _start(self) -> bool:
        """At the start of the answer: an opening marker of reasoning, or none."""
        if self._thinking is not None:
            begin, stripped = self._thinking.begin, self._text.lstrip()
            if stripped.startswith(begin):
                self._text, self._is_reasoning = stripped[len(begin) :], True
            elif begin.startswith(stripped) and not self._is_ended:
                return False
        self._drops_space = self._is_reasoning
        return self._become(self._reason if self._is_reasoning else self._begin_text)

    def _reason(self) -> bool:
        assert self._thinking is not None
        end = self._thinking.end
        place = self._text.find(end)
        if place >= 0:
            self._add_reasoning(self._text[:place].rstrip())
            self._text, self._drops_space = self._text[place + len(end) :], True
            return self._become(self._begin_text)
        if self._is_ended:
            self._add_reasoning(self._text.rstrip())
            self._text = ""
        else:
            self._add_reasoning(self._take_free((end,)))
        return False

    def _begin_text(self) -> bool:
        """At the start of what the user sees, which may be a call without a marker."""
        if self._tools is not None and self._tools.is_bare:
            stripped = self._text.lstrip()
            if not stripped and not self._is_ended:
                return False
            if stripped.startswith("{"):
                return self._become(self._call)
        return self._become(self._see_text)

    def _see_text(self) -> bool:
        if self._tools is None:
            self._add_content(self._text)
            self._text = ""
            return False
        begin = self._tools.begin
        place = self._text.find(begin)
        if place >= 0:
            text = self._text[:place].rstrip()
            self._held = self._text[len(text) : place + len(begin)]
            self._text = self._text[place + len(begin) :]
            self._add_content(text)
            return self._become(self._call)
        if self._is_ended:
            self._add_content(self._text)
            self._text = ""
        else:
            self._add_content(self._take_free((begin,)))
        return False

    def _call(self) -> bool:
        """Where a call may begin: behind a marker, a joint, or at the start of the text."""
        assert self._tools is not None
        stripped = self._text.lstrip()
        if not stripped:
            return self._give_back("") if self._is_ended else False
        self._held += self._text[: len(self._text) - len(stripped)]
        self._text = stripped
        if stripped[0] == "{":
            self._scan, self._num_scanned, self._is_object = _JsonScan(), 0, True
            return self._become(self._object)
        if stripped[0] == "[" and self._tools.is_named and not self._is_listed:
            self._held, self._text, self._is_listed = self._held + "[", stripped[1:], True
            return True
        if self._tools.is_named and not self._is_listed:
            self._is_object = False
            return self._become(self._named)
        return self._give_back("")

    def _named(self) -> bool:
        """NAME[ARGS]{...}"""
        found = _NAMED_HEAD.match(self._text[:_MAX_NAMED_HEAD])
        if found is not None:
            return self._begin_arguments(found[1], found.end())
        if self._is_ended or len(self._text) >= _MAX_NAMED_HEAD:
            return self._give_back("")
        return False

    def _object(self) -> bool:
        """{"name": ..., "arguments": {...}}, whose arguments are given as they come, in that order;
        any other object is read whole."""
        found = _HEAD.match(self._text[:_MAX_HEAD])
        name = None if found is None else _text_of(f'"{found[1]}"')
        if found is not None and name is not None and self._is_known(name):
            return self._begin_arguments(name, found.end())
        end = self._scan.end(self._text, self._num_scanned)
        self._num_scanned = len(self._text)
        if end is None:
            return self._give_back(self._text) if self._is_ended else False
        call = None if self._scan.is_broken else _whole_call(self._text[:end])
        if call is None or not self._is_known(call.name):
            return self._give_back(self._text[:end])
        self._add_call(call.name)
        self._add_arguments(call.arguments)
        self._text = self._text[end:]
        return self._become(self._after)

    def _is_known(self, name: str) -> bool:
        return self._known is None or name in self._known

    def _arguments(self) -> bool:
        end = self._scan.end(self._text)
        self._add_arguments(self._text[:end])
        self._text = "" if end is None else self._text[end:]
        if end is None:
            return False
        if self._scan.is_broken:
            return self._become(self._broken)
        return self._become(self._rest_of_object if self._is_object else self._after)

    def _broken(self) -> bool:
        """Arguments that are no JSON: all up to the next marker is theirs, as it was written."""
        assert self._tools is not None
        markers = tuple(text for text in (self._tools.end, self._tools.begin) if text)
        places = [place for place in map(self._text.find, markers) if place >= 0]
        if places:
            self._add_arguments(self._text[: min(places)])
            self._text = self._text[min(places) :]
            self._is_listed = False
            return self._become(self._after)
        if self._is_ended:
            self._add_arguments(self._text)
            self._text = ""
            return False
        self._add_arguments(self._take_free(markers, keeps_space=True))
        return False

    def _rest_of_object(self) -> bool:
        """Behind the arguments: the end of the call's object, or more keys, which nobody reads."""
        stripped = self._text.lstrip()
        if not stripped:
            return False
        if stripped[0] != ",":
            self._text = stripped[1:] if stripped[0] == "}" else stripped
            return self._become(self._after)
        scan = _JsonScan("}")
        end = scan.end(stripped)
        if end is None and not self._is_ended:
            return False
        if end is None or scan.is_broken:
            self._held = ""
            return self._give_back(self._text)
        self._text = stripped[end:]
        return self._become(self._after)

    def _after(self) -> bool:
        """Behind a call."""
        assert self._tools is not None
        self._drops_space = True
        stripped = self._text.lstrip()
        if not stripped:
            return False
        joint = "," if self._is_listed else self._tools.joins
        if joint and stripped.startswith(joint):
            self._held, self._text = joint, stripped[len(joint) :]
            return self._become(self._call)
        end = "]" if self._is_listed else self._tools.end
        if end and stripped.startswith(end):
            self._text = stripped[len(end) :]
        elif end and end.startswith(stripped):  # the end of an answer may cut the marker off
            return False
        self._is_listed = False
        return self._become(self._see_text)

    def _become(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _begin_arguments(self, name: str, start: int) -> bool:
        """start: of the arguments in the text."""
        self._add_call(name)
        self._text, self._scan = self._text[start:], _JsonScan()
        return self._become(self._arguments)

    def _give_back(self, text: str) -> bool:
        """Make content of what was taken for a call, and of this start of the text."""
        self._add_content(self._held + text)
        self._held, self._text, self._is_listed = "", self._text[len(text) :], False
        return self._become(self._see_text)

    def _take_free(self, markers: tuple[str, ...], *, keeps_space: bool = False) -> str:
        """Takes the text that is no start of a marker, and not the space before one."""
        num_held = max(overlap(self._text, marker) for marker in markers)
        free = self._text[: len(self._text) - num_held]
        free = free if keeps_space else free.rstrip()
        self._text = self._text[len(free) :]
        return free

    def _add_reasoning(self, text: str) -> None:
        self._reasoning.append(self._without_space(text))

    def _add_content(self, text: str) -> None:
        is_behind_call = self._drops_space and self._has_content
        text = self._without_space(text)
        if text:
            self._content.append(f"\n{text}" if is_behind_call else text)
            self._has_content = True

    def _without_space(self, text: str) -> str:
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        return text

    def _add_call(self, name: str) -> None:
        self._held = ""
        self._names[self._num_calls], self._calls[self._num_calls] = name, []
        self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        if text:
            self._calls.setdefault(self._num_calls - 1, []).append(text)


class _JsonScan:
    """Finds the end of an object in JSON by its brackets and strings.

    is_broken: whether a bracket closes another one than was opened.
    """

    def __init__(self, opened: str = ""):
        """opened: the brackets that close what is open already."""
        self._stack, self._is_in_string, self._is_escaped = list(opened), False, False
        self.is_broken = False

    def end(self, text: str, start: int = 0) -> int | None:
        """The place behind the object, or that of a wrong bracket; None where it goes on.

        start: what stands before it was scanned.
        """
        place = start
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (_STRING_SIGNS if self._is_in_string else _SIGNS).search(text, place)
            if found is None:
                return None
            sign, place = found[0], found.end()
            if sign == "\\":
                self._is_escaped = True
            elif sign == '"':
                self._is_in_string = not self._is_in_string
            elif sign in _CLOSING:
                self._stack.append(_CLOSING[sign])
            elif self._stack[-1] != sign:
                self.is_broken = True
                return place - 1
            else:
                self._stack.pop()
                if not self._stack:
                    return place
        return None


def _whole_call(text: str) -> ToolCall | None:
    """The call that an object is, with its keys in any order; None where it is none."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name, arguments = given.get("name"), given.get("arguments", given.get("parameters", {}))
    if isinstance(arguments, str):  # some models write JSON within JSON
        try:
            is_object = isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            return None
    else:
        is_object = isinstance(arguments, dict)
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name, arguments) if isinstance(name, str) and name and is_object else None


def _text_of(literal: str) -> str | None:
    """The text of a string in JSON; None where it is none."""
    try:
        text: str = json.loads(literal)
    except ValueError:
        return None
    return text


def overlap(text: str, marker: str) -> int:
    """The length of the longest end of text that is a proper prefix of the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
