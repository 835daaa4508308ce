"""The generation engine that a wrapped model keeps, with its pages and graphs, between calls."""

from contextlib import suppress
from dataclasses import dataclass

from bytetx.generate.build import build_engine, generation_sizes
from bytetx.generate.engine import GenerationEngine
from bytetx.nn.heads import LmHead
from bytetx.nn.loading import LoadedCheckpoint, default_token_budget
from bytetx.ops.check import addresses


@dataclass(frozen=True, slots=True)
class EngineNeeds:
    """What a call asks of an engine.

    num_seqs: its prompts.  num_tokens: of all prompts and answers, in whole pages.  longest: the
    most tokens of one sequence.
    """

    num_seqs: int
    num_tokens: int
    longest: int


@dataclass(frozen=True, slots=True)
class _Idle:
    """An engine without work, over whose parameters it runs, and what it was built for."""

    engine: GenerationEngine
    checkpoint: LoadedCheckpoint
    needs: EngineNeeds


class EngineKeeper:
    """At most one idle engine; a call takes it and gives it back, and another one builds its own.

    The model's parameters may have changed in place since, so that no page of an earlier call is
    ever found; graphs read them where they lie.
    """

    def __init__(self) -> None:
        self._idle: list[_Idle] = []

    def clear(self) -> None:
        """Lets go of the engine with its memory."""
        self._idle.clear()

    def take(self, checkpoint: LoadedCheckpoint, needs: EngineNeeds) -> _Idle:
        """The idle engine, if it is this model's and large enough, or a new one.

        A new one is also large enough for what the old one was built for.
        """
        idle = None
        with suppress(IndexError):  # none, or another thread took it
            idle = self._idle.pop()
        if idle is not None and _is_same(idle.checkpoint, checkpoint):
            needs = _both(needs, idle.needs)
            if needs == idle.needs:
                idle.engine.on_weights_changed()
                return idle
        del idle  # its memory is the new one's
        return _Idle(_build(checkpoint, needs), checkpoint, needs)

    def give_back(self, idle: _Idle) -> None:
        """Keeps an engine whose requests have all ended."""
        assert not idle.engine.has_work
        self._idle[:] = [idle]


def _both(one: EngineNeeds, other: EngineNeeds) -> EngineNeeds:
    return EngineNeeds(
        max(one.num_seqs, other.num_seqs),
        max(one.num_tokens, other.num_tokens),
        max(one.longest, other.longest),
    )


def _is_same(one: LoadedCheckpoint, other: LoadedCheckpoint) -> bool:
    """Whether both run over the same parameters; a plan is made anew where one was moved."""
    return one.transformer is other.transformer and _addresses(one) == _addresses(other)


def _addresses(checkpoint: LoadedCheckpoint) -> list[int]:
    head = checkpoint.heads.lm
    assert head is not None
    parts = (head.decoder.weight, head.decoder.bias)
    return addresses([part for part in parts if part is not None])


def _build(checkpoint: LoadedCheckpoint, needs: EngineNeeds) -> GenerationEngine:
    """What does not fit beside the other sequences waits for their pages; one always fits."""
    head = checkpoint.heads.lm
    budget = default_token_budget(checkpoint.spec, checkpoint.device)
    assert isinstance(head, LmHead)
    options = {"token_budget": budget, "max_num_seqs": min(needs.num_seqs, budget)}
    fitting = generation_sizes(checkpoint, **options).kv_cache_tokens
    tokens = max(min(needs.num_tokens, fitting), needs.longest)
    sizes = generation_sizes(checkpoint, **options, kv_cache_tokens=tokens)
    return build_engine(checkpoint, head, sizes)
