"""Text -> token ids: a checkpoint's tokenizer.json, with truncation that is counted."""

import logging
import re
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import tokenizers
from tokenizers import models, normalizers

from bytetx.checkpoint.convert_tokenizer import (
    convert_python_class,
    convert_vocabulary,
    has_vocabulary,
    refuse_python_class,
)
from bytetx.checkpoint.python_tokenizers import OPTIONS, PythonBackend
from bytetx.checkpoint.side_files import MAX_TOKENIZER_BYTES, TEXT, read_bytes, read_json
from bytetx.checkpoint.text_prefix import PrefixFinder
from bytetx.checkpoint.tokenizer_config import read_tokenizer_config, special_token
from bytetx.checkpoint.tokenizer_limits import check_raw_tokenizer, check_tokenizer
from bytetx.checkpoint.tokenizer_options import (
    as_llama,
    class_name,
    contradiction,
    has_token_types,
)
from bytetx.checkpoint.word_pieces import WordPieces
from bytetx.errors import CheckpointError
from bytetx.ops import host

logger = logging.getLogger("bytetx")

Text = str | tuple[str, str]  # one text or a pair

# The library holds Python's lock while it reads one text, or decodes one list of ids; its calls for
# batches do not, and cost a little more. A text of so many characters takes about a millisecond.
_MAX_LOCKED_CHARACTERS = 4096
_MORE = 32  # tokens beyond those that are kept, which a cut inside a word may change
_MOST_LIMITED = 4  # copies with limits of their own that are kept; each holds the vocabulary


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of several texts, special tokens included, concatenated.

    token_ids: int32 [total_tokens].  seqlens: int32 [num_texts].  is_truncated: bool [num_texts].
    """

    token_ids: np.ndarray
    seqlens: np.ndarray
    is_truncated: np.ndarray


def flatten_int_lists(lists: Sequence[list[int]], *, total: int) -> np.ndarray | None:
    """int32 [total], the numbers behind one another; None where one is no int or beyond int32.

    total: the sum of the lists' lengths.  There is no loop in Python over what is in them.
    """
    flatten = getattr(host.core_modules["cpu"], "flatten_int_lists", None)
    if flatten is not None:
        flat = np.empty(total, dtype=np.int32)
        return flat if flatten(list(lists), flat.ctypes.data, total) else None
    if any(type(number) is not int for numbers in lists for number in numbers[:1]):
        return None  # an array would take True for 1
    numbers = array("i")
    try:
        for each in lists:
            numbers.fromlist(each)
    except (TypeError, OverflowError):
        return None
    return np.array(numbers, dtype=np.int32, copy=None)


@dataclass(frozen=True, slots=True)
class TokenizerState:
    """The parts of a tokenizer of single texts, beside the library's own; see Tokenizer."""

    name: str
    max_tokens: int
    encodes_special_tokens: bool
    has_token_types: bool


class Tokenizer:
    """A checkpoint's tokenizer; never pads, and cuts nothing unless it is asked to.

    max_tokens: the most tokens of one sequence, special tokens included.
    skipped_id: the token that the model does not read; None where it reads all.
    """

    skipped_id: int | None = None

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        max_tokens: int,
        config: Mapping[str, Any],
        do_lower_case: bool = False,
        name: str = "the tokenizer",
        python: PythonBackend | None = None,
    ):
        """config: of read_tokenizer_config.  name: of its file, for errors.

        python: what the backend was made of, where it is partly Python code.
        """
        self.name, self._python = name, python
        backend.no_padding()
        # What is cut off comes back as `overflowing`: that is how a text that is too long is found.
        backend.enable_truncation(
            max_tokens, strategy="longest_first", direction=config.get("truncation_side", "right")
        )
        if do_lower_case:
            _lower_case(backend)
        self._use(backend, max_tokens)
        self.unk_token_id = self._special_id(config, "unk_token")
        self.mask_token_id = self._special_id(config, "mask_token")
        self.pad_token_id = self._special_id(config, "pad_token")
        self.eos_token_id = self._special_id(config, "eos_token")
        frame = ("cls_token", "sep_token", "bos_token", "eos_token", "pad_token")
        frame_ids = (self._special_id(config, name) for name in frame)
        self.frame_ids = {token_id for token_id in frame_ids if token_id is not None}
        self.has_token_types = _has_token_types(config)
        # Added tokens that no text of a caller may write; None: those in the chat template.
        self.chat_control_tokens: Sequence[str] | None = config.get("chat_control_tokens")
        # Copies share them. Callers choose strides: only the latest are kept.
        self._limited = lru_cache(_MOST_LIMITED)(self._make_limited)
        self._unlimited = lru_cache(1)(self._make_unlimited)
        self._cleans_spaces = bool(config.get("clean_up_tokenization_spaces", False))
        self.encode(["", ("", "")])  # a post-processor that names unknown tokens fails here

    def _use(
        self,
        backend: tokenizers.Tokenizer,
        max_tokens: int,
        *,
        word_pieces: WordPieces | None = None,
    ) -> None:
        """Sets the backend, which is not changed without another call: prefixes and word pieces
        depend on it.

        word_pieces: of a backend that differs in its limit only, not in the side that is cut.
        """
        self.backend, self.max_tokens = backend, max_tokens
        self._prefixes = PrefixFinder(backend, max_tokens=max_tokens)
        self._word_pieces = WordPieces(backend) if word_pieces is None else word_pieces

    def limited(
        self,
        max_tokens: int,
        *,
        stride: int = 0,
        direction: Literal["left", "right"] | None = None,
    ) -> "Tokenizer":
        """The same tokenizer for texts of at most so many tokens; the latest are kept.

        stride: tokens of a cut text that the next of its overflowing encodings has, too.
        direction: the side that is cut off; None is the checkpoint's.
        """
        truncation = self.backend.truncation
        assert truncation is not None  # the constructor enabled it
        own = truncation["max_length"], truncation["stride"], truncation["direction"]
        key = min(max_tokens, self.max_tokens), stride, direction or own[2]
        if key == own:
            return self
        return self._limited(*key)

    def _make_limited(self, max_tokens: int, stride: int, direction: str) -> "Tokenizer":
        limited, backend = copy(self), self._copied_backend()
        backend.enable_truncation(
            max_tokens, stride=stride, strategy="longest_first", direction=direction
        )
        own = self.backend.truncation
        is_same_side = own is not None and own["direction"] == direction
        limited._use(backend, max_tokens, word_pieces=self._word_pieces if is_same_side else None)
        return limited

    def untruncated(self) -> "Tokenizer":
        """The same tokenizer without a limit; made once, and kept."""
        return self._unlimited()

    def _make_unlimited(self) -> "Tokenizer":
        unlimited, backend = copy(self), self._copied_backend()
        backend.no_truncation()
        unlimited._use(backend, sys.maxsize, word_pieces=self._word_pieces)
        return unlimited

    def with_special_tokens(self, tokens: Sequence[str]) -> "Tokenizer":
        """A copy without a limit that has more special tokens; their ids follow the others."""
        other, backend = copy(self), self._copied_backend()
        backend.no_truncation()
        added = [tokenizers.AddedToken(text, special=True, normalized=False) for text in tokens]
        backend.add_special_tokens(added)
        other._use(backend, sys.maxsize)
        return other

    def _copied_backend(self) -> tokenizers.Tokenizer:
        if self._python is None:
            backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        else:
            backend = self._python.backend()
            backend.normalizer = self.backend.normalizer
            for token in self.backend.get_added_tokens_decoder().values():
                add = backend.add_special_tokens if token.special else backend.add_tokens
                add([token])  # those that a copy has already stay as they are
        backend.encode_special_tokens = self.backend.encode_special_tokens  # not in the text
        return backend

    def state(self) -> TokenizerState | None:
        """With it another process reads the same ids; None where code reads a part of them."""
        if self._python is not None or type(self) is not Tokenizer:
            return None
        return TokenizerState(
            self.name,
            self.max_tokens,
            bool(self.backend.encode_special_tokens),
            self.has_token_types,
        )

    @classmethod
    def from_state(cls, backend: str, state: TokenizerState) -> "Tokenizer":
        """A tokenizer of the same ids, for texts alone.  backend: JSON, of backend.to_str()."""
        library = tokenizers.Tokenizer.from_str(backend)
        truncation = library.truncation
        config = {} if truncation is None else {"truncation_side": truncation["direction"]}
        tokenizer = cls(library, max_tokens=state.max_tokens, config=config, name=state.name)
        library.encode_special_tokens = state.encodes_special_tokens
        tokenizer._use(library, state.max_tokens)
        tokenizer.has_token_types = state.has_token_types
        return tokenizer

    @property
    def num_special_tokens(self) -> int:
        """Tokens that are added to a single text."""
        return int(self.backend.num_special_tokens_to_add(False))

    def add_prefix(self, prefix: str) -> None:
        """Makes a prefix that is in the vocabulary one token of the texts that begin with it.

        Either the whole prefix or its first word is such a token; other prefixes are plain text.
        """
        for token in dict.fromkeys([prefix, *prefix.split(None, 1)[:1]]):
            if token and self.backend.token_to_id(token) is not None:
                if self.encode_plain(token).tokens != [token]:
                    added = tokenizers.AddedToken(token, normalized=False, special=True)
                    self.backend.add_special_tokens([added])
                    self._use(self.backend, self.max_tokens)
                return

    def encode(
        self, texts: Sequence[Text], *, with_offsets: bool = False
    ) -> list[tokenizers.Encoding]:
        """One encoding a text or pair, cut to max_tokens; `overflowing` holds what was cut.

        with_offsets: also character offsets, which cost about a third more time.
        """
        encode = self.backend.encode_batch if with_offsets else self.backend.encode_batch_fast
        return _checked(self.name, lambda: encode(list(texts)))

    def encode_beginnings(
        self, texts: Sequence[Text], *, with_offsets: bool = False
    ) -> list[tokenizers.Encoding]:
        """As `encode`, but `overflowing` says only whether something was cut, not all of what.

        Of a text far beyond max_tokens no more is tokenised than is needed to know its first
        max_tokens, where the tokenizer allows that.
        """
        most = self._prefixes.most_characters
        if any(not isinstance(text, str) and max(map(len, text)) > most for text in texts):
            known: dict[str, str] = {}
            texts = [
                text if isinstance(text, str) else self._cut_pair(text, known) for text in texts
            ]
        if max(map(len, texts), default=0) <= most:
            return self.encode(texts, with_offsets=with_offsets)
        found = [self._prefixes.find(text) for text in texts]
        given = [
            text if prefix is None else prefix for text, prefix in zip(texts, found, strict=True)
        ]
        encodings = self.encode(given, with_offsets=with_offsets)
        for place, prefix in enumerate(found):
            text = texts[place]
            # Without overflow the beginning may be all there is before the next token.
            while prefix is not None and not encodings[place].overflowing:
                prefix = self._prefixes.find(text, longer_than=len(prefix))
                longer = text if prefix is None else prefix
                encodings[place] = self.encode([longer], with_offsets=with_offsets)[0]
        return encodings

    def _cut_pair(self, pair: tuple[str, str], known: dict[str, str]) -> tuple[str, str]:
        """The pair with the beginnings of its long texts, which is cut to the same tokens.

        A beginning alone has more tokens than a pair may have.  known: beginnings of texts, for
        the query that many pairs share.
        """
        most = self._prefixes.most_characters
        if all(len(text) > most for text in pair):
            return self._cut_both(pair)
        place = int(len(pair[1]) > most)
        text = pair[place]
        if len(text) <= most:
            return pair
        other = [pair[1 - place]]
        if len(self.untruncated().encode(other)[0]) > self.max_tokens:  # which one is longer counts
            return self._cut_both(pair)
        if text not in known:
            prefix = self._prefixes.find(text)
            while prefix is not None and not self.encode([prefix])[0].overflowing:
                prefix = self._prefixes.find(text, longer_than=len(prefix))
            known[text] = self._first_tokens(text)[0] if prefix is None else prefix
        return (pair[0], known[text]) if place else (known[text], pair[1])

    def _cut_both(self, pair: tuple[str, str]) -> tuple[str, str]:
        """The beginnings of two long texts, of which the longer one stays the longer one."""
        (first, num_first), (second, num_second) = map(self._first_tokens, pair)
        more = (first, self._first_tokens(pair[1], more=_MORE)[0])
        if num_first > num_second:
            more = (self._first_tokens(pair[0], more=_MORE)[0], second)
        elif num_first == num_second:
            more = (first, second)
        backend = self.untruncated().backend
        lengths = [len(one) for one in backend.encode_batch_fast(more, add_special_tokens=False)]
        is_same = (lengths[0] > lengths[1]) == (num_first > num_second)
        return more if is_same else pair

    def _first_tokens(self, text: str, *, more: int = 0) -> tuple[str, int]:
        """(a beginning of a text with its first max_tokens tokens and some more, tokens of all).

        All of it is tokenised, but only once, and what is cut off makes no objects: the library
        gives every part of one text with every part of the other. Where the beginning alone would
        have other tokens, it is the whole text.
        """
        backend = self.untruncated().backend
        whole = backend.encode_batch([text], add_special_tokens=False)[0]
        place = self.max_tokens + _MORE + more
        end = whole.token_to_chars(place) if place < len(whole) else None
        if end is None:
            return text, len(whole)
        prefix = text[: end[1]]
        found = backend.encode_batch_fast([prefix], add_special_tokens=False)[0]
        is_same = (
            found.ids[: self.max_tokens] == [*whole.ids[: self.max_tokens]]
            and len(found) > self.max_tokens
        )
        return (prefix if is_same else text), len(whole)

    def encode_plain(self, text: str) -> tokenizers.Encoding:
        """A text that has its special tokens; `overflowing` holds what is beyond max_tokens.

        Raises UnicodeEncodeError where it holds half a surrogate pair.
        """
        text.encode("utf-8")  # what the backend raises differs from one version to the next
        if len(text) <= _MAX_LOCKED_CHARACTERS:
            return _checked(self.name, lambda: self.backend.encode(text, add_special_tokens=False))
        encode = self.backend.encode_batch_fast
        return _checked(self.name, lambda: encode([text], add_special_tokens=False)[0])

    def encode_all_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of texts that have their special tokens. Errors as of encode_plain."""
        for text in texts:
            text.encode("utf-8")
        encode = self.backend.encode_batch_fast
        found = _checked(self.name, lambda: encode(list(texts), add_special_tokens=False))
        return [encoding.ids for encoding in found]

    def encode_as_text(self, text: str) -> list[int]:
        """The token ids of a text in which no added token is found, special or not."""
        normalizer, pre_tokenizer = self.backend.normalizer, self.backend.pre_tokenizer
        if normalizer is not None:
            text = normalizer.normalize_str(text)
        words = [text]
        if pre_tokenizer is not None:
            words = [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in self.backend.model.tokenize(word)]

    def encode_ids(self, texts: Sequence[str]) -> Tokens:
        """Token ids alone, cut to max_tokens; by the native core where it has this tokenizer."""
        found = _checked(
            self.name, lambda: self._word_pieces.read(texts, max_tokens=self.max_tokens)
        )
        if found is None:
            return self.tokens(self.encode_beginnings(texts))
        tokens = Tokens(found.token_ids, found.seqlens, found.is_truncated)
        if not found.unread:
            return tokens
        others = self.tokens(self.encode_beginnings([texts[place] for place in found.unread]))
        return _inserted(tokens, others, found.unread)

    def tokens(self, encodings: Sequence[tokenizers.Encoding]) -> Tokens:
        """The token ids of encodings. What was cut is looked for where a text is at the limit."""
        seqlens = np.fromiter(map(len, encodings), dtype=np.int32, count=len(encodings))
        rows = [encoding.ids for encoding in encodings]
        token_ids = flatten_int_lists(rows, total=int(seqlens.sum()))
        if token_ids is None:
            raise CheckpointError(f"{self.name} gives token ids that need more than 32 bits")
        is_truncated = np.zeros(len(encodings), dtype=bool)
        for row in np.flatnonzero(seqlens >= self.max_tokens).tolist():
            is_truncated[row] = bool(encodings[row].overflowing)
        return Tokens(token_ids, seqlens, is_truncated)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text with its special tokens, cut to max_tokens."""
        return len(_checked(self.name, lambda: self.backend.encode(text)).ids)

    def token(self, token_id: int) -> str:
        return self.backend.id_to_token(token_id) or ""

    def join(self, tokens: Sequence[str]) -> str:
        """Text of tokens given as strings, by the tokenizer's decoder."""
        decoder = self.backend.decoder
        if decoder is None:
            return " ".join(tokens)
        text: str = _checked(self.name, lambda: decoder.decode(list(tokens)))
        return text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids, with the clean-up of spaces that the checkpoint asks for."""
        text = self.decode_plain(token_ids, skip_special_tokens=skip_special_tokens)
        if self._cleans_spaces and not isinstance(self.backend.model, tokenizers.models.BPE):
            for spaced, joined in _SPACE_RULES:
                text = text.replace(spaced, joined)
        return text

    def decode_plain(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids as the tokenizer's own decoder gives it."""
        ids, skips = list(token_ids), skip_special_tokens
        if len(ids) <= _MAX_LOCKED_CHARACTERS:
            return _checked(self.name, lambda: self.backend.decode(ids, skip_special_tokens=skips))
        decode = self.backend.decode_batch
        return _checked(self.name, lambda: decode([ids], skip_special_tokens=skips)[0])

    @property
    def is_word_aware(self) -> bool:
        """Whether tokens that continue a word carry a mark (WordPiece's ##)."""
        return bool(getattr(self.backend.model, "continuing_subword_prefix", None))

    def _special_id(self, config: Mapping[str, Any], name: str) -> int | None:
        token = special_token(config, name)
        return None if token is None else self.backend.token_to_id(token)


def load_tokenizer(
    folder: Path,
    *,
    max_positions: int,
    max_seq_length: int | None = None,
    do_lower_case: bool = False,
    adds_special_tokens: bool = True,
) -> Tokenizer | None:
    """The tokenizer of a checkpoint's folder, or None where it has none (token ids still run).

    max_positions: tokens that the model has positions for.  max_seq_length: the limit that
    sentence-transformers saved; it replaces the tokenizer's own model_max_length.
    adds_special_tokens: False leaves out those that frame a text.
    Raises CheckpointError where its files are damaged, or need transformers and it is missing.
    """
    path, config = folder / "tokenizer.json", read_tokenizer_config(folder)
    python, name = None, class_name(config, _model_config(folder))
    input_names: Sequence[str] | None
    if name in OPTIONS and has_vocabulary(folder):
        python = convert_python_class(folder, name)
        backend, input_names = python.backend(), python.input_names
        config = {**python.special_tokens, **config}
    elif path.is_file():
        backend, input_names = _follow_options(folder, read_backend(path), config)
    elif has_vocabulary(folder):
        converted = convert_vocabulary(folder)
        backend, input_names = converted.backend, converted.input_names
        config = {**converted.special_tokens, **config}
        check_tokenizer(folder, backend)
    else:
        return None
    _stop_sampling(folder, backend)
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    if input_names is not None:
        config.setdefault("model_input_names", list(input_names))
    if not adds_special_tokens:
        backend.post_processor = tokenizers.processors.Sequence([])
    elif _is_of_gte_qwen2(config):
        _add_ends(backend, config)
    limit = max_seq_length or config.get("model_max_length") or max_positions
    max_tokens = min(int(limit), max_positions)
    return _checked(
        str(path),
        lambda: Tokenizer(
            backend,
            max_tokens=max_tokens,
            config=config,
            do_lower_case=do_lower_case,
            name=str(path),
            python=python,
        ),
    )


def _model_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return read_json(path, {"model_type": TEXT, "tokenizer_class": TEXT}) if path.is_file() else {}


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer of a tokenizer.json, without dropout.

    Raises CheckpointError where it is damaged, or would take a text too long.
    """
    raw = read_bytes(path, max_bytes=MAX_TOKENIZER_BYTES)
    check_raw_tokenizer(path, raw)
    _check_merges(path, raw)
    backend = _checked(str(path), lambda: tokenizers.Tokenizer.from_buffer(raw))
    check_tokenizer(path, backend)
    _stop_sampling(path.parent, backend)
    return backend


def _follow_options(
    folder: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, Sequence[str] | None]:
    """The tokenizer that the class of transformers makes of tokenizer.json and its own options, and
    what it gives a model, where that is known.

    backend: that of tokenizer.json, which nearly always is the same.
    """
    model = _model_config(folder)
    refuse_python_class(folder, config, model)
    name = class_name(config, model)
    if config.get("auto_map"):  # a class of the checkpoint's own: nothing is known of its options
        return backend, None
    added = folder / "added_tokens.json"
    tokens = read_json(added) if added.is_file() and "added_tokens_decoder" not in config else {}
    backend.no_truncation()
    backend.no_padding()
    where = str(folder / "tokenizer.json")
    differs = _checked(where, lambda: contradiction(backend, config, name, tokens))
    if differs is not None and name == "Llama" and isinstance(backend.model, models.BPE):
        made = _checked(where, lambda: as_llama(backend, config))
        if _checked(where, lambda: contradiction(made, config, name, tokens)) is None:
            backend, differs = made, None
    if differs is None:
        return backend, None if has_token_types(name) else ("input_ids", "attention_mask")
    reason = f"{folder / 'tokenizer_config.json'} asks for {differs}, tokenizer.json does not"
    converted = convert_vocabulary(folder, reason=reason)
    return converted.backend, converted.input_names


def _stop_sampling(folder: Path, backend: tokenizers.Tokenizer) -> None:
    """Switches off a BPE model's dropout, which is for training: with it, the same text has other
    ids at each call, and no two results are equal."""
    dropout = getattr(backend.model, "dropout", None)
    if dropout:
        logger.warning(
            "%s: the tokenizer's dropout of %g, which makes ids random, is for training and is "
            "switched off",
            *(folder, dropout),
        )
        backend.model.dropout = None


def _is_of_gte_qwen2(config: Mapping[str, Any]) -> bool:
    """Whether the tokenizer is GTE-Qwen2's, whose own code, which never runs, adds tokens to each
    text that tokenizer.json does not name."""
    auto_map = config.get("auto_map")
    codes = auto_map.get("AutoTokenizer") if isinstance(auto_map, Mapping) else auto_map
    names = codes if isinstance(codes, list | tuple) else [codes]
    return any(
        str(name).rpartition("--")[2].startswith("tokenization_qwen.Qwen2Tokenizer")
        for name in names
    )


def _add_ends(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Puts the tokens that add_bos_token and add_eos_token ask for around every text."""
    single, pair, special = ["$A:0"], ["$B:1"], []
    for kind in ("bos", "eos"):
        token = special_token(config, f"{kind}_token")
        token_id = None if token is None else backend.token_to_id(token)
        if token is None or token_id is None or not config.get(f"add_{kind}_token"):
            continue
        place = 0 if kind == "bos" else 1
        single.insert(place * len(single), f"{token}:0")
        pair.insert(place * len(pair), f"{token}:1")
        special.append((token, token_id))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, pair=[*single, *pair], special_tokens=special
    )


def _check_merges(path: Path, raw: bytes) -> None:
    """Raises CheckpointError for merges that make tokenizers abort the process.

    Where a BPE model has a prefix of continued words, it cuts so many bytes off the second part of
    each merge. Hardly any model has one, and the file is read here for those alone.
    """
    if b'"merges"' not in raw or not re.search(rb'"continuing_subword_prefix"\s*:\s*"[^"]', raw):
        return
    content = read_json(path, max_bytes=MAX_TOKENIZER_BYTES).get("model")
    model = content if isinstance(content, Mapping) else {}
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        second = parts[1] if isinstance(parts, list) and len(parts) == 2 else None
        if not isinstance(second, str):
            continue  # tokenizers says what is wrong
        cut = second.encode("utf-8", "surrogatepass")[: len(prefix)]
        if len(cut) < len(prefix) or not cut.isascii():
            raise CheckpointError(
                f"{path} cannot be used as a tokenizer: the merge {merge!r:.120} lacks the "
                f"continuing_subword_prefix {prefix!r:.120}"
            )


def _inserted(tokens: Tokens, others: Tokens, places: Sequence[int]) -> Tokens:
    """Tokens whose texts at `places` have none yet, with those of the others."""
    seqlens, is_truncated = tokens.seqlens.copy(), tokens.is_truncated.copy()
    seqlens[places], is_truncated[places] = others.seqlens, others.is_truncated
    starts = np.cumsum(tokens.seqlens)[places]
    rows = np.split(others.token_ids, np.cumsum(others.seqlens)[:-1])
    between = np.split(tokens.token_ids, starts)
    ids = [between[0], *chain.from_iterable(zip(rows, between[1:], strict=True))]
    return Tokens(np.concatenate(ids), seqlens, is_truncated)


T = TypeVar("T")


def _checked(name: str, make: Callable[[], T]) -> T:
    """Return what `make` gives. CheckpointError for whatever tokenizers raises: it has no error
    class of its own, and a damaged file can make its Rust code panic, which is no Exception."""
    try:
        return make()
    except (CheckpointError, UnicodeEncodeError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise CheckpointError(f"{name} cannot be used as a tokenizer: {error}") from error


def _has_token_types(config: Mapping[str, Any]) -> bool:
    """Whether a pair's second text gets token type 1, as the tokenizer's own class would do."""
    input_names = config.get("model_input_names")
    if input_names is None:
        # The one class that leaves token types out unless its config names them.
        return config.get("tokenizer_class") != "TokenizersBackend"
    return "token_type_ids" in input_names


def _lower_case(backend: tokenizers.Tokenizer) -> None:
    """Lowercases ahead of the tokenizer's own normalizer, unless that one already does."""
    own = backend.normalizer
    if own is None:
        backend.normalizer = normalizers.Lowercase()
    elif not (isinstance(own, normalizers.Lowercase) or getattr(own, "lowercase", False)):
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), own])


# Hugging Face's clean-up of English text after decoding WordPiece tokens.
_SPACE_RULES = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
