"""Grid: ranks in data x z x y x x, which of them form a group, and which sequences a rank gets.

A rank's number is ((data * Z + z) * Y + y) * X + x: x changes fastest, as AxoNN's columns do, so
that the axes with the most traffic stay inside a node. The axes are:

- data: replicas. Each has all weights and takes some sequences of every batch.
- z: takes some sequences as well, but each rank holds 1/Z of the layers' weights and the others'
  parts are gathered while the layer before runs.
- y: tensor parallelism. Attention heads and inner features are divided.
- x: the hidden features are divided: products of q, k, v and of the first feed-forward layer are
  sums over x, and so are the statistics of norms.
"""

import heapq
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bytetx.errors import OptionError, shown

AXES = ("data", "z", "y", "x")
_PART = re.compile(r"(data|z|y|x)([1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class Grid:
    """How many ranks lie along each axis; 1 where an axis is not used."""

    data: int = 1
    z: int = 1
    y: int = 1
    x: int = 1

    @property
    def size(self) -> int:
        """Ranks in total."""
        return self.data * self.z * self.y * self.x

    @property
    def num_slots(self) -> int:
        """Parts that a batch's sequences are divided into: data * z."""
        return self.data * self.z

    @property
    def is_y_alone(self) -> bool:
        """Whether no other axis has more than one rank: tensor parallelism, or one device."""
        return self.y == self.size

    def length(self, axis: str) -> int:
        """Ranks along one of AXES."""
        return int(getattr(self, axis))

    def inner(self, axis: str) -> int:
        """Ranks that lie closer together than neighbours along the axis do."""
        return math.prod(self.length(other) for other in AXES[AXES.index(axis) + 1 :])

    def coordinates(self, rank: int) -> "Coordinates":
        """Where a rank lies along each axis."""
        return Coordinates(*(rank // self.inner(axis) % self.length(axis) for axis in AXES))

    def rank(self, at: "Coordinates") -> int:
        """The rank that lies there; the inverse of coordinates."""
        return sum(getattr(at, axis) * self.inner(axis) for axis in AXES)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from this one along the axis alone, itself included, in order."""
        step = self.inner(axis)
        first = rank - getattr(self.coordinates(rank), axis) * step
        return tuple(first + i * step for i in range(self.length(axis)))

    def slots(self, rank: int) -> tuple[int, ...]:
        """The ranks at this one's y and x, one of each slot, in the order of slots."""
        step = self.inner("z")
        return tuple(rank % step + i * step for i in range(self.num_slots))

    def slot(self, rank: int) -> int:
        """The part of a batch's sequences that a rank computes."""
        return rank // self.inner("z")

    def __str__(self) -> str:
        """As parse reads it: axes of more than one rank, "1" where there is none."""
        named = [f"{axis}{self.length(axis)}" for axis in AXES if self.length(axis) > 1]
        return ".".join(named) or "1"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's coordinate along each axis, from 0."""

    data: int
    z: int
    y: int
    x: int


def parse_grid(text: str) -> Grid:
    """ "data2.z2" -> Grid(data=2, z=2). Raises OptionError that says what a grid looks like."""
    lengths: dict[str, int] = {}
    for part in () if text == "1" else text.split("."):
        found = _PART.fullmatch(part.strip())
        if found is None or found[1] in lengths:
            raise OptionError(
                f"grid must name axes among {', '.join(AXES)} once each with their ranks, as in "
                f"data2.z2 or y4, got {shown(text)}"
            )
        lengths[found[1]] = int(found[2])
    return Grid(**lengths)


def grids_of(size: int) -> Iterator[Grid]:
    """Every grid of so many ranks: all ordered products of four factors."""
    for data in divisors(size):
        for z in divisors(size // data):
            for y in divisors(size // (data * z)):
                yield Grid(data, z, y, size // (data * z * y))


def divisors(n: int) -> list[int]:
    """The divisors of n, in order."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def assign_sequences(
    seqlens: Sequence[int], num_slots: int, *, hidden_size: int
) -> list[list[int]]:
    """The sequences of each slot, ascending: whole ones, balanced by the time that they take.

    The longest is placed first, always where the least work is. A sequence of l tokens takes
    l * (1 + l / (6 * hidden_size)) of the time of a token: its products, and its attention.
    The same on every rank that calls it with the same lengths.
    """
    slots: list[list[int]] = [[] for _ in range(num_slots)]
    loads = [(0.0, slot) for slot in range(num_slots)]
    for i in sorted(range(len(seqlens)), key=lambda i: (-seqlens[i], i)):
        load, slot = loads[0]
        slots[slot].append(i)
        work = seqlens[i] * (1 + seqlens[i] / (6 * hidden_size))
        heapq.heapreplace(loads, (load + work, slot))
    return [sorted(slot) for slot in slots]


def gathered_numbers(num_weights: int, z: int) -> int:
    """Numbers that a gather of so many weights moves: z equal shards, the last one padded."""
    return -(-num_weights // z) * z
