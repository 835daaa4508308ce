"""What generation gives: a row's token from a step, and an answer's next piece from the engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bytetx.errors import InputError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model found a token, by its own logits: before penalties, temperature, limits.

    rank: 1 for the most likely token.  top: the most likely tokens and their log-probabilities.
    """

    token_id: int
    logprob: float
    rank: int
    top: Mapping[int, float]


class RowResult(NamedTuple):
    """What a step gave one of its rows.

    token_id: the next token, None where the row sampled none or failed.  logprob: of that token,
    where it was asked for.  prompt_logprobs: of the prompt's tokens behind those that this step
    computed.  error: why this row has no token; its sequence ends.
    """

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()
    error: InputError | None = None


class AnswerPiece(NamedTuple):
    """What a step added to one answer of a request; a step of 256 streams makes 256 of them.

    index: which of the request's n answers.  text: goes on from the last piece's; stop strings and
    tokens are not in it.  token_ids: all that were chosen, a stop token too.  logprobs: one a
    token where they were asked for.  prompt_logprobs: of the prompt's second to last tokens, with
    an answer's first piece.
    finish_reason: None while the answer goes on.  stop: the stop string or token that ended it.
    error: where finish_reason is "error".
    """

    request_id: int
    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    error: InputError | None = None
