"""Beginnings of texts whose tokens are the first tokens of the whole text.

A text far beyond a limit is tokenised no further than that; what many texts begin with, once.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import models

# A text of fewer characters is tokenised whole; so many characters a token are tried first.
_MIN_CHARACTERS, _CHARACTERS_PER_TOKEN = 2048, 8
_GROWTH = 4  # a beginning with too few tokens becomes at least so many times as long
# A common beginning of fewer characters, or of fewer texts, is tokenised with each of them.
_MIN_COMMON_CHARACTERS, _MIN_ALIKE = 256, 3

# Letters and digits that are neither combining marks nor prepended to what follows them, so that a
# grapheme ends before the space behind one of them, and no Unicode normalisation crosses it.
_HAN = "\u4e00-\u9fa5"
_WORD = (
    f"0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u0410-\u044f\u05d0-\u05ea\u0621-\u063a{_HAN}\uac00-\ud7a3"
)
_BETWEEN_WORDS = re.compile(f"(?<=[{_WORD}])(?= [{_WORD}])")
_BETWEEN_HAN = re.compile(f"(?<=[{_WORD}])(?= [{_WORD}])|(?<=[{_HAN}])(?=[{_HAN}])")

# Pre-tokenizers that begin a word at a single space between two letters or digits, and those that
# look no further than the neighbouring character.
_SPLITTERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
_LOCAL = {"Digits", "Punctuation"}
# Of Qwen2 and Llama 3: no alternative matches a letter or digit and then a space.
_PATTERNS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# Normalizers that treat what is before such a space as if the text ended there.
_NORMALIZERS = {
    "BertNormalizer",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",
    "Strip",
    "StripAccents",
}
_MODELS = (models.BPE, models.Unigram, models.WordLevel, models.WordPiece)
_WORD_AND_SPACE = re.compile("\\S[\\s\u2581]")  # an added token with this could lie across a place


def find_boundary(backend: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """A pattern of the places where this tokenizer's texts may be cut: the tokens of what is before
    one are the first tokens of the whole text. None where no place is known to be such.

    That holds where every part of the tokenizer is of a kind known to treat the two sides of the
    place on their own: no added token, normalizer or word reaches across it, and the model reads
    words one by one.
    """
    normalizers = members(state_of(backend.normalizer), "normalizers")
    pre_tokenizers = members(state_of(backend.pre_tokenizer), "pretokenizers")
    is_of_words = isinstance(backend.model, _MODELS) and not getattr(backend.model, "dropout", None)
    if not (is_of_words and all(map(_is_local, normalizers)) and _splits_at_spaces(pre_tokenizers)):
        return None
    normalize = backend.normalizer.normalize_str if backend.normalizer is not None else str
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    if any(_WORD_AND_SPACE.search(form) for text in added for form in (text, normalize(text))):
        return None
    splits_han = _is_bert(normalizers, pre_tokenizers)
    # What a normalizer's table of characters does to letters is tried on some.
    for letter in "aAzZ09\u00e9\u0416\u05d0\u0627\uac00" + "\u4e2d" * (not splits_han):
        word = normalize(letter)
        if (
            re.search(r"\s", word)
            or not word
            or normalize(f"{letter} {letter}") != f"{word} {word}"
        ):
            return None
    if splits_han and not any(re.search(f"[{_HAN}]", text) for text in added):
        return _BETWEEN_HAN
    return _BETWEEN_WORDS


def find_prefix(text: str, boundary: re.Pattern[str], *, num_characters: int) -> str | None:
    """The beginning of a text up to its last boundary in the second half of its first
    num_characters, or of four times as many where there is none; None for the whole text."""
    while 2 * num_characters < len(text):
        width = 64
        while width < num_characters:
            width = min(4 * width, num_characters)
            start = num_characters - width // 2
            # A boundary is found by one character before it and two behind it.
            places = [found.start() for found in boundary.finditer(text, start, num_characters)]
            if places:
                return text[: places[-1]]
        num_characters *= _GROWTH
    return None


class PrefixFinder:
    """Finds beginnings of texts far beyond a limit; that they exceed it is the caller's to check.

    What the tokenizer allows is looked up with the first such text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, max_tokens: int):
        self._backend = backend
        self._num_characters = max(_MIN_CHARACTERS, _CHARACTERS_PER_TOKEN * max_tokens)
        # A text of so many characters is always taken whole.
        self.most_characters = 2 * self._num_characters

    def find(self, text: object, *, longer_than: int = 0) -> str | None:
        """A beginning of more characters than longer_than; None for the whole text.

        A text whose beginning would be half of it or more, and a pair, are taken whole.
        """
        num_characters = max(self._num_characters, 2 * _GROWTH * longer_than)
        if not isinstance(text, str) or len(text) <= 2 * num_characters:
            return None
        if self._boundary is None:
            return None
        return find_prefix(text, self._boundary, num_characters=num_characters)

    @cached_property
    def _boundary(self) -> re.Pattern[str] | None:
        truncation = self._backend.truncation
        if truncation is None or truncation["direction"] != "right":
            return None
        return find_boundary(self._backend)


Encode = Callable[[Sequence[str]], list[list[int]]]


def encode_alike(
    texts: Sequence[str], encode: Encode, boundary: re.Pattern[str] | None
) -> list[list[int]]:
    """The token ids of each text as `encode` gives them; what consecutive ones have in common is
    tokenised once, where they may be cut there.

    boundary: of find_boundary.  One text of each group is tokenised whole, too: a tokenizer may
    treat the start of any text in a way of its own.
    """
    groups = [] if boundary is None else _alike(texts, boundary)
    if not groups:
        return encode(texts)
    pieces: list[str] = []
    end = 0
    for start, stop, cut in groups:
        pieces += [*texts[end:start], texts[start], texts[start][:cut]]
        pieces += [text[cut:] for text in texts[start:stop]]
        end = stop
    pieces += texts[end:]
    ids = iter(encode(pieces))
    found: list[list[int]] = []
    for start, stop, _ in groups:
        found += [next(ids) for _ in range(len(found), start)]
        whole, head = next(ids), next(ids)
        rows = [head + next(ids) for _ in range(start, stop)]
        found += rows if rows[0] == whole else encode(texts[start:stop])
    return [*found, *ids]


def _alike(texts: Sequence[str], boundary: re.Pattern[str]) -> list[tuple[int, int, int]]:
    """Consecutive texts that may be cut at the same place: (the first, the one behind the last,
    the characters before the place)."""
    groups: list[tuple[int, int, int]] = []
    start = 0
    while start < len(texts) - 1:
        first, stop = texts[start], start + 1
        length = common_characters(first, texts[stop])
        # A boundary is found by one character before it and two behind it.
        places = [
            found.start() for found in boundary.finditer(first, max(length - 1024, 1), length)
        ]
        if places and places[-1] >= _MIN_COMMON_CHARACTERS:
            head = first[: places[-1] + 2]
            while stop < len(texts) and texts[stop].startswith(head):
                stop += 1
            if stop - start >= _MIN_ALIKE:
                groups.append((start, stop, places[-1]))
        start = stop
    return groups


def common_characters(a: str, b: str) -> int:
    """Characters at the start of two texts that are the same."""
    least, most = 0, min(len(a), len(b))
    while least < most:
        middle = (least + most + 1) // 2
        if a[least:middle] == b[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def state_of(part: Any) -> Mapping[str, Any] | None:
    """A normalizer or pre-tokenizer as it stands in tokenizer.json; of one that is Python code,
    which has no such form, only that."""
    if part is None:
        return None
    try:
        return json.loads(part.__getstate__())  # type: ignore[no-any-return]
    except Exception:  # the library has no class for it
        return {"type": "Python"}


def members(part: Mapping[str, Any] | None, key: str) -> Sequence[Mapping[str, Any]]:
    """The parts of a sequence of normalizers or pre-tokenizers, those of nested ones included."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [inner for member in part[key] for inner in members(member, key)]


def _is_local(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Replace":
        pattern = part["pattern"]
        if "Regex" in pattern:  # XLM-R's, ALBERT's: of several spaces, and the place has one
            return bool(pattern["Regex"] == " {2,}")
        text = pattern["String"]
        return bool(text) and not any(char.isalnum() or char.isspace() for char in text)
    return part["type"] in _NORMALIZERS


def _splits_at_spaces(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a word begins at the space, whatever follows it. After the part that sees to that,
    the others read words one by one."""
    for part in parts:
        kind = part["type"]
        if kind in _SPLITTERS:
            return True
        if kind == "ByteLevel":
            return bool(part.get("use_regex", True))
        if kind == "Metaspace":
            return part.get("split", True) is not False
        if kind == "Split":
            is_known = part["pattern"].get("Regex") in _PATTERNS
            return is_known and part["behavior"] == "Isolated" and not part["invert"]
        if kind not in _LOCAL:
            return False
    return False


def _is_bert(
    normalizers: Sequence[Mapping[str, Any]], pre_tokenizers: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether each Chinese character is a word, and nothing but BERT's own parts touch it."""
    kinds = [part["type"] for part in (*normalizers, *pre_tokenizers)]
    is_bert = kinds == ["BertNormalizer", "BertPreTokenizer"]
    return is_bert and bool(normalizers[0]["handle_chinese_chars"])
