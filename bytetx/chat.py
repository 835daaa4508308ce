"""ChatTemplate: a chat's messages -> the text that the checkpoint's model was tuned on."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bytetx.config import read_json
from bytetx.errors import CheckpointError, InputError

Message = Mapping[str, Any]

_SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class ChatTemplate:
    """A checkpoint's Jinja template, run in a sandbox: it sees the messages and nothing else."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], name: str):
        """special_tokens: bos_token and so on, as templates call them.  name: for errors."""
        self._source, self._name = source, name
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None  # read with the first chat

    def render(self, messages: Sequence[Message]) -> str:
        """The chat as text, special tokens included, up to where the model's answer starts.

        messages: each with "role" and "content".  Raises InputError where the template refuses,
        CheckpointError where it is broken.
        """
        _check_messages(messages)
        if self._template is None:
            self._template = self._read()
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise InputError(f"{self._name}: the chat template refuses it: {error}") from error

    def _read(self) -> jinja2.Template:
        try:
            return _environment().from_string(self._source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{self._name}: the chat template is broken: {error}") from error


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a checkpoint's folder, or None: chat_template.jinja, or the tokenizer's."""
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    source, name = config.get("chat_template"), str(path)
    own = folder / "chat_template.jinja"
    if own.is_file():
        source, name = own.read_text(encoding="utf-8"), str(own)
    if isinstance(source, list):  # several by name
        entries = [entry for entry in source if isinstance(entry, Mapping)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, special_tokens=_special_tokens(folder, config), name=name)


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = folder / "special_tokens_map.json"
    merged = {**(read_json(path) if path.is_file() else {}), **config}
    found = {}
    for kind in _SPECIAL_TOKENS:
        token = merged.get(f"{kind}_token")
        content = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(content, str):
            found[f"{kind}_token"] = content
    return found


def _check_messages(messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages):
        has_both = isinstance(message, Mapping) and {"role", "content"} <= message.keys()
        if not has_both or not isinstance(message["role"], str):
            raise InputError(
                f'message {number} of the chat must be {{"role": "...", "content": "..."}}, got '
                f"{message!r}"
            )


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
