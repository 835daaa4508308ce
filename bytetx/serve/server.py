"""`bytetx serve`: all in this process, or front-ends and an engine process."""

import asyncio
from contextlib import AsyncExitStack

import uvloop

from bytetx.errors import DeviceLostError
from bytetx.ops.host import limit_heaps
from bytetx.serve.http_server import bind, make_site, run_site
from bytetx.serve.logs import set_up_logs
from bytetx.serve.settings import ServeSettings


def serve(settings: ServeSettings) -> None:
    """Serves until SIGTERM or SIGINT, and returns once what runs is answered.

    Raises CheckpointError and OptionError for what cannot be served, SystemExit with the code of
    an engine process that could not start, DeviceLostError where the device was lost meanwhile.
    """
    limit_heaps()
    set_up_logs(settings)
    if settings.frontends > 1:
        from bytetx.serve.supervisor import supervise

        uvloop.run(supervise(settings))
    else:
        uvloop.run(_serve_here(settings))


async def _serve_here(settings: ServeSettings) -> None:
    from bytetx.serve.backends import open_backend
    from bytetx.serve.metrics import Metrics

    metrics = Metrics(settings)
    site = make_site(settings, metrics)
    metrics.count_running(lambda: site.num_running)
    ends = asyncio.Event()

    async with AsyncExitStack() as stack:

        async def start() -> None:
            opened = open_backend(settings, metrics, on_lost=ends.set)
            site.backend = await stack.enter_async_context(opened)

        await run_site(site, start, [bind(settings)], ends=ends)
    if site.backend is not None and not site.backend.is_healthy:
        raise DeviceLostError("the engine was lost, and only a new process helps; start it again")
