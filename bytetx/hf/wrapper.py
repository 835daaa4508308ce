"""wrap and unwrap: finding the base models in an object and replacing their forwards."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from torch import nn

from bytetx.checkpoint.families import read_families
from bytetx.checkpoint.spec import build_spec
from bytetx.errors import BytetxError, CheckpointError, InputError, shown
from bytetx.hf.causal import (
    CAUSAL_OUTPUTS,
    CausalForward,
    CausalHeadForward,
    LmHeadForward,
)
from bytetx.hf.forward import (
    OUTPUTS,
    ExpansionForward,
    HeadForward,
    PackedForward,
)
from bytetx.hf.generate import GenerateStandIn
from bytetx.hf.plan import separate_parameters
from bytetx.hf.stand_in import LoopStandIn, StandIn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from bytetx.hf.generate import GenerativeModel

ModelT = TypeVar("ModelT", bound=nn.Module)

OLDEST_TRANSFORMERS = (5, 0)
PADS = ("zeros", "stock")
WRAP_DTYPES = ("auto", "fp8")
# Of the modules that transformers makes of a checkpoint's Python files.
_CODE_OF_FILES = "transformers_modules."


def wrap(
    model: ModelT,
    *,
    pads: str = "zeros",
    families: str | Path | None = None,
    dtype: str = "auto",
) -> ModelT:
    """Replaces the model's forward by one on packed tokens and returns the same object.

    model: a transformers model of BERT, RoBERTa, XLM-RoBERTa, XLM-RoBERTa-XL, CamemBERT, RoBERTa-
    PreLayerNorm, DistilBERT, MPNet, ELECTRA, ALBERT, DeBERTa (v1, v2, v3), ModernBERT, EuroBERT,
    UltraBERT, NomicBERT, GTE, Jina embeddings v3, EmbeddingGemma 2, NeoMME (its text), of the
    encoders of T5 and mT5, of GPT-2, GPT-Neo, GPT-J, GPT-NeoX, OPT, Llama, Mistral, Ministral 3,
    Mixtral, Qwen2, Qwen3, Qwen3-MoE, Phi-3, StarCoder2, StableLM, SmolLM3, OLMo 2, Granite, GPT-
    BigCode, Falcon or Gemma 1 to 3, bare or with any of its heads; a SentenceTransformer,
    CrossEncoder, SparseEncoder or MultiVectorEncoder; or any module that holds one of these.
    pads: the values at pads, see below.  Wrapping again changes `pads` and `dtype` only.
    families: a folder of TOML files as bytetx.load takes it, for configs whose model_type bytetx
    does not know, or knows otherwise; the classes are those above.
    dtype: "auto" multiplies in the model's own; "fp8" multiplies copies of the layers' weights in
    FP8 (docs/quantization.md), which take half of the parameters' memory beside them and are made
    again once a parameter changes. Where that cannot run, the original forward does, and a
    FallbackWarning says why.

    Class, config, state_dict, signature and API stay.  Padded input gives the same outputs at every
    token.  At a pad every output is zeros, whichever forward runs: hidden states, logits of any
    head and any logits_to_keep, keys and values; pooler_output reads each row's first token, zeros
    of a row that has none.  Only training mode and export leave the original's output as it is, and
    transformers' own generation loop finds Hugging Face's values in logits and hidden states (keys
    and values of the cache that generate returns are zeros).  A mean over a padded batch that
    includes pads therefore differs.  pads="stock" gives Hugging Face's (meaningless) values at all
    pads instead: it runs the original forward, without a warning, for each batch whose output has
    values at pads.  Batches without pads, heads on the first token, logits_to_keep that selects
    tokens, and generate still run packed, and their keys and values at pads are zeros.

    Packed input: input_ids [1, total_tokens] or [total_tokens] with cu_seqlens (or cu_seq_lens_q
    and cu_seq_lens_k), int [batch_size + 1]; a head that reads the first token then gives one row
    for each sequence.

    A causal model's past_key_values are transformers' own cache, filled when it is first read;
    use_cache=False allocates none.  A call with a filled cache runs the original forward.  Greedy
    generate uses continuous batching and gives transformers' own tokens.  Sampling, beams, and
    options that change logits or stop answers run transformers' loop, with one warning.  The KV
    cache and CUDA graphs are reused by later calls, until the model is moved or unwrapped.

    Ids outside their tables raise InputError: on a CPU at once; on a GPU the call gives NaN in the
    rows that depend on them, and the thread's first packed call after the GPU has run it raises.

    Encoders in f16 or bf16 on a GPU run as CUDA graphs, at most 64 of them, which hold memory until
    the model is moved, changed or unwrapped.  Outputs are new tensors.  Threads and streams may
    share the model.  Batches of up to 1024 tokens, pads included, wait for no GPU.

    transformers' pipeline("decision") packs the prompts of all requests of a list (docs/decide.md).

    The parameters are shared, not copied: query, key and value of a layer become views of one
    storage, and so do gate and value; GPT-2's weights are laid out by columns in place.  Gemma's
    norm weights are copied, with one added, and again once they change.  state_dict gives
    contiguous tensors with separate storages over the same memory, which safetensors and torch save
    as the stock model's.  It lays GPT-2's weights out by rows until the next packed call; only
    until then does writing to its entries write to the model.  Where bytetx cannot give the model's
    output (training, gradients, attention weights, changed modules), the original forward runs, and
    a FallbackWarning names each reason once.
    Raises TypeError for anything else, InputError for other `pads` or `dtype`, OptionError where
    `families` is no folder of TOML files, and BytetxError where transformers is too old, accelerate
    has spread the model over devices, or transformers' class lacks what the config says (NomicBERT
    v2's experts).
    """
    if pads not in PADS:
        raise InputError(f"pads must be one of {', '.join(map(repr, PADS))}, got {shown(pads)}")
    if dtype not in WRAP_DTYPES:
        raise InputError(
            f"dtype must be one of {', '.join(map(repr, WRAP_DTYPES))}, got {shown(dtype)}; for "
            "another one convert the model itself"
        )
    known = read_families(families)
    bases = _base_models(model)
    _check_transformers()
    for base in bases:
        _check_not_dispatched(base)
        _check_has_experts(base)
    for base in bases:
        forward = base.__dict__.get("forward")
        if not isinstance(forward, PackedForward):
            kind = CausalForward if type(base).__name__ in CAUSAL_OUTPUTS else PackedForward
            forward = kind(base, families=known, dtype=dtype)
            forward.current_plan()
            base.forward = forward
            base._apply = forward.apply_to_module  # type: ignore[method-assign]  # unwrap undoes it
        forward.pads = pads
        if forward.dtype != dtype:
            forward.dtype = dtype
            forward.forget()
    for module in model.modules():
        if _is_head(module) and "forward" not in module.__dict__:
            module.forward = _head_kind(module)(module)
            if _generates(module):
                is_lm = isinstance(module.forward, LmHeadForward)
                module.generate = (GenerateStandIn if is_lm else LoopStandIn)(module)
        elif _expands_queries(module) and "forward" not in module.__dict__:
            module.forward = ExpansionForward(module)
    _pack_decisions()
    return model


_STOCK_DECISIONS = "transformers.pipelines.decision.DecisionPipeline"


def _pack_decisions() -> None:
    """Has pipeline("decision") pack the prompts of wrapped models; others run as without bytetx.

    The table holds names of classes, which transformers imports when they are used.
    """
    from transformers.pipelines import PIPELINE_REGISTRY

    entry = PIPELINE_REGISTRY.supported_tasks.get("decision", {})
    if entry.get("impl") == _STOCK_DECISIONS:
        entry["impl"] = "bytetx.hf.decision_pipeline.PackedDecisionPipeline"


def unwrap(model: ModelT) -> ModelT:
    """Undoes wrap and returns the same object; a model that was never wrapped is unchanged.

    Query, key and value parameters get separate storages again.
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
            _of_own_code(model)
            or f"wrap found no model that it supports in {type(model).__name__}; supported are "
            f"{', '.join(known)} of transformers, any of their heads, and "
            "SentenceTransformer, CrossEncoder, SparseEncoder or MultiVectorEncoder objects that "
            "hold one"
        )
    return bases


def _of_own_code(model: nn.Module) -> str | None:
    """The error for a model whose class came with its checkpoint; None where none did."""
    from transformers import PreTrainedModel

    for module in model.modules():
        kind = type(module)
        if isinstance(module, PreTrainedModel) and kind.__module__.startswith(_CODE_OF_FILES):
            try:
                spec = build_spec(module.config.to_dict())
                names = spec.family_table["names"]
                advice = f"bytetx.load(path) runs {names} from the checkpoint's folder"
            except CheckpointError:
                advice = "load it without trust_remote_code, if transformers has a class for it"
            return (
                f"wrap takes transformers' own classes, and {kind.__name__} is code of its "
                f"checkpoint ({kind.__module__}); {advice}"
            )
    return None


def _check_has_experts(base: "PreTrainedModel") -> None:
    """transformers reads the config of NomicBERT v2, but its class has no experts."""
    num_experts = getattr(base.config, "num_experts", None)
    if type(base).__name__ == "NomicBertModel" and num_experts:
        raise BytetxError(
            f"transformers' NomicBertModel has no experts, the config says num_experts="
            f"{num_experts}: it did not load the checkpoint's weights; bytetx.load(path) runs "
            "NomicBERT v2 (mixture of experts) from the checkpoint's folder"
        )


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


def _expands_queries(module: nn.Module) -> TypeGuard[Any]:
    """Whether it is the Transformer module of a sentence-transformers that can expand queries."""
    is_own = type(module).__module__.startswith("sentence_transformers.")
    return is_own and hasattr(module, "query_expansion")


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
                f"the forward of {type(base).__name__} was already replaced by {shown(forward)}; "
                "undo that first"
            )
