"""The command serve: TEI's flags and environment variables to ServeSettings."""

from pathlib import Path
from typing import Annotated, Any

import typer

from bytetx.cli.files.options import DTYPE_HELP, FAMILIES_HELP, GENERATION_CONFIG_HELP, MAX_THREADS
from bytetx.errors import OptionError

_MODEL, _LIMITS, _NETWORK, _OUTPUT = "Model", "Limits", "Network", "Logs and metrics"


# What TEI reads; names of other options are not read without the prefix, for a shell may have
# variables with such names.
_TEI_VARIABLES = {
    *("API_KEY", "AUTO_TRUNCATE", "CORS_ALLOW_ORIGIN", "DEFAULT_PROMPT", "DEFAULT_PROMPT_NAME"),
    *("DTYPE", "HUGGINGFACE_HUB_CACHE", "JSON_OUTPUT", "MAX_BATCH_TOKENS", "MODEL_ID"),
    *("MAX_CLIENT_BATCH_SIZE", "MAX_CONCURRENT_REQUESTS", "OTLP_ENDPOINT", "OTLP_SERVICE_NAME"),
    *("PAYLOAD_LIMIT", "POOLING", "PORT", "PROMETHEUS_PORT", "REVISION", "SERVED_MODEL_NAME"),
    *("TOKENIZATION_WORKERS", "UDS_PATH"),
}


def _option(panel: str, variable: str, text: str, *names: str) -> Any:
    """An option with its environment variables: BYTETX_NAME, and the bare NAME where TEI has it."""
    variables = [f"BYTETX_{variable}"]
    if variable == "MODEL_ID":
        variables.append("BYTETX_MODEL")  # as the other commands read it
    if variable in _TEI_VARIABLES:
        variables.append(variable)
    return typer.Option(
        *names, envvar=variables, help=text, rich_help_panel=panel, show_envvar=False
    )


def serve(
    model: Annotated[
        list[str] | None,
        _option(
            _MODEL,
            "MODEL_ID",
            "Checkpoint folder or hub id, or NAME=PATH; given again, each is served.",
            "--model",
            "--model-id",
            "-m",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        _option(_MODEL, "SERVED_MODEL_NAME", "Name of a model in requests, in their order."),
    ] = None,
    revision: Annotated[str | None, _option(_MODEL, "REVISION", "Of a hub id.")] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Never ask the hub.", rich_help_panel=_MODEL)
    ] = False,
    huggingface_hub_cache: Annotated[
        str | None, _option(_MODEL, "HUGGINGFACE_HUB_CACHE", "Folder of the hub's cache.")
    ] = None,
    device: Annotated[str, _option(_MODEL, "DEVICE", "auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, _option(_MODEL, "DTYPE", DTYPE_HELP)] = "auto",
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="The same bits for a text whatever else is in its batch; slower on a GPU.",
            rich_help_panel=_MODEL,
        ),
    ] = False,
    tensor_parallel_size: Annotated[
        int,
        _option(
            _MODEL,
            "TENSOR_PARALLEL_SIZE",
            "GPUs that share the layers.",
            "--tensor-parallel-size",
            "--tp",
        ),
    ] = 1,
    pooling: Annotated[
        str | None,
        _option(
            _MODEL, "POOLING", "cls, mean, last-token, ...; the checkpoint's own if not given."
        ),
    ] = None,
    default_prompt: Annotated[
        str | None, _option(_MODEL, "DEFAULT_PROMPT", "Text put before inputs without a prompt.")
    ] = None,
    default_prompt_name: Annotated[
        str | None, _option(_MODEL, "DEFAULT_PROMPT_NAME", "A prompt of the checkpoint, likewise.")
    ] = None,
    generation_config: Annotated[
        str, _option(_MODEL, "GENERATION_CONFIG", GENERATION_CONFIG_HELP)
    ] = "auto",
    families: Annotated[str | None, _option(_MODEL, "FAMILIES", FAMILIES_HELP)] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            envvar="BYTETX_THREADS",
            min=1,
            max=MAX_THREADS,
            help="CPU threads; all cores if not given.",
            rich_help_panel=_MODEL,
            show_default=False,
        ),
    ] = None,
    auto_truncate: Annotated[
        bool,
        _option(
            _LIMITS,
            "AUTO_TRUNCATE",
            "Cut long texts where the request does not say; else they are errors.",
        ),
    ] = True,
    max_batch_tokens: Annotated[
        int | None,
        _option(
            _LIMITS,
            "MAX_BATCH_TOKENS",
            "Tokens of a forward pass; bounds memory. The default fits the device.",
            "--max-batch-tokens",
            "--max-num-batched-tokens",
        ),
    ] = None,
    prefix_cache_bytes: Annotated[
        int | None,
        typer.Option(
            envvar="BYTETX_PREFIX_CACHE_BYTES",
            min=0,
            help="Most bytes of common prefixes that a causal model keeps; 0 keeps none.",
            rich_help_panel=_LIMITS,
            show_default=False,
        ),
    ] = None,
    max_client_batch_size: Annotated[
        int, _option(_LIMITS, "MAX_CLIENT_BATCH_SIZE", "Inputs of one request.")
    ] = 32,
    max_concurrent_requests: Annotated[
        int, _option(_LIMITS, "MAX_CONCURRENT_REQUESTS", "Requests at a time; beyond it: 429.")
    ] = 512,
    max_queued_requests: Annotated[
        int, _option(_LIMITS, "MAX_QUEUED_REQUESTS", "Texts that wait; beyond it: 429.")
    ] = 8192,
    max_queued_tokens: Annotated[
        int, _option(_LIMITS, "MAX_QUEUED_TOKENS", "Tokens that wait; beyond it: 429.")
    ] = 1 << 20,
    payload_limit: Annotated[
        int, _option(_LIMITS, "PAYLOAD_LIMIT", "Bytes of a request's body; beyond it: 413.")
    ] = 2_000_000,
    ignore_unknown_fields: Annotated[
        bool,
        _option(
            _LIMITS,
            "IGNORE_UNKNOWN_FIELDS",
            "Pass over fields of requests that are not known; else TEI's routes refuse them.",
            "--ignore-unknown-fields",
        ),
    ] = False,
    kv_cache_tokens: Annotated[
        int | None, _option(_LIMITS, "KV_CACHE_TOKENS", "KV cache of generation, in tokens.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, _option(_LIMITS, "MAX_NUM_SEQS", "Sequences that are generated at a time.")
    ] = None,
    num_speculative_tokens: Annotated[
        int,
        _option(
            _LIMITS,
            "NUM_SPECULATIVE_TOKENS",
            "Tokens of a step that are drafted from the text so far and checked; 0: none.",
        ),
    ] = 0,
    tokenization_workers: Annotated[
        int | None, _option(_LIMITS, "TOKENIZATION_WORKERS", "Threads that tokenise.")
    ] = None,
    replicas: Annotated[
        int,
        _option(
            _NETWORK,
            "REPLICAS",
            "Whole servers that share the port, each on GPUs of its own, or all on the one that "
            "--device cuda:N names; dead ones start again.",
        ),
    ] = 1,
    frontends: Annotated[
        int,
        _option(
            _NETWORK,
            "FRONTENDS",
            "Processes that share the port and hand requests to one engine process.",
        ),
    ] = 1,
    hostname: Annotated[
        str,
        typer.Option(
            envvar="BYTETX_HOSTNAME",
            help="Address to listen on; 0.0.0.0 is all. Shells set HOSTNAME, which is not read.",
            rich_help_panel=_NETWORK,
            show_envvar=False,
        ),
    ] = "127.0.0.1",
    port: Annotated[int, _option(_NETWORK, "PORT", "0 takes a free one.", "--port", "-p")] = 8080,
    uds_path: Annotated[
        Path | None, _option(_NETWORK, "UDS_PATH", "A Unix socket instead of the address.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _option(_NETWORK, "API_KEY", "A key that requests must bring; given again, any of them."),
    ] = None,
    cors_allow_origin: Annotated[
        list[str] | None, _option(_NETWORK, "CORS_ALLOW_ORIGIN", "Origin of pages, or *.")
    ] = None,
    shutdown_timeout: Annotated[
        float,
        _option(_NETWORK, "SHUTDOWN_TIMEOUT", "Seconds for running requests after SIGTERM."),
    ] = 30.0,
    prometheus_port: Annotated[
        int | None, _option(_OUTPUT, "PROMETHEUS_PORT", "Metrics on a port of their own, too.")
    ] = None,
    metrics_names: Annotated[
        list[str] | None, _option(_OUTPUT, "METRICS_NAMES", "te: TEI's names as well.")
    ] = None,
    json_output: Annotated[
        bool, _option(_OUTPUT, "JSON_OUTPUT", "Logs as JSON.", "--json-output")
    ] = False,
    log_level: Annotated[
        str,
        _option(_OUTPUT, "LOG_LEVEL", "debug, info, warning or error: the least that is logged."),
    ] = "info",
    access_log: Annotated[
        bool,
        _option(_OUTPUT, "ACCESS_LOG", "A line of the log for each request.", "--access-log"),
    ] = False,
    otlp_endpoint: Annotated[
        str | None, _option(_OUTPUT, "OTLP_ENDPOINT", "Collector of traces, OTLP over HTTP.")
    ] = None,
    otlp_service_name: Annotated[
        str, _option(_OUTPUT, "OTLP_SERVICE_NAME", "Name of this service in traces.")
    ] = "bytetx",
) -> None:
    """An HTTP server with the routes of TEI, OpenAI and Cohere; docs/serving.md describes it."""
    if huggingface_hub_cache is not None:
        _set_hub_cache(huggingface_hub_cache)
    try:
        import fastapi  # noqa: F401
        import fastapi_offline  # noqa: F401
        import uvicorn  # noqa: F401
        import uvloop  # noqa: F401

        from bytetx.serve.settings import ServeSettings, model_sources
    except ModuleNotFoundError as error:
        raise OptionError(
            f'serve needs the package {error.name}; install the extra: pip install "bytetx[serve]"'
        ) from error
    _check_api_key(api_key)
    sources = model_sources(model or (), served_model_name or ())
    are_named = bool(served_model_name) or any("=" in given for given in model or ())
    settings = ServeSettings(
        models=sources,
        revision=revision,
        local_files_only=offline,
        device=device,
        dtype=dtype,
        batch_invariant=batch_invariant,
        tp=tensor_parallel_size,
        threads=threads,
        accepts_any_name=len(sources) == 1 and not are_named,
        generation_config=generation_config,
        ignores_unknown_fields=ignore_unknown_fields,
        families=families,
        pooling=pooling,
        default_prompt=default_prompt,
        default_prompt_name=default_prompt_name,
        auto_truncate=auto_truncate,
        max_batch_tokens=max_batch_tokens,
        prefix_cache_bytes=prefix_cache_bytes,
        max_client_batch_size=max_client_batch_size,
        max_concurrent_requests=max_concurrent_requests,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        payload_limit_bytes=payload_limit,
        tokenization_workers=tokenization_workers,
        kv_cache_tokens=kv_cache_tokens,
        max_num_seqs=max_num_seqs,
        num_speculative_tokens=num_speculative_tokens,
        hostname=hostname,
        port=port,
        uds_path=uds_path,
        prometheus_port=prometheus_port,
        api_keys=tuple(api_key or ()),
        cors_allow_origin=tuple(cors_allow_origin or ()),
        metrics_names=tuple(metrics_names or ()),
        json_output=json_output,
        log_level=log_level.lower(),
        access_log=access_log,
        otlp_endpoint=otlp_endpoint,
        otlp_service_name=otlp_service_name,
        shutdown_timeout_s=shutdown_timeout,
        frontends=frontends,
    )
    if replicas > 1:
        import os

        from bytetx.serve.replicas import serve_replicas

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return serve_replicas(settings, replicas, visible_devices=visible)
    from bytetx.serve.server import serve as run_server

    run_server(settings)


def _check_api_key(given: list[str] | None) -> None:
    """OptionError where a variable for the key is set and holds none: a secret that was not filled
    in would otherwise open the server to everyone."""
    import os

    blank = [name for name in ("BYTETX_API_KEY", "API_KEY") if name in os.environ]
    if blank and not given:
        raise OptionError(
            f"{blank[0]} is set and holds no key; give it one, or unset it to serve without a key"
        )


def _set_hub_cache(folder: str) -> None:
    """Before huggingface_hub is imported, which reads it once."""
    import os

    os.environ["HF_HUB_CACHE"] = folder
