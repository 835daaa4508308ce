"""The replacement of a causal model's `generate`: greedy decoding by continuous batching."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import BytetxError
from bytetx.generate.build import PAGE_SIZE
from bytetx.hf import arguments
from bytetx.hf.causal import CausalForward, base_forward, holes_reason, is_plain_head
from bytetx.hf.engine_cache import EngineCache, EngineNeeds
from bytetx.hf.notice import Notices, silent
from bytetx.hf.padding import Layout, padded_layout, require_ids
from bytetx.hf.stand_in import StandIn, their_loop
from bytetx.nn.checkpoint_heads import Heads
from bytetx.nn.heads import LmHead
from bytetx.nn.loading import LoadedCheckpoint
from bytetx.nn.sentence_modules import SentenceSpec
from bytetx.ops.linear import prepare_linear
from bytetx.sampling_params import SamplingParams

# The inputs of generate; any other argument is an option of transformers.
_INPUTS = ("inputs", "input_ids", "attention_mask")
_OPTIONS = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "custom_generate",
    "trust_remote_code",
    "assistant_tokenizer",
)
_THEIRS = "transformers' own generate"
_CACHES = (None, "dynamic", "static", "hybrid")  # how transformers would hold what we hold in pages


if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    class GenerativeModel(PreTrainedModel):
        """A model with transformers' GenerationMixin, whose types its models do not fulfil."""

        generate: Callable[..., torch.Tensor]
        _sample: Callable[..., torch.Tensor]
        _prepare_generation_config: Callable[..., tuple[GenerationConfig, dict[str, object]]]


class GenerateStandIn(StandIn):
    """`generate` of one model: transformers prepares, bytetx decodes where it decodes the same.

    That is greedy decoding, with the lengths, end-of-text and pad tokens that the call and the
    generation config give.  Everything else (sampling, whose random numbers are transformers' own,
    beams, processors, criteria, streamers) runs transformers' own loop, and says so once.
    """

    method = "generate"
    module: "GenerativeModel"

    def __init__(self, module: "GenerativeModel"):
        super().__init__(module)
        self.notices = Notices()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        reason = self._call_reason(args, kwargs)
        if reason is None:
            return self.original(*args, **kwargs | {"custom_generate": self._decode})
        self.notices.say(reason, runs=_THEIRS)
        with silent(), their_loop():  # one notice is enough
            return self.original(*args, **kwargs)

    def _call_reason(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Why transformers must run the call, or None; errors of the call are transformers' too."""
        given = arguments.bind(self.names, args, kwargs)
        for name in _OPTIONS:
            value = given.pop(name, None)
            if isinstance(value, torch.Tensor) or value:
                return f"the argument {name} is not one that bytetx generates with"
        given.pop("tokenizer", None)  # for stop strings alone
        config = given.pop("generation_config", None)
        options = {name: value for name, value in given.items() if name not in _INPUTS}
        config, rest = self.module._prepare_generation_config(config, **options)
        if strange := [name for name, value in rest.items() if value is not None]:
            return f"the argument {strange[0]} is not one that bytetx generates with"
        mode = config.get_generation_mode().value
        if mode == "sample":
            return (
                "do_sample draws transformers' random numbers, not those of bytetx.load's generate"
            )
        if mode != "greedy_search":
            return f"the mode is {mode}, bytetx decodes greedily"
        if config.stop_strings is not None:
            return "stop_strings are cut by transformers"
        if config.return_dict_in_generate:
            return "return_dict_in_generate asks for what bytetx does not hold"
        if config.cache_implementation not in _CACHES:
            return f"cache_implementation is {config.cache_implementation!r}"
        ids = given.get("input_ids") if given.get("inputs") is None else given["inputs"]
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
            return "the input is no [batch_size, num_columns] tensor of token ids"
        if config.num_return_sequences not in (None, 1):
            return "num_return_sequences is not 1"
        return self._model_reason()

    def _model_reason(self) -> str | None:
        if self.module.training:
            return "the model is in training mode; call .eval()"
        if not is_plain_head(self.module.get_output_embeddings()):
            return "the language model head was changed"
        forward = base_forward(self.module)
        plan = forward.current_plan()
        if plan.reason is not None:
            return plan.reason
        if plan.snapshot.is_training():
            return "an inner module is in training mode; call .eval()"
        assert plan.transformer is not None  # a plan without one has a reason
        if not plan.transformer.spec.is_causal:
            return "the model's tokens see their whole sequence (is_causal false)"
        word, head = plan.transformer.embeddings.word, self.module.get_output_embeddings().weight
        if (head.dtype, head.device) != (word.dtype, word.device):
            return "the language model head has another dtype or device than the model"
        if torch.is_autocast_enabled(word.device.type):
            return "autocast is on; convert the model with .bfloat16() or .half() instead"
        return None

    def _decode(
        self,
        model: "GenerativeModel",
        input_ids: torch.Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Replaces transformers' `_sample`, with its prepared arguments."""
        mask, (num_rows, num_columns) = model_kwargs.get("attention_mask"), input_ids.shape
        limits = _limits(logits_processor, stopping_criteria, width=num_columns)
        answers: list[list[int]] | str = "attention_mask has another shape than the input"
        if isinstance(limits, str):
            answers = limits
        elif mask is None or mask.shape == input_ids.shape:
            layout = padded_layout(mask, num_rows, num_columns, input_ids.device)
            answers = self._answers(layout, layout.gather(input_ids), limits)
        if not isinstance(answers, str):
            return _padded(input_ids, answers, generation_config)
        self.notices.say(answers, runs=_THEIRS)
        with silent(), their_loop():
            return type(model)._sample(
                model,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                **model_kwargs,
            )

    def _answers(
        self, layout: Layout, ids: torch.Tensor, limits: "_AnswerLimits"
    ) -> list[list[int]] | str:
        """The tokens that follow each row, or why transformers must generate them."""
        forward = base_forward(self.module)
        checkpoint = _checkpoint_of(forward, self.module.get_output_embeddings())
        if reason := _layout_reason(layout, limits.max_tokens, checkpoint.spec):
            return reason
        ids = ids.cpu()
        require_ids("input_ids", ids, checkpoint.spec.vocab_size)  # transformers would fail, too
        prompts = [row.tolist() for row in ids.split(layout.seqlens.tolist())]
        try:
            return _generate(forward.engines, checkpoint, prompts, limits)
        except BytetxError as error:
            return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class _AnswerLimits:
    """How long an answer may be and what ends it: tokens, and the ids of end-of-text tokens."""

    max_tokens: int
    min_tokens: int
    eos_token_ids: tuple[int, ...]


def _limits(
    processors: Iterable[Any], criteria: Iterable[Any], *, width: int
) -> _AnswerLimits | str:
    """The limits in transformers' prepared processors and criteria, or an unknown one's name."""
    max_tokens, min_tokens, eos = 0, 0, ()
    for processor in processors:
        match type(processor).__name__:
            case "MinLengthLogitsProcessor":
                min_tokens = max(min_tokens, processor.min_length - width)
            case "MinNewTokensLengthLogitsProcessor":
                min_tokens = max(min_tokens, processor.min_new_tokens)
            case name:
                return f"{name} changes the logits"
    for criterion in criteria:
        match type(criterion).__name__:
            case "MaxLengthCriteria":
                max_tokens = criterion.max_length - width
            case "EosTokenCriteria":
                eos = tuple(torch.as_tensor(criterion.eos_token_id).flatten().tolist())
            case name:
                return f"{name} ends the answers"
    if max_tokens < 1:
        return f"max_length leaves no token for rows of {width}"
    return _AnswerLimits(max_tokens, min(min_tokens, max_tokens), eos)


def _layout_reason(layout: Layout, max_tokens: int, spec: ModelSpec) -> str | None:
    rotary, longest = spec.layer_spec.rotary, layout.max_seqlen + max_tokens
    last = layout.cu_seqlens[1:].long() - 1
    if bool((layout.seqlens == 0).any()):
        return "a row has no tokens"
    if bool((layout.columns[last] != layout.num_columns - 1).any()):
        return "a row ends in padding; set tokenizer.padding_side = 'left'"
    if reason := holes_reason(layout, spec):
        return reason
    limit = spec.max_positions
    if rotary is not None and rotary.scaling == "dynamic":
        limit = min(limit, rotary.original_positions - layout.num_columns + layout.max_seqlen)
    if longest > limit:
        return f"{longest} positions are more than the {limit} that bytetx generates here"
    return None


def _checkpoint_of(forward: CausalForward, lm_head: nn.Linear) -> LoadedCheckpoint:
    """The wrapped model as what `bytetx.load` would have read; nothing is copied."""
    transformer = forward.current_plan().transformer
    assert transformer is not None  # the stand-in asked before
    word, no_folder = transformer.embeddings.word, Path()
    bias = None if lm_head.bias is None else lm_head.bias.detach()
    decoder = prepare_linear(lm_head.weight.detach(), bias, prepack=False)
    spec = transformer.spec
    head = LmHead(decoder, decoder.n, divisor=spec.logits_divisor, softcap=spec.logits_softcap)
    return LoadedCheckpoint(
        folder=no_folder,
        spec=spec,
        sentence=SentenceSpec(no_folder),
        modules=(),
        transformer=transformer,
        heads=Heads(lm=head),
        tokenizer=None,
        chat_template=None,
        cross_encoder_activation=None,
        unused_tensors=(),
        device=word.device,
        dtype=word.dtype,
        quantization=None if forward.dtype == "auto" else forward.dtype,
    )


def _generate(
    engines: EngineCache,
    checkpoint: LoadedCheckpoint,
    prompts: list[list[int]],
    limits: _AnswerLimits,
) -> list[list[int]]:
    """Greedy answers by an engine that no other call uses; raises the first error."""
    lengths = [len(prompt) + limits.max_tokens for prompt in prompts]
    num_tokens = sum(-(-length // PAGE_SIZE) * PAGE_SIZE for length in lengths)
    taken = engines.take(checkpoint, EngineNeeds(len(prompts), num_tokens, max(lengths)))
    engine, params = taken.engine, _params_of(limits)
    rows = {
        engine.add_request(prompt, params, streams=False): i for i, prompt in enumerate(prompts)
    }
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise type(output.error)(str(output.error))  # the frame holds output
            answers[rows[output.request_id]] = list(output.token_ids)
    engines.put(taken)
    return answers


def _params_of(limits: _AnswerLimits) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=limits.max_tokens,
        min_tokens=limits.min_tokens,
        stop_token_ids=limits.eos_token_ids,
    )


def _padded(input_ids: torch.Tensor, answers: list[list[int]], config: Any) -> torch.Tensor:
    """input_ids with the answers behind them, those that ended early filled with the pad token."""
    width = max(map(len, answers))
    pad = getattr(config, "_pad_token_tensor", config.pad_token_id)
    filling = 0 if pad is None else int(pad)
    rows = [answer + [filling] * (width - len(answer)) for answer in answers]
    return torch.cat([input_ids, torch.tensor(rows, device=input_ids.device)], dim=1)
