"""Requests made from the OpenAPI schema, right and wrong ones: none is a fault of the server."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import InProcess

from bytetx.serve.app import ROUTES

NAMES = {"/predict": "classifier", "/predict_tokens": "tagger", "/embed_sparse": "sparse"}
NAMES |= dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "reranker")
NAMES |= dict.fromkeys(("/v1/completions", "/v1/chat/completions"), "writer")
NAMES |= dict.fromkeys(("/v1/systemone", "/v1/decisions"), "writer")


@pytest.mark.feature("Server", "a schema of every route")
@pytest.mark.parametrize(
    "route", sorted(key for key, route in ROUTES.items() if route.is_limited), ids=" ".join
)
def test_no_request_is_a_fault_of_the_server(in_process: InProcess, route: tuple[str, str]) -> None:
    """Against the model that the route is for, under any name."""
    method, path = route
    name = NAMES.get(path, "embedder")
    one = in_process.with_settings(only=name, accepts_any_name=True)
    schema = schemathesis.openapi.from_dict(one.get("/openapi.json").json())
    operation = schema[path][method]
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))

    @settings(
        max_examples=10,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def check(case: schemathesis.Case) -> None:
        sent = case.as_transport_kwargs(base_url="http://test")
        options = {key: sent[key] for key in ("json", "headers") if key in sent}
        if "data" in sent:
            options["content"] = sent["data"]
        answer = one.request(method, path, **options)
        assert answer.status_code < 500, (sent, answer.text)

    check()
