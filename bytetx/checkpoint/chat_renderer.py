"""The process that renders one chat template: Jinja in a sandbox, within limits of memory and size.

bytetx.checkpoint.chat_process starts it, and kills it where an answer takes too long. The first
request is the template with its variables, each one after it a chat.
"""

import json
import marshal
import math
import os
import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bytetx.checkpoint.chat_process import BROKEN, REFUSED, TEXT, TOO_MUCH

# No model reads as much: at 4 characters a token it is 4 Mi tokens.
_MAX_CHARACTERS = 16 << 20
# Addresses of this process, of which Python takes 30 MiB. macOS does not enforce it: there, a
# template has the memory that it can fill in its time.
_MAX_BYTES = 1 << 30
_MAX_ERROR_CHARACTERS = 200  # a template may quote the chat
_SMALL_CHAT = [{"role": "user", "content": "a"}]


def main(arguments: Sequence[str]) -> None:
    """Answers requests at a file descriptor until its other side is closed.

    arguments: the descriptor, and the seconds that an answer may take; the kernel ends this process
    where its parent does not.
    """
    connection, seconds = Connection(int(arguments[0])), float(arguments[1])
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    connection.send_bytes(TEXT)
    prompt: _Prompt | None = None
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        _limit_processor_time(seconds)
        text = ""
        try:
            if prompt is None:
                prompt = _Prompt(*marshal.loads(request))
            else:
                text = prompt.render(marshal.loads(request))
            kind = TEXT
        except MemoryError:
            kind, text = TOO_MUCH, f"needs more than {_MAX_BYTES >> 30} GiB of memory"
        except _TooLongError:
            kind, text = TOO_MUCH, f"writes more than {_MAX_CHARACTERS:,} characters"
        except Exception as error:  # a template raises whatever Python does
            kind, text = BROKEN if prompt is None else REFUSED, _describe(error)
        connection.send_bytes(kind + text.encode("utf-8", "surrogatepass"))
        if kind == TOO_MUCH:
            os._exit(1)  # after a MemoryError the state of the heap is unknown


def _limit_processor_time(seconds: float) -> None:
    """Limits processor time from now on; the kernel counts full seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


class _TooLongError(Exception):
    pass


class _Prompt:
    """A template with the variables that every chat has."""

    def __init__(self, source: str, variables: Mapping[str, Any]):
        """variables: beside the messages, or in place of the usual ones.

        Raises where the template is broken, or exceeds a limit with the smallest chat, too.

        It may refuse that chat all the same: because it wants a system message, say.
        """
        self._template = _environment().from_string(source)
        self._variables = variables
        try:
            self.render(_SMALL_CHAT)
        except (MemoryError, _TooLongError):
            raise
        except Exception:
            return

    def render(self, messages: list[Any]) -> str:
        pieces, length = [], 0
        usual = {"tools": None, "documents": None, "add_generation_prompt": True}
        for piece in self._template.generate({**usual, **self._variables, "messages": messages}):
            pieces.append(piece)
            length += len(piece)
            if length > _MAX_CHARACTERS:
                raise _TooLongError
        return "".join(pieces)


def _describe(error: Exception) -> str:
    text = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
    return text[:_MAX_ERROR_CHARACTERS]


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates of Hugging Face checkpoints rely on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


class _Generation(Extension):
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


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
