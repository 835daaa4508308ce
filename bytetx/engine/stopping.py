"""When an answer ends, and what of its text may be shown before that is known."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bytetx.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class StopStrings:
    """Text as it comes, cut where the first stop string is complete.

    What could still become a stop string is held back, so nothing of one is ever shown.  The cut
    does not depend on the pieces that the text comes in: the string that is complete first counts,
    the longest of those that end together.
    """

    stops: Sequence[str]
    matched: str | None = None
    _held: str = ""

    def feed(self, text: str) -> str:
        """What of the text so far can be shown now; nothing more once `matched` is set."""
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in text
        ]
        if ends:
            end, _, self.matched = min(ends)
            self._held = ""
            return text[: end - len(self.matched)]
        num_held = max((_overlap(text, stop) for stop in self.stops), default=0)
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back, at the end of an answer that no stop string ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of text that are the start of stop, and not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(slots=True)
class StopChecker:
    """Whether an answer ends with a token, by everything but its text.

    eos_token_ids: the checkpoint's end-of-text tokens.  max_tokens: resolved, never None.
    """

    params: SamplingParams
    max_tokens: int
    eos_token_ids: Collection[int] = ()
    token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        eos = () if self.params.ignore_eos else self.eos_token_ids
        self.token_ids = frozenset((*self.params.stop_token_ids, *eos))

    def finish_reason(self, token_id: int, num_output_tokens: int) -> FinishReason | None:
        """num_output_tokens: of the answer, this one included."""
        if token_id in self.token_ids and num_output_tokens > self.params.min_tokens:
            return "stop"
        return "length" if num_output_tokens >= self.max_tokens else None

    def forbidden(self, num_output_tokens: int) -> frozenset[int]:
        """Tokens that must not come next, for the answer is below its min_tokens."""
        return self.token_ids if num_output_tokens < self.params.min_tokens else frozenset()
