"""Reranking by a listwise model (Jina reranker v3, v3.5): all documents of a query in a prompt."""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from bytetx.arguments import text_fault
from bytetx.checkpoint.spec import ModelSpec
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.encode.request import Requests
from bytetx.encode.step import Step, are_finite
from bytetx.errors import InputError, TooLongError
from bytetx.nn.heads import ClassificationHead
from bytetx.nn.transformer import Transformer
from bytetx.ops.pooling import largest
from bytetx.packed import upload
from bytetx.requests.inputs import InputReader
from bytetx.tasks.call import ListSink, TaskCall
from bytetx.tasks.context import TaskContext
from bytetx.tasks.document_questions import best_hits, cut_text
from bytetx.tasks.results import Hit, Results

# The prompt that the models were trained with.  Source: the hub's code of jina-reranker-v3.
_BEFORE = (
    "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the "
    "passages based on how relevant they are to the query. If the query is a question, how "
    "relevant a passage is depends on how well it answers the question. If not, try to analyze the "
    "intent of the query and assess how well each passage satisfies the intent. If an instruction "
    "is provided, you should follow the instruction when determining the ranking.<|im_end|>\n"
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
# The tokens whose last hidden states stand for a document and for the query.
_DOCUMENT_MARK, _QUERY_MARK = "<|embed_token|>", "<|rerank_token|>"
_MAX_BLOCK = 125  # documents of one prompt
_MAX_NESTED = 8  # marks in a text that appear where others are removed
_SLACK = 4  # tokens by which a passage in its prompt may exceed its parts


@dataclass(frozen=True, slots=True)
class _Limits:
    """Tokens of a query and of a document, as the authors' code cuts them.

    marks_both: whether the query has its mark at the beginning of the prompt, too.
    """

    query: int
    document: int
    marks_both: bool

    @classmethod
    def of(cls, spec: ModelSpec) -> "_Limits":
        """Those of v3.5 where some layers have windows, else those of v3."""
        layers = spec.layer_spec
        has_windows = any(layers.window_of(layer) for layer in range(spec.num_layers))
        return cls(1024, 8192, True) if has_windows else cls(512, 2048, False)


@dataclass(frozen=True, slots=True)
class ListwiseTask:
    """The vectors of a prompt's documents, in their order, and of its query, the last row.

    document_id, query_id: the tokens that have them; of several of a query, the last one.
    Source: jina-reranker-v3 (arXiv 2509.25085), section 3.
    """

    head: ClassificationHead
    document_id: int
    query_id: int
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return ("listwise", id(self.head))

    @property
    def capture(self) -> None:
        """None: only the host knows where the tokens are."""
        return None

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(transformer.forward(step.batch), step)

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """(f32 [num_documents + num_prompts, size], `largest` of each row)"""
        rows = upload(torch.from_numpy(self._rows(step.requests)[0]), hidden_states.device)
        vectors = self.head.forward(hidden_states[rows]).float()
        return vectors, largest(vectors)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return are_finite(outputs[1], self._rows(step.requests)[1])

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[np.ndarray]:
        ends = np.cumsum(self._rows(step.requests)[1])[:-1]
        return [rows.copy() for rows in np.split(outputs[0], ends)]

    def _rows(self, requests: Requests) -> tuple[np.ndarray, np.ndarray]:
        """(rows of the marks, int64, ascending; how many each prompt has)"""
        ids, bounds = requests.token_ids, requests.cu_seqlens
        queries = np.flatnonzero(ids == self.query_id)
        owners = np.searchsorted(bounds, queries, side="right")
        is_last = np.append(owners[1:] != owners[:-1], True)[: len(owners)]
        rows = np.sort(np.append(np.flatnonzero(ids == self.document_id), queries[is_last]))
        owners = np.searchsorted(bounds, rows, side="right") - 1
        return rows, np.bincount(owners, minlength=len(requests))


@dataclass(slots=True)
class _PromptBlocks:
    """The prompts of a call.

    prompts: token ids.  members: the documents of each, by index.  errors: of documents.
    num_truncated: documents that were cut.
    """

    prompts: list[list[int]] = field(default_factory=list)
    members: list[list[int]] = field(default_factory=list)
    errors: dict[int, InputError] = field(default_factory=dict)
    num_truncated: int = 0


def rank_list(
    context: TaskContext,
    head: ClassificationHead,
    query: str,
    documents: Sequence[str],
    *,
    instruction: str | None,
    reader: InputReader,
    top_k: int | None,
) -> TaskCall[Results[Hit]]:
    """rerank by a listwise model.

    Documents are divided into prompts as the authors do: of at most 125, and as many tokens as the
    model's window takes.  The query's vector is the mean of those of all prompts, each with the
    weight of its best document, and a score the cosine of a document's vector and this one.
    Raises InputError where the tokenizer lacks the model's marks, and for bad texts.
    """
    tokenizer = context.need_tokenizer()
    document_id, query_id = (
        tokenizer.backend.token_to_id(mark) for mark in (_DOCUMENT_MARK, _QUERY_MARK)
    )
    if document_id is None or query_id is None:
        raise InputError(
            f"this checkpoint's tokenizer has no tokens {_DOCUMENT_MARK!r} and {_QUERY_MARK!r}, by "
            "which its model ranks documents; add its tokenizer.json"
        )
    make = _PromptMaker(
        tokenizer, _Limits.of(context.spec), (document_id, query_id), reader.truncate
    )
    blocks = make.blocks(query, documents, instruction or "")
    if blocks.errors and not reader.keeps_errors:
        raise copy(blocks.errors[min(blocks.errors)])  # this frame holds the others

    def gather(found: Results[Any]) -> Results[Hit]:
        errors, scores = dict(blocks.errors), _scores(found, blocks.members)
        for number, error in found.errors.items():
            errors.update(dict.fromkeys(blocks.members[number], error))
        ordered = [scores.get(index, errors.get(index)) for index in range(len(documents))]
        stats = replace(
            found.stats,
            num_texts=len(documents),
            num_truncated=blocks.num_truncated,
            num_errors=len(errors),
        )
        return best_hits(Results(ordered, stats, errors), documents, top_k)

    job = ListwiseTask(head, document_id, query_id)
    return TaskCall("rerank", blocks.prompts, job, reader, lambda _: ListSink(gather))


def _scores(found: Results[Any], members: Sequence[Sequence[int]]) -> dict[int, float]:
    """The score of each document by its index, but of prompts without vectors."""
    blocks = [number for number in range(len(members)) if number not in found.errors]
    if not blocks:
        return {}
    vectors = [found[number].astype(np.float64) for number in blocks]
    queries = np.stack([rows[-1] for rows in vectors])
    best = [_cosines(rows[:-1], rows[-1]).max() for rows in vectors]
    weights = np.maximum((1.0 + np.array(best)) / 2.0, np.finfo(np.float64).tiny)
    query = np.average(queries, axis=0, weights=weights)
    scores: dict[int, float] = {}
    for number, rows in zip(blocks, vectors, strict=True):
        scores.update(zip(members[number], _cosines(rows[:-1], query).tolist(), strict=True))
    return scores


def _cosines(rows: np.ndarray, query: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(query)
    cosines: np.ndarray = rows @ query / np.maximum(norms, np.finfo(np.float64).tiny)
    return cosines


@dataclass(frozen=True, slots=True)
class _PromptMaker:
    """marks: the ids of the document's and of the query's."""

    tokenizer: Tokenizer
    limits: _Limits
    marks: tuple[int, int]
    truncate: bool

    def blocks(self, query: str, documents: Sequence[str], instruction: str) -> _PromptBlocks:
        """Raises InputError for a query, or an instruction, that cannot be in a prompt."""
        found, window = _PromptBlocks(), self.tokenizer.max_tokens
        instruction = _without_marks(instruction, "instruction")
        query, query_tokens, is_cut = self._fitted(
            _without_marks(query, "query"), "query", self.limits.query
        )
        found.num_truncated += is_cut
        render = self._renderer(query, instruction)
        frame, passage = self._num_tokens(render([])), self._num_tokens(render([""]))
        passage = passage - frame + _SLACK
        room = window - frame - passage
        if room < 0:
            raise TooLongError(
                f"query and instruction make a prompt of {frame} tokens without a document, the "
                f"model takes {window}; shorten them"
            )
        most = min(self.limits.document, room)
        texts: dict[int, str] = {}
        lengths: dict[int, int] = {}
        for index, document in enumerate(documents):
            name = f"documents[{index}]"
            try:
                if (fault := text_fault(document)) is not None:
                    raise InputError(f"{name} {fault}")
                text = _without_marks(document, name)
                texts[index], lengths[index], is_cut = self._fitted(text, name, most)
                found.num_truncated += is_cut
            except InputError as error:
                found.errors[index] = error.with_traceback(None)
        block: list[int] = []
        left = window - 2 * query_tokens
        for index, length in lengths.items():
            used = frame + sum(lengths[own] + passage for own in block)
            if block and used + length + passage > window:  # where the authors exceed the window
                self._add(found, block, render, texts)
                block, left = [], window - 2 * query_tokens
            block.append(index)
            left -= length
            if len(block) >= _MAX_BLOCK or left <= self.limits.document:
                self._add(found, block, render, texts)
                block, left = [], window - 2 * query_tokens
        if block:
            self._add(found, block, render, texts)
        return found

    def _add(
        self,
        found: _PromptBlocks,
        block: list[int],
        render: Callable[[Sequence[str]], str],
        texts: dict[int, str],
    ) -> None:
        ids = self.tokenizer.untruncated().encode_plain(render([texts[own] for own in block])).ids
        if [ids.count(mark) for mark in self.marks] != [len(block), 1 + self.limits.marks_both]:
            error = InputError(
                f"documents[{block[0]}] to documents[{block[-1]}] make a prompt with other marks "
                f"than its own: the tokenizer reads some text as {_DOCUMENT_MARK} or {_QUERY_MARK}"
            )
            found.errors.update(dict.fromkeys(block, error))
            return
        found.prompts.append(ids)
        found.members.append(block)

    def _fitted(self, text: str, name: str, limit: int) -> tuple[str, int, bool]:
        """(a text within a limit, its tokens, whether it was cut)"""
        count = self._num_tokens(text)
        if count <= limit:
            return text, count, False
        if not self.truncate:
            raise TooLongError(
                f"{name} has {count} tokens, the model takes {limit} of it; shorten it, or pass "
                "truncate=True"
            )
        return cut_text(self.tokenizer, text, limit), limit, True

    def _num_tokens(self, text: str) -> int:
        return len(self.tokenizer.untruncated().encode_plain(text).ids)

    def _renderer(self, query: str, instruction: str) -> Callable[[Sequence[str]], str]:
        early = _QUERY_MARK if self.limits.marks_both else ""
        told = f"<instruct>\n{instruction}\n</instruct>\n" if instruction else ""

        def render(texts: Sequence[str]) -> str:
            passages = "\n".join(
                f'<passage id="{number}">\n{text}{_DOCUMENT_MARK}\n</passage>'
                for number, text in enumerate(texts)
            )
            return (
                f"{_BEFORE}I will provide you with {len(texts)} passages, each indicated by a "
                "numerical identifier. Rank the passages based on their relevance to query: "
                f"{query}{early}\n{told}{passages}\n<query>\n{query}{_QUERY_MARK}\n</query>{_AFTER}"
            )

        return render


def _without_marks(text: str, name: str) -> str:
    """The text without the marks, which only the prompt may have."""
    for _ in range(_MAX_NESTED):
        if _DOCUMENT_MARK not in text and _QUERY_MARK not in text:
            return text
        text = text.replace(_QUERY_MARK, "").replace(_DOCUMENT_MARK, "")
    raise InputError(
        f"{name} holds the marks by which the model ranks, {_DOCUMENT_MARK} and {_QUERY_MARK}, "
        "within each other; leave them out"
    )
