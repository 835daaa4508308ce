"""KvCache: what layers remember of sequences while they are generated, most of it in pages."""

import math
from dataclasses import dataclass

import numpy as np
import torch

_ALIGNMENT = 64  # bytes, of a row of pages on a CPU: a line of its cache


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's pages: k_cache, v_cache [num_pages, page_size, num_kv_heads, head_dim].

    k_scales, v_scales: uint8 [num_pages, num_kv_heads, page_size], of a cache of E4M3 codes
    (ops/kv_codes.py), which are uint8; None where the cache has the model's dtype.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        tensors = (self.k_cache, self.v_cache, self.k_scales, self.v_scales)
        return sum(t.nbytes for t in tensors if t is not None)


@dataclass(frozen=True, slots=True)
class LayerState:
    """The memory that a layer without attention has of each sequence, by the sequence's slot.

    conv: [num_slots, taps - 1, channels], as of ops.short_conv.  memory: as of ops.delta_rule.
    """

    conv: torch.Tensor
    memory: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self.conv.nbytes + (0 if self.memory is None else self.memory.nbytes)


@dataclass(frozen=True, slots=True)
class KvCache:
    """All layers' pages; one page number means the same tokens in every layer.

    The page allocator (generate/kv_cache.py) knows which sequence has which page.
    layers: those with attention.  states: of the others, in their order.
    """

    layers: tuple[LayerCache, ...]
    states: tuple[LayerState, ...] = ()

    @property
    def num_pages(self) -> int:
        return self.layers[0].k_cache.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.layers[0].k_cache.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory of all pages and states of all layers."""
        states = sum(state.num_bytes for state in self.states)
        return sum(layer.num_bytes for layer in self.layers) + states

    @property
    def has_codes(self) -> bool:
        """Whether keys and values are FP8."""
        return self.layers[0].k_scales is not None


def page_bytes(
    *,
    num_layers: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    has_codes: bool = False,
) -> int:
    """Bytes that one page takes in all layers, keys and values together.

    has_codes: as of allocate_cache.
    """
    vector = head_dim + 1 if has_codes else head_dim * dtype.itemsize
    return 2 * num_layers * page_size * num_kv_heads * vector


def allocate_cache(
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    has_codes: bool = False,
    device: torch.device | str = "cpu",
) -> KvCache:
    """A cache of num_pages pages a layer, of zeros.

    No result depends on what a page holds past its sequence's keys. But kernels multiply it by
    weights of 0, and compute a row again, slower, where it is inf or NaN, as memory may be that
    nobody has written.

    page_size: tokens, a power of two.  has_codes: keys and values are FP8, not of dtype.
    Raises ValueError where a size is not one.
    """
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two, got {page_size}")
    sizes = {
        "num_layers": num_layers,
        "num_pages": num_pages,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")

    def pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if torch.device(device).type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # The system's own zeros: memory that no token was written to is not taken.
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)

    def layer() -> LayerCache:
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        if not has_codes:
            return LayerCache(pages(shape, dtype), pages(shape, dtype))
        scales = (num_pages, num_kv_heads, page_size)
        sizes = (shape, shape, scales, scales)
        return LayerCache(*(pages(size, torch.uint8) for size in sizes))

    return KvCache(tuple(layer() for _ in range(num_layers)))
