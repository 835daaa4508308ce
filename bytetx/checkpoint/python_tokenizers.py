"""Tokenizers that transformers has as Python code alone: BertJapanese with MeCab, and PhoBERT.

The class of transformers reads the files and splits texts, inside of a pre-tokenizer; the library
tokenizers does all else: added tokens, ids, the tokens around a text, limits and characters.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bytetx.checkpoint.side_files import read_json
from bytetx.errors import CheckpointError

# PhoBERT's words.
_WORDS = re.compile(r"\S+\n?")
_SUFFIX = "</w>"  # ends the last character of a word in PhoBERT's merges
_NONE = "\0"  # in no token
# By class: the names of tokenizer_config.json that its constructor takes.
OPTIONS: Mapping[str, Sequence[str]] = {
    "BertJapanese": (
        *("do_lower_case", "do_subword_tokenize", "do_word_tokenize", "mecab_kwargs"),
        *("never_split", "subword_tokenizer_type", "word_tokenizer_type"),
    ),
    "Phobert": (),
}
_DICTIONARIES = ("ipadic", "unidic", "unidic_lite")

# (the token, its first and last character in the text)
Piece = tuple[str, int, int]


class WordSplitter(Protocol):
    """A pre-tokenizer that is Python code, as tokenizers calls it."""

    def pre_tokenize(self, text: tokenizers.PreTokenizedString) -> None: ...


@dataclass(frozen=True, slots=True)
class PythonBackend:
    """splitter: makes tokens of a text.  plain: the backend without it, as JSON.

    input_names: what the tokenizer's class gives a model.  special_tokens: by their names.
    """

    splitter: WordSplitter
    plain: str
    input_names: tuple[str, ...]
    special_tokens: Mapping[str, str]

    def backend(self) -> tokenizers.Tokenizer:
        made = tokenizers.Tokenizer.from_str(self.plain)
        made.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(self.splitter)
        return made


def check_options(folder: Path, name: str) -> None:
    """Raises CheckpointError for what is not run of a class of OPTIONS."""
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    if name != "BertJapanese":
        return
    words = config.get("word_tokenizer_type", "basic")
    parts = config.get("subword_tokenizer_type", "wordpiece")
    if words != "mecab" and config.get("do_word_tokenize", True):
        raise CheckpointError(
            f"{path}: word_tokenizer_type {words!r:.120} of BertJapaneseTokenizer is not "
            "supported; bytetx runs mecab"
        )
    if parts not in ("wordpiece", "character"):
        raise CheckpointError(
            f"{path}: subword_tokenizer_type {parts!r:.120} of BertJapaneseTokenizer is not "
            "supported; bytetx runs wordpiece and character"
        )
    mecab = config.get("mecab_kwargs") or {}
    if not isinstance(mecab, Mapping):
        raise CheckpointError(f"{path}: mecab_kwargs must be a table, got {mecab!r:.120}")
    given = {key: value for key, value in mecab.items() if value is not None}
    dictionary = given.pop("mecab_dic", "unidic_lite")
    if dictionary not in _DICTIONARIES:
        raise CheckpointError(
            f"{path}: mecab_dic must be one of {', '.join(_DICTIONARIES)}, got {dictionary!r:.120}"
        )
    for key, value in given.items():
        if key != "normalize_text" or not isinstance(value, bool):
            # mecab_option is a command line, which names files to read and to write.
            raise CheckpointError(f"{path}: mecab_kwargs.{key:.60} {value!r:.120} is not supported")


def python_backend(folder: Path, name: str, made: Any) -> PythonBackend:
    """The backend of a tokenizer of transformers.  name: its class, one of OPTIONS.

    Raises CheckpointError where its vocabulary gives other ids than the class does.
    """
    vocabulary = made.get_vocab()
    added = made.added_tokens_decoder
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=made.unk_token))
    for _, token in sorted(added.items()):
        if token.special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])
    if any(backend.token_to_id(str(token)) != token_id for token_id, token in added.items()):
        raise CheckpointError(f"{folder}: an added token has the id of another one")
    cls, sep = ((token, vocabulary[token]) for token in (made.cls_token, made.sep_token))
    if name == "Phobert":
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls[0]} $A {sep[0]}",
            pair=f"{cls[0]}:0 $A:0 {sep[0]}:0 {sep[0]}:0 $B:0 {sep[0]}:0",
            special_tokens=[cls, sep],
        )
        # A space before each token, and none behind the mark of one that goes on.
        backend.decoder = decoders.Sequence(
            [
                decoders.WordPiece(prefix=_NONE, cleanup=False),
                decoders.Fuse(),
                decoders.Replace("@@ ", ""),
            ]
        )
        pieces = _MergedWords(made.bpe_ranks).pieces
    else:
        backend.post_processor = processors.BertProcessing(sep, cls)
        backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
        words = _JapaneseWords(made)
        if words.normalizes:
            backend.normalizer = normalizers.NFKC()
        pieces = words.pieces
    splitter = _Splitter(pieces, vocabulary, made.unk_token)
    return PythonBackend(
        splitter, backend.to_str(), tuple(made.model_input_names), special_tokens_of(made)
    )


def special_tokens_of(made: Any) -> dict[str, str]:
    """The special tokens of a tokenizer of transformers, its class's own among them, by name."""
    found = made.special_tokens_map.items()
    return {name: str(token) for name, token in found if isinstance(token, str)}


@dataclass(frozen=True, slots=True)
class _Splitter:
    """pieces: the tokens of a text.  unknown: the token for those not in the vocabulary."""

    pieces: Callable[[str], Iterator[Piece]]
    vocabulary: Mapping[str, int]
    unknown: str

    def pre_tokenize(self, text: tokenizers.PreTokenizedString) -> None:
        text.split(self._split)

    def _split(
        self, _: int, text: tokenizers.NormalizedString
    ) -> list[tokenizers.NormalizedString]:
        return [self._token(text, *piece) for piece in self.pieces(str(text.normalized))]

    def _token(
        self, text: tokenizers.NormalizedString, token: str, start: int, stop: int
    ) -> tokenizers.NormalizedString:
        """The token, with the place of its characters."""
        own = text[min(start, stop - 1) : stop] if stop else text[:1]
        assert own is not None  # it lies in the text
        found = str(own.normalized)
        is_unknown = token == self.unknown or token not in self.vocabulary
        if is_unknown and found not in self.vocabulary:
            return own  # it is unknown as it stands, too
        if found not in token and found.lower() in token:
            own.lowercase()
            found = str(own.normalized)
        before, _, behind = token.partition(found)
        if before + found + behind == token:
            # An empty text would lose the place of a single character.
            if before:
                own.prepend(before)
            if behind:
                own.append(behind)
        else:
            own.replace(found, token)
        return own


@dataclass(slots=True)
class _MergedWords:
    """PhoBERT's words, by the merges that its class has read.

    The library merges in the same order as the class, whose time grows with the square of a word.
    """

    ranks: Mapping[tuple[str, ...], int]
    _model: models.BPE = field(init=False)

    def __post_init__(self) -> None:
        pairs = [pair for pair in sorted(self.ranks, key=self.ranks.__getitem__) if len(pair) == 2]
        known = {"": 0}
        for first, second in pairs:
            for text in (first, second, first + second):
                known.setdefault(text, len(known))
        unknown = _NONE
        known.setdefault(unknown, len(known))
        merges = [(first, second) for first, second in pairs]
        self._model = models.BPE(
            vocab=known, merges=merges, unk_token=unknown, end_of_word_suffix=_SUFFIX
        )

    def pieces(self, text: str) -> Iterator[Piece]:
        for word in _WORDS.finditer(text):
            raw, place = word.group().encode(), word.start()
            found = [token.offsets for token in self._model.tokenize(word.group())]
            for start, stop in found:
                own = raw[start:stop].decode()
                mark = "" if stop == len(raw) else "@@"
                yield own + mark, place, place + len(own)
                place += len(own)


class _JapaneseWords:
    """Words by MeCab, and their parts."""

    def __init__(self, made: Any):
        """made: a BertJapaneseTokenizer of transformers."""
        self._words = made.word_tokenizer if made.do_word_tokenize else None
        self._parts = made.subword_tokenizer if made.do_subword_tokenize else None
        self._lowers = self._words is not None and bool(self._words.do_lower_case)
        self._kept = frozenset(made.all_special_tokens)
        self.normalizes = self._words is not None and bool(self._words.normalize_text)
        if self._words is not None:
            self._words.do_lower_case = False  # the words stand in the text as they are
            self._kept |= frozenset(self._words.never_split)
        self._lock = Lock()  # MeCab's tagger is for one thread

    def pieces(self, text: str) -> Iterator[Piece]:
        place = 0
        for word in self._split(text):
            start = text.find(word, place)
            stop = start + len(word)
            if start < 0:  # it was normalised
                start = stop = place
            place = stop
            own = word.lower() if self._lowers and word not in self._kept else word
            yield from self._placed(own, start, stop)

    def _split(self, text: str) -> Sequence[str]:
        if self._words is None:
            return [text]
        with self._lock:
            found: list[str] = self._words.tokenize(text)
        return found

    def _placed(self, word: str, start: int, stop: int) -> Iterator[Piece]:
        """The parts of a word at characters start to stop."""
        parts = [word] if self._parts is None else self._parts.tokenize(word)
        sizes = [
            len(part) - 2 * (place > 0 and part[:2] == "##") for place, part in enumerate(parts)
        ]
        if len(parts) == stop - start:
            sizes = [1] * len(parts)
        fits = sum(sizes) == stop - start
        for part, size in zip(parts, sizes, strict=True):
            end = start + size if fits else stop
            yield part, start, end
            start = end if fits else start
