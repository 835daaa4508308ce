"""Generation: Model's methods for prompts, and one call's prompts through an engine."""

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing, suppress
from copy import copy
from itertools import islice
from operator import sub
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

from bytetx.arguments import check_iterable
from bytetx.encode.request import RunStats
from bytetx.errors import InputError, shown
from bytetx.generate.build import GenerationSizes, build_engine, generation_sizes
from bytetx.generate.engine import GenerationEngine
from bytetx.generate.outputs import RequestOutput
from bytetx.nn.heads import LmHead
from bytetx.nn.loading import LoadedCheckpoint
from bytetx.requests.prompts import Prompt, PromptReader
from bytetx.sampling_params import SamplingParams
from bytetx.tasks.progress import num_texts, with_progress
from bytetx.tasks.results import GeneratedText, Generation, Results, Stream
from bytetx.tasks.task import OnError, keeps_bad_texts

_Params = SamplingParams | Sequence[SamplingParams] | None
# The values of stream and on_error, on which the type of the results depends.
No = Literal[False]
Yes = Literal[True]
Raise = Literal["raise"]
Return = Literal["return"]


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of Model.generate, as type checkers see them."""

    chat_template_kwargs: Mapping[str, Any] | None
    kv_cache_tokens: int | None
    max_num_seqs: int | None
    num_speculative_tokens: int
    show_progress: bool


class _IdleEngine(NamedTuple):
    """An engine and the options that it was made for; sizes: what these came to."""

    options: tuple[int | None, ...]
    sizes: GenerationSizes
    engine: GenerationEngine


class GenerationMixin:
    """Model's methods for generation; InputError where it has no language model head."""

    checkpoint: LoadedCheckpoint
    token_budget: int
    cuda_graphs: bool

    def __init__(self) -> None:
        # At most one engine is kept for the next call with the same options, with its prefix cache.
        self._idle_engines: list[_IdleEngine] = []

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: _Params = ...,
        *,
        stream: No = ...,
        on_error: Raise = ...,
        **options: Unpack[GenerateOptions],
    ) -> Results[Generation]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: _Params = ...,
        *,
        stream: Yes,
        on_error: Raise = ...,
        **options: Unpack[GenerateOptions],
    ) -> Stream[Generation]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: _Params = ...,
        *,
        stream: No = ...,
        on_error: Return,
        **options: Unpack[GenerateOptions],
    ) -> Results[Generation | InputError]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: _Params = ...,
        *,
        stream: Yes,
        on_error: Return,
        **options: Unpack[GenerateOptions],
    ) -> Stream[Generation | InputError]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: _Params = ...,
        *,
        stream: Literal["pieces"],
        on_error: OnError = ...,
        **options: Unpack[GenerateOptions],
    ) -> Stream[RequestOutput]: ...

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: _Params = None,
        *,
        stream: bool | Literal["pieces"] = False,
        on_error: OnError = "raise",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        kv_cache_tokens: int | None = None,
        max_num_seqs: int | None = None,
        num_speculative_tokens: int = 0,
        show_progress: bool = False,
    ) -> Results[Any] | Stream[Any]:
        """Continues prompts, with as many at a time as their keys and values fit the cache.

        prompts: each a str, a sequence of token ids, or a chat (a list of {"role", "content"}; what
        else a message has reaches the chat template, too).
        params: for all prompts, or a list with one for each; None is SamplingParams().
        stream: True yields Generations in the order of the prompts, as they are done; "pieces"
        yields RequestOutputs of all prompts as they are generated, where request_id is the index of
        the prompt.
        chat_template_kwargs: for all chats, what transformers' apply_chat_template takes: tools,
        documents, add_generation_prompt (True unless continue_final_message is set),
        continue_final_message, chat_template (a name), and variables of the checkpoint's template.
        kv_cache_tokens, max_num_seqs, num_speculative_tokens: as for `engine`, which is kept with
        its cache for the next call of the same sizes.
        show_progress: a bar on stderr that counts prompts.
        """
        params = SamplingParams() if params is None else params
        self._check_params(prompts, params)
        if stream not in (False, True, "pieces"):
            raise InputError(f"stream must be False, True or 'pieces', got {shown(stream)}")
        keeps_errors = keeps_bad_texts(on_error)
        check_iterable("prompts", prompts)
        reader = self._prompt_reader(chat_template_kwargs)
        taken = self._take_engine(kv_cache_tokens, max_num_seqs, num_speculative_tokens)
        run = GenerationRun(
            taken.engine,
            reader,
            params,
            read_ahead=taken.sizes.max_num_seqs,
            streams=stream == "pieces",
            keeps_errors=keeps_errors,
        )
        blocks = self._run_blocks(run, taken, prompts)
        if show_progress:
            total = num_texts(prompts)
            blocks = with_progress(blocks, run.num_done, title="generate", total=total)
        if stream:
            return Stream(blocks, run.stats)
        items = [item for block in blocks for item in block]
        errors = {i: item for i, item in enumerate(items) if isinstance(item, InputError)}
        return Results(items, run.stats(), errors)

    def engine(
        self,
        *,
        kv_cache_tokens: int | None = None,
        max_num_seqs: int | None = None,
        num_speculative_tokens: int = 0,
        seed: int | None = None,
    ) -> GenerationEngine:
        """A new engine with add_request, abort and step; AsyncEngine(engine) is for servers.

        kv_cache_tokens: the size of its cache; None is what max_num_seqs sequences of 1024 tokens
        need, at most a quarter of a CPU's memory or four fifths of a GPU's free memory.
        max_num_seqs: sequences at a time; None is 64 on a CPU and 256 on a GPU, at most the token
        budget.  num_speculative_tokens: 0 ... 32, the most tokens that are drafted for a step from
        what followed the same tokens earlier in the sequence; the model checks them all in that
        step, and the outputs are those without drafts.
        seed: of the generator of seeds, for requests without a seed.
        """
        sizes = self.generation_sizes(
            kv_cache_tokens=kv_cache_tokens,
            max_num_seqs=max_num_seqs,
            num_speculative_tokens=num_speculative_tokens,
        )
        return self._build_engine(sizes, seed=seed)

    def generation_sizes(
        self,
        *,
        kv_cache_tokens: int | None = None,
        max_num_seqs: int | None = None,
        num_speculative_tokens: int = 0,
    ) -> GenerationSizes:
        """The sizes of an engine with these options, in sequences, tokens and bytes."""
        self._lm_head()
        return generation_sizes(
            self.checkpoint,
            token_budget=self.token_budget,
            kv_cache_tokens=kv_cache_tokens,
            max_num_seqs=max_num_seqs,
            num_speculative_tokens=num_speculative_tokens,
        )

    def encode_prompts(
        self, prompts: Iterable[Prompt], *, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[list[int]]:
        """Prompts as the token ids that `engine` takes; raises the first bad one's InputError.

        chat_template_kwargs: as of `generate`.
        """
        encoded, reader = [], self._prompt_reader(chat_template_kwargs)
        for token_ids in reader.read(list(check_iterable("prompts", prompts))):
            if isinstance(token_ids, InputError):
                raise copy(token_ids)  # this frame holds the other
            encoded.append(token_ids)
        return encoded

    def _prompt_reader(self, template_kwargs: Mapping[str, Any] | None) -> PromptReader:
        checkpoint = self.checkpoint
        return PromptReader(
            checkpoint.spec,
            checkpoint.tokenizer,
            chat_template=checkpoint.chat_template,
            template_kwargs=template_kwargs,
        )

    def _check_params(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> None:
        if not isinstance(params, list | tuple):
            self._check(params)
            return
        if isinstance(prompts, Sized) and len(prompts) != len(params):
            raise _count_error(len(params), len(prompts))
        for index, each in enumerate(params):
            try:
                self._check(each)
            except InputError as error:
                raise InputError(f"params[{index}]: {error}") from None

    def _check(self, params: object) -> None:
        """Raises InputError for wrong parameters, before any prompt is read."""
        if not isinstance(params, SamplingParams):
            raise InputError(f"params must be SamplingParams, got {type(params).__name__}")
        params.check_vocab(self.checkpoint.spec.vocab_size)
        # Raises where a default excludes it.
        params.resolved(self.checkpoint.generation.sampling, num_prompt_tokens=0)
        if params.stop and self.checkpoint.tokenizer is None:
            raise InputError(
                "stop strings need a tokenizer, and the checkpoint has none; use stop_token_ids"
            )

    def _lm_head(self) -> LmHead:
        head = self.checkpoint.heads.lm
        if head is None:
            if self.checkpoint.spec.is_bidirectional:
                raise InputError(
                    "config.json says that every token of this checkpoint sees its whole sequence "
                    "(is_causal false, or the name of such a class), so it cannot generate; use "
                    "embed, or load a causal checkpoint"
                )
            named = ", ".join(self.checkpoint.spec.architectures) or "no architecture"
            raise InputError(
                f"this checkpoint ({named}) has no language model head; load a causal one"
            )
        return head

    def _take_engine(
        self, kv_cache_tokens: int | None, max_num_seqs: int | None, num_speculative_tokens: int
    ) -> _IdleEngine:
        """The idle engine where it was made for these options; else a new one.

        The old one is freed before, so that its memory counts as free. Sizes are not compared: what
        fits a GPU depends on what the idle engine holds.
        """
        options = (kv_cache_tokens, max_num_seqs, num_speculative_tokens)
        if self._idle_engines:
            with suppress(IndexError):  # another thread took it
                idle = self._idle_engines.pop()
                if idle.options == options:
                    return idle
                del idle
        sizes = self.generation_sizes(
            kv_cache_tokens=kv_cache_tokens,
            max_num_seqs=max_num_seqs,
            num_speculative_tokens=num_speculative_tokens,
        )
        return _IdleEngine(options, sizes, self._build_engine(sizes))

    def _build_engine(self, sizes: GenerationSizes, *, seed: int | None = None) -> GenerationEngine:
        return build_engine(
            self.checkpoint, self._lm_head(), sizes, seed=seed, cuda_graphs=self.cuda_graphs
        )

    def _run_blocks(
        self,
        run: "GenerationRun",
        taken: _IdleEngine,
        prompts: Iterable[Prompt],
    ) -> Generator[list[Any], None, None]:
        """The run's results; keeps the engine for the next call."""
        blocks = _one_by_one(run.outputs(prompts)) if run.streams else run.in_order(prompts)
        try:
            with closing(blocks):
                yield from blocks
        finally:
            if not taken.engine.has_work:
                self._idle_engines[:] = [taken]


class GenerationRun:
    """Runs the prompts of one call through an engine that nobody else uses meanwhile.

    Prompts are read as sequences end, so that the engine always has enough of them, but only a few
    steps ahead.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        reader: PromptReader,
        params: SamplingParams | Sequence[SamplingParams],
        *,
        read_ahead: int,
        streams: bool,
        keeps_errors: bool,
    ):
        """params: for all prompts, or one for each.  read_ahead: prompts read at a time.

        streams: whether each token gives a RequestOutput.
        keeps_errors: a bad prompt gives a RequestOutput with its error, instead of raising it.
        """
        self._engine, self._reader, self._params = engine, reader, params
        self._read_ahead, self.streams = read_ahead, streams
        self._keeps_errors = keeps_errors
        self._prompt_indices: dict[int, int] = {}  # unfinished requests, by request id
        self._num_unfinished: dict[int, int] = {}  # outputs, by request id
        self._num_prompt_tokens: dict[int, int] = {}  # unfinished prompts, by prompt index
        self._num_read = self._num_tokens = self._num_errors = 0
        self._start, self._drafts_before = perf_counter(), engine.draft_counts

    def num_done(self) -> int:
        """Prompts whose outputs have ended, or that were refused."""
        return self._num_read - len(self._prompt_indices)

    def stats(self) -> RunStats:
        """Counts so far; tokens of prompts and outputs."""
        num_draft_tokens, num_accepted_tokens = map(
            sub, self._engine.draft_counts, self._drafts_before
        )
        return RunStats(
            num_texts=self._num_read,
            num_tokens=self._num_tokens,
            num_errors=self._num_errors,
            seconds=perf_counter() - self._start,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
        )

    def outputs(self, prompts: Iterable[Prompt]) -> Generator[RequestOutput, None, None]:
        """RequestOutputs as they are generated; request_id is the index of the prompt."""
        waiting, may_have_more = iter(prompts), True
        try:
            while may_have_more or self._prompt_indices:
                if may_have_more and len(self._prompt_indices) <= self._read_ahead:
                    batch = list(islice(waiting, self._read_ahead))
                    may_have_more = bool(batch)
                    self._check_count(len(batch))
                    yield from self._add(batch)
                for output in self._engine.step():
                    yield self._with_prompt_index(output)
        finally:
            self._abort()

    def in_order(
        self, prompts: Iterable[Prompt]
    ) -> Generator[list[Generation | InputError], None, None]:
        """Generations in the order of the prompts, each as soon as those before it are done."""
        outputs_of: dict[int, list[RequestOutput]] = defaultdict(list)  # by prompt index
        done: dict[int, Generation | InputError] = {}
        outputs, next_index = self.outputs(prompts), 0
        try:
            for output in outputs:
                index = output.request_id
                outputs_of[index].append(output)
                # A refused prompt has one RequestOutput; any other has one for each of its n.
                was_added = index in self._num_prompt_tokens
                if len(outputs_of[index]) < (self._params_of(index).n if was_added else 1):
                    continue
                done[index] = self._generation(index, outputs_of.pop(index))
                while next_index in done:
                    yield [done.pop(next_index)]
                    next_index += 1
        finally:
            outputs.close()

    def _add(self, prompts: list[Prompt]) -> Iterator[RequestOutput]:
        """Queues prompts; yields the RequestOutputs of those that are refused."""
        for token_ids in self._reader.read(prompts):
            index = self._num_read
            self._num_read += 1
            try:
                self._add_one(index, token_ids)
            except InputError as error:
                yield self._failed(index, error)

    def _params_of(self, index: int) -> SamplingParams:
        params = self._params
        return params if isinstance(params, SamplingParams) else params[index]

    def _check_count(self, num_more: int) -> None:
        """Raises InputError where the number of params differs from the number of prompts.

        num_more: prompts that were just read; 0 at the end of the prompts.
        """
        if isinstance(self._params, SamplingParams):
            return
        num_prompts, num_params = self._num_read + num_more, len(self._params)
        if num_prompts > num_params or (not num_more and num_prompts < num_params):
            raise _count_error(num_params, f"{num_prompts}{' or more' if num_more else ''}")

    def _add_one(self, index: int, token_ids: list[int] | InputError) -> None:
        if isinstance(token_ids, InputError):
            raise copy(token_ids)  # frames hold the other
        params = self._params_of(index)
        try:
            request_id = self._engine.add_request(token_ids, params, streams=self.streams)
        except InputError as error:
            raise type(error)(f"prompts[{index}]: {error}") from None
        self._prompt_indices[request_id], self._num_unfinished[request_id] = index, params.n
        if not self.streams:
            self._num_prompt_tokens[index] = len(token_ids)
        self._num_tokens += len(token_ids)

    def _with_prompt_index(self, output: RequestOutput) -> RequestOutput:
        """The output with the index of its prompt instead of the engine's request id."""
        request_id = output.request_id
        index = self._prompt_indices[request_id]
        self._num_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self._num_unfinished[request_id] -= 1
            if not self._num_unfinished[request_id]:
                del self._num_unfinished[request_id], self._prompt_indices[request_id]
        if output.error is not None:
            reason = f"prompts[{index}]: {output.error}"
            return self._failed(index, type(output.error)(reason), output)
        return RequestOutput(index, *output[1:])

    def _failed(
        self, index: int, error: InputError, output: RequestOutput | None = None
    ) -> RequestOutput:
        if not self._keeps_errors:
            try:
                raise error
            finally:
                del error  # its frames, of which this is one, would hold it
        self._num_errors += 1
        if output is None:
            return RequestOutput(index, 0, "", (), finish_reason="error", error=error)
        return output._replace(request_id=index, error=error)

    def _generation(self, index: int, outputs: list[RequestOutput]) -> Generation | InputError:
        """The result of a prompt from its whole outputs, one for each of its n."""
        num_prompt_tokens = self._num_prompt_tokens.pop(index, 0)
        for output in outputs:
            if output.error is not None:
                return output.error
        outputs = sorted(outputs, key=lambda output: output.index)
        texts = tuple(map(_generated_text, outputs))
        return Generation(num_prompt_tokens, texts, outputs[0].prompt_logprobs)

    def _abort(self) -> None:
        """Aborts unfinished requests, so that the engine is idle and all its pages are free."""
        for request_id in list(self._prompt_indices):
            self._engine.abort(request_id)
        self._prompt_indices.clear()
        self._num_unfinished.clear()
        while self._engine.has_work:
            self._engine.step()


def _generated_text(output: RequestOutput) -> GeneratedText:
    reason = output.finish_reason
    assert reason is not None  # whole outputs have ended
    return GeneratedText(output.text, output.token_ids, reason, output.stop, output.logprobs)


def _count_error(num_params: int, num_prompts: int | str) -> InputError:
    return InputError(
        f"params must be one SamplingParams, or a list with one a prompt: got {num_params} of them "
        f"for {num_prompts} prompts"
    )


def _one_by_one(
    outputs: Generator[RequestOutput, None, None],
) -> Generator[list[RequestOutput], None, None]:
    """Lists of one.  Closes `outputs` with itself, which a generator expression does not do."""
    with closing(outputs):
        for output in outputs:
            yield [output]
