"""Sampler: from a step's logits to tokens, with the sampling parameters of each sequence."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bytetx.errors import InputError
from bytetx.generate.sampler_output import Logprobs, SamplerOutput
from bytetx.generate.scheduler import ScheduledRow, SchedulerOutput, SequenceState
from bytetx.generate.stopping import forbidden_tokens
from bytetx.nn.heads import LogitRows, logits_block
from bytetx.ops.argmax import argmax
from bytetx.ops.sample_tokens import sample_tokens
from bytetx.ops.sampling import (
    Biases,
    Filters,
    Penalties,
    adjust_logits,
    is_bad_row,
    top_logprobs,
)
from bytetx.runtime.input_batch import InputBatch
from bytetx.runtime.upload import Upload, Uploader


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The rows that a step samples, and how; read from its plan.

    rows: all rows of the plan.  sampling_rows: indices of those that sample, n in all: a row with a
    draft is there once for each token that it samples.
    slot_indices: int64 [n].  params: their sampling parameters, structured [n].
    positions: int64 [n], the index of the sampled token in the output.
    logits_rows: int64 [n], their rows of the step's logits.
    prompt_logits: the rows of the step's logits that prompt_logprobs needs.
    is_greedy: only the most likely token of each row is needed.
    """

    rows: tuple[ScheduledRow, ...]
    sampling_rows: list[int]
    slot_indices: np.ndarray
    params: np.ndarray
    positions: np.ndarray
    logits_rows: np.ndarray
    prompt_logits: list["PromptLogits"]
    is_greedy: bool

    def sequence(self, number: int) -> SequenceState:
        """The sequence of sample `number`, below n."""
        return self.rows[self.sampling_rows[number]].sequence


class PromptLogits(NamedTuple):
    """Logits of a prompt: row `row` of the plan has num_logits of the step's, from `first` on."""

    row: int
    first: int
    num_logits: int


class Sampler:
    """Samples the next tokens of a step, each with the parameters of its sequence.

    The parameters of running sequences stay here by slot index, so that a step only looks them up.
    Token counts for penalties are on the device, [max_num_seqs, vocab_size] of 5 bytes, allocated
    for the first sequence with penalties.  Nothing here waits for a GPU.
    """

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device | str = "cpu"):
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self._params = np.zeros(max_num_seqs, dtype=_PARAMS)
        self._counts: _TokenCounts | None = None
        self._upload = Uploader(self.device).upload

    def prepare(self, plan: SchedulerOutput, input_batch: InputBatch) -> SamplingMetadata:
        """Prepare the sampling of this plan's step; call it once for each plan, in their order."""
        for sequence in plan.admitted:
            self._add_sequence(sequence)
        ends = np.cumsum(input_batch.num_logits, dtype=np.int64)
        num_samples = input_batch.num_samples
        sampling_rows = np.repeat(np.arange(len(num_samples)), num_samples)
        # How many samples of the same row follow each.
        num_after = np.cumsum(num_samples)[sampling_rows] - np.arange(1, len(sampling_rows) + 1)
        num_scored = input_batch.num_logits - num_samples
        prompt_logits = [
            PromptLogits(row, int(ends[row]) - plan.rows[row].num_logits, int(num_scored[row]))
            for row in np.flatnonzero(num_scored).tolist()
        ]
        slot_indices = input_batch.slot_indices[sampling_rows].astype(np.int64)
        params = self._params[slot_indices]
        return SamplingMetadata(
            rows=plan.rows,
            sampling_rows=sampling_rows.tolist(),
            slot_indices=slot_indices,
            params=params,
            positions=input_batch.kv_seqlens[sampling_rows]
            - num_after
            - params["num_prompt_tokens"],
            logits_rows=ends[sampling_rows] - 1 - num_after,
            prompt_logits=prompt_logits,
            is_greedy=not prompt_logits and bool(params["is_plain_greedy"].all()),
        )

    def sample(self, metadata: SamplingMetadata, logits: Tensor | LogitRows) -> SamplerOutput:
        """logits: [num_logits, vocab_size], of the rows that InputBatch.logits_rows names.

        The logits of prompts are read in blocks.
        """
        output = SamplerOutput(metadata.rows, metadata.sampling_rows, None)
        if metadata.sampling_rows:
            is_all = len(metadata.logits_rows) == len(logits)
            rows = logits[:] if is_all else logits[self._upload(metadata.logits_rows)[0]]
            self._sample(metadata, rows, output)
        output.prompt_logprobs = self._prompt_logprobs(metadata, logits)
        return output

    def _sample(self, metadata: SamplingMetadata, logits: Tensor, output: SamplerOutput) -> None:
        params = metadata.params
        if metadata.is_greedy:
            output.tokens = argmax(logits)
            return
        processed, errors = self._apply_processors(metadata, self._adjust(metadata, logits))
        tokens = self._choose(metadata, processed)
        if params["has_processors"].any():  # one may put numbers where the logits are NaN
            tokens = torch.where(is_bad_row(logits), -1, tokens)
        if self._counts is not None:
            self._counts.add(self._upload(metadata.slot_indices)[0], tokens.clamp(min=0))
        numbers = np.flatnonzero(params["logprobs"] >= 0)
        if len(numbers):
            (where,), counts = self._upload(numbers), params["logprobs"][numbers]
            sampled = tokens[where].clamp_(min=0)
            top = top_logprobs(logits[where], sampled, k=int(counts.max()))
            output.logprobs = Logprobs(numbers.tolist(), counts.tolist(), sampled, top)
        output.errors = errors
        output.tokens = tokens

    def _add_sequence(self, sequence: SequenceState) -> None:
        """Stores the parameters of a sequence that has just got its slot."""
        params = sequence.params
        has_biases = bool(params.logit_bias) or params.min_tokens > 0
        has_processors = bool(params.logits_processors)
        changes_logits = params.has_penalties or has_biases or has_processors
        self._params[sequence.slot_index] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            min(params.top_k, self.vocab_size),
            (sequence.seed + 2**63) % 2**64 - 2**63,
            sequence.num_prompt_tokens,
            -1 if params.logprobs is None else params.logprobs,
            params.has_penalties,
            has_biases,
            has_processors,
            params.is_greedy and params.logprobs is None and not changes_logits,
        )
        if params.has_penalties:
            if self._counts is None:
                num_slots = len(self._params)
                self._counts = _TokenCounts.empty(num_slots, self.vocab_size, self.device)
            self._counts.reset(sequence, self._upload)

    def _adjust(self, metadata: SamplingMetadata, logits: Tensor) -> Tensor:
        """Logits after biases, then penalties, of the rows that have them."""
        params = metadata.params
        pairs = [
            (number, token, bias)
            for number in np.flatnonzero(params["has_biases"]).tolist()
            for token, bias in _biases(metadata.sequence(number), metadata.positions[number])
        ]
        if pairs:
            numbers, tokens, values = map(np.array, zip(*pairs, strict=True))
            biases = Biases(*self._upload(numbers, tokens, values.astype(np.float32)))
            logits = adjust_logits(logits, biases=biases)
        penalized = np.flatnonzero(params["has_penalties"])
        if self._counts is not None and len(penalized):
            amounts = (params[name][penalized] for name in _PENALTY_NAMES)
            where, slot_indices, *uploaded = self._upload(
                penalized, metadata.slot_indices[penalized], *amounts
            )
            penalties = self._counts.penalties(slot_indices, *uploaded)
            adjusted = adjust_logits(logits[where], penalties=penalties)
            logits = logits.float().index_copy(0, where, adjusted)
        return logits

    def _apply_processors(
        self, metadata: SamplingMetadata, logits: Tensor
    ) -> tuple[Tensor, dict[int, InputError]]:
        """Logits after the logits processors; one that raises ends only its own request."""
        errors: dict[int, InputError] = {}
        numbers = np.flatnonzero(metadata.params["has_processors"]).tolist()
        if not numbers:
            return logits, errors
        processed = logits.float().clone()
        for number in numbers:
            sequence, row = metadata.sequence(number), processed[number].clone()
            for processor in sequence.params.logits_processors or ():
                try:
                    row = _checked(
                        processor(tuple(sequence.token_ids), row), like=processed[number]
                    )
                except Exception as error:  # a user's function may raise anything
                    errors[number] = _processor_error(processor, error)
                    break
            else:
                processed[number] = row
        return processed, errors

    def _choose(self, metadata: SamplingMetadata, logits: Tensor) -> Tensor:
        """int32: the sampled token of each row, -1 where no token can be sampled."""
        params = metadata.params
        is_greedy = params["temperature"] == 0
        if is_greedy.all():
            return argmax(logits)
        top_ks, top_ps, min_ps = (params[name] for name in ("top_k", "top_p", "min_p"))
        temperature, seeds, positions, top_k, top_p, min_p = self._upload(
            params["temperature"], params["seed"], metadata.positions, top_ks, top_ps, min_ps
        )
        filters = Filters(
            top_k=top_k if top_ks.any() else None,
            top_p=top_p if (top_ps < 1).any() else None,
            min_p=min_p if min_ps.any() else None,
            max_top_k=int(top_ks.max()),
            has_open_nucleus=bool(((top_ps < 1) & (top_ks == 0)).any()),
        )
        return sample_tokens(
            logits,
            temperature,
            filters,
            seeds=seeds,
            positions=positions,
            has_greedy=bool(is_greedy.any()),
        )

    def _prompt_logprobs(
        self, metadata: SamplingMetadata, logits: Tensor | LogitRows
    ) -> list[Logprobs]:
        """Logprobs of the prompt tokens that follow those of this step, in blocks."""
        scored, block = [], logits_block(self.vocab_size)
        for index, first, count in metadata.prompt_logits:
            row = metadata.rows[index]
            start = row.start + row.num_tokens - row.num_logits + 1
            token_ids = np.array(row.sequence.token_ids[start : start + count], dtype=np.int32)
            k = row.sequence.params.prompt_logprobs
            assert k is not None  # else the plan has no logits of the prompt
            for done in range(0, count, block):
                (uploaded,) = self._upload(token_ids[done : done + block])
                rows = logits[first + done : first + done + len(uploaded)]
                top = top_logprobs(rows, uploaded, k=k)
                scored.append(Logprobs([index], [k] * len(uploaded), uploaded, top))
        return scored


_PENALTY_NAMES = ("repetition", "presence", "frequency")
_PARAMS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        *((name, np.float32) for name in _PENALTY_NAMES),
        ("top_k", np.int64),
        ("seed", np.int64),
        ("num_prompt_tokens", np.int64),
        ("logprobs", np.int64),
        ("has_penalties", np.bool_),
        ("has_biases", np.bool_),
        ("has_processors", np.bool_),
        ("is_plain_greedy", np.bool_),
    ]
)


@dataclass(frozen=True, slots=True)
class _TokenCounts:
    """Counts of past tokens, by slot index: int32 and bool [max_num_seqs, vocab_size]."""

    in_output: Tensor
    in_prompt: Tensor

    @staticmethod
    def empty(max_num_seqs: int, vocab_size: int, device: torch.device) -> "_TokenCounts":
        shape = (max_num_seqs, vocab_size)
        return _TokenCounts(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
        )

    def reset(self, sequence: SequenceState, upload: Upload) -> None:
        """Counts the tokens that the sequence has when it gets its slot."""
        vocab_size, num_prompt = self.in_prompt.shape[1], sequence.num_prompt_tokens
        token_ids = np.array(sequence.token_ids)
        counts = np.bincount(token_ids[num_prompt:], minlength=vocab_size).astype(np.int32)
        in_output, prompt = upload(counts, token_ids[:num_prompt])
        self.in_output[sequence.slot_index].copy_(in_output)
        self.in_prompt[sequence.slot_index].zero_().index_fill_(0, prompt, True)

    def add(self, slot_indices: Tensor, tokens: Tensor) -> None:
        one = torch.ones((), dtype=torch.int32, device=tokens.device)
        self.in_output.index_put_((slot_indices, tokens.long()), one, accumulate=True)

    def penalties(
        self, slot_indices: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
    ) -> Penalties:
        return Penalties(
            self.in_output[slot_indices],
            self.in_prompt[slot_indices],
            repetition,
            presence,
            frequency,
        )


def _biases(sequence: SequenceState, position: int) -> list[tuple[int, float]]:
    """(token, what is added to its logit); -inf for tokens that would end the output too early."""
    bias = sequence.params.logit_bias or {}
    forbidden = forbidden_tokens(sequence, position)
    return [*bias.items(), *((token, -np.inf) for token in forbidden)]


def _checked(logits: object, *, like: Tensor) -> Tensor:
    if not isinstance(logits, Tensor) or logits.shape != like.shape:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"it must return logits of shape {tuple(like.shape)}, got {got}")
    return logits.to(like)


def _processor_error(processor: object, error: Exception) -> InputError:
    name = getattr(processor, "__name__", type(processor).__name__)
    return InputError(f"the logits processor {name} failed: {type(error).__name__}: {error}")
