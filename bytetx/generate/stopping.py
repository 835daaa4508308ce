"""Stop conditions: when an output ends, and how much of its text can be returned before."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bytetx.checkpoint.answer_parser import overlap
from bytetx.generate.outputs import FinishReason
from bytetx.generate.scheduler import SequenceState
from bytetx.sampling_params import SamplingParams


class _StopMatch(NamedTuple):
    """A stop string in a stream; of two, the larger one is complete first, or the longer one.

    num_after: characters of the stream behind it.
    """

    num_after: int
    length: int
    stop: str


@dataclass(slots=True)
class _Search:
    """Looks for the stop strings in one stream of text.

    held: the longest end of the stream that may still become a stop string.
    """

    stops: Sequence[str]
    held: str = ""
    _starts: frozenset[str] = field(init=False)  # the first character of each

    def __post_init__(self) -> None:
        self._starts = frozenset(stop[0] for stop in self.stops)

    def feed(self, text: str, *, is_early: bool) -> _StopMatch | None:
        """The stop string that is complete first. is_early: what is complete does not count."""
        num_searched = len(self.held)
        text = self.held + text
        if self._starts.isdisjoint(text):
            self.held = ""
            return None
        match = None if is_early else max(self._matches(text, num_searched), default=None)
        num_held = max(overlap(text, stop) for stop in self.stops)
        self.held = text[len(text) - num_held :]
        return match

    def _matches(self, text: str, num_searched: int) -> Iterator[_StopMatch]:
        """The first one of each stop string that ends after the first num_searched characters."""
        for stop in self.stops:
            start = text.find(stop, max(0, num_searched + 1 - len(stop)))
            if start >= 0:
                yield _StopMatch(len(text) - start - len(stop), len(stop), stop)


@dataclass(slots=True)
class StopStrings:
    """Streamed text, cut where the first stop string is complete.

    Text that could still become a stop string is held back, so that no part of one is returned.
    The cut does not depend on how the text is split: the string that is complete first counts, and
    the longest of those that end together.  A string that is complete in early text (before
    min_tokens) does not count; one that begins there and ends after it does.

    Hidden text (special tokens that the output leaves out) is never returned, and stop strings are
    looked for with it and without it: "<|end|>" is found, and so is what spans such a token.

    keeps_stop: the text ends with the stop string, not before it.
    """

    stops: Sequence[str]
    keeps_stop: bool = False
    matched: str | None = None
    _unreturned: str = ""  # shown text
    _shown: _Search = field(init=False)
    _all: _Search = field(init=False)  # searches the text with hidden text
    _is_shown: list[bool] = field(default_factory=list)  # each character that `_all` holds

    def __post_init__(self) -> None:
        self._shown, self._all = _Search(self.stops), _Search(self.stops)

    def feed(self, text: str, *, is_hidden: bool = False, is_early: bool = False) -> str:
        """The text that can be returned now; nothing more once `matched` is set."""
        if self.matched is not None or not text:
            return ""
        is_shown = self._is_shown + [not is_hidden] * len(text)
        has_hidden = not all(is_shown)
        # Each match with the number of shown characters from its start on.
        found: list[tuple[_StopMatch, int]] = []
        if not is_hidden:
            self._unreturned += text
            match = self._shown.feed(text, is_early=is_early)
            if match is not None:
                found.append((match, match.length + match.num_after))
        if has_hidden:
            match = self._all.feed(text, is_early=is_early)
            if match is not None:
                start = len(is_shown) - match.num_after - match.length
                found.append((match, is_shown[start:].count(True)))
        else:
            self._all.held = self._shown.held
        if found:
            match, num_cut = max(found)
            self.matched = match.stop
            text, self._unreturned = self._unreturned[: len(self._unreturned) - num_cut], ""
            return text + match.stop if self.keeps_stop else text
        self._is_shown = is_shown[len(is_shown) - len(self._all.held) :]
        num_held = max(len(self._shown.held), self._is_shown.count(True))
        num_free = len(self._unreturned) - num_held
        text, self._unreturned = self._unreturned[:num_free], self._unreturned[num_free:]
        return text

    def flush(self) -> str:
        """The text held back, at the end of an output that no stop string ended."""
        held, self._unreturned = self._unreturned, ""
        return held


def stop_token_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """The tokens that end an output; eos_token_ids: the checkpoint's end-of-text tokens.

    These end one with structured_outputs even with ignore_eos: its form is complete.
    """
    ignores = params.ignore_eos and params.structured_outputs is None
    eos = () if ignores else eos_token_ids
    return frozenset((*(params.stop_token_ids or ()), *eos))


def finish_reason(sequence: SequenceState) -> FinishReason | None:
    """Why the output ends with its last token, apart from stop strings; None where it does not."""
    num_tokens = sequence.num_output_tokens
    params = sequence.params
    is_stop = sequence.token_ids[-1] in sequence.stop_token_ids
    # With structured_outputs one is chosen before min_tokens where nothing else is left.
    if is_stop and (num_tokens > params.min_tokens or params.structured_outputs is not None):
        return "stop"
    return "length" if num_tokens >= sequence.max_tokens else None


def forbidden_tokens(sequence: SequenceState, position: int) -> frozenset[int]:
    """Tokens that must not be sampled at this position of the output: before min_tokens, any stop.

    They include the checkpoint's end-of-text tokens even with ignore_eos, as in vLLM. With
    structured_outputs they are forbidden where its form leaves others, and with ignore_eos always.
    """
    params = sequence.params
    waits = params.ignore_eos and params.structured_outputs is not None
    if position >= params.min_tokens and not waits:
        return frozenset()
    return sequence.stop_token_ids | sequence.eos_token_ids
