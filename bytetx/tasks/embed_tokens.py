"""A vector for each token of a text (ColBERT, BGE-M3), as queries or as documents."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from bytetx.arguments import check_text
from bytetx.checkpoint.multi_vector import MultiVectorSpec, QueryExpansion, TokenPoolingSpec
from bytetx.encode.step import Capture, Step, are_finite
from bytetx.errors import InputError, OptionError, shown
from bytetx.nn.sentence_modules import Normalize
from bytetx.nn.transformer import Transformer
from bytetx.nn.unseen_tokens import forward_with_unseen, why_no_unseen_tokens
from bytetx.requests.inputs import Expansion, InputReader
from bytetx.tasks.call import TaskCall
from bytetx.tasks.context import PROMPT_NAMES, TaskContext
from bytetx.tasks.embed import output_size
from bytetx.tasks.precision import (
    Precision,
    Quantizer,
    make_quantizer,
    quantized,
)
from bytetx.tasks.task import TextOptions, Texts, option, task
from bytetx.tasks.token_pooling import check_token_pooling, pool_tokens
from bytetx.tasks.vectors import TokenEmbeddings, token_sink

_NORMALIZE = Normalize()


@dataclass(frozen=True, slots=True)
class TokenVectorTask:
    """Modules on every token.

    modules: applied in order.  num_skipped_first: tokens at the start without a vector.
    skipped_ids: int32, tokens without a vector.  hides_expansion: requests have unseen_tokens.
    quantizer: applied last.  pooling: of a text's vectors, on the host; the quantizer is then, too.
    """

    modules: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    num_skipped_first: int = 0
    skipped_ids: np.ndarray | None = None
    hides_expansion: bool = False
    quantizer: Quantizer | None = None
    pooling: TokenPoolingSpec | None = None

    @property
    def key(self) -> Hashable:
        precision = None if self.quantizer is None else self.quantizer.key
        skipped = None if self.skipped_ids is None else self.skipped_ids.tobytes()
        modules = tuple(map(id, self.modules))
        chosen = (self.num_skipped_first, skipped, self.hides_expansion, self.pooling)
        return ("tokens", modules, *chosen, precision)

    @property
    def shares_pass(self) -> bool:
        return not self.hides_expansion

    @property
    def capture(self) -> Capture | None:
        """None where only the host knows which tokens none sees."""
        if self.hides_expansion:
            return None
        quantizer = self._on_device
        precision = None if quantizer is None else quantizer.key
        return Capture(("tokens", tuple(map(id, self.modules)), precision), rows="tokens")

    @property
    def _on_device(self) -> Quantizer | None:
        return None if self.pooling is not None else self.quantizer

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        num_unseen = step.requests.unseen_tokens
        if num_unseen is not None and num_unseen.any():
            return self.reduce(forward_with_unseen(transformer, step.batch, num_unseen), step)
        return self.reduce(transformer.forward(step.batch), step)

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """([total_tokens, dimensions], f32 [total_tokens]) from the last hidden states."""
        x = hidden_states
        for module in self.modules:
            x = module(x)
        return quantized(x, self._on_device)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return are_finite(outputs[1], step.requests.seqlens)

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[np.ndarray]:
        vectors, requests = outputs[0], step.requests
        starts = requests.cu_seqlens[:-1]
        is_kept = np.ones(len(vectors), dtype=bool)
        if self.num_skipped_first:
            is_kept[starts[requests.seqlens > 0]] = False
        if self.skipped_ids is not None:
            is_kept &= ~np.isin(requests.token_ids, self.skipped_ids)
        ends = requests.cu_seqlens[1:-1]
        # Copies, by the choice of rows: a caller may hold one text's, and the step's with it.
        pairs = zip(np.split(vectors, ends), np.split(is_kept, ends), strict=True)
        return [self._pooled(rows[kept]) for rows, kept in pairs]

    def _pooled(self, rows: np.ndarray) -> np.ndarray:
        """A text's vectors after pooling, in the task's precision."""
        if self.pooling is None:
            return rows
        pooled = pool_tokens(rows, self.pooling)
        return pooled if self.quantizer is None else self.quantizer.on_host(pooled)


@dataclass(frozen=True, kw_only=True)
class TokenOptions(TextOptions):
    """Options of embed_tokens."""

    task: Literal["query", "document"] = option(
        "document",
        "'query' takes the checkpoint's prompt, length and expansion of queries, 'document' its "
        "prompt and length of documents and leaves out the tokens of its skip list.",
    )
    prompt: str | None = option(None, "Text put before every str, instead of the task's prompt.")
    prompt_name: str | None = option(None, "The prompt of the checkpoint with this name.")
    normalize: bool | None = option(None, "Unit length; None is as the checkpoint says.")
    precision: Precision = option(
        "float32", "float32, float16, int8, uint8, binary or ubinary, as in embed."
    )
    ranges: npt.ArrayLike | None = option(
        None, "f32 [2, dimensions], minima and maxima, which int8 and uint8 need."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task not in ("query", "document"):
            raise OptionError(f"task must be 'query' or 'document', got {shown(self.task)}")


@task(item=np.ndarray)
def embed_tokens(
    context: TaskContext, texts: Texts, options: TokenOptions
) -> TaskCall[TokenEmbeddings]:
    """A vector for each token of each text, as MultiVectorEncoder gives them.

    truncate: cut a text beyond the task's length; else it is a TooLongError.
    A failed text has no vectors, its error is in `errors`. bytetx.maxsim scores the results.
    Raises InputError where the checkpoint gives no vectors of tokens.
    """
    size, job = token_task(context, options)
    reader = _reader(context, options)
    reader.prompt = _prompt(context, options)
    dtype, columns = np.dtype(np.float32), size
    if job.quantizer is not None:
        dtype, columns = job.quantizer.dtype, job.quantizer.size(size)
    empty = np.empty((0, columns), dtype=dtype)
    return TaskCall("embed_tokens", texts, job, reader, token_sink(empty))


def token_task(context: TaskContext, options: TokenOptions) -> tuple[int, TokenVectorTask]:
    """(numbers of a vector, the task); InputError where the checkpoint gives no such vectors."""
    checkpoint, task = context.checkpoint, options.task
    spec, modules = checkpoint.sentence.multi_vector, checkpoint.token_modules
    if spec is None and not modules:
        raise context.no_head_error(
            "gives no vectors of tokens: it is neither a multi-vector model (ColBERT) nor has "
            "it BGE-M3's colbert_linear; use embed, or hidden_states"
        )
    if options.normalize is False:
        modules = tuple(module for module in modules if not isinstance(module, Normalize))
    elif options.normalize and not any(isinstance(module, Normalize) for module in modules):
        modules = (*modules, _NORMALIZE)
    size = output_size(context.output_size, ("tokens",), modules)
    quantizer = make_quantizer(
        options.precision, options.ranges, dim=size, device=checkpoint.device
    )
    if quantizer is not None and quantizer.needs_ranges:
        raise OptionError(
            f"precision {options.precision} of token vectors needs ranges (f32 [2, {size}], minima "
            "and maxima)"
        )
    if spec is None:
        return size, TokenVectorTask(modules, num_skipped_first=1, quantizer=quantizer)
    expansion = spec.expansion if task == "query" else None
    pooling = spec.token_pooling
    if pooling is not None and task in pooling.tasks:
        check_token_pooling()
    else:
        pooling = None
    return size, TokenVectorTask(
        (torch.Tensor.float, *modules),
        skipped_ids=_skipped_ids(context, spec) if task in spec.skiplist_tasks else None,
        hides_expansion=expansion is not None and not expansion.attends,
        quantizer=quantizer,
        pooling=pooling,
    )


def _skipped_ids(context: TaskContext, spec: MultiVectorSpec) -> np.ndarray:
    """int32: tokens of the skip list; a word that is no token of its own is none."""
    backend = context.need_tokenizer().backend
    ids = (backend.token_to_id(word) for word in spec.skiplist_words)
    return np.array([token_id for token_id in ids if token_id is not None], dtype=np.int32)


def _reader(context: TaskContext, options: TokenOptions) -> InputReader:
    """A reader with the task's length and expansion."""
    reader, is_query = context.reader(options), options.task == "query"
    spec = context.checkpoint.sentence.multi_vector
    if spec is None:
        return reader
    length = spec.query_length if is_query else spec.document_length
    expansion = spec.expansion if is_query else None
    if expansion is not None:
        if expansion.is_fixed:
            length = expansion.length
        elif length is not None:
            length = max(length, expansion.length)
        reader.expansion = _expansion(context, expansion)
    if length is not None:
        reader.max_tokens = length
        if context.tokenizer is not None:
            reader.tokenizer = context.tokenizer.limited(length)
    return reader


def _expansion(context: TaskContext, expansion: QueryExpansion) -> Expansion:
    if expansion.length > context.spec.max_positions:
        raise InputError(
            f"the checkpoint expands queries to {expansion.length} tokens, and the model takes "
            f"at most {context.spec.max_positions}"
        )
    if not expansion.attends:
        reason = why_no_unseen_tokens(context.checkpoint.transformer, length=expansion.length)
        if reason is not None:
            raise InputError(
                "the checkpoint expands queries by tokens that no other token sees "
                f"(query_expansion with attend false), which bytetx does not run for {reason}"
            )
    tokenizer = context.need_tokenizer()
    token_id = tokenizer.mask_token_id
    if expansion.token is not None:
        token_id = tokenizer.backend.token_to_id(expansion.token)
    if token_id is None:
        raise InputError(
            f"the checkpoint expands queries by {expansion.token or 'the mask token'}, which "
            "its tokenizer does not have"
        )
    return Expansion(token_id, expansion.length, expansion.attends)


def _prompt(context: TaskContext, options: TokenOptions) -> str:
    sentence, prompt_name = context.checkpoint.sentence, options.prompt_name
    if options.prompt is not None:
        check_text("prompt", options.prompt)
    elif prompt_name is None:
        names = PROMPT_NAMES[options.task]
        prompt_name = next((name for name in names if name in sentence.prompts), None)
    return sentence.prompt_text(options.prompt, prompt_name)
