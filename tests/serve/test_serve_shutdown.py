"""SIGTERM under load, in every arrangement: what was accepted is answered or refused."""

import asyncio
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import Server, raw_request, start_server

CALLERS = 12
BODY = json.dumps({"inputs": ["the quick brown fox jumps over the lazy dog"] * 4}).encode()
MORE = "Content-Type: application/json\r\n"
ARRANGEMENTS = {
    "one process": ([], r"\bready\b"),
    "front-ends": (["--frontends", "2"], r"\bready\b"),
    "replicas": (["--replicas", "2"], r"\(2 of 2\)"),
}


async def answer(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """(status, whether the connection stays open) of the next answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    await reader.readexactly(length)
    return int(head.split()[1]), b"connection: close" not in head


async def caller(number: int, address: tuple[str, int], counts: Counter[str]) -> None:
    """Sends requests until the server refuses connections; each is counted by its end.

    One half sends each request on a new connection, head and body apart as many clients do.
    """
    head, reuses = raw_request(BODY, more_headers=MORE).removesuffix(BODY), number % 2 == 0
    while True:
        try:
            reader, writer = await asyncio.open_connection(*address)
        except ConnectionRefusedError:
            counts["not accepted"] += 1
            return
        stays = True
        try:
            while stays:
                writer.write(head)
                await writer.drain()
                if number % 3:
                    await asyncio.sleep(0)
                writer.write(BODY)
                status, stays = await answer(reader)
                counts[str(status)] += 1
                stays &= reuses
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            counts[f"lost: {type(error).__name__}"] += 1
        finally:
            writer.close()


async def end_under_load(server: Server) -> Counter[str]:
    host, port = server.url.removeprefix("http://").split(":")
    counts: Counter[str] = Counter()
    callers = [
        asyncio.create_task(caller(number, (host, int(port)), counts)) for number in range(CALLERS)
    ]
    while counts["200"] < 5 * CALLERS:
        await asyncio.sleep(0.01)
    server.process.terminate()
    async with asyncio.timeout(60):
        await asyncio.gather(*callers)
    return counts


def run_arrangement(name: str, *, model: Path, log: Path) -> tuple[Counter[str], int, str]:
    """(the ends of all requests, the server's exit code, its log)"""
    options, ready = ARRANGEMENTS[name]
    strict = {"PYTHONWARNINGS": "error::RuntimeWarning,default::ResourceWarning"}
    arguments = ["--model", str(model), *options]
    with start_server(arguments, log=log, waits_for=ready, environment=strict) as server:
        counts = asyncio.run(end_under_load(server))
        code = server.process.wait(60)
    return counts, code, server.read_log()


@pytest.mark.feature("Server", "drain on SIGTERM")
def test_sigterm_under_load_loses_no_request(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """In all arrangements at a time: nearly all of it is the start of the processes."""
    model = checkpoints["embedder"]
    with ThreadPoolExecutor(len(ARRANGEMENTS)) as pool:
        runs = {
            name: pool.submit(run_arrangement, name, model=model, log=tmp_path / name)
            for name in ARRANGEMENTS
        }
    for name, run in runs.items():
        counts, code, log = run.result()
        lost = {kind: count for kind, count in counts.items() if kind not in ("200", "503")}
        assert lost == {"not accepted": CALLERS}, (name, counts, log)
        assert code == 0, (name, log)
        assert "never awaited" not in log and "Traceback" not in log, (name, log)
