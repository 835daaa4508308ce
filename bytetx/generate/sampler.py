"""Sampler: from a step's logits to tokens, with the sampling parameters of each sequence.

LastTokens keeps the token that each sequence sampled last on the device, for the next step;
SamplerOutput is on its way from there to the host.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bytetx.errors import DeviceLostError, InputError, NotFiniteError, StepError
from bytetx.generate.guidance import GuidedRow, TokenMasks
from bytetx.generate.ngram_drafter import num_accepted
from bytetx.generate.outputs import RowResult, StepResult, TokenLogprob
from bytetx.generate.scheduler import ScheduledRow, SchedulerOutput, SequenceState
from bytetx.generate.stopping import forbidden_tokens
from bytetx.nn.heads import LogitRows, logits_block
from bytetx.ops.sample_tokens import sample_tokens
from bytetx.ops.sampling import (
    Biases,
    Filters,
    Penalties,
    TopLogprobs,
    adjust_logits,
    argmax,
    is_bad_row,
    mask_logits,
    top_logprobs,
)
from bytetx.runtime.input_batch import InputBatch
from bytetx.runtime.upload import Upload, Uploader

_DEVICE_LOST = (
    "the device failed for good by the time of this step: restart the process; with "
    "CUDA_LAUNCH_BLOCKING=1 in its environment the error names the kernel"
)


_OVERFLOW = (
    "the model may overflow in this dtype (bfloat16 has a wider range than float16), or its "
    "weights be wrong"
)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of several tokens of a prompt, or of one token of each of several samples.

    rows: the index of the prompt's row in the plan, or those of the samples.  counts: for each
    token the number of most likely tokens to report.  token_ids: the tokens, int32 [n].
    """

    rows: Sequence[int]
    counts: Sequence[int]
    token_ids: Tensor
    top: TopLogprobs

    def to_host(self) -> "Logprobs":
        top = self.top
        columns = (top.chosen, top.ranks, top.values, top.token_ids)
        host = TopLogprobs(*map(_to_host, columns))
        return Logprobs(self.rows, self.counts, _to_host(self.token_ids), host)

    def are_finite(self) -> bool:
        """Whether the logits were, as far as it shows; the tensors must be on the host."""
        return bool(self.top.chosen.isfinite().all() and self.top.values.isfinite().all())

    def entries(self) -> list[TokenLogprob]:
        """One entry for each token; the tensors must be on the host."""
        columns = (self.top.chosen, self.top.ranks, self.top.values, self.top.token_ids)
        tokens = self.token_ids.tolist()
        rows = zip(tokens, *(column.tolist() for column in columns), self.counts, strict=True)
        return [
            TokenLogprob(token, logprob, rank, dict(zip(ids[:count], values[:count], strict=True)))
            for token, logprob, rank, values, ids, count in rows
        ]


@dataclass(slots=True)
class SamplerOutput:
    """A step's results on the device; `results` waits for the copies that `to_host` started.

    rows: the plan's rows.  sampling_rows: for each sample the index of its row.  tokens: int32
    [len(sampling_rows)], -1 where no token could be sampled.  errors: by the number of the sample.
    logprobs: of the sampled tokens.  prompt_logprobs: of the prompts' tokens, in their order.
    check: raises where the results are invalid because another rank failed.
    """

    rows: Sequence[ScheduledRow]
    sampling_rows: Sequence[int]
    tokens: Tensor | None
    errors: Mapping[int, InputError] = field(default_factory=dict)
    logprobs: Logprobs | None = None
    prompt_logprobs: Sequence[Logprobs] = ()
    check: Callable[[], None] | None = None
    _is_done: torch.cuda.Event | None = None

    def to_host(self) -> "SamplerOutput":
        """Starts the copies on the current stream, where the tensors are on a GPU."""
        if self.tokens is not None:
            is_cuda = self.tokens.is_cuda
        else:
            is_cuda = any(part.token_ids.is_cuda for part in self.prompt_logprobs)
        if is_cuda:
            self.tokens = None if self.tokens is None else _to_host(self.tokens)
            self.logprobs = None if self.logprobs is None else self.logprobs.to_host()
            self.prompt_logprobs = [part.to_host() for part in self.prompt_logprobs]
            self._is_done = torch.cuda.Event()
            self._is_done.record()
        return self

    def results(self) -> Sequence[StepResult]:
        """One result for each row of the plan; a DeviceLostError where the device failed."""
        if self._is_done is not None:
            try:
                self._is_done.synchronize()
            except RuntimeError as error:
                if self.check is not None:
                    self.check()
                reason = str(error).strip().partition("\n")[0]
                raise DeviceLostError(f"{_DEVICE_LOST} ({reason})") from error
        tokens = [] if self.tokens is None else self.tokens.tolist()
        if self.check is not None:
            self.check()
        has_only_tokens = not (self.logprobs or self.prompt_logprobs or self.errors)
        if has_only_tokens and len(tokens) == len(self.rows) and min(tokens) >= 0:
            return tokens
        return self._row_results(tokens)

    def _row_results(self, tokens: list[int]) -> list[StepResult]:
        logprobs: dict[int, TokenLogprob] = {}
        if self.logprobs is not None:
            logprobs = dict(zip(self.logprobs.rows, self.logprobs.entries(), strict=True))

        def result(number: int, num_before: int = 0) -> RowResult:
            error = self.errors.get(number)
            if error is None and tokens[number] < 0:
                error = _no_token_error(self.rows[self.sampling_rows[number]], num_before)
            failed = RowResult(error=error)
            return RowResult(tokens[number], logprobs.get(number)) if error is None else failed

        results: list[StepResult] = [RowResult()] * len(self.rows)
        number = 0
        while number < len(tokens):
            index = self.sampling_rows[number]
            draft = self.rows[index].draft
            if draft:
                count = 1 + num_accepted(draft, tokens[number : number + len(draft) + 1])
                results[index] = [result(number + each, each) for each in range(count)]
            else:
                results[index] = result(number)
            number += 1 + len(draft)
        for part in self.prompt_logprobs:
            whole = results[part.rows[0]]
            assert isinstance(whole, RowResult)  # rows with drafts are behind the prompt
            if whole.error is None and not part.are_finite():
                results[part.rows[0]] = RowResult(error=_prompt_error())
                continue
            entries = (*whole.prompt_logprobs, *part.entries())
            results[part.rows[0]] = whole._replace(prompt_logprobs=entries)
        return results


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _no_token_error(row: ScheduledRow, num_before: int) -> InputError:
    """num_before: samples of this row before the failed one."""
    num_known = row.start + row.num_tokens - len(row.draft)
    position = num_known + num_before - row.sequence.num_prompt_tokens
    start = f"no token can be chosen after {position} tokens: the logits are NaN or infinite"
    params = row.sequence.params
    limits = params.logit_bias or params.min_tokens or params.logits_processors
    if limits or params.structured_outputs:
        return StepError(
            f"{start}, or logit_bias, min_tokens, logits_processors and structured_outputs left "
            f"none; {_OVERFLOW}"
        )
    return NotFiniteError(f"{start}; {_OVERFLOW}")


def _prompt_error() -> NotFiniteError:
    return NotFiniteError(f"the logits of the prompt's tokens are NaN or infinite; {_OVERFLOW}")


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
        self._masks = TokenMasks(vocab_size)
        self._guided: SamplerOutput | None = None  # the last step with guided rows
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
        is_guided = bool(params["is_guided"].any())
        if is_guided:
            processed = self._guide(metadata, processed, errors)
        tokens = self._choose(metadata, processed)
        # A processor may put numbers where the logits are NaN, and a mask -inf.
        if is_guided or params["has_processors"].any():
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
        self._guided = output if is_guided else None

    def _add_sequence(self, sequence: SequenceState) -> None:
        """Stores the parameters of a sequence that has just got its slot."""
        params = sequence.params
        is_guided = sequence.guide is not None
        has_biases = bool(params.logit_bias) or (params.min_tokens > 0 and not is_guided)
        has_processors = bool(params.logits_processors)
        changes_logits = params.has_penalties or has_biases or has_processors or is_guided
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
            is_guided,
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

    def _guide(
        self, metadata: SamplingMetadata, logits: Tensor, errors: dict[int, InputError]
    ) -> Tensor:
        """Logits of the tokens that the grammars of guided rows let follow.

        The forward pass runs meanwhile: what the step before it sampled is waited for here.
        """
        numbers = np.flatnonzero(metadata.params["is_guided"])
        pending: dict[SequenceState, int] | None = None
        rows: list[GuidedRow] = []
        firsts: list[tuple[int, SequenceState]] = []
        for number in numbers.tolist():
            sequence, position = metadata.sequence(number), int(metadata.positions[number])
            guide = sequence.guide
            assert guide is not None
            if rows and firsts[-1][1] is sequence:
                continue  # a position of its draft
            first = sequence.num_prompt_tokens
            tokens = sequence.token_ids[first + guide.num_taken : first + position]
            if sequence.num_output_tokens < position:
                if pending is None:
                    pending = self._guided_tokens()
                tokens.append(pending[sequence])
            guide.take(tokens)
            draft = metadata.rows[metadata.sampling_rows[number]].draft
            ends = [forbidden_tokens(sequence, position + i) for i in range(1 + len(draft))]
            rows.append(GuidedRow(guide, draft, ends))
            firsts.append((number, sequence))
        masks = self._masks.fill(rows)
        for (number, _), row in zip(firsts, rows, strict=True):
            error = row.guide.error()
            if error is not None:
                errors[number] = error
        is_all = len(numbers) == len(metadata.params)
        where, uploaded = self._upload(numbers, masks)
        return mask_logits(logits, uploaded, rows=None if is_all else where)

    def _guided_tokens(self) -> dict[SequenceState, int]:
        """The tokens of guided rows that the engine has not collected yet, by their sequence."""
        output = self._guided
        assert output is not None and output.tokens is not None  # a guided row of it is pending
        if output._is_done is not None:
            output._is_done.synchronize()
        found = zip(output.sampling_rows, output.tokens.tolist(), strict=True)
        return {output.rows[row].sequence: token for row, token in found}

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
        ("is_guided", np.bool_),
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
    if sequence.guide is not None:  # its mask leaves these out
        return list(bias.items())
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


class LastTokens:
    """The last sampled token of each slot, on the device: int32 [max_num_seqs + 1].

    The additional slot at the end belongs to padding rows.
    """

    def __init__(self, max_num_seqs: int, *, device: torch.device):
        self._tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)

    @property
    def padding_slot_index(self) -> int:
        return len(self._tokens) - 1

    def gather(self, slot_indices: Tensor) -> Tensor:
        """int32 [n]: the tokens of these slots."""
        return self._tokens.index_select(0, slot_indices)

    def resolve(self, input_ids: Tensor) -> Tensor:
        """The ids, where each id below 0 (~slot_index) is replaced by its slot's token."""
        is_slot = input_ids < 0
        slot_indices = torch.where(is_slot, ~input_ids, 0)
        return torch.where(is_slot, self.gather(slot_indices), input_ids)

    def store(self, slot_indices: Tensor, tokens: Tensor) -> None:
        """tokens: int32 [n]; -1, where no token could be sampled, is stored as 0 and never used."""
        self._tokens.index_copy_(0, slot_indices.long(), tokens.clamp(min=0))

    def store_argmax(self, logits: Tensor, slot_indices: Tensor) -> Tensor:
        """int32 [n]: the most likely token of each row, also stored; -1 where there is none."""
        return argmax(logits, slot_indices=slot_indices, last_tokens=self._tokens)
