"""What a caller gave -> requests: strings, pairs and token ids, each checked on its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import tokenizers

from bytetx.engine.request import Alignment, Failure, Request
from bytetx.errors import InputError, TooLongError
from bytetx.spec import ModelSpec
from bytetx.tokenizer import Tokenizer

# What one input may be; a pair is two strings, token ids are taken as they are.
Input = str | tuple[str, str] | Sequence[int] | np.ndarray

_CHARACTERS_PER_TOKEN = 4  # of English text; only a guess to size windows


def estimate_tokens(item: Input) -> int:
    """A guess of an input's tokens without tokenising it; at least 1, whatever was given."""
    if isinstance(item, str):
        return len(item) // _CHARACTERS_PER_TOKEN + 1
    if _is_pair(item):
        return (len(item[0]) + len(item[1])) // _CHARACTERS_PER_TOKEN + 1
    try:
        return max(1, len(item))
    except TypeError:  # no input at all; the reader names it
        return 1


@dataclass(slots=True)
class InputReader:
    """Turns windows of inputs into requests, in order, and numbers them from 0.

    prompt: put before every string; token ids get none.  truncate: cut what is too long instead of
    failing it.  with_alignment: keep offsets and words of each token.  keeps_errors: a bad input
    becomes a Failure instead of an InputError that is raised.  needs_mask: a text without the
    tokenizer's mask token is a bad input.
    """

    spec: ModelSpec
    tokenizer: Tokenizer | None
    prompt: str = ""
    truncate: bool = False
    with_alignment: bool = False
    keeps_errors: bool = False
    needs_mask: bool = False
    _numbers: count = field(default_factory=count)
    _prompt_tokens: int | None = None

    def read(self, inputs: Sequence[Input]) -> list[Request | Failure]:
        """One request or failure an input; strings are tokenised in one call."""
        numbers = [next(self._numbers) for _ in inputs]
        items: list[Request | Failure | None] = [None] * len(inputs)
        texts: dict[int, str | tuple[str, str]] = {}
        for i, item in enumerate(inputs):
            try:
                if isinstance(item, str) or _is_pair(item):
                    texts[i] = self._checked_text(item, numbers[i])
                else:
                    items[i] = self._checked(self._ids_request(item, numbers[i]))
            except InputError as error:
                items[i] = self._failure(numbers[i], error)
        for i, encoding in zip(texts, self._encode(list(texts.values())), strict=True):
            try:
                items[i] = self._checked(self._text_request(encoding, inputs[i], numbers[i]))
            except InputError as error:
                items[i] = self._failure(numbers[i], error)
        return items

    def _failure(self, index: int, error: InputError) -> Failure:
        if not self.keeps_errors:
            raise error
        return Failure(index, error)

    def _checked_text(self, text: str | Sequence[str], index: int) -> str | tuple[str, str]:
        if self.tokenizer is None:
            raise InputError(
                f"texts[{index}] needs a tokenizer and the checkpoint has no tokenizer; give "
                "token ids, or save the tokenizer into the checkpoint's folder"
            )
        if isinstance(text, str):
            _check_unicode(text, index)
            return self.prompt + text
        for part in text:
            _check_unicode(part, index)
        if self.prompt:
            raise InputError(f"texts[{index}] is a pair; a prompt goes with single texts only")
        return tuple(text)

    def _encode(self, texts: list[str | tuple[str, str]]) -> list[tokenizers.Encoding]:
        if not texts:
            return []
        return self.tokenizer.encode(texts, with_offsets=self.with_alignment)

    def _text_request(self, encoding: tokenizers.Encoding, text: Input, index: int) -> Request:
        is_truncated = bool(encoding.overflowing)
        if is_truncated and not self.truncate:
            raise TooLongError(
                f"texts[{index}] has more than the {self.tokenizer.max_tokens} tokens this model "
                "takes; shorten it, or pass truncate=True"
            )
        token_ids = np.array(encoding.ids, dtype=np.int32)
        if not len(token_ids):
            raise _no_tokens(index)
        if self.tokenizer.vocab_size > self.spec.vocab_size:
            _check_range(token_ids, index, self.spec.vocab_size)
        has_types = self.spec.num_token_types > 1 and self.tokenizer.has_token_types
        return Request(
            index,
            token_ids,
            token_type_ids=(
                np.array(encoding.type_ids, dtype=np.int32)
                if has_types and not isinstance(text, str)
                else None
            ),
            prompt_tokens=self._count_prompt_tokens() if self.prompt else 0,
            is_truncated=is_truncated,
            alignment=_alignment(encoding, text) if self.with_alignment else None,
        )

    def _ids_request(self, item: Input, index: int) -> Request:
        token_ids = _checked_ids(item, index, self.spec.vocab_size)
        limit = self.spec.max_positions
        is_truncated = len(token_ids) > limit
        if is_truncated and not self.truncate:
            raise TooLongError(
                f"texts[{index}] has {len(token_ids)} token ids, the model takes at most {limit}; "
                "shorten it, or pass truncate=True"
            )
        token_ids = token_ids[:limit]
        frame_ids = set() if self.tokenizer is None else self.tokenizer.frame_ids
        mask = [int(token_id in frame_ids) for token_id in token_ids.tolist()]
        return Request(
            index,
            token_ids,
            is_truncated=is_truncated,
            alignment=Alignment(None, None, None, mask) if self.with_alignment else None,
        )

    def _checked(self, request: Request) -> Request:
        if self.needs_mask and self.tokenizer.mask_token_id not in request.token_ids:
            mask = self.tokenizer.token(self.tokenizer.mask_token_id)
            cut = " within the model's positions" if request.is_truncated else ""
            raise InputError(f"texts[{request.index}] has no {mask} to fill{cut}")
        return request

    def _count_prompt_tokens(self) -> int:
        """Tokens of the prompt alone, without the special token that would end it."""
        if self._prompt_tokens is None:
            encoding = self.tokenizer.encode([self.prompt])[0]
            ends_special = bool(encoding.ids) and encoding.ids[-1] in self.tokenizer.frame_ids
            self._prompt_tokens = len(encoding.ids) - ends_special
        return self._prompt_tokens


def _is_pair(item: object) -> bool:
    is_two = isinstance(item, tuple | list) and len(item) == 2
    return is_two and all(isinstance(part, str) for part in item)


def _check_unicode(text: str, index: int) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"texts[{index}] holds half a surrogate pair at character {error.start}, which is no "
            "text; decode its source with errors='replace'"
        ) from error


def _checked_ids(item: object, index: int, vocab_size: int) -> np.ndarray:
    """Token ids as int32 [num_tokens], from any one-dimensional sequence of integers."""
    if item is None or isinstance(item, bytes | dict | set | int | float):
        raise _not_an_input(item, index)
    try:
        ids = np.asarray(item)
    except (TypeError, ValueError) as error:
        raise _not_an_input(item, index) from error
    # Numbers beyond 64 bits come as objects; they are token ids out of range.
    is_integers = ids.dtype.kind in "iu" or all(type(number) is int for number in ids.flat)
    if ids.ndim != 1 or not is_integers:
        raise _not_an_input(item, index)
    if not len(ids):
        raise _no_tokens(index)
    _check_range(ids, index, vocab_size)
    return ids.astype(np.int32)


def _check_range(ids: np.ndarray, index: int, vocab_size: int) -> None:
    low, high = ids.min(), ids.max()
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"texts[{index}] holds token id {low if low < 0 else high}; ids of this model lie "
            f"between 0 and {vocab_size - 1}; were they made by another tokenizer?"
        )


def _not_an_input(item: object, index: int) -> InputError:
    given = type(item).__name__
    if isinstance(item, tuple) and len(item) == 2:
        given = f"a pair ({', '.join(type(part).__name__ for part in item)})"
    return InputError(
        f"texts[{index}] is {given}; give a str, a pair (str, str), or a sequence of "
        "integer token ids"
    )


def _no_tokens(index: int) -> InputError:
    return InputError(
        f"texts[{index}] has no tokens, so the model has nothing to read; an empty str is fine "
        "where the tokenizer adds special tokens, an empty sequence of ids is not"
    )


def _alignment(encoding: tokenizers.Encoding, text: Input) -> Alignment:
    return Alignment(
        text if isinstance(text, str) else None,
        encoding.offsets,
        encoding.word_ids,
        encoding.special_tokens_mask,
    )
