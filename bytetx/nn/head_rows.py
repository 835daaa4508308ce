"""Rows of a fused weight of queries, keys and values in the order that layers read them."""

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.parallel.layout import ModelShard


def separate_heads(
    rows: torch.Tensor, spec: ModelSpec, shard: ModelShard | None = None
) -> torch.Tensor:
    """Rows of (queries, key, value) of one key head after another -> q, then k, then v.

    Of a shard, the queries that are another rank's are left out.
    """
    group, num_kv_heads = spec.num_heads // spec.num_kv_heads, spec.num_kv_heads
    heads = slice(0, spec.num_heads)
    if shard is not None:
        num_kv_heads, first = len(shard.kv_heads), shard.kv_heads.start * group
        heads = slice(shard.heads.start - first, shard.heads.stop - first)
    by_group = rows.unflatten(0, (num_kv_heads, group + 2, spec.head_dim))
    q, k, v = (part.flatten(0, 1) for part in by_group.split([group, 1, 1], dim=1))
    return torch.cat([q[heads].flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)])
