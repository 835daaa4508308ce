"""ChatEncoder: token ids of rendered chats, in which control tokens of the caller are plain text.

As transformers' apply_chat_template(sanitize_control_tokens=True) does it: the control tokens in
the caller's texts are marked by two private characters before the template sees them, and what
stands between these in the rendered chat is tokenised apart, as text.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from bytetx.checkpoint.text_prefix import encode_alike, find_boundary
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.errors import InputError

_START, _END = "\U000f0000", "\U000f0001"


class ChatEncoder:
    """Tokenises rendered chats, without special tokens and without a limit.

    sentinels: texts that are one token each, of which `encode` gives the positions.
    Threads may share one.
    """

    def __init__(self, tokenizer: Tokenizer, sentinels: Sequence[str] = ()):
        self._tokenizer = tokenizer.with_special_tokens(sentinels)
        backend = self._tokenizer.backend
        self.sentinel_ids = [backend.token_to_id(text) for text in sentinels]
        added = backend.get_added_tokens_decoder().values()
        self._contents = [token.content for token in added]
        self._special = {token.content for token in added if token.special}
        self._markers = re.compile(f"{_START}({_any_of(self._contents)}){_END}|[{_START}{_END}]")

    def control_tokens(self, literals: str) -> re.Pattern[str]:
        """A pattern that finds control tokens.

        literals: the texts in the template's source; what of the added tokens stands there is a
        control token, unless the tokenizer's own list says which are.
        """
        named = self._tokenizer.chat_control_tokens
        if named is None:
            found = [token for token in self._contents if token in literals and not token.isspace()]
        else:
            found = list(named)
        control = self._special | set(found)
        return re.compile(_any_of([token for token in self._contents if token in control]))

    def encode(self, chats: Sequence[str]) -> list[list[int]]:
        """The token ids of rendered chats; what consecutive ones begin with is tokenised once.

        Raises InputError where a control token cannot be written as text, or a chat holds half a
        surrogate pair.
        """
        try:
            plain = [chat for chat in chats if not _is_marked(chat)]
            encode = self._tokenizer.encode_all_plain
            found = iter(encode_alike(plain, encode, self._boundary))
            return [self._encode_marked(c) if _is_marked(c) else next(found) for c in chats]
        except UnicodeEncodeError:
            raise InputError("holds half a surrogate pair, which no tokenizer reads") from None

    def _encode_marked(self, chat: str) -> list[int]:
        """The ids of a chat that has marks: [text, token, text, ..., text] is what they divide."""
        pieces = self._markers.split(chat)
        ids = self._ids(pieces[0])
        for place, piece in enumerate(pieces[1:], start=1):
            if not piece:  # a mark that stands alone divides, and is nothing else
                continue
            is_text = place % 2 == 1
            own = self._ids_within(piece, is_text=is_text)
            if is_text and self._tokenizer.backend.token_to_id(piece) in own:
                raise InputError(
                    f"holds the control token {piece!r}, which the tokenizer makes of plain text, "
                    "too; leave it out"
                )
            ids += own
        return ids

    def _ids_within(self, piece: str, *, is_text: bool) -> list[int]:
        """Behind a newline, for tokenizers that write a space before whatever comes first."""
        own = self._ids("\n" + piece, is_text=is_text)
        size = len(self._newline)
        if own[:size] == self._newline:
            return own[size:]
        return self._ids(piece, is_text=is_text)

    @cached_property
    def _boundary(self) -> re.Pattern[str] | None:
        return find_boundary(self._tokenizer.backend)

    @cached_property
    def _newline(self) -> list[int]:
        return self._ids("\n")

    def _ids(self, text: str, *, is_text: bool = False) -> list[int]:
        tokenizer = self._tokenizer
        return tokenizer.encode_as_text(text) if is_text else tokenizer.encode_all_plain([text])[0]


def mark_control_tokens(value: Any, pattern: re.Pattern[str]) -> Any:
    """The value with each control token in its texts marked; keys of tables stay as they are."""
    if isinstance(value, str):
        value = value.replace(_START, "").replace(_END, "")
        return pattern.sub(rf"{_START}\g<0>{_END}", value)
    if isinstance(value, Mapping):
        return {key: mark_control_tokens(entry, pattern) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [mark_control_tokens(entry, pattern) for entry in value]
    return value


def _is_marked(chat: str) -> bool:
    return _START in chat or _END in chat


def _any_of(tokens: Sequence[str]) -> str:
    """The longer one of two tokens that begin alike is found; without tokens, nothing is."""
    return "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)"
