"""Log-likelihoods of texts under a causal model: one packed forward pass, no generation."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from bytetx.encode.step import Step, are_finite
from bytetx.nn.heads import LmHead
from bytetx.nn.transformer import Transformer
from bytetx.packed import upload
from bytetx.tasks.call import TaskCall, list_sink
from bytetx.tasks.context import TaskContext
from bytetx.tasks.results import Likelihood, Results
from bytetx.tasks.task import TextOptions, Texts, task


@task(item=Likelihood, has_route=True)
def score(
    context: TaskContext, texts: Texts, options: TextOptions
) -> TaskCall[Results[Likelihood]]:
    """Log-likelihood and perplexity of each text under a causal language model.

    The first token, which has nothing before it, is not scored; give a text that starts with the
    begin-of-text token, or a tokenizer that adds it, to score every token of one's own.
    Raises InputError where the checkpoint has no language model head.
    """
    job = LikelihoodTask(context.need_head(context.heads.lm, "language model"))
    return TaskCall("score", texts, job, context.reader(options), list_sink)


@dataclass(frozen=True, slots=True)
class LikelihoodTask:
    """Each token but the first of a text, given those before it."""

    head: LmHead
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return ("likelihood", id(self.head))

    @property
    def capture(self) -> None:
        """None: only the host knows where texts end, and so which rows are scored."""
        return None

    @torch.inference_mode()
    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        shared = step.batch.shared
        if shared is None:
            return self.reduce(transformer.forward(step.batch), step)
        # Two tokens in one row have the same ones before them: each row is scored once.
        ids, rows, num_rows = step.batch.input_ids, shared.rows, shared.num_rows
        every = torch.arange(max(num_rows, len(rows)), device=rows.device)
        batch = replace(step.batch, shared=replace(shared, rows=every[:num_rows]))
        hidden_states = transformer.forward(batch)
        tokens = every.new_zeros(num_rows).index_copy_(0, rows, every[: len(rows)])
        before = rows[(tokens - 1).clamp_(min=0)]
        found = self.head.log_likelihoods(hidden_states, ids[tokens].long(), rows=before)
        scored = upload(_rows_before_a_token(step.requests.seqlens) + 1, rows.device)
        return (found[rows[scored]],)

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """f32 [tokens that are scored] from the last hidden states."""
        rows = upload(_rows_before_a_token(step.requests.seqlens), hidden_states.device)
        targets = step.batch.input_ids[rows + 1].long()
        return (self.head.log_likelihoods(hidden_states, targets, rows=rows),)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        """A log-softmax is NaN or -inf wherever its logits are not finite."""
        return are_finite(outputs[0], _num_scored(step.requests.seqlens))

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[Likelihood]:
        pieces = np.split(outputs[0], np.cumsum(_num_scored(step.requests.seqlens))[:-1])
        return [Likelihood(float(piece.sum(dtype=np.float64)), piece) for piece in pieces]


def _num_scored(seqlens: np.ndarray) -> np.ndarray:
    """Tokens of each text that have one before them."""
    num_scored: np.ndarray = np.maximum(seqlens - 1, 0)
    return num_scored


def _rows_before_a_token(seqlens: np.ndarray) -> torch.Tensor:
    """int64: the packed rows that are not the last of their sequence."""
    is_last = np.zeros(int(seqlens.sum()), dtype=bool)
    is_last[np.cumsum(seqlens)[seqlens > 0] - 1] = True
    return torch.from_numpy(np.flatnonzero(~is_last))
