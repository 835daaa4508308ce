"""Outputs of generation: of a step for each row, and of the engine for each request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bytetx.errors import InputError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability by the model's own logits: before penalties, temperature, limits.

    rank: 1 for the most likely token.  top: the most likely tokens and their log-probabilities.
    """

    token_id: int
    logprob: float
    rank: int
    top: Mapping[int, float]


class RowResult(NamedTuple):
    """The result of a step for one of its rows.

    token_id: the next token, None where the row sampled none or failed.  logprob: of that token,
    where it was requested.  prompt_logprobs: of the prompt tokens that follow those of this step.
    error: why this row has no token; its sequence ends.
    """

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()
    error: InputError | None = None


# Of a row: its token alone, where there is nothing else to say; the results of several tokens, in
# order, where it had a draft.
StepResult = int | RowResult | Sequence[RowResult]


class RequestOutput(NamedTuple):
    """The new part of one output of a request (the delta since the last RequestOutput).

    index: the number of the output, below the request's n.  text: continues the text of the last
    RequestOutput, without stop strings and stop tokens.  token_ids: all new tokens, including a
    stop token.  logprobs: one for each token, where requested.  prompt_logprobs: of the prompt's
    tokens from the second to the last one, with the first RequestOutput of an output.
    finish_reason: None until the output ends.  stop: the stop string or token that ended it.
    error: where finish_reason is "error".
    """

    request_id: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls here
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    error: InputError | None = None
