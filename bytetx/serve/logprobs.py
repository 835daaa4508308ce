"""The field logprobs of OpenAI's two routes, and what a request for it costs."""

from collections.abc import Sequence
from typing import Any

import orjson

from bytetx.serve.errors import ServeError

# Entries of one request: outputs x tokens x (logprobs + 1). An entry is 30 to 90 bytes of an
# answer, which is written at its end.
MAX_LOGPROBS = 1 << 20
# Entries of all requests of a process that are being answered.
MAX_OPEN_LOGPROBS = 4 * MAX_LOGPROBS
# Tokens that an output without max_tokens is priced at; few are longer.
_TYPICAL_TOKENS = 4096
_MOST_ASKED = 1024  # for each token; SamplingParams refuse more


def limit_tokens(
    max_tokens: int | None, *, logprobs: int, num_outputs: int, most_tokens: int
) -> tuple[int, int]:
    """(max_tokens, the price in entries) of a request for log-probabilities.

    max_tokens: as asked for; None, which has no limit of its own, gets the one that keeps the
    request within MAX_LOGPROBS.  most_tokens: of a sequence of the model.
    Raises ServeError where the request asks for more.
    """
    logprobs = min(logprobs, _MOST_ASKED)
    each = num_outputs * (logprobs + 1)
    most = MAX_LOGPROBS // each
    asked = 1 if max_tokens is None else min(max_tokens, most_tokens)
    if most < asked:
        raise ServeError(
            "validation",
            f"{num_outputs} outputs (n x prompts) of {asked} tokens (max_tokens) with logprobs "
            f"{logprobs} are {each * asked:,} log-probabilities, and a request has at most "
            f"{MAX_LOGPROBS:,}: lower one of the three, or send several requests",
            param="logprobs",
        )
    if max_tokens is None:
        return most, each * min(most, most_tokens, _TYPICAL_TOKENS)
    return max_tokens, each * asked


def completion_logprobs(rows: Sequence[Sequence[Any]]) -> dict[str, Any] | None:
    """The field logprobs of a completion's choice, from OutputLogprobs' entries."""
    if not rows:
        return None
    texts, logprobs, offsets, tops = zip(*rows, strict=True)
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": [orjson.Fragment(top) for top in tops],
        "text_offset": offsets,
    }


def chat_logprobs(rows: Sequence[Sequence[Any]]) -> dict[str, Any] | None:
    """The field logprobs of a chat's choice, from OutputLogprobs' entries."""
    if not rows:
        return None
    return {"content": [orjson.Fragment(entry) for (entry,) in rows], "refusal": None}
