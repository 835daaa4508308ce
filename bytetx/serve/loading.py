"""Loads the models of a server, and runs each once before it is called ready."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from bytetx.async_model import AsyncModel
from bytetx.buckets import round_tokens
from bytetx.errors import OptionError, WeightFormatError, shown
from bytetx.model import Model, load
from bytetx.nn.loading import LoadedCheckpoint
from bytetx.serve.calls import Call, ModelFacts
from bytetx.serve.engine import LocalBackend, ServedModel, model_facts
from bytetx.serve.left_truncation import LeftTruncation
from bytetx.serve.settings import ModelSource, ServeSettings
from bytetx.serve.token_logprobs import TokenTexts

logger = logging.getLogger("bytetx.serve")

# Steps of so many tokens are warm at the start, those of texts with at least so many each.
_WARM_TOKENS, _LEAST_LENGTH = 2048, 8


def load_models(settings: ServeSettings) -> list[ServedModel]:
    """Every model, in the order of the settings.

    Options of one kind of model are left out for the others. Raises what bytetx.load does, and
    OptionError for such an option where no model takes it.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    served = []
    refusals: list[WeightFormatError] = []
    for source in settings.models:
        model = load_model(source, settings, refusals=refusals)
        served.append(served_model(model, settings, model_facts(source, model)))
    check_taken(settings, [one.model.model.checkpoint for one in served])
    return served


def check_taken(settings: ServeSettings, checkpoints: Sequence[LoadedCheckpoint]) -> None:
    """Raises OptionError for an option of one kind of model that none of these is of."""
    writers = [one for one in checkpoints if one.generates]
    name = settings.default_prompt_name
    refusals = {
        f"--kv-cache-dtype {settings.kv_cache_dtype} is for models that generate": (
            settings.kv_cache_dtype != "auto" and not writers
        ),
        "--num-speculative-tokens is for models with attention in every layer that generate": (
            settings.num_speculative_tokens > 0
            and not any(one.spec.takes_drafts for one in writers)
        ),
        f"--default-prompt-name {shown(name)} is for models with a prompt of that name": (
            name is not None and not any(name in one.sentence.prompts for one in checkpoints)
        ),
    }
    refused = next((reason for reason, is_refused in refusals.items() if is_refused), None)
    if refused is not None:
        names = ", ".join(model.name for model in settings.models)
        raise OptionError(f"{refused}, and none of {names} is one; leave it out")


def load_model(
    source: ModelSource,
    settings: ServeSettings,
    *,
    adapters: Mapping[str, str | Path] | None = None,
    outline: Model | None = None,
    reads_weights: bool = True,
    refusals: list[WeightFormatError] | None = None,
) -> Model:
    """The model of a source. adapters: None are those of the settings.  outline, reads_weights: as
    of bytetx.load, and so is what is raised.
    refusals: of the models so far that settings.dtype is not for; may get one more.
    """
    refusals = [] if refusals is None else refusals
    load_in = partial(
        load,
        source.path,
        device=settings.device,
        batch_invariant=settings.batch_invariant,
        tp=settings.tp,
        token_budget=settings.max_batch_tokens,
        prefix_cache_bytes=settings.prefix_cache_bytes,
        generation_config=settings.generation_config,
        families=settings.families,
        revision=settings.revision,
        local_files_only=settings.local_files_only,
        adapters=settings.adapters_of(source.name) if adapters is None else adapters,
        reads_weights=reads_weights,
        outline=outline,
    )
    try:
        model = load_in(dtype=settings.dtype)
    except WeightFormatError as refusal:
        refusals.append(refusal)
        if len(refusals) == len(settings.models):
            raise refusals[0] from None
        logger.warning("%s is loaded with --dtype auto: %s", source.name, refusal)
        model = load_in(dtype="auto")
    if model.checkpoint.generates:
        model._set_kv_cache_dtype(settings.kv_cache_dtype)
    if model.checkpoint.chat_template is not None:
        model.answer_format = settings.answer_format(model.answer_format)
    return model


def served_model(model: Model, settings: ServeSettings, facts: ModelFacts) -> ServedModel:
    """The model behind a queue."""
    num_drafted = settings.num_speculative_tokens if model.spec.takes_drafts else 0
    queue = AsyncModel(
        model,
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=settings.max_queued_tokens,
        tokenizer_threads=settings.tokenization_workers,
        kv_cache_tokens=settings.kv_cache_tokens,
        max_num_seqs=settings.max_num_seqs,
        num_speculative_tokens=num_drafted,
    )
    logger.info("loaded %s: %r", facts.name, model)
    left, texts = LeftTruncation(model.tokenizer), TokenTexts(model.tokenizer)
    return ServedModel(facts, queue._bounded(), left, texts)


async def warm_up(backend: LocalBackend) -> None:
    """Runs the main task of each model in memory on a short text and on a full batch.

    The full one shows at the start, and not under load, whether a step fits the memory.  On a GPU
    the small sizes of steps are run twice, too, which captures their graphs: under load each would
    stop all requests for many milliseconds.
    """
    for served in backend.served:
        facts, (_, most_tokens) = served.facts, served.model.queue_limits
        for call in warm_up_calls(facts, most_tokens=most_tokens):
            await backend.run(call)
        if facts.main_task == "generate":
            prompt = _filler(facts, min(4, most_tokens))
            options = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
            async for _ in backend.generate(Call(facts.name, "generate", prompt, options)):
                pass
        logger.info("%s is warm", facts.name)


def warm_up_calls(facts: ModelFacts, *, most_tokens: int) -> list[Call]:
    """Token ids, so that lengths are what they should be; most_tokens: of a call."""
    task = facts.main_task
    if task == "generate":
        return []
    if task == "rerank" and "classify" not in facts.tasks:  # a causal reranker reads texts
        return [Call(facts.name, "rerank", ["warm", ["up"]], {"truncate": True})]
    if task == "extract":
        options = {"labels": ["label"], "truncate": True}
        return [Call(facts.name, "extract", ["warm up"], options)]
    task = "classify" if task == "rerank" else task
    most = min(facts.max_tokens, most_tokens)
    budget = min(int(facts.info["token_budget"]), most_tokens)
    is_cuda = str(facts.info["device"]).startswith("cuda")
    num_texts = max(1, budget // most) if is_cuda else 1
    batches = [[min(8, most)], [most] * num_texts]
    if is_cuda:
        batches += _small_batches(most_tokens=most, most_in_all=budget)
    given: dict[str, Any] = {"truncate": True}
    if task == "embed" and "Normalize" not in facts.info["sentence_modules"]:
        given["normalize"] = True  # as POST /embed, whose vectors have length 1
    return [
        Call(facts.name, task, list(map(partial(_filler, facts), lengths, count())), given)
        for lengths in batches
    ]


def _small_batches(*, most_tokens: int, most_in_all: int) -> Iterator[list[int]]:
    """Lengths of texts that make each of the smaller buckets, twice: the second step of a bucket is
    captured.

    most_tokens: of a text.
    """
    total_tokens = {round_tokens(number) for number in range(1, min(_WARM_TOKENS, most_in_all) + 1)}
    for total in sorted(total_tokens):
        places = 1
        while total <= most_in_all and places // 4 < total // _LEAST_LENGTH:
            num_texts = min(places, total // _LEAST_LENGTH)
            longer, length = total % num_texts, total // num_texts
            if length + (longer > 0) <= most_tokens:
                yield from [[length + 1] * longer + [length] * (num_texts - longer)] * 2
            places *= 4


def _filler(facts: ModelFacts, length: int, number: int = 0) -> list[int]:
    """Texts of different numbers have no prefix in common."""
    token_id = min(5 + number % 1024, int(facts.info["vocab_size"]) - 1)
    return [token_id] * min(length, facts.max_tokens)


async def close_models(served: Sequence[ServedModel]) -> None:
    """Ends the queues and what the models have started."""
    for one in served:
        await one.model.aclose()
        await asyncio.to_thread(one.model.model.close)
