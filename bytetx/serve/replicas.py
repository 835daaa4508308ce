"""Several server processes behind one port: starts them, starts dead ones again, drains them.

Each replica is a whole server on GPUs of its own (replica_process.py). The kernel shares new
connections among the sockets that listen on the port (SO_REUSEPORT).
"""

import asyncio
import logging
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from bytetx.errors import BytetxError, OptionError
from bytetx.serve.logs import set_up_logs
from bytetx.serve.settings import READY, ServeSettings, settings_line

logger = logging.getLogger("bytetx.serve")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # before a replica that died is started again
_KILL_AFTER_S = 10.0  # beyond the time that a replica may drain


def serve_replicas(
    settings: ServeSettings, num_replicas: int, *, visible_devices: str | None = None
) -> None:
    """Serves until SIGTERM or SIGINT, and returns once what runs is answered.

    visible_devices: CUDA_VISIBLE_DEVICES of this process.
    Raises OptionError for settings that replicas cannot share, BytetxError where a replica does not
    get ready.
    """
    set_up_logs(json_output=settings.json_output)
    if settings.uds_path is not None:
        raise OptionError("--replicas share a port, not a --uds-path; drop one of them")
    if settings.frontends > 1:
        raise OptionError("--replicas and --frontends exclude each other")
    devices = _devices(settings, num_replicas, visible_devices)
    asyncio.run(_Supervisor(settings, devices).run())


def share_gpus(gpus: Sequence[str], num_replicas: int, *, tp: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each replica: tp GPUs of their own.

    Raises OptionError where there are too few.
    """
    if num_replicas * tp > len(gpus):
        each = f" of {tp} GPUs each" if tp > 1 else ""
        raise OptionError(
            f"--replicas {num_replicas}{each} need {num_replicas * tp} GPUs, there are {len(gpus)}"
        )
    return [",".join(gpus[i * tp : (i + 1) * tp]) for i in range(num_replicas)]


def _devices(
    settings: ServeSettings, num_replicas: int, visible_devices: str | None
) -> list[str | None]:
    """The GPUs of each replica; None where they run on the CPU."""
    if settings.device.startswith("cuda:"):
        raise OptionError(
            f"--device {settings.device} is one GPU; with --replicas give cuda: each has its own"
        )
    if settings.device == "cpu":
        return [None] * num_replicas
    import torch  # takes a second, which a server on the CPU need not wait for

    num_gpus = torch.cuda.device_count()
    if num_gpus == 0 and settings.device == "auto":
        return [None] * num_replicas
    gpus = visible_devices.split(",") if visible_devices else [str(i) for i in range(num_gpus)]
    return list(share_gpus(gpus[:num_gpus], num_replicas, tp=settings.tp))


class _Supervisor:
    """One of a process: the replicas, by their index."""

    def __init__(self, settings: ServeSettings, devices: Sequence[str | None]):
        self._settings, self._devices = settings, devices
        self._processes: dict[int, Process] = {}
        self._ready: set[int] = set()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        with (
            tempfile.TemporaryDirectory(prefix="bytetx-") as folder,
            reserve_port(self._settings.hostname, self._settings.port) as place,
        ):
            self._settings = replace(self._settings, port=place.getsockname()[1])
            keepers = [
                asyncio.create_task(self._keep(index, folder)) for index in range(self._size)
            ]
            try:
                await self._until_told(keepers)
            finally:
                self._stop()
                await self._end(keepers)
        logger.info("ended")

    @property
    def _size(self) -> int:
        return len(self._devices)

    def _stop(self) -> None:
        """Replicas drain; told again, they end at once."""
        self._stopping.set()
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    async def _until_told(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        """Returns when a signal comes; raises what a keeper raises."""
        told = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((told, *keepers), return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()
        for keeper in keepers:
            if keeper.done():
                keeper.result()

    async def _end(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        seconds = self._settings.shutdown_timeout_s + _KILL_AFTER_S
        _, late = await asyncio.wait(keepers, timeout=seconds)
        for process in self._processes.values():
            if process.returncode is None:
                logger.warning("a replica did not end within %g s and is killed", seconds)
                process.kill()
        if late:
            await asyncio.wait(late)
        for keeper in keepers:
            if not keeper.cancelled() and keeper.exception() is not None:
                logger.debug("a replica did not get ready", exc_info=keeper.exception())

    async def _keep(self, index: int, folder: str) -> None:
        """Runs a replica, again whenever it dies, until the supervisor is told to stop.

        Raises BytetxError where it dies before it was ready for the first time.
        """
        pause = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            process = await self._start(index, folder)
            is_ready = await self._wait_until_ready(index, process)
            code = await process.wait()
            if self._stopping.is_set():
                return
            if is_ready:
                pause = _FIRST_PAUSE_S
            elif index not in self._ready:
                raise BytetxError(f"replica {index} ended with {code} before it was ready")
            logger.warning("replica %d ended with %d; it is started again", index, code)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _start(self, index: int, folder: str) -> Process:
        settings = self._settings
        command = [sys.executable, "-m", "bytetx.serve.replica_process", str(index), folder]
        if (gpus := self._devices[index]) is not None:
            command = ["env", f"CUDA_VISIBLE_DEVICES={gpus}", *command]
        elif self._settings.device == "auto":
            settings = replace(settings, device="cpu")
        # A process group of its own: an interrupt from the keyboard is passed on from here alone.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=None, start_new_session=True
        )
        assert process.stdin is not None
        with suppress(ConnectionError):  # it has died; its end says so
            process.stdin.write(settings_line(settings))
            await process.stdin.drain()
        self._processes[index] = process
        if self._stopping.is_set():
            process.terminate()
        return process

    async def _wait_until_ready(self, index: int, process: Process) -> bool:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if line == READY:
                self._ready.add(index)
                logger.info("replica %d is ready (%d of %d)", index, len(self._ready), self._size)
                return True
        return False


def reserve_port(hostname: str, port: int) -> socket.socket:
    """A socket that keeps the port for replicas, and does not listen: no connection waits there.

    Raises OptionError where the address cannot be had, or another server listens on it, even one
    that shares it.
    """
    try:
        found = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
        kept = socket.socket(family, kind, protocol)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(place)
    except OSError as error:
        raise OptionError(
            f"cannot listen on {hostname}:{port}: {error.strerror or error}; choose another "
            "--hostname or --port"
        ) from error
    return kept
