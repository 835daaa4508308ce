"""The largest bodies that each route admits, for tests of how the server stays reachable."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Body = dict[str, Any]

# Texts of so many characters; the last has no place where a tokenizer may cut it.
TEXTS: Mapping[str, Callable[[int], str]] = {
    "words": lambda size: ("the quick brown fox " * (size // 20 + 1))[:size],
    "marks": lambda size: "!" * size,
}


def _split(text: str, count: int = 32) -> list[str]:
    size = max(len(text) // count, 1)
    return [text[i * size : (i + 1) * size] for i in range(count)]


def _one_and_many(field: str, **more: Any) -> Callable[[str], list[Body]]:
    return lambda text: [{field: text, **more}, {field: _split(text), **more}]


def _pairs(field: str, **more: Any) -> Callable[[str], list[Body]]:
    """A long query with short texts, which repeat it, and a short query with long texts."""
    return lambda text: [
        {"query": text, field: ["a"] * 32, **more},
        {"query": text[: len(text) // 64], field: ["a"] * 32, **more},
        {"query": "a", field: _split(text), **more},
    ]


def _scores(*models: str) -> Callable[[str], list[Body]]:
    """A long text with short ones, which repeat it, and as many on both sides."""
    return lambda text: [
        body
        for model in models
        for body in (
            {"text_1": text, "text_2": ["a"] * 32, "model": model},
            {"text_1": "a", "text_2": _split(text), "model": model},
            {"text_1": _split(text[::2]), "text_2": _split(text[::2]), "model": model},
        )
    ]


def _ids(text: str) -> list[Body]:
    return [{"ids": [5] * (len(text) // 3)}, {"ids": [[5] * (len(text) // 96)] * 32}]


# Bodies of each route, from a text of nearly their size.
CASES: Mapping[str, Callable[[str], list[Body]]] = {
    "/embed": lambda text: [
        *_one_and_many("inputs")(text),
        {"inputs": text, "truncation_direction": "Left"},
        {"inputs": [5] * (len(text) // 3)},
        {"inputs": text, "truncate": False},
        {"inputs": [[5]] * (len(text) // 6)},
        {"inputs": [""] * (len(text) // 4)},
    ],
    "/embed_all": _one_and_many("inputs"),
    "/embed_sparse": _one_and_many("inputs", model="sparse"),
    "/predict": lambda text: [
        *_one_and_many("inputs", model="classifier")(text),
        {"inputs": [[text, "a"]], "model": "classifier"},
        {"inputs": [_split(text, 2)], "model": "classifier"},
    ],
    "/predict_tokens": lambda text: [
        *_one_and_many("inputs", model="tagger")(text),
        *({"inputs": text[:size], "stride": 37, "model": "tagger"} for size in (1000, len(text))),
        {"inputs": text, "stride": 0, "model": "tagger"},
    ],
    "/extract": lambda text: [
        {"texts": [text], "labels": ["a"], "model": "extractor"},
        {"texts": _split(text), "labels": ["a"], "model": "extractor"},
        {"texts": ["a"], "labels": [text], "model": "extractor"},
        {"texts": ["a"] * 32, "labels": ["x"] * 1024, "model": "extractor"},
    ],
    "/fill_schema": lambda text: [
        {"texts": [text], "schema": {"entities": ["a"]}, "model": "schemas"},
        {"texts": _split(text), "schema": {"entities": ["a"]}, "model": "schemas"},
        {"texts": ["a"], "schema": {"entities": [text]}, "model": "schemas"},
        {"texts": ["a"] * 32, "schema": {"entities": _split(text)}, "model": "schemas"},
    ],
    "/rerank": lambda text: [
        *_pairs("texts", model="reranker")(text),
        *_pairs("documents", model="reranker")(text),
    ],
    "/v1/embed": _one_and_many("texts"),
    "/v2/embed": _one_and_many("texts", embedding_types=["float", "int8", "binary"]),
    "/score": _scores("embedder", "reranker"),
    "/v1/score": _scores("reranker"),
    "/classify": _one_and_many("input", model="classifier"),
    "/pooling": lambda text: [
        *_one_and_many("input")(text),
        *_one_and_many("input", task="token_embed")(text),
    ],
    "/similarity": lambda text: [
        {"inputs": {"source_sentence": text, "sentences": ["a"] * 31}},
        {"inputs": {"source_sentence": "a", "sentences": _split(text, 31)}},
    ],
    "/tokenize": lambda text: [
        *_one_and_many("inputs")(text),
        {"inputs": text[:16_000]},
    ],
    "/decode": lambda text: [*_ids(text), {"ids": [5] * 16_000}],
    "/": _one_and_many("inputs"),
    "/invocations": _one_and_many("inputs"),
    "/vertex": lambda text: [
        {"instances": [{"inputs": text}]},
        {"instances": [{"inputs": part} for part in _split(text)]},
        {"instances": [{}] * (len(text) // 4)},
    ],
    "/tasks": lambda text: [
        {"task": "score", "texts": texts, "options": {"truncate": cuts}, "model": "writer"}
        for texts in ([text], _split(text))
        for cuts in (False, True)
    ],
    "/embeddings": _one_and_many("input", model="embedder"),
    "/v1/embeddings": lambda text: [
        *_one_and_many("input", model="embedder")(text),
        *_one_and_many("input", model="embedder", overflow="chunk")(text),
        *_one_and_many("input", model="embedder", late_chunking=True, truncate=True)(text),
        {"input": "a", "model": "embedder", "spans": [[[0, 1]] * (len(text) // 6)]},
        {"input": "a", "model": "embedder"} | {f"{i:x}": 1 for i in range(len(text) // 11)},
    ],
    "/v1/rerank": _pairs("documents", model="reranker"),
    "/v2/rerank": _pairs("documents", model="reranker"),
    "/v1/systemone": lambda text: [
        {"state": text, "questions": {"a": {"type": "noul"}}, "model": "writer"},
        {"state": "a", "questions": dict.fromkeys("abcdefgh", {"type": "noul"}), "model": "writer"},
        {
            "state": "a",
            "questions": {"a": {"type": "choice", "criteria": dict.fromkeys(_split(text))}},
            "model": "writer",
        },
    ],
    "/v1/decisions": lambda text: [
        {"input": text, "questions": [{"type": "predicate"}] * 64, "model": "writer"},
        {"input": "a", "questions": [{"type": "predicate"}] * 8, "model": "writer"},
        {
            "input": [{"role": "user", "content": "a"}] * (len(text) // 40),
            "questions": [{"type": "predicate"}],
            "model": "writer",
        },
    ],
    "/v1/completions": lambda text: [
        {"prompt": text, "model": "writer", "max_tokens": 4},
        {"prompt": "a", "model": "writer", "max_tokens": 4, "stop": [""] * (len(text) // 4)},
        {"prompt": "a", "model": "writer", "max_tokens": 20, "n": 8, "logprobs": 20},
    ],
    "/v1/chat/completions": lambda text: [
        {"messages": [{"role": "user", "content": text}], "model": "writer", "max_tokens": 4},
        {
            "messages": [{"role": "user", "content": ""}] * (len(text) // 40),
            "model": "writer",
            "max_tokens": 4,
        },
    ],
    "/adapters/load": lambda text: [
        {"name": name, "path": path} for name in ("a", text) for path in ("a", text)
    ],
    "/adapters/unload": lambda text: [{"name": "a"}, {"name": text}],
    "/v1/batches": lambda text: [
        {"input_file_id": text, "endpoint": "/v1/embeddings"},
        {"input_file_id": "a", "endpoint": text},
        {"input_file_id": "a", "endpoint": "a", "metadata": dict.fromkeys(_split(text, 9), "")},
    ],
    "/models/load": lambda text: [{"model": text}],
    "/models/unload": lambda text: [{"model": text}],
}
# Routes that answer none of these bodies with 200: there are no such adapters and no batches,
# models are always loaded, and the chats are longer than the model.
REFUSES_ALL = {"/adapters/load", "/adapters/unload", "/v1/batches", "/v1/chat/completions"}
REFUSES_ALL |= {"/models/load", "/models/unload"}


def largest_bodies(path: str, *, size: int) -> Iterator[bytes]:
    """Bodies of nearly `size` bytes that the route may admit, and some that it refuses late."""
    for make in TEXTS.values():
        for body in CASES[path](make(size - 2000)):
            yield json.dumps(body, separators=(",", ":")).encode()
    deep = b"[" * (size // 2 - 1000) + b"]" * (size // 2 - 1000)
    wrong = b"[" + b"1," * (size // 2 - 1000) + b"1]"
    field = {"/rerank": b"texts", "/v1/chat/completions": b"messages", "/decode": b"ids"}
    name = field.get(path, b"inputs")
    for value in (deep, wrong, b"9" * (size - 1000), wrong.replace(b"1", b'"')[: size - 1000]):
        yield b'{"%b":%b,"query":"a","input":"a","prompt":"a"}' % (name, value)
