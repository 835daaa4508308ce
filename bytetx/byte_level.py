"""The bytes of a byte-level tokenizer's tokens, so that text can be put together without it."""

import json

import tokenizers


def token_bytes(backend: tokenizers.Tokenizer) -> list[bytes] | None:
    """What each token id adds to a text, nothing for special tokens; None for other tokenizers.

    Joined and read as UTF-8, with a replacement character for what is none, this is what `decode`
    gives without special tokens.
    """
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None or decoder["type"] != "ByteLevel":
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    found = [b""] * (max(vocabulary.values(), default=-1) + 1)
    byte_of = _byte_of()
    for token, token_id in vocabulary.items():
        if token_id in special:
            continue
        try:
            found[token_id] = bytes([byte_of[letter] for letter in token])
        except KeyError:  # an added token, written as it is
            found[token_id] = token.encode()
    return found


def _byte_of() -> dict[str, int]:
    """The alphabet that byte-level BPE writes bytes in: printable ones of Latin-1 as they are, the
    others as the letters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
