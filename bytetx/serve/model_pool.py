"""PooledBackend: models that come into memory when they are asked for, and leave it again.

One task moves models, one at a time, in the order in which their first requests came; which ones
make room is for residency.py. A request of a model in memory takes one look-up of a dictionary.

Calls of batches, whose priority is not 0, make room only from models that nobody has asked for in
the last minute, and are refused, to come again, where a request needs the room of their model.
"""

import asyncio
import gc
import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch

from bytetx.errors import BytetxError, DeviceLostError, OptionError, WeightFormatError
from bytetx.model import Model
from bytetx.nn.held_memory import expected_bytes
from bytetx.ops.host import in_own_pages, release_heap
from bytetx.serve.calls import Call, ModelFacts, Outcome, Piece, Timings
from bytetx.serve.engine import (
    LocalBackend,
    ServedModel,
    adapter_facts,
    model_facts,
    task_facts,
)
from bytetx.serve.errors import ServeError
from bytetx.serve.loading import check_taken, load_model, served_model
from bytetx.serve.metrics import Metrics
from bytetx.serve.model_moves import ListedModel
from bytetx.serve.residency import Place, Residency, State
from bytetx.serve.settings import ModelSource, ServeSettings

logger = logging.getLogger("bytetx.serve")

# For requests that run on a model that is to make room; meanwhile it takes no more of them.
_LEAVE_S = 5.0
_RETRY_S = 5.0  # after which a request that found no room may come again
_SPARED_S = 60.0  # after its last request, that a model is not dropped for batches

T = TypeVar("T")
Waiter = asyncio.Future[None]


@dataclass(slots=True, eq=False)
class PooledModel(Place):
    """A served model, in memory or not.

    outline: without weights, with the tokenizer of all its loads; None where none could be made.
    facts: its own, and those of its adapters and tasks, by name.
    adapters: the folders of its adapters, which are loaded with it.
    waiting: requests that need it in memory.  leaving: those that want it out.
    patient: those of `waiting` that are of batches.  interruptible: calls of batches that run.
    """

    source: ModelSource = field(kw_only=True)
    outline: Model | None = field(kw_only=True)
    facts: dict[str, ModelFacts] = field(kw_only=True)
    adapters: dict[str, Path] = field(kw_only=True)
    waiting: list[Waiter] = field(default_factory=list)
    leaving: list[Waiter] = field(default_factory=list)
    patient: set[Waiter] = field(default_factory=set)
    interruptible: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def is_patient(self) -> bool:
        """Whether nobody but batches waits for it."""
        return not self.leaving and self.patient.issuperset(self.waiting)

    @property
    def own_facts(self) -> ModelFacts:
        return self.facts[self.name]


def outline_models(settings: ServeSettings) -> list[PooledModel]:
    """All models of the settings, of which configurations and headers are read.

    Raises what bytetx.load does, and OptionError for an option that no model takes, or a model that
    the budget does not hold.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    refusals: list[WeightFormatError] = []
    models = [_outline(source, settings, refusals) for source in settings.models]
    outlines = [one.outline.checkpoint for one in models if one.outline is not None]
    if len(outlines) == len(models):
        check_taken(settings, outlines)
    budget_bytes = settings.memory_budget_bytes
    for one in models:
        if budget_bytes is not None and one.num_bytes > budget_bytes:
            raise _too_large(one, budget_bytes)
    return models


def _outline(
    source: ModelSource, settings: ServeSettings, refusals: list[WeightFormatError]
) -> PooledModel:
    """refusals: as of load_model."""
    outline: Model | None = None
    try:
        outline = model = load_model(source, settings, reads_weights=False, refusals=refusals)
        num_bytes = expected_bytes(model.checkpoint)
    except BytetxError:
        raise
    except Exception as error:  # a family whose weights are computed with while they are read
        logger.info("%s: its weights are read to know the model (%s)", source.name, error)
        model = load_model(source, settings)
        num_bytes = int(model.info()["held_bytes"])
    own = replace(model_facts(source, model), is_loaded=False)
    tasks = model.checkpoint.tasks
    facts = {own.name: own}
    more = [adapter_facts(own, adapter) for adapter in model.adapters]
    more += [task_facts(own, task) for task in (() if tasks is None else tasks.adapters)]
    facts |= {one.name: one for one in more}
    found = PooledModel(
        source.name,
        num_bytes,
        source=source,
        outline=outline,
        facts=facts,
        adapters=dict(model.adapters),
    )
    if outline is None:
        model.close()
    return found


def _too_large(place: Place, budget_bytes: int | None) -> OptionError:
    return OptionError(
        f"the weights of {place.name} have {place.num_bytes:,} bytes in memory, and "
        f"--memory-budget is {budget_bytes:,}; raise it, or load the model in fewer bits by --dtype"
    )


class PooledBackend(LocalBackend):
    """A ServeBackend of this process whose models come and go.

    `keep_moving` must run beside it. loads, failed_loads, unloads, load_seconds: as of PoolCounts.
    """

    def __init__(
        self,
        pooled: Sequence[PooledModel],
        settings: ServeSettings,
        *,
        metrics: Metrics,
        on_lost: Callable[[], None],
        changes_adapters: bool = True,
    ):
        self._pooled, self._settings, self._metrics = pooled, settings, metrics
        self._residency = Residency(
            pooled,
            budget_bytes=settings.memory_budget_bytes,
            unload_after_s=settings.unload_after_s,
        )
        self._places: dict[str, PooledModel] = {}  # by the names of models, adapters and tasks
        self._turns: dict[PooledModel, None] = {}  # models that are waited for, in their order
        self._is_wanted = asyncio.Event()  # there is a turn, or a model became idle
        self._may_move = asyncio.Event()  # a model that is to leave became idle
        self._ending: asyncio.Future[None] | None = None  # the last model to leave
        self._is_closed = False
        self.loads, self.failed_loads = Counter[str](), Counter[str]()
        self.unloads, self.load_seconds = Counter[str](), dict[str, float]()
        super().__init__([], on_lost=on_lost, changes_adapters=changes_adapters)
        metrics.attach_pool(self)

    def base_models(self) -> Sequence[ModelFacts]:
        return [one.own_facts for one in self._pooled]

    def listed_models(self) -> Sequence[ListedModel]:
        return [(one.own_facts, self._adapters_of(one)) for one in self._pooled]

    def _adapters_of(self, place: PooledModel) -> Mapping[str, Path]:
        served = self._served.get(place.name)
        return place.adapters if served is None else served.model.model.adapters

    def num_bytes(self) -> Mapping[str, int]:
        return {one.name: one.num_bytes for one in self._pooled}

    async def run(self, call: Call) -> Outcome:
        if call.task in ("load_model", "unload_model"):
            return await self._move(call)
        place = await self._enter(call.model, call.priority)
        try:
            if call.priority:
                return await self._interruptible(place, super().run(call))
            return await super().run(call)
        finally:
            self._leave(place, call.priority)

    async def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        place = await self._enter(call.model, call.priority)
        try:
            async with aclosing(super().generate(call)) as pieces:
                if not call.priority:
                    async for piece in pieces:
                        yield piece
                    return
                with suppress(StopAsyncIteration):
                    while True:
                        yield await self._interruptible(place, anext(pieces))
        finally:
            self._leave(place, call.priority)

    async def _interruptible(self, place: PooledModel, call: Awaitable[T]) -> T:
        """A call of a batch; ServeError where a request needs the room of its model."""
        task = asyncio.ensure_future(call)
        place.interruptible.add(task)
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait((task,))
            raise
        finally:
            place.interruptible.discard(task)
        if task.cancelled():
            raise ServeError(
                "unhealthy", f"{place.name} made room for another model", retry_after_s=_RETRY_S
            )
        return task.result()

    async def keep_moving(self) -> None:
        """Moves models until it is cancelled; requests that wait then are refused."""
        try:
            while True:
                while idle := self._residency.expired(time.monotonic()):
                    await self._move_out(self._own(idle[0]))
                place = min(self._turns, key=attrgetter("is_patient"), default=None)
                if place is None:
                    await self._wait_for_turn()
                    continue
                try:
                    await self._take_turn(place)
                except Exception as error:  # a fault of the program, which others do not suffer
                    self._answer_failure(place, error)
                del self._turns[place]
                if place.waiting or place.leaving:  # they came meanwhile
                    self._turns[place] = None
        finally:
            self._is_closed = True
            for one in self._pooled:
                _answer_all(one.waiting, _closed)
                _answer_all(one.leaving, _closed)

    @property
    def ring_models(self) -> Sequence[ServedModel]:
        """None: a ring is of the memory of one engine, which goes with its model."""
        return ()

    async def load_now(self) -> None:
        """Loads the models in their order, as long as they fit. Raises what bytetx.load does."""
        for one in self._pooled:
            if self._residency.make_room(one) == []:
                served = await asyncio.to_thread(self._load, one)
                one.num_bytes = int(served.facts.info["held_bytes"])
                self._put_in(one, served)
                del served
                if self._residency.make_room(one) != []:  # it has more bytes than was expected
                    await self._move_out(one)

    async def aclose(self) -> None:
        """Ends the queues and what the models have started."""
        if self._ending is not None:
            await self._ending
        for one in self._pooled:
            if one.name in self._served:
                await self._move_out(one)

    # Requests

    async def _enter(self, name: str, priority: int = 0) -> PooledModel:
        """Counts a request of a model that is in memory then; ServeError where it cannot be."""
        place = self._places.get(name)
        if place is None:
            self._find(name)  # raises
            raise AssertionError(name)
        if place.state is State.IN:
            place.num_running += 1
            place.num_asked += not priority
            return place
        await self._wait(place, place.waiting, priority)
        return place

    async def _wait(self, place: PooledModel, queue: list[Waiter], priority: int = 0) -> None:
        if self._is_closed:
            raise _closed()
        future: Waiter = asyncio.get_running_loop().create_future()
        queue.append(future)
        if priority:
            place.patient.add(future)
        self._turns.setdefault(place)
        self._is_wanted.set()
        seconds = self._settings.load_timeout_s
        try:
            async with asyncio.timeout(seconds):
                await future
        except (TimeoutError, asyncio.CancelledError) as error:
            has_entered = future.done() and not future.cancelled() and not future.exception()
            if has_entered and queue is place.waiting:
                self._leave(place, priority)
            if isinstance(error, TimeoutError):
                raise ServeError(
                    "unhealthy",
                    f"{place.name} was not loaded within {seconds:g} s (--load-timeout); try again "
                    "soon",
                    retry_after_s=_RETRY_S,
                ) from None
            raise
        finally:
            place.patient.discard(future)
            with suppress(ValueError):  # it was answered
                queue.remove(future)

    def _leave(self, place: PooledModel, priority: int = 0) -> None:
        place.num_running -= 1
        place.last_used = time.monotonic()
        if not priority:
            place.num_asked -= 1
            place.last_asked = place.last_used
        if place.num_running:
            return
        if place.state is State.LEAVING:
            self._may_move.set()
        elif self._settings.unload_after_s is not None:
            self._is_wanted.set()

    async def _move(self, call: Call) -> Outcome:
        """Loads or unloads a model by hand."""
        if not self._changes_adapters:
            raise ServeError(
                "unsupported",
                "one of several replicas answers this request, and the others would not know of it",
            )
        place = self._places[call.model]
        if call.task == "load_model":
            self._leave(await self._enter(call.model))
        elif place.state is not State.OUT:
            await self._wait(place, place.leaving)
        return Outcome(Timings())

    # The task that moves models

    async def _wait_for_turn(self) -> None:
        expiry = self._residency.next_expiry()
        seconds = None if expiry is None else max(0.0, expiry - time.monotonic())
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_wanted.wait()
        self._is_wanted.clear()

    async def _take_turn(self, place: PooledModel) -> None:
        """Does what is asked for of a model; no error ends the task."""
        if place.leaving:
            if await self._empty([place]):
                _answer_all(place.leaving, lambda: None)
            else:
                _answer_all(place.leaving, lambda: _busy(f"{place.name} is in use"))
        if not place.waiting:
            return
        is_patient = place.is_patient
        is_out = place.state is State.OUT
        if is_out and not self._residency.fits_alone(place):  # as its first load has shown
            self._answer_failure(place, _too_large(place, self._residency.budget_bytes))
        elif is_out and not await self._make_room(place):
            refused = [one for one in place.waiting if not is_patient or one in place.patient]
            place.waiting = [one for one in place.waiting if one not in refused]
            _answer_all(refused, lambda: _busy(f"there is no room for {place.name}"))
        elif place.state is State.OUT and place.waiting:
            await self._bring_in(place)
        if place.state is State.IN:
            self._let_in(place)

    async def _bring_in(self, place: PooledModel) -> None:
        place.state, served = State.LOADING, None
        try:
            served = await asyncio.to_thread(self._load, place)
            place.num_bytes = int(served.facts.info["held_bytes"])  # may be more than expected
            if not self._residency.fits_alone(place):
                await self._end(served)
                raise _too_large(place, self._residency.budget_bytes)
            if not await self._make_room(place):
                await self._end(served)
                raise _busy(f"there is no room for {place.name}")
        except ServeError as error:
            place.state, text = State.OUT, error.message
            _answer_all(
                place.waiting, lambda: ServeError("unhealthy", text, retry_after_s=_RETRY_S)
            )
        except Exception as error:
            place.state = State.OUT
            self.failed_loads[place.name] += 1
            self._answer_failure(place, error)
        else:
            self._put_in(place, served)
            return
        finally:
            if place.state is State.LOADING:  # the task was cancelled
                place.state = State.OUT
        served = None
        await asyncio.to_thread(_release_memory)

    def _answer_failure(self, place: PooledModel, error: Exception) -> None:
        """Requests get the error, and the next one tries again."""
        logger.error("%s could not be loaded: %s", place.name, error)
        if isinstance(error, DeviceLostError):
            self.is_healthy = False
            self._on_lost()
        folder = place.source.path
        if place.outline is not None:
            folder = str(place.outline.checkpoint.folder)
        known = isinstance(error, BytetxError | MemoryError)
        message = str(error) if known else "see the server's log"
        if not known:
            logger.error("a fault of the server", exc_info=error)
        text = f"{place.name} could not be loaded: {message}".replace("\n", " ")
        text = text.replace(folder, place.name) if "/" in folder else text
        _answer_all(place.waiting, lambda: ServeError("backend", text))

    async def _make_room(self, place: PooledModel) -> bool:
        """Moves others out so that a model fits; False where they are in use for too long."""
        before = time.monotonic() - _SPARED_S if place.is_patient else math.inf
        chosen = self._residency.make_room(place, asked_before=before)
        if chosen is None:
            return False
        others = [self._own(one) for one in chosen]
        for call in () if place.is_patient else [c for one in others for c in one.interruptible]:
            call.cancel()
        return await self._empty(others)

    async def _empty(self, places: Sequence[PooledModel]) -> bool:
        """Moves models out once their requests have ended; False where that takes too long."""
        places = [one for one in places if one.state is State.IN]
        for one in places:
            one.state = State.LEAVING
        try:
            async with asyncio.timeout(_LEAVE_S):
                while any(one.num_running for one in places):
                    self._may_move.clear()
                    await self._may_move.wait()
            for one in places:
                await self._move_out(one)
        except TimeoutError:
            return False
        finally:
            for one in places:
                if one.state is State.LEAVING:
                    one.state = State.IN
                    self._let_in(one)
        return True

    def _let_in(self, place: PooledModel) -> None:
        for future in place.waiting:
            if _answer(future, None):
                place.num_running += 1
                place.num_asked += future not in place.patient
        place.waiting.clear()
        place.last_used = time.monotonic()

    # Loading and unloading

    def _load(self, place: PooledModel) -> ServedModel:
        """In a thread."""
        start = time.perf_counter()
        with in_own_pages():
            model = load_model(
                place.source, self._settings, adapters=place.adapters, outline=place.outline
            )
        self.load_seconds[place.name] = (
            self.load_seconds.get(place.name, 0.0) + time.perf_counter() - start
        )
        facts = replace(place.own_facts, info=model.info(), is_loaded=True)
        return served_model(model, self._settings, facts)

    def _put_in(self, place: PooledModel, served: ServedModel) -> None:
        place.state, place.last_used = State.IN, time.monotonic()
        self._add(served)
        self._metrics.add_model(served)
        self.loads[place.name] += 1
        self._tell()

    async def _move_out(self, place: PooledModel) -> None:
        """A model that nobody uses leaves the memory, and so does what it had at hand."""
        place.state = State.LEAVING
        served = self._served.pop(place.name)
        self._metrics.remove_model(served)
        for name in [one for one in self._adapted if self._places[one] is place]:
            del self._adapted[name]
        place.adapters = served.model.model.adapters
        # Whoever cancels this task waits for it.
        self._ending = asyncio.ensure_future(self._end(served))
        del served
        await asyncio.shield(self._ending)
        place.state = State.OUT
        self.unloads[place.name] += 1
        logger.info("unloaded %s", place.name)
        self._tell()

    async def _end(self, served: ServedModel) -> None:
        """Ends the threads of a model, and gives its memory back once nobody else holds it."""
        name, is_alive = served.facts.name, weakref.ref(served.model.model.transformer)
        try:
            await served.model.aclose()
            await asyncio.to_thread(served.model.model.close)
        except Exception:
            logger.exception("%s did not end as it should", name)
        del served
        await asyncio.to_thread(_release_memory, is_alive)

    def _tell(self) -> None:
        self.models = self._list_models()
        self.on_models()

    def _list_models(self) -> tuple[ModelFacts, ...]:
        for place in self._pooled:
            is_in = place.name in self._served
            if is_in:  # its adapters may have changed
                place.facts = {
                    name: replace(own, created=place.facts.get(name, own).created)
                    for name, own in self._facts(place)
                }
            place.facts = {name: replace(own, is_loaded=is_in) for name, own in place.facts.items()}
        self._places = {name: place for place in self._pooled for name in place.facts}
        own = (place.own_facts for place in self._pooled)
        every = (one for place in self._pooled for one in place.facts.values())
        return (*own, *(one for one in every if one.parent is not None))

    def _facts(self, place: PooledModel) -> Iterator[tuple[str, ModelFacts]]:
        """The facts of a model in memory, its adapters and tasks, by name."""
        yield place.name, self._served[place.name].facts
        for name, one in self._adapted.items():
            if one.facts.parent == place.name:
                yield name, one.facts

    def _own(self, place: Place) -> PooledModel:
        assert isinstance(place, PooledModel)
        return place


def _answer(future: Waiter, error: ServeError | None) -> bool:
    """Whether somebody still waits for the answer."""
    if future.done():
        return False
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return True


def _answer_all(waiting: list[Waiter], make: Callable[[], ServeError | None]) -> None:
    """make: the error of each; None where there is none."""
    for future in waiting:
        _answer(future, make())  # each its own: raising adds to an error's traceback
    waiting.clear()


def _busy(what: str) -> ServeError:
    return ServeError(
        "unhealthy",
        f"{what}: requests run on every model that could leave the memory; try again soon",
        retry_after_s=_RETRY_S,
    )


def _closed() -> ServeError:
    return ServeError("unhealthy", "the server is shutting down", retry_after_s=_RETRY_S)


def _release_memory(is_alive: Callable[[], object] = lambda: True) -> None:
    """Gives the memory of models that were dropped back to the system.

    is_alive: gives None where nothing holds the model any more; else cycles are looked for.
    """
    if is_alive() is not None:
        gc.unfreeze()  # what a server was started with, see settle_interpreter
        gc.collect()
        gc.freeze()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    release_heap()
