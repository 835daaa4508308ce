"""Sampler: a step's logits -> its rows' tokens, with each sequence's own parameters."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bytetx.errors import InputError
from bytetx.generate.sampler_output import Logprobs, Sampled
from bytetx.generate.scheduler import StepPlan, StepRow
from bytetx.generate.sequence import SequenceState
from bytetx.generate.stopping import forbidden_tokens
from bytetx.nn.heads import LogitRows, logits_block
from bytetx.ops.choice import choose_tokens
from bytetx.ops.most_likely import most_likely
from bytetx.ops.sampling import (
    Biases,
    Filters,
    Penalties,
    adjust_logits,
    top_logprobs,
)
from bytetx.runtime.input_batch import StepColumns
from bytetx.runtime.upload import Upload, Uploader


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What a step has to sample, read from its plan.

    rows: all of the plan.  numbers: of those of them that sample.  seat_ids, seats: whose, and
    their parameters.  positions: int64, which token of the answer.  sampling: int64, their rows of
    the step's logits.  scoring: (number of a row of the plan, its first row of prompt logits, how
    many).  is_greedy: the most likely token of each row is all that is wanted of the logits.
    """

    rows: tuple[StepRow, ...]
    numbers: list[int]
    seat_ids: np.ndarray
    seats: np.ndarray
    positions: np.ndarray
    sampling: np.ndarray
    scoring: list[tuple[int, int, int]]
    is_greedy: bool

    def sequence(self, number: int) -> SequenceState:
        """Of the sampling row with this number among those that sample."""
        return self.rows[self.numbers[number]].sequence


class Sampler:
    """Keeps the parameters of running sequences by their seats, so that a step only looks them up.

    The tokens that a sequence has had are counted on the device, [max_num_seqs, vocab_size] of
    5 bytes, from the first sequence on that pays for them.  Nothing here waits for a GPU.
    """

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device | str = "cpu"):
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self._seats = np.zeros(max_num_seqs, dtype=_SEAT)
        self._counts: _TokenCounts | None = None
        self._upload = Uploader(self.device).upload

    def read(self, plan: StepPlan, columns: StepColumns) -> SamplingRows:
        """What the step of this plan has to sample; call it once a plan, in their order."""
        for sequence in plan.seated:
            self._seat(sequence)
        ends, is_sampling = np.cumsum(columns.num_logits, dtype=np.int64), columns.samples
        numbers = np.flatnonzero(is_sampling)
        num_scored = columns.num_logits - is_sampling
        scoring = [
            (number, int(ends[number]) - plan.rows[number].num_logits, int(num_scored[number]))
            for number in np.flatnonzero(num_scored).tolist()
        ]
        seat_ids = columns.seats[numbers].astype(np.int64)
        seats = self._seats[seat_ids]
        return SamplingRows(
            plan.rows,
            numbers.tolist(),
            seat_ids,
            seats,
            columns.kv_seqlens[numbers] - seats["num_prompt_tokens"],
            ends[numbers] - 1,
            scoring,
            is_greedy=not scoring and bool(seats["is_plain"].all()),
        )

    def sample(self, wanted: SamplingRows, logits: Tensor | LogitRows) -> Sampled:
        """logits: [num_logits, vocab_size], the rows that the plan wants (StepColumns).

        Those of prompts are read a block after the other.
        """
        sampled = Sampled(wanted.rows, wanted.numbers, None)
        if wanted.numbers:
            is_all = len(wanted.sampling) == len(logits)
            own = logits[:] if is_all else logits[self._upload(wanted.sampling)[0]]
            self._sample(wanted, own, sampled)
        sampled.scored = self._score_prompts(wanted, logits)
        return sampled

    def _sample(self, wanted: SamplingRows, logits: Tensor, sampled: Sampled) -> None:
        seats = wanted.seats
        if wanted.is_greedy:
            sampled.tokens = most_likely(logits)
            return
        adjusted, errors = self._process(wanted, self._adjust(wanted, logits))
        tokens = self._choose(wanted, adjusted)
        if self._counts is not None:
            self._counts.add(self._upload(wanted.seat_ids)[0], tokens.clamp(min=0))
        numbers = np.flatnonzero(seats["logprobs"] >= 0)
        if len(numbers):
            (where,), counts = self._upload(numbers), seats["logprobs"][numbers]
            chosen = tokens[where].clamp_(min=0)
            top = top_logprobs(logits[where], chosen, k=int(counts.max()))
            rows = [wanted.numbers[number] for number in numbers]
            sampled.logprobs = Logprobs(rows, counts.tolist(), chosen, top)
        sampled.errors = {wanted.numbers[number]: error for number, error in errors.items()}
        sampled.tokens = tokens

    def _seat(self, sequence: SequenceState) -> None:
        """Writes down the parameters of a sequence that has this seat from now on."""
        params = sequence.params
        has_biases = bool(params.logit_bias) or params.min_tokens > 0
        has_processors = bool(params.logits_processors)
        changes = params.has_penalties or has_biases or has_processors
        self._seats[sequence.seat] = (
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
            params.is_greedy and params.logprobs is None and not changes,
        )
        if params.has_penalties and self._counts is None:
            self._counts = _TokenCounts.empty(len(self._seats), self.vocab_size, self.device)
        if params.has_penalties:
            self._counts.reset(sequence, self._upload)

    def _adjust(self, wanted: SamplingRows, logits: Tensor) -> Tensor:
        """Logits after biases, then penalties, of the rows that have them."""
        seats = wanted.seats
        pairs = [
            (number, token, bias)
            for number in np.flatnonzero(seats["has_biases"]).tolist()
            for token, bias in _biases(wanted.sequence(number), wanted.positions[number])
        ]
        if pairs:
            numbers, tokens, values = zip(*pairs, strict=True)
            columns = (np.array(numbers), np.array(tokens), np.array(values, dtype=np.float32))
            logits = adjust_logits(logits, biases=Biases(*self._upload(*columns)))
        paying = np.flatnonzero(seats["has_penalties"])
        if len(paying):
            columns = (seats[name][paying] for name in _PENALTY_NAMES)
            where, seat_ids, *amounts = self._upload(paying, wanted.seat_ids[paying], *columns)
            penalties = self._counts.penalties(seat_ids, *amounts)
            adjusted = adjust_logits(logits[where], penalties=penalties)
            logits = logits.float().index_copy(0, where, adjusted)
        return logits

    def _process(
        self, wanted: SamplingRows, logits: Tensor
    ) -> tuple[Tensor, dict[int, InputError]]:
        """Logits after the requests' own functions; one that raises ends its request alone."""
        errors: dict[int, InputError] = {}
        numbers = np.flatnonzero(wanted.seats["has_processors"]).tolist()
        if not numbers:
            return logits, errors
        processed = logits.float().clone()
        for number in numbers:
            sequence, row = wanted.sequence(number), processed[number].clone()
            for processor in sequence.params.logits_processors:
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

    def _choose(self, wanted: SamplingRows, logits: Tensor) -> Tensor:
        """int32: a token of each row, -1 where nothing can be chosen."""
        seats = wanted.seats
        is_greedy = seats["temperature"] == 0
        if is_greedy.all():
            return most_likely(logits)
        top_k, top_p, min_p = (seats[name] for name in ("top_k", "top_p", "min_p"))
        columns = (seats["temperature"], seats["seed"], wanted.positions, top_k, top_p, min_p)
        temperature, seeds, positions, *limits = self._upload(*columns)
        has_limit = (top_k.any(), (top_p < 1).any(), min_p.any())
        filters = Filters(
            *(limit if has else None for limit, has in zip(limits, has_limit, strict=True)),
            max_top_k=int(top_k.max()),
            has_open_nucleus=bool(((top_p < 1) & (top_k == 0)).any()),
        )
        return choose_tokens(
            logits,
            temperature,
            filters,
            seeds=seeds,
            positions=positions,
            has_greedy=bool(is_greedy.any()),
        )

    def _score_prompts(self, wanted: SamplingRows, logits: Tensor | LogitRows) -> list[Logprobs]:
        """Of the rows that have any, their prompts' tokens behind those of this step, in blocks."""
        scored, block = [], logits_block(self.vocab_size)
        for number, first, count in wanted.scoring:
            row = wanted.rows[number]
            start = row.start + row.num_tokens - row.num_logits + 1
            token_ids = np.array(row.sequence.token_ids[start : start + count], dtype=np.int32)
            k = row.sequence.params.prompt_logprobs
            for done in range(0, count, block):
                (chosen,) = self._upload(token_ids[done : done + block])
                rows = logits[first + done : first + done + len(chosen)]
                scored.append(
                    Logprobs([number], [k] * len(chosen), chosen, top_logprobs(rows, chosen, k=k))
                )
        return scored


_PENALTY_NAMES = ("repetition", "presence", "frequency")
_SEAT = np.dtype(
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
        ("is_plain", np.bool_),
    ]
)


@dataclass(frozen=True, slots=True)
class _TokenCounts:
    """Tokens that sequences have had, by seat: int32 and bool [max_num_seqs, vocab_size]."""

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
        """Counts what the sequence has had before it got its seat."""
        vocab_size, num_prompt = self.in_prompt.shape[1], sequence.num_prompt_tokens
        token_ids = np.array(sequence.token_ids)
        counts = np.bincount(token_ids[num_prompt:], minlength=vocab_size).astype(np.int32)
        in_output, prompt = upload(counts, token_ids[:num_prompt])
        self.in_output[sequence.seat].copy_(in_output)
        self.in_prompt[sequence.seat].zero_().index_fill_(0, prompt, True)

    def add(self, seats: Tensor, tokens: Tensor) -> None:
        one = torch.ones((), dtype=torch.int32, device=tokens.device)
        self.in_output.index_put_((seats, tokens.long()), one, accumulate=True)

    def penalties(
        self, seats: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
    ) -> Penalties:
        return Penalties(
            self.in_output[seats], self.in_prompt[seats], repetition, presence, frequency
        )


def _biases(sequence: SequenceState, position: int) -> list[tuple[int, float]]:
    """(token, what is added to its logit), tokens that would end the answer too early included."""
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
