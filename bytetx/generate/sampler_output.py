"""SamplerOutput: the sampled tokens of a step, on their way from the device to the host."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bytetx.errors import DeviceLostError, InputError, NotFiniteError, StepError
from bytetx.generate.ngram_drafter import num_accepted
from bytetx.generate.outputs import RowResult, StepResult, TokenLogprob
from bytetx.generate.scheduler import ScheduledRow
from bytetx.ops.sampling import TopLogprobs

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
    if params.logit_bias or params.min_tokens or params.logits_processors:
        return StepError(
            f"{start}, or logit_bias, min_tokens and logits_processors left none; {_OVERFLOW}"
        )
    return NotFiniteError(f"{start}; {_OVERFLOW}")


def _prompt_error() -> NotFiniteError:
    return NotFiniteError(f"the logits of the prompt's tokens are NaN or infinite; {_OVERFLOW}")
