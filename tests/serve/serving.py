"""Runs the server for tests: as a process on a free port, or its application in this process."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from bytetx.serve.app import build_app
from bytetx.serve.engine import LocalBackend, ServedModel
from bytetx.serve.metrics import Metrics
from bytetx.serve.settings import ServeSettings
from bytetx.serve.site import Site

KEY = "sesame"  # of the servers that want one
_START_S = 180.0  # on a busy machine the import of torch alone may take a minute
_IDLE_S = 60.0  # for a server to forget requests whose clients left
# Asks Linux for SIGTERM when the parent ends (PR_SET_PDEATHSIG is 1), and becomes the program.
_END_WITH_PARENT = (
    "import ctypes, os, signal, sys; "
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM); os.execv(sys.argv[1], sys.argv[1:])"
)


@dataclass
class Server:
    """A running server process."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    def read_log(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Waits until the log has the pattern; fails where the process ends first."""
        deadline = asyncio.new_event_loop().time() + _START_S
        clock = asyncio.new_event_loop()
        while True:
            found = re.search(pattern, self.read_log())
            if found is not None:
                return found
            ended = self.process.poll()
            assert ended is None, f"the server ended with {ended}: {self.read_log()}"
            assert clock.time() < deadline, f"no {pattern!r} in the log: {self.read_log()}"
            try:
                self.process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue

    def stop(self, *, number: int = signal.SIGTERM) -> int:
        """Sends a signal and gives the exit code."""
        self.process.send_signal(number)
        return self.process.wait(30)

    def wait_until_idle(self) -> None:
        """AssertionError where the server still has a request that nobody waits for."""
        end = time.monotonic() + _IDLE_S
        with self.client() as client:
            while "bytetx_concurrent_requests 0.0" not in client.get("/metrics").text:
                assert time.monotonic() < end, client.get("/stats.json").text
                time.sleep(0.02)

    def client(self, *, key: str | None = KEY, **options: Any) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, **options)


def raw_request(
    body: bytes, *, path: str = "/embed", length: int | None = None, more_headers: str = ""
) -> bytes:
    """The bytes of a POST.  length: what it says of the body; None is the truth.  more_headers:
    each ends with a line break."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n{more_headers}"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


@contextmanager
def start_server(
    arguments: Sequence[str],
    *,
    log: Path,
    waits_for: str = r"\bready\b",
    environment: dict[str, str] | None = None,
    ends_with_us: bool = False,
) -> Iterator[Server]:
    """`bytetx serve` on a free port of the loopback address; killed at the end where it runs.

    ends_with_us: it ends when this thread does, even where the process is killed (Linux).
    """
    command = [sys.executable, "-m", "bytetx", "serve", "--port", "0", "--device", "cpu"]
    if ends_with_us:
        command[1:1] = ["-c", _END_WITH_PARENT, sys.executable]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--threads", "1", *arguments],
            stdout=file,
            stderr=file,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | (environment or {}),
        )
    server = Server(process, log)
    try:
        server.url = server.wait_for(r"listening on ((?:http|unix):[^\s\"]+)").group(1)
        server.wait_for(waits_for)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


class InProcess:
    """The application around loaded models; `with_settings` gives others around the same."""

    def __init__(self, settings: ServeSettings, served: Sequence[ServedModel]):
        self.settings, self.served = settings, served
        self.metrics = Metrics(settings)
        self.metrics.attach(served)
        self.site = Site(settings, self.metrics)
        self.num_lost = 0
        self.site.backend = LocalBackend(served, on_lost=self._count_lost)
        self.site.phase = "ready"
        self.app = build_app(self.site)

    def _count_lost(self) -> None:
        self.num_lost += 1

    def with_settings(self, *, only: str | None = None, **changes: Any) -> "InProcess":
        """only: the name of the one model that is served."""
        served = [one for one in self.served if only in (None, one.facts.name)]
        return InProcess(replace(self.settings, **changes), served)

    def model(self, name: str) -> Any:
        """The Model that is served under that name."""
        return next(one.model.model for one in self.served if one.facts.name == name)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request to the application, in an event loop of its own."""
        return asyncio.run(self._request(method, path, **options))

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        content = {"json": body} if body is not None else {}
        return self.request("POST", path, **content, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    async def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.request(method, path, **options)

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30)
