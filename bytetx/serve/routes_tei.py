"""TEI's routes: /embed and its relatives, /predict, /rerank, /tokenize, /decode, POST /.

/extract and /fill_schema, which TEI lacks, are beside them.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import orjson
from starlette.responses import Response

from bytetx.errors import shown
from bytetx.serve.answers import (
    check_batch,
    check_characters,
    check_tokenize,
    count_characters,
    count_read_characters,
    joined_answers,
    json_answer,
    run,
)
from bytetx.serve.calls import ModelFacts, Outcome
from bytetx.serve.errors import ServeError
from bytetx.serve.gateway import MAX_INLINE_BYTES, Exchange, parse
from bytetx.serve.schemas import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    Fields,
    PredictRequest,
    PredictTokensRequest,
    RerankRequest,
    SimilarityRequest,
    TokenizeRequest,
    VertexRequest,
)
from bytetx.serve.schemas_extract import ExtractRequest, FillSchemaRequest
from bytetx.serve.site import need_task

_MAX_INLINE_ROWS = 4096  # entries of an answer that are made in the event loop
M = TypeVar("M", bound=Fields)


async def embed(body: EmbedRequest, exchange: Exchange) -> Response:
    """One vector for each input."""
    facts = _model(exchange, body.model, "embed")
    check_batch(exchange, body.inputs, field="inputs")
    outcome = await run(
        exchange,
        facts,
        "embed",
        body.inputs,
        normalize=normalize_option(facts, body.normalize),
        dimensions=body.dimensions,
        pooling=exchange.site.settings.pooling,
        truncate=truncates(exchange, body.truncate),
        **prompt_options(exchange, facts, body.prompt_name, task=body.task),
        **left_option(body.cuts_left),
    )
    return json_answer(exchange, outcome.arrays[0], num_characters=count_characters(body.inputs))


async def embed_all(body: EmbedAllRequest, exchange: Exchange) -> Response:
    """A vector for each token of each input, from the last layer; ColBERT models project them."""
    facts = _model(exchange, body.model, "embed_tokens")
    check_batch(exchange, body.inputs, field="inputs")
    outcome = await run(
        exchange,
        facts,
        "embed_tokens",
        body.inputs,
        truncate=truncates(exchange, body.truncate),
        **prompt_options(exchange, facts, body.prompt_name),
        **left_option(body.cuts_left),
    )
    vectors, bounds = outcome.arrays[0], outcome.arrays[1].tolist()
    content = [vectors[bounds[i] : bounds[i + 1]] for i in range(len(bounds) - 1)]
    return json_answer(exchange, content, num_characters=count_characters(body.inputs))


async def embed_sparse(body: EmbedSparseRequest, exchange: Exchange) -> Response:
    """The weights of each input that are not 0: token ids and numbers."""
    facts = _model(exchange, body.model, "embed_sparse")
    check_batch(exchange, body.inputs, field="inputs")
    outcome = await run(
        exchange,
        facts,
        "embed_sparse",
        body.inputs,
        truncate=truncates(exchange, body.truncate),
        **prompt_options(exchange, facts, body.prompt_name, task=body.task),
        **left_option(body.cuts_left),
    )
    content = _sparse_rows(outcome)
    return json_answer(exchange, content, num_characters=count_characters(body.inputs))


def _sparse_rows(outcome: Outcome) -> Any:
    """A list of objects for each text, made while it is written where there are many."""
    indices, values, indptr = outcome.arrays
    bounds = indptr.tolist()

    def row(start: int, end: int) -> Iterator[dict[str, Any]]:
        pairs = zip(indices[start:end].tolist(), values[start:end].tolist(), strict=True)
        return ({"index": index, "value": value} for index, value in pairs)

    rows = (row(start, end) for start, end in zip(bounds, bounds[1:], strict=False))
    return _few_or_lazy(rows, len(indices))


def _few_or_lazy(rows: Iterator[Iterator[Any]], num_entries: int) -> Any:
    """Lists where they are short; else iterators, which json_answer reads in a thread."""
    return [list(row) for row in rows] if num_entries <= _MAX_INLINE_ROWS else rows


async def predict(body: PredictRequest, exchange: Exchange) -> Response:
    """The labels of each text or pair with their scores, best first."""
    return await _predict(body, exchange, is_nested=not body.inputs.is_single)


async def _predict(body: PredictRequest, exchange: Exchange, *, is_nested: bool) -> Response:
    facts = _model(exchange, body.model, "classify")
    check_batch(exchange, body.inputs, field="inputs")
    outcome = await run(
        exchange,
        facts,
        "classify",
        list(body.inputs),
        raw_scores=body.raw_scores,
        top_k=body.top_k,
        truncate=truncates(exchange, body.truncate),
        **left_option(body.cuts_left),
    )
    rows = [[{"score": score, "label": label} for label, score, _ in row] for row in outcome.rows]
    content = rows if is_nested else rows[0]
    return json_answer(exchange, content, num_characters=count_characters(body.inputs))


async def predict_tokens(body: PredictTokensRequest, exchange: Exchange) -> Response:
    """The tagged entities of each text, as Hugging Face's token-classification pipeline."""
    facts = _model(exchange, body.model, "tag")
    check_batch(exchange, body.inputs, field="inputs")
    options: dict[str, Any] = {"truncate": truncates(exchange, body.truncate)}
    if body.stride is not None:
        options = {"overflow": "chunk", "stride": body.stride}
    if body.cuts_left:
        raise ServeError(
            "validation", "truncation_direction Left is not for /predict_tokens; use stride"
        )
    outcome = await run(
        exchange,
        facts,
        "tag",
        list(body.inputs),
        aggregation=body.aggregation_strategy,
        ignore_labels=body.ignore_labels,
        decoding=body.decoding,
        **options,
    )
    is_token = body.aggregation_strategy == "none"
    rows = ((_entity(entity, is_token=is_token) for entity in row) for row in outcome.rows)
    content = _few_or_lazy(rows, sum(map(len, outcome.rows)))
    content = next(iter(content)) if body.inputs.is_single else content
    return json_answer(exchange, content, num_characters=count_characters(body.inputs))


def _entity(entity: dict[str, Any], *, is_token: bool) -> dict[str, Any]:
    """With the keys of Hugging Face's pipeline."""
    row = {
        "entity" if is_token else "entity_group": entity["entity"],
        "score": entity["score"],
        "word": entity["word"],
        "start": entity["start"],
        "end": entity["end"],
    }
    return row | ({"index": entity["index"]} if is_token else {})


async def rerank(body: RerankRequest, exchange: Exchange) -> Response:
    """The texts by how well they answer the query, best first."""
    facts, texts = _model(exchange, body.model, "rerank"), body.texts
    if texts is None:
        raise ServeError("validation", "the field texts is missing", param="texts")
    check_batch(exchange, texts, field="texts")
    characters = count_read_characters(texts, (body.query, body.instruction))
    check_characters(exchange, characters, field="texts")
    outcome = await run(
        exchange,
        facts,
        "rerank",
        [body.query, texts],
        raw_scores=body.raw_scores,
        instruction=body.instruction,
        truncate=truncates(exchange, body.truncate),
        **left_option(body.cuts_left),
    )
    content = [
        {"index": index, "score": score} | ({"text": texts[index]} if body.return_text else {})
        for index, score in outcome.rows
    ]
    return json_answer(exchange, content, num_characters=characters)


async def extract(body: ExtractRequest, exchange: Exchange) -> Response:
    """Spans of each text with their labels and scores, in the order of the text, and with their
    relations where the body names some."""
    facts = _model(exchange, body.model, "extract")
    check_batch(exchange, body.texts, field="texts")
    labels = body.labels
    read = list(labels.values()) if isinstance(labels, dict) else labels
    # The model reads the labels with each text.
    characters = count_read_characters(body.texts, [*read, *body.relations])
    check_characters(exchange, characters, field="texts", shared="labels")
    outcome = await run(
        exchange,
        facts,
        "extract",
        body.texts,
        labels=labels,
        threshold=body.threshold,
        nested=body.nested,
        multi_label=body.multi_label,
        relations=body.relations,
        relation_threshold=body.relation_threshold,
        adjacency_threshold=body.adjacency_threshold,
        truncate=truncates(exchange, body.truncate),
    )
    if not body.relations:
        for span in chain.from_iterable(outcome.rows):
            del span["relations"]
    return json_answer(exchange, outcome.rows, num_characters=characters)


async def fill_schema(body: FillSchemaRequest, exchange: Exchange) -> Response:
    """The answers of each text to a schema."""
    facts = _model(exchange, body.model, "fill_schema")
    check_batch(exchange, body.texts, field="texts")
    # The model reads the schema with each text.
    characters = count_read_characters(body.texts, [orjson.dumps(body.schema_).decode()])
    check_characters(exchange, characters, field="texts", shared="schema")
    outcome = await run(
        exchange,
        facts,
        "fill_schema",
        body.texts,
        schema=body.schema_,
        threshold=body.threshold,
        truncate=truncates(exchange, body.truncate),
    )
    return json_answer(exchange, outcome.rows, num_characters=characters)


async def similarity(body: SimilarityRequest, exchange: Exchange) -> Response:
    """How similar each sentence is to the source sentence, by the model's own function."""
    facts = _model(exchange, body.model, "embed")
    given = body.parameters
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    check_batch(exchange, body.inputs.sentences and texts, field="inputs.sentences")
    outcome = await run(
        exchange,
        facts,
        "similarity",
        texts,
        pooling=exchange.site.settings.pooling,
        truncate=truncates(exchange, None if given is None else given.truncate),
        **prompt_options(
            exchange,
            facts,
            None if given is None else given.prompt_name,
            task=None if given is None else given.task,
        ),
        **left_option(given is not None and given.cuts_left),
    )
    return json_answer(exchange, outcome.rows, num_characters=count_characters(texts))


async def tokenize(body: TokenizeRequest, exchange: Exchange) -> Response:
    """The tokens of each text: ids, the text that each stands for, and where it is."""
    facts = _model(exchange, body.model, "tokenize")
    check_batch(exchange, body.inputs, field="inputs")
    count = count_characters(body.inputs)
    check_tokenize(exchange, count, field="inputs", unit="characters")
    outcome = await run(
        exchange,
        facts,
        "tokenize",
        body.inputs,
        add_special_tokens=body.add_special_tokens,
        **prompt_options(exchange, facts, body.prompt_name),
    )
    return json_answer(exchange, _few_or_lazy(_token_rows(outcome), len(outcome.arrays[0])))


def _token_rows(outcome: Outcome) -> Iterator[Iterator[dict[str, Any]]]:
    """{id, text, special, start, stop} of each token of each text."""
    texts, names = outcome.rows
    ids, starts, stops, special, bounds = outcome.arrays

    def row(text: str, first: int, end: int) -> Iterator[dict[str, Any]]:
        for place in range(first, end):
            token_id, start, stop = int(ids[place]), int(starts[place]), int(stops[place])
            is_special = bool(special[place])
            yield {
                "id": token_id,
                "text": names[str(token_id)] if is_special else text[start:stop],
                "special": is_special,
                "start": None if is_special else start,
                "stop": None if is_special else stop,
            }

    places = bounds.tolist()
    return (row(*one) for one in zip(texts, places, places[1:], strict=False))


async def decode(body: DecodeRequest, exchange: Exchange) -> Response:
    """The text of each list of token ids."""
    facts = _model(exchange, body.model, "tokenize")
    check_batch(exchange, body.ids, field="ids")
    check_tokenize(exchange, sum(map(len, body.ids)), field="ids", unit="ids")
    outcome = await run(
        exchange, facts, "decode", body.ids, skip_special_tokens=body.skip_special_tokens
    )
    return json_answer(exchange, outcome.rows)


async def main_task(exchange: Exchange) -> Response:
    """The model's main task: /similarity for its inputs, else /embed, /predict, /rerank, /extract
    or /predict_tokens, as TEI and Hugging Face's InferenceClient use this route."""
    return await _main_task(await _read_object(exchange), exchange)


async def _read_object(exchange: Exchange) -> dict[str, Any]:
    raw = exchange.body_bytes
    try:
        if len(raw) <= MAX_INLINE_BYTES:
            given = orjson.loads(raw)
        else:
            given = await exchange.site.in_thread(lambda: orjson.loads(raw))
    except orjson.JSONDecodeError as error:
        raise ServeError("validation", f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ServeError("validation", "the body must be a JSON object")
    return given


async def invocations(exchange: Exchange) -> Response:
    """As POST /, where SageMaker sends requests."""
    return await main_task(exchange)


async def vertex(body: VertexRequest, exchange: Exchange) -> Response:
    """As POST / for each instance of a request of Vertex AI."""
    check_batch(exchange, body.instances, field="instances")
    answers = []
    for index, instance in enumerate(body.instances):
        try:
            answers.append(await _main_task(instance, exchange))
        except ServeError as error:
            error.message = f"instances[{index}]: {error.message}"
            raise
    return joined_answers(exchange, answers, key="predictions")


async def _main_task(given: dict[str, Any], exchange: Exchange) -> Response:
    if isinstance(given.get("inputs"), dict):
        return await similarity(await _read(SimilarityRequest, given, exchange), exchange)
    parameters = given.get("parameters")
    if not isinstance(parameters, dict | None):
        raise ServeError("validation", f"parameters must be a table, got {shown(parameters)}")
    is_hub_api = parameters is not None
    # What the hub's own API takes for its queue and cache has no meaning here.
    plain = {name: given[name] for name in given if name not in ("parameters", "options")}
    given = plain | _hub_options(parameters or {})
    named = given.get("model")
    name = exchange.model_name or (named if isinstance(named, str) else None)
    task = exchange.site.find_model(name).main_task
    if task == "embed_sparse":
        return await embed_sparse(await _read(EmbedSparseRequest, given, exchange), exchange)
    if task == "rerank" and "query" in given:
        return await rerank(await _read(RerankRequest, given, exchange), exchange)
    if task in ("classify", "rerank"):
        body = await _read(PredictRequest, given, exchange)
        return await _predict(body, exchange, is_nested=is_hub_api or not body.inputs.is_single)
    if task == "extract" and "schema" in given:
        return await fill_schema(await _read(FillSchemaRequest, given, exchange), exchange)
    if task == "extract":
        return await extract(await _read(ExtractRequest, given, exchange), exchange)
    if task == "tag":
        return await predict_tokens(await _read(PredictTokensRequest, given, exchange), exchange)
    return await embed(await _read(EmbedRequest, given, exchange), exchange)


def _hub_options(parameters: dict[str, Any]) -> dict[str, Any]:
    """The hub's names of options, as InferenceClient sends them, in TEI's."""
    options = dict(parameters)
    function = options.pop("function_to_apply", None)
    if function not in (None, "none"):
        raise ServeError(
            "validation",
            "function_to_apply must be none or left out, which is the model's own: "
            f"{shown(function)}",
        )
    return options | ({"raw_scores": True} if function == "none" else {})


async def _read(model: type[M], given: dict[str, Any], exchange: Exchange) -> M:
    try:
        raw = await exchange.site.in_thread(lambda: orjson.dumps(given))
    except TypeError as error:  # an integer has more than 64 bits
        raise ServeError("validation", f"the request has a value out of range: {error}") from None
    return await parse(exchange, model, raw)


def _model(exchange: Exchange, name: str | None, task: str) -> ModelFacts:
    facts = exchange.site.find_model(exchange.model_name or name)
    need_task(facts, task, kind="backend")
    return facts


def truncates(exchange: Exchange, given: bool | None) -> bool:
    return exchange.site.settings.auto_truncate if given is None else given


def normalize_option(facts: ModelFacts, given: bool | None) -> bool | None:
    """None where the checkpoint does so by itself: a second time would change the last bits."""
    return None if given and "Normalize" in facts.info["sentence_modules"] else given


def prompt_options(
    exchange: Exchange,
    facts: ModelFacts,
    prompt_name: str | None,
    *,
    task: str | Sequence[str | None] | None = None,
) -> dict[str, Any]:
    """Options of Model.embed; the server's default where the request names no prompt or task.

    A default name counts for the models that have such a prompt.
    """
    settings, default = exchange.site.settings, exchange.site.settings.default_prompt_name
    options: dict[str, Any] = {} if task is None else {"task": task}
    if prompt_name is not None:
        options["prompt_name"] = prompt_name
    elif task is None and settings.default_prompt is not None:
        options["prompt"] = settings.default_prompt
    elif task is None and default in facts.info["prompts"]:
        options["prompt_name"] = default
    return options


# The names that checkpoints have for types of inputs, of prompts and of tasks with adapters.
_QUERY = ("query", "retrieval.query", "retrieval")
_DOCUMENT = (
    *("document", "passage", "corpus"),
    *("retrieval.passage", "retrieval.document", "retrieval"),
)
_INPUT_TYPES = {
    "query": _QUERY,
    "search_query": _QUERY,
    "document": _DOCUMENT,
    "passage": _DOCUMENT,
    "search_document": _DOCUMENT,
    "clustering": ("clustering", "separation"),
}


def input_options(exchange: Exchange, facts: ModelFacts, name: str | None) -> dict[str, Any]:
    """The prompt or the task of a type of inputs; of one without either, no prompt.

    Where the model's name has a task, that one stays, with its prompt.
    """
    if name is None:
        return prompt_options(exchange, facts, None)
    if any(facts.name == f"{facts.parent}:{task}" for task in facts.info["embedding_tasks"]):
        return {}
    names = _INPUT_TYPES.get(name, (name,))
    for option, known in (
        ("task", facts.info["embedding_tasks"]),
        ("prompt_name", facts.info["prompts"]),
    ):
        found = next((one for one in names if one in known), None)
        if found is not None:
            return {option: found}
    return {"prompt": ""}


def left_option(cuts_left: bool) -> dict[str, bool]:
    return {"left": True} if cuts_left else {}
