"""POST /v1/systemone and /v1/decisions: typed questions in the forms of System One and OpenAI."""

from typing import Any

from starlette.responses import Response

from bytetx.errors import shown
from bytetx.serve.answers import check_characters, json_answer, run
from bytetx.serve.errors import ServeError
from bytetx.serve.gateway import Exchange
from bytetx.serve.routes_openai import find_model
from bytetx.serve.schemas import DecisionsRequest, SystemOneRequest

_KINDS = {"predicate": "noul", "choice": "choice", "score": "score"}


async def systemone(body: SystemOneRequest, exchange: Exchange) -> Response:
    """A probability for each option of typed questions about a state (System One)."""
    request = {"state": body.state, "questions": body.questions, "assets": body.assets}
    return await _decide(exchange, body.model, request)


async def decisions(body: DecisionsRequest, exchange: Exchange) -> Response:
    """The same in the form of OpenAI's Decisions; a body with a state is one of /v1/systemone."""
    if body.state is not None:
        if not isinstance(body.questions, dict):
            raise ServeError("validation", "questions must be a table where there is a state")
        request = {"state": body.state, "questions": body.questions, "assets": body.assets}
        return await _decide(exchange, body.model, request)
    if body.input is None or not isinstance(body.questions, list) or not body.questions:
        raise ServeError(
            "validation",
            "the body must have input and a list of questions, or state and a table of questions",
        )
    names = [_key(place, question) for place, question in enumerate(body.questions)]
    if len(set(names)) < len(names):
        raise ServeError("validation", "two questions have one name", param="questions")
    asked = {
        name: _question(place, question)
        for place, (name, question) in enumerate(zip(names, body.questions, strict=True))
    }
    request = {"state": _state(body.input), "questions": asked}
    return await _decide(exchange, body.model, request, given=body.questions)


async def _decide(
    exchange: Exchange,
    name: str | None,
    request: dict[str, Any],
    *,
    given: list[dict[str, Any]] | None = None,
) -> Response:
    """given: the questions of OpenAI's form, in which the answers are then."""
    facts = find_model(exchange, name, "decide")
    questions = request["questions"]
    characters = len(exchange.body_bytes) * max(len(questions), 1)
    check_characters(exchange, characters, field="state")
    outcome = await run(exchange, facts, "decide", [request])
    answers = outcome.rows[0]
    num_tokens = outcome.timings.num_tokens
    usage = {"input_tokens": num_tokens, "output_tokens": 0}
    if given is not None:
        rows = zip(given, answers.values(), strict=True)
        answers = [_openai_answer(question, answer) for question, answer in rows]
        usage["total_tokens"] = num_tokens
    content = {"model": facts.name, "answers": answers, "usage": usage}
    return json_answer(exchange, content, num_characters=len(exchange.body_bytes))


def _key(place: int, question: dict[str, Any]) -> str:
    name = question.get("name")
    if name is not None and not isinstance(name, str):
        raise _bad(place, f"name must be a string, got {shown(name)}")
    return f"question {place}" if name is None else name


def _bad(place: int, text: str) -> ServeError:
    return ServeError("validation", f"questions[{place}].{text}", param="questions")


def _question(place: int, given: dict[str, Any]) -> dict[str, Any]:
    """A question of OpenAI's form as one of System One's."""
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise _bad(place, f"type must be one of {', '.join(_KINDS)}, got {shown(kind)}")
    question: dict[str, Any] = {"type": _KINDS[kind], "instructions": given.get("instructions")}
    if kind == "choice":
        choices = _entries(place, given, "choices", "value")
        question["criteria"] = {_text(one["value"]): one.get("description") for one in choices}
        if len(question["criteria"]) < len(choices):
            raise _bad(place, "choices must have different values")
    elif kind == "score":
        levels = _entries(place, given, "levels", "label")
        question["criteria"] = [_level(one) for one in levels]
    return question


def _entries(place: int, given: dict[str, Any], key: str, needed: str) -> list[dict[str, Any]]:
    entries = given.get(key)
    if not isinstance(entries, list) or not all(
        isinstance(one, dict) and isinstance(one.get(needed), str | bool) for one in entries
    ):
        raise _bad(place, f"{key} must be a list of tables with {needed}, got {shown(entries)}")
    return entries


def _text(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _level(level: dict[str, Any]) -> str:
    description = level.get("description")
    label = _text(level["label"])
    return label if description is None else f"{label}: {description}"


def _state(given: str | list[dict[str, Any]]) -> Any:
    """The text of one message, or a list of messages with their roles."""
    if isinstance(given, str):
        return given
    messages = [
        {"role": str(message.get("role", "user")), "content": _content(place, message)}
        for place, message in enumerate(given)
    ]
    return messages[0]["content"] if len(messages) == 1 else messages


def _content(place: int, message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ServeError(
                "unsupported",
                f"input[{place}].content must be text or parts of text, got {shown(kind)}",
                param="input",
            )
    return "\n".join(part["text"] for part in parts)


def _openai_answer(given: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    start: dict[str, Any] = {"type": given["type"], "name": given.get("name")}
    if given["type"] == "predicate":
        return start | {"probability": answer["noul"]}
    chances = list(answer["probabilities"].values())
    if given["type"] == "choice":
        values = [one["value"] for one in given["choices"]]
        best = max(range(len(values)), key=chances.__getitem__)
        rows = [{"value": v, "probability": p} for v, p in zip(values, chances, strict=True)]
        return start | {
            "choice": values[best],
            "confidence": answer["confidence"],
            "probabilities": rows,
        }
    levels = enumerate(zip(given["levels"], chances, strict=True))
    return start | {
        "score": answer["score"],
        "confidence": answer["confidence"],
        "probabilities": [
            {"value": value, "label": level["label"], "probability": chance}
            for value, (level, chance) in levels
        ],
    }
