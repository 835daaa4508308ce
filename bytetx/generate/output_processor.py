"""Answer: one text being generated, from tokens to what its caller sees of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bytetx.errors import InputError
from bytetx.generate.detokenizer import TextStream
from bytetx.generate.outputs import AnswerPiece, FinishReason, RowResult, TokenLogprob
from bytetx.generate.sequence import SequenceState
from bytetx.generate.stopping import StopStrings, finish_reason

# Starts the text of one answer, given the last tokens of the prompt: partial(ByteStream, table) or
# partial(DecodedStream, decode, pieces=pieces).
OpenText = Callable[[Sequence[int]], TextStream]

_CONTEXT_TOKENS = 6  # a character's bytes or a word's space are not looked for further back


@dataclass(slots=True, eq=False)
class Answer:
    """A sequence and what of it was given out.

    streams: pieces are given as they come; else there is one, at the end.  is_quiet: nothing has to
    be done for a token that does not end it.  is_plain: `next_piece` is all that has to be.
    open_text: None where only token ids are wanted.
    """

    request_id: int
    index: int
    sequence: SequenceState
    streams: bool
    open_text: OpenText | None
    reason: FinishReason | None = None
    stop: str | int | None = None
    error: InputError | None = None
    _stream: TextStream | None = None
    _stops: StopStrings = field(init=False)
    is_quiet: bool = field(init=False)
    is_plain: bool = field(init=False)
    _text: str = ""
    _num_given: int = 0  # tokens of the answer
    _num_decoded: int = 0
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    _has_given: bool = False

    def __post_init__(self) -> None:
        params = self.sequence.params
        self._stops = StopStrings(params.stop)
        self.is_quiet = not (self.streams or self._stops.stops)
        self.is_plain = self.streams and params.logprobs is None and params.prompt_logprobs is None
        if self.open_text is not None:
            self._stream = self.open_text(self.sequence.token_ids[-_CONTEXT_TOKENS:])

    def add(self, result: RowResult) -> None:
        """What a step gave; `reason` says whether the answer has ended.

        The token is the sequence's last one by now; those before it may have been left out here,
        where the answer is quiet and they brought nothing else.
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
        if not self.is_quiet:
            self._decode_pending()
        if self._stops.matched is not None:
            self.reason, self.stop = "stop", self._stops.matched
        elif reason is not None:
            self.end(reason)

    def next_piece(self, token_id: int) -> AnswerPiece:
        """`add` and `take_piece` in one, of a plain answer's token that by itself does not end it.

        All tokens before it were given out.
        """
        self._num_given += 1
        self._num_decoded += 1
        text = "" if self._stream is None else self._stream.feed((token_id,))
        if self._stops.stops:
            self._show(text)
            text, self._text = self._text, ""
            if self._stops.matched is not None:
                self.reason, self.stop = "stop", self._stops.matched
        piece = (self.request_id, self.index, text, [token_id], None, None)
        return _new_piece(AnswerPiece, (*piece, self.reason, self.stop, None))

    def end(self, reason: FinishReason, *, error: InputError | None = None) -> None:
        """The last of the text, which may still complete a stop string."""
        self.reason, self.error = reason, error
        if self._stream is None:
            return
        self._decode_pending()
        self._show(self._stream.flush())
        if self._stops.matched is not None and reason in ("stop", "length"):
            self.reason, self.stop = "stop", self._stops.matched
        self._text += self._stops.flush()

    def take_piece(self) -> AnswerPiece | None:
        """What was not given out yet; None where that is nothing, or has to wait for the end."""
        first = self.sequence.num_prompt_tokens + self._num_given
        token_ids = self.sequence.token_ids[first:]
        if self.reason is None and not (self.streams and token_ids):
            return None
        params, is_first = self.sequence.params, not self._has_given
        piece = AnswerPiece(
            self.request_id,
            self.index,
            self._text,
            token_ids,
            None if params.logprobs is None else self._logprobs,
            self._prompt_logprobs if params.prompt_logprobs is not None and is_first else None,
            self.reason,
            self.stop,
            self.error,
        )
        self._num_given += len(token_ids)
        self._text, self._logprobs, self._has_given = "", [], True
        return piece

    def _decode_pending(self) -> None:
        """The text of the tokens since the last time, without a stop token."""
        if self._stream is None:
            return
        first = self.sequence.num_prompt_tokens + self._num_decoded
        tokens = self.sequence.token_ids[first:]
        if tokens and self.stop is not None and self._stops.matched is None:
            tokens.pop()
        if tokens:
            self._num_decoded += len(tokens)
            self._show(self._stream.feed(tokens))

    def _show(self, text: str) -> None:
        is_early = self.sequence.num_output_tokens <= self.sequence.params.min_tokens
        self._text += self._stops.feed(text, is_early=is_early)


_new_piece = tuple.__new__  # AnswerPiece's own takes three times as long
