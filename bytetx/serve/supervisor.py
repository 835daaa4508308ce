"""The supervisor of several processes: front-ends that share the port, and one engine process."""

import asyncio
import logging
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bytetx.errors import OptionError
from bytetx.serve.http_server import address, bind
from bytetx.serve.settings import READY, ServeSettings, settings_line

logger = logging.getLogger("bytetx.serve")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0  # before a process is started again


async def supervise(settings: ServeSettings) -> None:
    """Runs until SIGTERM or SIGINT; starts a process again that ends by itself.

    Raises SystemExit with the engine's code where it ends before it has been ready once.
    """
    if settings.prometheus_port is not None:
        raise OptionError("--prometheus-port needs --frontends 1; scrape /metrics on the port")
    listeners = _listeners(settings)
    ends = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ends.set)
    with tempfile.TemporaryDirectory(prefix="bytetx-serve-") as folder:
        path = str(Path(folder) / "engine")
        engine = _Child(settings, ["engine", path], "engine process", ends_all=True)
        frontends = [
            _Child(
                settings,
                ["frontend", path, str(listener.fileno())],
                f"front-end {number}",
                descriptors=(listener.fileno(),),
            )
            for number, listener in enumerate(listeners)
        ]
        logger.info("listening on %s", address(listeners[0]))
        code = await _run(engine, frontends, ends)
    for listener in set(listeners):
        listener.close()
    if code:
        raise SystemExit(code)
    logger.info("ended")


async def _run(engine: "_Child", frontends: Sequence["_Child"], ends: asyncio.Event) -> int:
    """The exit code: 0 after a signal, else the engine's."""
    ready: set[_Child] = set()

    def note_ready(child: _Child) -> None:
        ready.add(child)
        if len(ready) == 1 + len(frontends):
            logger.info("ready")

    for child in (*frontends, engine):
        child.start(note_ready)
    told = asyncio.create_task(ends.wait())
    failed = asyncio.create_task(engine.wait_for_failure())
    await asyncio.wait((told, failed), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    code = failed.result() if failed.done() else 0
    failed.cancel()
    logger.info("shutting down")
    await asyncio.gather(*(child.stop() for child in frontends))  # they drain
    await engine.stop()
    return code


def _listeners(settings: ServeSettings) -> list[socket.socket]:
    """A socket for each front-end on the same port; on a Unix path one that all accept from."""
    if settings.uds_path is not None:
        return [bind(settings)] * settings.frontends
    first = bind(settings, shares_port=True)
    same = replace(settings, port=first.getsockname()[1])
    more = [bind(same, shares_port=True) for _ in range(settings.frontends - 1)]
    return [first, *more]


class _Child:
    """A process that is started again when it ends by itself."""

    def __init__(
        self,
        settings: ServeSettings,
        arguments: Sequence[str],
        title: str,
        *,
        descriptors: Sequence[int] = (),
        ends_all: bool = False,
    ):
        """ends_all: where it ends before it was ready once, that is a failure for wait_for_failure;
        else it is started again then, too."""
        self._settings, self._arguments, self._title = settings, arguments, title
        self._descriptors, self._ends_all = descriptors, ends_all
        self._process: Process | None = None
        self._is_stopping = False
        self._was_ready = False
        self._failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def start(self, on_ready: Callable[["_Child"], None]) -> None:
        """on_ready: called each time the process says that it is ready."""
        self._task = asyncio.create_task(self._keep_running(on_ready))

    async def wait_for_failure(self) -> int:
        """The exit code of a process that ended before it was ready once."""
        return await self._failed

    async def stop(self) -> None:
        """Sends SIGTERM and waits for the end."""
        self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
        else:
            self._task.cancel()
        await asyncio.wait((self._task,))

    async def _keep_running(self, on_ready: Callable[["_Child"], None]) -> None:
        wait_s = _FIRST_WAIT_S
        while not self._is_stopping:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "bytetx.serve.child", *self._arguments),
                stdin=PIPE,
                stdout=PIPE,
                pass_fds=self._descriptors,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone
            )
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(settings_line(self._settings))
            while line := await process.stdout.readline():
                if line == READY:
                    self._was_ready, wait_s = True, _FIRST_WAIT_S
                    on_ready(self)
            code = await process.wait()
            if self._is_stopping:
                return
            if self._ends_all and not self._was_ready:
                self._failed.set_result(code if code > 0 else 1)
                return
            logger.error(
                "the %s (pid %d) ended with %d; it is started again", self._title, process.pid, code
            )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
