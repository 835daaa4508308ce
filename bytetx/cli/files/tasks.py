"""The tasks as batch jobs: how the model runs a stream, and how results are encoded."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from bytetx.cli.files.encoders import Encoder, LineEncoder, VectorEncoder
from bytetx.cli.files.job import JobStream
from bytetx.cli.files.parquet import ColumnType
from bytetx.cli.files.records import RankRequest
from bytetx.encode.request import RunStats
from bytetx.errors import InputError, OptionError, shown
from bytetx.sampling_params import SamplingParams

Run = Callable[[Iterator[Any]], JobStream]


@dataclass(frozen=True, slots=True)
class JobTask:
    """One task with its options.

    name: the command's.  options: keyword arguments of the Model's method; they change the
    answers, so a job resumes with the same ones only.
    columns: of a row of the output, beside index and error, with their types.
    open: from the loaded model, and the output's suffix ("" is stdout), to how it runs a stream
    and how its answers are encoded.  describe: lines on the loaded model, told before it runs.
    load_options: of bytetx.load, beside those of all commands.
    """

    name: str
    options: dict[str, Any]
    columns: Mapping[str, ColumnType]
    open: Callable[[Any, str], tuple[Run, Encoder]]
    describe: Callable[[Any], str] | None = None
    load_options: Mapping[str, Any] = field(default_factory=dict)


def embed_task(options: dict[str, Any], *, ranges: np.ndarray | None = None) -> JobTask:
    """options: keyword arguments of Model.embed but ranges.  ranges: as in Model.embed."""
    given = options if ranges is None else {**options, "ranges": ranges}

    def open_task(model: Any, suffix: str) -> tuple[Run, Encoder]:
        # A call without texts checks the options early and gives the form of a vector.
        vectors = model.embed([], **given).vectors
        dim, dtype = vectors.shape[1], vectors.dtype
        is_rows = suffix in (".npy", ".parquet")
        encoder = VectorEncoder(dim, dtype) if is_rows else LineEncoder(_vector_json(dim, dtype))
        return _streaming(model.embed, given), encoder

    numbers = _COLUMN_TYPES[options["precision"]]
    return JobTask("embed", options | _digest(ranges), {"embedding": [numbers]}, open_task)


def _digest(ranges: np.ndarray | None) -> dict[str, Any]:
    """Return what stands for the ranges in a job's state, which is JSON."""
    return {} if ranges is None else {"ranges": sha256(ranges.tobytes()).hexdigest()}


def embed_sparse_task(options: dict[str, Any]) -> JobTask:
    """Token ids and weights of each text. options: keyword arguments of Model.embed_sparse."""
    # Nine significant digits give every float32 back exactly.
    weight = "%.9g".__mod__

    def to_json(answer: Any) -> str:
        values = ", ".join(map(weight, answer.values.tolist()))
        if "n" in values:
            raise ValueError("nan or inf, which JSON does not have")
        return f'{{"indices": {answer.indices.tolist()}, "values": [{values}]}}'

    def open_task(model: Any, suffix: str) -> tuple[Run, Encoder]:
        model.embed_sparse([], **options)  # checks the model and the options early
        return _streaming(model.embed_sparse, options), _line_encoder(to_json, suffix)

    columns: dict[str, ColumnType] = {"indices": ["int32"], "values": ["float32"]}
    return JobTask("embed-sparse", options, columns, open_task)


def embed_tokens_task(options: dict[str, Any], *, ranges: np.ndarray | None = None) -> JobTask:
    """A list of vectors for each text. options: keyword arguments of Model.embed_tokens but ranges.

    ranges: as in Model.embed_tokens.
    """
    given = options if ranges is None else {**options, "ranges": ranges}

    def open_task(model: Any, suffix: str) -> tuple[Run, Encoder]:
        vectors = model.embed_tokens([], **given).vectors  # checks the model and the options early
        to_text = _vector_text(vectors.shape[1], vectors.dtype)

        def to_json(answer: Any) -> str:
            return f'{{"embeddings": [{", ".join(map(to_text, answer))}]}}'

        return _streaming(model.embed_tokens, given), _line_encoder(to_json, suffix)

    numbers = _COLUMN_TYPES[options["precision"]]
    return JobTask(
        "embed-tokens", options | _digest(ranges), {"embeddings": [[numbers]]}, open_task
    )


# Arrow's names for the numbers of a vector.
_COLUMN_TYPES = {
    "float32": "float32",
    "float16": "float16",
    "int8": "int8",
    "uint8": "uint8",
    "binary": "int8",
    "ubinary": "uint8",
}


_SPAN: dict[str, ColumnType] = {"start": "int64", "end": "int64"}
# By method of Model, whose answer to a text is a list of records: the key of a row's list, and the
# fields of a record, which are attributes of an answer.
_LISTS: dict[str, tuple[str, Mapping[str, ColumnType]]] = {
    "classify": ("labels", {"label": "string", "score": "float64"}),
    # The names of Hugging Face's token-classification pipeline.
    "tag": ("entities", {"entity_group": "string", "score": "float64", "word": "string", **_SPAN}),
    "extract": ("spans", {**_SPAN, "text": "string", "label": "string", "score": "float64"}),
    "answer": ("answers", {"answer": "string", "score": "float64", **_SPAN}),
    "fill_mask": (
        "fills",
        {
            "mask_index": "int64",
            "score": "float64",
            "token": "int64",
            "token_str": "string",
            "sequence": "string",
        },
    ),
}
_TOKENS: dict[str, ColumnType] = {"entity": "string", "score": "float64", "index": "int64"}


def list_task(method: str, options: dict[str, Any]) -> JobTask:
    """A task of _LISTS: {"index": i, key: [{...}, ...]} for each text.

    options: keyword arguments of the Model's method.
    """
    key, fields = _LISTS[method]
    if options.get("relations"):
        relation: dict[str, ColumnType] = {"label": "string", "tail": "int64", "score": "float64"}
        fields = {**fields, "relations": [relation]}
    if options.get("aggregation") == "none":  # tokens, not groups of them
        fields = {**_TOKENS, "word": "string", **_SPAN}
    attributes = {field: "entity" if field == "entity_group" else field for field in fields}

    def to_json(answer: Any) -> str:
        records = [
            {f: _plain(getattr(item, own)) for f, own in attributes.items()} for item in answer
        ]
        return _json({key: records})

    def open_task(model: Any, suffix: str) -> tuple[Run, Encoder]:
        run = getattr(model, method)
        run([], **options)  # checks the model and the options early
        return _streaming(run, options), _line_encoder(to_json, suffix)

    return JobTask(method.replace("_", "-"), options, {key: [dict(fields)]}, open_task)


def _plain(value: Any) -> Any:
    return list(map(asdict, value)) if isinstance(value, tuple) else value


def score_task(options: dict[str, Any]) -> JobTask:
    """How likely each text is: {"index", "log_likelihood", "num_tokens", "perplexity"}, the last
    null where there is no finite one. options: keyword arguments of Model.score."""

    def to_json(answer: Any) -> str:
        record = {name: getattr(answer, name) for name in ("log_likelihood", "num_tokens")}
        perplexity = answer.perplexity
        return _json(record | {"perplexity": perplexity if math.isfinite(perplexity) else None})

    def open_task(model: Any, suffix: str) -> tuple[Run, Encoder]:
        return _streaming(model.score, options), _line_encoder(to_json, suffix)

    columns: dict[str, ColumnType] = {
        "log_likelihood": "float64",
        "num_tokens": "int64",
        "perplexity": "float64",
    }
    return JobTask("score", options, columns, open_task)


def read_schema_file(path: Path) -> dict[str, Any]:
    """The table in a JSON file. Raises InputError where it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--schema {path}: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"--schema {path} must hold a JSON object, got {shown(found)}")
    return found


def fill_schema_task(options: dict[str, Any]) -> JobTask:
    """The answers to a schema: {"index", "entities", "classifications", "structures", "relations"};
    in parquet, each is JSON.  options: keyword arguments of Model.fill_schema."""
    columns: dict[str, ColumnType] = dict.fromkeys(
        ("entities", "classifications", "structures", "relations"), "string"
    )

    def open_task(model: Any, suffix: str) -> tuple[Run, Encoder]:
        model.fill_schema([], **options)  # checks the model and the options early

        def to_json(answer: Any) -> str:
            record = asdict(answer)
            if suffix == ".parquet":
                record = {name: _json(own) for name, own in record.items()}
            return _json(record)

        return _streaming(model.fill_schema, options), _line_encoder(to_json, suffix)

    return JobTask("fill-schema", options, columns, open_task)


def decide_task(options: dict[str, Any]) -> JobTask:
    """The answers to each request: {"index", "answers"}; in parquet, answers are JSON.

    options: keyword arguments of Model.decide.
    """

    def open_task(model: Any, suffix: str) -> tuple[Run, Encoder]:
        model.decide([], **options)  # checks the model and the options early
        is_text = suffix == ".parquet"

        def to_json(answers: Any) -> str:
            return _json({"answers": _json(answers) if is_text else answers})

        return _streaming(model.decide, options), _line_encoder(to_json, suffix)

    return JobTask("decide", options, {"answers": "string"}, open_task)


def generate_task(
    params: dict[str, Any],
    sizes: dict[str, Any],
    *,
    generation_config: str = "auto",
    kv_cache_dtype: str = "auto",
    template_kwargs: dict[str, Any] | None = None,
) -> JobTask:
    """The model's answers: {"index", "text", "finish_reason", "num_prompt_tokens",
    "num_tokens"}.

    params: of SamplingParams.  sizes: keyword arguments of Model.engine.  generation_config,
    kv_cache_dtype: as of bytetx.load.  template_kwargs: chat_template_kwargs of Model.generate.
    """
    try:
        sampling = SamplingParams(**params)
    except InputError as error:
        raise OptionError(str(error)) from error

    def to_json(answer: Any) -> str:
        names = ("text", "finish_reason", "num_prompt_tokens")
        record = {name: getattr(answer, name) for name in names}
        return _json(record | {"num_tokens": len(answer.token_ids)})

    def open_task(model: Any, suffix: str) -> tuple[Run, Encoder]:
        options = {"params": sampling, "chat_template_kwargs": template_kwargs, **sizes}
        model.generate([], **options)  # checks the model and the options early
        return _streaming(model.generate, options), _line_encoder(to_json, suffix)

    def describe(model: Any) -> str:
        return f"{model.generation_sizes(**sizes)}\n{model.checkpoint.generation}"

    columns: dict[str, ColumnType] = {
        "text": "string",
        "finish_reason": "string",
        "num_prompt_tokens": "int64",
        "num_tokens": "int64",
    }
    options = params | sizes | {"chat_template_kwargs": template_kwargs}
    if generation_config != "auto":
        options["generation_config"] = _identity(generation_config)
    if kv_cache_dtype != "auto":
        options["kv_cache_dtype"] = kv_cache_dtype
    load_options = {"generation_config": generation_config, "kv_cache_dtype": kv_cache_dtype}
    return JobTask("generate", options, columns, open_task, describe, load_options)


def _identity(generation_config: str) -> str:
    """The option, and of a file what it holds, so that another one resumes no job."""
    path = Path(generation_config)
    path = path / "generation_config.json" if path.is_dir() else path
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else generation_config


def rerank_task(options: dict[str, Any]) -> JobTask:
    """Hits of each query, best first. options: keyword arguments of Model.rerank."""

    def open_task(model: Any, suffix: str) -> tuple[Run, Encoder]:
        model.rerank("", [], **options)  # checks the model and the options early

        def run(requests: Iterator[RankRequest]) -> JobStream:
            return _RankStream(model, requests, options)

        return run, _line_encoder(_json, suffix)

    hit: dict[str, ColumnType] = {"index": "int64", "score": "float64", "document": "string"}
    return JobTask("rerank", options, {"query": "string", "hits": [hit]}, open_task)


def _line_encoder(to_json: Callable[[Any], str], suffix: str) -> LineEncoder:
    return LineEncoder(to_json, keeps_nan=suffix == ".parquet")


class _RankStream:
    """Answers requests one by one; a document that cannot be ranked ends the list of hits."""

    def __init__(self, model: Any, requests: Iterator[RankRequest], options: dict[str, Any]):
        self._model = model
        self._requests = requests
        self._options = options
        self.stats = RunStats()

    def __iter__(self) -> Iterator[dict[str, Any] | InputError]:
        for request in self._requests:
            try:
                yield self._rank(request)
            except InputError as error:
                yield error

    def _rank(self, request: RankRequest) -> dict[str, Any]:
        if not is_unicode(request.query):
            raise InputError(
                "the query holds half a surrogate pair, which is no text; decode its source with "
                "errors='replace'"
            )
        places = [i for i, text in enumerate(request.documents) if not isinstance(text, Exception)]
        documents = [request.documents[i] for i in places]
        ranked = self._model.rerank(request.query, documents, on_error="return", **self._options)
        self.stats = _sum(self.stats, ranked.stats)
        hits = [{**asdict(hit), "index": places[hit.index]} for hit in ranked]
        errors = {places[i]: _respelled(error) for i, error in ranked.errors.items()}
        errors.update((i, e) for i, e in enumerate(request.documents) if isinstance(e, Exception))
        hits += [{"index": i, "error": str(error)} for i, error in sorted(errors.items())]
        return {"query": request.query, "hits": hits}


def is_unicode(text: str) -> bool:
    """False where half a surrogate pair is in it, which no encoding of text has."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _streaming(method: Callable[..., Any], options: dict[str, Any]) -> Run:
    return lambda texts: _Respelling(method(texts, stream=True, on_error="return", **options))


class _Respelling:
    """A stream whose errors speak of a line of a file and of options of the command line."""

    def __init__(self, stream: JobStream):
        self._stream = stream

    @property
    def stats(self) -> RunStats:
        return self._stream.stats

    def __iter__(self) -> Iterator[Any]:
        return (_respelled(x) if isinstance(x, InputError) else x for x in self._stream)


def _respelled(error: InputError) -> InputError:
    # The model counts the texts that it was given: without broken lines, from where a job resumed.
    text = re.sub(r"^((texts|documents|prompts)\[\d+\]|text \d+(?= ))", "the text", str(error))
    return InputError(text.replace("pass truncate=True", "give --truncate"))


def _sum(a: RunStats, b: RunStats) -> RunStats:
    """Return the stats of two runs together; None where neither knows."""

    def add(x: float | None, y: float | None) -> float | None:
        return y if x is None else x + (y or 0)

    both = {f.name: add(getattr(a, f.name), getattr(b, f.name)) for f in fields(RunStats)}
    return RunStats(**both)  # type: ignore[arg-type]  # sums of the fields' own types


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _vector_json(dim: int, dtype: np.dtype) -> Callable[[Any], str]:
    to_text = _vector_text(dim, dtype)
    return lambda vector: f'{{"embedding": {to_text(vector)}}}'


def _vector_text(dim: int, dtype: np.dtype) -> Callable[[Any], str]:
    """A vector as a JSON list; the function raises ValueError for NaN and infinity."""
    # So many significant digits give every float back exactly; json's 17 would double the file.
    digits = {"float32": "%.9g", "float16": "%.5g"}
    numbers = ", ".join([digits.get(dtype.name, "%d")] * dim)

    def to_text(vector: Any) -> str:
        text = numbers % tuple(vector.tolist())
        if "n" in text:
            raise ValueError("nan or inf, which JSON does not have")
        return f"[{text}]"

    return to_text
