"""Sampled: what a step's rows got, on its way from the device to the host."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bytetx.errors import InputError, StepError
from bytetx.generate.outputs import RowResult, TokenLogprob
from bytetx.generate.scheduler import StepRow
from bytetx.ops.sampling import TopLogprobs

_DEVICE_LOST = (
    "the device failed for good by the time of this step: restart the process; with "
    "CUDA_LAUNCH_BLOCKING=1 in its environment the error names the kernel"
)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of one row's tokens, or of one token of each of several rows.

    numbers: rows of the plan.  counts: how many of the most likely tokens each gets.  chosen: the
    tokens, int32 [n].
    """

    numbers: Sequence[int]
    counts: Sequence[int]
    chosen: Tensor
    top: TopLogprobs

    def to_host(self) -> "Logprobs":
        top = self.top
        columns = (top.chosen, top.ranks, top.values, top.token_ids)
        host = TopLogprobs(*map(_to_host, columns))
        return Logprobs(self.numbers, self.counts, _to_host(self.chosen), host)

    def entries(self) -> list[TokenLogprob]:
        """One a token, from tensors that are on the host."""
        columns = (self.top.chosen, self.top.ranks, self.top.values, self.top.token_ids)
        tokens = self.chosen.tolist()
        rows = zip(tokens, *(column.tolist() for column in columns), self.counts, strict=True)
        return [
            TokenLogprob(token, logprob, rank, dict(zip(ids[:count], values[:count], strict=True)))
            for token, logprob, rank, values, ids, count in rows
        ]


@dataclass(slots=True)
class Sampled:
    """A step's results on the device; `results` waits for the copies that `to_host` started.

    rows: of the plan.  numbers: of those that sample.  tokens: int32 [len(numbers)], -1 where
    nothing can be chosen.  errors: of rows by number.  logprobs: of chosen tokens.  scored: of the
    prompts' tokens, in their order.  check: raises where the results are not to be
    trusted after all.
    """

    rows: Sequence[StepRow]
    numbers: Sequence[int]
    tokens: Tensor | None
    errors: Mapping[int, InputError] = field(default_factory=dict)
    logprobs: Logprobs | None = None
    scored: Sequence[Logprobs] = ()
    check: Callable[[], None] | None = None
    _is_done: torch.cuda.Event | None = None

    def to_host(self) -> "Sampled":
        """Starts the copies on the current stream, where the tensors are on a GPU."""
        if self.tokens is not None:
            is_cuda = self.tokens.is_cuda
        else:
            is_cuda = any(part.chosen.is_cuda for part in self.scored)
        if is_cuda:
            self.tokens = None if self.tokens is None else _to_host(self.tokens)
            self.logprobs = None if self.logprobs is None else self.logprobs.to_host()
            self.scored = [part.to_host() for part in self.scored]
            self._is_done = torch.cuda.Event()
            self._is_done.record()
        return self

    def results(self) -> Sequence[int | RowResult]:
        """One a row of the plan; a StepError where the device failed meanwhile."""
        if self._is_done is not None:
            try:
                self._is_done.synchronize()
            except RuntimeError as error:
                if self.check is not None:
                    self.check()
                reason = str(error).strip().partition("\n")[0]
                raise StepError(f"{_DEVICE_LOST} ({reason})") from error
        tokens = [] if self.tokens is None else self.tokens.tolist()
        if self.check is not None:
            self.check()
        is_plain = self.logprobs is None and not self.scored and not self.errors
        if is_plain and len(tokens) == len(self.rows) and min(tokens) >= 0:
            return tokens
        return self._with_extras(tokens)

    def _with_extras(self, tokens: list[int]) -> list[RowResult]:
        errors, logprobs = dict(self.errors), {}
        for number, token in zip(self.numbers, tokens, strict=True):
            if token < 0:
                errors.setdefault(number, _bad_row_error(self.rows[number]))
        if self.logprobs is not None:
            logprobs = dict(zip(self.logprobs.numbers, self.logprobs.entries(), strict=True))
        results = [RowResult()] * len(self.rows)
        for number, token in zip(self.numbers, tokens, strict=True):
            error = errors.get(number)
            failed = RowResult(error=error)
            results[number] = failed if error else RowResult(token, logprobs.get(number))
        for part in self.scored:
            number = part.numbers[0]
            entries = (*results[number].prompt_logprobs, *part.entries())
            results[number] = results[number]._replace(prompt_logprobs=entries)
        return results


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _bad_row_error(row: StepRow) -> InputError:
    position = row.start + row.num_tokens - row.sequence.num_prompt_tokens
    return StepError(
        f"no token can be chosen after {position} tokens: the logits are NaN or infinite, or "
        "logit_bias, min_tokens and logits_processors left none; the model may overflow in this "
        "dtype (bfloat16 has a wider range than float16)"
    )
