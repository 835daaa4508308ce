"""GenerationEngine: requests in, pieces of answers out, one step at a time."""

import random
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pickle import PicklingError
from typing import NoReturn, Protocol

import numpy as np

from bytetx.errors import InputError, StepError, TooLongError
from bytetx.generate.output_processor import Answer, OpenText
from bytetx.generate.outputs import AnswerPiece, RowResult
from bytetx.generate.scheduler import GenerationScheduler, StepPlan
from bytetx.generate.sequence import SequenceState
from bytetx.generate.stopping import stop_token_ids
from bytetx.sampling_params import SamplingParams

_MASK = 2**64 - 1


class StartedStep(Protocol):
    """A step that may still run."""

    def results(self) -> Sequence[int | RowResult]:
        """One a row, in the plan's order: its token, or what there is besides; waits for them.

        A StepError ends these rows alone.
        """
        ...


class StepRunner(Protocol):
    """What runs a planned step: the forward pass over the paged cache, and the sampling.

    runs_ahead: steps take no time of the caller's, so that the next one should be started before
    the last one's results are asked for.
    """

    vocab_size: int
    runs_ahead: bool
    num_graphs: int  # that small steps are replayed from

    def start(self, plan: StepPlan) -> StartedStep:
        """Runs the step, or lets it run behind those before it. A StepError ends its rows alone.

        What it needs of the plan's sequences is read before it returns.
        """
        ...

    def follow_caller(self) -> None:
        """Steps from now on see what the caller's device was given to do before."""
        ...


class GenerationEngine:
    """Continuous batching over a runner; not thread-safe (AsyncEngine is the way from threads).

    Where the runner runs ahead, each step is planned and started while the one before it runs, and
    reads the tokens that this one samples on the device.  The host learns them one step late: an
    answer that a token ends has a row in one more step, whose result nobody looks at.  Whatever
    happens to a request, its pages are free once its last piece is out.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: GenerationScheduler,
        *,
        open_text: OpenText | None = None,
        eos_token_ids: Iterable[int] = (),
        seed: int | None = None,
    ):
        """open_text: starts the text of an answer (see detokenizer.py); None gives token ids alone.

        seed: of the seeds of requests that bring none.
        """
        self._runner, self._scheduler, self._open_text = runner, scheduler, open_text
        self._eos_token_ids = frozenset(eos_token_ids)
        self._random = random.Random(seed)
        self._answers: dict[int, list[Answer]] = {}  # the unfinished ones, by request
        self._answer_of: dict[SequenceState, Answer] = {}
        self._ended: list[AnswerPiece] = []
        self._in_flight: deque[tuple[StepPlan, StartedStep]] = deque()
        self._num_requests = self._num_processed = 0

    def __reduce__(self) -> NoReturn:
        raise PicklingError(
            "an engine cannot be pickled; pickle the Model, and call its engine() where it arrives"
        )

    @property
    def has_work(self) -> bool:
        return bool(self._ended or self._answers or self._in_flight)

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that small steps are replayed from."""
        return self._runner.num_graphs

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        streams: bool = True,
    ) -> int:
        """Queues a request and returns its id; InputError where it could never run.

        priority: lower ones run first.  streams: False gives one piece an answer, at its end.
        """
        tokens = _integers(prompt_ids)
        max_tokens = self._check(tokens, params)
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        request_id, answers = self._num_requests, []
        for index in range(params.n):
            sequence = SequenceState(
                tokens.tolist(),
                max_tokens,
                priority,
                params,
                _seed_of(seed, index),
                stop_token_ids(params, self._eos_token_ids),
                self._eos_token_ids,
            )
            self._scheduler.add(sequence)  # refuses all n or none: they are equally long
            answers.append(Answer(request_id, index, sequence, streams, self._open_text))
        self._num_requests += 1
        self._num_processed += bool(params.logits_processors) * len(answers)
        self._answers[request_id] = answers
        self._answer_of |= {answer.sequence: answer for answer in answers}
        return request_id

    def abort(self, request_id: int) -> None:
        """Ends a request; its answers' last pieces come with the next step. Ended ones stay."""
        for answer in list(self._answers.get(request_id, ())):
            answer.end("abort")
            self._give(answer, self._ended)

    def start_afresh(self) -> None:
        """For weights that may have changed, where there is no work: forgets prefixes computed with
        them, and runs behind whatever the caller's stream was given to do."""
        assert not self.has_work
        self._scheduler.pages.forget_kept()
        self._runner.follow_caller()

    def step(self) -> list[AnswerPiece]:
        """Starts a forward pass, and returns what one before it, or this one, added to answers."""
        pieces, self._ended = self._ended, []
        try:
            plan = self._scheduler.step()
            runs_ahead = plan.rows and self._start(plan)
            while len(self._in_flight) > bool(runs_ahead):
                self._collect(pieces)
        except BaseException:
            self._give_up()
            raise
        return pieces

    def _start(self, plan: StepPlan) -> bool:
        """Whether the step may go on while the next one is planned."""
        self._in_flight.append((plan, _FailedStep(len(plan.rows), None)))
        try:
            started = self._runner.start(plan)
        except StepError as error:
            self._in_flight[-1] = (plan, _FailedStep(len(plan.rows), error))
            return False
        self._in_flight[-1] = (plan, started)
        # Processors want to see every token before the next one is chosen.
        return self._runner.runs_ahead and not self._num_processed

    def _collect(self, pieces: list[AnswerPiece]) -> None:
        """Waits for the oldest step in flight and hands out what it gave."""
        plan, started = self._in_flight[0]
        try:
            results = started.results()
        except StepError as error:
            results = _FailedStep(len(plan.rows), error).results()
        self._in_flight.popleft()
        failed, answer_of, append = [], self._answer_of.get, self._scheduler.append
        for row, result in zip(plan.rows, results, strict=True):
            sequence = row.sequence
            answer = answer_of(sequence)
            if answer is None:  # it ended after this step was planned
                continue
            if type(result) is int:
                if row.is_stale:
                    continue
                if not append(sequence, result):  # most tokens of long answers
                    if answer.is_quiet:
                        continue
                    if answer.is_plain:
                        pieces.append(answer.next_piece(result))
                        self._close(answer)
                        continue
                result = RowResult(result)
            elif row.is_stale:
                result = RowResult(prompt_logprobs=result.prompt_logprobs)
            elif result.token_id is not None:
                append(sequence, result.token_id)
            answer.add(result)
            if result.error is not None:
                failed.append(sequence)
            self._give(answer, pieces)
        if failed:  # last, for it may send other rows of this step back to start again
            self._scheduler.discard(failed)

    def _give_up(self) -> None:
        """No sequence of a step in flight keeps a page, after an error that is nobody's fault."""
        sequences = {row.sequence for plan, _ in self._in_flight for row in plan.rows}
        self._in_flight.clear()
        self._scheduler.discard(sequences)
        for sequence in sequences & self._answer_of.keys():
            self._forget(self._answer_of[sequence])

    def _give(self, answer: Answer, pieces: list[AnswerPiece]) -> None:
        """Appends the answer's next piece, and lets go of an answer that has ended."""
        piece = answer.take_piece()
        if piece is not None:
            pieces.append(piece)
        self._close(answer)

    def _close(self, answer: Answer) -> None:
        """Lets go of an answer that has ended."""
        if answer.reason is None:
            return
        if answer.reason != "error":
            self._scheduler.finish(answer.sequence)
        self._forget(answer)

    def _forget(self, answer: Answer) -> None:
        del self._answer_of[answer.sequence]
        self._num_processed -= bool(answer.sequence.params.logits_processors)
        answers = self._answers[answer.request_id]
        answers.remove(answer)
        if not answers:
            del self._answers[answer.request_id]

    def _check(self, tokens: "array[int]", params: SamplingParams) -> int:
        """The most tokens that an answer gets: max_tokens, or what is left of the positions."""
        vocab_size = self._runner.vocab_size
        params.check_vocab(vocab_size)
        if params.stop and self._open_text is None:
            raise InputError(
                f"stop strings {list(params.stop)} need text, and the model has no tokenizer: "
                "use stop_token_ids"
            )
        ids = np.asarray(tokens)
        strange = ids[(ids < 0) | (ids >= vocab_size)]
        if len(strange):
            raise InputError(
                f"the prompt's tokens must be below vocab_size ({vocab_size}), got {strange[0]}"
            )
        room, wanted = self._scheduler.max_tokens - len(tokens), max(1, params.min_tokens)
        if tokens and room < wanted:
            raise TooLongError(
                f"a prompt of {len(tokens)} tokens leaves room for {max(room, 0)}, and "
                f"{wanted} are wanted: a sequence has at most {self._scheduler.max_tokens} tokens "
                "here, by the model's positions and the cache; shorten the prompt, or give the "
                "cache more memory"
            )
        return room if params.max_tokens is None else min(params.max_tokens, room)


@dataclass(frozen=True, slots=True)
class _FailedStep:
    """A step none of whose rows has a result; error: None while it is being started."""

    num_rows: int
    error: StepError | None

    def results(self) -> Sequence[int | RowResult]:
        return [RowResult(error=self.error)] * self.num_rows


def _integers(prompt_ids: Sequence[int]) -> "array[int]":
    try:
        return array("i", prompt_ids)
    except (TypeError, OverflowError) as error:
        raise InputError(f"the prompt must be token ids that fit int32: {error}") from None


def _seed_of(seed: int, index: int) -> int:
    """The seed of a request's answer number `index`: the first one's is the request's own."""
    return (seed + index * 0xD1342543DE82EF95) & _MASK
