"""Which models are in memory: a budget of bytes, idle times, and who makes room for whom.

It knows no weights, threads or clocks: callers say what happens, and when.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where a model is. LEAVING: it takes no more requests until it is out, or may stay."""

    OUT = "unloaded"
    LOADING = "loading"
    IN = "loaded"
    LEAVING = "unloading"


@dataclass(slots=True, eq=False)
class Place:
    """A model's place in memory.

    num_bytes: of its weights; expected before it was loaded once.  num_running: its requests.
    last_used: when the last one came or ended, in seconds of a clock of the caller's.
    num_asked, last_asked: the same of requests that somebody waits for, which are not of batches.
    """

    name: str
    num_bytes: int
    state: State = State.OUT
    num_running: int = 0
    last_used: float = 0.0
    num_asked: int = 0
    last_asked: float = -math.inf

    @property
    def is_idle(self) -> bool:
        """Whether it is in memory and nobody uses it."""
        return self.state is State.IN and not self.num_running


class Residency:
    """The rules of a server whose models share a memory."""

    def __init__(
        self,
        places: Sequence[Place],
        *,
        budget_bytes: int | None = None,
        unload_after_s: float | None = None,
    ):
        """budget_bytes: of the weights of all models in memory; None is no limit.
        unload_after_s: that a model may be idle; None is for ever."""
        self._places = places
        self.budget_bytes, self._unload_after_s = budget_bytes, unload_after_s

    @property
    def held_bytes(self) -> int:
        """Bytes of the models that are in memory, or on their way there."""
        return sum(one.num_bytes for one in self._places if one.state is not State.OUT)

    def fits_alone(self, place: Place) -> bool:
        return self.budget_bytes is None or place.num_bytes <= self.budget_bytes

    def make_room(self, place: Place, *, asked_before: float = math.inf) -> list[Place] | None:
        """The models to move out before `place` may come in, or stay: as few as will do, idle ones
        before others, and of each kind those that were not used for longest.

        asked_before: of those alone that nobody has asked for since then, or asks for now.
        None where even all of them would not do.
        """
        if self.budget_bytes is None:
            return []
        own = place.num_bytes if place.state is State.OUT else 0
        needed = self.held_bytes + own - self.budget_bytes
        given: list[Place] = []
        freed = 0
        others = self._others(place, asked_before)
        for one in sorted(others, key=lambda one: (not one.is_idle, one.last_used)):
            if freed >= needed:
                break
            given.append(one)
            freed += one.num_bytes
        if freed < needed:
            return None
        for one in reversed(given[:]):  # a large one may have made smaller ones needless
            if freed - one.num_bytes >= needed:
                given.remove(one)
                freed -= one.num_bytes
        return given

    def _others(self, place: Place, asked_before: float) -> list[Place]:
        others = [one for one in self._places if one.state is State.IN and one is not place]
        if asked_before == math.inf:
            return others
        return [one for one in others if not one.num_asked and one.last_asked < asked_before]

    def expired(self, now: float) -> list[Place]:
        """Models that have been idle for too long."""
        if self._unload_after_s is None:
            return []
        limit = now - self._unload_after_s
        return [one for one in self._places if one.is_idle and one.last_used <= limit]

    def next_expiry(self) -> float | None:
        """When the first of those that are idle will have been so for too long; None: never."""
        if self._unload_after_s is None:
            return None
        idle = [one.last_used for one in self._places if one.is_idle]
        return min(idle) + self._unload_after_s if idle else None
