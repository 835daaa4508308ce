"""A vector for each token of a text (ColBERT, BGE-M3), as queries or as documents."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

import numpy as np
import numpy.typing as npt
import torch

from bytetx.arguments import check_text
from bytetx.checkpoint.multi_vector import MultiVectorSpec, TokenPoolingSpec
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.encode.finite import are_finite
from bytetx.encode.step import Capture, Step
from bytetx.errors import InputError, OptionError, shown
from bytetx.nn.sentence_modules import Normalize
from bytetx.nn.transformer import Transformer
from bytetx.nn.unseen_tokens import forward_with_unseen, why_no_unseen_tokens
from bytetx.requests.inputs import Expansion, InputReader
from bytetx.tasks.adapted import PROMPT_NAMES
from bytetx.tasks.call import Call
from bytetx.tasks.embed import output_size
from bytetx.tasks.one_pass import OnePass
from bytetx.tasks.options import No, OnError, Raise, Return, Texts, TokenOptions, Yes
from bytetx.tasks.precision import (
    Precision,
    Quantizer,
    make_quantizer,
    needs_ranges,
    quantized,
)
from bytetx.tasks.results import Stream
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


class TokenVectorMixin(OnePass):
    """Model.embed_tokens."""

    @overload
    def embed_tokens(
        self, texts: Texts, *, stream: No = ..., on_error: OnError = ..., **o: Unpack[TokenOptions]
    ) -> TokenEmbeddings: ...

    @overload
    def embed_tokens(
        self, texts: Texts, *, stream: Yes, on_error: Raise = ..., **o: Unpack[TokenOptions]
    ) -> Stream[np.ndarray]: ...

    @overload
    def embed_tokens(
        self, texts: Texts, *, stream: Yes, on_error: Return, **o: Unpack[TokenOptions]
    ) -> Stream[np.ndarray | InputError]: ...

    def embed_tokens(
        self,
        texts: Texts,
        *,
        task: Literal["query", "document"] = "document",
        prompt: str | None = None,
        prompt_name: str | None = None,
        normalize: bool | None = None,
        precision: Precision = "float32",
        ranges: npt.ArrayLike | None = None,
        truncate: bool = False,
        on_error: OnError = "raise",
        stream: bool = False,
        show_progress: bool = False,
    ) -> TokenEmbeddings | Stream[Any]:
        """A vector for each token of each text, as MultiVectorEncoder gives them.

        task: "query" takes the checkpoint's prompt, length and expansion of queries, "document"
        its prompt and length of documents and leaves out the tokens of its skip list.
        prompt, prompt_name: instead of the task's own.  normalize: None as the checkpoint says.
        precision, ranges: as in embed; int8 and uint8 need ranges.  truncate: cut a text beyond
        the task's length; else it is a TooLongError.
        A failed text has no vectors, its error is in `errors`. bytetx.maxsim scores the results.
        Raises InputError where the checkpoint gives no vectors of tokens.
        """
        call = self._tokens_call(
            texts,
            task=task,
            prompt=prompt,
            prompt_name=prompt_name,
            normalize=normalize,
            precision=precision,
            ranges=ranges,
            truncate=truncate,
            on_error=on_error,
        )
        if stream:
            return self._stream(call, show_progress=show_progress)
        return self._perform(call, show_progress=show_progress)

    def _tokens_call(
        self,
        texts: Texts,
        *,
        task: Literal["query", "document"],
        prompt: str | None,
        prompt_name: str | None,
        normalize: bool | None,
        precision: Precision,
        ranges: npt.ArrayLike | None,
        truncate: bool,
        on_error: OnError,
    ) -> Call[TokenEmbeddings]:
        """Model.embed_tokens, ready to run."""
        if task not in ("query", "document"):
            raise OptionError(f"task must be 'query' or 'document', got {shown(task)}")
        size, job = self._token_task(task, normalize, precision=precision, ranges=ranges)
        reader = self._token_reader(task, truncate=truncate, on_error=on_error)
        reader.prompt = self._token_prompt(task, prompt, prompt_name)
        dtype, columns = np.dtype(np.float32), size
        if job.quantizer is not None:
            dtype, columns = job.quantizer.dtype, job.quantizer.size(size)
        empty = np.empty((0, columns), dtype=dtype)
        return Call("embed_tokens", texts, job, reader, token_sink(empty))

    def _token_task(
        self,
        task: str,
        normalize: bool | None,
        *,
        precision: str = "float32",
        ranges: npt.ArrayLike | None = None,
    ) -> tuple[int, TokenVectorTask]:
        """(numbers of a vector, the task)"""
        checkpoint = self.checkpoint
        spec, modules = checkpoint.sentence.multi_vector, checkpoint.token_modules
        if spec is None and not modules:
            raise InputError(
                f"this checkpoint ({', '.join(self.spec.architectures) or 'no architecture'}) "
                "gives no vectors of tokens: it is neither a multi-vector model (ColBERT) nor has "
                "it BGE-M3's colbert_linear; use embed, or hidden_states"
            )
        if normalize is False:
            modules = tuple(module for module in modules if not isinstance(module, Normalize))
        elif normalize and not any(isinstance(module, Normalize) for module in modules):
            modules = (*modules, _NORMALIZE)
        size = output_size(self.spec.output_size, ("tokens",), modules)
        quantizer = make_quantizer(precision, ranges, dim=size, device=checkpoint.device)
        if needs_ranges(quantizer):
            raise OptionError(
                f"precision {precision} of token vectors needs ranges (f32 [2, {size}], minima "
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
            skipped_ids=self._skipped_ids(spec) if task in spec.skiplist_tasks else None,
            hides_expansion=expansion is not None and not expansion.attends,
            quantizer=quantizer,
            pooling=pooling,
        )

    def _skipped_ids(self, spec: MultiVectorSpec) -> np.ndarray:
        """int32: tokens of the skip list; a word that is no token of its own is none."""
        tokenizer = self._need_tokenizer()
        ids = (tokenizer.backend.token_to_id(word) for word in spec.skiplist_words)
        return np.array([token_id for token_id in ids if token_id is not None], dtype=np.int32)

    def _token_reader(self, task: str, *, truncate: bool, on_error: str) -> InputReader:
        """A reader with the task's length and expansion."""
        reader = self._reader(truncate=truncate, on_error=on_error)
        spec = self.checkpoint.sentence.multi_vector
        if spec is None:
            return reader
        length = spec.query_length if task == "query" else spec.document_length
        expansion = spec.expansion if task == "query" else None
        if expansion is not None:
            if expansion.is_fixed:
                length = expansion.length
            elif length is not None:
                length = max(length, expansion.length)
            reader.expansion = self._expansion(spec, self._need_tokenizer())
        if length is not None:
            reader.max_tokens = length
            if self.tokenizer is not None:
                reader.tokenizer = self.tokenizer.limited(length)
        return reader

    def _expansion(self, spec: MultiVectorSpec, tokenizer: Tokenizer) -> Expansion:
        expansion = spec.expansion
        assert expansion is not None  # the caller asked
        if expansion.length > self.spec.max_positions:
            raise InputError(
                f"the checkpoint expands queries to {expansion.length} tokens, and the model takes "
                f"at most {self.spec.max_positions}"
            )
        if not expansion.attends:
            reason = why_no_unseen_tokens(self.checkpoint.transformer, length=expansion.length)
            if reason is not None:
                raise InputError(
                    "the checkpoint expands queries by tokens that no other token sees "
                    f"(query_expansion with attend false), which bytetx does not run for {reason}"
                )
        token_id = tokenizer.mask_token_id
        if expansion.token is not None:
            token_id = tokenizer.backend.token_to_id(expansion.token)
        if token_id is None:
            raise InputError(
                f"the checkpoint expands queries by {expansion.token or 'the mask token'}, which "
                "its tokenizer does not have"
            )
        return Expansion(token_id, expansion.length, expansion.attends)

    def _token_prompt(self, task: str, prompt: str | None, prompt_name: str | None) -> str:
        sentence = self.checkpoint.sentence
        if prompt is not None:
            check_text("prompt", prompt)
        if prompt is None and prompt_name is None:
            names = PROMPT_NAMES[task]
            prompt_name = next((name for name in names if name in sentence.prompts), None)
        return sentence.prompt_text(prompt, prompt_name)
