"""Guidance: grammars of structured outputs, and what each lets follow an output's tokens.

A GrammarCompiler makes the Guide of a request, in threads of its own; TokenMasks fills the packed
bitmasks of a step's guided rows while its forward pass runs. llguidance (the extra
`bytetx[guided]`) reads grammars and matches tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from threading import Lock, RLock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bytetx.errors import InputError, OptionError
from bytetx.generate.grammar_check import (
    MAX_LEXER_STATES,
    GrammarSource,
    NotReadError,
    check_grammar,
)
from bytetx.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_NUM_COMPILERS = 2  # grammars that are read at a time; each may take seconds
_MAX_GRAMMARS = 64  # that are kept, some MB each at most
_ANY_SPACE = r"[ \n\r\t]{0,20}"  # enough to indent ten levels
_NO_SPACE = "(?:)"
_WORD_BITS = 32
_MIN_PARALLEL = 4  # rows; for fewer, waking threads takes longer than the masks


def check_installed() -> None:
    """Raises OptionError where structured outputs need a package that is not there."""
    if find_spec("llguidance") is None:
        raise OptionError(
            "structured_outputs needs the package llguidance: pip install 'bytetx[guided]'"
        )


class Guide:
    """The grammar of one output, after some of its tokens."""

    __slots__ = ("_matcher", "_num_taken", "has_all_bytes")

    def __init__(self, matcher: LLMatcher, *, has_all_bytes: bool):
        """has_all_bytes: whether each byte is a token, so that some token always fits."""
        self._matcher, self._num_taken, self.has_all_bytes = matcher, 0, has_all_bytes

    def copy(self) -> Guide:
        """A guide of another output, before its first token."""
        return Guide(self._matcher.deep_copy(), has_all_bytes=self.has_all_bytes)

    @property
    def num_taken(self) -> int:
        """Tokens that it has followed so far."""
        return self._num_taken

    @property
    def matcher(self) -> LLMatcher:
        return self._matcher

    def take(self, token_ids: Sequence[int]) -> None:
        """Follows the output's next tokens; -1 stands for one that could not be sampled."""
        for token in token_ids:
            if token >= 0:
                self._matcher.consume_token(token)
        self._num_taken += len(token_ids)

    def error(self) -> InputError | None:
        """Why nothing can be said about what follows, as where a limit was met."""
        if not self._matcher.is_error() or _is_stuck(self._matcher):
            return None
        reason = self._matcher.get_error().partition("\n")[0]
        return InputError(f"structured_outputs cannot be followed any further: {reason}")


class GrammarCompiler:
    """Makes guides for one tokenizer; threads may share it. Grammars are kept, the latest used."""

    def __init__(
        self,
        token_bytes: Callable[[], tuple[Sequence[bytes], Iterable[int]]] | None,
        *,
        eos_token_ids: Sequence[int],
    ):
        """token_bytes: gives (the bytes of each token, the ids of special tokens); called once.

        None: the checkpoint has no tokenizer.
        """
        self._token_bytes, self._eos_token_ids = token_bytes, eos_token_ids
        self._threads: ThreadPoolExecutor | None = None
        self._lock, self._making = RLock(), Lock()
        self._tokenizer: LLTokenizer | None = None
        self._has_all_bytes = False
        self._grammars: OrderedDict[GrammarSource, Future[Guide | InputError]] = OrderedDict()
        # Callers that wait for each that is not made.
        self._num_waiting: dict[Future[Guide | InputError], int] = {}

    def compile(self, form: StructuredOutputsParams) -> Future[Guide | InputError]:
        """The guide of an output of this form, for `made_guide`; a caller may `leave` it.

        An InputError where the grammar is wrong, or takes too long to read.
        """
        check_installed()
        if self._token_bytes is None:
            raise InputError("structured_outputs needs a tokenizer, and the checkpoint has none")
        if not self._eos_token_ids:
            raise InputError(
                "structured_outputs needs an end-of-text token, and the checkpoint names none: add "
                "eos_token_id to its generation_config.json"
            )
        space = _NO_SPACE if form.disable_any_whitespace else form.whitespace_pattern or _ANY_SPACE
        source = GrammarSource(*form.source, space, form.begin)
        with self._lock:
            found = self._grammars.get(source)
            if found is None:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(_NUM_COMPILERS, "bytetx-grammars")
                found = self._grammars[source] = self._threads.submit(self._read, source)
                self._num_waiting[found] = 0
                found.add_done_callback(self._end_waiting)
            if found in self._num_waiting:
                self._num_waiting[found] += 1
            self._grammars.move_to_end(source)
            if len(self._grammars) > _MAX_GRAMMARS:
                self._grammars.popitem(last=False)
            return found

    def leave(self, guide: Future[Guide | InputError]) -> None:
        """A caller of `compile` waits no longer; a grammar that nobody waits for is not begun."""
        with self._lock:
            if guide not in self._num_waiting:
                return
            self._num_waiting[guide] -= 1
            if not self._num_waiting[guide] and guide.cancel():
                for source in [one for one, kept in self._grammars.items() if kept is guide]:
                    del self._grammars[source]

    def _end_waiting(self, guide: Future[Guide | InputError]) -> None:
        with self._lock:
            self._num_waiting.pop(guide, None)

    def _read(self, source: GrammarSource) -> Guide | InputError:
        """Keeps nothing that failed for another reason than the grammar."""
        try:
            return self._make(source)
        except BaseException:
            with self._lock:
                self._grammars.pop(source, None)
            raise

    def _make(self, source: GrammarSource) -> Guide | InputError:
        from llguidance import LLMatcher, LLParserLimits

        name = f"structured_outputs.{source.kind}"
        try:
            grammar = check_grammar(source)
        except NotReadError:
            raise
        except InputError as error:
            return InputError(f"{name}: {error}")
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._made_tokenizer(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            return InputError(f"{name}: {matcher.get_error()}")
        matcher.compute_bitmask()  # before it, nothing is accepted
        if matcher.is_stopped() or (source.kind == "json" and matcher.is_accepting()):
            more = "" if self._has_all_bytes else ", or the tokenizer lacks its characters"
            return InputError(f"{name}: no text but the empty one has this form{more}")
        return Guide(matcher, has_all_bytes=self._has_all_bytes)

    def _made_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._making:
            if self._tokenizer is None:
                assert self._token_bytes is not None  # `compile` checks it
                tokens, special = self._token_bytes()
                self._has_all_bytes = {bytes([byte]) for byte in range(256)} <= set(tokens)
                vocabulary = _Vocabulary(tokens, {*special, *self._eos_token_ids})
                self._tokenizer = LLTokenizer(
                    TokenizerWrapper(vocabulary), eos_token=list(self._eos_token_ids)
                )
            return self._tokenizer


def made_guide(made: Guide | InputError) -> Guide:
    """The guide that a compiler made; raises a copy of its error, which others may get too."""
    if isinstance(made, InputError):
        raise InputError(str(made))
    return made


class _Vocabulary:
    """A tokenizer as llguidance reads it. Only forced text, which grammars forbid, would encode."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Iterable[int]):
        self.tokens, self.special_token_ids = tokens, sorted(special)
        self.eos_token_id = self.special_token_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        return []


class GuidedRow(NamedTuple):
    """A row that samples with a guide, at one position or, with a draft, at several.

    guide: its tokens so far are taken.  draft: the tokens at the positions before the last.
    forbidden: for each position, what is left out where anything else fits.
    """

    guide: Guide
    draft: Sequence[int]
    forbidden: Sequence[Iterable[int]]


class TokenMasks:
    """Fills the packed bitmasks of a step's guided rows, in threads where there are many."""

    def __init__(self, vocab_size: int):
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._executor: LLExecutor | None = None

    def fill(self, rows: Sequence[GuidedRow]) -> np.ndarray:
        """int32 [positions of all rows, words]: bit i of a row is set where token i may follow.

        A row whose guide has an error allows everything; so do the positions behind a draft's token
        that does not fit, which is not chosen.
        """
        num_positions = sum(1 + len(row.draft) for row in rows)
        masks = np.full((num_positions, self._num_words), -1, dtype=np.int32)
        row_bytes, number = self._num_words * 4, 0
        plain: list[tuple[LLMatcher, int]] = []
        for row in rows:
            if row.draft:
                _fill_drafted(row, masks[number : number + 1 + len(row.draft)])
            elif not row.guide.matcher.is_error():
                plain.append((row.guide.matcher, number))
            number += 1 + len(row.draft)
        if len(plain) < _MIN_PARALLEL:
            for matcher, number in plain:
                matcher.unsafe_compute_mask_ptr(masks[number].ctypes.data, row_bytes)
        else:
            self._threads().unsafe_compute_mask_ptr(
                plain, masks.ctypes.data, row_bytes, num_positions
            )
        number = 0
        for row in rows:
            if _is_stuck(row.guide.matcher):
                masks[number] = 0
            for forbidden in row.forbidden:
                _forbid(masks[number], forbidden)
                number += 1
        return masks

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        return self._executor


def _fill_drafted(row: GuidedRow, masks: np.ndarray) -> None:
    """Fills the masks behind each token of a draft; the matcher is left as it was."""
    matcher, num_taken = row.guide.matcher, 0
    if not row.guide.has_all_bytes:
        matcher = matcher.deep_copy()  # where nothing fits, it could not go back
    for number in range(len(masks)):
        if matcher.is_error():
            return
        matcher.unsafe_compute_mask_ptr(masks[number].ctypes.data, masks[number].nbytes)
        if _is_stuck(matcher):
            masks[number] = 0
            return
        if number == len(row.draft) or not matcher.try_consume_tokens([row.draft[number]]):
            break
        num_taken += 1
    matcher.rollback(num_taken)


def _is_stuck(matcher: LLMatcher) -> bool:
    """Whether the form is not complete, and no token fits: the vocabulary lacks its characters."""
    return matcher.is_error() and matcher.get_error().startswith("NoExtensionBias")


def _forbid(mask: np.ndarray, token_ids: Iterable[int]) -> None:
    """Clears the bits of tokens, unless none would be left."""
    tokens = np.fromiter(token_ids, dtype=np.int64)
    if not len(tokens):
        return
    cleared = mask.copy()
    words = cleared.view(np.uint32)
    np.bitwise_and.at(
        words, tokens // _WORD_BITS, ~(np.uint32(1) << (tokens % _WORD_BITS).astype(np.uint32))
    )
    if words.any():
        mask[:] = cleared
