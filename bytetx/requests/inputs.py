"""Inputs to requests: strings, pairs and token ids, each checked separately."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol, TypeGuard, cast

import numpy as np
import tokenizers

from bytetx.arguments import text_fault
from bytetx.checkpoint.tokenizer import Text, Tokenizer, Tokens
from bytetx.encode.prefixes import MOST_SHARED
from bytetx.encode.request import Alignment, Failure, Requests, Window
from bytetx.errors import InputError, OptionError, TooLongError
from bytetx.requests.chunks import Chunk, cut_encoding
from bytetx.requests.token_ids import Errors, Ids, cut_ids, flatten_ids, no_tokens
from bytetx.requests.token_ids import check_range as check_ids

# What one input may be; a pair is two strings, token ids are taken as they are.
Input = Text | Ids

_TOKENS_PER_CHARACTER = 0.25  # as in English; only a guess to size the first window
_MIN_DENSITY, _MAX_DENSITY = 1 / 16, 4.0  # so that no window is much larger than it should be


class InputSizes(Protocol):
    """The numbers of a ModelSpec that a reader asks for."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def num_token_types(self) -> int: ...
    @property
    def num_layers(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Expansion:
    """Copies of a token behind an input that has fewer than `length` tokens.

    is_seen: whether the input's own tokens see them.
    """

    token_id: int
    length: int
    is_seen: bool


@dataclass(slots=True)
class InputReader:
    """Turns windows of inputs into requests. Threads may share one that has read the first window.

    prompt: put before every string; token ids get none.  prompts: that of each text, in its place.
    truncate: cut what is too long instead of failing it.  with_alignment: keep offsets and words of
    each token.  keeps_errors: a bad input becomes a Failure instead of an InputError that is
    raised.  needs_mask: a text without the tokenizer's mask token is a bad input.
    max_tokens: of token ids, where that is fewer than the model takes.  expansion: tokens that are
    appended to each input.  cuts: a text beyond the tokenizer's limit becomes several rows, each of
    which shares `stride` tokens with the next one.
    max_chunk_tokens: that the rows of one text may have together; a text with more is a bad input.
    allows_no_tokens: a text without tokens is no error.
    """

    spec: InputSizes
    tokenizer: Tokenizer | None
    prompt: str = ""
    truncate: bool = False
    with_alignment: bool = False
    keeps_errors: bool = False
    needs_mask: bool = False
    max_tokens: int | None = None
    expansion: Expansion | None = None
    cuts: bool = False
    stride: int = 0
    max_chunk_tokens: int | None = None
    allows_no_tokens: bool = False
    prompts: Sequence[str] | None = None
    _prompt_tokens: dict[str, int] = field(default_factory=dict)
    _tokens_per_character: float = _TOKENS_PER_CHARACTER

    def estimate_tokens(self, item: Input) -> int:
        """A guess of an input's tokens without tokenising it; at least 1, whatever was given."""
        if isinstance(item, str):
            tokens = int(len(item) * self._tokens_per_character) + 1
            return self._with_overlaps(tokens) if self.cuts else tokens
        if _is_pair(item):
            return int((len(item[0]) + len(item[1])) * self._tokens_per_character) + 1
        try:
            return len(item) or 1
        except (TypeError, OverflowError):  # no input at all, or range(10**30); read() names it
            return 1

    def estimate_work(self, item: Input, before: Input) -> int:
        """The same, less what it has in common with the input before it; at least 1."""
        return max(int(self.estimate_tokens(item) * (1 - _common_part(item, before))), 1)

    def _with_overlaps(self, num_tokens: int) -> int:
        """Tokens of all chunks of a text."""
        if self.tokenizer is None:
            return num_tokens
        room = self.tokenizer.max_tokens - self.tokenizer.num_special_tokens
        return num_tokens if num_tokens <= room else num_tokens * room // (room - self.stride)

    def read(self, inputs: Sequence[object], start: int) -> Window:
        """Inputs as columns, numbered from `start`; strings are tokenised in one call.

        What is no Input is an error of its text.
        """
        errors: Errors = {}
        texts, ids = _by_kind(inputs, start)
        pieces = []
        if texts:
            pieces.append(self.read_texts(texts, errors))
            if start == 0:
                self._learn_density(texts.values(), pieces[0].total_tokens)
        if ids:
            pieces.append(self.read_ids(ids, errors))
        requests = pieces[0] if len(pieces) == 1 else _in_order(pieces)
        if self.expansion is not None:
            requests = _expanded(requests, self.expansion)
        if self.needs_mask:
            self._check_masks(requests, errors)
        if not errors:
            return Window(start, len(inputs), requests)
        if not self.keeps_errors:
            raise errors.pop(min(errors))  # else its frames, of which one has `errors`, hold it
        requests = requests.take(np.flatnonzero(~np.isin(requests.indices, list(errors))))
        failures = [Failure(index, errors[index]) for index in sorted(errors)]
        return Window(start, len(inputs), requests, failures)

    def read_texts(self, texts: Mapping[int, Text], errors: Errors) -> Requests:
        """Columns of strings and pairs; the rows in `errors` among them are to be dropped."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            errors.update((index, _no_tokenizer(index)) for index in texts)
            return no_requests()
        given = self.checked_texts(texts, errors)
        if not given:
            return no_requests()
        types = alignments = None
        is_pair: Sequence[bool] = ()
        if set(map(type, given.values())) != {str}:
            is_pair = [not isinstance(text, str) for text in given.values()]
        if self.cuts:
            return self._read_chunks(given, tokenizer, errors)
        if self.with_alignment or any(is_pair):
            items = list(given.values())
            encodings = tokenizer.encode_beginnings(items, with_offsets=self.with_alignment)
            tokens = tokenizer.tokens(encodings)
            if any(is_pair) and self.spec.num_token_types > 1 and tokenizer.has_token_types:
                types = _type_ids(encodings, tokens, is_pair)
            if self.with_alignment:
                alignments = list(map(_alignment, encodings, (texts[index] for index in given)))
        else:
            tokens = tokenizer.encode_ids(cast("list[str]", list(given.values())))
        prompt_tokens = None
        if self.prompt or self.prompts is not None:
            prompt_tokens = self._count_prompt_tokens(given, tokenizer)
        requests = Requests(
            np.fromiter(given, dtype=np.int64, count=len(given)),
            tokens.seqlens,
            tokens.token_ids,
            tokens.is_truncated,
            types,
            prompt_tokens,
            alignments,
        )
        return self._checked(requests, tokenizer, errors)

    def _read_chunks(
        self,
        given: Mapping[int, Text],
        tokenizer: Tokenizer,
        errors: Errors,
    ) -> Requests:
        """A row for each chunk of each text; a pair that is too long is an error."""
        whole = [text for text in given.values() if isinstance(text, str)]
        encodings = iter(tokenizer.untruncated().encode(whole, with_offsets=self.with_alignment))
        indices: list[int] = []
        numbers: list[int] = []
        rows: list[Chunk] = []
        types: dict[int, np.ndarray] = {}  # by row
        for index, text in given.items():
            try:
                if isinstance(text, str):
                    chunks = cut_encoding(
                        next(encodings),
                        text=text if self.with_alignment else None,
                        index=index,
                        max_tokens=tokenizer.max_tokens,
                        stride=self.stride,
                        most=self.max_chunk_tokens,
                    )
                else:
                    chunk, types[len(rows)] = self._whole_pair(index, text, tokenizer)
                    chunks = [chunk]
            except TooLongError as error:
                errors[index] = error.with_traceback(None)
                continue
            rows += chunks
            indices += [index] * len(chunks)
            numbers += range(len(chunks))
        if not rows:
            return no_requests()
        seqlens = np.fromiter((len(row.token_ids) for row in rows), np.int32, len(rows))
        token_types = prompt_tokens = None
        if types and self.spec.num_token_types > 1 and tokenizer.has_token_types:
            columns = (
                types.get(place, np.zeros(length, dtype=np.int32))
                for place, length in enumerate(seqlens.tolist())
            )
            token_types = np.concatenate(list(columns))
        chunk_numbers = np.array(numbers, dtype=np.int32)
        if self.prompt or self.prompts is not None:  # it is in a text's first chunk
            num_tokens = self._count_prompt_tokens(indices, tokenizer)
            prompt_tokens = np.where(chunk_numbers == 0, num_tokens, 0).astype(np.int32)
        requests = Requests(
            np.array(indices, dtype=np.int64),
            seqlens,
            np.concatenate([row.token_ids for row in rows]),
            np.zeros(len(rows), dtype=bool),
            token_types,
            prompt_tokens,
            [row.alignment for row in rows if row.alignment is not None] or None,
            chunks=chunk_numbers,
        )
        return self._checked(requests, tokenizer, errors)

    def _whole_pair(
        self, index: int, pair: tuple[str, str], tokenizer: Tokenizer
    ) -> tuple[Chunk, np.ndarray]:
        """(the one row of a pair, int32 types of its tokens)"""
        encodings = tokenizer.encode_beginnings([pair], with_offsets=self.with_alignment)
        tokens = tokenizer.tokens(encodings)
        if tokens.is_truncated[0]:
            raise TooLongError(
                f"texts[{index}] is a pair with more than the {tokenizer.max_tokens} tokens "
                "this model takes, and pairs are not cut into chunks; shorten it"
            )
        alignment = _alignment(encodings[0], pair) if self.with_alignment else None
        return Chunk(tokens.token_ids, alignment), np.array(encodings[0].type_ids, dtype=np.int32)

    def _learn_density(self, texts: Iterable[Text], num_tokens: int) -> None:
        """Later windows are sized by the first one's tokens: which texts run together depends on
        the input alone, and never on which thread was faster."""
        num_characters = sum(
            len(text if isinstance(text, str) else "".join(text)) for text in texts
        )
        density = num_tokens / max(num_characters, 1)
        self._tokens_per_character = min(max(density, _MIN_DENSITY), _MAX_DENSITY)

    def checked_texts(self, texts: Mapping[int, Text], errors: Errors) -> Mapping[int, Text]:
        """The texts for the tokenizer, by index in the caller's order; the others are errors."""
        given = cast("Sequence[str]", list(texts.values()))
        has_prompts = bool(self.prompt) or self.prompts is not None
        if not has_prompts and set(map(type, given)) == {str} and all(map(str.isascii, given)):
            return texts
        checked: dict[int, Text] = {}
        for index, text in texts.items():
            if isinstance(text, str):
                if text.isascii() or _is_unicode(text, index, errors):
                    checked[index] = self.prompt_of(index) + text
            elif self.prompt_of(index):
                errors[index] = InputError(
                    f"texts[{index}] is a pair; a prompt goes with single texts only"
                )
            elif all(_is_unicode(part, index, errors) for part in text):
                checked[index] = text
        return checked

    def _checked(self, requests: Requests, tokenizer: Tokenizer, errors: Errors) -> Requests:
        """The requests without tokens that the model does not read; finds texts that are too long
        or have no token the model knows."""
        if tokenizer.skipped_id is not None:
            requests = requests.without(tokenizer.skipped_id)
        if not self.truncate and np.count_nonzero(requests.is_truncated):
            for index in requests.indices[requests.is_truncated].tolist():
                errors[index] = TooLongError(
                    f"texts[{index}] has more than the {tokenizer.max_tokens} tokens this "
                    "model takes; shorten it, or pass truncate=True"
                )
        allows_none = self.allows_no_tokens or not self.spec.num_layers  # the mean of none is 0
        if not allows_none and np.count_nonzero(requests.seqlens) < len(requests):
            for index in requests.indices[requests.seqlens == 0].tolist():
                errors.setdefault(index, no_tokens(index))
        self.check_range(requests, errors)  # a tokenizer may have ids that the model has not
        return requests

    def read_ids(self, items: Mapping[int, object], errors: Errors) -> Requests:
        """Columns of sequences of token ids, cut to the model's positions."""
        limit = min(self.spec.max_positions, self.max_tokens or self.spec.max_positions)
        items, lengths = cut_ids(items, limit)
        columns = flatten_ids(items, vocab_size=self.spec.vocab_size, errors=errors)
        is_long = np.isin(columns.indices, list(lengths))
        requests = Requests(columns.indices, columns.seqlens, columns.token_ids, is_long)
        self.check_range(requests, errors)
        if not self.truncate:
            for index, length in lengths.items():
                errors.setdefault(index, self._too_many_ids(index, length, limit))
        # All ids lie within int32 here, but those of rows that are dropped.
        requests = replace(requests, token_ids=requests.token_ids.astype(np.int32, copy=False))
        if self.tokenizer is not None and self.tokenizer.skipped_id is not None:
            requests = requests.without(self.tokenizer.skipped_id)
        if not self.with_alignment:
            return requests
        frame = list(self.tokenizer.frame_ids) if self.tokenizer is not None else []
        masks = (np.isin(ids, frame).astype(int).tolist() for ids in requests.split())
        return replace(requests, alignments=[Alignment(None, None, None, mask) for mask in masks])

    def _too_many_ids(self, index: int, num_ids: int, limit: int) -> TooLongError:
        given = f"texts[{index}] has {num_ids} token ids, the model takes at most {limit}"
        if self.cuts:
            return TooLongError(f"{given}, and token ids are not cut into chunks; shorten it")
        return TooLongError(f"{given}; shorten it, or pass truncate=True")

    def check_range(self, requests: Requests, errors: Errors) -> None:
        ids, vocab_size = requests.token_ids, self.spec.vocab_size
        if not len(ids):
            return
        if ids.dtype == np.int32:  # a tokenizer's: as uint32, one below 0 is beyond the vocabulary
            if ids.view(np.uint32).max() < vocab_size:
                return
        elif ids.min() >= 0 and ids.max() < vocab_size:
            return
        for index, row in zip(requests.indices.tolist(), requests.split(), strict=True):
            if not len(row):
                continue
            try:
                check_ids(row, index, vocab_size)
            except InputError as error:
                errors.setdefault(index, error.with_traceback(None))

    def _check_masks(self, requests: Requests, errors: Errors) -> None:
        assert self.tokenizer is not None  # the task looked for its mask token
        mask_token_id = self.tokenizer.mask_token_id
        assert mask_token_id is not None
        rows = zip(requests.indices.tolist(), requests.split(), requests.is_truncated, strict=True)
        for index, ids, is_truncated in rows:
            if not (ids == mask_token_id).any():
                cut = " within the model's positions" if is_truncated else ""
                mask = self.tokenizer.token(mask_token_id)
                error = InputError(f"texts[{index}] has no {mask} to fill{cut}")
                errors.setdefault(index, error)

    def prompt_of(self, index: int) -> str:
        """The prompt of a text by its index. OptionError where `prompts` has none for it."""
        if self.prompts is None:
            return self.prompt
        if index >= len(self.prompts):
            raise OptionError(f"task has {len(self.prompts)} entries, and there are more texts")
        return self.prompts[index]

    def _count_prompt_tokens(self, indices: Iterable[int], tokenizer: Tokenizer) -> np.ndarray:
        """Tokens of the prompt of each text, int32, without the special token that would end it."""
        prompts, known = [self.prompt_of(index) for index in indices], self._prompt_tokens
        for prompt in {*prompts} - known.keys():
            encoding = tokenizer.encode([prompt])[0] if prompt else None
            ids = [] if encoding is None else encoding.ids
            known[prompt] = len(ids) - (bool(ids) and ids[-1] in tokenizer.frame_ids)
        return np.array([known[prompt] for prompt in prompts], dtype=np.int32)


def _common_part(item: Input, before: Input) -> float:
    """The part of an input's start that is that of the one before: 0 ... MOST_SHARED, a guess."""
    if isinstance(item, tuple) and isinstance(before, tuple):
        texts = [text for text in (*before, *item) if isinstance(text, str)]
        if len(texts) != 4 or texts[0] != texts[2]:
            return 0.0
        return min(len(texts[2]) / max(len(texts[2]) + len(texts[3]), 1), MOST_SHARED)
    if type(item) is not type(before) or not isinstance(item, str | list):
        return 0.0
    length, step = 0, 32
    while length + step <= len(item):
        if item[length : length + step] != before[length : length + step]:
            break
        length, step = length + step, 2 * step
    return min(length / max(len(item), 1), MOST_SHARED)


def _by_kind(inputs: Sequence[object], start: int) -> tuple[dict[int, Text], dict[int, object]]:
    """Strings and pairs, and everything else, each by its index in the caller's order."""
    kinds = set(map(type, inputs))
    if kinds == {str}:
        return dict(enumerate(cast("Sequence[str]", inputs), start)), {}
    if kinds == {np.ndarray}:
        return {}, dict(enumerate(inputs, start))
    texts: dict[int, Text] = {}
    ids: dict[int, object] = {}
    for index, item in enumerate(inputs, start):
        if isinstance(item, str):
            texts[index] = item
        elif _is_pair(item):
            texts[index] = (item[0], item[1])
        else:
            ids[index] = item
    return texts, ids


def _is_pair(item: object) -> TypeGuard[tuple[str, str]]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    return isinstance(item[0], str) and isinstance(item[1], str)


def _is_unicode(text: str, index: int, errors: Errors) -> bool:
    fault = text_fault(text)
    if fault is not None:
        errors[index] = InputError(f"texts[{index}] {fault}")
    return fault is None


def _no_tokenizer(index: int) -> InputError:
    return InputError(
        f"texts[{index}] needs a tokenizer and the checkpoint has no tokenizer; give "
        "token ids, or save the tokenizer into the checkpoint's folder"
    )


def _type_ids(
    encodings: Sequence[tokenizers.Encoding], tokens: Tokens, is_pair: Sequence[bool]
) -> np.ndarray:
    """int32 [total_tokens]; only a pair has types other than 0."""
    type_ids = chain.from_iterable(encoding.type_ids for encoding in encodings)
    types = np.fromiter(type_ids, dtype=np.int32, count=len(tokens.token_ids))
    return types * np.repeat(np.asarray(is_pair, dtype=np.int32), tokens.seqlens)


def _alignment(encoding: tokenizers.Encoding, text: Text) -> Alignment:
    return Alignment(
        text if isinstance(text, str) else None,
        encoding.offsets,
        encoding.word_ids,
        encoding.special_tokens_mask,
    )


def no_requests() -> Requests:
    int32 = np.empty(0, dtype=np.int32)
    return Requests(np.empty(0, dtype=np.int64), int32, int32, np.empty(0, dtype=bool))


def _expanded(requests: Requests, expansion: Expansion) -> Requests:
    """The requests with the expansion's tokens; a text without any token gets none."""
    seqlens = requests.seqlens
    missing = np.where(seqlens > 0, np.maximum(expansion.length - seqlens, 0), 0).astype(np.int32)
    places = np.repeat(requests.cu_seqlens[1:], missing)
    types = requests.token_type_ids
    return replace(
        requests,
        seqlens=seqlens + missing,
        token_ids=np.insert(requests.token_ids, places, np.int32(expansion.token_id)),
        token_type_ids=None if types is None else np.insert(types, places, np.int32(0)),
        unseen_tokens=None if expansion.is_seen else missing,
    )


def _in_order(pieces: Sequence[Requests]) -> Requests:
    """Texts and ids of one window, put together in the caller's order."""
    pieces = [piece for piece in pieces if len(piece)]
    if len(pieces) < 2:
        return pieces[0] if pieces else no_requests()
    texts, ids = pieces
    types, prompts, alignments = texts.token_type_ids, texts.prompt_tokens, None
    if types is not None:
        types = np.concatenate([types, np.zeros(ids.total_tokens, dtype=np.int32)])
    if prompts is not None:
        prompts = np.concatenate([prompts, np.zeros(len(ids), dtype=np.int32)])
    if texts.alignments is not None and ids.alignments is not None:
        alignments = [*texts.alignments, *ids.alignments]
    chunks = None
    if texts.chunks is not None:
        chunks = np.concatenate([texts.chunks, np.zeros(len(ids), dtype=np.int32)])
    both = Requests(
        np.concatenate([texts.indices, ids.indices]),
        np.concatenate([texts.seqlens, ids.seqlens]),
        np.concatenate([texts.token_ids, ids.token_ids]),
        np.concatenate([texts.is_truncated, ids.is_truncated]),
        types,
        prompts,
        alignments,
        chunks=chunks,
    )
    return both.take(np.argsort(both.indices, kind="stable"))
