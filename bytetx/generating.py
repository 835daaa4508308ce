"""GeneratesText: the methods of a Model that go on with a prompt."""

from collections.abc import Generator, Iterable, Sequence, Sized
from contextlib import closing, suppress
from typing import Any, Literal, Unpack, overload

from bytetx.arguments import check_iterable
from bytetx.errors import InputError
from bytetx.generate.engine import GenerationEngine
from bytetx.generate.outputs import AnswerPiece
from bytetx.generate.sizes import GenerationSizes, generation_sizes
from bytetx.nn.heads import LmHead
from bytetx.nn.loading import LoadedCheckpoint
from bytetx.progress import num_texts, with_progress
from bytetx.requests.prompts import Prompt, PromptReader
from bytetx.sampling_params import SamplingParams
from bytetx.tasks.generate import GenerationRun, build_engine, count_error
from bytetx.tasks.options import GenerateOptions, No, OnError, Raise, Return, Yes
from bytetx.tasks.results import Generation, Results, Stream

Params = SamplingParams | Sequence[SamplingParams] | None


class GeneratesText:
    """What Model has where its checkpoint has a language model head; InputError where not."""

    checkpoint: LoadedCheckpoint
    token_budget: int
    cuda_graphs: bool

    def __init__(self) -> None:
        # One engine waits for the next call with the same sizes, its cache full of prefixes.
        self._idle_engines: list[tuple[GenerationSizes, GenerationEngine]] = []

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Params = ...,
        *,
        stream: No = ...,
        on_error: Raise = ...,
        **options: Unpack[GenerateOptions],
    ) -> Results[Generation]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Params = ...,
        *,
        stream: Yes,
        on_error: Raise = ...,
        **options: Unpack[GenerateOptions],
    ) -> Stream[Generation]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Params = ...,
        *,
        stream: No = ...,
        on_error: Return,
        **options: Unpack[GenerateOptions],
    ) -> Results[Generation | InputError]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Params = ...,
        *,
        stream: Yes,
        on_error: Return,
        **options: Unpack[GenerateOptions],
    ) -> Stream[Generation | InputError]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Params = ...,
        *,
        stream: Literal["pieces"],
        on_error: OnError = ...,
        **options: Unpack[GenerateOptions],
    ) -> Stream[AnswerPiece]: ...

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: Params = None,
        *,
        stream: bool | Literal["pieces"] = False,
        on_error: OnError = "raise",
        kv_cache_tokens: int | None = None,
        max_num_seqs: int | None = None,
        show_progress: bool = False,
    ) -> Results[Any] | Stream[Any]:
        """Answers to prompts, as many at a time as their keys and values fit the cache.

        prompts: a str, a sequence of token ids, or a chat (a list of {"role", "content"}) each.
        params: of all prompts, or a list with one a prompt; None is SamplingParams().
        stream: True gives whole answers in order as they are done; "pieces" gives AnswerPieces of
        any prompt as they come, whose request_id is the prompt's place.
        kv_cache_tokens, max_num_seqs: as for `engine`; the cache stays for the next call.
        show_progress: a bar on stderr that counts prompts.
        """
        params = SamplingParams() if params is None else params
        self._check_params(prompts, params)
        if stream not in (False, True, "pieces"):
            raise InputError(f"stream must be False, True or 'pieces', got {stream!r}")
        if on_error not in ("raise", "return"):
            raise InputError(f"on_error must be 'raise' or 'return', got {on_error!r}")
        check_iterable("prompts", prompts)
        sizes = self.generation_sizes(kv_cache_tokens=kv_cache_tokens, max_num_seqs=max_num_seqs)
        engine = self._take_engine(sizes)
        run = GenerationRun(
            engine,
            self._prompt_reader(),
            params,
            read_ahead=sizes.max_num_seqs,
            streams=stream == "pieces",
            keeps_errors=on_error == "return",
        )
        blocks = self._run_blocks(run, engine, sizes, prompts)
        if show_progress:
            total = num_texts(prompts)
            blocks = with_progress(blocks, run.num_done, title="generate", total=total)
        if stream:
            return Stream(blocks, run.stats)
        items = [answer for block in blocks for answer in block]
        errors = {i: item for i, item in enumerate(items) if isinstance(item, InputError)}
        return Results(items, run.stats(), errors)

    def engine(
        self,
        *,
        kv_cache_tokens: int | None = None,
        max_num_seqs: int | None = None,
        seed: int | None = None,
    ) -> GenerationEngine:
        """An engine of one's own: add_request, abort and step; AsyncEngine(engine) for a server.

        kv_cache_tokens: keys and values that its cache holds; None is what max_num_seqs sequences
        of 1024 tokens need, at most a quarter of a CPU's memory or four fifths of what a GPU has
        free.  max_num_seqs: sequences at a time; None is 64 on a CPU, 256 on a GPU, and never more
        than the token budget.  seed: of the seeds of requests that bring none.
        """
        sizes = self.generation_sizes(kv_cache_tokens=kv_cache_tokens, max_num_seqs=max_num_seqs)
        return self._build_engine(sizes, seed=seed)

    def generation_sizes(
        self, *, kv_cache_tokens: int | None = None, max_num_seqs: int | None = None
    ) -> GenerationSizes:
        """What an engine with these options takes, in sequences, tokens and bytes."""
        self._lm_head()
        return generation_sizes(
            self.checkpoint,
            token_budget=self.token_budget,
            kv_cache_tokens=kv_cache_tokens,
            max_num_seqs=max_num_seqs,
        )

    def encode_prompts(self, prompts: Iterable[Prompt]) -> list[list[int]]:
        """Prompts as the token ids that `engine` takes; raises the first bad one's InputError."""
        encoded = []
        for token_ids in self._prompt_reader().read(list(check_iterable("prompts", prompts))):
            if isinstance(token_ids, InputError):
                raise token_ids
            encoded.append(token_ids)
        return encoded

    def _prompt_reader(self) -> PromptReader:
        checkpoint = self.checkpoint
        template = checkpoint.chat_template
        return PromptReader(checkpoint.spec, checkpoint.tokenizer, chat_template=template)

    def _check_params(
        self, prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> None:
        if not isinstance(params, list | tuple):
            self._check(params)
            return
        if isinstance(prompts, Sized) and len(prompts) != len(params):
            raise count_error(len(params), len(prompts))
        for place, own in enumerate(params):
            try:
                self._check(own)
            except InputError as error:
                raise InputError(f"params[{place}]: {error}") from None

    def _check(self, params: object) -> None:
        """What is wrong with all prompts' parameters shows before any prompt is read."""
        if not isinstance(params, SamplingParams):
            raise InputError(f"params must be SamplingParams, got {type(params).__name__}")
        params.check_vocab(self.checkpoint.spec.vocab_size)
        if params.stop and self.checkpoint.tokenizer is None:
            raise InputError(
                "stop strings need a tokenizer, and the checkpoint has none; use stop_token_ids"
            )

    def _lm_head(self) -> LmHead:
        head = self.checkpoint.heads.lm
        if head is None:
            named = ", ".join(self.checkpoint.spec.architectures) or "no architecture"
            raise InputError(
                f"this checkpoint ({named}) has no language model head; load a causal one"
            )
        return head

    def _take_engine(self, sizes: GenerationSizes) -> GenerationEngine:
        """The idle engine where it has these sizes; else a new one, after that one's cache went."""
        if self._idle_engines:
            with suppress(IndexError):  # another thread took it
                idle_sizes, engine = self._idle_engines.pop()
                if idle_sizes == sizes:
                    return engine
                del engine
        return self._build_engine(sizes)

    def _build_engine(self, sizes: GenerationSizes, *, seed: int | None = None) -> GenerationEngine:
        return build_engine(
            self.checkpoint, self._lm_head(), sizes, seed=seed, cuda_graphs=self.cuda_graphs
        )

    def _run_blocks(
        self,
        run: GenerationRun,
        engine: GenerationEngine,
        sizes: GenerationSizes,
        prompts: Iterable[Prompt],
    ) -> Generator[list[Any], None, None]:
        blocks = _one_by_one(run.pieces(prompts)) if run.streams else run.in_order(prompts)
        try:
            with closing(blocks):
                yield from blocks
        finally:
            if not engine.has_work:
                self._idle_engines[:] = [(sizes, engine)]


def _one_by_one(
    pieces: Generator[AnswerPiece, None, None],
) -> Generator[list[AnswerPiece], None, None]:
    """Lists of one.  Closes the pieces with itself, as not every Python does in an expression."""
    with closing(pieces):
        for piece in pieces:
            yield [piece]
