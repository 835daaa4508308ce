"""Which heads, features, vocabulary and token rows each rank of a tensor-parallel group has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bytetx.checkpoint.layer_spec import ExpertSpec
from bytetx.errors import InputError

# Multiples of which a shard of features is, best first: those that whole GEMM tiles take.
_FEATURE_STEPS = (64, 32, 16, 8, 1)


class Sizes(Protocol):
    """Sizes that a grid shards: those of a ModelSpec, or of the planner's ModelShape."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def experts(self) -> ExpertSpec | None: ...


@dataclass(frozen=True, slots=True)
class ModelShard:
    """One rank's shard of a model.

    heads, kv_heads: attention heads; consecutive ones share a key and value head, which several
    ranks hold where there are fewer of them than ranks.
    inner: features between the two feed-forward layers.  expert_inner: those inside each expert,
    None where the model has no experts.  vocab: rows of the word embedding and
    of the logits' weight.
    """

    rank: int
    size: int
    heads: range
    kv_heads: range
    inner: range
    vocab: range
    expert_inner: range | None = None


def shard_model(spec: Sizes, *, rank: int, size: int) -> ModelShard:
    """The shard of one rank; the first ranks have the larger ones where they differ.

    Raises InputError where the model cannot be sharded over so many ranks.
    """
    heads, kv_heads = _shard_heads(spec.num_heads, spec.num_kv_heads, rank=rank, size=size)
    return ModelShard(
        rank,
        size,
        heads,
        kv_heads,
        local_range(feature_offsets(spec.intermediate_size, size), rank),
        local_range(feature_offsets(spec.vocab_size, size), rank),
        None
        if spec.experts is None
        else local_range(feature_offsets(spec.experts.size, size), rank),
    )


def has_even_shards(spec: Sizes, size: int) -> bool:
    """Whether every rank has as many heads and features of each layer as the others."""
    shards = [shard_model(spec, rank=rank, size=size) for rank in range(size)]
    return len({(len(s.heads), len(s.kv_heads), len(s.inner)) for s in shards}) == 1


def features(heads: range, head_dim: int) -> range:
    """The features of consecutive heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def local_range(offsets: Sequence[int], rank: int) -> range:
    return range(offsets[rank], offsets[rank + 1])


def shard_offsets(count: int, size: int, *, step: int = 1) -> tuple[int, ...]:
    """size + 1 offsets of shards of whole steps; sizes differ by one step, the first are larger.

    Where the last step is not whole, the last shard that is not empty is shorter.
    """
    num_steps = -(-count // step)
    each, more = divmod(num_steps, size)
    ends = (each * i + min(i, more) for i in range(size + 1))
    return tuple(min(end * step, count) for end in ends)


def feature_offsets(count: int, size: int) -> tuple[int, ...]:
    """Offsets of equal shards in the largest step that allows it, else in the largest that fits."""
    for step in _FEATURE_STEPS:
        if count % (step * size) == 0:
            return shard_offsets(count, size, step=step)
    step = next(step for step in _FEATURE_STEPS if count >= step * size or step == 1)
    return shard_offsets(count, size, step=step)


def _shard_heads(num_heads: int, num_kv_heads: int, *, rank: int, size: int) -> tuple[range, range]:
    group = num_heads // num_kv_heads
    if num_kv_heads >= size:
        kv_heads = local_range(shard_offsets(num_kv_heads, size), rank)
        return range(kv_heads.start * group, kv_heads.stop * group), kv_heads
    ranks_each = size // num_kv_heads
    if size % num_kv_heads or group < ranks_each:
        fitting = [n for n in range(1, num_heads + 1) if _fits(num_heads, num_kv_heads, n)]
        raise InputError(
            f"tp must be one of {_shown(fitting)} for a model of {num_heads} attention heads with "
            f"{num_kv_heads} for keys and values, got {size}"
        )
    kv_head = rank // ranks_each
    local = local_range(shard_offsets(group, ranks_each), rank % ranks_each)
    return range(kv_head * group + local.start, kv_head * group + local.stop), range(
        kv_head, kv_head + 1
    )


def _fits(num_heads: int, num_kv_heads: int, size: int) -> bool:
    group = num_heads // num_kv_heads
    return size <= num_kv_heads or (size % num_kv_heads == 0 and group >= size // num_kv_heads)


def _shown(sizes: list[int]) -> str:
    """1 ... 12 where they are consecutive, else a list."""
    if sizes == list(range(1, len(sizes) + 1)) and len(sizes) > 2:
        return f"1 ... {len(sizes)}"
    return ", ".join(map(str, sizes))
