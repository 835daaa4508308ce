"""Reranking by any chat model or decision head: a question about each document, or about all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bytetx.arguments import text_fault
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.errors import InputError, OptionError
from bytetx.requests.decisions import DecisionPrompts, DecisionReader
from bytetx.tasks.call import ListSink, TaskCall
from bytetx.tasks.context import TaskContext
from bytetx.tasks.decide import DecideTask, Probabilities, scorer_of
from bytetx.tasks.pair_prompts import INSTRUCTION_MARK
from bytetx.tasks.results import Hit, Results

_EACH = "Does the document answer the query?"
_ALL = "Which of these documents answers the query best?"
# Where a probability is 0, its logarithm is that of the smallest double.
_LEAST = 1e-300
# Tokens that a document may lose beside its own where it is cut: its last one may be divided anew.
_SLACK = 8


def asks_about_documents(context: TaskContext) -> bool:
    """Whether the checkpoint answers questions: it has the head, and a template to ask by."""
    checkpoint = context.checkpoint
    has_head = context.heads.lm is not None or context.heads.decision is not None
    templates = (checkpoint.chat_template, checkpoint.decision_template)
    return has_head and context.tokenizer is not None and any(templates)


def ask_about_documents(
    context: TaskContext,
    query: str,
    documents: Sequence[str],
    *,
    instruction: str | None,
    listwise: bool,
    raw_scores: bool,
    truncate: bool,
    top_k: int | None,
    keeps_errors: bool,
) -> TaskCall[Results[Hit]]:
    """rerank by questions; arguments as of its options.

    Raises InputError as decide does, OptionError for an instruction that a template leaves out.
    """
    scorer, prompts = scorer_of(context), context.decision_prompts
    tokenizer = context.need_tokenizer()
    if instruction and context.checkpoint.decision_template is not None:
        _check_instruction(prompts, listwise=listwise)
    reader = DecisionReader(
        context.spec,
        tokenizer,
        keeps_errors=keeps_errors,
        maker=prompts,
        check=scorer.columns,
        name="documents",
        parts=_parts(instruction, listwise=listwise, truncate=truncate),
    )
    job = DecideTask(scorer, context.checkpoint.decisions)
    if listwise:
        request = _about_all(query, documents, instruction)
        reader.name = "prompts"

        def spread(found: Results[Any]) -> Results[Hit]:
            scores = found[0] if found else []
            return best_hits(Results(scores, found.stats, {}), documents, top_k)

        requests = [request] if documents else []
        merge = _of_all(raw_scores)
        reader.keeps_errors = False  # one prompt has all documents
        return TaskCall("rerank", requests, job, reader, lambda _: ListSink(spread), merge=merge)
    cut = [False] * len(documents)
    texts = list(documents)
    if truncate:
        room = _room(prompts, tokenizer, query, instruction)
        for place, text in enumerate(documents):
            if text_fault(text) is None:
                texts[place] = cut_text(tokenizer, text, room)
                cut[place] = len(texts[place]) < len(text)
    each: Any = [_about_one(query, text, instruction) for text in texts]

    def gather(found: Results[Any]) -> Results[Hit]:
        stats = replace(found.stats, num_truncated=found.stats.num_truncated + sum(cut))
        return best_hits(Results(found, stats, found.errors), documents, top_k)

    merge = _of_one(raw_scores)
    return TaskCall("rerank", each, job, reader, lambda _: ListSink(gather), merge=merge)


def best_hits(scores: Results[Any], documents: Sequence[str], top_k: int | None) -> Results[Hit]:
    """The documents that have a score, best first."""
    hits = [
        Hit(index, score, documents[index])
        for index, score in enumerate(scores)
        if index not in scores.errors
    ]
    hits.sort(key=lambda hit: hit.score, reverse=True)
    return Results(hits[:top_k], scores.stats, scores.errors)


def _check_instruction(prompts: DecisionPrompts, *, listwise: bool) -> None:
    """Raises OptionError where the checkpoint's template does not write it."""
    make = partial(_about_all, "", ["", ""]) if listwise else partial(_about_one, "", "")
    state, questions = prompts.read(make(INSTRUCTION_MARK), averages=False)
    if INSTRUCTION_MARK not in prompts.render(state, questions):
        raise OptionError(
            "the checkpoint's decision_template.jinja does not write the instructions of a "
            "question, so that the instruction would change nothing; leave it out, or put it into "
            "the query"
        )


def _about_one(query: str, document: object, instruction: str | None) -> object:
    """A request, or what the reader refuses: a document that is no text."""
    if not isinstance(document, str):
        return document
    question = {"type": "noul", "instructions": instruction or _EACH}
    return {"state": f"Query: {query}\nDocument: {document}", "questions": {"document": question}}


def _about_all(query: str, documents: Sequence[str], instruction: str | None) -> Any:
    for index, document in enumerate(documents):
        fault = text_fault(document)
        if fault is not None:
            raise InputError(f"documents[{index}] {fault}")
    named = {str(number): document for number, document in enumerate(documents, start=1)}
    question = {"type": "choice", "instructions": instruction or _ALL, "criteria": named}
    return {"state": f"Query: {query}", "questions": {"document": question}}


def _of_one(raw_scores: bool) -> Any:
    """Makes the score of a document: the probability of true, or its log-odds."""

    def score(prompts: Sequence[Sequence[Probabilities]]) -> float:
        chances = prompts[0][0].by_option
        if not raw_scores:
            return chances["true"]
        return _log(chances["true"]) - _log(chances["false"])

    return score


def _of_all(raw_scores: bool) -> Any:
    """Makes the scores of all documents, in their order: probabilities, or their logarithms."""

    def scores(prompts: Sequence[Sequence[Probabilities]]) -> list[float]:
        chances: Mapping[str, float] = prompts[0][0].by_option
        return [_log(one) if raw_scores else one for one in chances.values()]

    return scores


def _parts(instruction: str | None, *, listwise: bool, truncate: bool) -> str:
    """Name what the caller may shorten of a prompt; a document that is cut is none of it."""
    documents = "the documents (or give fewer)" if listwise else "the document"
    parts = ["the query", *(["the instruction"] if instruction else [])]
    parts = parts if truncate and not listwise else [documents, *parts]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _log(chance: float) -> float:
    return math.log(max(chance, _LEAST))


def _room(
    prompts: DecisionPrompts, tokenizer: Tokenizer, query: str, instruction: str | None
) -> int:
    """Tokens that a document may have in its prompt."""
    state, questions = prompts.read(_about_one(query, "", instruction), averages=False)
    around = prompts.encoder.encode([prompts.render(state, questions)])[0]
    return max(tokenizer.max_tokens - len(around) - _SLACK, 0)


def cut_text(tokenizer: Tokenizer, text: str, room: int) -> str:
    """The beginning of a text that has at most `room` tokens."""
    encoding = tokenizer.untruncated().encode([text], with_offsets=True)[0]
    if len(encoding.ids) <= room:
        return text
    return text[: encoding.offsets[room][0]] if room else ""
