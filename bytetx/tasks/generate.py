"""Prompts through a generation engine: pieces as they come, or whole answers in order."""

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from time import perf_counter

from bytetx.checkpoint.byte_level import token_bytes, token_pieces
from bytetx.encode.request import RunStats
from bytetx.errors import InputError
from bytetx.generate.detokenizer import ByteStream, DecodedStream
from bytetx.generate.engine import GenerationEngine
from bytetx.generate.model_runner import GenerationRunner
from bytetx.generate.output_processor import OpenText
from bytetx.generate.outputs import AnswerPiece
from bytetx.generate.scheduler import GenerationScheduler
from bytetx.generate.sizes import GenerationSizes, allocate
from bytetx.nn.heads import LmHead
from bytetx.nn.loading import LoadedCheckpoint
from bytetx.requests.prompts import Prompt, PromptReader
from bytetx.sampling_params import SamplingParams
from bytetx.tasks.results import GeneratedText, Generation


def build_engine(
    checkpoint: LoadedCheckpoint,
    head: LmHead,
    sizes: GenerationSizes,
    *,
    seed: int | None = None,
    cuda_graphs: bool = True,
) -> GenerationEngine:
    """An engine with a cache of its own.

    seed: of the seeds of requests that bring none.  cuda_graphs: as `load` knows it.
    """
    cache = allocate(sizes, checkpoint)
    scheduler = GenerationScheduler(
        num_pages=sizes.num_pages,
        page_size=sizes.page_size,
        token_budget=sizes.token_budget,
        max_num_seqs=sizes.max_num_seqs,
        max_positions=checkpoint.spec.max_positions,
        max_shared_prompt=checkpoint.spec.max_plain_prompt,
    )
    runner = GenerationRunner(
        checkpoint.transformer,
        head,
        cache=cache,
        max_num_seqs=sizes.max_num_seqs,
        device=checkpoint.device,
        cuda_graphs=cuda_graphs,
    )
    return GenerationEngine(
        runner,
        scheduler,
        open_text=text_opener(checkpoint),
        eos_token_ids=checkpoint.eos_token_ids,
        seed=seed,
    )


def text_opener(checkpoint: LoadedCheckpoint) -> OpenText | None:
    """Text without special tokens; ids that the model has beyond the tokenizer's add nothing."""
    if checkpoint.tokenizer is None:
        return None
    tokenizer, backend = checkpoint.tokenizer, checkpoint.tokenizer.backend
    known = token_bytes(backend)
    if known is not None:
        known += [b""] * (checkpoint.spec.vocab_size - len(known))
        return partial(ByteStream, known)

    def decode(token_ids: Sequence[int]) -> str:
        return tokenizer.decode_plain(token_ids, skip_special_tokens=True)

    pieces = token_pieces(backend)
    if pieces is not None:
        pieces += [""] * (checkpoint.spec.vocab_size - len(pieces))
    return partial(DecodedStream, decode, pieces=pieces)


def count_error(num_params: int, num_prompts: int | str) -> InputError:
    """What is wrong with a list of params that does not go with the prompts."""
    return InputError(
        f"params must be one SamplingParams, or a list with one a prompt: got {num_params} of them "
        f"for {num_prompts} prompts"
    )


class GenerationRun:
    """Prompts of one caller through an engine that is the caller's alone meanwhile.

    Prompts are read as sequences end, so that the engine is never short of them, and are never
    more than a few steps' worth ahead.
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
        """params: of all prompts, or one a prompt.  read_ahead: prompts read at a time.

        streams: pieces come token by token.
        keeps_errors: a bad prompt becomes a piece with its error, instead of raising it.
        """
        self._engine, self._reader, self._params = engine, reader, params
        self._read_ahead, self.streams = read_ahead, streams
        self._keeps_errors = keeps_errors
        self._places: dict[int, int] = {}  # of the open requests' prompts, by request
        self._num_open: dict[int, int] = {}  # answers that go on, by request
        self._num_prompt_tokens: dict[int, int] = {}  # by the place of a prompt that runs
        self._num_read = self._num_tokens = self._num_errors = 0
        self._start = perf_counter()

    def num_done(self) -> int:
        """Prompts whose answers have ended, or that were refused."""
        return self._num_read - len(self._places)

    def stats(self) -> RunStats:
        """What has been computed so far; tokens of prompts and answers."""
        return RunStats(
            num_texts=self._num_read,
            num_tokens=self._num_tokens,
            num_errors=self._num_errors,
            seconds=perf_counter() - self._start,
        )

    def pieces(self, prompts: Iterable[Prompt]) -> Generator[AnswerPiece, None, None]:
        """Pieces as they come; request_id is the prompt's place in the caller's order."""
        waiting, may_have_more = iter(prompts), True
        try:
            while may_have_more or self._places:
                if may_have_more and len(self._places) <= self._read_ahead:
                    some = list(islice(waiting, self._read_ahead))
                    may_have_more = bool(some)
                    self._check_count(len(some))
                    yield from self._add(some)
                for piece in self._engine.step():
                    yield self._placed(piece)
        finally:
            self._abort()

    def in_order(
        self, prompts: Iterable[Prompt]
    ) -> Generator[list[Generation | InputError], None, None]:
        """Whole answers, each as soon as it and those before it are done."""
        pieces_of: dict[int, list[AnswerPiece]] = defaultdict(list)
        done: dict[int, Generation | InputError] = {}
        pieces, place = self.pieces(prompts), 0
        try:
            for piece in pieces:
                own = pieces_of[piece.request_id]
                own.append(piece)  # one an answer, or one alone where the prompt was refused
                was_added = piece.request_id in self._num_prompt_tokens
                if len(own) < (self._params_of(piece.request_id).n if was_added else 1):
                    continue
                del pieces_of[piece.request_id]
                done[piece.request_id] = self._whole(piece.request_id, own)
                while place in done:
                    yield [done.pop(place)]
                    place += 1
        finally:
            pieces.close()

    def _add(self, prompts: list[Prompt]) -> Iterator[AnswerPiece]:
        """Queues prompts; gives the pieces of those that are refused."""
        for token_ids in self._reader.read(prompts):
            place = self._num_read
            self._num_read += 1
            try:
                self._add_one(place, token_ids)
            except InputError as error:
                yield self._failed(place, error)

    def _params_of(self, place: int) -> SamplingParams:
        shared = isinstance(self._params, SamplingParams)
        return self._params if shared else self._params[place]

    def _check_count(self, num_more: int) -> None:
        """Raises InputError where there are more prompts than params, or no more, and fewer."""
        if isinstance(self._params, SamplingParams):
            return
        num_prompts, num_params = self._num_read + num_more, len(self._params)
        if num_prompts > num_params or (not num_more and num_prompts < num_params):
            raise count_error(num_params, f"{num_prompts}{' or more' if num_more else ''}")

    def _add_one(self, place: int, token_ids: list[int] | InputError) -> None:
        if isinstance(token_ids, InputError):
            raise token_ids
        params = self._params_of(place)
        try:
            request_id = self._engine.add_request(token_ids, params, streams=self.streams)
        except InputError as error:
            raise type(error)(f"prompts[{place}]: {error}") from None
        self._places[request_id], self._num_open[request_id] = place, params.n
        if not self.streams:
            self._num_prompt_tokens[place] = len(token_ids)
        self._num_tokens += len(token_ids)

    def _placed(self, piece: AnswerPiece) -> AnswerPiece:
        """The piece with the prompt's place instead of the engine's number."""
        place = self._places[piece.request_id]
        self._num_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            self._num_open[piece.request_id] -= 1
            if not self._num_open[piece.request_id]:
                del self._num_open[piece.request_id], self._places[piece.request_id]
        if piece.error is not None:
            return self._failed(place, type(piece.error)(f"prompts[{place}]: {piece.error}"), piece)
        return AnswerPiece(place, *piece[1:])

    def _failed(
        self, place: int, error: InputError, piece: AnswerPiece | None = None
    ) -> AnswerPiece:
        if not self._keeps_errors:
            raise error
        self._num_errors += 1
        if piece is None:
            return AnswerPiece(place, 0, "", (), finish_reason="error", error=error)
        return piece._replace(request_id=place, error=error)

    def _whole(self, place: int, pieces: list[AnswerPiece]) -> Generation | InputError:
        num_prompt_tokens = self._num_prompt_tokens.pop(place, 0)
        for piece in pieces:
            if piece.error is not None:
                return piece.error
        pieces = sorted(pieces, key=lambda piece: piece.index)
        answers = tuple(
            GeneratedText(p.text, p.token_ids, p.finish_reason, p.stop, p.logprobs) for p in pieces
        )
        return Generation(num_prompt_tokens, answers, pieces[0].prompt_logprobs)

    def _abort(self) -> None:
        """Ends what is open, so that the engine has no work and all its pages."""
        for request_id in list(self._places):
            self._engine.abort(request_id)
        self._places.clear()
        self._num_open.clear()
        while self._engine.has_work:
            self._engine.step()
