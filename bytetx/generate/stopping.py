"""Stop conditions: when an output ends, and how much of its text can be returned before."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bytetx.generate.outputs import FinishReason
from bytetx.generate.scheduler import SequenceState
from bytetx.sampling_params import SamplingParams


@dataclass(slots=True)
class StopStrings:
    """Streamed text, cut where the first stop string is complete.

    Text that could still become a stop string is held back, so that no part of one is returned.
    The cut does not depend on how the text is split: the string that is complete first counts, and
    the longest of those that end together.  A string that is complete in early text (before
    min_tokens) does not count; one that begins there and ends after it does.
    """

    stops: Sequence[str]
    matched: str | None = None
    _held: str = ""
    _starts: frozenset[str] = field(init=False)  # the first character of each

    def __post_init__(self) -> None:
        self._starts = frozenset(stop[0] for stop in self.stops)

    def feed(self, text: str, *, is_early: bool = False) -> str:
        """The text that can be returned now; nothing more once `matched` is set."""
        if self.matched is not None:
            return ""
        num_searched = len(self._held)
        text = self._held + text
        if self._starts.isdisjoint(text):
            self._held = ""
            return text
        ends = [] if is_early else list(self._ends(text, num_searched))
        if ends:
            end, _, self.matched = min(ends)
            self._held = ""
            return text[: end - len(self.matched)]
        num_held = max((_overlap(text, stop) for stop in self.stops), default=0)
        num_free = len(text) - num_held
        self._held = text[num_free:]
        return text[:num_free]

    def _ends(self, text: str, num_searched: int) -> Iterator[tuple[int, int, str]]:
        """(first end, -length, stop) of each stop that ends after the first num_searched."""
        for stop in self.stops:
            start = text.find(stop, max(0, num_searched + 1 - len(stop)))
            if start >= 0:
                yield start + len(stop), -len(stop), stop

    def flush(self) -> str:
        """The text held back, at the end of an output that no stop string ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of text that is a proper prefix of stop."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def stop_token_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """The tokens that end an output; eos_token_ids: the checkpoint's end-of-text tokens."""
    eos = () if params.ignore_eos else eos_token_ids
    return frozenset((*(params.stop_token_ids or ()), *eos))


def finish_reason(sequence: SequenceState) -> FinishReason | None:
    """Why the output ends with its last token, apart from stop strings; None where it does not."""
    num_tokens = sequence.num_output_tokens
    is_stop = sequence.token_ids[-1] in sequence.stop_token_ids
    if is_stop and num_tokens > sequence.params.min_tokens:
        return "stop"
    return "length" if num_tokens >= sequence.max_tokens else None


def forbidden_tokens(sequence: SequenceState, position: int) -> frozenset[int]:
    """Tokens that must not be sampled at this position of the output: before min_tokens, any stop.

    They include the checkpoint's end-of-text tokens even with ignore_eos, as in vLLM.
    """
    if position >= sequence.params.min_tokens:
        return frozenset()
    return sequence.stop_token_ids | sequence.eos_token_ids
