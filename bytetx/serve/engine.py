"""Runs calls on AsyncModels: every task from JSON's values to rows and arrays."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import orjson
import torch
from pydantic import TypeAdapter, ValidationError

from bytetx.async_model import AsyncModel
from bytetx.checkpoint.names import name_of
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.encode.request import RunStats
from bytetx.errors import DeviceLostError, InputError, NotFiniteError, shown
from bytetx.generate.outputs import RequestOutput
from bytetx.model import Model
from bytetx.nn.schema_head import SchemaHead
from bytetx.ops.host import release_heap_after
from bytetx.requests.chunks import offsets_of
from bytetx.requests.prompts import ChatPrompt, Prompt
from bytetx.sampling_params import SamplingParams
from bytetx.serve.answer_forms import answer_schema
from bytetx.serve.calls import Call, ModelFacts, Outcome, Piece, Timings
from bytetx.serve.errors import ServeError, as_serve_error
from bytetx.serve.left_truncation import LeftTruncation
from bytetx.serve.pair_scores import late_pair_scores, pair_scores
from bytetx.serve.settings import ModelSource
from bytetx.serve.token_logprobs import OutputLogprobs, TokenTexts
from bytetx.tasks.catalog import declared_task, declared_tasks
from bytetx.tasks.document_questions import asks_about_documents
from bytetx.tasks.embed_group import is_small
from bytetx.tasks.generation_stream import AsyncGeneration, PromptGroup
from bytetx.tasks.rerank import reranks_by_prompts, why_no_score
from bytetx.tasks.results import Embeddings, Results
from bytetx.tasks.task import PromptOptions, TaskOptions, TaskSpec

logger = logging.getLogger("bytetx.serve")

# What a model's tasks with adapters change, and what reads texts alone.
_WITH_TASKS = ("embed", "embed_sparse", "embed_tokens", "tokenize")


def model_facts(source: ModelSource, model: Model) -> ModelFacts:
    """Return the facts of a loaded model."""
    heads, sentence = model.heads, model.checkpoint.sentence
    has_lm = heads.lm is not None
    reranks = heads.sequence is not None and why_no_score(model.spec) is None
    reranks |= reranks_by_prompts(model.context)
    has_other_head = any(
        (heads.sequence, heads.token, heads.question_answering, heads.extraction, heads.ranking)
    )
    is_sparse = sentence.splade is not None
    has_sparse = heads.masked_lm is not None or model.checkpoint.token_weight is not None
    can = {
        "embed": not has_other_head and not is_sparse,
        "embed_sparse": has_sparse,
        "embed_tokens": not has_other_head,
        "classify": heads.sequence is not None,
        "rerank": reranks,
        "tag": heads.token is not None,
        "extract": heads.extraction is not None,
        "fill_schema": isinstance(heads.extraction, SchemaHead),
        "generate": has_lm,
        "decide": asks_about_documents(model.context),
        "tokenize": model.tokenizer is not None,
    }
    can |= {
        spec.name: _is_able(spec, model) for spec in declared_tasks().values() if spec.has_route
    }
    if sentence.logit_score is not None:
        main = "rerank"
    elif has_lm and not sentence.modules:
        main = "generate"
    else:
        order = ["rerank", "classify", "tag", "extract", "embed", "embed_sparse"]
        if can["classify"] and model.spec.num_labels > 1:  # two labels may be of anything
            order.remove("rerank")
        main = next((task for task in order if can[task]), "embed")
    return ModelFacts(
        name=source.name,
        model_id=name_of(source.path),
        info=model.info(),
        tasks=tuple(task for task, is_able in can.items() if is_able),
        main_task=main,
        has_chat_template=model.checkpoint.chat_template is not None,
        gives_token_vectors=sentence.multi_vector is not None,
        similarity=model.similarity_function,
        created=int(time.time()),
        tool_calls=model.answer_format.tool_calls,
        reasoning=model.answer_format.reasoning,
    )


def _is_able(spec: TaskSpec, model: Model) -> bool:
    """Whether the checkpoint has what a declared task needs."""
    try:
        spec.start(model.context, [], spec.options())
    except InputError:
        return False
    return True


def adapter_facts(model: ModelFacts, adapter: str) -> ModelFacts:
    """The facts of a model with an adapter."""
    name = f"{model.name}:{adapter}"
    return replace(model, name=name, parent=model.name, created=int(time.time()))


def task_facts(model: ModelFacts, task: str) -> ModelFacts:
    """The facts of a model for one of its checkpoint's tasks."""
    own = tuple(name for name in model.tasks if name in _WITH_TASKS)
    return replace(model, name=f"{model.name}:{task}", parent=model.name, tasks=own)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model, the queue before it, and what routes know of it."""

    facts: ModelFacts
    model: AsyncModel
    left: LeftTruncation
    texts: TokenTexts


class LocalBackend:
    """A ServeBackend of this process.

    on_lost: called once where a device or a queue is lost for good; only a new process helps.
    on_models: called when `models` has changed.
    """

    def __init__(
        self,
        served: Sequence[ServedModel],
        *,
        on_lost: Callable[[], None],
        changes_adapters: bool = True,
    ):
        """changes_adapters: whether they may be loaded and unloaded while it runs."""
        self._served: dict[str, ServedModel] = {}
        # Models with an adapter, in the same queues, by MODEL:ADAPTER or MODEL:TASK.
        self._adapted: dict[str, ServedModel] = {}
        self._changes_adapters = changes_adapters
        self.on_models: Callable[[], None] = lambda: None
        for one in served:
            self._add(one)
        self.models = self._list_models()
        self.is_healthy = True
        self._on_lost = on_lost
        # Of requests with several prompts, each of which is a call; gone with the last of them.
        self._prompt_groups = WeakValueDictionary[str, PromptGroup]()

    @property
    def served(self) -> Sequence[ServedModel]:
        """The models in memory, without their adapters."""
        return list(self._served.values())

    @property
    def ring_models(self) -> Sequence[ServedModel]:
        """The models that take texts of front-ends by rings."""
        return self.served

    def _add(self, served: ServedModel) -> None:
        """Serves a model, its adapters and its tasks."""
        self._served[served.facts.name] = served
        for adapter in served.model.model.adapters:
            self._serve_adapter(served, adapter)
        tasks = served.model.model.checkpoint.tasks
        for task in () if tasks is None else tasks.adapters:
            self._serve_task(served, task)

    async def run(self, call: Call) -> Outcome:
        try:
            if call.task in ("load_adapter", "unload_adapter"):
                return await self._change_adapter(call)
            return await TASKS[call.task](self._find(call.model, call.priority), call)
        except Exception as error:
            raise self._serve_error(error) from error

    def _find(self, name: str, priority: int = 0) -> ServedModel:
        """A model, whose queue takes calls with that priority.

        ServeError for an adapter that was unloaded since its name was looked up.
        """
        found = self._served.get(name) or self._adapted.get(name)
        if found is None:
            raise ServeError(
                "not_found",
                f"the model {shown(name)} is not served here any more",
                param="model",
                code="model_not_found",
            )
        if priority:
            return replace(found, model=found.model._prioritised(priority))
        return found

    async def _change_adapter(self, call: Call) -> Outcome:
        """Loads or unloads an adapter of a model; the next request knows of it."""
        if not self._changes_adapters:
            raise ServeError(
                "unsupported",
                "one of several replicas answers this request, and the others would not know of "
                "it; start all of them with --adapter NAME=PATH",
            )
        served, name = self._find(call.model), call.options["name"]
        if call.task == "load_adapter":
            await served.model.add_adapter(name, call.options["path"])
            self._serve_adapter(served, name)
        else:
            served.model.remove_adapter(name)
            del self._adapted[f"{call.model}:{name}"]
        logger.info("%s: %s %s", call.model, call.task, name)
        self.models = self._list_models()
        self.on_models()
        return Outcome(Timings())

    def _list_models(self) -> tuple[ModelFacts, ...]:
        return tuple(one.facts for one in (*self._served.values(), *self._adapted.values()))

    def _serve_adapter(self, served: ServedModel, adapter: str) -> None:
        facts, model = adapter_facts(served.facts, adapter), served.model._adapted(adapter=adapter)
        self._adapted[facts.name] = replace(served, facts=facts, model=model)

    def _serve_task(self, served: ServedModel, task: str) -> None:
        facts, model = task_facts(served.facts, task), served.model._adapted(task=task)
        self._adapted[facts.name] = replace(served, facts=facts, model=model)

    async def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        options = dict(call.options)
        grammar = options.pop("tool_grammar", None)
        try:
            served = self._find(call.model, call.priority)
            template_kwargs = options.pop("chat_template_kwargs", None)
            prompt = _prompt(call.inputs, template_kwargs)
            name, group = options.pop("group", None), PromptGroup()
            if name is not None:
                group = self._prompt_groups.setdefault(name, group)
            answers = served.model.model.answer_format
            if grammar is not None:
                options["structured_outputs"] = answers.tool_grammar(
                    template_kwargs["tools"],
                    **grammar,
                    answer=answer_schema(options.get("structured_outputs")),
                )
            if options.pop("parses", False) and answers.special_ids:
                options["skip_special_tokens"] = False  # what is parsed must be in the text
            params = SamplingParams(**_sampling(options))
            logprobs = defaultdict[int, OutputLogprobs](
                lambda: OutputLogprobs(
                    served.texts,
                    is_chat=bool(options.get("is_chat")),
                    skip_special_tokens=params.skip_special_tokens,
                    keeps_stop=params.include_stop_str_in_output,
                )
            )
            async with aclosing(served.model._bounded(group).generate(prompt, params)) as outputs:
                async for output in outputs:
                    if output.error is not None:
                        raise output.error
                    rows = logprobs[output.index].rows(output) if output.logprobs else None
                    yield _piece(output, rows, outputs)
        except Exception as error:
            found = self._serve_error(error)
            if grammar is not None:  # which the client did not write
                found.message = found.message.replace("structured_outputs.grammar", "tools", 1)
            raise found from error

    def _serve_error(self, error: Exception) -> ServeError:
        """The answer to an error; one that is a fault of the program is raised again."""
        if self.is_healthy and self._is_lost(error):
            self.is_healthy = False
            logger.error("the engine is lost: %s", error)
            self._on_lost()
        found = as_serve_error(error)
        if found is None:
            raise error
        for one in self._served.values():
            found.message = _without_folder(found.message, one)
        return found

    def _is_lost(self, error: Exception) -> bool:
        """Whether later calls fail, too; not where a queue was closed to shut down."""
        return isinstance(error, DeviceLostError) or any(
            one.model.is_broken for one in self._served.values()
        )


def _without_folder(message: str, served: ServedModel) -> str:
    """Names the model where a message has its folder, which is no client's business."""
    folder = str(served.model.model.checkpoint.folder)
    return message.replace(folder, served.facts.name) if "/" in folder else message


async def _embed(served: ServedModel, call: Call) -> Outcome:
    """arrays: f32 [num_texts, dimensions]

    A small call runs with those that come with it.
    """
    if _is_groupable(call):
        options = {name: value for name, value in call.options.items() if name != "left"}
        return _embed_outcome(await served.model.embed_soon(call.inputs, **options))
    options, inputs, num_cut = await _prepared(served, call)
    return _embed_outcome(await served.model.embed(inputs, **options), num_cut)


def _is_groupable(call: Call) -> bool:
    """Whether a call of `embed` may wait for those that come with it."""
    has_one_task = isinstance(call.options.get("task"), str | None)
    is_whole = not call.options.get("left") and call.options.get("overflow") is None
    return has_one_task and is_whole and is_small(call.inputs)


def _embed_outcome(result: Embeddings, num_cut: int = 0) -> Outcome:
    return Outcome(_timings(result.stats, num_cut), arrays=(result.vectors,))


async def _embed_spans(served: ServedModel, call: Call) -> Outcome:
    """arrays: f32 [total_spans, dimensions], int64 [num_texts + 1], where each text starts"""
    texts, spans = call.inputs
    result = await served.model.embed_spans(texts, spans, **call.options)
    return Outcome(_timings(result.stats), arrays=(result.vectors, result.cu_seqlens))


async def _embed_tokens(served: ServedModel, call: Call) -> Outcome:
    """arrays: f32 [total_vectors, dimensions], int64 [num_texts + 1], where each text starts"""
    if served.facts.gives_token_vectors:
        options = _late_options(call)
        name = options.get("prompt_name")
        options["task"] = name if name in ("query", "document") else "document"
        tokens = await served.model.embed_tokens(call.inputs, **options)
        return Outcome(_timings(tokens.stats), arrays=(tokens.vectors, tokens.cu_seqlens))
    options, inputs, num_cut = await _prepared(served, call)
    states = await served.model.hidden_states(inputs, **options)
    vectors = await asyncio.to_thread(np.concatenate, [state[0] for state in states])
    cu_seqlens = np.zeros(len(states) + 1, dtype=np.int64)
    np.cumsum([state.shape[1] for state in states], out=cu_seqlens[1:])
    return Outcome(_timings(states.stats, num_cut), arrays=(vectors, cu_seqlens))


def _late_options(call: Call) -> dict[str, Any]:
    """Options of Model.embed_tokens for a model of late interaction."""
    options = dict(call.options)
    if options.pop("left", False) and options.get("truncate"):
        raise ServeError(
            "validation",
            "truncation_direction Left is not for models of late interaction, whose markers "
            "stand at the beginning; shorten the text or set truncation_direction to Right",
        )
    return options


async def _embed_sparse(served: ServedModel, call: Call) -> Outcome:
    """arrays: int32 [nnz] token ids, f32 [nnz] weights, int64 [num_texts + 1]"""
    options, inputs, num_cut = await _prepared(served, call)
    result = await served.model.embed_sparse(inputs, **options)
    arrays = (result.indices, result.values, result.indptr)
    return Outcome(_timings(result.stats, num_cut), arrays=arrays)


async def _classify(served: ServedModel, call: Call) -> Outcome:
    """rows: for each text [(label, score, the number of its class), ...], best first"""
    options, inputs, num_cut = await _prepared(served, call)
    model = await _pair_model(served, call, has_pairs=any(map(_is_pair, inputs)))
    result = await model.classify(inputs, **options)
    rows = [
        [(label.label, float(label.score), label.index) for label in labels] for labels in result
    ]
    return Outcome(_timings(result.stats, num_cut), rows)


async def _rerank(served: ServedModel, call: Call) -> Outcome:
    """rows: [(index of the document, score), ...], best first"""
    query, documents = call.inputs
    model = await _pair_model(served, call, has_pairs=True)
    options = {name: value for name, value in call.options.items() if name != "left"}
    result = await model.rerank(query, documents, **options)
    rows = [(hit.index, float(hit.score)) for hit in result]
    return Outcome(_timings(result.stats), rows)


async def _tag(served: ServedModel, call: Call) -> Outcome:
    """rows: for each text [{entity, score, word, start, end, index}, ...]"""
    result = await served.model.tag(call.inputs, **call.options)
    return await asyncio.to_thread(_tag_outcome, result)


def _tag_outcome(result: Results[Any]) -> Outcome:
    rows = [
        [
            {
                "entity": entity.entity,
                "score": float(entity.score),
                "word": entity.word,
                "start": entity.start,
                "end": entity.end,
                "index": entity.index,
            }
            for entity in entities
        ]
        for entities in result
    ]
    return Outcome(_timings(result.stats), rows)


async def _extract(served: ServedModel, call: Call) -> Outcome:
    """rows: for each text [{start, end, text, label, score, relations}, ...]"""
    result = await served.model.extract(call.inputs, **call.options)
    return Outcome(_timings(result.stats), await asyncio.to_thread(_as_json, list(result)))


async def _fill_schema(served: ServedModel, call: Call) -> Outcome:
    """rows: for each text {entities, classifications, structures, relations}"""
    result = await served.model.fill_schema(call.inputs, **call.options)
    return Outcome(_timings(result.stats), await asyncio.to_thread(_as_json, list(result)))


async def _similarity(served: ServedModel, call: Call) -> Outcome:
    """rows: [score, ...] of the second and later inputs against the first, or of the `pairs` that
    the call names: the places of their texts, [firsts, seconds]"""
    count, options = len(call.inputs), dict(call.options)
    pairs = options.pop("pairs", None) or [[0] * (count - 1), list(range(1, count))]
    call = replace(call, options=options)
    if served.facts.gives_token_vectors:
        timings, scores = await _late_similarity(served, call, pairs)
    else:
        options, inputs, num_cut = await _prepared(served, call)
        result = await served.model.embed(inputs, **options)
        timings, vectors = _timings(result.stats, num_cut), result.vectors
        scores = pair_scores(vectors, pairs, served.model.model.similarity_function)
    if not scores.isfinite().all():  # a product of large numbers
        raise NotFiniteError("a score is not finite: the vectors of these texts are too large")
    return Outcome(timings, scores.tolist())


async def _late_similarity(
    served: ServedModel, call: Call, pairs: Sequence[Sequence[int]]
) -> tuple[Timings, torch.Tensor]:
    """The scores of the vectors of tokens: the first text of each pair is read as a query."""
    if call.options.get("task") is not None:
        raise ServeError(
            "validation",
            "parameters.task is not for models of late interaction, which read the source as a "
            "query and the sentences as documents; leave it out",
            param="parameters",
        )
    queries, first = await _late_vectors(served, call, pairs[0], "query")
    documents, second = await _late_vectors(served, call, pairs[1], "document")
    function = served.model.model.similarity_function
    scores = await asyncio.to_thread(late_pair_scores, queries, documents, pairs, function)
    return first.added(second), scores


async def _late_vectors(
    served: ServedModel, call: Call, places: Sequence[int], task: str
) -> tuple[dict[int, np.ndarray], Timings]:
    """The vectors of the tokens of the inputs at these places, each read once."""
    options = {name: own for name, own in _late_options(call).items() if name != "pooling"}
    own = list(dict.fromkeys(places))
    texts = [call.inputs[place] for place in own]
    found = await served.model.embed_tokens(texts, **options | {"task": task})
    return dict(zip(own, found, strict=True)), _timings(found.stats)


async def _tokenize(served: ServedModel, call: Call) -> Outcome:
    """arrays: int64 [num_tokens] ids, first and last characters, uint8 whether they are special;
    int64 [num_texts + 1], where each text starts.  rows: the texts with their prompt, and the names
    of special tokens by id."""
    with served.model.reserved(len(call.inputs), sum(map(len, call.inputs))):
        return await asyncio.to_thread(_tokenize_now, served, call)


def _tokenize_now(served: ServedModel, call: Call) -> Outcome:
    tokenizer = _need_tokenizer(served)
    prompt = _prompt_text(served, call.options)
    texts = [prompt + text for text in call.inputs]
    backend = tokenizer.untruncated().backend
    adds_special = call.options.get("add_special_tokens", True)
    columns: list[np.ndarray] = []  # int64 [4, num_tokens] of each text
    for encoding in backend.encode_batch(texts, add_special_tokens=adds_special):
        ids, offsets = np.array(encoding.ids, dtype=np.int64), np.array(offsets_of(encoding))
        special = np.array(encoding.special_tokens_mask, dtype=np.int64)
        columns.append(np.stack([ids, *offsets.reshape(-1, 2).T.astype(np.int64), special]))
    ids, starts, stops, special = np.concatenate([np.empty((4, 0), np.int64), *columns], axis=1)
    bounds = np.cumsum([0, *(one.shape[1] for one in columns)], dtype=np.int64)
    names = {str(one): tokenizer.token(one) for one in np.unique(ids[special > 0]).tolist()}
    arrays = (ids, starts, stops, special.astype(np.uint8), bounds)
    release_heap_after(len(ids))
    timings = Timings(num_texts=len(texts), num_tokens=len(ids))
    return Outcome(timings, [texts, names], arrays)


async def _decode(served: ServedModel, call: Call) -> Outcome:
    """rows: the text of each list of token ids"""
    with served.model.reserved(len(call.inputs), sum(map(len, call.inputs))):
        return await asyncio.to_thread(_decode_now, served, call)


def _decode_now(served: ServedModel, call: Call) -> Outcome:
    tokenizer, size = _need_tokenizer(served), served.model.model.spec.vocab_size
    skips = call.options.get("skip_special_tokens", True)
    for ids in call.inputs:
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise ServeError(
                "validation",
                f"ids must be token ids below {size}, the vocabulary; got {shown(wrong)}",
            )
    rows = [tokenizer.decode(ids, skip_special_tokens=skips) for ids in call.inputs]
    return Outcome(Timings(num_texts=len(rows), num_tokens=sum(map(len, call.inputs))), rows)


async def _decide(served: ServedModel, call: Call) -> Outcome:
    """rows: the answers of each request, by the name of the question"""
    try:
        result = await served.model.decide(call.inputs)
    except InputError as error:  # a body is one request
        raise type(error)(str(error).removeprefix("requests[0] ")) from error
    return Outcome(_timings(result.stats), list(result))


async def _declared(served: ServedModel, call: Call) -> Outcome:
    """rows: the result of each text, dataclasses as tables"""
    spec = declared_task(call.options["name"])
    options = _checked_options(spec, call.options["given"])
    results = await getattr(served.model, spec.name)(call.inputs, **options)
    return Outcome(_timings(results.stats), await asyncio.to_thread(_as_json, list(results)))


def _checked_options(spec: TaskSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of JSON in the types that the task declares; adapters are models of their own."""
    known = [name for name in spec.fields if name != "adapter"]
    unknown = sorted(given.keys() - set(known))
    if unknown:
        raise ServeError(
            "validation",
            f"options.{shown(unknown[0])} is not known; {spec.name} takes {', '.join(known)}",
            param="options",
        )
    try:
        schema = _options_schema(spec.options)  # type: ignore[arg-type]  # classes have a hash
        made = schema.validate_json(orjson.dumps(given), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(["options", *map(str, first["loc"])])
        raise ServeError("validation", f"{place}: {first['msg'][:300]}", param="options") from None
    return {name: getattr(made, name) for name in given}


@cache
def _options_schema(options: type[TaskOptions]) -> TypeAdapter[Any]:
    """The schema of a task's options, which takes longer to build than a short call."""
    return TypeAdapter(options)


def _as_json(value: Any) -> Any:
    if isinstance(value, Exception):
        return {"error": str(value)}
    if is_dataclass(value):
        return {entry.name: _as_json(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _as_json(own) for key, own in value.items()}
    return [_as_json(one) for one in value] if isinstance(value, list | tuple) else value


TASKS: Mapping[str, Callable[[ServedModel, Call], Awaitable[Outcome]]] = {
    "embed": _embed,
    "embed_spans": _embed_spans,
    "embed_tokens": _embed_tokens,
    "embed_sparse": _embed_sparse,
    "classify": _classify,
    "rerank": _rerank,
    "tag": _tag,
    "extract": _extract,
    "fill_schema": _fill_schema,
    "similarity": _similarity,
    "tokenize": _tokenize,
    "decode": _decode,
    "decide": _decide,
    "declared": _declared,
}


async def _prepared(served: ServedModel, call: Call) -> tuple[dict[str, Any], list[Any], int]:
    """(options of AsyncModel's method, inputs, texts that were cut on their left)."""
    options = dict(call.options)
    if not options.pop("left", False):
        return options, call.inputs, 0
    if not options.get("truncate"):  # what is too long is refused
        return options, call.inputs, 0
    most, lists = served.facts.max_tokens, [text for text in call.inputs if type(text) is list]
    if any(len(ids) > most and type(ids[0]) is int for ids in lists):
        raise ServeError(
            "limit",
            f"truncation_direction Left is for text, and token ids may be at most {most} with it",
        )
    prompt = _task_prompt(served, options)
    inputs, num_cut = await asyncio.to_thread(served.left.encode, call.inputs, prompt=prompt)
    skips_prompt = not served.model.model.checkpoint.sentence.include_prompt
    if num_cut and prompt and skips_prompt and call.task in ("embed", "similarity"):
        raise ServeError(
            "validation",
            "truncation_direction Left cuts into the prompt, which this model does not pool; "
            "shorten the text or set truncation_direction to Right",
        )
    return options, inputs, num_cut


async def _pair_model(served: ServedModel, call: Call, *, has_pairs: bool) -> AsyncModel:
    """The model, which cuts the beginning of pairs where the call asks for it."""
    options = call.options
    if not (has_pairs and options.get("left") and options.get("truncate")):
        return served.model
    if call.task == "rerank" and reranks_by_prompts(served.model.model.context):
        raise ServeError(
            "validation",
            "truncation_direction Left is not for causal rerankers, whose documents are cut "
            "within a prompt; shorten them or set truncation_direction to Right",
        )
    return await asyncio.to_thread(served.model._cutting_left)


def _is_pair(text: Any) -> bool:
    return isinstance(text, list | tuple) and len(text) == 2 and isinstance(text[0], str)


def _prompt_text(served: ServedModel, options: Mapping[str, Any]) -> str:
    sentence = served.model.model.checkpoint.sentence
    return sentence.prompt_text(options.get("prompt"), options.get("prompt_name"))


def _task_prompt(served: ServedModel, options: Mapping[str, Any]) -> str:
    """The one prompt of all texts of a call."""
    names = ("task", "prompt", "prompt_name")
    given = {name: options[name] for name in names if name in options}
    found = PromptOptions(**served.model.with_own(declared_task("embed"), given))
    if not isinstance(found.task, str | None):
        raise ServeError(
            "validation",
            "truncation_direction Left is for one task of all texts; make a request for each",
        )
    return served.model.model.context.prompt(found, found.task)


def _need_tokenizer(served: ServedModel) -> Tokenizer:
    tokenizer = served.model.model.tokenizer
    if tokenizer is None:
        raise ServeError("validation", "this checkpoint has no tokenizer; give token ids")
    return tokenizer


def _timings(stats: RunStats, num_cut: int = 0) -> Timings:
    return Timings(
        stats.num_texts,
        stats.num_tokens,
        stats.num_truncated + num_cut,
        stats.tokenize_seconds or 0.0,
        stats.queue_seconds or 0.0,
        stats.compute_seconds or 0.0,
    )


def _prompt(inputs: Any, template_kwargs: Mapping[str, Any] | None) -> Prompt:
    """A chat takes contents as OpenAI's clients send them, as texts or as lists of parts."""
    is_chat = isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], dict)
    return ChatPrompt(inputs, template_kwargs, joins_parts=True) if is_chat else inputs


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's keys are strings; those of logit_bias are token ids."""
    given = {name: value for name, value in options.items() if name != "is_chat"}
    bias = given.get("logit_bias")
    if bias is not None:
        given["logit_bias"] = {int(token): value for token, value in bias.items()}
    return given


def _piece(
    output: RequestOutput, logprobs: list[list[Any]] | None, outputs: AsyncGeneration
) -> Piece:
    return Piece(
        output.index,
        output.text,
        len(output.token_ids),
        logprobs,
        output.finish_reason,
        outputs.num_prompt_tokens,
        outputs.is_reasoning,
    )
