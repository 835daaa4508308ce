"""Texts that tokens add, so that it can be put together without their tokenizer."""

import json
import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from bytetx.errors import CheckpointError


def token_bytes(
    backend: tokenizers.Tokenizer, *, skip_special_tokens: bool = True
) -> list[bytes] | None:
    """The bytes that each token id adds to a text; None for other tokenizers.

    Joined and read as UTF-8, with a replacement character for what is none, this is what `decode`
    gives.  skip_special_tokens: as of `decode`; they add nothing then.
    """
    decoder = _decoder_of(backend)
    if decoder is None or decoder["type"] != "ByteLevel":
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    special = special_tokens(backend) if skip_special_tokens else {}
    found = [b""] * _num_ids(vocabulary)
    byte_of = _byte_of()
    for token, token_id in vocabulary.items():
        if token_id in special:
            continue
        try:
            found[token_id] = bytes([byte_of[letter] for letter in token])
        except KeyError:  # an added token, written as it is
            found[token_id] = token.encode()
    return found


def token_pieces(
    backend: tokenizers.Tokenizer, *, skip_special_tokens: bool = True
) -> list[str | None] | None:
    """The text that each token id adds behind other text, where the decoder joins pieces with their
    spaces, as SentencePiece does; None for other tokenizers.

    None also for tokens of one byte, whose neighbours say what character they are part of.
    skip_special_tokens: they add nothing.
    """
    decoder = _decoder_of(backend)
    parts = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else []
    if parts[:3] != _JOINING or parts[3:] not in ([], [_STRIPPING]):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    special = special_tokens(backend) if skip_special_tokens else {}
    found: list[str | None] = [""] * _num_ids(vocabulary)
    for token, token_id in vocabulary.items():
        if token_id not in special:
            found[token_id] = None if _is_byte(token) else token.replace(_SPACE, " ")
    return found


def _is_byte(token: str) -> bool:
    return re.fullmatch("<0x[0-9A-Fa-f]{2}>", token) is not None


class TokenBytes(dict[int, bytes]):
    """The bytes of each token id alone, as it stands behind other text; special tokens' own text.

    Joined over the tokens of a text without special tokens, they are the text's bytes; a decoder
    that cleans up spaces (WordPiece's) may leave some out.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        super().__init__()
        self._backend = backend
        self._special = special_tokens(backend)
        self._table = token_bytes(backend, skip_special_tokens=False)
        self._pieces = token_pieces(backend, skip_special_tokens=False)
        self._anchor: tuple[int, str] | None = None  # a token to stand before others, and its text

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._special)

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._find(token_id)
        return found

    def _find(self, token_id: int) -> bytes:
        known = self._table if self._table is not None else self._pieces
        if known is not None and token_id >= len(known):  # the model has more rows than tokens
            return b""
        if self._table is not None:
            return self._table[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special:
            return token.encode()
        piece = None if self._pieces is None else self._pieces[token_id]
        if piece is not None:
            return piece.encode()
        if _is_byte(token) and "ByteFallback" in json.dumps(_decoder_of(self._backend)):
            return bytes([int(token[3:5], 16)])
        return self._decoded(token_id).encode()

    def _decoded(self, token_id: int) -> str:
        """Return the text that the decoder adds for the token behind a word."""
        if self._anchor is None:
            vocabulary = self._backend.get_vocab(with_added_tokens=False)
            words = (i for token, i in vocabulary.items() if token.strip(_SPACE).isalnum())
            first = next(words, token_id)
            self._anchor = first, self._backend.decode([first])
        before, text = self._anchor
        both = self._backend.decode([before, token_id], skip_special_tokens=False)
        return both[len(text) :] if both.startswith(text) else self._backend.decode([token_id])


def joins_tokens(backend: tokenizers.Tokenizer) -> bool:
    """Whether what a token adds to a text does not depend on the one behind it.

    It does where the last token's space is left out.
    """
    decoder = json.dumps(_decoder_of(backend))
    return not any(f'"type": "{kind}"' in decoder for kind in ("BPEDecoder", "CTC"))


def special_tokens(backend: tokenizers.Tokenizer) -> dict[int, str]:
    """The texts of special tokens, by id."""
    added = backend.get_added_tokens_decoder()
    return {token_id: token.content for token_id, token in added.items() if token.special}


def _decoder_of(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """The decoder as tokenizer.json describes it.

    The whole backend as JSON would list every id up to the last, a minute for an id of billions.
    """
    decoder = backend.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


# Vocabularies have some 2 ** 18 tokens; a damaged id would take gigabytes for a table of all.
_MAX_IDS = 1 << 24


def _num_ids(vocabulary: Mapping[str, int]) -> int:
    last = max(vocabulary.values(), default=-1)
    if last >= _MAX_IDS:
        raise CheckpointError(
            f"tokenizer.json numbers a token {last}; ids are below {_MAX_IDS}, "
            "so the file is damaged: download or save it again"
        )
    return last + 1


_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_JOINING = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIPPING = {"type": "Strip", "content": " ", "start": 1, "stop": 0}  # the first space of a text


def _byte_of() -> dict[str, int]:
    """The alphabet that byte-level BPE writes bytes in: printable ones of Latin-1 as they are, the
    others as the letters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
