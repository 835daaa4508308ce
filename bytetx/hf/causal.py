"""Replacements of the forward of a causal base model, and of those of its heads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from bytetx.checkpoint.spec import ModelSpec
from bytetx.hf import arguments
from bytetx.hf.arguments import Inputs
from bytetx.hf.engine_cache import EngineCache
from bytetx.hf.forward import (
    HeadCall,
    PackedForward,
    PackedPass,
    batch_of,
    head_call,
    zeros_of,
)
from bytetx.hf.padding import Layout, as_callers_tensor
from bytetx.hf.pads import (
    is_token_of,
    kept_tokens,
    loss_reads_pads,
    selected_columns,
    selects_all,
    selects_pads,
)
from bytetx.hf.stand_in import StandIn
from bytetx.nn.transformer import Transformer
from bytetx.ops.linear import linear, prepare_linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Causal base classes that can be wrapped, with the transformers output class that each returns.
CAUSAL_OUTPUTS = {
    **{
        f"{family}Model": "BaseModelOutputWithPastAndCrossAttentions"
        for family in ("GPT2", "GPTBigCode", "Falcon", "Bloom")
    },
    **{
        f"{family}Model": "MoeModelOutputWithPast"
        for family in ("Mixtral", "Qwen3Moe", "Qwen3Next", "Qwen3_5MoeText")
    },
    **{
        f"{family}Model": "BaseModelOutputWithPast"
        for family in (
            *("GPTNeo", "GPTJ", "GPTNeoX", "OPT", "Llama", "Mistral", "Qwen2", "Qwen3"),
            *("Phi3", "Starcoder2", "StableLm", "SmolLM3", "Olmo2", "Granite"),
            "Ministral3",
            *("Gemma", "Gemma2", "Gemma3Text"),
            *("Lfm2", "Qwen3_5Text"),
        )
    },
}
# The output classes of language models but CausalLMOutputWithPast; the fields for cross-attention
# and for the scores of experts are never filled here.
_LM_OUTPUTS = {
    **dict.fromkeys(
        ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "FalconForCausalLM", "BloomForCausalLM"),
        "CausalLMOutputWithCrossAttentions",
    ),
    **{
        f"{family}ForCausalLM": "MoeCausalLMOutputWithPast"
        for family in ("Mixtral", "Qwen3Moe", "Qwen3Next", "Qwen3_5Moe")
    },
}
# cache_position says again, of older transformers, which columns the input is.
_OWN_NAMES = (*arguments.PAST_NAMES, "cache_position")


class CausalForward(PackedForward):
    """A causal base model's forward on packed rows: a token sees those before it.

    past_key_values are transformers' own cache; a call that continues from them runs the original
    forward.
    """

    outputs = CAUSAL_OUTPUTS
    has_graphs = False  # a call gives its keys and values, which a graph would have to own

    def __init__(self, module: "PreTrainedModel", **options: Any):
        """options: as of PackedForward."""
        self.engines = EngineCache()
        super().__init__(module, **options)

    def forget(self) -> None:
        super().forget()
        self.engines.clear()

    def _argument_reason(self, given: dict[str, Any], inputs: Inputs) -> str | None:
        return _past_reason(inputs) or arguments.reason_against(
            given, inputs, self.module.config, also_read=_OWN_NAMES
        )

    def _layout_reason(
        self, inputs: Inputs, layout: Layout, call: HeadCall | None, transformer: Transformer
    ) -> str | None:
        own_reason = _position_reason(inputs, layout, transformer.spec)
        return own_reason or super()._layout_reason(inputs, layout, call, transformer)

    def _pass(self, transformer: Transformer, inputs: Inputs, layout: Layout) -> PackedPass:
        from bytetx.hf import past

        layers: list[torch.Tensor] = []
        rows: past.KeyValues = []
        batch = batch_of(inputs, layout, transformer)
        if transformer.spec.family == "opt" and inputs.position_ids is None:
            batch = replace(batch, position_ids=_token_indices(layout))
        x = self.bad_ids.run_forward(
            transformer,
            batch,
            on_layer=layers.append if inputs.output_hidden_states else None,
            on_kv=(lambda k, v: rows.append((k, v))) if inputs.use_cache else None,
        )
        cache = None
        if inputs.use_cache and inputs.past is None:
            cache = past.PackedPast(self.module.config, layout, rows)
        elif inputs.use_cache:
            cache = inputs.past
            past.fill(cache, rows, layout)
        return PackedPass(inputs, layout, x, layers, cache)

    def _fields(self, packed: PackedPass, call: HeadCall | None) -> dict[str, Any]:
        from transformers import modeling_outputs

        kind = getattr(modeling_outputs, self.outputs[type(self.module).__name__])
        fields = {"last_hidden_state": packed.layout.scatter(packed.x)}
        return fields | _past_field(kind, packed.past) | hidden_states_of(packed)


class CausalHeadForward(StandIn):
    """Runs another head's original forward; tells its base model whether it reads pads."""

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        given = arguments.bind(self.names, args, kwargs)
        cu_seqlens = arguments.take_cu_seqlens(given)
        if cu_seqlens is not None:
            given = arguments.with_row(given)
        call = HeadCall(
            base=self.module.base_model,
            reads_first=False,
            only_first=False,
            reads_pads=self._reads_pads(given),
            shows_pads=not self._is_classifier,
            cu_seqlens=cu_seqlens,
        )
        with head_call(call):
            return self.run_original(given, zeros_of(self.module))

    @property
    def _is_classifier(self) -> bool:
        return type(self.module).__name__.endswith("ForSequenceClassification")

    def _reads_pads(self, given: Mapping[str, Any]) -> bool:
        name = type(self.module).__name__
        if self._is_classifier:
            return self._classifies_pads(given)
        if name.endswith("ForQuestionAnswering"):  # its loss is a softmax over every column
            return given.get("start_positions") is not None
        if name.endswith("ForTokenClassification"):
            return loss_reads_pads(self.module, given)
        return True

    def _classifies_pads(self, given: Mapping[str, Any]) -> bool:
        """Whether a row's last token that is not the pad token, which is read, is a pad."""
        is_token = is_token_of(given)
        ids, pad = given.get("input_ids"), self.module.config.pad_token_id
        if is_token is None:
            return False
        if pad is None or not isinstance(ids, torch.Tensor) or ids.shape != is_token.shape:
            return not bool(is_token[:, -1].all())
        columns = torch.arange(ids.shape[1], device=ids.device)
        last = (columns * (ids != pad)).argmax(1, keepdim=True)
        return not bool(is_token.to(ids.device).gather(1, last).all())


class LmHeadForward(StandIn):
    """A language model head: logits of the rows that are tokens, and the loss where there are
    labels."""

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        given = arguments.bind(self.names, args, kwargs)
        call = HeadCall(
            base=self.module.base_model,
            reads_first=False,
            only_first=False,
            reads_pads=loss_reads_pads(self.module, given),
            shows_pads=selects_all(given.get("logits_to_keep")) or selects_pads(given),
            cu_seqlens=None,
        )
        theirs = {n: v for n, v in given.items() if n not in ("labels", "logits_to_keep")}
        packed = base_forward(self.module).run_packed(theirs, call)
        if packed is not None:
            return self._output(packed, given)
        with head_call(call):
            return self.run_original(given, zeros_of(self.module))

    def _output(self, packed: PackedPass, given: Mapping[str, Any]) -> Any:
        from transformers import modeling_outputs

        logits, labels, loss = self._logits(packed, given), given.get("labels"), None
        if labels is not None:
            if labels.dim() == 1:  # packed input: it was made one row as well
                labels = labels.unsqueeze(0)
            loss = self.module.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.module.config.vocab_size,
                num_items_in_batch=given.get("num_items_in_batch"),
            )
        name = _LM_OUTPUTS.get(type(self.module).__name__, "CausalLMOutputWithPast")
        kind = getattr(modeling_outputs, name)
        past = _past_field(kind, packed.past)
        output = kind(loss=loss, logits=logits, **past, **hidden_states_of(packed))
        return output if packed.inputs.return_dict else output.to_tuple()

    def _logits(self, packed: PackedPass, given: Mapping[str, Any]) -> torch.Tensor:
        """[num_rows, num_columns (or those kept), vocab_size]; zeros at pads.

        [num_kept, vocab_size] where a mask says which are kept.
        """
        layout, x, keep = packed.layout, packed.x, given.get("logits_to_keep")
        if keep is None or selects_all(keep):
            return layout.scatter(self._head(x))
        kept = selected_columns(layout.scatter(x), keep)
        rows = kept.flatten(0, -2).contiguous()
        logits: torch.Tensor = self._head(rows).unflatten(0, kept.shape[:-1])
        is_token = kept_tokens(given) if layout.has_pads else None
        if is_token is None:
            return logits
        return logits.masked_fill(~is_token.unsqueeze(-1).to(logits.device), 0)

    def _head(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self._uncapped(rows)
        plan = base_forward(self.module).plan
        assert plan is not None and plan.transformer is not None  # the rows are its result
        divisor, softcap = (
            plan.transformer.spec.logits_divisor,
            plan.transformer.spec.logits_softcap,
        )
        if divisor != 1.0:
            logits = logits / divisor
        return torch.tanh(logits / softcap) * softcap if softcap else logits

    def _uncapped(self, rows: torch.Tensor) -> torch.Tensor:
        head: nn.Module = self.module.get_output_embeddings()
        if not is_plain_head(head) or (torch.is_grad_enabled() and head.weight.requires_grad):
            logits: torch.Tensor = head(as_callers_tensor(rows))
            return logits
        bias = None if head.bias is None else head.bias.detach()
        return linear(rows, prepare_linear(head.weight.detach(), bias, prepack=False))


def base_forward(module: "PreTrainedModel") -> CausalForward:
    """The replaced forward of this head's base model."""
    forward: CausalForward = module.base_model.__dict__["forward"]
    return forward


def is_plain_head(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a head is an unchanged linear layer."""
    has_hooks = head._forward_hooks or head._forward_pre_hooks
    return type(head) is nn.Linear and not has_hooks and "forward" not in head.__dict__


def holes_reason(layout: Layout, spec: ModelSpec) -> str | None:
    """Why a mask needs the original forward, whose windows and convolutions count a row's columns,
    or None."""
    if layout.has_holes and spec.layer_spec.mixer is not None:
        return "a mask with holes, which layers without attention read as tokens of zeros"
    if layout.starts_with_padding and "mixer_in" in spec.layer_spec.biases:
        return "pads before a text, which the biases of layers without attention make tokens of"
    if layout.has_holes and any(spec.layer_spec.window_of(i) for i in range(spec.num_layers)):
        return "a mask with holes under a sliding window"
    return None


def hidden_states_of(packed: PackedPass) -> dict[str, Any]:
    """The output field hidden_states, if it was requested."""
    if not packed.layers:
        return {}
    states = (*packed.layers[:-1], packed.x)
    return {"hidden_states": tuple(map(packed.layout.scatter, states))}


def _past_field(kind: type, past: Any) -> dict[str, Any]:
    """The cache under the name that this output class has for it: `cache` since 5.24."""
    names: Mapping[str, Any] = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return {next(name for name in reversed(arguments.PAST_NAMES) if name in names): past}


def _past_reason(inputs: Inputs) -> str | None:
    if inputs.past is None:
        return None
    from bytetx.hf.past import is_empty

    if is_empty(inputs.past) and inputs.use_cache:
        return None
    return "past_key_values hold keys and values already, or are no DynamicCache"


def _position_reason(inputs: Inputs, layout: Layout, spec: ModelSpec) -> str | None:
    """Why positions, or the attention that they imply, need the original forward, or None."""
    positions = inputs.position_ids
    if inputs.token_type_ids is not None:
        return "token_type_ids add word embeddings in this family"
    if reason := holes_reason(layout, spec):
        return reason
    if inputs.use_cache and spec.layer_spec.mixer is not None:
        return (
            "use_cache asks for what layers without attention remember, too; pass use_cache=False "
            "to run on bytetx (generate does without it)"
        )
    has_no_mask = inputs.attention_mask is None and not layout.is_packed
    if positions is not None and has_no_mask and bool((positions.diff(dim=-1) != 1).any()):
        return "position_ids start again without a mask, which makes sequences of one row"
    return None


def _token_indices(layout: Layout) -> torch.Tensor:
    """int32 [total_tokens]: which of its row's tokens each one is, as OPT counts positions."""
    starts = layout.cu_seqlens[:-1].repeat_interleave(
        layout.cu_seqlens.diff(), output_size=layout.total_tokens
    )
    rows = torch.arange(layout.total_tokens, dtype=torch.int32, device=starts.device)
    return rows - starts
