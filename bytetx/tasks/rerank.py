"""Reranking by a cross-encoder, or by a causal model that answers yes or no (Qwen3-Reranker)."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from bytetx.arguments import check_iterable, check_text, check_top_k, text_fault
from bytetx.checkpoint.logit_score import LogitScoreSpec
from bytetx.encode.finite import are_finite
from bytetx.encode.step import Capture, Step
from bytetx.errors import InputError, OptionError
from bytetx.nn.heads import LmHead
from bytetx.nn.sentence_modules import activation_by_name
from bytetx.nn.transformer import Transformer
from bytetx.ops.pooling import pool
from bytetx.tasks.call import Call, ListSink
from bytetx.tasks.classify import ScoreTask
from bytetx.tasks.one_pass import OnePass
from bytetx.tasks.options import OnError
from bytetx.tasks.pair_prompts import PairPrompts, chat_prompts, yes_no_ids, yes_no_prompts
from bytetx.tasks.results import Hit, Results

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
        return self.reduce(transformer.forward(step.batch), step)

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """(scores, logits before the activation), f32 [batch_size], from the last hidden states."""
        x = hidden_states
        last = pool(x, step.batch.cu_seqlens, mode="lasttoken").to(x.dtype)
        logits = self.head.forward(last)
        scores = logits[:, self.yes]
        if self.no is not None:
            scores = scores - logits[:, self.no]
        scores = scores.float()
        return self.activation(scores), scores

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        both: np.ndarray = are_finite(outputs[0]) & are_finite(outputs[1])
        return both

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[float]:
        scores: list[float] = outputs[0].tolist()
        return scores


class RerankMixin(OnePass):
    """Model.rerank."""

    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        top_k: int | None = None,
        raw_scores: bool = False,
        instruction: str | None = None,
        truncate: bool = False,
        on_error: OnError = "raise",
        show_progress: bool = False,
    ) -> Results[Hit]:
        """The documents by how well they answer the query, best first.

        The model is a cross-encoder with one label, or a causal one that answers yes or no
        (Qwen3-Reranker, or sentence-transformers' LogitScore), whose prompt holds the instruction;
        None is that of its model card, or the checkpoint's default prompt.
        top_k: None keeps all.  raw_scores: the logit, without the checkpoint's activation.
        on_error="return": a bad document is left out; its error is in `errors` by its index.
        """
        call = self._rerank_call(
            query,
            documents,
            top_k=top_k,
            raw_scores=raw_scores,
            instruction=instruction,
            truncate=truncate,
            on_error=on_error,
        )
        return self._perform(call, show_progress=show_progress)

    def _rerank_call(
        self,
        query: str,
        documents: Iterable[str],
        *,
        top_k: int | None,
        raw_scores: bool,
        instruction: str | None,
        truncate: bool,
        on_error: OnError,
    ) -> Call[Results[Hit]]:
        """Model.rerank, ready to run."""
        check_top_k(top_k)
        check_text("query", query)
        documents = list(check_iterable("documents", documents))
        if self._reranks_by_logits:
            return self._logits_call(
                query,
                documents,
                top_k=top_k,
                raw_scores=raw_scores,
                instruction=instruction,
                truncate=truncate,
                on_error=on_error,
            )
        if instruction is not None:
            raise OptionError("instruction is for causal rerankers; this is a cross-encoder")
        head = self._need_head(self.heads.sequence, "sequence classification")
        if self.spec.num_labels != 1:
            raise InputError(
                f"rerank needs a model with one label, this one has {self.spec.num_labels}; "
                "use classify with (query, document) pairs"
            )
        name = self.checkpoint.cross_encoder_activation or "torch.nn.Sigmoid"
        if raw_scores:
            name = "torch.nn.Identity"
        task = ScoreTask(head, activation_by_name(name, source="the cross-encoder's config"))
        prompt = self.checkpoint.sentence.prompt_text(None, None)
        pairs = [(prompt + query, document) for document in documents]
        reader = self._reader(truncate=truncate, on_error=on_error)

        def gather(scores: Results[Any]) -> Results[Hit]:
            return _best_hits(scores, documents, top_k)

        return Call("rerank", pairs, task, reader, lambda _: ListSink(gather))

    @property
    def _reranks_by_logits(self) -> bool:
        """Whether the model is a causal one, whose prompts are made before they are read."""
        return self._logit_score is not None or self._answers_yes_or_no()

    def _answers_yes_or_no(self) -> bool:
        return self.heads.lm is not None and self.spec.family in YES_NO_FAMILIES

    def _logits_call(
        self,
        query: str,
        documents: list[str],
        *,
        top_k: int | None,
        raw_scores: bool,
        instruction: str | None,
        truncate: bool,
        on_error: OnError,
    ) -> Call[Results[Hit]]:
        if instruction is not None:
            check_text("instruction", instruction)
        task = self._yes_no_task(raw_scores=raw_scores)
        faults = map(text_fault, documents)
        refused = {
            index: InputError(f"documents[{index}] {fault}")
            for index, fault in enumerate(faults)
            if fault is not None
        }
        texts = ["" if index in refused else text for index, text in enumerate(documents)]
        made = self._pair_prompts(query, texts, instruction=instruction, truncate=truncate)
        prompts = made.prompts
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, InputError):
                refused.setdefault(index, prompt)
        reader = self._reader(truncate=truncate, on_error=on_error)
        if refused and not reader.keeps_errors:
            raise refused[min(refused)]
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
            return _best_hits(Results(ordered, stats, errors), documents, top_k)

        return Call("rerank", list(given.values()), task, reader, lambda _: ListSink(gather))

    def _yes_no_task(self, *, raw_scores: bool) -> YesNoTask:
        head, score = self._need_head(self.heads.lm, "language model"), self._logit_score
        if score is None:
            yes, no = yes_no_ids(self._need_tokenizer())
            own = torch.nn.Identity() if raw_scores else torch.nn.Sigmoid()
            return YesNoTask(head, yes, no, own)
        name = self.checkpoint.cross_encoder_activation or "torch.nn.Sigmoid"
        name = "torch.nn.Identity" if raw_scores else name
        activation = activation_by_name(name, source="the cross-encoder's config")
        return YesNoTask(head, score.true_token_id, score.false_token_id, activation)

    def _pair_prompts(
        self, query: str, documents: list[str], *, instruction: str | None, truncate: bool
    ) -> PairPrompts:
        tokenizer, score = self._need_tokenizer(), self._logit_score
        if score is None:
            return yes_no_prompts(
                tokenizer, query, documents, instruction=instruction, truncate=truncate
            )
        prompt = self.checkpoint.sentence.prompt_text(instruction, None)
        template = self.checkpoint.pair_template
        if template is None:
            return PairPrompts([(prompt + query, document) for document in documents])
        return chat_prompts(
            tokenizer, template, score, query, documents, prompt=prompt, truncate=truncate
        )

    @property
    def _logit_score(self) -> LogitScoreSpec | None:
        return self.checkpoint.sentence.logit_score


def _best_hits(scores: Results[Any], documents: Sequence[str], top_k: int | None) -> Results[Hit]:
    hits = [
        Hit(index, score, documents[index])
        for index, score in enumerate(scores)
        if index not in scores.errors
    ]
    hits.sort(key=lambda hit: hit.score, reverse=True)
    return Results(hits[:top_k], scores.stats, scores.errors)
