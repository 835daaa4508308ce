"""Site: what all requests share: settings, the engine behind them, phase, records."""

import asyncio
import hmac
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, TypeVar

from bytetx.errors import shown
from bytetx.serve.batch_store import BatchStore
from bytetx.serve.calls import ModelFacts, ServeBackend
from bytetx.serve.errors import ServeError
from bytetx.serve.logprobs import MAX_OPEN_LOGPROBS
from bytetx.serve.records import Recorder
from bytetx.serve.settings import ServeSettings
from bytetx.serve.tracing import Tracer

T = TypeVar("T")
Phase = Literal["starting", "ready", "draining"]

_NUM_THREADS = 2
# Of bodies that have come in part, of all requests; or four bodies, where that is more.
_BODY_BYTES = 1 << 28
# Of results whose answers are being sent, of all requests. One alone may be larger.
_ANSWER_BYTES = 1 << 29
_READING_S = 10.0  # that a client may take for its answer while others need the room
_NOT_READY = {
    "starting": "the server is loading its models; try again soon",
    "draining": "the server is shutting down; send the request to another one",
}


class _HeldAnswer(NamedTuple):
    """A result that is being sent, since when, and what drops its client."""

    num_bytes: int
    since: float
    abort: Callable[[], None] | None


class Site:
    """One of a process. `phase` goes from starting to ready to draining.

    backend: None until the models are loaded.  num_running: requests that are being answered.
    body_bytes, answer_bytes: of bodies that have come in part, and of results that are being sent.
    """

    def __init__(
        self, settings: ServeSettings, recorder: Recorder, *, tracer: Tracer | None = None
    ):
        self.settings, self.recorder, self.tracer = settings, recorder, tracer
        self.backend: ServeBackend | None = None
        folder = settings.batch_dir
        self.batches = None if folder is None else BatchStore(folder)
        self.phase: Phase = "starting"
        self.num_running = 0
        self._num_logprobs = 0
        self.body_bytes = self.answer_bytes = 0
        self._answers: dict[object, _HeldAnswer] = {}  # in the order of their beginning
        self._said: set[Hashable] = set()
        self._keys = [key.encode() for key in settings.api_keys]
        # Its own, for asyncio's threads may all wait for templates.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="bytetx-json")

    def is_first(self, event: Hashable) -> bool:
        """Whether it has not happened before: the log has a line of the first, metrics count all.

        event: of a kind that clients cannot multiply.
        """
        is_first = event not in self._said
        self._said.add(event)
        return is_first

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Runs what would hold up the event loop: reading and writing long documents."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.batches is not None:
            self.batches.close()

    @property
    def is_ready(self) -> bool:
        return self.phase == "ready" and self.backend is not None and self.backend.is_healthy

    def ready_backend(self) -> ServeBackend:
        """The backend; ServeError where nothing can be answered now."""
        if self.phase != "ready" or self.backend is None:
            phase = "starting" if self.phase == "ready" else self.phase
            raise ServeError("unhealthy", _NOT_READY[phase], retry_after_s=2)
        if not self.backend.is_healthy:
            raise ServeError(
                "unhealthy", "the engine failed; it is being started again", retry_after_s=5
            )
        return self.backend

    def require_key(self, what: str, *, instead: str = "") -> None:
        """ServeError where the server has no key: what it serves is changed with one only.

        what: is to be loaded or unloaded.  instead: another way to have it.
        """
        if not self.settings.api_keys:
            raise ServeError(
                "unauthorized",
                f"{what} are loaded and unloaded only where the server has a key: start it with "
                f"--api-key{instead and f', or {instead}'}",
            )

    def open_logprobs(self, count: int) -> None:
        """Counts what a request may hold, until close_logprobs; ServeError where it is too much."""
        if count and self._num_logprobs + count > MAX_OPEN_LOGPROBS:
            raise ServeError(
                "overloaded",
                f"the requests that are being answered may give {self._num_logprobs:,} "
                f"log-probabilities and this one {count:,}; the most at a time is "
                f"{MAX_OPEN_LOGPROBS:,}: try again soon, or ask for fewer",
                retry_after_s=1,
            )
        self._num_logprobs += count

    def close_logprobs(self, count: int) -> None:
        self._num_logprobs -= count

    def hold_body(self, num_bytes: int) -> None:
        """Counts bytes of a body that is still arriving, until release_body; ServeError where all
        bodies have too many."""
        most = max(_BODY_BYTES, 4 * self.settings.payload_limit_bytes)
        if self.body_bytes + num_bytes > most:
            raise ServeError(
                "overloaded",
                f"bodies of {self.body_bytes:,} bytes have come in part, and the most at a time is "
                f"{most:,}: try again soon",
                retry_after_s=1,
            )
        self.body_bytes += num_bytes

    def release_body(self, num_bytes: int) -> None:
        self.body_bytes -= num_bytes

    def hold_answer(self, key: object, num_bytes: int, abort: Callable[[], None] | None) -> None:
        """Counts a result until release_answer. Where all are too much, clients that have read
        their answers for long are dropped; ServeError where that is not enough.

        abort: drops the client.
        """
        now = time.monotonic()
        while self.answer_bytes and self.answer_bytes + num_bytes > _ANSWER_BYTES:
            if not self.drop_slow_reader():
                raise ServeError(
                    "overloaded",
                    f"answers of {self.answer_bytes:,} bytes are being sent, this one has "
                    f"{num_bytes:,}, and the most at a time is {_ANSWER_BYTES:,}: try again soon, "
                    "or ask for less at a time",
                    retry_after_s=1,
                )
        self._answers[key] = _HeldAnswer(num_bytes, now, abort)
        self.answer_bytes += num_bytes

    def release_answer(self, key: object) -> None:
        """An answer that was dropped, or is not counted, is passed over."""
        held = self._answers.pop(key, None)
        self.answer_bytes -= 0 if held is None else held.num_bytes

    def drop_slow_reader(self) -> bool:
        """Drops the client that has read its answer for longest; False where none has for long."""
        latest = time.monotonic() - _READING_S
        for key, held in self._answers.items():
            if held.abort is not None and held.since <= latest:
                self.release_answer(key)
                held.abort()
                return True
        return False

    def check_key(self, authorization: bytes | None) -> None:
        """Raises ServeError without one of the keys, in a time that does not depend on it."""
        if not self._keys:
            return
        scheme, _, given = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = b""
        is_right = False
        for key in self._keys:
            is_right |= hmac.compare_digest(key, given.strip())
        if not is_right:
            raise ServeError(
                "unauthorized", "no valid API key was given; send Authorization: Bearer KEY"
            )

    def models(self) -> Sequence[ModelFacts]:
        return () if self.backend is None else self.backend.models

    def find_model(self, name: str | None) -> ModelFacts:
        """The model of that name, the first one for none."""
        models = self.ready_backend().models
        if name is None:
            return models[0]
        found = next((model for model in models if model.name == name), None)
        # A name with an adapter's is never answered by the model without it.
        names_adapter = found is None and any(name.startswith(f"{m.name}:") for m in models)
        if found is None and self.settings.accepts_any_name and not names_adapter:
            return models[0]
        if found is None:
            known = ", ".join(model.name for model in models)
            raise ServeError(
                "not_found",
                f"the model {shown(name)} is not served here; there is: {known}",
                param="model",
                code="model_not_found",
            )
        return found


def need_task(model: ModelFacts, task: str, *, kind: str) -> None:
    """Raises a ServeError of that kind where the model cannot run the task."""
    if task not in model.tasks:
        raise ServeError(
            kind,
            f"the model {model.name} cannot {task.replace('_', ' ')}; it can: "
            f"{', '.join(model.tasks).replace('_', ' ')}",
            param="model",
        )
