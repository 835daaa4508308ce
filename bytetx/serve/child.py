"""A process that the supervisor starts: `engine SOCKET`, or `frontend SOCKET FD`.

Its settings come as a line of JSON on stdin, which stays open: when it closes, the supervisor is
gone, and the process ends.
"""

import asyncio
import socket
import sys

import uvloop

from bytetx.errors import BytetxError, DeviceLostError
from bytetx.ops.host import limit_heaps
from bytetx.serve.http_server import accept_again, make_site, run_site
from bytetx.serve.logs import set_up_logs
from bytetx.serve.remote import EngineClient
from bytetx.serve.settings import ServeSettings, read_settings, say_ready


def main(arguments: list[str]) -> int:
    """Runs one of the two and gives the exit code."""
    settings = read_settings(sys.stdin.buffer.readline())
    limit_heaps()
    set_up_logs(settings)
    try:
        if arguments[0] == "engine":
            uvloop.run(_engine(settings, arguments[1]))
        else:
            uvloop.run(_frontend(settings, arguments[1], int(arguments[2])))
    except (BytetxError, DeviceLostError) as error:
        print(f"error: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    return 0


async def _engine(settings: ServeSettings, path: str) -> None:
    from bytetx.serve.engine_process import run_engine

    ends = asyncio.Event()
    await _watch_stdin(ends)
    await run_engine(settings, path, ends)


async def _frontend(settings: ServeSettings, path: str, descriptor: int) -> None:
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    accept_again(listener)
    client = EngineClient(path)
    site = make_site(settings, client)
    client.num_running = lambda: site.num_running
    ends = asyncio.Event()
    await _watch_stdin(ends)
    background = [
        asyncio.create_task(client.keep_connected()),
        asyncio.create_task(client.flush_records()),
    ]

    async def start() -> None:
        site.backend = client
        await client.wait_until_connected()

    try:
        await run_site(site, start, [listener], ends=ends, on_ready=say_ready)
    finally:
        for task in background:
            task.cancel()


async def _watch_stdin(ends: asyncio.Event) -> None:
    """Sets `ends` when the supervisor is gone."""

    class Watcher(asyncio.Protocol):
        def connection_lost(self, error: Exception | None) -> None:
            ends.set()

    await asyncio.get_running_loop().connect_read_pipe(Watcher, sys.stdin.buffer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
