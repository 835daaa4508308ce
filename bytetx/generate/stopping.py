"""When an answer ends, and what of its text may be shown before that is known."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bytetx.generate.outputs import FinishReason
from bytetx.generate.sequence import SequenceState
from bytetx.sampling_params import SamplingParams


@dataclass(slots=True)
class StopStrings:
    """Text as it comes, cut where the first stop string is complete.

    What could still become a stop string is held back, so nothing of one is ever shown.  The cut
    does not depend on the pieces that the text comes in: the string that is complete first counts,
    the longest of those that end together.  A string that is complete in early text (before
    min_tokens) does not count; one that begins there and ends behind it does.
    """

    stops: Sequence[str]
    matched: str | None = None
    _held: str = ""
    _starts: frozenset[str] = field(init=False)  # the first character of each

    def __post_init__(self) -> None:
        self._starts = frozenset(stop[0] for stop in self.stops)

    def feed(self, text: str, *, is_early: bool = False) -> str:
        """What of the text so far can be shown now; nothing more once `matched` is set."""
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
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown]

    def _ends(self, text: str, num_searched: int) -> Iterator[tuple[int, int, str]]:
        """(first end, -length, stop) of each stop that ends behind the first num_searched."""
        for stop in self.stops:
            start = text.find(stop, max(0, num_searched + 1 - len(stop)))
            if start >= 0:
                yield start + len(stop), -len(stop), stop

    def flush(self) -> str:
        """What was held back, at the end of an answer that no stop string ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of text that are the start of stop, and not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def stop_token_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """The tokens that end an answer; eos_token_ids: the checkpoint's end-of-text tokens."""
    return frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)))


def finish_reason(sequence: SequenceState) -> FinishReason | None:
    """Whether an answer ends with its last token, by everything but its text."""
    num_tokens = sequence.num_output_tokens
    is_stop = sequence.token_ids[-1] in sequence.stop_token_ids
    if is_stop and num_tokens > sequence.params.min_tokens:
        return "stop"
    return "length" if num_tokens >= sequence.max_tokens else None


def forbidden_tokens(sequence: SequenceState, position: int) -> frozenset[int]:
    """Tokens that must not be number `position` of the answer, which is below its min_tokens.

    The checkpoint's end-of-text tokens are among them even where ignore_eos lets the answer go on
    behind them, as in vLLM.
    """
    if position >= sequence.params.min_tokens:
        return frozenset()
    return sequence.stop_token_ids | sequence.eos_token_ids
