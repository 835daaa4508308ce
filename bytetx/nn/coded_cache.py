"""A KV cache in another dtype than the model's: which models take it."""

from dataclasses import replace

from bytetx.errors import OptionError
from bytetx.nn.loading import LoadedCheckpoint


def with_cache_dtype(checkpoint: LoadedCheckpoint, kv_cache_dtype: str) -> LoadedCheckpoint:
    """The checkpoint whose engines keep keys and values so; kv_cache_dtype: as of bytetx.load.

    Raises OptionError where the model does not take it.
    """
    if kv_cache_dtype == "auto":
        return checkpoint
    if not checkpoint.generates:
        raise OptionError(
            f"kv_cache_dtype {kv_cache_dtype} is for models that generate, and this "
            f"{checkpoint.spec.family} does not; leave it out"
        )
    if checkpoint.batch_invariant:
        raise OptionError(
            f"kv_cache_dtype {kv_cache_dtype} does not go with batch_invariant, whose attention "
            "reads keys and values of the model's dtype alone; leave out one of the two"
        )
    return replace(checkpoint, kv_cache_dtype=kv_cache_dtype)


def has_coded_cache(checkpoint: LoadedCheckpoint) -> bool:
    """Whether its engines keep keys and values as E4M3 codes (ops/kv_codes.py)."""
    return checkpoint.kv_cache_dtype == "fp8"
