"""OutputState: one output of a request, from sampled tokens to RequestOutputs.

Detokenizers turn its token ids into text; text that was returned never changes.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bytetx.errors import InputError
from bytetx.generate.outputs import FinishReason, RequestOutput, RowResult, TokenLogprob
from bytetx.generate.scheduler import SequenceState
from bytetx.generate.stopping import StopStrings, finish_reason

Decode = Callable[[Sequence[int]], str]
Pieces = Sequence[str | None]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes. More tokens than this that end in a broken character will not
# become a character: the bytes are not valid text.
_MAX_HELD_TOKENS = 8
_MAX_BROKEN = 3  # the most replacement characters that the start of one character decodes to
_MAX_WINDOW_TOKENS = 16  # decoded again with every token; older tokens are dropped


class Detokenizer(Protocol):
    """The text of a growing list of token ids; a character is returned once it is complete."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add, without a character that later tokens may complete."""
        ...

    def flush(self) -> str:
        """The rest at the end of a text, a broken character included."""
        ...


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes; takes less than a microsecond for a token."""

    def __init__(self, token_bytes: Sequence[bytes], context: Sequence[int] = ()):
        """token_bytes: the bytes of each token id.

        context: the prompt's last tokens, which may end in the middle of a character.
        """
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_open = False  # whether the decoder holds the start of a character
        self.feed(context)

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._token_bytes
        is_one = len(token_ids) == 1
        data = table[token_ids[0]] if is_one else b"".join([table[token] for token in token_ids])
        if not self._is_open:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._is_open = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any tokenizer: decodes a window of the last tokens with the tokenizer's own decoder.

    The cost of a token does not depend on the length of the text.  The window begins with tokens
    whose text was returned before, because decoders treat the start of a text differently (they
    drop the space before a word).  Tokens with a known text (`pieces`) are not decoded.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = (), pieces: Pieces | None = None):
        """decode: the tokenizer's decoder.  context: the prompt's last tokens, for the space before
        the first word.

        pieces: the text that each token id adds after other text, None where its neighbours decide.
        """
        self._decode, self._pieces = decode, pieces
        self._is_behind = False  # whether `_returned` lacks tokens that were returned from `pieces`
        self._tokens = list(context)  # the window
        self._num_returned = len(self._tokens)  # tokens of the window whose text was returned
        self._returned = (
            decode(self._tokens) if self._tokens else ""
        )  # the returned text of `_tokens`

    def feed(self, token_ids: Sequence[int]) -> str:
        if self._pieces is not None and len(token_ids) == 1:
            piece = self._pieces[token_ids[0]]
            has_context = self._num_returned == len(self._tokens) and (
                self._returned or self._is_behind
            )
            if piece is not None and has_context:
                self._add_known(token_ids[0], self._pieces)
                return piece
        self._catch_up()
        self._tokens += token_ids
        text = self._decode(self._tokens)
        if text.endswith(_BROKEN):
            is_incomplete = len(self._tokens) - self._num_returned <= _MAX_HELD_TOKENS
            if is_incomplete or not text.startswith(self._returned):
                return ""
            return self._new_text(_without_last_broken(text))
        added = self._new_text(text)
        if len(self._tokens) > _MAX_WINDOW_TOKENS:
            self._shrink_window()
        self._num_returned = len(self._tokens)
        return added

    def flush(self) -> str:
        self._catch_up()
        return self._new_text(self._decode(self._tokens))

    def _add_known(self, token: int, pieces: Pieces) -> None:
        """Adds a token whose text is known, without decoding."""
        self._tokens.append(token)
        self._is_behind = True
        if len(self._tokens) > _MAX_WINDOW_TOKENS:
            window = self._tokens[-_MAX_WINDOW_TOKENS // 2 :]
            texts = [pieces[token] for token in window]
            if None not in texts and any(text and text.strip(" ") for text in texts):
                self._tokens = window
        self._num_returned = len(self._tokens)

    def _catch_up(self) -> None:
        if self._is_behind:
            self._returned, self._is_behind = self._decode(self._tokens), False

    def _new_text(self, text: str) -> str:
        """The text that `text`, the decoded window, adds to the returned text."""
        if not text.startswith(self._returned):
            # Some decoders replace a whole run of byte tokens for one invalid byte, including bytes
            # whose text was returned. The window continues without those.
            del self._tokens[: self._num_returned]
            self._num_returned, self._returned = 0, ""
            text = self._decode(self._tokens)
        added = text[len(self._returned) :]
        self._returned = text
        return added

    def _shrink_window(self) -> None:
        """Drops the tokens before the newest ones, where these are enough context."""
        text = self._decode(self._tokens[self._num_returned :])
        if text and not text.startswith(_BROKEN):
            del self._tokens[: self._num_returned]
            self._returned = text


def _without_last_broken(text: str) -> str:
    """The text without the replacement characters at its end, at most _MAX_BROKEN."""
    num_broken = len(text) - len(text.rstrip(_BROKEN))
    return text[: len(text) - min(num_broken, _MAX_BROKEN)]


# Makes the detokenizer of one output from the last tokens of its prompt: partial(ByteDetokenizer,
# token_bytes) or partial(WindowDetokenizer, decode, pieces=pieces).
DetokenizerFactory = Callable[[Sequence[int]], Detokenizer]


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Tokens that outputs leave out of their text, unless skip_special_tokens is False.

    texts: by token id.  new_detokenizer: makes detokenizers that show them.
    """

    texts: Mapping[int, str]
    new_detokenizer: DetokenizerFactory


_CONTEXT_TOKENS = 6  # the prompt's last: enough for a character's bytes or a word's leading space


@dataclass(slots=True, eq=False)
class OutputState:
    """A sequence with its text, and how much of both has been returned.

    streams: whether each step returns its new part; else there is one RequestOutput, at the end.
    needs_every_token: False where a token that does not end the output needs no `add`.
    is_plain: whether `next_output` can replace `add` and `take_output`.
    new_detokenizer: makes detokenizers that leave special tokens out; None where the outputs have
    no text.  special_tokens: None where the tokenizer has none.
    """

    request_id: int
    index: int
    sequence: SequenceState
    streams: bool
    new_detokenizer: DetokenizerFactory | None
    special_tokens: SpecialTokens | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    error: InputError | None = None
    _detokenizer: Detokenizer | None = None
    _stops: StopStrings = field(init=False)
    _hidden: Mapping[int, str] = field(init=False)  # tokens whose text stop strings alone see
    needs_every_token: bool = field(init=False)
    is_plain: bool = field(init=False)
    _text: str = ""
    _num_returned: int = 0  # tokens
    _num_decoded: int = 0  # tokens
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    _has_returned: bool = False

    def __post_init__(self) -> None:
        params = self.sequence.params
        stops, special = params.stop or (), self.special_tokens
        self._stops = StopStrings(stops, keeps_stop=params.include_stop_str_in_output)
        is_hiding = special is not None and params.skip_special_tokens
        self._hidden = special.texts if special is not None and is_hiding and stops else {}
        self.needs_every_token = self.streams or bool(params.stop)
        self.is_plain = self.streams and params.logprobs is None and params.prompt_logprobs is None
        shows_special = special is not None and not is_hiding
        factory = special.new_detokenizer if special and shows_special else self.new_detokenizer
        if factory is not None:
            self._detokenizer = factory(self.sequence.token_ids[-_CONTEXT_TOKENS:])

    def add(self, result: RowResult) -> None:
        """Adds the result of a step; `finish_reason` says whether the output has ended.

        The sequence has the token already.  Earlier tokens without an `add` of their own are
        included, where needs_every_token is False.
        """
        self._prompt_logprobs += result.prompt_logprobs
        if result.error is not None:
            self.end("error", error=result.error)
        if result.token_id is None:
            return
        if result.logprob is not None:
            self._logprobs.append(result.logprob)
        reason = finish_reason(self.sequence)
        if reason == "stop":
            self.stop = result.token_id
        if self.needs_every_token:
            self._decode_pending()
        if self._stops.matched is not None:
            self.finish_reason, self.stop = "stop", self._stops.matched
        elif reason is not None:
            self.end(reason)

    def next_output(self, token_id: int) -> RequestOutput:
        """`add` and `take_output` in one, for a plain output and a token that does not end it.

        All earlier tokens must have been returned.
        """
        self._num_returned += 1
        self._num_decoded += 1
        if self._stops.stops:
            self._decode((token_id,))
            text, self._text = self._text, ""
            if self._stops.matched is not None:
                self.finish_reason, self.stop = "stop", self._stops.matched
        else:
            text = "" if self._detokenizer is None else self._detokenizer.feed((token_id,))
        start = (self.request_id, self.index, text, [token_id], None, None)
        return _new_output(RequestOutput, (*start, self.finish_reason, self.stop, None))

    def end(self, reason: FinishReason, *, error: InputError | None = None) -> None:
        """Ends the output; the rest of its text may still complete a stop string."""
        self.finish_reason, self.error = reason, error
        if self._detokenizer is None:
            return
        self._decode_pending()
        self._show(self._detokenizer.flush())
        if self._stops.matched is not None and reason in ("stop", "length"):
            self.finish_reason, self.stop = "stop", self._stops.matched
        self._text += self._stops.flush()

    def take_output(self) -> RequestOutput | None:
        """Take the output that was not returned yet; None where there is none, or not yet."""
        first = self.sequence.num_prompt_tokens + self._num_returned
        token_ids = self.sequence.token_ids[first:]
        if self.finish_reason is None and not (self.streams and token_ids):
            return None
        params, is_first = self.sequence.params, not self._has_returned
        output = RequestOutput(
            self.request_id,
            self.index,
            self._text,
            token_ids,
            None if params.logprobs is None else self._logprobs,
            self._prompt_logprobs if params.prompt_logprobs is not None and is_first else None,
            self.finish_reason,
            self.stop,
            self.error,
        )
        self._num_returned += len(token_ids)
        self._text, self._logprobs, self._has_returned = "", [], True
        return output

    def _decode_pending(self) -> None:
        """Decodes the tokens since the last call, without a stop token that the text leaves out."""
        if self._detokenizer is None:
            return
        first = self.sequence.num_prompt_tokens + self._num_decoded
        tokens = self.sequence.token_ids[first:]
        is_stopped = self.stop is not None and self._stops.matched is None
        if tokens and is_stopped and not self.sequence.params.include_stop_str_in_output:
            tokens.pop()
        if tokens:
            self._num_decoded += len(tokens)
            self._decode(tokens)

    def _decode(self, tokens: Sequence[int]) -> None:
        detokenizer = self._detokenizer
        if detokenizer is None:
            return
        if self._hidden.keys().isdisjoint(tokens):
            self._show(detokenizer.feed(tokens))
            return
        for token in tokens:
            self._show(detokenizer.feed((token,)))
            if token in self._hidden:
                self._show(self._hidden[token], is_hidden=True)

    def _show(self, text: str, *, is_hidden: bool = False) -> None:
        if not self._stops.stops:
            self._text += text
            return
        is_early = self.sequence.num_output_tokens <= self.sequence.params.min_tokens
        self._text += self._stops.feed(text, is_hidden=is_hidden, is_early=is_early)


_new_output = tuple.__new__  # RequestOutput(...) takes three times as long
