"""A WordPiece tokenizer run by the native core, learnt from the reference tokenizer as it goes."""

import json
import unicodedata
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers

from bytetx.ops.wordpiece import CharKind, WordPiece, has_wordpiece

_NO_LIMIT = 1 << 20  # tokens
_PROBE = "A probe: naïve 日本 co-operation, 'unaffable'!"
_NORMALIZERS = ("BertNormalizer", "Lowercase")  # each maps a character whatever is beside it


class LearntWordPiece:
    """Gives what the reference gives for single texts; what it cannot give it says.

    The native core knows words and pieces. What a character becomes (dropped, lowered, without its
    accent, a border of words) is asked of the reference's own normalizer and pre-tokenizer when
    the character first occurs.
    """

    def __init__(self, backend: tokenizers.Tokenizer, wordpiece: WordPiece):
        self._backend, self._wordpiece = backend, wordpiece

    def encode(
        self, texts: list[str], *, max_tokens: int, num_threads: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(token_ids, seqlens, status) of ops.wordpiece; a status is WHOLE, CUT or FOREIGN."""
        encode = self._wordpiece.encode
        encoded = encode(texts, max_tokens=max_tokens, num_threads=num_threads)
        while encoded.unknown_chars:
            for char in encoded.unknown_chars:
                self._wordpiece.learn(char, self._parts(char))
            encoded = encode(texts, max_tokens=max_tokens, num_threads=num_threads)
        return encoded.token_ids, encoded.seqlens, encoded.status

    def _parts(self, char: str) -> list[tuple[CharKind, str]]:
        if "\ud800" <= char <= "\udfff":  # half of a surrogate pair, which is no text
            return [(CharKind.FOREIGN, " ")]
        normalizer = self._backend.normalizer
        normal = char if normalizer is None else normalizer.normalize_str(char)
        if any(map(unicodedata.combining, normal)):
            # A mark that stays may change places with its neighbours: no matter of one character.
            return [(CharKind.FOREIGN, " ")]
        return [(self._kind(part), part) for part in normal]

    def _kind(self, part: str) -> CharKind:
        between = f"a{part}a"
        words = [word for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(between)]
        kinds = {
            (between,): CharKind.LETTER,
            ("a", "a"): CharKind.BORDER,
            ("a", part, "a"): CharKind.MARK,
        }
        return kinds.get(tuple(words), CharKind.FOREIGN)


def learnt_wordpiece(backend: tokenizers.Tokenizer) -> LearntWordPiece | None:
    """The native twin of a BERT tokenizer; None for other kinds, and without the native core."""
    if not has_wordpiece() or not isinstance(backend.model, tokenizers.models.WordPiece):
        return None
    config = json.loads(backend.to_str())
    frame = _frame(config["post_processor"])
    added = config["added_tokens"]
    model = config["model"]
    truncation = config["truncation"] or {"direction": "Right", "max_length": _NO_LIMIT}
    limit = truncation["max_length"]
    is_known = (
        frame is not None
        and _is_bert(config)
        and truncation["direction"] == "Right"
        and limit >= sum(map(len, frame))
        # Found before anything is normalised, by their first character, which ends any word.
        and not any(token["normalized"] for token in added)
        and all(_is_sign(token["content"][:1]) for token in added)
        and model["unk_token"] in model["vocab"]
    )
    if not is_known:
        return None
    wordpiece = WordPiece(
        model["vocab"],
        continuing_prefix=model["continuing_subword_prefix"],
        unk_id=model["vocab"][model["unk_token"]],
        max_word_chars=model["max_input_chars_per_word"],
        head=frame[0],
        tail=frame[1],
        added_tokens=[token["content"] for token in added],
    )
    learnt = LearntWordPiece(backend, wordpiece)
    ids, _, _ = learnt.encode([_PROBE], max_tokens=limit, num_threads=1)
    return learnt if ids.tolist() == backend.encode(_PROBE).ids else None


def _is_bert(config: Mapping[str, Any]) -> bool:
    normalizer = config["normalizer"] or {}
    parts = normalizer.get("normalizers", [normalizer])
    pre_tokenizer = config["pre_tokenizer"] or {}
    return pre_tokenizer.get("type") == "BertPreTokenizer" and all(
        part.get("type") in _NORMALIZERS for part in parts
    )


def _is_sign(char: str) -> bool:
    return char.isascii() and char.isprintable() and not char.isalnum() and char not in ("", " ")


def _frame(post_processor: Mapping[str, Any] | None) -> tuple[list[int], list[int]] | None:
    """Ids before and after a single text, or None for a kind that is not known."""
    if post_processor is None:
        return [], []
    if post_processor["type"] in ("BertProcessing", "RobertaProcessing"):
        return [post_processor["cls"][1]], [post_processor["sep"][1]]
    if post_processor["type"] != "TemplateProcessing":
        return None
    head: list[int] = []
    tail: list[int] = []
    has_text = False
    for piece in post_processor["single"]:
        if "Sequence" in piece:
            if has_text:
                return None
            has_text = True
        else:
            name = piece["SpecialToken"]["id"]
            (tail if has_text else head).extend(post_processor["special_tokens"][name]["ids"])
    return (head, tail) if has_text else None
