"""What tokens add to a text, so that it can be put together without their tokenizer."""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from bytetx.errors import CheckpointError


def token_bytes(backend: tokenizers.Tokenizer) -> list[bytes] | None:
    """What each token id adds to a text, nothing for special tokens; None for other tokenizers.

    Joined and read as UTF-8, with a replacement character for what is none, this is what `decode`
    gives without special tokens.
    """
    decoder = _decoder_of(backend)
    if decoder is None or decoder["type"] != "ByteLevel":
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
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


def token_pieces(backend: tokenizers.Tokenizer) -> list[str | None] | None:
    """What each token id adds to a text behind other text, nothing for special tokens, where the
    decoder joins pieces with their spaces, as SentencePiece does; None for other tokenizers.

    None also for tokens of one byte, whose neighbours say what character they are part of.
    """
    decoder = _decoder_of(backend)
    parts = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else []
    if parts[:3] != _JOINING or parts[3:] not in ([], [_STRIPPING]):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    found: list[str | None] = [""] * _num_ids(vocabulary)
    for token, token_id in vocabulary.items():
        if token_id not in special:
            is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
            found[token_id] = None if is_byte else token.replace(_SPACE, " ")
    return found


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
