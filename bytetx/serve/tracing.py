"""OpenTelemetry spans of requests, exported over OTLP where the user names an endpoint."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from bytetx.errors import OptionError


class Span(Protocol):
    def set_attribute(self, key: str, value: Any) -> None: ...


class Tracer:
    """Spans that continue the trace of the caller's traceparent header."""

    def __init__(self, endpoint: str, *, service_name: str):
        """endpoint: http://HOST:4318, where a collector takes OTLP over HTTP."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.propagate import extract
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise OptionError(
                'tracing needs the extra otlp: pip install "bytetx[otlp]", or leave out '
                "--otlp-endpoint"
            ) from error
        url = endpoint.rstrip("/")
        url = url if url.endswith("/v1/traces") else f"{url}/v1/traces"
        self._provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("bytetx.serve")
        self._extract = extract

    def span(self, name: str, headers: Mapping[str, str]) -> AbstractContextManager[Span]:
        return self._tracer.start_as_current_span(name, context=self._extract(headers))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()
