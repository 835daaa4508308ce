"""Token ids -> text as they come: what was shown once never changes."""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

Decode = Callable[[Sequence[int]], str]
Pieces = Sequence[str | None]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes, so that more tokens than this which end in a broken character
# are not about to become one: the bytes are no text.
_MAX_HELD_TOKENS = 8
_MAX_BROKEN = 3  # what the start of one character decodes to, at most
_MAX_WINDOW_TOKENS = 16  # decoded again with every token, before the first of them are let go of


class TextStream(Protocol):
    """Text of a growing list of token ids, without half a character."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add, without a character that the next ones may complete."""
        ...

    def flush(self) -> str:
        """The rest at the end of a text, a broken character included."""
        ...


class ByteStream:
    """For tokenizers whose tokens are bytes; a token costs less than a microsecond."""

    def __init__(self, token_bytes: Sequence[bytes], context: Sequence[int] = ()):
        """token_bytes: of every token id.  context: the prompt's last tokens, which may end in the
        middle of a character."""
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


class DecodedStream:
    """For any tokenizer, by its own decoder, but for tokens whose text is known beforehand.

    Decoding only the last few tokens costs the same at every length. They are decoded together
    with some that were shown before, for a decoder treats the start of a text differently (it
    drops the space in front of a word).
    """

    def __init__(self, decode: Decode, context: Sequence[int] = (), pieces: Pieces | None = None):
        """decode: a tokenizer's.  context: the prompt's last tokens, for the first word's space.

        pieces: what each token adds behind other text, None where its neighbours say that.
        """
        self._decode, self._pieces = decode, pieces
        self._is_behind = False  # whether tokens were shown that `_shown` does not have
        self._tokens = list(context)  # from the start of what is decoded again
        self._num_shown = len(self._tokens)  # tokens whose text was shown
        self._shown = decode(self._tokens) if self._tokens else ""  # text of `_tokens`, as shown

    def feed(self, token_ids: Sequence[int]) -> str:
        if self._pieces is not None and len(token_ids) == 1:
            piece = self._pieces[token_ids[0]]
            is_settled = self._num_shown == len(self._tokens) and (self._shown or self._is_behind)
            if piece is not None and is_settled:
                return self._join(token_ids[0], piece)
        self._catch_up()
        self._tokens += token_ids
        text = self._decode(self._tokens)
        if text.endswith(_BROKEN):
            is_hopeful = len(self._tokens) - self._num_shown <= _MAX_HELD_TOKENS
            if is_hopeful or not text.startswith(self._shown):
                return ""
            return self._show(_without_last_broken(text))
        added = self._show(text)
        if len(self._tokens) > _MAX_WINDOW_TOKENS:
            self._shift()
        self._num_shown = len(self._tokens)
        return added

    def flush(self) -> str:
        self._catch_up()
        return self._show(self._decode(self._tokens))

    def _join(self, token: int, piece: str) -> str:
        """Shows a token without a decoder."""
        self._tokens.append(token)
        self._is_behind = True
        if len(self._tokens) > _MAX_WINDOW_TOKENS:
            kept = self._tokens[-_MAX_WINDOW_TOKENS // 2 :]
            pieces = [self._pieces[token] for token in kept]
            if None not in pieces and "".join(pieces).strip(" "):
                self._tokens = kept
        self._num_shown = len(self._tokens)
        return piece

    def _catch_up(self) -> None:
        if self._is_behind:
            self._shown, self._is_behind = self._decode(self._tokens), False

    def _show(self, text: str) -> str:
        """What `text` adds to what was shown."""
        if not text.startswith(self._shown):
            # Some decoders give up a whole run of byte tokens for one that is no text, those that
            # were shown included: the rest goes on without them.
            del self._tokens[: self._num_shown]
            self._num_shown, self._shown = 0, ""
            text = self._decode(self._tokens)
        added = text[len(self._shown) :]
        self._shown = text
        return added

    def _shift(self) -> None:
        """Lets go of the tokens in front of those just shown, where these are context enough."""
        text = self._decode(self._tokens[self._num_shown :])
        if text and not text.startswith(_BROKEN):
            del self._tokens[: self._num_shown]
            self._shown = text


def _without_last_broken(text: str) -> str:
    """The text but for the broken characters at its end, at most as many as one may be."""
    num_broken = len(text) - len(text.rstrip(_BROKEN))
    return text[: len(text) - min(num_broken, _MAX_BROKEN)]
