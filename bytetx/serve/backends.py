"""The backend of a process that computes, from its settings to its end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from bytetx.serve.engine import LocalBackend
from bytetx.serve.loading import close_models, load_models, warm_up
from bytetx.serve.metrics import Metrics
from bytetx.serve.settings import ServeSettings


@asynccontextmanager
async def open_backend(
    settings: ServeSettings,
    metrics: Metrics,
    *,
    on_lost: Callable[[], None],
    changes_adapters: bool = True,
) -> AsyncIterator[LocalBackend]:
    """The models of the settings, warm and counted by the metrics; closed at the end.

    on_lost, changes_adapters: as of LocalBackend.  Raises what load_models does.
    """
    if settings.moves_models:
        opened = _open_pool(settings, metrics, on_lost=on_lost, changes_adapters=changes_adapters)
        async with opened as pool:
            yield pool
        return
    served = await asyncio.to_thread(load_models, settings)
    try:
        backend = LocalBackend(served, on_lost=on_lost, changes_adapters=changes_adapters)
        await warm_up(backend)
        metrics.attach(served)
        yield backend
    finally:
        await close_models(served)


@asynccontextmanager
async def _open_pool(
    settings: ServeSettings,
    metrics: Metrics,
    *,
    on_lost: Callable[[], None],
    changes_adapters: bool,
) -> AsyncIterator[LocalBackend]:
    from bytetx.serve.model_pool import PooledBackend, outline_models

    models = await asyncio.to_thread(outline_models, settings)
    pool = PooledBackend(
        models, settings, metrics=metrics, on_lost=on_lost, changes_adapters=changes_adapters
    )
    moving: asyncio.Task[None] | None = None
    try:
        if not settings.lazy:
            await pool.load_now()
            await warm_up(pool)
            for one in pool.served:  # passes that got it warm do not count
                metrics.add_model(one)
        moving = asyncio.create_task(pool.keep_moving())
        yield pool
    finally:
        if moving is not None:
            moving.cancel()
            with suppress(asyncio.CancelledError):
                await moving
        await pool.aclose()
