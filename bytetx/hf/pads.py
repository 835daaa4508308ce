"""Whether a head's output depends on the values at pads, by the call's arguments."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_IGNORED_LABEL = -100  # of torch's CrossEntropyLoss and of transformers' losses


def is_token_of(given: Mapping[str, Any]) -> torch.Tensor | None:
    """bool [num_rows, num_columns], None where all are or the mask is another one."""
    mask = given.get("attention_mask")
    return mask.bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def loss_reads_pads(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a head with one label a token has labels at pads that count in its loss."""
    is_token, labels = is_token_of(given), given.get("labels")
    name = type(module).__name__
    if is_token is None or not isinstance(labels, torch.Tensor):
        return False
    if name == "ElectraForPreTraining":  # its loss leaves out what the mask leaves out
        return False
    if _has_own_loss(module):
        return not bool(is_token.all())
    if labels.numel() != is_token.numel():
        return False
    counted = labels.reshape(is_token.shape).to(is_token.device) != _IGNORED_LABEL
    if name.endswith(("ForCausalLM", "LMHeadModel")):  # each logit is for the next label
        counted, is_token = counted[:, 1:], is_token[:, :-1]
    return bool((counted & ~is_token).any())


def selects_pads(given: Mapping[str, Any]) -> bool:
    """Whether logits_to_keep selects logits at pads.

    Without it the caller gets all logits, and knows which of them are pads'.
    """
    is_token, keep = is_token_of(given), given.get("logits_to_keep")
    if is_token is None or keep is None or selects_all(keep):
        return False
    if isinstance(keep, torch.Tensor):
        keep = keep.to(is_token.device)
    return not bool(selected_columns(is_token.unsqueeze(2), keep).all())


def selects_all(keep: object) -> bool:
    """Whether logits_to_keep selects every logit."""
    return keep is None or (isinstance(keep, int) and keep == 0)


def selected_columns(x: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
    """What logits_to_keep keeps of [num_rows, num_columns, size], as the installed transformers
    reads it: a tensor of two dimensions has a meaning of its own since 5.23."""
    from transformers import modeling_utils

    if hasattr(modeling_utils, "slice_logits_to_keep"):
        return modeling_utils.slice_logits_to_keep(x, keep)
    return x[:, slice(-keep, None) if isinstance(keep, int) else keep, :]


def _has_own_loss(module: nn.Module) -> bool:
    """Whether the head has a custom loss, which may count the labels that are ignored here."""
    own = getattr(module, "mlm_loss_fct", None)  # DistilBERT's, a module
    if own is not None and getattr(own, "ignore_index", None) != _IGNORED_LABEL:
        return True
    return "_loss_function" in module.__dict__
