"""Typed questions about a state, answered by a probability for each option: no token is generated.

The answers are those of transformers' decision pipeline. A causal model scores an option by the
logit of its label's token, a decision head by its own rows.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from bytetx.arguments import check_iterable
from bytetx.checkpoint.decision_files import DecisionConfig
from bytetx.encode.step import Step, are_finite
from bytetx.errors import InputError, OptionError, shown
from bytetx.nn.heads import DecisionHead, LmHead
from bytetx.nn.transformer import Transformer
from bytetx.ops.pooling import largest
from bytetx.packed import upload
from bytetx.requests.decisions import DecisionReader, PromptQuestions, Question
from bytetx.tasks.call import TaskCall, list_sink
from bytetx.tasks.context import TaskContext
from bytetx.tasks.results import Results
from bytetx.tasks.task import TaskOptions, option, task

Decision = dict[str, dict[str, Any]]
Order = Literal["given", "average"]


@dataclass(frozen=True, kw_only=True)
class DecideOptions(TaskOptions):
    """Options of decide."""

    order: Order = option(
        "given",
        "'average' asks each choice question of n options n times, each time with another option "
        "first (the n cyclic orders), and gives the mean of the probabilities: n times the cost.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in ("given", "average"):
            raise OptionError(f"order must be given or average, got {shown(self.order)}")


@task(item=Decision)
def decide(
    context: TaskContext,
    requests: Iterable[Mapping[str, Any] | str],
    options: DecideOptions,
) -> TaskCall[Results[Decision]]:
    """The answers to each request's typed questions, by the name of the question.

    requests: {"state": any JSON, "questions": {name: {"type": ..., "instructions": ...,
    "criteria": ...}}}, or its JSON.  type: noul (criteria, optional, describe "true" and "false"),
    choice (criteria: each option's description or None) or score (criteria: levels, lowest first).
    An answer is {"type": "noul", "noul": p}, {"type": "choice", "choice", "confidence",
    "probabilities"} or {"type": "score", "score", "legend", "confidence", "probabilities"}.
    The model is any causal one with a chat template, or has a decision head (JEV); decision.json
    and decision_template.jinja of the checkpoint say how it is asked.
    Raises InputError where the checkpoint is neither, or a request has not its form.
    """
    if isinstance(requests, Mapping):
        raise InputError("requests must be a list of requests, got one; put it in a list")
    check_iterable("requests", requests)
    scorer = scorer_of(context)
    reader = DecisionReader(
        context.spec,
        context.need_tokenizer(),
        keeps_errors=options.on_error == "return",
        maker=context.decision_prompts,
        averages=options.order == "average",
        check=scorer.columns,
    )
    job = DecideTask(scorer, context.checkpoint.decisions)
    items: Any = requests  # which this reader takes
    return TaskCall("decide", items, job, reader, list_sink, merge=merged_answers)


@dataclass(frozen=True, slots=True)
class LabelScorer:
    """Scores of options by the logits of their labels' tokens."""

    head: LmHead
    label_ids: Mapping[str, int]
    token_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(dict.fromkeys(self.label_ids.values())))

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, embedding_size] -> f32 [n, number of labels]."""
        return self.head.token_logits(rows, self.token_ids)

    def columns(self, question: Question) -> Sequence[int]:
        """The score of each option. InputError where labels are not distinct tokens."""
        ids = [self.label_ids.get(label) for label in question.labels]
        if None in ids or len(set(ids)) < len(ids):
            raise InputError(
                f"has the labels {shown(list(question.labels))}, which are not distinct single "
                f"tokens of this model; name others in decision.json (labels.{question.type})"
            )
        return [self.token_ids.index(own) for own in ids if own is not None]


@dataclass(frozen=True, slots=True)
class HeadScorer:
    """Scores of options by a decision head."""

    head: DecisionHead

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, hidden_size] -> f32 [n, num_verbalizers]."""
        return self.head.forward(rows)

    def columns(self, question: Question) -> Sequence[int]:
        """The score of each option. InputError where the head has too few."""
        first, count = self.head.offsets[question.type], len(question.options)
        if first + count > self.head.out.n:
            raise InputError(
                f"has {count} options, and the head of this model scores {self.head.out.n - first} "
                f"of a {question.type} question; ask about fewer"
            )
        return range(first, first + count)


Scorer = LabelScorer | HeadScorer


def scorer_of(context: TaskContext) -> Scorer:
    """The checkpoint's scores of options. InputError where it has neither head."""
    if context.heads.decision is not None:
        return HeadScorer(context.heads.decision)
    head = context.need_head(context.heads.lm, "language model")
    ids = context.checkpoint.decisions.label_ids(context.need_tokenizer())
    known = {label: own for label, own in ids.items() if own < context.spec.vocab_size}
    return LabelScorer(head, known)


@dataclass(frozen=True, slots=True)
class Probabilities:
    """The probability of each option of a question; of one of its orders where it has several."""

    question: Question
    by_option: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DecideTask:
    """The options of the questions of each prompt, from the rows before its marks."""

    scorer: Scorer
    config: DecisionConfig
    shares_pass: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return ("decide", id(self.scorer.head), id(self.config))

    @property
    def capture(self) -> None:
        """None: only the host knows which rows are read."""
        return None

    @torch.inference_mode()
    def compute(self, transformer: Transformer, step: Step) -> tuple[torch.Tensor, ...]:
        batch = step.batch
        if batch.shared is None:
            return self.reduce(transformer.forward(batch), step)
        shared = batch.shared.only(_rows_before_marks(step))
        return self._scores(transformer.forward(replace(batch, shared=shared)))

    @torch.inference_mode()
    def reduce(self, hidden_states: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        """(f32 [number of questions, number of scores], `largest` of each), in the order of the
        step's prompts, from the last hidden states."""
        return self._scores(hidden_states[_rows_before_marks(step)])

    def _scores(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.scorer.scores(rows)
        return scores, largest(scores)

    def are_finite(self, outputs: tuple[np.ndarray, ...], step: Step) -> np.ndarray:
        counts = [len(asked.questions) for asked in _asked(step)]
        return are_finite(outputs[1], np.array(counts))

    def finish(self, outputs: tuple[np.ndarray, ...], step: Step) -> list[list[Probabilities]]:
        """The probabilities of each prompt's questions, in its order."""
        asked = _asked(step)
        chances = iter(self._chances(outputs[0], [one for each in asked for one in each.questions]))
        return [
            [Probabilities(one, dict(zip(one.options, next(chances), strict=True))) for one in each]
            for each in (prompt.questions for prompt in asked)
        ]

    def _chances(self, scores: np.ndarray, questions: Sequence[Question]) -> list[list[float]]:
        """The probability of each option of each question, whose scores are a row."""
        alike: dict[Hashable, list[int]] = {}
        for row, question in enumerate(questions):
            alike.setdefault((question.type, *question.labels), []).append(row)
        found: list[list[float]] = [[]] * len(questions)
        for rows in alike.values():
            first = questions[rows[0]]
            own = scores[np.ix_(rows, self.scorer.columns(first))].astype(np.float64)
            own /= self.config.temperature_of(first.type)
            weights = np.exp(own - own.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            for row, chances in zip(rows, weights.tolist(), strict=True):
                found[row] = chances
        return found


def _asked(step: Step) -> Sequence[PromptQuestions]:
    found: Any = step.requests.alignments  # DecisionReader gives them
    asked: Sequence[PromptQuestions] = found
    return asked


def _rows_before_marks(step: Step) -> torch.Tensor:
    """int64, on the device: the packed row before the mark of each question."""
    starts = step.requests.cu_seqlens[:-1].tolist()
    rows = [
        start + mark - 1
        for start, asked in zip(starts, _asked(step), strict=True)
        for mark in asked.marks[: len(asked.questions)]
    ]
    return upload(torch.tensor(rows, dtype=torch.int64), step.batch.device)


def merged_answers(prompts: Sequence[Sequence[Probabilities]]) -> Decision:
    """The answers of a request from the probabilities of its prompts."""
    chances: dict[str, list[Probabilities]] = {}
    for one in (one for prompt in prompts for one in prompt):
        orders = chances.setdefault(one.question.name, [])
        if len(orders) < one.question.num_orders:  # a prompt of several repeats short questions
            orders.append(one)
    return {name: _answer(orders) for name, orders in chances.items()}


def _answer(orders: Sequence[Probabilities]) -> dict[str, Any]:
    """The answer to a question; each entry of `orders` is one order of its options."""
    question = orders[0].question
    by_option = {
        option: sum(one.by_option[option] for one in orders) / len(orders)
        for option in question.options
    }
    if question.type == "noul":
        return {"type": "noul", "noul": by_option["true"]}
    best = max(by_option, key=lambda option: by_option[option])
    if question.type == "choice":
        return {
            "type": "choice",
            "choice": best,
            "confidence": _above_uniform(by_option[best], len(by_option)),
            "probabilities": by_option,
        }
    chances = list(by_option.values())
    return {
        "type": "score",
        "score": sum(level * chance for level, chance in enumerate(chances)),
        "legend": dict(zip(question.options, question.descriptions, strict=True)),
        "confidence": _nearness(chances, int(best)),
        "probabilities": by_option,
    }


def _above_uniform(chance: float, num_options: int) -> float:
    """0 for a probability of 1 / num_options or less, 1 for certainty."""
    if num_options == 1:
        return 1.0
    return max(0.0, (chance - 1 / num_options) / (1 - 1 / num_options))


def _nearness(chances: Sequence[float], best: int) -> float:
    """1 less the mean distance from the best level, in units of what equal chances would have from
    the middle; at least 0."""
    if len(chances) == 1:
        return 1.0
    middle = (len(chances) - 1) / 2
    distance = sum(chance * abs(level - best) for level, chance in enumerate(chances))
    spread = sum(abs(level - middle) for level in range(len(chances))) / len(chances)
    return max(0.0, 1 - distance / spread)
