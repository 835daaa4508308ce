"""POST /adapters: LoRA adapters of served models, loaded and unloaded while the server runs."""

from starlette.responses import Response

from bytetx.serve.answers import json_answer
from bytetx.serve.calls import Call
from bytetx.serve.errors import ServeError
from bytetx.serve.gateway import Exchange
from bytetx.serve.schemas import LoadAdapterRequest, UnloadAdapterRequest


async def load(body: LoadAdapterRequest, exchange: Exchange) -> Response:
    """Loads an adapter, which then is the model MODEL:NAME; only on a server with an API key."""
    return await _change(exchange, body, "load_adapter", {"name": body.name, "path": body.path})


async def unload(body: UnloadAdapterRequest, exchange: Exchange) -> Response:
    """Unloads an adapter; requests that run with it are answered. Only with an API key."""
    return await _change(exchange, body, "unload_adapter", {"name": body.name})


async def _change(
    exchange: Exchange, body: UnloadAdapterRequest, task: str, options: dict[str, str]
) -> Response:
    site = exchange.site
    site.require_key("adapters", instead="name adapters by --adapter NAME=PATH")
    facts = site.find_model(exchange.model_name or body.model)
    if facts.parent is not None:
        raise ServeError(
            "validation",
            f"{facts.name} is an adapter; name its model, {facts.parent}",
            param="model",
        )
    await site.ready_backend().run(Call(facts.name, task, None, options))
    return json_answer(exchange, {"model": f"{facts.name}:{body.name}"})
