"""GenerationEngine: takes requests and returns their outputs, one step at a time."""

import random
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pickle import PicklingError
from typing import NoReturn, Protocol

import numpy as np

from bytetx.errors import InputError, NotFiniteError, StepError, TooLongError, shown
from bytetx.generate.guidance import GrammarCompiler, Guide, made_guide
from bytetx.generate.output_processor import DetokenizerFactory, OutputState, SpecialTokens
from bytetx.generate.outputs import RequestOutput, RowResult, StepResult
from bytetx.generate.scheduler import Scheduler, SchedulerOutput, SequenceAdapter, SequenceState
from bytetx.generate.stopping import stop_token_ids
from bytetx.sampling_params import SamplingDefaults, SamplingParams, StructuredOutputsParams

_MASK = 2**64 - 1


class StartedStep(Protocol):
    """A step that may still run."""

    def results(self) -> Sequence[StepResult]:
        """One result for each row, in the plan's order; waits for the step.

        Tokens alone where no row has more than that.  A StepError ends only these rows.
        """
        ...


class StepRunner(Protocol):
    """Runs planned steps: the forward pass over the paged cache, and sampling."""

    vocab_size: int

    @property
    def runs_ahead(self) -> bool:
        """Whether `start` returns before the step has run (async scheduling)."""
        ...

    @property
    def num_graphs(self) -> int:
        """CUDA graphs of small steps."""
        ...

    def start(self, plan: SchedulerOutput) -> StartedStep:
        """Runs the step, or queues it after the earlier ones. A StepError ends only its rows.

        It does not read the plan's sequences after it returns.
        """
        ...

    def wait_for_current_stream(self) -> None:
        """Steps from now on wait for the work that is on the caller's stream."""
        ...


class GenerationEngine:
    """Continuous batching over a runner; not thread-safe (AsyncEngine is the way from threads).

    With async scheduling (StepRunner.runs_ahead) each step is planned and started while the one
    before it runs, and reads that one's tokens on the device.  The host gets the tokens one step
    late: an output that ends with a stop token has a row in one more step, whose result is dropped.
    Drafts (Scheduler) need the tokens: a step with drafts is collected before the next one is
    planned, and so are the steps before one that is likely to have drafts.
    However a request ends, its pages are free once its last RequestOutput is returned.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        *,
        new_detokenizer: DetokenizerFactory | None = None,
        special_tokens: SpecialTokens | None = None,
        eos_token_ids: Iterable[int] = (),
        defaults: SamplingDefaults | None = None,
        compiler: GrammarCompiler | None = None,
        seed: int | None = None,
    ):
        """new_detokenizer: makes the detokenizer of an output; None: outputs have no text.

        special_tokens: those that it leaves out.
        defaults: of parameters that requests leave unset.
        compiler: of structured outputs; None: requests have none.
        seed: of the generator of seeds, for requests without a seed.
        """
        self._runner, self._scheduler, self._new_detokenizer = runner, scheduler, new_detokenizer
        self._special_tokens = special_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._defaults = SamplingDefaults() if defaults is None else defaults
        self._random = random.Random(seed)
        self._compiler = compiler
        self._unfinished: dict[int, list[OutputState]] = {}  # by request id
        self._states: dict[SequenceState, OutputState] = {}  # unfinished outputs only
        self._aborted: list[RequestOutput] = []  # the next step returns them
        self._in_flight: deque[tuple[SchedulerOutput, StartedStep]] = deque()
        self._num_requests = 0
        self._num_with_processors = 0  # unfinished outputs with logits processors

    def __reduce__(self) -> NoReturn:
        raise PicklingError(
            "an engine cannot be pickled; pickle the Model, and call its engine() where it arrives"
        )

    @property
    def has_work(self) -> bool:
        return bool(self._aborted or self._unfinished or self._in_flight)

    @property
    def num_graphs(self) -> int:
        """CUDA graphs of small steps."""
        return self._runner.num_graphs

    @property
    def draft_counts(self) -> tuple[int, int]:
        """Tokens that were drafted so far, and those of them that were right."""
        return self._scheduler.num_draft_tokens, self._scheduler.num_accepted_tokens

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        streams: bool = True,
        adapter: SequenceAdapter | None = None,
        guide: Guide | None = None,
    ) -> int:
        """Queues a request and returns its id; InputError where it could never run.

        priority: lower numbers run first.  streams: False gives one RequestOutput for each output,
        when it ends.  adapter: of the model, which runs the request; None: the model alone.
        guide: of `compile_guide`, where its caller has waited for it; else this call does.
        """
        tokens = _integers(prompt_ids)
        params = params.resolved(self._defaults, num_prompt_tokens=len(tokens))
        max_tokens = self._check(tokens, params)
        if params.structured_outputs is not None and guide is None:
            guide = made_guide(self.compile_guide(params.structured_outputs).result())
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        request_id = self._num_requests
        states: list[OutputState] = []
        prompt = tokens.tolist()
        for index in range(params.n):
            sequence = SequenceState(
                prompt.copy(),  # the integers are shared
                max_tokens,
                priority,
                params,
                seed=_output_seed(seed, index),
                stop_token_ids=stop_token_ids(params, self._eos_token_ids),
                eos_token_ids=self._eos_token_ids,
                adapter=adapter,
                guide=None if guide is None else guide.copy(),
            )
            texts = self._new_detokenizer, self._special_tokens
            states.append(OutputState(request_id, index, sequence, streams, *texts))
        for state in states:
            self._scheduler.add(state.sequence)  # refuses all n or none: they are equally long
        self._num_requests += 1
        self._num_with_processors += bool(params.logits_processors) * len(states)
        self._unfinished[request_id] = states
        self._states |= {state.sequence: state for state in states}
        return request_id

    def compile_guide(self, form: StructuredOutputsParams) -> Future[Guide | InputError]:
        """The grammar of a request, for guidance.made_guide.

        It is made in other threads, and any thread may call this. InputError where none can be.
        """
        if self._compiler is None:
            raise InputError("this engine takes no structured_outputs: it has no compiler")
        return self._compiler.compile(form)

    def leave_guide(self, guide: Future[Guide | InputError]) -> None:
        """A caller of `compile_guide` waits no longer."""
        assert self._compiler is not None
        self._compiler.leave(guide)

    def abort(self, request_id: int) -> None:
        """Ends a request; the next step returns its last RequestOutputs.

        Outputs that have ended already do not change.
        """
        for state in list(self._unfinished.get(request_id, ())):
            state.end("abort")
            self._emit(state, self._aborted)

    def on_weights_changed(self) -> None:
        """Drops the prefix cache, and has later steps wait for the work on the caller's stream.

        Call it without work in the engine, after the model's weights may have changed.
        """
        assert not self.has_work
        self._scheduler.pages.reset_prefix_cache()
        self._runner.wait_for_current_stream()

    def step(self) -> list[RequestOutput]:
        """Starts a forward pass, and returns the outputs of those that have ended."""
        outputs, self._aborted = self._aborted, []
        try:
            while self._in_flight and self._scheduler.expects_drafts():
                self._collect(outputs)
            plan = self._scheduler.schedule()
            runs_ahead = plan.rows and self._start(plan)
            while len(self._in_flight) > bool(runs_ahead):
                self._collect(outputs)
        except BaseException:
            self._discard_in_flight()
            raise
        return outputs

    def _start(self, plan: SchedulerOutput) -> bool:
        """Starts a step. Returns whether it may run while the next one is planned."""
        self._in_flight.append((plan, _FailedStep(len(plan.rows), None)))
        try:
            started = self._runner.start(plan)
        except StepError as error:
            self._in_flight[-1] = (plan, _FailedStep(len(plan.rows), error))
            return False
        self._in_flight[-1] = (plan, started)
        # A logits processor needs all tokens before the next one is sampled, and a plan how many
        # tokens of a draft were right.
        needs_tokens = plan.has_drafts or self._num_with_processors > 0
        return self._runner.runs_ahead and not needs_tokens

    def _collect(self, outputs: list[RequestOutput]) -> None:
        """Waits for the oldest step in flight and appends its outputs."""
        plan, started = self._in_flight[0]
        try:
            results = started.results()
        except StepError as error:
            results = _FailedStep(len(plan.rows), error).results()
        self._in_flight.popleft()
        failed, find_state, append = [], self._states.get, self._scheduler.append
        for row, result in zip(plan.rows, results, strict=True):
            sequence = row.sequence
            state = find_state(sequence)
            if state is None:  # it ended after this step was planned
                continue
            if isinstance(result, int):
                if row.is_stale:
                    continue
                if not append(sequence, result):  # most tokens of long outputs
                    if not state.needs_every_token:
                        continue
                    if state.is_plain:
                        outputs.append(state.next_output(result))
                        self._close(state)
                        continue
                row_result = RowResult(result)
            elif not isinstance(result, RowResult):
                if not row.is_stale:
                    if self._append_drafted(state, result):
                        failed.append(sequence)
                    self._emit(state, outputs)
                continue
            elif row.is_stale:
                # The prompt's logits are not computed again; all else of the row is.
                failure = result.error if isinstance(result.error, NotFiniteError) else None
                row_result = RowResult(prompt_logprobs=result.prompt_logprobs, error=failure)
            else:
                row_result = result
                if result.token_id is not None:
                    append(sequence, result.token_id)
            state.add(row_result)
            if row_result.error is not None:
                failed.append(sequence)
            self._emit(state, outputs)
        if failed:  # after all rows, because it may preempt other sequences of this step
            self._scheduler.discard(failed)

    def _append_drafted(self, state: OutputState, results: Sequence[RowResult]) -> bool:
        """Adds the tokens of a row with a draft, up to one that ends the output.

        results: of the draft's tokens that are right, and of the one behind them.
        Returns whether the row failed.
        """
        sequence, scheduler = state.sequence, self._scheduler
        scheduler.count_accepted(sequence, len(results) - 1)
        for number, result in enumerate(results):
            if number:
                scheduler.accept(sequence)
            if result.token_id is not None:
                scheduler.append(sequence, result.token_id)
            state.add(result)
            if state.finish_reason is not None:
                return result.error is not None
        return False

    def _discard_in_flight(self) -> None:
        """Ends all sequences of the steps in flight, after an error that no request caused."""
        sequences = {row.sequence for plan, _ in self._in_flight for row in plan.rows}
        self._in_flight.clear()
        self._scheduler.discard(sequences)
        for sequence in sequences & self._states.keys():
            self._remove(self._states[sequence])

    def _emit(self, state: OutputState, outputs: list[RequestOutput]) -> None:
        """Appends the next RequestOutput, and removes an output that has ended."""
        output = state.take_output()
        if output is not None:
            outputs.append(output)
        self._close(state)

    def _close(self, state: OutputState) -> None:
        """Removes an output that has ended, and frees its pages."""
        if state.finish_reason is None:
            return
        if state.finish_reason != "error":
            self._scheduler.finish(state.sequence)
        self._remove(state)

    def _remove(self, state: OutputState) -> None:
        del self._states[state.sequence]
        self._num_with_processors -= bool(state.sequence.params.logits_processors)
        states = self._unfinished[state.request_id]
        states.remove(state)
        if not states:
            del self._unfinished[state.request_id]

    def _check(self, tokens: "array[int]", params: SamplingParams) -> int:
        """The most tokens of an output: max_tokens, or fewer where the positions end before."""
        vocab_size = self._runner.vocab_size
        params.check_vocab(vocab_size)
        if params.stop and self._new_detokenizer is None:
            raise InputError(
                f"stop strings {shown(list(params.stop))} need text, and the model has no "
                "tokenizer: use stop_token_ids"
            )
        ids = np.asarray(tokens)
        unknown = ids[(ids < 0) | (ids >= vocab_size)]
        if len(unknown):
            raise InputError(
                f"the prompt's tokens must be below vocab_size ({vocab_size}), got {unknown[0]}"
            )
        room, wanted = self._scheduler.max_tokens - len(tokens), max(1, params.min_tokens)
        if tokens and room < wanted:
            raise TooLongError(
                f"a prompt of {len(tokens)} tokens leaves room for {max(room, 0)}, and "
                f"{shown(wanted)} are wanted: a sequence has at most {self._scheduler.max_tokens} "
                "tokens here, by the model's positions and the cache; shorten the prompt, or give "
                "the cache more memory"
            )
        return room if params.max_tokens is None else min(params.max_tokens, room)


@dataclass(frozen=True, slots=True)
class _FailedStep:
    """A step whose rows all failed; error: None while it is being started."""

    num_rows: int
    error: StepError | None

    def results(self) -> Sequence[int | RowResult]:
        return [RowResult(error=self.error)] * self.num_rows


def _integers(prompt_ids: Sequence[int]) -> "array[int]":
    try:
        return array("i", prompt_ids)
    except (TypeError, OverflowError) as error:
        raise InputError(f"the prompt must be token ids that fit int32: {error}") from None


def _output_seed(seed: int, index: int) -> int:
    """The seed of a request's output number `index`; output 0 has the request's own seed."""
    return (seed + index * 0xD1342543DE82EF95) & _MASK
