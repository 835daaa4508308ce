"""Hooks by which `state_dict` gives fused or column-major parameters as the stock model does."""

from typing import Any

import torch
from torch import nn


def hook_state_dict(module: nn.Module) -> None:
    """Makes the module's state_dict give parameters in the layout that files need.

    The entry of a fused parameter has a separate storage over the same memory, so that safetensors
    does not take it for a duplicate and no memory is copied.  A column-major weight becomes
    row-major first, until the next packed call lays it out by columns again.  Until then, writing
    to the entry writes to the parameter, as in a stock model; afterwards it does not.
    """
    if _give_entries not in module._state_dict_hooks.values():
        module.register_state_dict_pre_hook(_to_row_major)
        module._register_state_dict_hook(_give_entries)


def unhook_state_dict(module: nn.Module) -> None:
    for hooks in (module._state_dict_hooks, module._state_dict_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook in (_to_row_major, _give_entries)]:
            del hooks[key]


def _to_row_major(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Lays column-major weights out by rows."""
    with torch.inference_mode(False), torch.no_grad():
        for parameter in module._parameters.values():
            # Other processes read a weight in shared memory in place.
            if parameter is not None and not (
                parameter.is_contiguous() or _is_in_shared_memory(parameter)
            ):
                plain = parameter.detach().clone(memory_format=torch.contiguous_format)
                with torch.inference_mode(parameter.is_inference()):
                    parameter.data = plain


def _give_entries(
    module: nn.Module, entries: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    for name in module._parameters:
        entry = entries.get(f"{prefix}{name}")
        if not isinstance(entry, torch.Tensor) or isinstance(entry, nn.Parameter):
            continue  # absent, or a Parameter (keep_vars)
        if not entry.is_contiguous():  # by another thread, or in shared memory
            entries[f"{prefix}{name}"] = entry.contiguous()
        elif entry.untyped_storage().nbytes() > entry.nbytes and not _is_in_shared_memory(entry):
            # It stays the same tensor: what is written to it counts as the parameter's change.
            with torch.inference_mode(entry.is_inference()):
                entry.data = _with_own_storage(entry)


def _with_own_storage(t: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory, with a storage of exactly its bytes."""
    start = t.storage_offset() * t.itemsize
    part = t.untyped_storage()[start : start + t.nbytes]
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(part, 0, t.shape, t.stride())


def _is_in_shared_memory(t: torch.Tensor) -> bool:
    """Whether other processes may use it; torch calls every CUDA tensor shared."""
    return not t.is_cuda and t.is_shared()
