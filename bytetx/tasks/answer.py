"""Extractive question answering: spans of a context, scored as Hugging Face's pipeline does."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from bytetx.arguments import check_not_negative, check_positive, check_top_k
from bytetx.encode.request import Alignment
from bytetx.encode.step import Capture, Step, are_finite
from bytetx.nn.heads import ClassificationHead
from bytetx.nn.transformer import Transformer
from bytetx.ops.pooling import largest
from bytetx.requests.questions import QuestionReader
from bytetx.tasks.call import TaskCall, list_sink
from bytetx.tasks.classify import softmax
from bytetx.tasks.context import TaskContext
from bytetx.tasks.results import Answer, Results
from bytetx.tasks.task import Pairs, TaskOptions, option, task

# Scores of tokens that no answer may have, before the softmax.
_MASKED = -10000.0


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(TaskOptions):
    """Options of answer."""

    top_k: int = option(1, "Answers of each context.", min=1)
    max_answer_tokens: int = option(15, "The most tokens of an answer.", min=1)
    allow_no_answer: bool = option(
        False, "An empty answer is one of them, scored by the first token, as of SQuAD 2.0."
    )
    whole_words: bool = option(True, "Widen answers so that none has a part of a word.")
    chunk_tokens: int | None = option(
        None, "Tokens of a chunk of a long context; None is as many as the model takes.", min=1
    )
    stride: int = option(
        128, "Tokens of the context that neighbouring chunks share, at most half a chunk's.", min=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_top_k(self.top_k, may_be_none=False)
        check_positive("max_answer_tokens", self.max_answer_tokens)
        if self.chunk_tokens is not None:
            check_positive("chunk_tokens", self.chunk_tokens)
        check_not_negative("stride", self.stride)


@task(item=list[Answer])
def answer(
    context: TaskContext, texts: Pairs, options: AnswerOptions
) -> TaskCall[Results[list[Answer]]]:
    """The spans of each context that answer its question best, with character offsets.

    texts: (question, context) pairs.  A long context is cut into chunks, each with the whole
    question. Scores are those of Hugging Face's question-answering pipeline (a softmax over each
    chunk).
    Raises InputError where the checkpoint has no head for question answering.
    """
    head = context.need_head(context.heads.question_answering, "question answering")
    tokenizer = context.need_tokenizer()
    job = AnswerTask(
        head,
        options.top_k,
        options.max_answer_tokens,
        options.allow_no_answer,
        options.whole_words,
    )
    limit = min(tokenizer.max_tokens, options.chunk_tokens or tokenizer.max_tokens)
    reader = QuestionReader(
        context.spec,
        tokenizer,
        keeps_errors=options.on_error == "return",
        chunk_tokens=limit,
        stride=min(options.stride, limit // 2),
    )
    return TaskCall("answer", texts, job, reader, list_sink, merge=job.merge)


@dataclass(frozen=True, slots=True)
class ChunkAnswers:
    """The best spans of one chunk of a context, and the score of "no answer" there."""

    answers: list[Answer]
    no_answer_score: float


@dataclass(frozen=True, slots=True)
class AnswerTask:
    """top_k: answers of a context.  max_answer_tokens: of a span.  allow_no_answer: an empty
    answer competes, by the first token's score.  whole_words: spans are widened to words.
    """

    head: ClassificationHead
    top_k: int
    max_answer_tokens: int
    allow_no_answer: bool
    whole_words: bool
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        options = (self.top_k, self.max_answer_tokens, self.allow_no_answer, self.whole_words)
        return ("answer", id(self.head), *options)

    @property
    def capture(self) -> Capture:
        return Capture(("answer", id(self.head)), rows="tokens")

    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        return self.reduce(transformer.forward(step.batch), step)

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """f32 [total_tokens, 2], logits of each token as an answer's first and its last one, and
        f32 [total_tokens], `largest` of each."""
        logits = self.head.forward(hidden_states).float()
        return logits, largest(logits)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        return are_finite(outputs[1], step.requests.seqlens)

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[ChunkAnswers]:
        ends = np.cumsum(step.requests.seqlens)[:-1]
        alignments = step.requests.alignments
        assert alignments is not None  # QuestionReader gives them
        logits = np.split(outputs[0], ends)
        return [self._of_chunk(*pair) for pair in zip(logits, alignments, strict=True)]

    def _of_chunk(self, logits: np.ndarray, alignment: Alignment) -> ChunkAnswers:
        sequence_ids = alignment.sequence_ids
        assert sequence_ids is not None
        in_context = np.array([sequence == 1 for sequence in sequence_ids], dtype=bool)
        may_score = in_context.copy()
        may_score[:1] = True  # the first token stands for "no answer"
        masked = np.where(may_score[:, np.newaxis], logits, np.float32(_MASKED))
        scores = softmax(masked.T)
        starts, ends = scores[0], scores[1]
        no_answer = float(starts[0] * ends[0])
        if not in_context.any():
            return ChunkAnswers([], no_answer)
        # The context's tokens follow each other.
        first = int(in_context.argmax())
        inside = slice(first, first + int(in_context.sum()))
        spans = self._best_spans(starts[inside], ends[inside])
        found = [
            self._answer(alignment, first + start, first + end, score)
            for start, end, score in spans
        ]
        return ChunkAnswers(found, no_answer)

    def _best_spans(self, starts: np.ndarray, ends: np.ndarray) -> list[tuple[int, int, float]]:
        """The top_k of (start, end, probability), best first; ties by their place."""
        width = min(self.max_answer_tokens, len(starts))
        padded = np.concatenate([ends, np.zeros(width - 1, dtype=ends.dtype)])
        products = starts[:, np.newaxis] * np.lib.stride_tricks.sliding_window_view(padded, width)
        flat = products.ravel()
        top_k = min(self.top_k, flat.size)
        best = np.argpartition(-flat, top_k - 1)[:top_k]
        best = best[np.lexsort((best, -flat[best]))]
        pairs = ((int(i) // width, int(i) % width, float(flat[i])) for i in best)
        return [(start, start + n, p) for start, n, p in pairs if start + n < len(ends)]

    def _answer(self, alignment: Alignment, start: int, end: int, score: float) -> Answer:
        text, offsets, words = alignment.text, alignment.offsets, alignment.word_ids
        assert text is not None and offsets is not None and words is not None
        begin, stop = offsets[start][0], offsets[end][1]
        if self.whole_words:
            begin = offsets[_reach(words, start, -1)][0]
            stop = offsets[_reach(words, end, 1)][1]
        return Answer(text[begin:stop], score, begin, stop)

    def merge(self, chunks: Sequence[ChunkAnswers]) -> list[Answer]:
        """The top_k answers of a context, best first; of equal spans, the better score stays."""
        best: dict[tuple[int, int], Answer] = {}
        for answer in (answer for chunk in chunks for answer in chunk.answers):
            span = answer.start, answer.end
            if span not in best or answer.score > best[span].score:
                best[span] = answer
        answers = list(best.values())
        if self.allow_no_answer:
            score = min(chunk.no_answer_score for chunk in chunks)
            answers.append(Answer("", score, 0, 0))
        answers.sort(key=lambda answer: answer.score, reverse=True)
        return answers[: self.top_k]


def _reach(words: Sequence[int | None], token: int, step: int) -> int:
    """The last token of `token`'s word in the direction of step."""
    word = words[token]
    if word is None:
        return token
    while 0 <= token + step < len(words) and words[token + step] == word:
        token += step
    return token
