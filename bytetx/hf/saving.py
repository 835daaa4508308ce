"""What `state_dict` gives of parameters that were fused or turned: tensors as the stock model's."""

from typing import Any

import torch
from torch import nn


def hook_state_dict(module: nn.Module) -> None:
    """Lets the module's state_dict give parameters in the layout that files need.

    A fused parameter's entry has a storage of its own over the same memory, so that safetensors
    does not take it for a duplicate and nothing is held twice.  A turned weight gets its old layout
    back first, until the next packed call turns it again; until then, what is written to the entry
    is written to the parameter, as in a stock model, and afterwards it is not.
    """
    if _give_entries not in module._state_dict_hooks.values():
        module.register_state_dict_pre_hook(_to_row_major)
        module._register_state_dict_hook(_give_entries)


def unhook_state_dict(module: nn.Module) -> None:
    for hooks in (module._state_dict_hooks, module._state_dict_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook in (_to_row_major, _give_entries)]:
            del hooks[key]


def _to_row_major(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Lays turned weights out by rows."""
    with torch.inference_mode(False), torch.no_grad():
        for parameter in module._parameters.values():
            # In shared memory, other processes read the weight where it lies.
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
            continue  # absent, or wanted as it is (keep_vars)
        if not entry.is_contiguous():  # another thread turned it again, or it is in shared memory
            entries[f"{prefix}{name}"] = entry.contiguous()
        elif entry.untyped_storage().nbytes() > entry.nbytes and not _is_in_shared_memory(entry):
            entries[f"{prefix}{name}"] = _with_own_storage(entry)


def _with_own_storage(t: torch.Tensor) -> torch.Tensor:
    """The same memory under a storage that begins and ends with this contiguous tensor."""
    start = t.storage_offset() * t.itemsize
    part = t.untyped_storage()[start : start + t.nbytes]
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(part, 0, t.shape, t.stride())


def _is_in_shared_memory(t: torch.Tensor) -> bool:
    """Whether other processes may hold it; torch calls every CUDA tensor shared."""
    return not t.is_cuda and t.is_shared()
