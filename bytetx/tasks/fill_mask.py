"""Masked tokens: the most likely tokens of each mask, from logits of the mask rows only."""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from bytetx.arguments import check_names, check_top_k, text_fault
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.encode.step import Step, are_finite
from bytetx.errors import InputError, shown
from bytetx.nn.heads import MaskedLMHead
from bytetx.nn.transformer import Transformer
from bytetx.ops.log_softmax import log_softmax
from bytetx.ops.pooling import largest
from bytetx.packed import upload
from bytetx.tasks.call import TaskCall, list_sink
from bytetx.tasks.context import TaskContext
from bytetx.tasks.results import Fill, Results
from bytetx.tasks.task import TextOptions, Texts, option, task

logger = logging.getLogger("bytetx")

# Masks whose logits are in memory at once: 256 rows of a vocabulary of 250 000 are 256 MB in f32.
_MAX_MASK_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class FillMaskOptions(TextOptions):
    """Options of fill_mask."""

    top_k: int = option(5, "Best tokens to keep for each mask.", min=1)
    targets: Sequence[str] | None = option(
        None, "Score these words only, by their probability in the full vocabulary."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_top_k(self.top_k, may_be_none=False)
        if self.targets is not None and not isinstance(self.targets, str):
            check_names("targets", self.targets)


@task(item=list[Fill])
def fill_mask(
    context: TaskContext, texts: Texts, options: FillMaskOptions
) -> TaskCall[Results[list[Fill]]]:
    """The best tokens for every mask token of each text.

    Raises InputError where the checkpoint has no masked language model head, or no mask token.
    """
    head = context.need_head(context.heads.masked_lm, "masked language model")
    tokenizer = context.need_tokenizer()
    if tokenizer.mask_token_id is None:
        raise InputError("this checkpoint's tokenizer names no mask token")
    target_ids = None
    if options.targets is not None:
        target_ids = find_targets(tokenizer, options.targets).to(context.checkpoint.device)
    reader = context.reader(options)
    reader.needs_mask = True
    job = FillMaskTask(head, tokenizer, options.top_k, target_ids)
    return TaskCall("fill_mask", texts, job, reader, list_sink)


@dataclass(frozen=True, slots=True)
class FillMaskTask:
    """target_ids: the only tokens to score, by their probability in the whole vocabulary; on the
    model's device.
    """

    head: MaskedLMHead
    tokenizer: Tokenizer
    top_k: int
    target_ids: torch.Tensor | None
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        targets = None if self.target_ids is None else id(self.target_ids)
        return ("fill_mask", id(self.head), self.top_k, targets)

    @property
    def capture(self) -> None:
        """None: only the host knows the positions and the number of the masks."""
        return None

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(transformer.forward(step.batch), step)

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """(scores, token ids) [masks, top_k] and f32 [masks], `largest` of the logits."""
        is_mask = step.requests.token_ids == self.tokenizer.mask_token_id
        rows = upload(torch.from_numpy(np.flatnonzero(is_mask)), hidden_states.device)
        blocks = hidden_states[rows].split(_MAX_MASK_ROWS)
        columns = zip(*(self._best(block) for block in blocks), strict=True)
        return tuple(map(torch.cat, columns))

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        is_mask = step.requests.token_ids == self.tokenizer.mask_token_id
        before = np.concatenate([[0], np.cumsum(is_mask)])  # masks before each token
        return are_finite(outputs[2], np.diff(before[step.requests.cu_seqlens]))

    def _best(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Scores and token ids [n, top_k] of mask rows [n, hidden_size], and `largest` [n]."""
        logits = self.head.forward(rows)
        scores = log_softmax(logits).exp()  # [n, vocab_size]
        extreme = largest(logits)
        if self.target_ids is None:
            best, token_ids = scores.topk(min(self.top_k, scores.shape[1]))
            return best, token_ids, extreme
        best, places = scores[:, self.target_ids].topk(min(self.top_k, len(self.target_ids)))
        return best, self.target_ids[places], extreme

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[list[Fill]]:
        scores, tokens = (output.tolist() for output in outputs[:2])
        results, row = [], 0
        for token_ids in step.requests.split():
            masks = np.flatnonzero(token_ids == self.tokenizer.mask_token_id)
            fills = []
            for mask_index, place in enumerate(masks.tolist()):
                for score, token in zip(scores[row], tokens[row], strict=True):
                    sequence = self._sequence(token_ids, place, token, is_single=len(masks) == 1)
                    token_str = self.tokenizer.decode([token])
                    fills.append(Fill(mask_index, score, token, token_str, sequence))
                row += 1
            results.append(fills)
        return results

    def _sequence(self, token_ids: np.ndarray, place: int, token: int, *, is_single: bool) -> str:
        """The text with one mask filled; other masks, which are special tokens, stay in it."""
        filled = token_ids.copy()
        filled[place] = token
        filled = filled[filled != self.tokenizer.pad_token_id]
        return self.tokenizer.decode(filled.tolist(), skip_special_tokens=is_single)


def find_targets(tokenizer: Tokenizer, targets: Sequence[str]) -> torch.Tensor:
    """int64 [num_targets]: the token of each word, or its first token where it has several.

    Raises InputError where no target is given or one has no token.
    """
    if isinstance(targets, str):
        targets = [targets]
    token_ids = []
    for place, target in enumerate(targets):
        fault = text_fault(target)
        if fault is not None:
            raise InputError(f"targets[{place}] {fault}")
        token_id = tokenizer.backend.token_to_id(target)
        if token_id is None:
            pieces = tokenizer.encode_plain(target).ids
            if not pieces:
                raise InputError(f"target {shown(target)} has no token in this vocabulary")
            token_id = pieces[0]
            piece = tokenizer.token(token_id)
            logger.warning("target %r is no single token: %r is scored for it", target, piece)
        token_ids.append(token_id)
    if not token_ids:
        raise InputError("targets is empty; give at least one word, or None for all")
    return torch.tensor(sorted(set(token_ids)))
