"""Code as a user writes it, for mypy: which types calls have. It is checked and never run."""

from collections.abc import Iterator
from typing import assert_type

import numpy as np
import torch
from torch import nn

import bytetx
from bytetx.errors import InputError
from bytetx.generate.async_engine import AsyncEngine
from bytetx.generate.outputs import RequestOutput
from bytetx.tasks.results import (
    Embeddings,
    Entity,
    Fill,
    Generation,
    Hit,
    Label,
    Likelihood,
    Results,
    Stream,
)
from bytetx.tasks.search import Match
from bytetx.tasks.vectors import SparseEmbeddings, SparseVector, TokenEmbeddings


def read_texts() -> Iterator[str]:
    yield "a text"


async def awaits(model: bytetx.Model) -> None:
    async with bytetx.AsyncModel(model, max_queued_requests=100) as batched:
        assert_type(await batched.embed(read_texts(), priority=1, timeout_s=2.0), Embeddings)
        assert_type(await batched.embed_sparse(["a"]), SparseEmbeddings)
        assert_type(await batched.embed_tokens(["a"], task="query"), TokenEmbeddings)
        assert_type(await batched.rerank("a", ["b"]), Results[Hit])
        async for piece in batched.generate("a", bytetx.SamplingParams(n=2)):
            assert_type(piece, RequestOutput)
        assert_type(batched.stats().num_queued, int)
        await batched.aclose(drain_s=1.0)


def embeds(model: bytetx.Model) -> None:
    assert_type(model.embed(["a"]), Embeddings)
    assert_type(model.embed(read_texts(), on_error="return", show_progress=True), Embeddings)
    assert_type(model.embed([("a", "b")]).vectors, np.ndarray)
    assert_type(model.embed([[1, 2]], stream=False, dimensions=8), Embeddings)
    assert_type(model.embed(["a", "b"], precision="int8", ranges=[[0.0], [1.0]]), Embeddings)
    for vector in model.embed(["a"], stream=True, prompt="query: "):
        assert_type(vector, np.ndarray)
    assert_type(model.embed_sparse(["a"], max_active_dims=8), SparseEmbeddings)
    for sparse in model.embed_sparse(["a"], stream=True):
        assert_type(sparse, SparseVector)
    assert_type(model.embed(["a"], overflow="chunk", stride=8), Embeddings)
    assert_type(model.embed_spans(["a"], [[(0, 1)]]), TokenEmbeddings)
    tokens = model.embed_tokens(["a"], task="query")
    assert_type(tokens, TokenEmbeddings)
    assert_type(bytetx.maxsim(tokens, list(tokens)), torch.Tensor)
    assert_type(bytetx.semantic_search(model.embed(["a"]), np.ones((2, 8)))[0], list[Match])
    stream = model.embed(["a"], stream=True, on_error="return")
    assert_type(stream, Stream[np.ndarray | InputError])


def other_tasks(model: bytetx.Model) -> None:
    assert_type(model.classify(["a"], top_k=1), Results[list[Label]])
    assert_type(model.classify(["a"])[0][0].score, float)
    assert_type(model.classify(["a"], stream=True), Stream[list[Label]])
    assert_type(model.classify(["a"], on_error="return"), Results[list[Label] | InputError])
    assert_type(model.tag(["a"], aggregation="first"), Results[list[Entity]])
    assert_type(model.fill_mask(["a"], stream=True, targets=["b"]), Stream[list[Fill]])
    assert_type(model.score(["a"])[0].perplexity, float)
    assert_type(model.score(["a"], stream=True, on_error="return"), Stream[Likelihood | InputError])
    assert_type(model.hidden_states(["a"], layers=[0, -1]), Results[np.ndarray])
    assert_type(model.rerank("a", ["b"]), Results[Hit])


def generates(model: bytetx.Model) -> None:
    params = bytetx.SamplingParams(temperature=0.5, stop=["."], seed=1)
    assert_type(model.generate(["a"], params), Results[Generation])
    assert_type(model.generate([[1], [2]], [params, params])[0].text, str)
    assert_type(model.generate([[{"role": "user", "content": "a"}]]), Results[Generation])
    assert_type(model.generate(["a"], stream=True), Stream[Generation])
    assert_type(model.generate(["a"], stream="pieces", kv_cache_tokens=64), Stream[RequestOutput])
    assert_type(model.generate(["a"], on_error="return"), Results[Generation | InputError])


async def asks(model: bytetx.Model) -> None:
    with AsyncEngine(model.engine()) as engine:
        async for piece in engine.generate([1, 2], bytetx.SamplingParams()):
            assert_type(piece, RequestOutput)


def loads(module: nn.Linear) -> None:
    with bytetx.load("folder", dtype="bf16", device="cpu", token_budget=64) as model:
        assert_type(model, bytetx.Model)
    assert_type(bytetx.wrap(module), nn.Linear)
    assert_type(bytetx.unwrap(module), nn.Linear)
    assert_type(bytetx.pack([[1, 2], np.array([3])]).total_tokens, int)
