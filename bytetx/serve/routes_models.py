"""POST /models: models of a server whose models come and go, loaded and unloaded by hand."""

from starlette.responses import Response

from bytetx.serve.answers import json_answer
from bytetx.serve.calls import Call
from bytetx.serve.errors import ServeError
from bytetx.serve.gateway import Exchange
from bytetx.serve.schemas import MoveModelRequest


async def load(body: MoveModelRequest, exchange: Exchange) -> Response:
    """Loads a model, or waits until it is loaded; only on a server with an API key."""
    return await _move(exchange, body, "load_model", is_loaded=True)


async def unload(body: MoveModelRequest, exchange: Exchange) -> Response:
    """Unloads a model once its requests are answered. Only with an API key."""
    return await _move(exchange, body, "unload_model", is_loaded=False)


async def _move(
    exchange: Exchange, body: MoveModelRequest, task: str, *, is_loaded: bool
) -> Response:
    site = exchange.site
    if not site.settings.moves_models:
        raise ServeError(
            "unsupported",
            "the models of this server are always loaded; start it with --lazy, --unload-after or "
            "--memory-budget",
        )
    site.require_key("models")
    facts = site.find_model(exchange.model_name or body.model)
    name = facts.parent or facts.name
    await site.ready_backend().run(Call(name, task, None, {}))
    return json_answer(exchange, {"model": name, "is_loaded": is_loaded})
