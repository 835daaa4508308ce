"""The pooler of a base model: modules that run as they are, on each sequence's first token."""

import torch
from torch import nn

# Children of a base model that make up its pooler; ALBERT's activation is one of its own.
POOLER = ("pooler", "pooler_activation")
# Children that the packed pass leaves alone: the pooler, and what reads images, with which the
# original forward runs.
APART = (*POOLER, "patch_embeddings")


def run_pooler(base: nn.Module, first: torch.Tensor) -> torch.Tensor:
    """first [batch_size, 1, hidden_size] -> [batch_size, hidden_size], for a base with a pooler."""
    pooler = base.get_submodule("pooler")
    activation = getattr(base, "pooler_activation", None)
    if activation is None:
        pooled: torch.Tensor = pooler(first)
        return pooled
    activated: torch.Tensor = activation(pooler(first[:, 0]))
    return activated
