"""AsyncStats: counts of an AsyncModel's engines."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from bytetx.encode.engine import EncodeEngine
from bytetx.encode.request import EngineCounts, StepStats

_COUNTS = (
    *EngineCounts.__dataclass_fields__,
    "num_draft_tokens",
    "num_accepted_tokens",
    "prefix_saved_tokens",
)


@dataclass(frozen=True, slots=True)
class AsyncStats:
    """Work of an AsyncModel now, and counts since it was made.

    num_queued, queued_tokens: texts that wait, those that are tokenised among them.  num_running:
    texts in forward passes.  num_calls: calls that are not answered.  num_generating: prompts.
    tokens_per_second: that the last forward passes computed.  num_done, num_failed, num_dropped:
    texts that have a result, an error, or were cancelled or late.  num_refused: calls with a
    QueueFullError.
    total_tokens, padded_tokens, num_steps: sums over all forward passes.  computed_tokens: of
    total_tokens, those that passes computed, where texts have prefixes in common.
    num_draft_tokens, num_accepted_tokens: of generation, drafted tokens and those that were right.
    prefix_saved_tokens: those that forward passes took from the cache of prefixes, since the Model
    was made.  prefix_cache_bytes: that it holds now.
    recent: the last forward passes, oldest first.
    """

    num_queued: int = 0
    queued_tokens: int = 0
    num_running: int = 0
    num_calls: int = 0
    num_generating: int = 0
    tokens_per_second: float = 0.0
    num_done: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    num_refused: int = 0
    total_tokens: int = 0
    computed_tokens: int = 0
    padded_tokens: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    prefix_saved_tokens: int = 0
    prefix_cache_bytes: int = 0
    recent: Sequence[StepStats] = ()

    @classmethod
    def total(cls, every: Sequence["AsyncStats"]) -> "AsyncStats":
        """Sums over several models, and the last forward passes of all, oldest first."""
        sums = {
            name: sum(getattr(one, name) for one in every)
            for name in cls.__dataclass_fields__
            if name != "recent"
        }
        steps = (step for one in every for step in one.recent)
        return cls(**sums, recent=sorted(steps, key=lambda step: step.time))

    def since(self, start: "AsyncStats") -> "AsyncStats":
        """The same with the counts and forward passes since `start`, an earlier one."""
        counts = {name: getattr(self, name) - getattr(start, name) for name in _COUNTS}
        seen = start.recent[-1].time if start.recent else 0.0
        recent = [step for step in self.recent if step.time > seen]
        return replace(self, **counts, recent=recent)

    def counts_only(self) -> "AsyncStats":
        """The same without work that waits or runs, and without forward passes."""
        return AsyncStats(**{name: getattr(self, name) for name in _COUNTS})


def engine_stats(engine: EncodeEngine) -> AsyncStats:
    """The counts of one engine."""
    counts, recent = engine.counts()
    prefixes = engine.runner.prefix_cache
    return AsyncStats(
        num_queued=engine.num_queued,
        queued_tokens=engine.queued_tokens,
        num_running=engine.num_running,
        num_calls=engine.num_calls,
        tokens_per_second=engine.tokens_per_second,
        **asdict(counts),
        prefix_saved_tokens=0 if prefixes is None else prefixes.saved_tokens,
        prefix_cache_bytes=0 if prefixes is None else prefixes.num_bytes,
        recent=recent,
    )
