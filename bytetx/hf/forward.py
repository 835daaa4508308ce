"""Replacements of a base model's forward, and of the forward of a head on it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bytetx.checkpoint.families import Families
from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import InputError
from bytetx.hf import arguments
from bytetx.hf.arguments import Inputs
from bytetx.hf.graph_pass import MOST_UNMEASURED, GraphPasses, PaddedRows, Wants, takes_graphs
from bytetx.hf.notice import Notices
from bytetx.hf.padding import (
    BadIds,
    Layout,
    MaskFacts,
    as_int32,
    packed_layout,
    padded_layout,
    position_ids_of,
    read_mask,
)
from bytetx.hf.pads import is_token_of, loss_reads_pads, zero_pads
from bytetx.hf.plan import PassPlan, build_plan
from bytetx.hf.pooler import run_pooler
from bytetx.hf.stand_in import IN_THEIR_LOOP, StandIn
from bytetx.nn.transformer import Transformer
from bytetx.ops.padded_ids import PaddedIds
from bytetx.packed import PackedBatch
from bytetx.runtime.forking import computing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Base classes that can be wrapped, with the transformers output class that each returns.
OUTPUTS = {
    "BertModel": "BaseModelOutputWithPoolingAndCrossAttentions",
    "RobertaModel": "BaseModelOutputWithPoolingAndCrossAttentions",
    "XLMRobertaModel": "BaseModelOutputWithPoolingAndCrossAttentions",
    "CamembertModel": "BaseModelOutputWithPoolingAndCrossAttentions",
    "DistilBertModel": "BaseModelOutput",
    "MPNetModel": "BaseModelOutputWithPooling",
    "ElectraModel": "BaseModelOutputWithPastAndCrossAttentions",
    "AlbertModel": "BaseModelOutputWithPooling",
    "XLMRobertaXLModel": "BaseModelOutputWithPoolingAndCrossAttentions",
    "RobertaPreLayerNormModel": "BaseModelOutputWithPoolingAndCrossAttentions",
    "ModernBertModel": "BaseModelOutput",
    "EuroBertModel": "BaseModelOutput",
    "UltrabertModel": "BaseModelOutput",
    "EmbeddingGemma2TextModel": "BaseModelOutput",
    "NeoMMEModel": "BaseModelOutput",
    "OpenAIPrivacyFilterModel": "BaseModelOutput",
    "NomicBertModel": "BaseModelOutputWithPooling",
    "GteModel": "BaseModelOutputWithPooling",
    "JinaEmbeddingsV3Model": "BaseModelOutputWithPooling",
    "DebertaModel": "BaseModelOutput",
    "DebertaV2Model": "BaseModelOutput",
    "T5EncoderModel": "BaseModelOutputWithPastAndCrossAttentions",
    "MT5EncoderModel": "BaseModelOutputWithPastAndCrossAttentions",
}
# Heads that read only the first token of each sequence, so that no padded batch need be made.
_FIRST_TOKEN_HEADS = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")


@dataclass(frozen=True, slots=True)
class HeadCall:
    """How a head reads the output of its base model, which is told before the call.

    reads_first: the head reads column 0; only_first: and no other column.
    reads_pads: the values at pads change the head's loss, or its output for a whole row.
    shows_pads: the head's output has values at pads.
    """

    base: nn.Module
    reads_first: bool
    only_first: bool
    reads_pads: bool
    shows_pads: bool
    cu_seqlens: torch.Tensor | None


# Scoped to one call of one head: the heads' own code lies between setting and reading it.
_HEAD_CALL: ContextVar[HeadCall | None] = ContextVar("bytetx_head_call", default=None)


# Scoped to one call of a sentence-transformers module that reads hidden states of masked tokens.
_READS_MASKED: ContextVar[bool] = ContextVar("bytetx_reads_masked", default=False)


@contextmanager
def head_call(call: HeadCall) -> Iterator[None]:
    """In this context, the call's base model knows what the head reads."""
    token = _HEAD_CALL.set(call)
    try:
        yield
    finally:
        _HEAD_CALL.reset(token)


@dataclass(frozen=True, slots=True)
class PackedPass:
    """The results of a base model's pass on packed rows.

    x: [total_tokens, output_size].  layers: where asked for, the embedding's and each layer's rows.
    past: a causal model's keys and values, in transformers' own cache.
    """

    inputs: Inputs
    layout: Layout
    x: torch.Tensor
    layers: list[torch.Tensor]
    past: Any = None


class HeadForward(StandIn):
    """Runs a head's original forward; tells its base model what the head reads."""

    def __init__(self, module: "PreTrainedModel"):
        super().__init__(module)
        name = type(module).__name__
        self.is_multiple_choice = name.endswith("ForMultipleChoice")
        self.is_first_token_head = name.endswith(_FIRST_TOKEN_HEADS)
        self.is_pretraining_head = name in ("BertForPreTraining", "AlbertForPreTraining")

    @property
    def summarises_all(self) -> bool:
        """Whether the head may read any column: ELECTRA's summary for multiple choice.

        Asked at each call: while a module is copied, its config is not there yet.
        """
        is_summary = self.is_multiple_choice and type(self.module).__name__.startswith("Electra")
        return is_summary and getattr(self.module.config, "summary_type", "first") != "first"

    @property
    def pools_tokens(self) -> bool:
        """Whether the head takes a mean over each row's tokens, as ModernBERT's does."""
        pooling = getattr(self.module.config, "classifier_pooling", None)
        return self.is_first_token_head and pooling in ("mean", "late")

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        given = arguments.bind(self.names, args, kwargs)
        cu_seqlens = arguments.take_cu_seqlens(given)
        if cu_seqlens is not None:
            if self.is_multiple_choice:
                raise InputError(
                    "multiple choice takes [batch_size, num_choices, seqlen] input; "
                    "cu_seqlens cannot say which sequences are one question's choices"
                )
            if self.pools_tokens:
                raise InputError(
                    "the head takes a mean over each row, and cu_seqlens puts all sequences in "
                    "one row; give padded input with its attention_mask"
                )
            given = arguments.with_row(given)
        summarises_all, pools_tokens = self.summarises_all, self.pools_tokens
        only_first = self.is_first_token_head and not (summarises_all or pools_tokens)
        call = HeadCall(
            base=self.module.base_model,
            reads_first=only_first or self.is_pretraining_head,
            only_first=only_first,
            reads_pads=summarises_all
            or (not only_first and not pools_tokens and self._reads_pads(given)),
            shows_pads=not only_first and not pools_tokens,
            cu_seqlens=cu_seqlens,
        )
        with head_call(call):
            return self.run_original(given, zeros_of(self.module))

    def _reads_pads(self, given: Mapping[str, Any]) -> bool:
        # The loss of question answering is a softmax over every column.
        has_span = given.get("start_positions") is not None
        return has_span or loss_reads_pads(self.module, given)


class ExpansionForward(StandIn):
    """The forward of sentence-transformers' Transformer module, which may expand queries by tokens
    that no token attends to and whose own hidden states are read (ColBERT)."""

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        features = args[0] if args else kwargs.get("features")
        expansion = getattr(self.module, "query_expansion", None)
        reads_masked = (
            isinstance(features, Mapping)
            and features.get("query_expansion_positions") is not None
            and expansion is not None
            and not expansion["attend"]
        )
        token = _READS_MASKED.set(reads_masked)
        try:
            return self.original(*args, **kwargs)
        finally:
            _READS_MASKED.reset(token)


class PackedForward(StandIn):
    """A base model's forward on packed rows; the original where bytetx cannot give its answer.

    families: that plans are made by.  pads: "zeros" or "stock", what a caller finds at pads.
    dtype: "fp8" where the layers multiply copies in FP8, else "auto".
    """

    outputs = OUTPUTS
    has_graphs = True

    def __init__(
        self,
        module: "PreTrainedModel",
        *,
        families: Families,
        pads: str = "zeros",
        dtype: str = "auto",
    ):
        super().__init__(module)
        self.families, self.pads, self.dtype = families, pads, dtype
        self.notices = Notices()
        self.bad_ids = BadIds()
        self.plan: PassPlan | None = None
        # The graphs of a plan's transformer, None where it can have none.
        self.graphs: tuple[Transformer, GraphPasses | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        names = ("module", "families", "pads", "dtype")
        return {name: getattr(self, name) for name in names}

    def apply_to_module(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> nn.Module:
        """Replaces module._apply (.to, .half, .cuda): the first tensor that changes drops the plan.

        One that changes none keeps it: sentence-transformers calls .to(device) for every batch.
        """

        def watched(tensor: torch.Tensor) -> torch.Tensor:
            address = tensor.untyped_storage().data_ptr()
            result = fn(tensor)
            if result is not tensor or result.untyped_storage().data_ptr() != address:
                self.forget()
            return result

        moved: nn.Module = type(self.module)._apply(self.module, watched, recurse)
        return moved

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        call = _HEAD_CALL.get()
        if call is not None and call.base is not self.module:
            call = None
        given = arguments.bind(self.names, args, kwargs)
        if self.has_graphs:
            found = self._run_graph(given, call)
            if found is not None:
                inputs, rows = found
                return self._output(self._fields_of(rows), return_dict=inputs.return_dict)
        packed = self.run_packed({**given}, call)
        if packed is not None:
            return self._output(self._fields(packed, call), return_dict=packed.inputs.return_dict)
        if call is not None or self.keeps_pads:  # a head's own output gets the zeros
            return self.original(*args, **kwargs)
        output = self.original(**given | {"return_dict": True})
        zero_pads(output, given)
        self._pool_first_tokens(output, given)
        wants_dict = arguments.wants_dict(given, self.module.config)
        return output if wants_dict else self._output({**output}, return_dict=False)

    @property
    def shows_stock(self) -> bool:
        """Whether the caller finds the stock model's values at pads."""
        return self.pads == "stock" or IN_THEIR_LOOP.get()

    @property
    def keeps_pads(self) -> bool:
        """Whether the original's output is returned as it is."""
        return self.shows_stock or _READS_MASKED.get() or self._mode_reason() is not None

    def _pool_first_tokens(self, output: Any, given: Mapping[str, Any]) -> None:
        """A pooler reads each row's first token, as in a packed pass; the original's column 0."""
        is_token = is_token_of(given)
        if is_token is None or output.get("pooler_output") is None or bool(is_token[:, 0].all()):
            return
        states = output["last_hidden_state"]
        first = is_token.int().argmax(1).to(states.device)
        rows = states[torch.arange(len(states), device=states.device), first]
        output["pooler_output"] = run_pooler(self.module, rows.unsqueeze(1))

    def _run_graph(
        self, given: dict[str, Any], call: HeadCall | None
    ) -> tuple[Inputs, PaddedRows] | None:
        """Runs the call as a CUDA graph; None where it has to be looked at more closely.

        On a GPU that is idle, what the host does before the launch is time of the call.  So the
        launch comes before the larger part of the checks, and its result is dropped where they
        find that the model was changed: the plan's parameters live on until then.
        """
        plan, passes = self._plan_with_graphs()
        if plan is None or passes is None:
            return None
        if call is not None and call.cu_seqlens is not None:
            return None
        if any(given.get(name) is not None for name in arguments.PACKED_NAMES):
            return None
        inputs = arguments.read_inputs(given, config=self.module.config, cu_seqlens=None)
        reason = None if arguments.has_tokens(inputs) else "no tokens"
        reason = reason or self._mode_reason() or _plan_reason(plan, inputs)
        reason = reason or self._argument_reason(given, inputs)
        if reason is not None or not plan.snapshot.is_in_place():
            return None
        padded = _padded_ids(inputs, passes)
        if padded is None:
            return None
        facts = None
        num_rows, num_columns = padded.input_ids.shape
        if self._measures(inputs, call, passes):
            facts = read_mask(inputs.attention_mask, num_rows, num_columns)
            if self._facts_reason(inputs, facts, call, passes.transformer) is not None:
                return None
        if not passes.takes(num_rows, num_columns, facts):
            return None
        self.bad_ids.raise_found(passes.transformer)
        only_first = call is not None and call.only_first
        has_pooler = getattr(self.module, "pooler", None) is not None
        wants = Wants(padded=not only_first, first=only_first or has_pooler)
        with computing(passes.device):
            words = self.bad_ids.words_on(passes.device) if passes.device.type == "cuda" else None
            try:
                rows = passes.run(
                    padded, wants, facts=facts, bad_ids=None if words is None else words.on_device
                )
            except torch.OutOfMemoryError:
                if not passes.release_memory():
                    raise
                return None
            if words is not None:
                words.send()
        if plan.snapshot.is_same_model():
            return inputs, rows
        if words is not None:
            words.on_device.zero_()  # the ids were checked against tables that were replaced
            words.send()
        return None

    def _plan_with_graphs(self) -> tuple[PassPlan | None, GraphPasses | None]:
        """The plan as it is, or the first one; and its graphs, None where it can have none."""
        plan = self.plan  # read once: another thread may be moving the model
        if plan is None:
            if self._mode_reason() is not None:
                return None, None
            plan = self.current_plan()
        transformer, graphs = plan.transformer, self.graphs
        if transformer is None:
            return plan, None
        if graphs is None or graphs[0] is not transformer:
            passes = GraphPasses(transformer) if takes_graphs(transformer) else None
            self.graphs = graphs = transformer, passes
        return plan, graphs[1]

    def _measures(self, inputs: Inputs, call: HeadCall | None, passes: GraphPasses) -> bool:
        """Whether the mask is read before the pass, for which the host waits for a GPU."""
        mask = inputs.attention_mask
        if mask is None or _is_on_host(mask) or mask.numel() > MOST_UNMEASURED:
            return True
        reads_pads = call is not None and (call.reads_first or call.reads_pads)
        return reads_pads or self.shows_stock or _READS_MASKED.get() or passes.depends_on_distances

    def _facts_reason(
        self, inputs: Inputs, facts: MaskFacts, call: HeadCall | None, transformer: Transformer
    ) -> str | None:
        """Why a batch is none for a graph, or None."""
        if facts.has_pads and _READS_MASKED.get():
            return "masked tokens are part of the result"
        if facts.has_holes and _counts_holes(transformer):
            return "distances are of columns"
        if self.shows_stock and _shows_pads(inputs, facts, call):
            return "the caller reads pads"
        return layout_reason(facts, call, transformer)

    def run_packed(self, given: dict[str, Any], call: HeadCall | None) -> PackedPass | None:
        """Runs the call on packed rows; None, with a notice, where the original must run."""
        cu_seqlens = arguments.take_cu_seqlens(given)
        if call is not None and cu_seqlens is None:
            cu_seqlens = call.cu_seqlens
        if cu_seqlens is not None:
            given = arguments.with_row(given)
        inputs = arguments.read_inputs(given, config=self.module.config, cu_seqlens=cu_seqlens)
        if not arguments.has_tokens(inputs):
            return None
        transformer: Transformer | None = None
        reason = self._mode_reason()
        if reason is None:
            plan = self.current_plan()
            transformer, reason = plan.transformer, plan.reason or _plan_reason(plan, inputs)
        reason = reason or self._argument_reason(given, inputs)
        if reason is None:
            assert transformer is not None  # a plan without one has a reason
            layout = _layout_of(inputs)  # where it waits for a GPU, earlier calls have ended
            self.bad_ids.raise_found(transformer)
            reason = self._layout_reason(inputs, layout, call, transformer)
            if reason is None and _READS_MASKED.get() and layout.has_pads:
                return None  # the hidden states of masked tokens are part of the result
            if reason is None and self.shows_stock and _shows_pads(inputs, layout, call):
                return None  # the caller chose this with wrap(pads="stock"), or is their loop
            if reason is None:
                with computing(inputs.main.device):
                    return self._pass(transformer, inputs, layout)
        if cu_seqlens is not None:
            raise InputError(
                f"packed input (cu_seqlens) runs on bytetx alone, and here it cannot: {reason}"
            )
        self.notices.say(reason)
        return None

    def current_plan(self) -> PassPlan:
        """The current plan, built again where the model was changed."""
        plan = self.plan  # read once: another thread may be moving the model
        if plan is None or not plan.snapshot.is_current():
            self.forget()
            self.plan = plan = build_plan(self.module, self.families, dtype=self.dtype)
        return plan

    def forget(self) -> None:
        """Drops what was built over the old parameters."""
        self.plan = self.graphs = None

    def _mode_reason(self) -> str | None:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return "the model is being exported or traced"
        if self.module.training:
            return "the model is in training mode; call .eval()"
        return None

    def _argument_reason(self, given: dict[str, Any], inputs: Inputs) -> str | None:
        return arguments.reason_against(given, inputs, self.module.config)

    def _layout_reason(
        self, inputs: Inputs, layout: Layout, call: HeadCall | None, transformer: Transformer
    ) -> str | None:
        own_reason = _rotary_reason(inputs, layout, transformer.spec)
        return own_reason or layout_reason(layout, call, transformer)

    def _pass(self, transformer: Transformer, inputs: Inputs, layout: Layout) -> PackedPass:
        layers: list[torch.Tensor] = []
        on_layer = layers.append if inputs.output_hidden_states else None
        batch = batch_of(inputs, layout, transformer)
        x = self.bad_ids.run_forward(transformer, batch, on_layer=on_layer)
        return PackedPass(inputs, layout, x, layers)

    def _fields(self, packed: PackedPass, call: HeadCall | None) -> dict[str, Any]:
        """The output's fields, in its order."""
        x, layout = packed.x, packed.layout
        pooler = getattr(self.module, "pooler", None)
        only_first = call is not None and call.only_first
        if only_first or pooler is not None:
            first = layout.first_rows(x).unsqueeze(1)  # [batch_size, 1, hidden_size]
        fields: dict[str, Any] = {"last_hidden_state": first if only_first else layout.scatter(x)}
        if pooler is not None:
            fields["pooler_output"] = run_pooler(self.module, first)
        if packed.layers:
            last = layout.scatter(x) if only_first else fields["last_hidden_state"]
            fields["hidden_states"] = (*map(layout.scatter, packed.layers[:-1]), last)
        return fields

    def _fields_of(self, rows: PaddedRows) -> dict[str, Any]:
        """The same of a pass that gave padded rows."""
        first = None if rows.first is None else rows.first.unsqueeze(1)
        fields: dict[str, Any] = {
            "last_hidden_state": first if rows.padded is None else rows.padded
        }
        if getattr(self.module, "pooler", None) is not None:
            assert first is not None  # _run_graph asks for it
            fields["pooler_output"] = run_pooler(self.module, first)
        return fields

    def _output(self, fields: dict[str, Any], *, return_dict: bool) -> Any:
        from transformers import modeling_outputs

        name = type(self.module).__name__
        if not return_dict and name == "MPNetModel":  # its tuple has an entry for a missing pooler
            rest = [fields[key] for key in ("hidden_states", "attentions") if key in fields]
            return (fields["last_hidden_state"], fields.get("pooler_output"), *rest)
        output = getattr(modeling_outputs, self.outputs[name])(**fields)
        return output if return_dict else output.to_tuple()


def zeros_of(module: "PreTrainedModel") -> Callable[[Any, Mapping[str, Any]], None] | None:
    """The function that puts zeros at the pads of this head's output; None to leave them."""
    forward = module.base_model.__dict__.get("forward")
    if not isinstance(forward, PackedForward) or forward.keeps_pads:
        return None
    name = type(module).__name__
    is_plain = name.endswith("ForQuestionAnswering") or name == "ElectraForPreTraining"
    return partial(zero_pads, has_plain_logits=is_plain)


def _plan_reason(plan: PassPlan, inputs: Inputs) -> str | None:
    """Why the modes and gradients of this call need the original forward, or None."""
    if plan.snapshot.is_training():
        return "an inner module is in training mode; call .eval()"
    if torch.is_autocast_enabled(inputs.main.device.type):
        return "autocast is on; convert the model with .bfloat16() or .half() instead"
    embeds = inputs.inputs_embeds
    if torch.is_grad_enabled() and (
        plan.snapshot.requires_grad() or (embeds is not None and embeds.requires_grad)
    ):
        return "gradients are recorded; call the model inside torch.inference_mode()"
    return None


def _is_on_host(mask: torch.Tensor) -> bool:
    """Whether reading it waits for no GPU."""
    return mask.device.type == "cpu"


def _padded_ids(inputs: Inputs, passes: GraphPasses) -> PaddedIds | None:
    """The call's tensors for a graph; None where they are not what graphs take."""
    ids, mask, device = inputs.input_ids, inputs.attention_mask, passes.device
    if ids is None or inputs.inputs_embeds is not None or inputs.output_hidden_states:
        return None
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # the caller captures the kernels themselves
    spec = passes.transformer.spec
    if inputs.position_ids is not None and spec.layer_spec.rotary is not None:
        return None  # the host looks whether the rotary tables have them: no kernel would tell
    types = inputs.token_type_ids if spec.num_token_types else None
    shapes = (ids.shape, (1, ids.shape[1]))
    given = (ids, types, inputs.position_ids)
    for t in given:
        if t is not None and not (
            isinstance(t, torch.Tensor)
            and t.dtype in (torch.int64, torch.int32)
            and t.shape in shapes
            and t.device == device
        ):
            return None
    if mask is not None and mask.device != device:
        mask = mask.to(device, non_blocking=True)
    return PaddedIds(ids, mask, types, inputs.position_ids).with_contiguous_columns()


def _layout_of(inputs: Inputs) -> Layout:
    main = inputs.main
    if inputs.cu_seqlens is None:
        return padded_layout(inputs.attention_mask, main.shape[0], main.shape[1], main.device)
    if main.shape[0] != 1:
        raise InputError(
            f"packed input must be one row, [1, total_tokens] or [total_tokens], "
            f"got {list(main.shape)} beside cu_seqlens"
        )
    return packed_layout(inputs.cu_seqlens, main.shape[1], main.device)


def layout_reason(
    layout: Layout | MaskFacts, call: HeadCall | None, transformer: Transformer
) -> str | None:
    """Why a padded batch needs the original forward, or None."""
    if call is not None and call.reads_first and layout.starts_with_padding:
        return (
            "the head reads the first column, and a row starts with padding; "
            "set tokenizer.padding_side = 'right' to run on bytetx"
        )
    if call is not None and call.reads_pads and layout.has_pads:
        return (
            "the head's loss or choice depends on the values at pads; to run on bytetx, set labels "
            "at pads to -100"
        )
    if layout.has_holes and not transformer.spec.is_causal and _has_windows(transformer.spec):
        return "a mask has holes, and the model has layers with a window"
    buckets = transformer.layers.buckets
    if layout.has_holes and buckets is not None:
        return "a mask has holes, and attention compares the distances of tokens (DeBERTa)"
    longest, embeddings = transformer.spec.max_positions, transformer.spec.embeddings
    if buckets is not None and layout.max_seqlen > longest and "position" not in embeddings:
        return f"{layout.max_seqlen} tokens are more than bytetx's {longest} (DeBERTa)"
    bias = transformer.layers.relative_bias
    if bias is None:
        return None
    if _counts_holes(transformer):
        if layout.has_holes and 2 * layout.num_columns - 1 > bias.shape[1]:
            return "a mask with holes is wider than the model has positions"
    elif 2 * layout.max_seqlen - 1 > bias.shape[1]:
        return f"{layout.max_seqlen} tokens are more than bytetx's {longest} with ALiBi"
    return None


def _rotary_reason(inputs: Inputs, layout: Layout, spec: ModelSpec) -> str | None:
    """Why positions need the original forward, which computes the rotations of any, or None."""
    rotary, positions = spec.layer_spec.rotary, inputs.position_ids
    if rotary is None:
        return None
    limit, length = spec.max_positions, layout.num_columns
    if rotary.scaling == "dynamic":
        limit = rotary.original_positions
    if positions is not None and layout.total_tokens:
        low, high = map(int, layout.gather(positions).aminmax())
        length = high + 1
        if low < 0:
            return "position_ids below 0 have no rotary tables in bytetx"
    elif layout.is_packed:
        length = layout.max_seqlen
    elif length > limit and layout.has_pads and layout.total_tokens and rotary.scaling != "dynamic":
        length = int(layout.columns.max()) + 1  # positions of pads are never computed
    if length > limit:
        return f"{length} positions are more than the {limit} of the model's rotary tables"
    return None


def _counts_holes(transformer: Transformer) -> bool:
    """Whether a relative bias is of columns; causal models count the tokens before a token."""
    return transformer.layers.relative_bias is not None and not transformer.spec.is_causal


def _has_windows(spec: ModelSpec) -> bool:
    return any(spec.layer_spec.window_of(layer) for layer in range(spec.num_layers))


def _shows_pads(inputs: Inputs, layout: Layout | MaskFacts, call: HeadCall | None) -> bool:
    """Whether the call's output has values at pads."""
    if not layout.has_pads:
        return False
    is_seen = call is None or call.shows_pads or inputs.output_hidden_states
    return is_seen or bool((layout.seqlens == 0).any())


def batch_of(inputs: Inputs, layout: Layout, transformer: Transformer) -> PackedBatch:
    spec = transformer.spec
    token_type_ids = embeds = None
    if spec.num_token_types:
        token_type_ids = torch.zeros(
            layout.total_tokens, dtype=torch.int32, device=inputs.main.device
        )
        if inputs.token_type_ids is not None:
            token_type_ids = as_int32("token_type_ids", layout.gather(inputs.token_type_ids))
    if inputs.inputs_embeds is not None:
        embeds = layout.gather(inputs.inputs_embeds).detach()
    has_bias_positions = layout.has_holes and _counts_holes(transformer)
    return PackedBatch(
        input_ids=_packed_ids(inputs, layout),
        position_ids=position_ids_of(
            layout,
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            position_offset=spec.position_offset,
        ),
        token_type_ids=token_type_ids,
        cu_seqlens=layout.cu_seqlens,
        seqlens=layout.seqlens,
        max_seqlen=layout.max_seqlen,
        inputs_embeds=embeds,
        bias_positions=layout.columns.to(torch.int32) if has_bias_positions else None,
    )


def _packed_ids(inputs: Inputs, layout: Layout) -> torch.Tensor:
    """int32 [total_tokens]; zeros where only embeddings were given."""
    if inputs.input_ids is None:
        return torch.zeros(layout.total_tokens, dtype=torch.int32, device=inputs.main.device)
    return as_int32("input_ids", layout.gather(inputs.input_ids))
