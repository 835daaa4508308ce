"""Ray Serve deployments: engines behind HTTP ingresses, routed and scaled by queued tokens.

    serve run bytetx.serve.ray:app model=/models/minilm max_replicas=8

An ingress runs the same application as `bytetx serve` and hands each call to the engine with the
fewest tokens under way. A call whose engine dies is sent to another one.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, fields
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, WorkerCrashedError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from bytetx.errors import OptionError, shown
from bytetx.serve.app import build_app
from bytetx.serve.balance import estimate_tokens
from bytetx.serve.calls import Call, ModelFacts, Outcome, Piece
from bytetx.serve.engine import LocalBackend
from bytetx.serve.errors import ServeError
from bytetx.serve.http_server import make_site
from bytetx.serve.loading import load_models, warm_up
from bytetx.serve.metrics import Metrics
from bytetx.serve.ray_policies import QUEUED_TOKENS, QueuedTokensPolicy, TokenAwareRouter
from bytetx.serve.settings import ServeSettings, model_sources

# A second try of a call that finds a dying replica is rare, a third more so.
_MAX_TRIES = 4
_RETRY_S = 0.05  # doubled with each further try
_REPORT_S = (
    1.0  # between what an engine reports to the routers of all ingresses, and to the scaling
)
_LOOK_BACK_S = 5.0  # the scaling sees the mean of so long
_HEALTH_S = 5.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How many replicas, and when there are more.

    min_replicas, max_replicas: of engines.  ingresses: of HTTP; each feeds some thousand requests
    a second.
    target_tokens: queued and running tokens of an engine above which another one is started.
    upscale_delay_s, downscale_delay_s: how long that must last.
    gpus, cpus: that Ray sets aside for an engine; gpus None: settings.tp where the device is cuda,
    and none else.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    ingresses: int = 1
    target_tokens: int = 65_536
    upscale_delay_s: float = 5.0
    downscale_delay_s: float = 120.0
    gpus: float | None = None
    cpus: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise OptionError(
                f"min_replicas must be at least 1 and at most max_replicas, got "
                f"{self.min_replicas} and {self.max_replicas}"
            )
        if self.target_tokens < 1:
            raise OptionError(f"target_tokens must be at least 1, got {self.target_tokens}")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A ServeError as a value: an exception would arrive with Ray's own around it."""

    kind: str
    message: str
    param: str | None
    code: str | None
    retry_after_s: float | None

    @staticmethod
    def of(error: ServeError) -> "Refusal":
        return Refusal(error.kind, error.message, error.param, error.code, error.retry_after_s)

    def error(self) -> ServeError:
        return ServeError(
            self.kind,
            self.message,
            param=self.param,
            code=self.code,
            retry_after_s=self.retry_after_s,
        )


class Engine:
    """One replica: the models of the settings, and AsyncModel's queue before each."""

    # Ray awaits it; types know no such constructor.
    async def __init__(self, settings: ServeSettings) -> None:  # type: ignore[misc]
        served = await asyncio.to_thread(load_models, settings)
        # Ray asks check_health, and replaces an engine that is lost.
        self._backend = LocalBackend(served, on_lost=lambda: None, changes_adapters=False)
        self._tokens = 0  # about, of the calls that are not answered
        await warm_up(self._backend)

    async def models(self) -> tuple[ModelFacts, ...]:
        return self._backend.models

    async def run(self, call: Call) -> Outcome | Refusal:
        with self._counted(call):
            try:
                return await self._backend.run(call)
            except ServeError as error:
                return Refusal.of(error)

    async def generate(self, call: Call) -> AsyncIterator[Piece | Refusal]:
        with self._counted(call):
            try:
                async for piece in self._backend.generate(call):
                    yield piece
            except ServeError as error:
                yield Refusal.of(error)

    def check_health(self) -> None:
        """Ray replaces the replica where this raises."""
        if not self._backend.is_healthy:
            raise RuntimeError("the device of this replica failed")

    def record_routing_stats(self) -> dict[str, float]:
        return {QUEUED_TOKENS: float(self._tokens)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {QUEUED_TOKENS: float(self._tokens)}

    @contextmanager
    def _counted(self, call: Call) -> Iterator[None]:
        tokens = estimate_tokens(call)
        self._tokens += tokens
        try:
            yield
        finally:
            self._tokens -= tokens


class RayBackend:
    """A ServeBackend whose calls are answered by engines of the cluster."""

    is_healthy = True  # while no engine is there, calls wait for Ray to start one

    def __init__(self, engines: DeploymentHandle, models: tuple[ModelFacts, ...]):
        self._engines, self.models = engines, models

    async def run(self, call: Call) -> Outcome:
        for attempt in range(_MAX_TRIES):
            await _pause(attempt)
            response = self._engines.run.remote(call)
            try:
                answer = await response
            except (RayActorError, WorkerCrashedError):
                continue  # a call changes nothing: another engine may run it again
            except BackPressureError as error:
                raise _full() from error
            except asyncio.CancelledError:
                response.cancel()
                raise
            if not isinstance(answer, Refusal):
                assert isinstance(answer, Outcome)
                return answer
            if answer.kind != "unhealthy":
                raise answer.error()
        raise _all_failed()

    async def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        for attempt in range(_MAX_TRIES):
            await _pause(attempt)
            has_begun = False
            try:
                async with aclosing(self._pieces(call)) as pieces:
                    async for piece in pieces:
                        has_begun = True
                        yield piece
                return
            except (RayActorError, WorkerCrashedError, _UnhealthyError) as error:
                if has_begun:  # what was sent cannot be taken back, and may not come out again
                    raise ServeError(
                        "unhealthy",
                        "the replica that wrote this answer failed; send the request again",
                        retry_after_s=1,
                    ) from error
            except BackPressureError as error:
                raise _full() from error
        raise _all_failed()

    async def _pieces(self, call: Call) -> AsyncGenerator[Piece, None]:
        response = self._engines.options(stream=True).generate.remote(call)
        is_done = False
        try:
            async for answer in response:
                if isinstance(answer, Refusal):
                    is_done = True
                    raise _UnhealthyError if answer.kind == "unhealthy" else answer.error()
                yield answer
            is_done = True
        finally:
            if not is_done:
                response.cancel()


class _UnhealthyError(Exception):
    """An engine whose device failed."""


async def _pause(attempt: int) -> None:
    if attempt:
        await asyncio.sleep(_RETRY_S * 2 ** (attempt - 1))


def _all_failed() -> ServeError:
    return ServeError(
        "unhealthy", f"{_MAX_TRIES} replicas failed with this request", retry_after_s=5
    )


def _full() -> ServeError:
    return ServeError("overloaded", "the queues of all replicas are full", retry_after_s=1)


class Ingress:
    """The HTTP application of `bytetx serve`, in front of the engines."""

    async def __init__(  # type: ignore[misc]  # as Engine's
        self, engines: DeploymentHandle, settings: ServeSettings
    ) -> None:
        metrics = Metrics(settings)
        self._site = make_site(settings, metrics)
        metrics.count_running(lambda: self._site.num_running)
        self._site.backend = RayBackend(engines, await engines.models.remote())
        self._site.phase = "ready"

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return build_app(self._site)


def application(settings: ServeSettings, scale: Scale | None = None) -> serve.Application:
    """Build the application that ray.serve.run takes.

    Ray Serve has the address, the port and the proxies; those of the settings are not used. A
    replica that is stopped answers what it has begun, for settings.shutdown_timeout_s at most.
    Raises OptionError for a batch_dir, which no process of a cluster runs, and for models that come
    and go.
    """
    if settings.batch_dir is not None:
        raise OptionError("Ray Serve runs no batches; leave batch_dir out")
    if settings.moves_models:
        raise OptionError(
            "--lazy, --unload-after and --memory-budget are for models of one process, and Ray "
            "starts engines by their load; leave them out"
        )
    scale = scale or Scale()
    gpus = scale.gpus
    if gpus is None:
        gpus = settings.tp if settings.device.startswith("cuda") else 0
    engine = serve.deployment(
        Engine,
        name="Engine",
        max_ongoing_requests=settings.max_concurrent_requests,
        graceful_shutdown_timeout_s=settings.shutdown_timeout_s,
        health_check_period_s=_HEALTH_S,
        ray_actor_options={"num_gpus": gpus, "num_cpus": scale.cpus},
        autoscaling_config=_autoscaling(scale),
        request_router_config=RequestRouterConfig(
            request_router_class=TokenAwareRouter, request_routing_stats_period_s=_REPORT_S
        ),
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=scale.ingresses,
        max_ongoing_requests=settings.max_concurrent_requests + 1,  # the 429 is bytetx's own
        graceful_shutdown_timeout_s=settings.shutdown_timeout_s,
    )
    made: serve.Application = ingress.bind(engine.bind(settings), settings)
    return made


def app(args: Mapping[str, Any]) -> serve.Application:
    """For `serve run bytetx.serve.ray:app NAME=VALUE ...` and Ray's YAML files (args).

    model: PATH or NAME=PATH, several with commas between or a list.  Others: names of Scale and of
    ServeSettings.
    Raises OptionError for a name or value that is neither's.
    """
    given = dict(args)
    models = given.pop("model", ())
    sources = model_sources(models.split(",") if isinstance(models, str) else list(models))
    scale = Scale(**_taken(given, Scale))
    settings = ServeSettings(
        sources, accepts_any_name=len(sources) == 1, **_taken(given, ServeSettings)
    )
    if given:
        known = sorted({one.name for kind in (Scale, ServeSettings) for one in fields(kind)})
        raise OptionError(f"{', '.join(given)} is no argument; they are: model, {', '.join(known)}")
    return application(settings, scale)


def _taken(given: dict[str, Any], kind: type) -> dict[str, Any]:
    """The values for the fields of a dataclass, taken out of `given`; strings are read."""
    found = {}
    for field in fields(kind):
        if field.name in given and field.name != "models":
            found[field.name] = _read(field.name, given.pop(field.name), str(field.type))
    return found


def _read(name: str, value: Any, kind: str) -> Any:
    """A value as the field's type has it; the command line gives only strings."""
    if not isinstance(value, str):
        return value
    if "Sequence" in kind:
        return value.split(",")
    try:
        if "bool" in kind:
            return {"true": True, "false": False}[value.lower()]
        if "float" in kind:
            return float(value)
        return int(value) if "int" in kind else value
    except (KeyError, ValueError) as error:
        raise OptionError(f"{name} cannot be {shown(value)}") from error


def _autoscaling(scale: Scale) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=scale.min_replicas,
        max_replicas=scale.max_replicas,
        metrics_interval_s=_REPORT_S,
        look_back_period_s=_LOOK_BACK_S,
        upscale_delay_s=scale.upscale_delay_s,
        downscale_delay_s=scale.downscale_delay_s,
        policy=AutoscalingPolicy(
            policy_function=QueuedTokensPolicy,
            policy_kwargs={"target_tokens": scale.target_tokens},
        ),
    )
