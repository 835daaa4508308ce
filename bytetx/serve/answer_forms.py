"""The form of an answer as requests ask for it: OpenAI's response_format, and vLLM's fields."""

import json
from collections.abc import Mapping
from typing import Any

from bytetx.serve.errors import ServeError
from bytetx.serve.schemas_generate import GenerationRequest, ResponseFormat

_GUIDED = ("json", "regex", "choice", "grammar")


def structured_outputs(body: GenerationRequest) -> dict[str, Any] | None:
    """SamplingParams' structured_outputs; None where the request asks for no form.

    Raises ServeError where it asks for two.
    """
    found = {name: given for name, given in _asked(body).items() if given}
    if len(found) > 1:
        first, second = sorted(found)[:2]
        raise ServeError(
            "validation",
            f"{first} and {second} exclude each other: an answer has one form",
            param=second,
        )
    form = next(iter(found.values()), None)
    if form is not None and body.guided_whitespace_pattern is not None:
        form["whitespace_pattern"] = body.guided_whitespace_pattern
    return form


def answer_schema(form: Mapping[str, Any] | None) -> object:
    """The JSON schema of an answer that may call tools instead; None where it has no form.

    Raises ServeError for a form that does not go with tools.
    """
    if form is None:
        return None
    if form.get("json_object"):
        return {"type": "object"}
    if "json" not in form:
        raise ServeError(
            "validation",
            "beside tools an answer may be held to a JSON schema, and to no other form: "
            f"leave out {', '.join(form)}, or the tools",
        )
    schema = form["json"]
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise ServeError("validation", f"the answer's JSON schema is no JSON: {error}") from None


def _asked(body: GenerationRequest) -> dict[str, dict[str, Any]]:
    """By field of the request: the form that it asks for."""
    guided = {f"guided_{kind}": (kind, getattr(body, f"guided_{kind}")) for kind in _GUIDED}
    forms = {name: {kind: value} for name, (kind, value) in guided.items() if value is not None}
    if body.structured_outputs is not None:
        forms["structured_outputs"] = body.structured_outputs.given()
    if body.response_format is not None:
        forms["response_format"] = _of_response(body.response_format)
    return forms


def _of_response(asked: ResponseFormat) -> dict[str, Any]:
    if asked.type == "text":
        return {}
    if asked.type == "json_object":
        return {"json_object": True}
    schema = None if asked.json_schema is None else asked.json_schema.schema_
    if schema is None:
        raise ServeError(
            "validation",
            "response_format of type json_schema needs json_schema.schema",
            param="response_format.json_schema",
        )
    return {"json": schema}
