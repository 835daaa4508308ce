"""Detokenizers: token ids to text, incrementally; text that was returned never changes."""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

Decode = Callable[[Sequence[int]], str]
Pieces = Sequence[str | None]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes. More tokens than this that end in a broken character will not
# become a character: the bytes are not valid text.
_MAX_HELD_TOKENS = 8
_MAX_BROKEN = 3  # the most replacement characters that the start of one character decodes to
_MAX_WINDOW_TOKENS = 16  # decoded again with every token; older tokens are dropped


class Detokenizer(Protocol):
    """The text of a growing list of token ids; a character is returned once it is complete."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add, without a character that later tokens may complete."""
        ...

    def flush(self) -> str:
        """The rest at the end of a text, a broken character included."""
        ...


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes; takes less than a microsecond for a token."""

    def __init__(self, token_bytes: Sequence[bytes], context: Sequence[int] = ()):
        """token_bytes: the bytes of each token id.

        context: the prompt's last tokens, which may end in the middle of a character.
        """
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_open = False  # whether the decoder holds the start of a character
        self.feed(context)

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._token_bytes
        is_one = len(token_ids) == 1
        data = table[token_ids[0]] if is_one else b"".join([table[token] for token in token_ids])
        if not self._is_open:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._is_open = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any tokenizer: decodes a window of the last tokens with the tokenizer's own decoder.

    The cost of a token does not depend on the length of the text.  The window begins with tokens
    whose text was returned before, because decoders treat the start of a text differently (they
    drop the space before a word).  Tokens with a known text (`pieces`) are not decoded.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = (), pieces: Pieces | None = None):
        """decode: the tokenizer's decoder.  context: the prompt's last tokens, for the space before
        the first word.

        pieces: the text that each token id adds after other text, None where its neighbours decide.
        """
        self._decode, self._pieces = decode, pieces
        self._is_behind = False  # whether `_returned` lacks tokens that were returned from `pieces`
        self._tokens = list(context)  # the window
        self._num_returned = len(self._tokens)  # tokens of the window whose text was returned
        self._returned = (
            decode(self._tokens) if self._tokens else ""
        )  # the returned text of `_tokens`

    def feed(self, token_ids: Sequence[int]) -> str:
        if self._pieces is not None and len(token_ids) == 1:
            piece = self._pieces[token_ids[0]]
            has_context = self._num_returned == len(self._tokens) and (
                self._returned or self._is_behind
            )
            if piece is not None and has_context:
                self._add_known(token_ids[0], self._pieces)
                return piece
        self._catch_up()
        self._tokens += token_ids
        text = self._decode(self._tokens)
        if text.endswith(_BROKEN):
            is_incomplete = len(self._tokens) - self._num_returned <= _MAX_HELD_TOKENS
            if is_incomplete or not text.startswith(self._returned):
                return ""
            return self._new_text(_without_last_broken(text))
        added = self._new_text(text)
        if len(self._tokens) > _MAX_WINDOW_TOKENS:
            self._shrink_window()
        self._num_returned = len(self._tokens)
        return added

    def flush(self) -> str:
        self._catch_up()
        return self._new_text(self._decode(self._tokens))

    def _add_known(self, token: int, pieces: Pieces) -> None:
        """Adds a token whose text is known, without decoding."""
        self._tokens.append(token)
        self._is_behind = True
        if len(self._tokens) > _MAX_WINDOW_TOKENS:
            window = self._tokens[-_MAX_WINDOW_TOKENS // 2 :]
            texts = [pieces[token] for token in window]
            if None not in texts and any(text and text.strip(" ") for text in texts):
                self._tokens = window
        self._num_returned = len(self._tokens)

    def _catch_up(self) -> None:
        if self._is_behind:
            self._returned, self._is_behind = self._decode(self._tokens), False

    def _new_text(self, text: str) -> str:
        """The text that `text`, the decoded window, adds to the returned text."""
        if not text.startswith(self._returned):
            # Some decoders replace a whole run of byte tokens for one invalid byte, including bytes
            # whose text was returned. The window continues without those.
            del self._tokens[: self._num_returned]
            self._num_returned, self._returned = 0, ""
            text = self._decode(self._tokens)
        added = text[len(self._returned) :]
        self._returned = text
        return added

    def _shrink_window(self) -> None:
        """Drops the tokens before the newest ones, where these are enough context."""
        text = self._decode(self._tokens[self._num_returned :])
        if text and not text.startswith(_BROKEN):
            del self._tokens[: self._num_returned]
            self._returned = text


def _without_last_broken(text: str) -> str:
    """The text without the replacement characters at its end, at most _MAX_BROKEN."""
    num_broken = len(text) - len(text.rstrip(_BROKEN))
    return text[: len(text) - min(num_broken, _MAX_BROKEN)]
