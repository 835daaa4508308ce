"""wrap and unwrap: finding the base models in an object and replacing their forwards."""

from collections.abc import Collection
from typing import TYPE_CHECKING, TypeGuard, TypeVar

from torch import nn

from bytetx.errors import BytetxError, InputError
from bytetx.hf.causal import (
    CAUSAL_OUTPUTS,
    CausalForward,
    CausalHeadForward,
    LmHeadForward,
)
from bytetx.hf.forward import OUTPUTS, HeadForward, PackedForward, StandIn
from bytetx.hf.generate import GenerateStandIn
from bytetx.hf.plan import separate_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from bytetx.hf.generate import GenerativeModel

ModelT = TypeVar("ModelT", bound=nn.Module)

OLDEST_TRANSFORMERS = (5, 0)
PADS = ("zeros", "stock")


def wrap(model: ModelT, *, pads: str = "zeros") -> ModelT:
    """The same object, its forward running on packed tokens from now on.

    model: a transformers model of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, MPNet or
    ELECTRA, of GPT-2, GPT-Neo, GPT-J, GPT-NeoX, OPT, Llama, Mistral, Qwen2 or Qwen3, bare or with
    any of its heads; a SentenceTransformer or CrossEncoder; or any module that holds one of these.
    pads: what a caller finds at pads, see below.  Wrapping again changes `pads` and nothing else.

    Class, config, state_dict, signature and API stay.  Padded input gives the same outputs at
    every token; at pads, hidden states are zeros (and a row without tokens is all zeros), where
    Hugging Face has numbers without meaning; pooler_output reads a row's first token even where
    pads stand before it.  A mean over all rows of a padded batch, pads included, is thus another
    number: pads="stock" gives Hugging Face's at pads, too.  It runs the original forward, without a
    warning, for each batch that has pads which the output shows (hidden states, logits of every
    token), since pads then cost what tokens cost; batches without pads, heads on the first token,
    logits_to_keep and generate run packed as ever.

    Packed input: input_ids [1, total_tokens] or [total_tokens] with cu_seqlens (or cu_seq_lens_q
    and cu_seq_lens_k), int [batch_size + 1]; a head that reads the first token then gives one row a
    sequence.

    A causal model's past_key_values are transformers' own cache, laid out when somebody looks into
    it (use_cache=False holds none); a call that goes on from one runs the original forward.  Its
    generate decodes greedily by continuous batching, to transformers' own tokens; sampling, beams,
    and what else changes logits or ends answers, run transformers' loop, and it says so once.  Its
    pages, and a GPU's graphs, stay for the next call, until the model is moved or unwrapped.

    Ids outside their tables raise InputError: on a CPU at once; on a GPU, which is not waited for,
    the call gives NaN where they count, and the thread's next packed call raises.

    The parameters are shared, not copied; query, key and value of a layer become views of one
    storage, and so do gate and value; GPT-2's weights are turned in place.  state_dict still gives
    contiguous tensors with storages of their own over the same memory, which safetensors and torch
    save as the stock model's; GPT-2's weights are turned back for it, until the next packed call
    turns them again, and only until then is writing to its entries writing to the model.  Where
    bytetx cannot give the model's answer (training, gradients, attention weights, changed modules),
    the original forward runs, and a FallbackWarning says so once a reason.
    Raises TypeError for anything else, InputError for other `pads`, and BytetxError where
    transformers is too old or accelerate has spread the model over devices.
    """
    if pads not in PADS:
        raise InputError(f"pads must be one of {', '.join(map(repr, PADS))}, got {pads!r}")
    bases = _base_models(model)
    _check_transformers()
    for base in bases:
        _check_not_dispatched(base)
    for base in bases:
        forward = base.__dict__.get("forward")
        if not isinstance(forward, PackedForward):
            kind = CausalForward if type(base).__name__ in CAUSAL_OUTPUTS else PackedForward
            forward = kind(base)
            forward.current_plan()
            base.forward = forward
            base._apply = forward.apply_to_module  # type: ignore[method-assign]  # unwrap undoes it
        forward.pads = pads
    for module in model.modules():
        if _is_head(module) and "forward" not in module.__dict__:
            module.forward = _head_kind(module)(module)
            if isinstance(module.forward, LmHeadForward) and _generates(module):
                module.generate = GenerateStandIn(module)
    return model


def unwrap(model: ModelT) -> ModelT:
    """The same object with everything that wrap did undone; one never wrapped stays as it is.

    Query, key and value parameters get storages of their own again.
    Raises TypeError where model is no torch module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unwrap takes a model that wrap returned, got {type(model).__name__}")
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, PackedForward):
            del module.forward, module._apply
            forward.forget()
            separate_parameters(module)
        elif isinstance(forward, StandIn):
            del module.forward
            module.__dict__.pop("generate", None)
    return model


def _base_models(model: object) -> list["PreTrainedModel"]:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"wrap takes a loaded model, got {type(model).__name__}; load it first with "
            "transformers or sentence-transformers, or give a path or id to bytetx.load"
        )
    known = OUTPUTS | CAUSAL_OUTPUTS
    bases = [module for module in model.modules() if _is_transformers_class(module, known)]
    if not bases:
        raise TypeError(
            f"wrap found no model that it supports in {type(model).__name__}; supported are "
            f"{', '.join(known)} of transformers, any of their heads, and "
            "SentenceTransformer or CrossEncoder objects that hold one"
        )
    return bases


def _is_transformers_class(
    module: nn.Module, names: Collection[str]
) -> TypeGuard["PreTrainedModel"]:
    """Whether the module's class is transformers' own (a subclass may compute something else)."""
    kind = type(module)
    return kind.__module__.startswith("transformers.models.") and kind.__name__ in names


def _is_head(module: nn.Module) -> TypeGuard["PreTrainedModel"]:
    """Whether the module is one of transformers' heads on a base model that is wrapped."""
    base = getattr(module, "base_model", None)
    return (
        isinstance(base, nn.Module)
        and base is not module
        and isinstance(base.__dict__.get("forward"), PackedForward)
        and type(module).__module__ == type(base).__module__
    )


def _generates(module: nn.Module) -> TypeGuard["GenerativeModel"]:
    return hasattr(module, "generate")


def _head_kind(module: "PreTrainedModel") -> type[StandIn]:
    if not isinstance(module.base_model.__dict__["forward"], CausalForward):
        return HeadForward
    is_lm = type(module).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return LmHeadForward if is_lm else CausalHeadForward


def _check_transformers() -> None:
    import transformers

    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise BytetxError(
            f"wrap needs transformers {oldest} or newer, found {transformers.__version__}; "
            "upgrade it, or use bytetx.load, which does not need transformers"
        )


def _check_not_dispatched(base: nn.Module) -> None:
    for name, module in base.named_modules():
        if hasattr(module, "_hf_hook"):
            raise BytetxError(
                f"{name or type(base).__name__} carries an accelerate hook (device_map or "
                "offloading); load the model on one device without device_map, then wrap it"
            )
        forward = module.__dict__.get("forward")
        if module is base and forward is not None and not isinstance(forward, PackedForward):
            raise BytetxError(
                f"the forward of {type(base).__name__} was already replaced by {forward!r}; "
                "undo that first"
            )
