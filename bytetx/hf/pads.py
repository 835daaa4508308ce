"""Pads in a call: which positions they are, whether a loss reads them, and zeros in the output."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bytetx.hf.arguments import PAST_NAMES

_IGNORED_LABEL = -100  # as in torch's CrossEntropyLoss and transformers' losses


def is_token_of(given: Mapping[str, Any]) -> torch.Tensor | None:
    """bool, of the input's shape without features: whether each position is a token.

    None where no mask says so.  A mask that also covers a filled cache ends with the input's.
    """
    mask, ids, embeds = (
        given.get(name) for name in ("attention_mask", "input_ids", "inputs_embeds")
    )
    shape = None
    if isinstance(ids, torch.Tensor):
        shape = ids.shape
    elif isinstance(embeds, torch.Tensor):
        shape = embeds.shape[:-1]
    if not isinstance(mask, torch.Tensor) or not shape or mask.dim() != len(shape):
        return None
    mask = mask[..., -shape[-1] :]
    return mask.bool() if mask.shape == shape else None


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
    """Whether some of the logits that logits_to_keep selects are at pads."""
    kept = kept_tokens(given)
    return kept is not None and not bool(kept.all())


def kept_tokens(given: Mapping[str, Any]) -> torch.Tensor | None:
    """is_token_of the positions that logits_to_keep selects."""
    is_token, keep = is_token_of(given), given.get("logits_to_keep")
    if is_token is None or is_token.dim() != 2 or keep is None or selects_all(keep):
        return is_token
    if isinstance(keep, torch.Tensor):
        keep = keep.to(is_token.device)
    return selected_columns(is_token.unsqueeze(2), keep).squeeze(-1)


def selects_all(keep: object) -> bool:
    """Whether logits_to_keep selects every logit."""
    return keep is None or (isinstance(keep, int) and keep == 0)


def selected_columns(x: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
    """The columns of [num_rows, num_columns, size] that logits_to_keep selects, as the installed
    transformers reads it: a tensor of two dimensions has a meaning of its own since 5.23."""
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


def zero_pads(output: Any, given: Mapping[str, Any], *, has_plain_logits: bool = False) -> None:
    """Sets every position of a pad to zeros, in an output that transformers' own code made.

    output: a ModelOutput, changed in place.  given: the call's arguments.
    has_plain_logits: its 2-dimensional tensors are of one number per position (answers' spans).
    Tensors that others may hold, of which hidden_states[0] can be the caller's inputs_embeds, are
    replaced.
    """
    is_token = is_token_of(given)
    if is_token is None or (not is_token.is_cuda and bool(is_token.all())):
        return
    kept = kept_tokens(given)
    for name, value in list(output.items()):
        if name.endswith("logits"):
            output[name] = _zeroed(value, kept, has_features=not has_plain_logits, in_place=True)
        elif name == "last_hidden_state":
            output[name] = _zeroed(value, is_token)
        elif name == "hidden_states":
            output[name] = tuple(_zeroed(states, is_token) for states in value)
        elif name in PAST_NAMES:
            _zero_past(value, is_token)


def _zeroed(
    x: Any, is_token: torch.Tensor | None, *, has_features: bool = True, in_place: bool = False
) -> Any:
    """x with zeros at pads, if it has a row of features, or a number, at each position."""
    if not isinstance(x, torch.Tensor) or is_token is None:
        return x
    shape = x.shape[:-1] if has_features else x.shape
    if is_token.dim() == 3 and shape != is_token.shape:
        is_token = is_token.flatten(0, 1)  # the choices of a question are rows of the base model
    if shape != is_token.shape:
        return x
    is_pad = ~is_token.to(x.device)
    is_pad = is_pad.unsqueeze(-1) if has_features else is_pad
    if in_place and not x.requires_grad:  # a vocabulary's logits are the largest tensor of a call
        return x.masked_fill_(is_pad, 0)
    return x.masked_fill(is_pad, 0)


def _zero_past(past: Any, is_token: torch.Tensor) -> None:
    """The same of a dynamic cache's keys and values; a packed pass has left zeros there."""
    from transformers import cache_utils

    from bytetx.hf.past import PackedPast

    kinds = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
    if isinstance(past, PackedPast):
        return
    for layer in getattr(past, "layers", ()):
        if type(layer) not in kinds or layer.keys is None or layer.keys.shape[2] == 0:
            continue
        columns = min(layer.keys.shape[2], is_token.shape[-1])  # the last ones are this call's
        is_pad = ~is_token[..., -columns:].reshape(-1, columns).to(layer.keys.device)
        if len(layer.keys) != len(is_pad):
            continue
        is_pad = F.pad(is_pad, (layer.keys.shape[2] - columns, 0))[:, None, :, None]
        layer.keys, layer.values = (t.masked_fill(is_pad, 0) for t in (layer.keys, layer.values))
