"""OutputState: one output of a request, from sampled tokens to RequestOutputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bytetx.errors import InputError
from bytetx.generate.detokenizer import Detokenizer
from bytetx.generate.outputs import FinishReason, RequestOutput, RowResult, TokenLogprob
from bytetx.generate.scheduler import SequenceState
from bytetx.generate.stopping import StopStrings, finish_reason

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
