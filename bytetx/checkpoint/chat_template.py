"""ChatTemplate: a chat's messages -> the text that the checkpoint's model was tuned on.

A template is an untrusted program, and one of its operations can run for longer than any deadline:
'a' * 10**10, 10 ** 10 ** 10, the text of a list that holds another twice, which holds another
twice. Nothing within a process interrupts such an operation, so a template runs in a separate
process, which is killed on a timeout and has limits of memory and output.
"""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bytetx.checkpoint.chat_process import BROKEN, REFUSED, TEXT, TOO_MUCH, RendererProcess
from bytetx.checkpoint.side_files import read_text
from bytetx.checkpoint.tokenizer_config import read_special_tokens, read_tokenizer_config
from bytetx.checkpoint.tokenizer_files import NAMED_TEMPLATES
from bytetx.errors import CheckpointError, InputError, OptionError, shown

Message = Mapping[str, Any]

# A chat takes 0.1 ms, one of a million characters some 10 ms.
_SECONDS = 5.0
# What a message has beside its role: at least one of these, or the key was misspelt.
_CONTENTS = {"content", "tool_calls", "reasoning_content", "thinking", "reasoning"}
# Arguments of apply_chat_template that are no variables of templates.
_NO_VARIABLES = {
    *("messages", "conversation", "tokenize", "return_dict", "return_tensors", "padding"),
    *("truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"),
    "sanitize_control_tokens",
}


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """variables: that a template reads.  literals: the texts in its source, divided by NULs."""

    variables: frozenset[str]
    literals: str


class PreparedChat(NamedTuple):
    """A chat in types that a template's process takes, and the template that it is for."""

    template: "ChatTemplate"
    request: tuple[Any, ...]

    def with_messages(self, messages: list[dict[str, str]]) -> "PreparedChat":
        """The same for other messages."""
        return PreparedChat(self.template, (messages, *self.request[1:]))


class ChatTemplate:
    """A checkpoint's Jinja template, run in a sandbox: it sees the chat and nothing else.

    Its process starts with the first chat and ends with this object. Threads may share it.
    """

    def __init__(
        self,
        source: str | None,
        *,
        special_tokens: Mapping[str, str],
        name: str,
        variables: Mapping[str, Any] | None = None,
        named: Mapping[str, "ChatTemplate"] | None = None,
        seconds: float = _SECONDS,
    ):
        """special_tokens: bos_token and so on, as templates call them.  name: for errors.

        source: None where the checkpoint names its templates and none is its default.
        variables: of the template's own, or add_generation_prompt, which is true without them.
        named: the checkpoint's other templates: that for tools is tool_use.
        seconds: that one chat may take.
        """
        self._source, self._name, self._seconds = source, name, seconds
        self._variables = {**special_tokens, **(variables or {})}
        self._named = dict(named or {})
        self._lock = threading.Lock()
        self._process: RendererProcess | None = None
        self._broken: str | None = None
        self._facts: TemplateFacts | None = None

    def render(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any] | None = None,
        *,
        joins_parts: bool = False,
    ) -> str:
        """The chat as text, special tokens included, up to where the model's answer starts.

        messages: each with "role" and "content", or "tool_calls"; a key that is None is left out.
        options: what transformers' apply_chat_template takes: tools, documents,
        add_generation_prompt, continue_final_message, chat_template (the name of one of the
        checkpoint's), and variables of the template.
        joins_parts: contents that are lists of texts are joined where the template takes none.
        Raises InputError where the template refuses the chat or exceeds its limits with it,
        CheckpointError where it is broken for every chat.
        """
        (text,) = self.render_all([self.prepared(messages, options, joins_parts=joins_parts)])
        if isinstance(text, InputError):
            raise text
        return text

    def prepared(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any] | None = None,
        *,
        joins_parts: bool = False,
    ) -> "PreparedChat":
        """A chat for `render_all`; arguments and errors as of `render`."""
        given = {**self._variables, **checked_options(options)}
        template = self._chosen(given.pop("chat_template", None), given.get("tools") is not None)
        continued = given.pop("continue_final_message", None) or None
        if continued is not None:
            given["add_generation_prompt"] = False
        field = "content" if continued is True else continued
        return PreparedChat(template, (_plain_messages(messages), given, field, joins_parts))

    def render_all(self, chats: "Iterable[PreparedChat]") -> list[str | InputError]:
        """The texts of chats of this checkpoint; an error in place of each that `render` refuses.

        Chats are taken while others are rendered. CheckpointError where the template is broken.
        """
        texts: list[str | InputError] = []
        for _, group in groupby(chats, key=lambda chat: id(chat.template)):
            first = next(group)  # before the lock, which what makes the first chat may need
            requests = (chat.request for chat in chain([first], group))
            with first.template._lock:
                answers = first.template._ask_all(requests)
            texts += [first.template._text_or_error(kind, text) for kind, text in answers]
        return texts

    def _ask_all(self, requests: Iterator[tuple[Any, ...]]) -> list[tuple[bytes, str]]:
        """The answers of the process, and of others after it where it ends. Needs the lock."""
        answers: list[tuple[bytes, str]] = []
        while True:
            found, doubted = self._ready().ask_all(requests)
            answers += found
            answers += [self._ready().ask(request) for request in doubted]
            if not doubted and (not found or found[-1][0] != TOO_MUCH):
                return answers

    def _chosen(self, name: str | None, has_tools: bool) -> "ChatTemplate":
        """As transformers chooses: by name, else tool_use where there are tools, else default."""
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._named else "default"
        found = self if name == "default" else self._named.get(name)
        if found is None or found._source is None:
            known = ", ".join(sorted(self._named) + ["default"] * (self._source is not None))
            raise InputError(
                f"{self._name}: there is no chat template {shown(name)}; chat_template must be one "
                f"of: {known}"
            )
        return found

    def facts(self) -> TemplateFacts:
        """The facts of the template's source; its process starts where there is none yet.

        Raises CheckpointError where the template is broken.
        """
        with self._lock:
            if self._facts is None:
                self._ready()
            assert self._facts is not None  # _ready sets it, or raises
            return self._facts

    @property
    def sources(self) -> list[str]:
        """The source of each of the checkpoint's templates."""
        found = [self._source, *(one._source for one in self._named.values())]
        return [source for source in found if source is not None]

    @property
    def default(self) -> "ChatTemplate":
        """The template that is used where none is named. InputError where there is none."""
        return self._chosen(None, has_tools=False)

    def _text_or_error(self, kind: bytes, text: str) -> str | InputError:
        if kind == TEXT:
            return text
        if kind == REFUSED:
            return InputError(f"{self._name}: the chat template refuses it: {text}")
        return InputError(
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
        found = json.loads(text)
        self._facts = TemplateFacts(frozenset(found["variables"]), found["literals"])
        self._process = process
        return process


def load_chat_template(
    folder: Path, *, variables: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """The templates of a checkpoint's folder, or None.

    They are chat_template.jinja and additional_chat_templates/NAME.jinja, or else the tokenizer's.
    variables: as of ChatTemplate.
    Raises CheckpointError where a file is damaged; whether a template is Jinja shows with the first
    chat.
    """
    sources = _template_files(folder)
    if not sources:
        path, given = folder / "tokenizer_config.json", read_tokenizer_config(folder)
        found = given.get("chat_template") or []
        if isinstance(found, str):
            found = [{"name": "default", "template": found}]
        sources = {entry["name"]: (entry["template"], path) for entry in found}
    if not sources:
        return None
    tokens = read_special_tokens(folder)
    named = {
        name: ChatTemplate(source, special_tokens=tokens, name=f"{path}: {name}")
        for name, (source, path) in sources.items()
        if name != "default"
    }
    source, path = sources.get("default", (None, folder))
    return ChatTemplate(
        source, special_tokens=tokens, name=str(path), variables=variables, named=named
    )


def _template_files(folder: Path) -> dict[str, tuple[str, Path]]:
    """(source, path) of each template that is a file, by name."""
    paths = {path.stem: path for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))}
    default = folder / "chat_template.jinja"
    if default.is_file():
        paths["default"] = default
    return {name: (read_text(path), path) for name, path in paths.items()}


def checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of ChatTemplate.render in types that marshal takes; OptionError where one is wrong.

    The field that continue_final_message continues is its name, or True for content.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise OptionError(f"chat_template_kwargs must be a table by name, got {shown(options)}")
    reserved = next((name for name in options if name in _NO_VARIABLES), None)
    if reserved is not None:
        raise OptionError(
            f"chat_template_kwargs takes no {reserved}: prompts are given to the model whole, and "
            "messages as prompts; leave it out"
        )
    for name in ("tools", "documents"):
        given = options.get(name)
        if given is not None and not (
            isinstance(given, list | tuple) and all(isinstance(entry, Mapping) for entry in given)
        ):
            schema = "; transformers.utils.get_json_schema makes one of a function"
            raise OptionError(
                f"{name} must be a list of tables, got {shown(given)}{schema * (name == 'tools')}"
            )
    for name, kinds, needs in (
        ("add_generation_prompt", bool, "True or False"),
        ("continue_final_message", bool | str, "True, False, or the name of a message's field"),
        ("chat_template", str | None, "the name of one of the checkpoint's templates"),
    ):
        if name in options and not isinstance(options[name], kinds):
            raise OptionError(f"{name} must be {needs}, got {shown(options[name])}")
    if options.get("continue_final_message") and options.get("add_generation_prompt"):
        raise OptionError(
            "continue_final_message and add_generation_prompt exclude each other: the first goes "
            "on with the last message, the second begins another one"
        )
    try:
        return {name: _plain(value) for name, value in options.items()}
    except RecursionError as error:
        raise OptionError("chat_template_kwargs nests too deep, or holds itself") from error


def is_message(value: object) -> bool:
    """Whether it is a table, or an object that _plain makes one of."""
    return isinstance(value, Mapping) or _as_table(value) is not None


def _plain_messages(messages: Sequence[Message]) -> list[Any]:
    """The messages in types that marshal takes; InputError where one is no message."""
    try:
        plain = [_plain(message) for message in messages]
    except RecursionError as error:
        raise InputError("a message of the chat nests too deep, or holds itself") from error
    for number, message in enumerate(plain):
        is_table = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not is_table or not message.keys() & _CONTENTS:
            raise InputError(
                f'message {number} of the chat must be {{"role": "...", "content": "..."}}, got '
                f"{shown(message)}"
            )
    # Templates write a key that is None as "None", or fail; one that is not there they pass over.
    return [
        {key: value for key, value in message.items() if value is not None} for message in plain
    ]


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
    if isinstance(value, np.generic):
        return _plain(value.item())
    table = _as_table(value)
    if table is not None:
        return _plain(table)
    raise InputError(
        f"a message of the chat holds {kind.__module__}.{kind.__name__}; templates take text, "
        "numbers, lists and tables"
    )


def _as_table(value: object) -> Mapping[str, Any] | None:
    """The fields of a dataclass or a pydantic model, as clients of OpenAI return messages."""
    if isinstance(value, type):
        return None
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    dump = getattr(value, "model_dump", None)
    given = dump() if callable(dump) else None
    return given if isinstance(given, Mapping) else None
