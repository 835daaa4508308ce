"""ChatTemplate: a chat's messages -> the text that the checkpoint's model was tuned on.

A template is an untrusted program, and one of its operations can run for longer than any deadline:
'a' * 10**10, 10 ** 10 ** 10, the text of a list that holds another twice, which holds another
twice. Nothing within a process interrupts such an operation, so a template runs in a separate
process, which is killed on a timeout and has limits of memory and output.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bytetx.checkpoint.chat_process import BROKEN, REFUSED, TEXT, RendererProcess
from bytetx.checkpoint.side_files import read_text
from bytetx.checkpoint.tokenizer_config import SPECIAL_TOKENS, read_tokenizer_config, special_token
from bytetx.errors import CheckpointError, InputError, shown

Message = Mapping[str, Any]

# A chat takes 0.1 ms, one of a million characters some 10 ms.
_SECONDS = 5.0


class ChatTemplate:
    """A checkpoint's Jinja template, run in a sandbox: it sees the messages and nothing else.

    Its process starts with the first chat and ends with this object. Threads may share it.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        name: str,
        variables: Mapping[str, Any] | None = None,
        seconds: float = _SECONDS,
    ):
        """special_tokens: bos_token and so on, as templates call them.  name: for errors.

        variables: of the template's own, or add_generation_prompt, which is true without them.
        seconds: that one chat may take.
        """
        self._source, self._name, self._seconds = source, name, seconds
        self._variables = {**(variables or {}), **special_tokens}
        self._lock = threading.Lock()
        self._process: RendererProcess | None = None
        self._broken: str | None = None

    def render(self, messages: Sequence[Message]) -> str:
        """The chat as text, special tokens included, up to where the model's answer starts.

        messages: each with "role" and "content".  Raises InputError where the template refuses the
        chat or exceeds its limits with it, CheckpointError where it is broken for every chat.
        """
        plain = _plain_messages(messages)
        with self._lock:
            kind, text = self._ready().ask(plain)
        if kind == TEXT:
            return text
        if kind == REFUSED:
            raise InputError(f"{self._name}: the chat template refuses it: {text}")
        raise InputError(
            f"{self._name}: the chat template {text} with this chat, and was stopped; give a "
            "shorter chat, or the prompt as text"
        )

    def _ready(self) -> RendererProcess:
        """The process, which has the template; CheckpointError where it runs with no chat."""
        if self._broken is not None:
            raise CheckpointError(self._broken)
        if self._process is not None and self._process.is_alive():
            return self._process
        process = RendererProcess(seconds=self._seconds)
        kind, text = process.ask((self._source, self._variables))
        if kind == BROKEN:
            self._broken = f"{self._name}: the chat template is broken: {text}"
        elif kind != TEXT:
            self._broken = (
                f"{self._name}: the chat template is broken: it {text}, even with a chat of one "
                "letter; give prompts as text"
            )
        if self._broken is not None:
            raise CheckpointError(self._broken)
        self._process = process
        return process


def load_chat_template(
    folder: Path, *, variables: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """The template of a checkpoint's folder, or None: chat_template.jinja, or the tokenizer's.

    variables: as of ChatTemplate.
    Raises CheckpointError where a file is damaged; whether the template is Jinja shows with the
    first chat.
    """
    config = read_tokenizer_config(folder)
    source, path = config.get("chat_template"), folder / "tokenizer_config.json"
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        source, path = read_text(jinja), jinja
    if isinstance(source, list):  # several by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return None
    tokens = {name: special_token(config, name) for name in SPECIAL_TOKENS}
    named = {name: token for name, token in tokens.items() if token is not None}
    return ChatTemplate(source, special_tokens=named, name=str(path), variables=variables)


def _plain_messages(messages: Sequence[Message]) -> list[Any]:
    """The messages in types that marshal takes; InputError where one is no message."""
    for number, message in enumerate(messages):
        has_both = isinstance(message, Mapping) and {"role", "content"} <= message.keys()
        if not has_both or not isinstance(message["role"], str):
            raise InputError(
                f'message {number} of the chat must be {{"role": "...", "content": "..."}}, got '
                f"{shown(message)}"
            )
    try:
        return [_plain(message) for message in messages]
    except RecursionError as error:
        raise InputError("a message of the chat nests too deep, or holds itself") from error


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in (str, int, float, bool, type(None)):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(map(_plain, value))
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    raise InputError(
        f"a message of the chat holds {kind.__module__}.{kind.__name__}; templates take text, "
        "numbers, lists and tables"
    )
