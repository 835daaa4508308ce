"""HTTP servers that suite `serve` measures, each in a process of its own, and how to ask them."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bytetx.errors import BytetxError

MODEL = "model"  # the name that requests ask for
_START_S = 600.0  # until a server is ready; vLLM compiles before it is
_STOP_S = 30.0
_LOG_LINES = 3
_LOG_BYTES = 1 << 20


class ServerError(BytetxError):
    """A server that cannot be started, or does not answer as it should."""


@dataclass(frozen=True, slots=True)
class Command:
    """Command that starts a server.

    arguments: {port} stands for its port.   path: of its route for embeddings, as OpenAI's.
    environment: what it needs beside this process's own, as `env` takes it.
    ready_text: in its log once it is ready; None: as soon as it answers /health.
    """

    name: str
    arguments: Sequence[str]
    path: str
    environment: Sequence[str] = ()
    ready_text: str | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    name: str
    port: int
    path: str

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """f32 [num_texts, dimensions].  Raises ServerError where it answers otherwise."""
        body = request_body(texts).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{self.path}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                rows = sorted(json.load(answer)["data"], key=lambda row: row["index"])
        except urllib.error.HTTPError as error:
            said = error.read(300).decode(errors="replace")
            raise ServerError(f"{self.name} answers {error.code}: {said}") from error
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{self.name} gave no embeddings: {error!r}") from error
        return np.array([row["embedding"] for row in rows], np.float32)


def request_body(texts: Sequence[str]) -> str:
    """The JSON of a request to OpenAI's route; every server gets the same."""
    return json.dumps({"model": MODEL, "input": list(texts), "encoding_format": "float"})


def bytetx_server(
    checkpoint: Path, *, device: str, dtype: str, frontends: int, replicas: int
) -> Command:
    """The server of this package, with the limits of requests raised beyond those of the suite."""
    arguments = [sys.executable, "-m", "bytetx", "serve", "--model", f"{MODEL}={checkpoint}"]
    arguments += ["--port", "{port}", "--device", device, "--dtype", dtype]
    arguments += ["--frontends", str(frontends), "--replicas", str(replicas)]
    return Command(
        "bytetx",
        [*arguments, "--max-concurrent-requests", "4096"],
        "/v1/embeddings",
        ready_text=f"({replicas} of {replicas})" if replicas > 1 else None,
    )


def infinity_server(python: Path, checkpoint: Path, *, device: str, dtype: str) -> Command:
    """python: of an environment that has infinity-emb[server,torch]."""
    program = str(python.absolute().parent / "infinity_emb")
    arguments = [program, "v2", "--model-id", str(checkpoint), "--served-model-name", MODEL]
    arguments += ["--host", "127.0.0.1", "--port", "{port}", "--engine", "torch"]
    arguments += ["--device", device, "--dtype", dtype, "--no-bettertransformer"]
    arguments += ["--log-level", "warning"]
    settings = ("HF_HUB_OFFLINE=1", "DO_NOT_TRACK=1", "INFINITY_ANONYMOUS_USAGE_STATS=0")
    return Command("infinity", arguments, "/embeddings", settings)


def vllm_server(python: Path, checkpoint: Path, *, dtype: str) -> Command:
    """python: of an environment that has vllm; on a GPU, of which it takes less than half."""
    program = str(python.absolute().parent / "vllm")
    arguments = [program, "serve", str(checkpoint), "--served-model-name", MODEL]
    arguments += ["--runner", "pooling", "--host", "127.0.0.1", "--port", "{port}"]
    arguments += ["--dtype", dtype, "--gpu-memory-utilization", "0.4"]
    arguments += ["--disable-log-requests", "--uvicorn-log-level", "warning"]
    return Command("vllm", arguments, "/v1/embeddings", ("HF_HUB_OFFLINE=1",))


def package_version(python: Path, package: str) -> str | None:
    """The version of a package in another environment; None where it is not installed there."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None if found.returncode == 0 else None


@contextmanager
def running(command: Command) -> Iterator[Server]:
    """The server, ready, until the block ends.

    Raises ServerError where it ends before it is ready or is not in time, with its last lines.
    """
    port = _free_port()
    arguments = [argument.replace("{port}", str(port)) for argument in command.arguments]
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            # The process keeps this one's environment; `env` adds to it.
            ["env", *command.environment, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_until_ready(process, port, command.ready_text, log.fileno())
            yield Server(command.name, port, command.path)
        except _NotReady as error:
            log.seek(0)
            last = " | ".join(line.strip() for line in log.readlines()[-_LOG_LINES:])
            raise ServerError(f"{command.name} {error}; its last lines: {last}") from error
        finally:
            _stop(process)


class _NotReady(Exception):
    """Why a server is not ready."""


def _wait_until_ready(
    process: subprocess.Popen[bytes], port: int, ready_text: str | None, log: int
) -> None:
    """log: the descriptor of its log, whose position is that of the process, too."""
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise _NotReady(f"ended with exit code {process.returncode} before it was ready")
        if ready_text is None or ready_text.encode() in os.pread(log, _LOG_BYTES, 0):
            url = f"http://127.0.0.1:{port}/health"
            with suppress(OSError), urllib.request.urlopen(url, timeout=5):
                return
        time.sleep(0.1)
    raise _NotReady(f"was not ready after {_START_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
