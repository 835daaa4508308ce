"""Traces: a span for each request, in the trace of its caller, at an OTLP collector."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from serving import InProcess

from bytetx.serve.app import build_app
from bytetx.serve.tracing import Tracer

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """(its address, the bodies that it got)"""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Tests print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.feature("Server", "traces (OTLP)")
def test_spans(in_process: InProcess, collector: tuple[str, list[bytes]]) -> None:
    address, bodies = collector
    one = in_process.with_settings()
    one.site.tracer = Tracer(address, service_name="test")
    one.app = build_app(one.site)
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "X-Request-Id": "r-1"}
    assert one.post("/embed", {"inputs": "a"}, headers=headers).status_code == 200
    assert one.post("/embed", {"inputs": 7}).status_code == 422
    one.site.tracer.close()
    spans = [
        span
        for body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    good, bad = sorted(spans, key=lambda span: span.start_time_unix_nano)
    assert good.name == "POST /embed" and good.trace_id.hex() == TRACE
    values = {entry.key: entry.value for entry in good.attributes}
    assert values["bytetx.request_id"].string_value == "r-1"
    assert values["http.response.status_code"].int_value == 200
    assert values["bytetx.tokens"].int_value > 0
    assert {e.key: e.value for e in bad.attributes}["http.response.status_code"].int_value == 422
