"""Sampler: a step's logits -> its rows' tokens, with each sequence's own parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bytetx.engine.generation import StepPlan, StepRow
from bytetx.engine.outputs import RowResult, TokenLogprob
from bytetx.engine.sequence import SequenceState
from bytetx.engine.stopping import forbidden_tokens
from bytetx.errors import InputError, StepError
from bytetx.heads import LogitRows, logits_block
from bytetx.ops.sampling import (
    Biases,
    Filters,
    Penalties,
    TopLogprobs,
    adjust_logits,
    greedy,
    is_bad_row,
    sample,
    top_logprobs,
)


class Sampler:
    """Keeps the parameters of running sequences by their seats, so that a step only looks them up.

    The tokens that a sequence has had are counted on the device, [max_num_seqs, vocab_size] of
    5 bytes, from the first sequence on that pays for them.
    """

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device | str = "cpu"):
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self._owners: list[SequenceState | None] = [None] * max_num_seqs
        self._seats = np.zeros(max_num_seqs, dtype=_SEAT)
        self._counts: _TokenCounts | None = None

    def sample(self, plan: StepPlan, logits: Tensor | LogitRows) -> list[RowResult]:
        """One result a row of the plan.

        logits: [num_logits, vocab_size], the rows that the plan wants (StepColumns.logits_rows).
        Those of prompts are read a block after the other.
        """
        places = _places(plan)
        rows = [row.sequence for row in plan.rows if row.samples]
        results = [RowResult() for _ in plan.rows]
        if rows:
            own = (
                logits[:]
                if len(places.sampling) == len(logits)
                else logits[self._to(places.sampling)]
            )
            for number, result in zip(places.rows, self._sample(rows, own), strict=True):
                results[number] = result
        for number, logprobs in self._score_prompts(plan, places, logits):
            sampled = results[number]
            results[number] = RowResult(sampled.token_id, sampled.logprob, logprobs, sampled.error)
        return results

    def _sample(self, rows: list[SequenceState], logits: Tensor) -> list[RowResult]:
        for sequence in rows:
            if self._owners[sequence.seat] is not sequence:
                self._seat(sequence)
        seat_ids = np.array([sequence.seat for sequence in rows])
        seats = self._seats[seat_ids]
        adjusted, errors = self._process(rows, seats, logits)
        adjusted = self._adjust(rows, seats, adjusted)
        tokens = self._choose(rows, seats, adjusted)
        if self._counts is not None:
            self._counts.add(self._to(seat_ids), tokens)
        logprobs = self._logprobs(seats, logits, tokens)
        # The first thing that waits for the device.
        token_ids = torch.where(is_bad_row(adjusted), -1, tokens).tolist()
        for number, token_id in enumerate(token_ids):
            if token_id < 0:
                errors.setdefault(number, _bad_row_error(rows[number]))
        entries = logprobs.host()
        return [
            RowResult(error=errors[number])
            if number in errors
            else RowResult(token_id, entries.get(number))
            for number, token_id in enumerate(token_ids)
        ]

    def _seat(self, sequence: SequenceState) -> None:
        """Writes down the parameters of a sequence that has this seat from now on."""
        params = sequence.params
        self._owners[sequence.seat] = sequence
        self._seats[sequence.seat] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            min(params.top_k, self.vocab_size),
            (sequence.seed + 2**63) % 2**64 - 2**63,
            -1 if params.logprobs is None else params.logprobs,
            params.has_penalties,
            bool(params.logit_bias) or params.min_tokens > 0,
            bool(params.logits_processors),
        )
        if params.has_penalties and self._counts is None:
            self._counts = _TokenCounts.empty(len(self._owners), self.vocab_size, self.device)
        if params.has_penalties:
            self._counts.reset(sequence)

    def _process(
        self, rows: list[SequenceState], seats: np.ndarray, logits: Tensor
    ) -> tuple[Tensor, dict[int, InputError]]:
        """Logits after the requests' own functions; one that raises ends its request alone."""
        errors: dict[int, InputError] = {}
        numbers = np.flatnonzero(seats["has_processors"]).tolist()
        if not numbers:
            return logits, errors
        processed = logits.float().clone()
        for number in numbers:
            sequence, row = rows[number], processed[number].clone()
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

    def _adjust(self, rows: list[SequenceState], seats: np.ndarray, logits: Tensor) -> Tensor:
        """Logits after penalties and biases of the rows that have them."""
        paying = np.flatnonzero(seats["has_penalties"])
        if len(paying):
            seat_ids = self._to(np.array([rows[number].seat for number in paying]))
            penalties = self._counts.penalties(
                seat_ids, *(self._to(seats[name][paying]) for name in _PENALTY_NAMES)
            )
            where = self._to(paying)
            adjusted = adjust_logits(logits[where], penalties=penalties)
            logits = logits.float().index_copy(0, where, adjusted)
        pairs = [
            (number, token, bias)
            for number in np.flatnonzero(seats["has_biases"]).tolist()
            for token, bias in _biases(rows[number])
        ]
        if pairs:
            columns = zip(*pairs, strict=True)
            numbers, tokens, values = (torch.tensor(c, device=self.device) for c in columns)
            logits = adjust_logits(logits, biases=Biases(numbers, tokens, values.float()))
        return logits

    def _choose(self, rows: list[SequenceState], seats: np.ndarray, logits: Tensor) -> Tensor:
        is_greedy = seats["temperature"] == 0
        if is_greedy.all():
            return greedy(logits)
        top_k, top_p = seats["top_k"], seats["top_p"]
        filters = Filters(
            top_k=self._to(top_k) if top_k.any() else None,
            top_p=self._to(top_p) if (top_p < 1).any() else None,
            min_p=self._to(seats["min_p"]) if seats["min_p"].any() else None,
            max_top_k=int(top_k.max()),
            has_open_nucleus=bool(((top_p < 1) & (top_k == 0)).any()),
        )
        positions = np.array([sequence.num_output_tokens for sequence in rows])
        return sample(
            logits,
            self._to(seats["temperature"]),
            filters,
            seeds=self._to(seats["seed"]),
            positions=self._to(positions),
            has_greedy=bool(is_greedy.any()),
        )

    def _logprobs(self, seats: np.ndarray, logits: Tensor, tokens: Tensor) -> "_Logprobs":
        """Of the rows that asked."""
        numbers = np.flatnonzero(seats["logprobs"] >= 0)
        if not len(numbers):
            return _Logprobs([], [])
        where, counts = self._to(numbers), seats["logprobs"][numbers]
        chosen = tokens[where]
        top = top_logprobs(logits[where], chosen, k=int(counts.max()))
        return _Logprobs(numbers.tolist(), counts.tolist(), chosen, top)

    def _score_prompts(
        self, plan: StepPlan, places: "_Places", logits: Tensor | LogitRows
    ) -> list[tuple[int, list[TokenLogprob]]]:
        """(number of the row, log-probabilities of prompt tokens), for rows that have any."""
        scored, block = [], logits_block(self.vocab_size)
        for number, first, count in places.scoring:
            row = plan.rows[number]
            start = row.start + row.num_tokens - row.num_logits + 1
            token_ids = row.sequence.token_ids[start : start + count]
            k, entries = row.sequence.params.prompt_logprobs, []
            for done in range(0, count, block):
                some = token_ids[done : done + block]
                rows = logits[first + done : first + done + len(some)]
                top = top_logprobs(rows, torch.tensor(some, device=self.device), k=k)
                entries += _entries(top, some, [k] * len(some))
            scored.append((number, entries))
        return scored

    def _to(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.copy()).to(self.device, non_blocking=True)


_PENALTY_NAMES = ("repetition", "presence", "frequency")
_SEAT = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        *((name, np.float32) for name in _PENALTY_NAMES),
        ("top_k", np.int64),
        ("seed", np.int64),
        ("logprobs", np.int64),
        ("has_penalties", np.bool_),
        ("has_biases", np.bool_),
        ("has_processors", np.bool_),
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

    def reset(self, sequence: SequenceState) -> None:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        vocab_size, device = self.in_prompt.shape[1], self.in_prompt.device
        counts = torch.bincount(torch.tensor(sequence.output_ids).long(), minlength=vocab_size)
        self.in_output[sequence.seat] = counts.int().to(device)
        self.in_prompt[sequence.seat] = False
        self.in_prompt[sequence.seat, torch.tensor(prompt, device=device)] = True

    def add(self, seats: Tensor, tokens: Tensor) -> None:
        one = torch.ones((), dtype=torch.int32, device=tokens.device)
        self.in_output.index_put_((seats, tokens.long()), one, accumulate=True)

    def penalties(
        self, seats: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
    ) -> Penalties:
        return Penalties(
            self.in_output[seats], self.in_prompt[seats], repetition, presence, frequency
        )


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log-probabilities on the device: rows by number, and how many of the top each wants."""

    numbers: list[int]
    counts: list[int]
    chosen: Tensor | None = None
    top: TopLogprobs | None = None

    def host(self) -> dict[int, TokenLogprob]:
        """By number of the row; waits for the device."""
        if self.top is None:
            return {}
        entries = _entries(self.top, self.chosen.tolist(), self.counts)
        return dict(zip(self.numbers, entries, strict=True))


@dataclass(frozen=True, slots=True)
class _Places:
    """Where in a step's logits what stands.

    rows: numbers of the plan's rows that sample; sampling: int64, their rows of the logits.
    scoring: (number of a row of the plan, its first row of prompt logits, how many).
    """

    rows: list[int]
    sampling: np.ndarray
    scoring: list[tuple[int, int, int]]


def _places(plan: StepPlan) -> _Places:
    ends = np.cumsum([row.num_logits for row in plan.rows], dtype=np.int64)
    rows = [number for number, row in enumerate(plan.rows) if row.samples]
    scoring = [
        (number, int(ends[number]) - row.num_logits, count)
        for number, row in enumerate(plan.rows)
        if (count := _num_scored(row))
    ]
    return _Places(rows, ends[rows] - 1, scoring)


def _num_scored(row: StepRow) -> int:
    return row.num_logits - row.samples


def _biases(sequence: SequenceState) -> list[tuple[int, float]]:
    """(token, what is added to its logit), tokens that would end the answer too early included."""
    bias = sequence.params.logit_bias or {}
    return [*bias.items(), *((token, -np.inf) for token in forbidden_tokens(sequence))]


def _entries(top: TopLogprobs, token_ids: list[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """One entry a token; counts: how many of the most likely tokens each of them gets."""
    columns = (top.chosen, top.ranks, top.values, top.token_ids)
    rows = zip(token_ids, *(column.tolist() for column in columns), counts, strict=True)
    return [
        TokenLogprob(token, logprob, rank, dict(zip(ids[:count], values[:count], strict=True)))
        for token, logprob, rank, values, ids, count in rows
    ]


def _checked(logits: object, *, like: Tensor) -> Tensor:
    if not isinstance(logits, Tensor) or logits.shape != like.shape:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"it must return logits of shape {tuple(like.shape)}, got {got}")
    return logits.to(like)


def _processor_error(processor: object, error: Exception) -> InputError:
    name = getattr(processor, "__name__", type(processor).__name__)
    return InputError(f"the logits processor {name} failed: {type(error).__name__}: {error}")


def _bad_row_error(sequence: SequenceState) -> InputError:
    return StepError(
        f"no token can be chosen after {sequence.num_output_tokens} tokens: the logits are NaN or "
        "infinite, or logit_bias, min_tokens and logits_processors left none; the model may "
        "overflow in this dtype (bfloat16 has a wider range than float16)"
    )
