"""The process that renders one chat template: Jinja in a sandbox, within limits of memory and size.

bytetx.checkpoint.chat_process starts it, and kills it where an answer takes too long. The first
request is the template with its variables, and its answer describes it; each one after it is the
arguments of _Prompt.render.
"""

import json
import marshal
import math
import os
import resource
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bytetx.checkpoint.chat_process import BROKEN, REFUSED, TEXT, TOO_MUCH, Messages

# No model reads as much: at 4 characters a token it is 4 Mi tokens.
_MAX_CHARACTERS = 16 << 20
# Addresses of this process, of which Python takes 30 MiB. macOS does not enforce it: there, a
# template has the memory that it can fill in its time.
_MAX_BYTES = 1 << 30
_LIMIT_S = 0.5  # the limit of processor time is set so often, and a chat may have as much more
_MAX_DELAY_S = 0.001  # while answers behind one are written
_MAX_ERROR_CHARACTERS = 200  # a template may quote the chat
_SMALL_CHAT = [{"role": "user", "content": "a"}]
# Texts that no template writes by itself, as parts of one message.
_MARKED = ("part-7f3a", "part-c90e")
# Stands behind a message that is to be continued; the space shows whether ends are trimmed.
_END, _END_SPACE = "THE-TEXT-ENDS-HERE-5d1c8e", " "
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field


def main(arguments: Sequence[str]) -> None:
    """Answers requests at a file descriptor until its other side is closed.

    arguments: the descriptor, and the seconds that an answer may take; the kernel ends this process
    where its parent does not.
    """
    messages, seconds = Messages(socket.socket(fileno=int(arguments[0]))), float(arguments[1])
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    messages.send([TEXT])
    since, limited = 0.0, -math.inf
    prompt: _Prompt | None = None
    answers: list[bytes] = []  # to be sent
    while True:
        try:
            request = messages.take()
            # Together, but none waits while a text is written that takes longer.
            if answers and (request is None or time.monotonic() - since > _MAX_DELAY_S):
                messages.send(answers)
                answers = []
            while request is None:
                messages.read()
                request = messages.take()
        except (EOFError, OSError):
            return
        if time.monotonic() - limited > _LIMIT_S:
            _limit_processor_time(seconds)
            limited = time.monotonic()
        text = ""
        try:
            if prompt is None:
                prompt = _Prompt(*marshal.loads(request))
                text = prompt.describe()
            else:
                text = prompt.render(*marshal.loads(request))
            kind = TEXT
        except MemoryError:
            kind, text = TOO_MUCH, f"needs more than {_MAX_BYTES >> 30} GiB of memory"
        except _TemplateTooLongError:
            kind, text = TOO_MUCH, f"writes more than {_MAX_CHARACTERS:,} characters"
        except Exception as error:  # a template raises whatever Python does
            kind, text = BROKEN if prompt is None else REFUSED, _describe(error)
        if not answers:
            since = time.monotonic()
        answers.append(kind + text.encode("utf-8", "surrogatepass"))
        if kind == TOO_MUCH:
            messages.send(answers)
            os._exit(1)  # after a MemoryError the state of the heap is unknown


def _limit_processor_time(seconds: float) -> None:
    """Limits processor time from now on; the kernel counts full seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


class _TemplateTooLongError(Exception):
    pass


class _Prompt:
    """A template with the variables that every chat has."""

    def __init__(self, source: str, variables: Mapping[str, Any]):
        """variables: beside the messages, or in place of the usual ones.

        Raises where the template is broken, or exceeds a limit with the smallest chat, too.

        It may refuse that chat all the same: because it wants a system message, say.
        """
        self._source, self._template = source, _environment().from_string(source)
        self._variables = variables
        self._takes_parts: bool | None = None  # known with the first chat that needs it
        try:
            self._write(_SMALL_CHAT, {})
        except (MemoryError, _TemplateTooLongError):
            raise
        except Exception:
            return

    def describe(self) -> str:
        """JSON: the variables that the template reads, and the texts in its source."""
        tree = _environment().parse(self._source)
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        constants = (node.value for node in tree.find_all(nodes.Const))
        texts += [value for value in constants if isinstance(value, str)]
        variables = sorted(meta.find_undeclared_variables(tree))
        return json.dumps({"variables": variables, "literals": "\0".join(texts)})

    def render(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        continued: str | None,
        joins_parts: bool,
    ) -> str:
        """variables: of this chat.  continued: the field of the last message that the text ends in.

        joins_parts: contents that are lists of texts become one text each, line by line, where the
        template takes no lists.
        """
        messages = list(map(_with_reasoning, messages))
        if joins_parts and any(isinstance(m.get("content"), list) for m in messages):
            if self._takes_parts is None:
                self._takes_parts = self._writes_parts()
            if not self._takes_parts:
                messages = list(map(_joined, messages))
        if continued is None:
            return self._write(messages, variables)
        return self._write_open(messages, variables, continued)

    def _writes_parts(self) -> bool:
        """Whether the template writes the texts of a list, and not the list itself or nothing."""
        parts = [{"type": "text", "text": text} for text in _MARKED]
        try:
            text = self._write([{"role": "user", "content": parts}], {})
        except (MemoryError, _TemplateTooLongError):
            raise
        except Exception:
            return False
        shows_list = any(f"{quote}type{quote}" in text for quote in "'\"")
        return not shows_list and all(mark in text for mark in _MARKED)

    def _write_open(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any], field: str
    ) -> str:
        """The text up to the end of the last message's field, without what closes a message."""
        last = messages[-1]
        fields = [field]
        if field in _REASONING:
            fields = [name for name in _REASONING if last.get(name) == last.get(field)]
        value = last.get(field)
        text = _last_text(value)
        if text is None:
            _raise(f"continue_final_message needs text in the {field} of the last message")
        if not any(name in self._source for name in fields):
            _raise(f"continue_final_message names {field}, which the template does not read")
        marked = {name: _marked(value) for name in fields}
        written = self._write([*messages[:-1], {**last, **marked}], variables)
        start = written.rfind(_END)
        if start < 0 or text.strip() not in written:
            _raise("continue_final_message is set, and the template leaves out the last message")
        end = start + len(_END)
        is_trimmed = written[end : end + 1] != _END_SPACE
        return written[:start].rstrip() if is_trimmed else written[:start]

    def _write(self, messages: list[Any], variables: Mapping[str, Any]) -> str:
        pieces, length = [], 0
        usual = {"tools": None, "documents": None, "add_generation_prompt": True}
        context = {**usual, **self._variables, **variables, "messages": messages}
        for piece in self._template.generate(context):
            pieces.append(piece)
            length += len(piece)
            if length > _MAX_CHARACTERS:
                raise _TemplateTooLongError
        return "".join(pieces)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read."""
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    parts = message.get("content")
    if not isinstance(parts, list) or any(_part_text(part) is None for part in parts):
        return message
    return {**message, "content": "\n".join(str(_part_text(part)) for part in parts)}


def _part_text(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else None


def _last_text(value: Any) -> str | None:
    """The text that a field ends in: itself, or the last text of a list of parts."""
    if not isinstance(value, list | tuple):
        return value if isinstance(value, str) else None
    return next((t for t in map(_part_text, reversed(value)) if t is not None), None)


def _marked(value: Any) -> Any:
    """The field with a mark behind the text that it ends in."""
    if isinstance(value, str):
        return value + _END + _END_SPACE
    last = max(place for place, part in enumerate(value) if _part_text(part) is not None)
    part = {**value[last], "text": value[last]["text"] + _END + _END_SPACE}
    return [*value[:last], part, *value[last + 1 :]]


def _describe(error: Exception) -> str:
    text = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
    return text[:_MAX_ERROR_CHARACTERS]


def _environment() -> ImmutableSandboxedEnvironment:
    """Build the environment that templates of Hugging Face checkpoints rely on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


class _GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %} marks answers for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, it escapes nothing: the text is no HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
