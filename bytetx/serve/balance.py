"""Which replica gets a call: the one with the fewest tokens that are not answered yet."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from bytetx.serve.calls import Call

R = TypeVar("R", bound=Hashable)

# Bytes of UTF-8 a token, of BERT's and GPT's vocabularies over English prose; other scripts have
# more bytes a letter and more tokens a letter. Only the ratio of two calls matters here.
_BYTES_PER_TOKEN = 4
_TEXT_TOKENS = 2  # special tokens, and so that an empty text counts


def estimate_tokens(call: Call) -> int:
    """About how many tokens a call is, without a tokenizer; a generation with those it may add."""
    most_new = call.options.get("max_tokens") if call.task == "generate" else 0
    return _tokens_of(call.inputs) + int(most_new or 0)


def _tokens_of(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode()) // _BYTES_PER_TOKEN + _TEXT_TOKENS
    if isinstance(value, Mapping):
        return sum(map(_tokens_of, value.values()))
    if isinstance(value, Sequence):
        if value and isinstance(value[0], int):
            return len(value)
        return sum(map(_tokens_of, value))
    return 1


class TokenLedger(Generic[R]):
    """Tokens under way at each replica, as one sender knows them; no lock: one event loop's."""

    def __init__(self) -> None:
        self._tokens: dict[R, int] = {}
        self._calls: dict[tuple[R, Hashable], int] = {}

    def begin(self, replica: R, call: Hashable, tokens: int) -> None:
        """call: any name of the call that is not in use at the replica."""
        self._calls[replica, call] = tokens
        self._tokens[replica] = self._tokens.get(replica, 0) + tokens

    def end(self, replica: R, call: Hashable) -> None:
        """A call that was not begun, or has ended, is passed over."""
        tokens = self._calls.pop((replica, call), 0)
        left = self._tokens.get(replica, 0) - tokens
        if left > 0:
            self._tokens[replica] = left
        else:
            self._tokens.pop(replica, None)

    def tokens(self, replica: R) -> int:
        return self._tokens.get(replica, 0)

    def ranked(self, replicas: Iterable[R], reported: Mapping[R, float] | None = None) -> list[R]:
        """Those with the fewest tokens first; equal ones in the order given.

        reported: what replicas say of themselves, late, but with the calls of other senders.
        """
        reported = reported or {}
        return sorted(replicas, key=lambda one: max(self.tokens(one), reported.get(one, 0.0)))
