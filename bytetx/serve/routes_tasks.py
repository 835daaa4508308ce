"""POST /tasks/NAME: declared tasks over HTTP, with a schema made from their options."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import Field, create_model
from starlette.responses import Response

from bytetx.serve.answers import check_batch, count_characters, json_answer, run
from bytetx.serve.fields import Fields, OrNull
from bytetx.serve.gateway import Exchange, Route
from bytetx.serve.schemas import Request
from bytetx.serve.site import need_task
from bytetx.tasks.task import TASKS, TaskSpec

_LISTS = (Iterable, Sequence, Collection)


def task_routes() -> Mapping[tuple[str, str], Route]:
    """The route of each declared task that has one."""
    routes = (_route(spec) for spec in TASKS.values() if spec.has_route)
    return {("POST", route.path): route for route in routes}


def _route(spec: TaskSpec) -> Route:
    async def endpoint(body: Any, exchange: Exchange) -> Response:
        facts = exchange.site.find_model(exchange.model_name or body.model)
        need_task(facts, spec.name, kind="backend")
        check_batch(exchange, body.texts, field="texts")
        options = {name: getattr(body, name) for name in spec.fields}
        outcome = await run(exchange, facts, spec.name, body.texts, **options)
        content = {"results": outcome.rows}
        return json_answer(exchange, content, num_characters=count_characters(body.texts))

    endpoint.__name__, endpoint.__doc__ = spec.name, spec.doc
    return Route(f"/tasks/{spec.name}", endpoint, task_request(spec))


def task_request(spec: TaskSpec) -> type[Fields]:
    """The pydantic model of a task's body: texts, model, and its options."""
    or_null: Any = OrNull  # of types that are known here alone
    hints = get_type_hints(spec.options)
    (texts,) = spec.inputs.values()
    fields: dict[str, Any] = {
        "texts": (_json_type(texts), ...),
        "model": (str | None, Field(None, description="A served model; the first one.")),
    }
    for name, entry in spec.fields.items():
        kind, least = _json_type(hints[name]), entry.metadata["min"]
        if least is not None:
            number = Annotated[int, Field(ge=least)]
            kind = number | None if type(None) in get_args(kind) else number
        if entry.default is not None:
            kind = or_null[kind]
        fields[name] = (kind, Field(entry.default, description=entry.metadata["doc"]))
    title = "".join(part.title() for part in spec.name.split("_"))
    made: type[Fields] = create_model(f"{title}TaskRequest", __base__=Request, **fields)
    return made


def _json_type(kind: Any) -> Any:
    """The type of a JSON value for an argument: lists in place of iterables and arrays."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in _LISTS:
        return list[_json_type(arguments[0])]  # type: ignore[misc]
    if origin in (Union, UnionType):
        members = [_json_type(one) for one in arguments if one is not np.ndarray]
        return reduce(or_, members)
    return kind
