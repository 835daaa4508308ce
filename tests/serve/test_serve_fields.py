"""The policy for fields: null is the default, unsupported ones and unknown ones are named."""

import logging
from collections.abc import Iterator
from types import NoneType
from typing import Any, get_args

import pytest
from serving import InProcess

from bytetx.serve.app import ROUTES
from bytetx.serve.errors import style_of
from bytetx.serve.schemas import ANY, EmbedRequest, Fields
from bytetx.serve.schemas_generate import ChatRequest

BODIES: dict[str, dict[str, Any]] = {
    "/embed": {"inputs": "a fox"},
    "/embed_all": {"inputs": "a fox"},
    "/embed_sparse": {"inputs": "a fox", "model": "sparse"},
    "/predict": {"inputs": "a fox", "model": "classifier"},
    "/predict_tokens": {"inputs": "a fox", "model": "tagger"},
    "/v1/embed": {"texts": ["a fox"]},
    "/v2/embed": {"texts": ["a fox"], "input_type": "search_query"},
    "/score": {"text_1": "a fox", "text_2": ["a dog"]},
    "/v1/score": {"text_1": "a fox", "text_2": ["a dog"]},
    "/classify": {"input": "a fox", "model": "classifier"},
    "/pooling": {"input": "a fox"},
    "/extract": {"texts": ["a fox"], "labels": ["x"], "model": "extractor"},
    "/fill_schema": {"texts": ["a"], "schema": {"entities": ["x"]}, "model": "schemas"},
    "/rerank": {"query": "a", "texts": ["b", "c"], "model": "reranker"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {}},
    "/tokenize": {"inputs": "a fox"},
    "/decode": {"ids": [5, 6]},
    "/vertex": {"instances": [{"inputs": "a fox"}]},
    "/tasks": {"task": "score", "texts": ["a fox"], "model": "writer"},
    "/embeddings": {"input": "a fox"},
    "/v1/embeddings": {"input": "a fox"},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"], "model": "reranker"},
    "/v2/rerank": {"query": "a", "documents": ["b", "c"], "model": "reranker"},
    "/v1/systemone": {"state": "a fox", "questions": {"a": {"type": "noul"}}, "model": "writer"},
    "/v1/decisions": {"input": "a fox", "questions": [{"type": "predicate"}], "model": "writer"},
    "/v1/completions": {
        **{"prompt": "a", "model": "writer", "max_tokens": 3, "seed": 5, "stop": "x"},
        "stream_options": {},
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        **{"model": "writer", "max_tokens": 3, "seed": 5, "stream_options": {}},
    },
}
# They change what is served, or need a folder: tests of adapters, lazy servers and batches have
# theirs.
APART = ("/adapters/load", "/adapters/unload", "/models/load", "/models/unload", "/v1/batches")
ALL_KINDS = {path: route.body for (_, path), route in ROUTES.items() if route.body is not None}
KINDS = {path: kind for path, kind in ALL_KINDS.items() if path not in APART}
OURS = [path for path, kind in KINDS.items() if kind.refuses_unknown]
OPENAIS = [path for path, kind in KINDS.items() if not kind.refuses_unknown]


def tables(
    body: dict[str, Any], kind: type[Fields]
) -> Iterator[tuple[dict[str, Any], type[Fields]]]:
    """A body and the tables in it, with their kinds."""
    yield body, kind
    for name, field in kind.model_fields.items():
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, Fields) and name in body:
                yield from tables(body[name], inner)


def content(answer: Any) -> Any:
    """Return the part that does not differ from one request to the next."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    changing = ("id", "created")
    return {k: body[k] for k in body if k not in changing} if type(body) is dict else body


def copied(value: Any) -> Any:
    return {key: copied(value[key]) for key in value} if type(value) is dict else value


def test_every_route_with_a_body_is_here() -> None:
    assert BODIES.keys() == KINDS.keys()
    assert set(OPENAIS) == {path for path in KINDS if style_of(path) == "openai"}


@pytest.mark.parametrize("path", BODIES)
def test_an_optional_field_may_be_null(in_process: InProcess, path: str) -> None:
    wanted = content(in_process.post(path, BODIES[path]))
    num_tables = sum(1 for _ in tables(BODIES[path], KINDS[path]))
    for number in range(num_tables):
        kind = list(tables(BODIES[path], KINDS[path]))[number][1]
        for name, field in kind.model_fields.items():
            body = copied(BODIES[path])
            table = list(tables(body, KINDS[path]))[number][0]
            if not field.is_required() and not table.get(name):
                table[name] = None
                assert content(in_process.post(path, body)) == wanted, name
        body = copied(BODIES[path])
        list(tables(body, KINDS[path]))[number][0].update(dict.fromkeys(kind.unsupported))
        assert content(in_process.post(path, body)) == wanted
        for name in (name for name, field in kind.model_fields.items() if field.is_required()):
            body = copied(BODIES[path])
            list(tables(body, KINDS[path]))[number][0][name] = None
            assert in_process.post(path, body).status_code in (400, 422), name


@pytest.mark.parametrize("path", OURS)
def test_an_unknown_field_was_passed_over(in_process: InProcess, path: str) -> None:
    kind, lenient = KINDS[path], in_process.with_settings(ignores_unknown_fields=True)
    num_tables = sum(1 for _ in tables(BODIES[path], kind))
    for number in range(num_tables):
        for value in (1, None, {"a": "z" * 999}):
            body = copied(BODIES[path])
            list(tables(body, kind))[number][0]["frobnicate"] = value
            refused = in_process.post(path, body)
            assert refused.status_code == 422 and refused.json()["error_type"] == "validation"
            assert "frobnicate" in refused.json()["error"] and len(refused.text) < 600
            assert content(lenient.post(path, body)) == content(in_process.post(path, BODIES[path]))
    page = lenient.get("/metrics").text
    assert f'bytetx_ignored_fields_total{{route="{path}"}} {3.0 * num_tables}' in page


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        ("/embed", {"inputs": "a", "normalise": False}, "normalize"),
        ("/embed", {"inputs": "a", "dimension": 8}, "dimensions"),
        ("/embed", {"input": "a"}, "inputs"),
        ("/embed", {"inputs": "a", "Truncate": True}, "truncate"),
        ("/rerank", {"query": "a", "text": ["b"]}, "texts"),
        ("/predict_tokens", {"inputs": "a", "aggregation": "none"}, "aggregation_strategy"),
        ("/similarity", {"inputs": {"source": "a", "sentences": ["b"]}}, "source_sentence"),
        ("/", {"inputs": "a", "normalise": False}, "normalize"),
        ("/", {"inputs": "a", "parameters": {"normalise": False}}, "normalize"),
        ("/invocations", {"inputs": "a", "promt_name": "query"}, "prompt_name"),
        ("/vertex", {"instances": [{"inputs": "a", "normalise": False}]}, "normalize"),
        ("/vertex", {"instance": []}, "instances"),
    ],
)
def test_a_misspelt_field_is_recognised(
    in_process: InProcess, path: str, body: dict[str, Any], meant: str
) -> None:
    answer = in_process.post(path, body)
    assert answer.status_code == 422
    if path != "/similarity":  # a table within the body names what it lacks
        assert f"did you mean {meant}?" in answer.json()["error"]
    else:
        assert meant in answer.json()["error"]


@pytest.mark.parametrize("path", OPENAIS)
def test_openais_clients_may_send_more(
    in_process: InProcess, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted, and one line of the log says so, not one for each request."""
    one = in_process.with_settings()
    wanted = content(in_process.post(path, BODIES[path]))
    with caplog.at_level(logging.WARNING, logger="bytetx.serve"):
        for number in range(3):
            more = {f"new_field_{number}": 1, "z" * 3000: {"a": 1}}
            assert content(one.post(path, BODIES[path] | more)) == wanted
    assert len([r for r in caplog.records if "passed over" in r.message]) == 1
    assert f'bytetx_ignored_fields_total{{route="{path}"}} 6.0' in one.get("/metrics").text


def cases() -> Iterator[Any]:
    for path in OPENAIS:
        for name, values in KINDS[path].unsupported.items():
            yield pytest.param(path, name, values, id=f"{path} {name}")


@pytest.mark.parametrize(("path", "name", "values"), list(cases()))
def test_what_is_not_supported_is_named(
    in_process: InProcess, path: str, name: str, values: tuple[Any, ...]
) -> None:
    assert name not in KINDS[path].model_fields
    body = BODIES[path]
    if values == (ANY,):
        assert in_process.post(path, body | {name: ["anything"]}).status_code == 200
        return
    for value in (
        "something",
        {"type": "function", "function": {"name": "f"}},
        7,
        True,
        False,
        0,
        [1],
    ):
        if not any(value == one and type(value) is type(one) for one in values):
            answer = in_process.post(path, body | {name: value})
            assert answer.status_code == 400, (value, answer.text)
            error = answer.json()["error"]
            assert error["param"] == name and error["code"] == "unsupported_parameter"
            assert error["message"].startswith(f"{name} is not supported")
    for value in values:
        assert in_process.post(path, body | {name: value}).status_code == 200, value


@pytest.mark.parametrize(
    "name",
    [
        *("tool_choice", "guided_json", "guided_regex", "guided_choice", "response_format"),
        *("bad_words", "best_of", "use_beam_search", "suffix", "modalities", "audio", "store"),
        *("echo", "functions", "parallel_tool_calls", "chat_template", "logits_processors"),
        *("prompt_logprobs", "structured_outputs", "web_search_options", "length_penalty"),
    ],
)
def test_what_other_servers_know_is_known(name: str) -> None:
    assert name in ChatRequest.unsupported or name in ChatRequest.model_fields


def test_nested_fields_of_openai(in_process: InProcess) -> None:
    body = BODIES["/v1/completions"] | {"stream_options": {"continuous_usage_stats": True}}
    answer = in_process.post("/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options.continuous_usage_stats"
    for more in ({"best_of": 2}, {"best_of": 2, "n": 1}):
        assert (
            in_process.post("/v1/completions", BODIES["/v1/completions"] | more).status_code == 400
        )
    same = BODIES["/v1/completions"] | {"best_of": 2, "n": 2}
    assert in_process.post("/v1/completions", same).status_code == 200


def test_the_page_of_the_api_follows(in_process: InProcess) -> None:
    document = in_process.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, kind in ALL_KINDS.items():
        schema = schemas[kind.__name__]
        assert schema["additionalProperties"] is not kind.refuses_unknown, path
        for name, field in kind.model_fields.items():
            shown = schema["properties"][field.alias or name]
            takes_null = {"type": "null"} in shown.get("anyOf", ())
            assert takes_null is not field.is_required(), (path, name)
    assert {"/embeddings", "/invocations", "/vertex"} <= document["paths"].keys()
    assert NoneType in get_args(EmbedRequest.model_fields["dimensions"].annotation)


def test_invocations_is_the_main_route(in_process: InProcess) -> None:
    for body in (
        {"inputs": ["a", "b"]},
        {"inputs": "a fox", "model": "classifier"},
        {"query": "a", "texts": ["b", "c"], "model": "reranker"},
        {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
        {"inputs": "a", "parameters": None, "options": {"wait_for_model": True}},
    ):
        assert content(in_process.post("/invocations", body)) == content(in_process.post("/", body))
    assert in_process.post("/models/tagger/invocations", {"inputs": "a"}).status_code == 200


def test_vertex_answers_each_instance(in_process: InProcess) -> None:
    instances = [
        {"inputs": ["a fox", "the"]},
        {"inputs": "a fox", "model": "classifier"},
        {"query": "a", "texts": ["b", "c"], "model": "reranker"},
    ]
    answer = in_process.post("/vertex", {"instances": instances, "parameters": {}})
    wanted = [in_process.post("/", instance).json() for instance in instances]
    assert answer.json() == {"predictions": wanted}
    tokens = in_process.model("embedder").embed(["a fox", "the"]).stats.num_tokens
    one = in_process.with_settings()
    one.post("/vertex", {"instances": instances[:1] * 2})
    assert (
        f'bytetx_input_tokens_total{{model="embedder"}} {2.0 * tokens}' in one.get("/metrics").text
    )
    for body, status, words in (
        ({"instances": []}, 400, "empty"),
        ({"instances": [{"inputs": "a"}] * 33}, 413, "--max-client-batch-size"),
        ({"instances": [{"inputs": "a"}, {"inputs": 7}]}, 422, "instances[1]: inputs"),
        ({"instances": ["a"]}, 422, "instances"),
        ({"instances": [{"inputs": "a"}], "parameters": {"a": 1}}, 400, "parameters is not"),
    ):
        refused = in_process.post("/vertex", body)
        assert refused.status_code == status and words in refused.json()["error"]


def test_embeddings_is_openais(in_process: InProcess) -> None:
    body = {"input": ["a", "b"], "encoding_format": None}
    assert content(in_process.post("/embeddings", body)) == content(
        in_process.post("/v1/embeddings", body)
    )
    assert "message" in in_process.post("/embeddings", {"input": 7}).json()["error"]


def test_statuses_of_tei(in_process: InProcess) -> None:
    """Limits are 413, as TEI documents them; what is wrong otherwise is 422."""
    strict = in_process.with_settings(max_client_batch_size=2, auto_truncate=False)
    long = "the quick fox " * 60
    for path, body in (
        ("/embed", {"inputs": ["a"] * 3}),
        ("/embed", {"inputs": long}),
        ("/embed_all", {"inputs": long}),
        ("/embed_sparse", {"inputs": long, "model": "sparse"}),
        ("/predict", {"inputs": [["a"]] * 3, "model": "classifier"}),
        ("/predict", {"inputs": [long, "a"], "model": "classifier"}),
        ("/predict_tokens", {"inputs": long, "model": "tagger"}),
        ("/rerank", {"query": "a", "texts": ["b"] * 3, "model": "reranker"}),
        ("/rerank", {"query": "a", "texts": [long], "model": "reranker"}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"] * 2}}),
        ("/tokenize", {"inputs": ["a"] * 3}),
        ("/decode", {"ids": [[5]] * 3}),
    ):
        answer = strict.post(path, body)
        assert answer.status_code == 413 and answer.json()["error_type"] == "validation", path
    assert strict.post("/v1/embeddings", {"input": long}).status_code == 400
