"""Prompts to token ids: strings, token ids and chats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bytetx.checkpoint.answer_format import TAIL_TOKENS, AnswerFormat
from bytetx.checkpoint.chat_template import ChatTemplate, Message, checked_options, is_message
from bytetx.checkpoint.spec import ModelSpec
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.errors import InputError, TooLongError
from bytetx.requests.inputs import InputReader
from bytetx.runtime.forking import computing
from bytetx.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat with options of its own.  template_kwargs, joins_parts: of ChatTemplate.render."""

    messages: Sequence[Message]
    template_kwargs: Mapping[str, Any] | None = None
    joins_parts: bool = False


Prompt = str | Sequence[int] | np.ndarray | Sequence[Message] | ChatPrompt


def is_chat(prompt: object) -> bool:
    """Whether its template is rendered, which may take seconds."""
    if isinstance(prompt, ChatPrompt):
        return True
    return isinstance(prompt, list | tuple) and bool(prompt) and is_message(prompt[0])


@dataclass(frozen=True, slots=True)
class ChatEnds:
    """Reads from the ends of chats whether their answers have reasoning first."""

    answer_format: AnswerFormat
    tokenizer: Tokenizer | None

    def opens_reasoning(self, prompt: Prompt, token_ids: Sequence[int]) -> bool:
        """Whether the chat's template has opened the reasoning of the answer."""
        tail = self._tail(prompt, token_ids)
        return tail is not None and self.answer_format.opens_reasoning(tail)

    def params(
        self, params: SamplingParams, prompt: Prompt, token_ids: Sequence[int]
    ) -> SamplingParams:
        """The params of the answer to a prompt, whose form begins after its reasoning."""
        form = params.structured_outputs
        if form is None or form.begin is not None:
            return params
        tail = self._tail(prompt, token_ids)
        begin = None if tail is None else self.answer_format.begin(tail)
        if begin is None:
            return params
        return replace(params, structured_outputs=replace(form, begin=begin))

    def _tail(self, prompt: Prompt, token_ids: Sequence[int]) -> str | None:
        """The end of a chat's text; None where it does not matter."""
        has_none = self.answer_format.thinking is None or self.tokenizer is None
        if has_none or not is_chat(prompt):
            return None
        assert self.tokenizer is not None
        return self.tokenizer.decode_plain(token_ids[-TAIL_TOKENS:], skip_special_tokens=False)


# Replaces a prompt that is an error already, so that the others keep their index.
_NOTHING = (0,)


class PromptReader:
    """Turns prompts into token ids, in order, and numbers them from 0.

    A string gets the special tokens that the tokenizer puts around texts; token ids and chats are
    taken as they are.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        *,
        chat_template: ChatTemplate | None,
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        """template_kwargs: of ChatTemplate.render, for chats without any; OptionError if wrong."""
        self._tokenizer, self._template = tokenizer, chat_template
        self._template_kwargs = (
            None if template_kwargs is None else checked_options(template_kwargs)
        )
        self._reader = InputReader(spec, tokenizer, keeps_errors=True)
        self._num_read = 0

    def read(self, prompts: Sequence[Prompt]) -> list[list[int] | InputError]:
        """The token ids of the next prompts, an InputError for each that cannot be run."""
        start = self._num_read
        errors: dict[int, InputError] = {}
        plain: list[object] = []
        self._num_read += len(prompts)
        for index, prompt in enumerate(prompts, start):
            try:
                plain.append(self._plain(prompt))
            except InputError as error:
                errors[index] = type(error)(f"prompts[{index}]: {error}")
                plain.append(_NOTHING)
        with computing():
            window = self._reader.read(plain, start)
        read: dict[int, list[int] | InputError] = {
            failure.index: _respelled(failure.error) for failure in window.failures
        }
        rows = zip(window.requests.indices.tolist(), window.requests.split(), strict=True)
        read |= {index: ids.tolist() for index, ids in rows}
        read |= errors
        return [read[index] for index in range(start, self._num_read)]

    def _plain(self, prompt: object) -> object:
        """A chat as token ids; anything else as it is."""
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, ChatPrompt):
            return self._chat_ids(prompt)
        if is_message(prompt):
            raise InputError("one message is no prompt; a chat is a list of messages")
        if not isinstance(prompt, list | tuple) or not prompt:
            return prompt
        if is_message(prompt[0]):
            return self._chat_ids(ChatPrompt(prompt, self._template_kwargs))
        if isinstance(prompt[0], str):
            raise InputError("a list of strings is no prompt; give one string")
        return prompt

    def _chat_ids(self, chat: ChatPrompt) -> list[int]:
        if self._tokenizer is None:
            raise InputError("a chat needs a tokenizer, and the checkpoint has none")
        if self._template is None:
            raise InputError(
                "the checkpoint's tokenizer has no chat template (chat_template in "
                "tokenizer_config.json, or the file chat_template.jinja); give the prompt as one "
                "string, or load a checkpoint that was tuned for chats"
            )
        text = self._template.render(
            chat.messages, chat.template_kwargs, joins_parts=chat.joins_parts
        )
        try:
            text.encode("utf-8")  # what a tokenizer raises otherwise differs from one to the next
        except UnicodeEncodeError as error:
            raise InputError(
                "the chat holds half a surrogate pair, which is no text; decode its source with "
                "errors='replace'"
            ) from error
        limit = self._tokenizer.max_tokens
        # What is cut off is not asked for: a million tokens would hold up every other thread.
        encoding = self._tokenizer.untruncated().encode_plain(text)
        if len(encoding) > limit:
            raise TooLongError(
                f"the chat has {len(encoding)} tokens, and this model takes at most {limit}"
            )
        return encoding.ids


def _respelled(error: InputError) -> InputError:
    """The error in terms of prompts, which are never truncated."""
    text = str(error).replace("texts[", "prompts[", 1).replace(", or pass truncate=True", "")
    return type(error)(text)
