"""Generation: the declared task, the engines of a model, and one call's prompts through one."""

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing, suppress
from copy import copy
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter, sub
from time import perf_counter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from bytetx.arguments import MAX_DRAFT, check_draft_size, check_iterable, check_positive
from bytetx.checkpoint.chat_template import checked_options
from bytetx.encode.request import RunStats
from bytetx.errors import InputError, OptionError, shown
from bytetx.generate.build import GenerationSizes, build_engine, generation_sizes
from bytetx.generate.engine import GenerationEngine
from bytetx.generate.guidance import check_installed
from bytetx.generate.outputs import RequestOutput
from bytetx.nn.adapted_rows import Adapter
from bytetx.nn.adapters import Adapters, adapter_at, named_adapters
from bytetx.nn.heads import LmHead
from bytetx.nn.loading import LoadedCheckpoint
from bytetx.requests.prompts import ChatEnds, Prompt, PromptReader
from bytetx.sampling_params import SamplingParams
from bytetx.tasks.context import TaskContext
from bytetx.tasks.generation_stream import AsyncGeneration
from bytetx.tasks.progress import num_texts, with_progress
from bytetx.tasks.results import GeneratedText, Generation, Results, Stream
from bytetx.tasks.task import AdapterOptions, TaskOptions, option, task

T = TypeVar("T")
Prompts = Iterable[Prompt]
Params = SamplingParams | Sequence[SamplingParams]


@dataclass(frozen=True, kw_only=True)
class ChatOptions(AdapterOptions):
    """Options of prompts, which may be chats."""

    chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        "For all chats, what transformers' apply_chat_template takes: tools, documents, "
        "add_generation_prompt (True unless continue_final_message is set), "
        "continue_final_message, chat_template (a name), and variables of the checkpoint's "
        "template.",
    )


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ChatOptions, TaskOptions):
    """Options of generate: chats, and the sizes of its engine."""

    kv_cache_tokens: int | None = option(
        None,
        "Tokens of the KV cache; None is what max_num_seqs sequences of 1024 tokens need, at most "
        "a quarter of a CPU's memory or four fifths of a GPU's free memory.",
        min=1,
    )
    max_num_seqs: int | None = option(
        None,
        "Sequences at a time; None is 64 on a CPU and 256 on a GPU, at most the token budget.",
        min=1,
    )
    num_speculative_tokens: int = option(
        0,
        f"0 ... {MAX_DRAFT}, the most tokens that are drafted for a step from what followed the "
        "same tokens earlier in the sequence; the model checks them all in that step, and the "
        "outputs are those without drafts.",
        min=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_cache_tokens is not None:
            check_positive("kv_cache_tokens", self.kv_cache_tokens)
        if self.max_num_seqs is not None:
            check_positive("max_num_seqs", self.max_num_seqs)
        check_draft_size(self.num_speculative_tokens)


@dataclass(frozen=True, slots=True)
class GenerationCall(Generic[T]):
    """A call of generate, checked, before its first prompt is read."""

    prompts: Prompts
    params: Params
    reader: PromptReader
    options: GenerateOptions
    ends: ChatEnds


@dataclass(frozen=True, slots=True)
class PromptCall(Generic[T]):
    """One prompt of an AsyncModel, checked.  template_kwargs: of ChatTemplate.render.

    adapter: its name, None for the model without any.
    """

    prompt: Prompt
    params: SamplingParams
    template_kwargs: Mapping[str, Any]
    adapter: str | None
    ends: ChatEnds


class IdleEngine(NamedTuple):
    """An engine and the options that it was made for; sizes: what these came to."""

    options: tuple[int | None, ...]
    sizes: GenerationSizes
    engine: GenerationEngine


class ModelEngines:
    """Makes a model's generation engines; InputError where it has no language model head.

    idle: at most one, for the next call with the same options, with its prefix cache.
    """

    def __init__(self, checkpoint: LoadedCheckpoint, *, token_budget: int, cuda_graphs: bool):
        self._checkpoint, self._token_budget = checkpoint, token_budget
        self._cuda_graphs = cuda_graphs
        self.idle: list[IdleEngine] = []

    def sizes(self, options: GenerateOptions) -> GenerationSizes:
        """The sizes of an engine with these options, in sequences, tokens and bytes."""
        self._lm_head()
        return generation_sizes(
            self._checkpoint,
            token_budget=self._token_budget,
            kv_cache_tokens=options.kv_cache_tokens,
            max_num_seqs=options.max_num_seqs,
            num_speculative_tokens=options.num_speculative_tokens,
        )

    def build(self, sizes: GenerationSizes, *, seed: int | None = None) -> GenerationEngine:
        """A new engine. seed: of the generator of seeds, for requests without a seed."""
        head, graphs = self._lm_head(), self._cuda_graphs
        return build_engine(self._checkpoint, head, sizes, seed=seed, cuda_graphs=graphs)

    def take(self, options: GenerateOptions) -> IdleEngine:
        """The idle engine where it was made for these options; else a new one.

        The old one is freed before, so that its memory counts as free. Sizes are not compared: what
        fits a GPU depends on what the idle engine holds.
        """
        wanted = options.kv_cache_tokens, options.max_num_seqs, options.num_speculative_tokens
        if self.idle:
            with suppress(IndexError):  # another thread took it
                idle = self.idle.pop()
                if idle.options == wanted:
                    return idle
                del idle
        sizes = self.sizes(options)
        return IdleEngine(wanted, sizes, self.build(sizes))

    def _lm_head(self) -> LmHead:
        head, spec = self._checkpoint.heads.lm, self._checkpoint.spec
        if head is None:
            if spec.is_bidirectional:
                raise InputError(
                    "config.json says that every token of this checkpoint sees its whole sequence "
                    "(is_causal false, or the name of such a class), so it cannot generate; use "
                    "embed, or load a causal checkpoint"
                )
            named = ", ".join(spec.architectures) or "no architecture"
            raise InputError(
                f"this checkpoint ({named}) has no language model head; load a causal one"
            )
        return head


class HasEngines(Protocol):
    """A Model, for a call that runs."""

    engines: ModelEngines
    loras: Adapters


def run_generation(
    call: GenerationCall[Any], model: HasEngines, *, stream: object, show_progress: bool
) -> Results[Any] | Stream[Any]:
    """Runs a call through the model's idle engine, or a new one.

    stream: False, True for Generations in the order of the prompts, or "pieces".
    """
    if stream not in (False, True, "pieces"):
        raise InputError(f"stream must be False, True or 'pieces', got {shown(stream)}")
    named = call.options.adapter
    adapters = None if named is None else named_adapters(model.loras, named, call.prompts)
    taken = model.engines.take(call.options)
    run = GenerationRun(call, taken, streams=stream == "pieces", adapters=adapters)
    blocks = run.blocks(call.prompts, model.engines.idle)
    if show_progress:
        total = num_texts(call.prompts)
        blocks = with_progress(blocks, run.num_done, title="generate", total=total)
    if stream:
        return Stream(blocks, run.stats)
    items, stats = list(chain.from_iterable(blocks)), run.stats()
    errors = {}
    if stats.num_errors:
        errors = {i: item for i, item in enumerate(items) if isinstance(item, InputError)}
    return Results(items, stats, errors)


def generate_one(
    context: TaskContext, prompt: Prompt, params: SamplingParams | None, options: ChatOptions
) -> PromptCall[AsyncGeneration]:
    """The pieces of the outputs of one prompt as they are generated, params.n outputs.

    prompt: a str, token ids, or a chat.  params: None is SamplingParams().
    Iterate over what is returned with `async for`; each
    piece is the new part of the output that its `index` names.  Its aclose, or cancelling the
    task that waits for it, ends the generation.
    """
    params = SamplingParams() if params is None else params
    _check(params, context.checkpoint)
    adapter = options.adapter
    if not isinstance(adapter, str | None):
        raise OptionError(f"adapter must be one name for one prompt, got {shown(adapter)}")
    template = checked_options(options.chat_template_kwargs)
    ends = ChatEnds(context.answer_format, context.tokenizer)
    return PromptCall(prompt, params, template, adapter, ends)


@task(
    item=Generation,
    pieces=RequestOutput,
    defaults={"params": None},
    run=run_generation,
    one=generate_one,
)
def generate(
    context: TaskContext, prompts: Prompts, params: Params | None, options: GenerateOptions
) -> GenerationCall[Results[Generation]]:
    """Continues prompts, with as many at a time as their keys and values fit the cache.

    prompts: each a str, a sequence of token ids, or a chat (a list of {"role", "content"}; what
    else a message has reaches the chat template, too).
    params: for all prompts, or a list with one for each; None is SamplingParams().
    stream: True yields Generations in the order of the prompts, as they are done; "pieces"
    yields RequestOutputs of all prompts as they are generated, where request_id is the index of
    the prompt.
    The engine of the sizes in the options is kept with its cache for the next call with the same.
    show_progress: a bar on stderr that counts prompts.
    """
    params = SamplingParams() if params is None else params
    if not isinstance(params, list | tuple):
        _check(params, context.checkpoint)
    else:
        if isinstance(prompts, Sized) and len(prompts) != len(params):
            raise _count_error(len(params), len(prompts))
        for index, each in enumerate(params):
            try:
                _check(each, context.checkpoint)
            except InputError as error:
                raise InputError(f"params[{index}]: {error}") from None
    check_iterable("prompts", prompts)
    reader = prompt_reader(context.checkpoint, options)
    ends = ChatEnds(context.answer_format, context.tokenizer)
    return GenerationCall(prompts, params, reader, options, ends)


def prompt_reader(checkpoint: LoadedCheckpoint, options: ChatOptions) -> PromptReader:
    """A reader of prompts of any kind."""
    return PromptReader(
        checkpoint.spec,
        checkpoint.tokenizer,
        chat_template=checkpoint.chat_template,
        template_kwargs=options.chat_template_kwargs,
    )


def _check(params: object, checkpoint: LoadedCheckpoint) -> None:
    """Raises InputError for wrong parameters, before any prompt is read."""
    if not isinstance(params, SamplingParams):
        raise InputError(f"params must be SamplingParams, got {type(params).__name__}")
    params.check_vocab(checkpoint.spec.vocab_size)
    # Raises where a default excludes it.
    params.resolved(checkpoint.generation.sampling, num_prompt_tokens=0)
    if params.structured_outputs is not None:
        check_installed()
    if params.stop and checkpoint.tokenizer is None:
        raise InputError(
            "stop strings need a tokenizer, and the checkpoint has none; use stop_token_ids"
        )


class GenerationRun:
    """Runs the prompts of one call through an engine that nobody else uses meanwhile.

    Prompts are read as sequences end, so that the engine always has enough of them, but only a few
    steps ahead.
    """

    def __init__(
        self,
        call: GenerationCall[Any],
        taken: IdleEngine,
        *,
        streams: bool,
        adapters: Adapter | Sequence[Adapter | None] | None = None,
    ):
        """streams: whether each token gives a RequestOutput.

        adapters: of all prompts, or one or None for each; None: the model without any.
        """
        self._adapters = adapters
        self._taken, self._engine = taken, taken.engine
        self._reader, self._params, self._ends = call.reader, call.params, call.ends
        self._read_ahead, self._streams = taken.sizes.max_num_seqs, streams
        # A bad prompt gives a RequestOutput with its error, instead of raising it.
        self._keeps_errors = call.options.on_error == "return"
        self._prompt_indices: dict[int, int] = {}  # unfinished requests, by request id
        self._num_unfinished: dict[int, int] = {}  # outputs, by request id
        # (tokens of the prompt, number of outputs) of unfinished prompts, by prompt index
        self._added: dict[int, tuple[int, int]] = {}
        self._num_read = self._num_tokens = self._num_errors = 0
        self._start, self._drafts_before = perf_counter(), self._engine.draft_counts

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

    def blocks(self, prompts: Prompts, idle: list[IdleEngine]) -> Generator[list[Any], None, None]:
        """The results, some at a time.  idle: gets the engine at the end."""
        blocks = _one_by_one(self.outputs(prompts)) if self._streams else self.in_order(prompts)
        try:
            with closing(blocks):
                yield from blocks
        finally:
            if not self._engine.has_work:
                idle[:] = [self._taken]

    def outputs(self, prompts: Prompts) -> Generator[RequestOutput, None, None]:
        """RequestOutputs as they are generated; request_id is the index of the prompt."""
        waiting, may_have_more = iter(prompts), True
        try:
            while may_have_more or self._prompt_indices:
                if may_have_more and len(self._prompt_indices) <= self._read_ahead:
                    batch = list(islice(waiting, self._read_ahead))
                    may_have_more = bool(batch)
                    if not isinstance(self._params, SamplingParams):
                        self._check_count(len(self._params), len(batch))
                    yield from self._add(batch)
                for output in self._engine.step():
                    yield self._with_prompt_index(output)
        finally:
            self._abort()

    def in_order(self, prompts: Prompts) -> Generator[list[Generation | InputError], None, None]:
        """Generations in the order of the prompts, each as soon as those before it are done."""
        outputs_of: dict[int, list[RequestOutput]] = defaultdict(list)  # by prompt index
        done: dict[int, Generation | InputError] = {}
        outputs, next_index = self.outputs(prompts), 0
        try:
            for output in outputs:
                index = output.request_id
                outputs_of[index].append(output)
                # A refused prompt has one RequestOutput; any other has one for each of its n.
                if len(outputs_of[index]) < self._added.get(index, (0, 1))[1]:
                    continue
                done[index] = self._generation(index, outputs_of.pop(index))
                while next_index in done:
                    yield [done.pop(next_index)]
                    next_index += 1
        finally:
            outputs.close()

    def _add(self, prompts: list[Prompt]) -> Iterator[RequestOutput]:
        """Queues prompts; yields the RequestOutputs of those that are refused."""
        for prompt, token_ids in zip(prompts, self._reader.read(prompts), strict=True):
            index = self._num_read
            self._num_read += 1
            if isinstance(token_ids, InputError):
                yield self._failed(index, copy(token_ids))  # frames hold the other
                continue
            params = (
                self._params if isinstance(self._params, SamplingParams) else self._params[index]
            )
            adapter = self._adapters
            if isinstance(adapter, Sequence):
                adapter = adapter_at(adapter, index)
            try:
                params = self._ends.params(params, prompt, token_ids)
                added = self._engine.add_request(
                    token_ids, params, streams=self._streams, adapter=adapter
                )
            except InputError as error:
                yield self._failed(index, type(error)(f"prompts[{index}]: {error}"))
                continue
            self._prompt_indices[added], self._num_unfinished[added] = index, params.n
            if not self._streams:
                self._added[index] = len(token_ids), params.n
            self._num_tokens += len(token_ids)

    def _check_count(self, num_params: int, num_more: int) -> None:
        """Raises InputError where the number of params differs from the number of prompts.

        num_more: prompts that were just read; 0 at the end of the prompts.
        """
        num_prompts = self._num_read + num_more
        if num_prompts > num_params or (not num_more and num_prompts < num_params):
            raise _count_error(num_params, f"{num_prompts}{' or more' if num_more else ''}")

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
                raise error from None  # it was said again, with the index
            finally:
                del error  # its frames, of which this is one, would hold it
        self._num_errors += 1
        if output is None:
            return RequestOutput(index, 0, "", (), finish_reason="error", error=error)
        return output._replace(request_id=index, error=error)

    def _generation(self, index: int, outputs: list[RequestOutput]) -> Generation | InputError:
        """The result of a prompt from its whole outputs, one for each of its n."""
        num_prompt_tokens, _ = self._added.pop(index, (0, 1))
        for output in outputs:
            if output.error is not None:
                return output.error
        outputs = sorted(outputs, key=attrgetter("index"))
        texts = []
        for one in outputs:
            assert one.finish_reason is not None  # whole outputs have ended
            found = one.text, one.token_ids, one.finish_reason, one.stop, one.logprobs
            texts.append(GeneratedText(*found))
        return Generation(num_prompt_tokens, tuple(texts), outputs[0].prompt_logprobs)

    def _abort(self) -> None:
        """Aborts unfinished requests, so that the engine is idle and all its pages are free."""
        for request_id in list(self._prompt_indices):
            self._engine.abort(request_id)
        self._prompt_indices.clear()
        self._num_unfinished.clear()
        while self._engine.has_work:
            self._engine.step()


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
