"""Log-probabilities of generated tokens as JSON, on the side of the engine.

A request may ask for a thousand entries a token: each token's are written when it comes, in a
fraction of a millisecond, and serve/logprobs.py puts whole answers together from them.
"""

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from bytetx.checkpoint.byte_level import TokenBytes
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.generate.outputs import RequestOutput, TokenLogprob

_LEAST = -9999.0  # what OpenAI writes for a token that is hardly possible; JSON has no -inf


class TokenTexts:
    """Texts and bytes of a model's tokens; kept, because every answer names the same ones."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._bytes = None if tokenizer is None else TokenBytes(tokenizer.backend)
        self.special = frozenset[int]() if self._bytes is None else self._bytes.special_ids
        self._texts: dict[int, str] = {}

    def bytes_of(self, token_id: int) -> bytes | None:
        """None without a tokenizer."""
        return None if self._bytes is None else self._bytes[token_id]

    def text(self, token_id: int) -> str:
        """The token as text; as OpenAI writes them where its bytes are part of a character."""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self._text(token_id)
        return found

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        try:
            return list(map(self._texts.__getitem__, token_ids))
        except KeyError:
            return list(map(self.text, token_ids))

    def _text(self, token_id: int) -> str:
        known = self.bytes_of(token_id)
        if known is None:
            return _named(token_id)
        try:
            return known.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)


class OutputLogprobs:
    """Writes the log-probabilities of one output, in the order of its tokens.

    Entries are rows that JSON has: of a chat [the entry's JSON], of a completion [text, logprob,
    characters of the output's text before it, the JSON of its top_logprobs].
    """

    def __init__(
        self,
        texts: TokenTexts,
        *,
        is_chat: bool,
        skip_special_tokens: bool = True,
        keeps_stop: bool = False,
    ):
        """skip_special_tokens, keeps_stop: as of SamplingParams, which say what the text has."""
        self._texts, self._is_chat, self._keeps_stop = texts, is_chat, keeps_stop
        self._hidden = texts.special if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_characters = 0
        self._is_at_start = True  # no token has added text yet

    def rows(self, output: RequestOutput) -> list[list[Any]]:
        """The entries of the output's new tokens."""
        entries = output.logprobs or ()
        stops = isinstance(output.stop, int) and not self._keeps_stop
        last = len(entries) - 1
        rows: list[list[Any]] = []
        for place, entry in enumerate(entries):
            added = self._added(entry.token_id, output.text, is_left_out=stops and place == last)
            if self._is_chat:
                rows.append([self._chat(entry, added)])
            else:
                text, top = self._top(entry)
                start = self._num_characters
                rows.append([text, _finite(entry.logprob), start, orjson.dumps(top).decode()])
            self._num_characters += len(self._decoder.decode(added or b""))
        return rows

    def _added(self, token_id: int, text: str, *, is_left_out: bool) -> bytes | None:
        """The bytes that a token adds to the output's text.

        text: of all new tokens.
        """
        if is_left_out or token_id in self._hidden:
            return b""
        added = self._texts.bytes_of(token_id)
        if added and self._is_at_start:
            self._is_at_start = False
            # A decoder of words drops the space before the first one where no text is before it.
            if added.startswith(b" ") and text and not text.startswith(" "):
                return added[1:]
        return added

    def _chat(self, entry: TokenLogprob, added: bytes | None) -> str:
        texts = self._texts
        top = [
            _chat_token(texts.text(token), logprob, self._own(token))
            for token, logprob in entry.top.items()
        ]
        row = _chat_token(texts.text(entry.token_id), entry.logprob, added)
        return orjson.dumps(row | {"top_logprobs": top}).decode()

    def _own(self, token_id: int) -> bytes | None:
        return b"" if token_id in self._hidden else self._texts.bytes_of(token_id)

    def _top(self, entry: TokenLogprob) -> tuple[str, Mapping[str, float]]:
        """(the token's text, top_logprobs by text): as many as were asked for.

        Two tokens of one text have two keys, and the token's own text is no other token's key.
        """
        text = self._texts.text(entry.token_id)
        values = list(entry.top.values())
        if values and values[-1] < _LEAST:
            values = list(map(_finite, values))
        top = dict(zip(self._texts.texts(list(entry.top)), values, strict=True))
        if len(top) == len(values) and (entry.token_id in entry.top or text not in top):
            return text, top
        top = {}
        for token, value in zip(entry.top, values, strict=True):
            taken = top if token == entry.token_id else {*top, text}
            key = self._texts.text(token)
            if key in taken:
                key = _named(token)
            while key in taken:
                key += " "
            top[key] = value
        return text, top


def _chat_token(text: str, logprob: float, given: bytes | None) -> dict[str, Any]:
    return {
        "token": text,
        "logprob": _finite(logprob),
        "bytes": None if given is None else list(given),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def _named(token_id: int) -> str:
    """As vLLM names a token by its id."""
    return f"token_id:{token_id}"
