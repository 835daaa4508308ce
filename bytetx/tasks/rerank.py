"""Reranking by a cross-encoder, by a causal model that answers yes or no, or by a listwise one."""

from collections.abc import Callable, Hashable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from bytetx.arguments import check_iterable, check_text, check_top_k, text_fault
from bytetx.checkpoint.spec import ModelSpec
from bytetx.encode.step import Capture, Step, are_finite, last_tokens
from bytetx.errors import InputError, OptionError
from bytetx.nn.heads import LmHead
from bytetx.nn.sentence_modules import activation_by_name
from bytetx.nn.transformer import Transformer
from bytetx.ops.pooling import pool
from bytetx.tasks.call import ListSink, TaskCall
from bytetx.tasks.classify import ScoreTask
from bytetx.tasks.context import TaskContext
from bytetx.tasks.document_questions import (
    ask_about_documents,
    asks_about_documents,
    best_hits,
)
from bytetx.tasks.listwise_rerank import rank_list
from bytetx.tasks.pair_prompts import (
    PairPrompts,
    chat_prompts,
    writes_prompt,
    yes_no_ids,
    yes_no_prompts,
)
from bytetx.tasks.results import Hit, Results
from bytetx.tasks.task import TextOptions, option, task

# Families whose causal models are rerankers of this kind.
YES_NO_FAMILIES = ("qwen3",)


@dataclass(frozen=True, slots=True)
class YesNoTask:
    """One number a prompt: the activation of logit(yes) - logit(no) of its next token.

    With a sigmoid, that is the softmax over the two.  no: None, the first logit alone.
    """

    head: LmHead
    yes: int
    no: int | None
    activation: Callable[[torch.Tensor], torch.Tensor]
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return self.capture

    @property
    def capture(self) -> Capture:
        key = ("yes-no", id(self.head), self.yes, self.no, id(self.activation))
        return Capture(key, rows="sequences")

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        if step.shared is not None:
            step = last_tokens(step)
        return self.reduce(transformer.forward(step.batch), step)

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """(scores, logits before the activation), f32 [batch_size], from the last hidden states."""
        x = hidden_states
        last = pool(x, step.batch.cu_seqlens, mode="lasttoken").to(x.dtype)
        answers = (self.yes,) if self.no is None else (self.yes, self.no)
        logits = self.head.token_logits(last, answers)
        scores = logits[:, 0] if self.no is None else logits[:, 0] - logits[:, 1]
        return self.activation(scores), scores

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        both: np.ndarray = are_finite(outputs[0]) & are_finite(outputs[1])
        return both

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[float]:
        scores: list[float] = outputs[0].tolist()
        return scores


@dataclass(frozen=True, kw_only=True)
class RerankOptions(TextOptions):
    """Options of rerank."""

    top_k: int | None = option(None, "Best documents to keep; None keeps all.", min=1)
    raw_scores: bool = option(
        False,
        "The logit, without the checkpoint's activation; of two labels, the logits' difference.",
    )
    instruction: str | None = option(
        None,
        "What a causal reranker or a chat model is told; None is that of its model card. "
        "Cross-encoders have no place for it.",
    )
    listwise: bool = option(
        False,
        "Of a chat model: one prompt lists all documents, at most one for each label, and their "
        "scores are the probabilities that each one is the best; else one prompt asks about each.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_top_k(self.top_k)
        if self.instruction is not None:
            check_text("instruction", self.instruction)


def reranks_by_prompts(context: TaskContext) -> bool:
    """Whether the model is a causal one or has a decision head: what it scores are prompts."""
    is_listwise = context.heads.ranking is not None
    return is_listwise or _has_card(context) or asks_about_documents(context)


def _has_card(context: TaskContext) -> bool:
    """Whether the prompts are those of a reranker's model card or of LogitScore."""
    if context.checkpoint.sentence.logit_score is not None:
        return True
    heads = context.heads
    is_chat_model = heads.lm is not None and heads.decision is None
    return is_chat_model and context.spec.family in YES_NO_FAMILIES


def _is_slow(
    context: TaskContext, query: str, documents: Iterable[str], options: RerankOptions
) -> bool:
    """The prompts of a causal reranker are tokenised while the call is made, and documents that
    are no list are pulled.
    """
    return not isinstance(documents, list | tuple) or reranks_by_prompts(context)


@task(is_slow=_is_slow)
def rerank(
    context: TaskContext, query: str, documents: Iterable[str], options: RerankOptions
) -> TaskCall[Results[Hit]]:
    """The documents by how well they answer the query, best first.

    The model is a cross-encoder with one label, or with two, whose score is the probability of the
    second (monoBERT); or a causal one that answers yes or no (Qwen3-Reranker, or
    sentence-transformers' LogitScore), whose prompt holds the instruction, or any chat model, which
    is asked whether each document answers the query, as by decide. A listwise model (Jina reranker
    v3, v3.5) reads all documents in one prompt, or in a few, so that a score depends on the others.
    With on_error="return" a bad document is left out; its error is in `errors` by its index.
    Raises InputError where the model is neither, OptionError for an instruction that it does not
    read.
    """
    check_text("query", query)
    documents = list(check_iterable("documents", documents))
    if context.heads.ranking is not None:
        return rank_list(
            context,
            context.heads.ranking,
            query,
            documents,
            instruction=options.instruction,
            reader=context.reader(options),
            top_k=options.top_k,
        )
    if options.listwise or (not _has_card(context) and asks_about_documents(context)):
        return ask_about_documents(
            context,
            query,
            documents,
            instruction=options.instruction,
            listwise=options.listwise,
            raw_scores=options.raw_scores,
            truncate=options.truncate,
            top_k=options.top_k,
            keeps_errors=options.on_error == "return",
        )
    if _has_card(context):
        return _logits_call(context, query, documents, options)
    if options.instruction:
        raise OptionError(
            "instruction is for causal rerankers and chat models; this checkpoint is a "
            "cross-encoder, which reads a query and a document alone: put it into the query"
        )
    head = context.need_head(context.heads.sequence, "sequence classification")
    if (reason := why_no_score(context.spec)) is not None:
        raise InputError(f"{reason}; use classify with (query, document) pairs")
    job = ScoreTask(head, _activation(context, options, num_labels=context.spec.num_labels))
    prompt = context.checkpoint.sentence.prompt_text(None, None)
    pairs = [(prompt + query, document) for document in documents]

    def gather(scores: Results[Any]) -> Results[Hit]:
        return best_hits(scores, documents, options.top_k)

    return TaskCall("rerank", pairs, job, context.reader(options), lambda _: ListSink(gather))


# Names of the first of two labels that say that it is the relevant one.
_RELEVANT = ("relevant", "yes", "true", "positive", "entailment", "1")


def why_no_score(spec: ModelSpec) -> str | None:
    """The reason why labels of sequences give no score of a pair; None where they do."""
    if spec.num_labels == 1:
        return None
    given = f"this one has {spec.num_labels}"
    if spec.num_labels == 2:
        kind = spec.problem_type
        if kind not in (None, "single_label_classification"):
            given = (
                f"this one has two, and problem_type {kind} says that neither excludes the other"
            )
        elif (first := next(iter(spec.id2label.values())).lower()) in _RELEVANT:
            given = f"the first of this one is {first!r:.60}"
        else:
            return None
    return f"rerank needs a model with one label, or with two and the second for relevance; {given}"


def _logits_call(
    context: TaskContext, query: str, documents: list[str], options: RerankOptions
) -> TaskCall[Results[Hit]]:
    """rerank by a causal model."""
    job = _yes_no_task(context, options)
    faults = map(text_fault, documents)
    refused = {
        index: InputError(f"documents[{index}] {fault}")
        for index, fault in enumerate(faults)
        if fault is not None
    }
    texts = ["" if index in refused else text for index, text in enumerate(documents)]
    made = _pair_prompts(context, query, texts, options)
    prompts = made.prompts
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, InputError):
            refused.setdefault(index, prompt)
    reader = context.reader(options)
    if refused and not reader.keeps_errors:
        raise copy(refused[min(refused)])  # this frame holds the others
    given = {
        index: prompt
        for index, prompt in enumerate(prompts)
        if index not in refused and not isinstance(prompt, InputError)
    }
    kept = list(given)

    def gather(scores: Results[Any]) -> Results[Hit]:
        errors = refused | {kept[index]: error for index, error in scores.errors.items()}
        by_index = dict(zip(kept, scores, strict=True))
        ordered = [by_index.get(index, errors.get(index)) for index in range(len(documents))]
        num_truncated = scores.stats.num_truncated + made.num_truncated
        stats = replace(scores.stats, num_truncated=num_truncated)
        return best_hits(Results(ordered, stats, errors), documents, options.top_k)

    return TaskCall("rerank", list(given.values()), job, reader, lambda _: ListSink(gather))


def _activation(
    context: TaskContext, options: RerankOptions, *, num_labels: int = 1
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The checkpoint's activation of logits, a sigmoid where it names none; that of two labels,
    which CrossEncoder saves as the identity, is the softmax over both."""
    name = context.checkpoint.cross_encoder_activation or "torch.nn.Sigmoid"
    if num_labels == 2:
        name = "torch.nn.Sigmoid"  # the softmax, as a function of the difference
    name = "torch.nn.Identity" if options.raw_scores else name
    return activation_by_name(name, source="the cross-encoder's config")


def _yes_no_task(context: TaskContext, options: RerankOptions) -> YesNoTask:
    head = context.need_head(context.heads.lm, "language model")
    score = context.checkpoint.sentence.logit_score
    if score is None:
        yes, no = yes_no_ids(context.need_tokenizer())
        own = torch.nn.Identity() if options.raw_scores else torch.nn.Sigmoid()
        return YesNoTask(head, yes, no, own)
    activation = _activation(context, options)
    return YesNoTask(head, score.true_token_id, score.false_token_id, activation)


def _pair_prompts(
    context: TaskContext, query: str, documents: list[str], options: RerankOptions
) -> PairPrompts:
    tokenizer, sentence = context.need_tokenizer(), context.checkpoint.sentence
    score, truncate = sentence.logit_score, options.truncate
    if score is None:
        return yes_no_prompts(
            tokenizer, query, documents, instruction=options.instruction, truncate=truncate
        )
    prompt = sentence.prompt_text(options.instruction, None)
    template = context.checkpoint.pair_template
    if template is None:
        return PairPrompts([(prompt + query, document) for document in documents])
    if options.instruction and not writes_prompt(template, score):
        raise OptionError(
            "the checkpoint's chat template does not write a system message, in which a causal "
            "reranker reads the instruction; leave it out, or put it into the query"
        )
    return chat_prompts(
        tokenizer, template, score, query, documents, prompt=prompt, truncate=truncate
    )
