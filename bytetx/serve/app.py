"""The application: every route, its OpenAPI page, and the Gateway around them."""

from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Any

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import bytetx
from bytetx.serve import (
    routes_adapters,
    routes_batches,
    routes_cohere,
    routes_decide,
    routes_generate,
    routes_models,
    routes_openai,
    routes_ops,
    routes_tasks,
    routes_tei,
    routes_vllm,
    schemas,
    schemas_extract,
    schemas_generate,
    schemas_pooling,
)
from bytetx.serve.errors import style_of
from bytetx.serve.gateway import DOCS_FILES, AccessLog, Gateway, Route
from bytetx.serve.site import Site

_TEI_ERRORS = {
    400: "The batch is empty, or a field is known and not supported",
    401: "No valid API key",
    404: "The model is not served",
    413: "The body, the batch or a text is too large",
    422: "The request is not valid, or a field is not known",
    424: "The model cannot do this, or failed",
    429: "Too many requests; see Retry-After",
    503: "Not ready",
}
_OPENAI_ERRORS = {
    400: "The request is not valid",
    401: "No valid API key",
    404: "The model is not served",
    413: "The body is too large",
    424: "The model failed",
    429: "Too many requests; see Retry-After",
    503: "Not ready",
}
_TEI_ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
    "required": ["error", "error_type"],
}
_OPENAI_ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type"],
        }
    },
    "required": ["error"],
}


def _post(path: str, endpoint: Any, body: Any) -> tuple[tuple[str, str], Route]:
    return ("POST", path), Route(path, endpoint, body)


def _get(path: str, endpoint: Any, *, is_open: bool = False) -> tuple[tuple[str, str], Route]:
    return _at("GET", path, endpoint, is_open=is_open)


def _at(
    method: str, path: str, endpoint: Any, *, is_open: bool = False
) -> tuple[tuple[str, str], Route]:
    return (method, path), Route(path, endpoint, is_open=is_open, is_limited=False)


ROUTES: Mapping[tuple[str, str], Route] = dict(
    (
        _post("/embed", routes_tei.embed, schemas.EmbedRequest),
        _post("/embed_all", routes_tei.embed_all, schemas.EmbedAllRequest),
        _post("/embed_sparse", routes_tei.embed_sparse, schemas.EmbedSparseRequest),
        _post("/predict", routes_tei.predict, schemas.PredictRequest),
        _post("/predict_tokens", routes_tei.predict_tokens, schemas.PredictTokensRequest),
        _post("/extract", routes_tei.extract, schemas_extract.ExtractRequest),
        _post("/fill_schema", routes_tei.fill_schema, schemas_extract.FillSchemaRequest),
        _post("/rerank", routes_openai.rerank, schemas.RerankRequest),
        _post("/similarity", routes_tei.similarity, schemas.SimilarityRequest),
        _post("/tokenize", routes_tei.tokenize, schemas.TokenizeRequest),
        _post("/tasks", routes_tasks.tasks, schemas.TaskRequest),
        _post("/adapters/load", routes_adapters.load, schemas.LoadAdapterRequest),
        _post("/adapters/unload", routes_adapters.unload, schemas.UnloadAdapterRequest),
        _post("/models/load", routes_models.load, schemas.MoveModelRequest),
        _post("/models/unload", routes_models.unload, schemas.MoveModelRequest),
        _post("/decode", routes_tei.decode, schemas.DecodeRequest),
        _post("/", routes_tei.main_task, None),
        _post("/invocations", routes_tei.invocations, None),
        _post("/vertex", routes_tei.vertex, schemas.VertexRequest),
        _post("/embeddings", routes_openai.embeddings, schemas_pooling.EmbeddingsRequest),
        _post("/v1/embeddings", routes_openai.embeddings, schemas_pooling.EmbeddingsRequest),
        _post("/v1/rerank", routes_openai.rerank_v1, schemas.OpenAIRerankRequest),
        _post("/v2/rerank", routes_openai.rerank_v2, schemas.OpenAIRerankRequest),
        _post("/v1/embed", routes_cohere.embed_v1, schemas_pooling.CohereEmbedRequest),
        _post("/v2/embed", routes_cohere.embed_v2, schemas_pooling.CohereEmbedRequest),
        _post("/score", routes_vllm.score, schemas_pooling.ScoreRequest),
        _post("/v1/score", routes_vllm.score, schemas_pooling.ScoreRequest),
        _post("/classify", routes_vllm.classify, schemas_pooling.ClassifyRequest),
        _post("/pooling", routes_vllm.pooling, schemas_pooling.PoolRequest),
        _post("/v1/systemone", routes_decide.systemone, schemas.SystemOneRequest),
        _post("/v1/decisions", routes_decide.decisions, schemas.DecisionsRequest),
        _post("/v1/completions", routes_generate.completions, schemas_generate.CompletionRequest),
        _post(
            "/v1/chat/completions", routes_generate.chat_completions, schemas_generate.ChatRequest
        ),
        _at("POST", "/v1/files", routes_batches.create_file),
        _get("/v1/files", routes_batches.list_files),
        _get("/v1/files/{id}", routes_batches.get_file),
        _get("/v1/files/{id}/content", routes_batches.get_content),
        _at("DELETE", "/v1/files/{id}", routes_batches.delete_file),
        _post("/v1/batches", routes_batches.create_batch, schemas.BatchRequest),
        _get("/v1/batches", routes_batches.list_batches),
        _get("/v1/batches/{id}", routes_batches.get_batch),
        _at("POST", "/v1/batches/{id}/cancel", routes_batches.cancel_batch),
        _get("/v1/models", routes_openai.list_models),
        _get("/info", routes_ops.info),
        _get("/stats.json", routes_ops.stats),
        _get("/health", routes_ops.health, is_open=True),
        _get("/ping", routes_ops.health, is_open=True),
        _get("/metrics", routes_ops.metrics, is_open=True),
        _get("/", routes_ops.page, is_open=True),
    )
)


def build_app(site: Site) -> ASGIApp:
    """The ASGI application of a site."""
    app = FastAPIOffline(  # its pages load nothing from elsewhere
        static_url=DOCS_FILES,
        title="bytetx",
        version=bytetx.__version__,
        description="Transformer inference on packed tokens: routes of TEI, OpenAI and Cohere.",
    )
    for (method, path), route in ROUTES.items():
        _document(app, method, path, route)
    served: ASGIApp = Gateway(site, app, ROUTES)
    origins = site.settings.cors_allow_origin
    if origins:
        served = CORSMiddleware(
            served,
            allow_origins=list(origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return AccessLog(served) if site.settings.access_log else served


def _document(app: FastAPI, method: str, path: str, route: Route) -> None:
    """Declares a route for the OpenAPI page; Gateway calls its endpoint itself."""
    is_openai = style_of(path) == "openai"
    errors = _OPENAI_ERRORS if is_openai else _TEI_ERRORS
    schema = _OPENAI_ERROR if is_openai else _TEI_ERROR
    if not route.is_limited:
        errors = {status: text for status, text in errors.items() if status in (401, 404, 503)}
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": {"application/json": {"schema": schema}}}
        for status, text in errors.items()
    }
    declared = _stub(route)
    if "{id}" in path:
        declared.__annotations__["id"] = str
        declared.__signature__ = Signature(
            [Parameter("id", Parameter.KEYWORD_ONLY, annotation=str)]
        )
    extra: dict[str, Any] = {}
    if path == "/v1/files" and method == "POST":
        form = {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}}
        schema_of_form = {"type": "object", "properties": form, "required": list(form)}
        content = {"multipart/form-data": {"schema": schema_of_form}}
        extra["requestBody"] = {"required": True, "content": content}
    elif method == "POST" and route.is_limited and route.body is None:
        one_of = {"schema": {"type": "object", "properties": {"inputs": {}}}}
        extra["requestBody"] = {"required": True, "content": {"application/json": one_of}}
    app.add_api_route(
        path,
        declared,
        methods=[method],
        summary=(route.endpoint.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " "),
        responses=responses,
        openapi_extra=extra or None,
        tags=["OpenAI, Cohere, vLLM" if is_openai else "TEI" if route.is_limited else "Operation"],
    )


def _stub(route: Route) -> Any:
    """A function with the endpoint's body and no more, whose signature FastAPI reads."""

    async def declared(body: Any) -> Any:
        raise AssertionError("Gateway answers this route")

    async def declared_without_body() -> Any:
        raise AssertionError("Gateway answers this route")

    function = declared_without_body if route.body is None else declared
    if route.body is not None:
        function.__annotations__ = {"body": route.body}
    function.__name__ = getattr(route.endpoint, "__name__", "endpoint")
    return function
