"""PackedPast: a packed pass's keys and values as transformers' own cache, laid out on demand."""

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from bytetx.hf.padding import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KeyValues = list[tuple[torch.Tensor, torch.Tensor]]


class PackedPast(DynamicCache):
    """A causal model's past_key_values, which most callers never look into.

    Until one does, it holds the packed rows of each layer; then transformers' own layers, with
    zeros at pads, and is an ordinary DynamicCache from there on.
    """

    def __init__(self, config: "PreTrainedConfig", layout: Layout, rows: KeyValues):
        """rows: each layer's keys and values, [total_tokens, num_kv_heads, head_dim]."""
        self._rows: KeyValues | None = None
        super().__init__(config=config)
        self._layout, self._rows = layout, rows

    @property
    def layers(self) -> list[Any]:
        if self._rows is not None:
            rows, self._rows = self._rows, None
            fill(self, rows, self._layout)
        return self._layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        self._layers = layers


def fill(cache: DynamicCache, rows: KeyValues, layout: Layout) -> None:
    """Puts a packed pass into an empty cache of transformers."""
    for i, (k, v) in enumerate(rows):
        cache.update(_padded(k, layout), _padded(v, layout), i)


def is_empty(past: object) -> bool:
    """Whether this is a plain cache of transformers that holds nothing yet."""
    return type(past) is DynamicCache and past.get_seq_length() == 0


def _padded(rows: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[total_tokens, heads, head_dim] -> [batch_size, heads, num_columns, head_dim]."""
    padded: torch.Tensor = layout.scatter(rows.flatten(1)).unflatten(2, rows.shape[1:])
    return padded.transpose(1, 2)
