"""EngineCache: a wrapped model's generation engine, reused by its next calls."""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from bytetx.generate.build import build_engine, generation_sizes
from bytetx.generate.engine import GenerationEngine
from bytetx.nn.heads import LmHead
from bytetx.nn.loading import LoadedCheckpoint
from bytetx.nn.token_budget import default_token_budget
from bytetx.ops.check import addresses


@dataclass(frozen=True, slots=True)
class EngineNeeds:
    """The sizes that a call needs of an engine.

    num_seqs: prompts.  num_tokens: of all prompts and answers, rounded up to pages.
    longest: tokens of the longest sequence.
    """

    num_seqs: int
    num_tokens: int
    longest: int


@dataclass(frozen=True, slots=True)
class CachedEngine:
    """An engine, the checkpoint whose parameters it uses, and the sizes that it was built for."""

    engine: GenerationEngine
    checkpoint: LoadedCheckpoint
    needs: EngineNeeds


class EngineCache:
    """Holds at most one idle engine. A call takes it and puts it back; a concurrent call builds
    another one.

    A reused engine keeps its memory and CUDA graphs, which read the parameters in place. Its cached
    prefixes are invalidated, because the parameters may have changed since.
    """

    def __init__(self) -> None:
        self._idle: list[CachedEngine] = []

    def clear(self) -> None:
        """Drops the engine and its memory."""
        self._idle.clear()

    def take(self, checkpoint: LoadedCheckpoint, needs: EngineNeeds) -> CachedEngine:
        """The idle engine if it belongs to this model and is large enough, else a new one.

        A new engine has at least the sizes of the old one.
        """
        idle = None
        with suppress(IndexError):  # none, or another thread took it
            idle = self._idle.pop()
        if idle is not None and _is_same(idle.checkpoint, checkpoint):
            needs = _both(needs, idle.needs)
            if needs == idle.needs:
                idle.engine.on_weights_changed()
                return idle
        del idle  # frees its memory for the new one
        return CachedEngine(_build(checkpoint, needs), checkpoint, needs)

    def put(self, engine: CachedEngine) -> None:
        """Caches an engine whose requests have all ended."""
        assert not engine.engine.has_work
        self._idle[:] = [engine]


def _both(one: EngineNeeds, other: EngineNeeds) -> EngineNeeds:
    return EngineNeeds(
        max(one.num_seqs, other.num_seqs),
        max(one.num_tokens, other.num_tokens),
        max(one.longest, other.longest),
    )


def _is_same(one: LoadedCheckpoint, other: LoadedCheckpoint) -> bool:
    """Whether both use the same parameters; moving one makes a new plan and transformer."""
    return one.transformer is other.transformer and _addresses(one) == _addresses(other)


def _addresses(checkpoint: LoadedCheckpoint) -> list[int]:
    head = checkpoint.heads.lm
    assert head is not None
    decoder = head.decoder.dense  # the module's own parameters are floats
    parts = (decoder.weight, decoder.bias)
    return addresses([part for part in parts if part is not None])


def _build(checkpoint: LoadedCheckpoint, needs: EngineNeeds) -> GenerationEngine:
    """An engine whose cache holds all sequences if they fit the device, and at least the longest.

    The other sequences wait for pages.
    """
    head = checkpoint.heads.lm
    assert isinstance(head, LmHead)
    budget = default_token_budget(checkpoint.spec, checkpoint.device)
    sizes = partial(
        generation_sizes,
        checkpoint,
        token_budget=budget,
        max_num_seqs=min(needs.num_seqs, budget),
    )
    tokens = max(min(needs.num_tokens, sizes().kv_cache_tokens), needs.longest)
    return build_engine(checkpoint, head, sizes(kv_cache_tokens=tokens))
