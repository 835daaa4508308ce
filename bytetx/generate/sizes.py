"""How large a generation engine is: sequences at a time, pages, and the memory that they take."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar

import torch

from bytetx.arguments import check_positive
from bytetx.errors import DeviceMemoryError
from bytetx.nn.kv_cache import KvCache, allocate_cache, page_bytes
from bytetx.nn.loading import LoadedCheckpoint
from bytetx.ops.linear import LinearWeight, primitives_bytes
from bytetx.ops.rows import tile_rows
from bytetx.runtime.faults import is_out_of_memory
from bytetx.runtime.paged_layout import MAX_MIXED_TOKENS

T = TypeVar("T")

PAGE_SIZE = 16  # tokens: a sequence wastes half a page on average, and shares whole pages only
_TYPICAL_TOKENS = 1024  # of a sequence, prompt and answer
_CPU_SEQS, _CUDA_SEQS = 64, 256
_CUBLAS_BYTES = 32 << 20  # that torch gives cuBLAS on Hopper, once for graphs and once beside them
# The rest of a CPU's memory is the caller's; on a GPU a step's activations need some of it.
_CPU_SHARE, _CUDA_SHARE = 0.25, 0.8


@dataclass(frozen=True, slots=True)
class GenerationSizes:
    """What an engine takes.

    max_num_seqs: sequences that run at a time.  token_budget: tokens a step.  num_pages, of
    page_size tokens each: the cache, of cache_bytes; weights_bytes: the model beside it.
    workspace_bytes: the most that a step holds while it runs, on a GPU with what graphs hold.
    primitives_bytes: what oneDNN comes to keep on a CPU, as steps of more sizes have run.
    """

    max_num_seqs: int
    token_budget: int
    page_size: int
    num_pages: int
    cache_bytes: int
    weights_bytes: int
    workspace_bytes: int
    primitives_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them: the most memory that generation takes of the device."""
        held = self.weights_bytes + self.cache_bytes
        return held + self.workspace_bytes + self.primitives_bytes

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens whose keys and values the cache holds."""
        return self.num_pages * self.page_size

    def __str__(self) -> str:
        primitives = f"primitives {self.primitives_bytes / 2**20:,.1f} MiB, "
        return (
            f"weights {self.weights_bytes / 2**20:,.1f} MiB, key-value cache "
            f"{self.cache_bytes / 2**20:,.1f} MiB ({self.kv_cache_tokens:,} tokens), workspace "
            f"{self.workspace_bytes / 2**20:,.1f} MiB, {primitives * (self.primitives_bytes > 0)}"
            f"at most {self.max_num_seqs} sequences and {self.token_budget:,} tokens a step"
        )


def generation_sizes(
    checkpoint: LoadedCheckpoint,
    *,
    token_budget: int,
    kv_cache_tokens: int | None = None,
    max_num_seqs: int | None = None,
) -> GenerationSizes:
    """The sizes that were asked for; None is what fits the device.

    kv_cache_tokens: what max_num_seqs sequences of typical length need, at most a share of the
    memory (on a GPU, of what is free).  max_num_seqs: at most token_budget.
    Raises InputError where one is no positive integer.
    """
    spec, device = checkpoint.spec, checkpoint.device
    is_cuda = device.type == "cuda"
    if max_num_seqs is None:
        max_num_seqs = min(_CUDA_SEQS if is_cuda else _CPU_SEQS, token_budget)
    check_positive("max_num_seqs", max_num_seqs)
    bytes_each = page_bytes(
        num_layers=spec.num_layers,
        page_size=PAGE_SIZE,
        num_kv_heads=checkpoint.transformer.blocks.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=checkpoint.dtype,
    )
    if kv_cache_tokens is None:
        wanted = max_num_seqs * min(spec.max_positions, _TYPICAL_TOKENS)
        fitting = _cache_limit_bytes(device) // bytes_each * PAGE_SIZE
        kv_cache_tokens = max(min(wanted, fitting), 1)
    check_positive("kv_cache_tokens", kv_cache_tokens)
    num_pages = -(-kv_cache_tokens // PAGE_SIZE)
    return GenerationSizes(
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        cache_bytes=num_pages * bytes_each,
        weights_bytes=_weights_bytes(checkpoint),
        workspace_bytes=_workspace_bytes(checkpoint, token_budget, max_num_seqs),
        primitives_bytes=_primitives_bytes(checkpoint, token_budget),
    )


def allocate(sizes: GenerationSizes, checkpoint: LoadedCheckpoint) -> KvCache:
    """The cache; DeviceMemoryError where the device has no room for it."""
    spec = checkpoint.spec
    try:
        return allocate_cache(
            num_layers=spec.num_layers,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            num_kv_heads=checkpoint.transformer.blocks.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=checkpoint.dtype,
            device=checkpoint.device,
        )
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"a key-value cache of {sizes.kv_cache_tokens:,} tokens ({sizes.cache_bytes:,} bytes) "
            f"does not fit the memory of {checkpoint.device}; lower kv_cache_tokens"
        ) from error


def _cache_limit_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE)


def _workspace_bytes(checkpoint: LoadedCheckpoint, token_budget: int, max_num_seqs: int) -> int:
    """Activations of a full step, and logits of all sequences with two f32 copies of them.

    On a GPU the graphs of small steps hold activations and logits of their own.
    """
    spec, itemsize = checkpoint.spec, checkpoint.dtype.itemsize
    if checkpoint.device.type == "cpu":
        token_budget, max_num_seqs = tile_rows(token_budget), tile_rows(max_num_seqs)
    logits = max_num_seqs * spec.vocab_size
    step = spec.workspace_bytes(token_budget, itemsize) + logits * (itemsize + 2 * 4)
    if checkpoint.device.type == "cuda":
        step += 2 * _CUBLAS_BYTES
        captured = max(max_num_seqs, min(MAX_MIXED_TOKENS, token_budget))
        step += spec.workspace_bytes(captured, itemsize) + logits * itemsize
    return step


def _primitives_bytes(checkpoint: LoadedCheckpoint, token_budget: int) -> int:
    if checkpoint.device.type != "cpu":
        return 0
    linears = _parts([checkpoint.transformer, checkpoint.heads.lm], LinearWeight)
    return primitives_bytes(linears, most_rows=token_budget)


def _weights_bytes(checkpoint: LoadedCheckpoint) -> int:
    """Of all tensors that the model and its heads hold, shared ones counted once."""
    sizes = {}
    for tensor in _parts([checkpoint.transformer, checkpoint.heads], torch.Tensor):
        if tensor.is_mkldnn:  # its storage is oneDNN's own
            sizes[id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


def _parts(owner: object, kind: type[T]) -> Iterator[T]:
    """Every object of a kind in lists, records and objects of this package."""
    if isinstance(owner, kind):
        yield owner
    elif isinstance(owner, list | tuple):
        for part in owner:
            yield from _parts(part, kind)
    elif type(owner).__module__.startswith("bytetx."):
        # What the compiled modules define has neither.
        own = getattr(owner, "__dict__", ())
        names = [f.name for f in fields(owner)] if is_dataclass(owner) else list(own)
        for name in names:
            yield from _parts(getattr(owner, name), kind)
