"""One replica of `bytetx serve --replicas`: a server of its own, started by replicas.py."""

import asyncio
import logging
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import uvloop

from bytetx.errors import BytetxError, OptionError
from bytetx.ops.host import limit_heaps
from bytetx.serve.backends import open_backend
from bytetx.serve.http_server import bind, make_site, run_site
from bytetx.serve.logs import set_up_logs
from bytetx.serve.metrics import Metrics
from bytetx.serve.replica_records import ReplicaRecorder
from bytetx.serve.settings import ServeSettings, read_settings, say_ready

logger = logging.getLogger("bytetx.serve")


def main() -> None:
    """`INDEX FOLDER`; the settings are a line of standard input, which stays open.

    Exits 0 after it has drained, 1 or 2 where it cannot serve.
    """
    index, folder = int(sys.argv[1]), Path(sys.argv[2])
    settings = read_settings(sys.stdin.buffer.readline())
    if index:  # one of them listens there, and shows all
        settings = replace(settings, prometheus_port=None)
    limit_heaps()
    set_up_logs(settings)
    threading.Thread(target=_end_with_the_supervisor, daemon=True).start()
    try:
        uvloop.run(_serve(settings, index, folder))
    except BytetxError as error:
        logger.error("replica %d: %s", index, error)
        sys.exit(2 if isinstance(error, OptionError) else 1)


async def _serve(settings: ServeSettings, index: int, folder: Path) -> None:
    """Loads first and listens then: the kernel gives connections to whoever listens."""
    ends = asyncio.Event()
    metrics = Metrics(settings)
    # A replica that is lost ends, and the supervisor starts it again.
    opened = open_backend(settings, metrics, on_lost=ends.set, changes_adapters=False)
    async with opened as backend:
        recorder = ReplicaRecorder(metrics, index=index, folder=folder)
        site = make_site(settings, recorder)
        metrics.count_running(lambda: site.num_running)
        site.backend = backend
        sockets = [bind(settings, shares_port=True)]
        await run_site(site, recorder.listen, sockets, ends=ends, on_ready=say_ready)


def _end_with_the_supervisor() -> None:
    """Standard input ends when the supervisor does, however it ended: nobody else would."""
    # Not through a buffer, whose lock would outlive this thread.
    while os.read(sys.stdin.fileno(), 4096):
        continue
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
