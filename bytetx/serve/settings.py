"""Settings of the server: models, limits, addresses; checked once, when they are made."""

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bytetx.arguments import check_adapter_name, check_draft_size, check_kv_cache_dtype
from bytetx.checkpoint.answer_format import AnswerFormat
from bytetx.checkpoint.names import name_of
from bytetx.errors import OptionError, shown

# Pooling modes as TEI writes them.
_TEI_POOLING = {"last-token": "lasttoken"}
_KEY = re.compile(r"[\x21-\x7e]+")
_BYTES = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?((?:[KMGT]i?)?B?)", re.IGNORECASE)
_BYTE_UNITS = {
    prefix + unit: size
    for unit in ("b", "")
    for prefix, size in {
        "": 1,
        **{letter: 1000**power for power, letter in enumerate("kmgt", 1)},
        **{f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)},
    }.items()
}
METRICS_NAMES = ("bytetx", "te")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model to load: its name in requests and its folder or hub id."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of `bytetx serve`; docs/serving.md says what each field does.

    models: at least one, the first serves requests that name none.
    accepts_any_name: whether a request may name a model that is not served; only for one model.
    ignores_unknown_fields: whether all routes pass over fields of requests that they do not know.
    pooling: a mode as Model.embed takes it; what TEI calls otherwise is renamed.
    max_*, payload_limit_bytes: limits of requests; every one is named in its error.
    metrics_names: sets of metric names, of METRICS_NAMES; the first one is always there.
    log_level: the least of LOG_LEVELS that is written.  access_log: a line for each request.
    frontends: processes that share the port; 1 answers in the process that computes.
    batch_dir: folder of files and batches; None: their routes are off.
    adapters: each NAME=PATH, of the only model, or MODEL:NAME=PATH.
    lazy: whether a model is loaded by its first request.  unload_after_s: that a model may be idle
    before it leaves the memory.  memory_budget: of the weights of all models in memory, as of
    parse_bytes.  load_timeout_s: that a request waits for its model.
    """

    models: Sequence[ModelSource]
    revision: str | None = None
    local_files_only: bool = False
    device: str = "auto"
    dtype: str = "auto"
    batch_invariant: bool = False
    tp: int = 1
    threads: int | None = None
    accepts_any_name: bool = False
    generation_config: str = "auto"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    ignores_unknown_fields: bool = False
    families: str | None = None
    pooling: str | None = None
    default_prompt: str | None = None
    default_prompt_name: str | None = None
    auto_truncate: bool = True
    max_batch_tokens: int | None = None
    prefix_cache_bytes: int | None = None
    max_client_batch_size: int = 32
    max_concurrent_requests: int = 512
    max_queued_requests: int = 8192
    max_queued_tokens: int = 1 << 20
    payload_limit_bytes: int = 2_000_000
    tokenization_workers: int | None = None
    kv_cache_tokens: int | None = None
    max_num_seqs: int | None = None
    num_speculative_tokens: int = 0
    kv_cache_dtype: str = "auto"
    hostname: str = "127.0.0.1"
    port: int = 8080
    uds_path: Path | None = None
    prometheus_port: int | None = None
    grpc_port: int | None = None
    api_keys: Sequence[str] = ()
    cors_allow_origin: Sequence[str] = ()
    metrics_names: Sequence[str] = ("bytetx",)
    json_output: bool = False
    log_level: str = "info"
    access_log: bool = False
    otlp_endpoint: str | None = None
    otlp_service_name: str = "bytetx"
    shutdown_timeout_s: float = 30.0
    frontends: int = 1
    adapters: Sequence[str] = ()
    batch_dir: Path | None = None
    lazy: bool = False
    unload_after_s: float | None = None
    memory_budget: str | None = None
    load_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.models:
            raise OptionError("no model was named; give --model PATH, or --model NAME=PATH")
        names = [model.name for model in self.models]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise OptionError(
                f"two models are called {shown(twice)}; name each of them, as in --model NAME=PATH"
            )
        if self.default_prompt is not None and self.default_prompt_name is not None:
            raise OptionError("--default-prompt and --default-prompt-name exclude each other")
        for name in self.metrics_names:
            if name not in METRICS_NAMES:
                raise OptionError(
                    f"--metrics-names must be of {', '.join(METRICS_NAMES)}, got {shown(name)}"
                )
        if self.log_level not in LOG_LEVELS:
            raise OptionError(
                f"--log-level must be one of {', '.join(LOG_LEVELS)}, got {shown(self.log_level)}"
            )
        if self.pooling in _TEI_POOLING:
            object.__setattr__(self, "pooling", _TEI_POOLING[self.pooling])
        self._check_moves()
        check_draft_size(self.num_speculative_tokens)
        check_kv_cache_dtype(self.kv_cache_dtype)
        self.answer_format(AnswerFormat())  # checks the names
        served = [*names, *(f"{model}:{name}" for model, name, _ in self._adapters())]
        twice = next((name for name in served if served.count(name) > 1), None)
        if twice is not None:
            raise OptionError(f"two models or adapters are called {shown(twice)}; rename one")
        if not all(map(_KEY.fullmatch, self.api_keys)):
            raise OptionError(
                "--api-key must be one or more visible ASCII characters, as a header carries them, "
                "and one of those given is not; leave it out to serve without a key"
            )

    def answer_format(self, found: AnswerFormat) -> AnswerFormat:
        """The format of answers of a model.  found: by its chat template.

        Raises OptionError for a name that is not known.
        """
        return found.changed(tool_calls=self.tool_call_parser, reasoning=self.reasoning_parser)

    def _check_moves(self) -> None:
        """OptionError for options of models that come and go which cannot be kept."""
        times = {"unload-after": self.unload_after_s, "load-timeout": self.load_timeout_s}
        for name, seconds in times.items():
            if seconds is not None and not 0 < seconds < math.inf:
                raise OptionError(f"--{name} must be a number of seconds above 0, got {seconds:g}")
        if self.memory_budget is not None:
            parse_bytes("--memory-budget", self.memory_budget)
        if self.moves_models and self.tp > 1:
            raise OptionError(
                "--lazy, --unload-after and --memory-budget are for models of one process, and "
                f"--tensor-parallel-size is {self.tp}; leave out one of the two"
            )

    @property
    def moves_models(self) -> bool:
        """Whether models come into memory and leave it while the server runs."""
        return self.lazy or self.unload_after_s is not None or self.memory_budget is not None

    @property
    def memory_budget_bytes(self) -> int | None:
        given = self.memory_budget
        return None if given is None else parse_bytes("--memory-budget", given)

    def adapters_of(self, model: str) -> dict[str, str]:
        """The paths of a model's adapters, by name."""
        return {name: path for owner, name, path in self._adapters() if owner == model}

    def _adapters(self) -> list[tuple[str, str, str]]:
        """(model, name, path); OptionError for one that is not of a served model."""
        found, names = [], [model.name for model in self.models]
        for text in self.adapters:
            left, _, path = text.partition("=")
            model, _, name = left.rpartition(":")
            if not path or (not model and len(names) > 1) or (model and model not in names):
                raise OptionError(
                    f"--adapter must be NAME=PATH, or MODEL:NAME=PATH with MODEL of "
                    f"{', '.join(names)}, got {shown(text)}"
                )
            check_adapter_name(name)
            found.append((model or names[0], name, path))
        return found


def parse_bytes(name: str, text: str) -> int:
    """A size such as 10GiB, 500MB or 1073741824; OptionError for another text, or none above 0."""
    found = _BYTES.fullmatch(text.strip())
    size = 0 if found is None else int(float(found[1]) * _BYTE_UNITS[found[2].lower()])
    if size <= 0:
        raise OptionError(
            f"{name} must be a size above 0, such as 10GiB, 500MB or a number of bytes, got "
            f"{shown(text)}"
        )
    return size


def model_sources(given: Sequence[str], served_names: Sequence[str] = ()) -> list[ModelSource]:
    """Models as the command line names them: PATH or NAME=PATH.

    served_names: names, in the same order; a model without any is called by its name_of().
    Raises OptionError where a name or a path is empty, or there are more names than models.
    """
    if len(served_names) > len(given):
        raise OptionError(
            f"{len(served_names)} --served-model-name for {len(given)} models; give one for each"
        )
    sources = []
    for index, text in enumerate(given):
        name, equals, path = text.partition("=")
        if equals and (not name or not path):
            raise OptionError(f"--model must be PATH or NAME=PATH, got {shown(text)}")
        if not equals:
            name, path = name_of(text), text
        if index < len(served_names):
            name = served_names[index]
        sources.append(ModelSource(name, path))
    return sources


READY = b"ready\n"  # what a started process writes to its standard output, and nothing else


def say_ready() -> None:
    """Tell whoever started the process that it answers now."""
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()


def settings_line(settings: ServeSettings) -> bytes:
    """A line of JSON, for a process that this one starts."""
    return json.dumps(asdict(settings), default=str).encode() + b"\n"


def read_settings(line: bytes) -> ServeSettings:
    """The settings of settings_line."""
    given: dict[str, Any] = json.loads(line)
    given["models"] = [ModelSource(**model) for model in given["models"]]
    for name in ("uds_path", "batch_dir"):
        given[name] = None if given[name] is None else Path(given[name])
    return ServeSettings(**given)
