"""Limits of what a tokenizer's files may make of a text: in size, in time and in tokens.

A normalizer can write a megabyte for each letter, a template can frame a text by a million tokens,
and a regular expression can take for ever. tokenizers itself limits none of it, and a call into it
cannot be interrupted: so the parts of tokenizer.json are looked at before a text is.
"""

import base64
import binascii
import json
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from bytetx.checkpoint.text_prefix import state_of
from bytetx.errors import CheckpointError

# How many characters a part of the checkpoint's own may write for one. Unicode's own forms, which
# every tokenizer may use, write 18 at most, and do not count.
_MOST_GROWTH = 64
# Normalizers, pre-tokenizers, post-processors, decoders, those in sequences counted one by one: the
# longest in use have about 40, each of which reads the whole text.
_MOST_PARTS = 256
_MOST_FRAME_TOKENS = 1024  # that are put around a text; some models have a few dozen
_MOST_ADDED_TOKENS = 1 << 17
_MOST_PATTERN_CHARACTERS = 1 << 14
# WordPiece tries every end of a word for each of its beginnings: half a million in words this long.
_MOST_WORD_CHARACTERS = 1024
# A unigram model looks up beginnings of a text as far as its longest token, at each character.
_MOST_TOKEN_CHARACTERS = 1 << 12
# A token, a pattern, or its replacement.
_MOST_TEXT_BYTES = 1 << 13
_MOST_CHARSMAP_BYTES = 256  # that a SentencePiece character map writes for one character
_ADVICE = "it is damaged, or made to stop its readers; give a checkpoint with another one"


def check_tokenizer(path: Path, backend: tokenizers.Tokenizer) -> None:
    """Raises CheckpointError for a tokenizer that makes too much of a text, or takes too long.

    path: of its file, for the error.  backend: as read; it has tokenised nothing yet.
    """
    limits = _TokenizerParts(path)
    limits.check_normalizer(state_of(backend.normalizer))
    limits.check_pre_tokenizer(state_of(backend.pre_tokenizer))
    limits.check_post_processor(state_of(backend.post_processor))
    limits.check_decoder(state_of(backend.decoder))
    limits.check_model(backend)


def check_raw_tokenizer(path: Path, raw: bytes) -> None:
    """The limits that hold before tokenizers reads a file: its time grows with them, and a unigram
    model with a token of some 100 KB overflows the stack, which ends the process.
    """
    if raw.count(b'"single_word"') > _MOST_ADDED_TOKENS:
        raise _too_much(path, f"more than {_MOST_ADDED_TOKENS:,} added tokens")
    if (longest := _longest_text(raw)) > _MOST_TEXT_BYTES:
        raise _too_much(path, f"a text of {longest:,} bytes, more than {_MOST_TEXT_BYTES:,}")


def _longest_text(raw: bytes) -> int:
    """Bytes between two quotation marks of a JSON file, at most, but for a character map."""
    codes = np.frombuffer(raw, dtype=np.uint8)
    quotes = np.flatnonzero(codes == ord('"'))
    quotes = quotes[codes[quotes - 1] != ord("\\")]  # others are of the text
    if len(quotes) < 2:
        return len(raw)
    lengths = np.diff(quotes) - 1
    maps = [found.end() - 1 for found in re.finditer(rb'"precompiled_charsmap"\s*:\s*"', raw)]
    lengths[np.isin(quotes[:-1], maps)] = 0
    return int(lengths.max())


class _TokenizerParts:
    """The parts of one tokenizer; errors name its file."""

    def __init__(self, path: Path):
        self._path = path

    def check_normalizer(self, state: Mapping[str, Any] | None) -> None:
        growth, num_prepended = 1.0, 0
        for part in self._parts(state, "normalizers"):
            kind = part["type"]
            if kind == "Replace":
                growth *= self._replace_growth(part)
            elif kind == "Prepend":
                num_prepended += len(part["prepend"])
            elif kind == "Precompiled":
                self._check_charsmap(part["precompiled_charsmap"])
        self._check_growth("normalizer", max(growth, num_prepended / _MOST_GROWTH))

    def check_pre_tokenizer(self, state: Mapping[str, Any] | None) -> None:
        for part in self._parts(state, "pretokenizers"):
            if part["type"] == "Split":
                self._check_pattern(part["pattern"])
            elif part["type"] == "FixedLength" and part["length"] < 1:
                raise _too_much(self._path, "a FixedLength pre-tokenizer of no characters")

    def check_post_processor(self, state: Mapping[str, Any] | None) -> None:
        growth, num_tokens = 1, 0
        for part in self._parts(state, "processors"):
            if part["type"] != "TemplateProcessing":
                continue
            special = part["special_tokens"]
            most_copies = most_tokens = 0
            for template in (part["single"], part["pair"]):
                if len(template) > _MOST_FRAME_TOKENS:
                    raise _too_much(self._path, f"a template of {len(template):,} pieces")
                texts = [piece["Sequence"]["id"] for piece in template if "Sequence" in piece]
                names = [
                    piece["SpecialToken"]["id"] for piece in template if "Sequence" not in piece
                ]
                most_copies = max([most_copies, *map(texts.count, "AB")])
                ids = sum(len(special[name]["ids"]) for name in names if name in special)
                most_tokens = max(most_tokens, ids)
            growth *= max(1, most_copies)
            num_tokens += most_tokens
        if num_tokens > _MOST_FRAME_TOKENS:
            raise _too_much(self._path, f"a template of {num_tokens:,} special tokens")
        if growth > 1:
            raise _too_much(self._path, "a template that repeats a text")

    def check_decoder(self, state: Mapping[str, Any] | None) -> None:
        growth = 1.0
        for part in self._parts(state, "decoders"):
            if part["type"] == "Replace":
                growth *= self._replace_growth(part)
        self._check_growth("decoder", growth)

    def check_model(self, backend: tokenizers.Tokenizer) -> None:
        model = backend.model
        longest = getattr(model, "max_input_chars_per_word", 0)
        if isinstance(model, tokenizers.models.WordPiece) and longest > _MOST_WORD_CHARACTERS:
            raise _too_much(
                self._path,
                f"max_input_chars_per_word {longest:,}, more than {_MOST_WORD_CHARACTERS:,}",
            )
        if isinstance(model, tokenizers.models.Unigram):
            vocabulary = backend.get_vocab(with_added_tokens=False)
            if max(map(len, vocabulary), default=0) > _MOST_TOKEN_CHARACTERS:
                raise _too_much(
                    self._path, f"a token of more than {_MOST_TOKEN_CHARACTERS:,} characters"
                )

    def _parts(self, state: Mapping[str, Any] | None, key: str) -> Iterator[Mapping[str, Any]]:
        """The parts in order, those of sequences one by one."""
        found, waiting = 0, [] if state is None else [state]
        while waiting:
            part = waiting.pop()
            found += 1
            if found > _MOST_PARTS:
                raise _too_much(self._path, f"more than {_MOST_PARTS} {key}")
            if part["type"] == "Sequence":
                waiting += reversed(part[key])
            else:
                yield part

    def _replace_growth(self, part: Mapping[str, Any]) -> float:
        """Characters that come of one, at most."""
        self._check_pattern(part["pattern"])
        text = part["pattern"].get("String")
        if text:  # a literal one; regular expressions may match one character, or none
            return max(1.0, len(part["content"]) / len(text))
        return 1.0 + len(part["content"])

    def _check_growth(self, name: str, growth: float) -> None:
        if growth > _MOST_GROWTH:
            raise _too_much(
                self._path, f"a {name} that may write more than {_MOST_GROWTH} characters for one"
            )

    def _check_charsmap(self, encoded: str) -> None:
        """A trie's size in bytes, the trie, and what its entries point to, each up to a zero."""
        try:
            raw = base64.b64decode(encoded)
        except (ValueError, binascii.Error):
            return  # tokenizers has refused it
        texts = raw[4 + int.from_bytes(raw[:4], "little") :]
        longest = max(map(len, texts.split(b"\0")), default=0)
        if longest > _MOST_CHARSMAP_BYTES:
            raise _too_much(
                self._path, f"a character map that writes {longest:,} bytes for one character"
            )

    def _check_pattern(self, pattern: Mapping[str, str]) -> None:
        expression = pattern.get("Regex")
        if expression is None:
            return
        if len(expression) > _MOST_PATTERN_CHARACTERS:
            raise _too_much(self._path, f"a regular expression of {len(expression):,} characters")
        fault = _ambiguity(expression)
        if fault is not None and _backtracks(expression):
            raise _too_much(
                self._path,
                f"the regular expression {expression!r:.120}, with {fault}, which takes a time "
                "that is exponential in a text's length",
            )


_REPEAT = re.compile(r"[*+]|\{(\d*)(,?)(\d*)\}")
# Repeats of a group that can match in several ways: 2 ** 16 ways at most.
_MOST_REPEATS = 16


def _ambiguity(expression: str) -> str | None:
    """Why a regular expression may match one text in more ways than can be tried, or None.

    That takes a group that is repeated, and can itself match in several ways. Nearly all that are
    in use repeat characters and classes; groups only a few times, or with a fixed length.
    """
    groups = [False]  # whether each open group has a repeat of no fixed number
    place, was_group = 0, False
    while place < len(expression):
        char = expression[place]
        repeat = _REPEAT.match(expression, place)
        if repeat is not None and place > 0:
            low, comma, high = repeat.groups()
            is_open = low is None or (comma and not high)
            most = None if is_open else int((high if comma else low) or 0)
            if was_group and (most is None or most > _MOST_REPEATS):
                return "a repeated group that holds repeats or alternatives"
            if most is None or comma:
                groups[-1] = True
            place = repeat.end()
            was_group = False
            continue
        was_group = False
        if char == "\\":
            if expression[place + 1 : place + 2] in {"g", "k", *"123456789"}:
                return "a reference to a group"
            place = _after_escape(expression, place)
        elif char == "[":
            place = _after_class(expression, place)
        elif char == "(":
            groups.append(False)
            place += 1
        elif char == ")":
            has_ways = groups.pop() if len(groups) > 1 else groups[0]
            was_group = has_ways
            groups[-1] = groups[-1] or has_ways
            place += 1
        elif char == "|":
            # Of the whole expression it is harmless: so is one that holds no repeat, in a group
            # that is not repeated.
            groups[-1] = groups[-1] or len(groups) > 1
            place += 1
        elif char == "?" and place > 0 and expression[place - 1] not in "(*+?}":
            groups[-1] = groups[-1] or len(groups) > 1
            place += 1
        else:
            place += 1
    return None


def _backtracks(expression: str) -> bool:
    """Whether the library's own limit of steps is met, or nearly, on short texts of the characters
    that the expression names, and a few more; a tenth of a second each."""
    letters = sorted({*re.sub(r"\\[pP]\{[^}]*\}|\\.", "", expression), *"aA1 \n.\u4e2d"})
    rng = random.Random(1)
    texts = [letter * length for letter in letters[:64] for length in (30, _PROBE_CHARACTERS)]
    named = [letter for letter in letters if letter.isalnum()][:12]
    texts += [pair * (_PROBE_CHARACTERS // 2) for pair in map("".join, permutations(named, 2))]
    texts += ["".join(rng.choices(letters, k=_PROBE_CHARACTERS)) for _ in range(32)]
    try:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
        for text in texts:
            # The letters behind it: without one that a match needs, a search ends at once.
            for probe in (text, f"{text}\0{''.join(letters)}"):
                start = time.thread_time()
                split.pre_tokenize_str(probe)
                if time.thread_time() - start > _PROBE_SECONDS:
                    return True
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic of the Rust code, which is no Exception: the limit was met
        return True
    return False


_PROBE_CHARACTERS = 64
_PROBE_SECONDS = 0.02  # this thread's own time; an expression without such groups takes 10 us


def _after_escape(expression: str, place: int) -> int:
    if expression[place + 1 : place + 3] in ("p{", "P{", "x{"):
        end = expression.find("}", place)
        return len(expression) if end < 0 else end + 1
    return place + 2


def _after_class(expression: str, place: int) -> int:
    """Behind a class [...], which may hold others."""
    depth = 0
    while place < len(expression):
        char = expression[place]
        if char == "\\":
            place += 1
        elif char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
            if depth == 0:
                return place + 1
        place += 1
    return place


def _too_much(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} has {what}; {_ADVICE}")


def longest_piece(path: Path, raw: bytes) -> int:
    """Bytes of the longest piece of a SentencePiece model; 0 where it is none.

    What transformers makes of a model takes a time of the square of a piece's length.
    """
    longest = place = 0
    try:
        while place < len(raw):
            tag, place = _varint(raw, place)
            if tag & 7 == 0:
                _, place = _varint(raw, place)
                continue
            if tag & 7 != 2:
                place += {1: 8, 5: 4}[tag & 7]
                continue
            size, place = _varint(raw, place)
            if tag >> 3 == 1:  # a piece: its text, score and type
                longest = max(longest, size)
            place += size
    except (IndexError, KeyError):
        return longest
    return longest


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128 or shift > 63:
            return value, place


def check_vocabulary(path: Path, raw: bytes) -> None:
    """Raises CheckpointError for a vocabulary with a token that takes too long to convert."""
    longest = 0
    if path.suffix == ".json":
        try:
            content = json.loads(raw)
        except (ValueError, RecursionError):
            return  # transformers says what is wrong
        names: Sequence[Any] = list(content) if isinstance(content, dict) else []
        longest = max(map(len, names), default=0)
    elif ".model" in path.name:
        longest = longest_piece(path, raw)
    elif path.suffix == ".txt":
        longest = max(map(len, raw.split(b"\n")), default=0)
    if longest > _MOST_TOKEN_CHARACTERS:
        raise _too_much(path, f"a token of more than {_MOST_TOKEN_CHARACTERS:,} characters")
