"""The command serve: TEI's flags and environment variables to ServeSettings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from inspect import Parameter, Signature
from typing import Annotated, Any, get_type_hints

import typer

from bytetx.cli.files.options import (
    DTYPE_HELP,
    FAMILIES_HELP,
    GENERATION_CONFIG_HELP,
    KV_CACHE_DTYPE_HELP,
    MAX_THREADS,
)
from bytetx.errors import OptionError
from bytetx.serve.settings import ServeSettings, model_sources

# What TEI reads; names of other options are not read without the prefix, for a shell may have
# variables with such names.
_TEI_VARIABLES = {
    *("API_KEY", "AUTO_TRUNCATE", "CORS_ALLOW_ORIGIN", "DEFAULT_PROMPT", "DEFAULT_PROMPT_NAME"),
    *("DTYPE", "HUGGINGFACE_HUB_CACHE", "JSON_OUTPUT", "MAX_BATCH_TOKENS", "MODEL_ID"),
    *("MAX_CLIENT_BATCH_SIZE", "MAX_CONCURRENT_REQUESTS", "OTLP_ENDPOINT", "OTLP_SERVICE_NAME"),
    *("PAYLOAD_LIMIT", "POOLING", "PORT", "PROMETHEUS_PORT", "REVISION", "SERVED_MODEL_NAME"),
    *("TOKENIZATION_WORKERS", "UDS_PATH"),
}


_TEXTS = list[str] | None
_SHOWN = {"show_envvar": True, "show_default": False}


@dataclass(frozen=True, slots=True)
class _Flag:
    """One flag, whose name is its key in _FLAGS.

    names: where they are not the key's.
    setting: the field of ServeSettings that it fills, whose type and default it has; empty: the one
    of its own name.
    kind, default: of a flag that fills none.
    variable: of the environment, with BYTETX_ before it, and without it where TEI has it; empty:
    the flag's name; None: none is read.
    more: further arguments of typer.Option.
    """

    help: str
    names: tuple[str, ...] = ()
    setting: str = ""
    kind: Any = None
    default: Any = None
    variable: str | None = ""
    more: Mapping[str, Any] = field(default_factory=dict)


_FLAGS = {
    "Model": {
        "model": _Flag(
            "Checkpoint folder or hub id, or NAME=PATH; given again, each is served.",
            names=("--model", "--model-id", "-m"),
            kind=_TEXTS,
            variable="MODEL_ID",
        ),
        "served_model_name": _Flag("Name of a model in requests, in their order.", kind=_TEXTS),
        "revision": _Flag("Of a hub id."),
        "offline": _Flag(
            "Never ask the hub.", names=("--offline",), setting="local_files_only", variable=None
        ),
        "huggingface_hub_cache": _Flag("Folder of the hub's cache.", kind=str | None),
        "device": _Flag("auto, cpu, cuda or cuda:N."),
        "dtype": _Flag(DTYPE_HELP),
        "batch_invariant": _Flag(
            "The same bits for a text whatever else is in its batch; slower on a GPU.",
            names=("--batch-invariant",),
            variable=None,
        ),
        "tensor_parallel_size": _Flag(
            "GPUs that share the layers.", names=("--tensor-parallel-size", "--tp"), setting="tp"
        ),
        "pooling": _Flag("cls, mean, last-token, ...; the checkpoint's own if not given."),
        "default_prompt": _Flag("Text put before inputs without a prompt."),
        "default_prompt_name": _Flag("A prompt of the checkpoint, likewise."),
        "generation_config": _Flag(GENERATION_CONFIG_HELP),
        "tool_call_parser": _Flag(
            "Format of tool calls: hermes, llama3_json, mistral, mistral_args; none leaves calls "
            "in the text; auto: by the chat template."
        ),
        "reasoning_parser": _Flag(
            "Format of reasoning: think or mistral; none leaves it in the text; auto: by the chat "
            "template."
        ),
        "families": _Flag(FAMILIES_HELP),
        "threads": _Flag(
            "CPU threads; all cores if not given.", more={"min": 1, "max": MAX_THREADS, **_SHOWN}
        ),
        "adapter": _Flag(
            "A LoRA adapter, NAME=PATH, served as MODEL:NAME; MODEL:NAME=PATH of several models.",
            setting="adapters",
        ),
    },
    "Memory": {
        "lazy": _Flag("Load a model by its first request.", names=("--lazy",)),
        "unload_after": _Flag(
            "Seconds that a model may be idle before it leaves the memory.",
            setting="unload_after_s",
        ),
        "memory_budget": _Flag(
            "Most bytes of the weights in memory, as 10GiB; others make room, unused ones first."
        ),
        "load_timeout": _Flag(
            "Seconds that a request waits for its model; beyond it: 503.", setting="load_timeout_s"
        ),
    },
    "Limits": {
        "auto_truncate": _Flag(
            "Cut long texts where the request does not say; else they are errors."
        ),
        "max_batch_tokens": _Flag(
            "Tokens of a forward pass; bounds memory. The default fits the device.",
            names=("--max-batch-tokens", "--max-num-batched-tokens"),
        ),
        "prefix_cache_bytes": _Flag(
            "Most bytes of common prefixes that a causal model keeps; 0 keeps none.",
            more={"min": 0, **_SHOWN},
        ),
        "max_client_batch_size": _Flag("Inputs of one request."),
        "max_concurrent_requests": _Flag("Requests at a time; beyond it: 429."),
        "max_queued_requests": _Flag("Texts that wait; beyond it: 429."),
        "max_queued_tokens": _Flag("Tokens that wait; beyond it: 429."),
        "payload_limit": _Flag(
            "Bytes of a request's body; beyond it: 413.", setting="payload_limit_bytes"
        ),
        "ignore_unknown_fields": _Flag(
            "Pass over fields of requests that are not known; else TEI's routes refuse them.",
            names=("--ignore-unknown-fields",),
            setting="ignores_unknown_fields",
        ),
        "kv_cache_tokens": _Flag("KV cache of generation, in tokens."),
        "kv_cache_dtype": _Flag(KV_CACHE_DTYPE_HELP),
        "max_num_seqs": _Flag("Sequences that are generated at a time."),
        "num_speculative_tokens": _Flag(
            "Tokens of a step that are drafted from the text so far and checked; 0: none."
        ),
        "tokenization_workers": _Flag("Threads that tokenise."),
    },
    "Network": {
        "replicas": _Flag(
            "Whole servers that share the port, each on GPUs of its own, or all on the one that "
            "--device cuda:N names; dead ones start again.",
            kind=int,
            default=1,
        ),
        "frontends": _Flag(
            "Processes that share the port and hand requests to one engine process."
        ),
        "hostname": _Flag(
            "Address to listen on; 0.0.0.0 is all. Shells set HOSTNAME, which is not read."
        ),
        "port": _Flag("0 takes a free one.", names=("--port", "-p")),
        "grpc_port": _Flag("TEI's gRPC on a port of its own, too; 0 takes a free one."),
        "uds_path": _Flag("A Unix socket instead of the address."),
        "api_key": _Flag(
            "A key that requests must bring; given again, any of them.", setting="api_keys"
        ),
        "cors_allow_origin": _Flag("Origin of pages, or *."),
        "shutdown_timeout": _Flag(
            "Seconds for running requests after SIGTERM.", setting="shutdown_timeout_s"
        ),
    },
    "Batches": {
        "batch_dir": _Flag(
            "Folder of files and batches: turns on /v1/files and /v1/batches, which run at low "
            "priority and go on after a restart."
        ),
    },
    "Logs and metrics": {
        "prometheus_port": _Flag("Metrics on a port of their own, too."),
        "metrics_names": _Flag("te: TEI's names as well."),
        "json_output": _Flag("Logs as JSON.", names=("--json-output",)),
        "log_level": _Flag("debug, info, warning or error: the least that is logged."),
        "access_log": _Flag("A line of the log for each request.", names=("--access-log",)),
        "otlp_endpoint": _Flag("Collector of traces, OTLP over HTTP."),
        "otlp_service_name": _Flag("Name of this service in traces."),
    },
}


def _parameters() -> Iterator[Parameter]:
    """The flags as Typer reads them from a command's signature."""
    settings = {entry.name: entry for entry in fields(ServeSettings)}
    hints = get_type_hints(ServeSettings)
    for panel, flags in _FLAGS.items():
        for name, flag in flags.items():
            kind, default = flag.kind, flag.default
            if kind is None:
                setting = flag.setting or name
                kind, default = hints[setting], settings[setting].default
            if kind == Sequence[str]:
                kind, default = _TEXTS, None
            info = typer.Option(
                *flag.names,
                help=flag.help,
                rich_help_panel=panel,
                **{"envvar": _variables(name, flag), "show_envvar": False, **flag.more},
            )
            annotation = Annotated[kind, info]  # type: ignore[valid-type]
            yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _variables(name: str, flag: _Flag) -> list[str] | None:
    if flag.variable is None:
        return None
    variable = flag.variable or name.upper()
    model = ["BYTETX_MODEL"] if name == "model" else []  # as the other commands read it
    bare = [variable] if variable in _TEI_VARIABLES else []
    return [f"BYTETX_{variable}", *model, *bare]


def serve(**given: Any) -> None:
    """An HTTP server with the routes of TEI, OpenAI and Cohere; docs/serving.md describes it."""
    if given["huggingface_hub_cache"] is not None:
        _set_hub_cache(given["huggingface_hub_cache"])
    _need_packages(
        ("fastapi", "fastapi_offline", "orjson", "uvicorn", "uvloop"), what="serve", extra="serve"
    )
    _check_api_key(given["api_key"])
    if given["grpc_port"] is not None:
        needed = ("grpc", "grpc_health", "grpc_reflection", "grpc_tools")
        _need_packages(needed, what="--grpc-port", extra="serve,grpc")
    if given["batch_dir"] is not None:
        _need_packages(("python_multipart",), what="--batch-dir", extra="serve")
    models, names = given["model"] or (), given["served_model_name"] or ()
    sources = model_sources(models, names)
    are_named = bool(names) or any("=" in text for text in models)
    values = {
        flag.setting or name: given[name]
        for flags in _FLAGS.values()
        for name, flag in flags.items()
        if flag.kind is None
    }
    for name in ("api_keys", "cors_allow_origin", "metrics_names", "adapters"):
        values[name] = tuple(values[name] or ())
    values["log_level"] = values["log_level"].lower()
    accepts_any = len(sources) == 1 and not are_named
    settings = ServeSettings(sources, accepts_any_name=accepts_any, **values)
    if settings.batch_dir is not None:  # said here once, not by each process
        from bytetx.serve.batch_store import BatchStore

        BatchStore(settings.batch_dir).close()
    replicas = given["replicas"]
    if replicas > 1:
        import os

        from bytetx.serve.replicas import serve_replicas

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return serve_replicas(settings, replicas, visible_devices=visible)
    from bytetx.serve.server import serve as run_server

    run_server(settings)


serve.__signature__ = Signature(list(_parameters()))  # type: ignore[attr-defined]


def _need_packages(names: Sequence[str], *, what: str, extra: str) -> None:
    """OptionError where one of the modules, or one that it imports, is not installed."""
    try:
        for name in names:
            import_module(name)
    except ModuleNotFoundError as error:
        raise OptionError(
            f"{what} needs the package {error.name}; install the extra: "
            f'pip install "bytetx[{extra}]"'
        ) from error


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
