"""A server with the status page and answers that a test sets, in place of bytetx serve."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "bytetx" / "serve" / "static" / "index.html"


def stats(num_steps: int = 0, *, name: str = "all-MiniLM-L6-v2") -> dict[str, Any]:
    """GET /stats.json of a server that has run num_steps steps of ever more padding."""
    steps = [
        {
            "t": 10.0 + i,
            "sequences": 8 + i % 7,
            "tokens": 1000 + 61 * (i * 37 % 29),
            "padded_tokens": 2200 + 150 * (i * 53 % 31),
            "seconds": 0.021,
        }
        for i in range(num_steps)
    ]
    tasks = {
        name: ["embed"],
        "emotions": ["classify"],
        "qwen3": ["generate"],
        "reranker": ["rerank"],
        "entities": ["tag"],
        "decider": ["decide"],
    }
    return {
        "models": [
            {
                "name": model,
                "family": "bert",
                "dtype": "float32",
                "device": "cpu",
                "parameters": 22_713_216,
                "max_tokens": 256,
                "tasks": names,
                "adapters": ["legal", "<b>news</b>"] if model == "qwen3" else [],
            }
            for model, names in tasks.items()
        ],
        "uptime_s": 4242.0,
        "queue": {"requests": 3, "tokens": 412, "running": 17},
        "rates": {"requests_per_s": 95.25, "tokens_per_s": 8570.0},
        "latency_ms": {"p50": 41.2, "p95": 96.0, "p99": 1520.0},
        "routes": [
            {"route": "/embed", "requests": 9000, "p50": 40.0, "p95": 90.0, "p99": 1200.0},
            {
                **{"route": "/v1/chat/completions", "requests": 81},
                **{"p50": 900.0, "p95": 1500.0, "p99": 12_000.0},
            },
        ],
        "totals": {
            "text_tokens": 7_311_060,
            "prefix_saved_tokens": 1_462_212,
            "requests": 81234,
            "tokens": 7_311_060,
            "padding_saved_tokens": 12_054_321,
            "truncated": 12,
            "errors": 3,
        },
        "steps": steps,
    }


Answer = tuple[int, Any]  # status, and what is sent as JSON; a str is sent as server-sent events


@dataclass
class StandIn:
    """answers: by route.  api_key: asked for where set.  seen: (route, body) of every POST."""

    answers: dict[str, Answer]
    api_key: str = ""
    seen: list[tuple[str, Any]] = field(default_factory=list)
    url: str = ""


@contextmanager
def stand_in(answers: dict[str, Answer]) -> Iterator[StandIn]:
    """The server, on a port of its own, until the block ends."""
    state = StandIn(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/":
                return self._send(200, "text/html; charset=utf-8", PAGE.read_bytes())
            self._answer()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.seen.append((self.path, json.loads(body)))
            self._answer()

        def _answer(self) -> None:
            if state.api_key and self.headers["Authorization"] != f"Bearer {state.api_key}":
                status, content = 401, {"error": "no such key", "error_type": "validation"}
            else:
                status, content = state.answers.get(self.path, (404, {"error": "no such route"}))
            if isinstance(content, str):
                return self._send(status, "text/event-stream", content.encode())
            self._send(status, "application/json", json.dumps(content).encode())

        def _send(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("x-compute-tokens", "12")
            self.send_header("x-queue-time", "2")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Requests are not printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
