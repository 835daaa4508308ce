"""A process of the server that is started again when it ends by itself."""

import asyncio
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress

from bytetx.serve.settings import READY, ServeSettings, settings_line

logger = logging.getLogger("bytetx.serve")

KILL_AFTER_S = 10.0  # beyond the time that a process may drain
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0  # before a process is started again


class ChildProcess:
    """`python -m MODULE ARGUMENTS`, with the settings as a line on its stdin.

    It says on its stdout when it is ready, and ends when its stdin closes.
    """

    def __init__(
        self,
        settings: ServeSettings,
        command: Sequence[str],
        title: str,
        *,
        environment: Sequence[str] = (),
        descriptors: Sequence[int] = (),
        may_fail: bool = False,
    ):
        """command: a module and its arguments.  title: in log lines.  environment: NAME=VALUE.

        descriptors: files that it inherits.  may_fail: it is started again, too, where it ends
        before it was ready once; else that is for `failure`.
        """
        prefix = ["env", *environment] if environment else []
        self._command = [*prefix, sys.executable, "-m", *command]
        self._settings, self.title = settings, title
        self._descriptors, self._may_fail = descriptors, may_fail
        self._process: Process | None = None
        self._is_stopping = False
        self._was_ready = False
        self._failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def start(self, on_ready: Callable[["ChildProcess"], None]) -> None:
        """on_ready: called each time the process says that it is ready."""
        self._task = asyncio.create_task(self._keep_running(on_ready))

    async def failure(self) -> int:
        """Waits until the process ends before it was ready once: its exit code."""
        return await self._failed

    def terminate(self) -> None:
        """It drains and ends; told again, it ends at once."""
        self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
        elif self._process is not None:
            self._task.cancel()  # it waits to start again

    async def stop(self) -> None:
        """Terminates it and waits for the end; kills it where that takes too long."""
        self.terminate()
        seconds = self._settings.shutdown_timeout_s + KILL_AFTER_S
        _, late = await asyncio.wait((self._task,), timeout=seconds)
        if late and self._process is not None:
            logger.warning("%s did not end within %g s and is killed", self.title, seconds)
            with suppress(ProcessLookupError):
                self._process.kill()
            await asyncio.wait((self._task,))

    async def _keep_running(self, on_ready: Callable[["ChildProcess"], None]) -> None:
        wait_s = _FIRST_WAIT_S
        while not self._is_stopping:
            process = await self._start()
            if await self._read_ready(process, on_ready):
                wait_s = _FIRST_WAIT_S
            code = await process.wait()
            if self._is_stopping:
                return
            if not (self._may_fail or self._was_ready):
                self._failed.set_result(code)
                return
            logger.warning(
                "%s (pid %d) ended with %d; it is started again", self.title, process.pid, code
            )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _start(self) -> Process:
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=PIPE,
            stdout=PIPE,
            pass_fds=self._descriptors,
            start_new_session=True,  # an interrupt from the keyboard reaches the supervisor alone
        )
        assert process.stdin is not None
        if self._is_stopping:
            process.terminate()
        with suppress(ConnectionError):  # it has died; its end says so
            process.stdin.write(settings_line(self._settings))
            await process.stdin.drain()
        return process

    async def _read_ready(
        self, process: Process, on_ready: Callable[["ChildProcess"], None]
    ) -> bool:
        """Reads to the end of its stdout; whether it was ready."""
        assert process.stdout is not None
        is_ready = False
        while line := await process.stdout.readline():
            if line == READY:
                is_ready = self._was_ready = True
                on_ready(self)
        return is_ready


def drain_on_signals(children: Sequence[ChildProcess], told: asyncio.Event) -> None:
    """SIGTERM and SIGINT set the event, on which children drain; another ends them at once."""

    def stop() -> None:
        if told.is_set():
            for child in children:
                child.terminate()
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)


async def run_until_told(
    children: Sequence[ChildProcess], told: asyncio.Event
) -> tuple[ChildProcess, int] | None:
    """Waits for the event; or for a child that does not get ready, and gives its exit code."""
    failures = {asyncio.create_task(child.failure()): child for child in children}
    end = asyncio.create_task(told.wait())
    try:
        await asyncio.wait((end, *failures), return_when=asyncio.FIRST_COMPLETED)
        ended = next((task for task in failures if task.done()), None)
        return None if ended is None else (failures[ended], ended.result())
    finally:
        for task in (end, *failures):
            task.cancel()
