"""Errors over HTTP: no more than 200 characters of what the client sent come back."""

import json
import re
from typing import Any

import pytest
from serving import InProcess

LONG = "z" * 20_000
HUGE = 10**3000  # Python reads and writes so many digits, and no more than 4300
DEEP: Any = LONG
for _ in range(40):
    DEEP = [DEEP]
CHAT = {"model": "writer", "messages": [{"role": "user", "content": "a"}]}
WRITE = {"model": "writer", "prompt": "a"}
BODIES: list[tuple[str, Any]] = [
    *(("/embed", {"inputs": value}) for value in ({LONG: 1}, [[LONG]], DEEP, [HUGE], HUGE)),
    ("/embed", {"inputs": "a", "model": LONG}),
    ("/embed", {"inputs": "a", "prompt_name": LONG}),
    ("/embed", {"inputs": "a", "truncation_direction": LONG}),
    ("/embed", {"inputs": "a", "dimensions": HUGE}),
    ("/embed", {"inputs": "a", "normalize": LONG}),
    ("/predict", {"inputs": {LONG: LONG}, "model": "classifier"}),
    ("/predict", {"inputs": "a", "top_k": LONG, "model": "classifier"}),
    ("/predict_tokens", {"inputs": "a", "aggregation_strategy": LONG, "model": "tagger"}),
    ("/predict_tokens", {"inputs": "a", "stride": HUGE, "model": "tagger"}),
    ("/predict_tokens", {"inputs": "a", "ignore_labels": [{LONG: 1}], "model": "tagger"}),
    ("/rerank", {"query": {LONG: 1}, "texts": [LONG], "model": "reranker"}),
    ("/rerank", {"query": "a", "texts": [{LONG: 1}], "model": "reranker"}),
    ("/similarity", {"inputs": {LONG: LONG}}),
    ("/similarity", {"inputs": {"source_sentence": 1, "sentences": [{LONG: 1}]}}),
    ("/decode", {"ids": [HUGE]}),
    ("/decode", {"ids": [LONG]}),
    ("/tokenize", {"inputs": {LONG: 1}}),
    ("/", {"inputs": "a", "parameters": {"function_to_apply": LONG}}),
    ("/v1/embeddings", {"input": {LONG: 1}}),
    ("/v1/embeddings", {"input": "a", "encoding_format": LONG}),
    ("/v1/rerank", {"query": "a", "documents": [{LONG: 1}], "model": "reranker"}),
    *(
        (path, body | more)
        for path, body in (("/v1/completions", WRITE), ("/v1/chat/completions", CHAT))
        for more in (
            {"model": LONG},
            {"logit_bias": {LONG: 1}},
            {"logit_bias": {str(HUGE): 1}},
            {"logit_bias": {"5": LONG}},
            {"stop": [LONG, ""]},
            {"stop": {LONG: 1}},
            {"stop_token_ids": [HUGE]},
            {"seed": HUGE},
            {"n": HUGE},
            {"top_k": -HUGE},
            {"max_tokens": HUGE, "min_tokens": HUGE},
            {"min_tokens": HUGE},
            {"stream_options": {LONG: LONG, "include_usage": LONG}},
        )
    ),
    ("/v1/completions", WRITE | {"prompt": [HUGE]}),
    ("/v1/completions", WRITE | {"prompt": {LONG: 1}}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": LONG, "content": [{LONG: LONG}]}]}),
    ("/v1/chat/completions", CHAT | {"messages": [{LONG: LONG}]}),
    ("/v1/chat/completions", CHAT | {"messages": [LONG]}),
    ("/" + LONG, {}),
]


@pytest.mark.parametrize(
    ("path", "body"),
    BODIES,
    ids=[f"{number} {path[:20]}" for number, (path, _) in enumerate(BODIES)],
)
def test_a_long_value_is_not_sent_back(in_process: InProcess, path: str, body: Any) -> None:
    content = json.dumps(body)
    answer = in_process.request("POST", path, content=content)
    assert 400 <= answer.status_code < 500, answer.text[:300]
    longest = max(map(len, re.findall(r"z+|[09]+", answer.text)), default=0)
    assert longest <= 200 and len(answer.text) < 1500, answer.text[:2000]


@pytest.mark.parametrize("name", ["x-request-id", "authorization", "content-type", "x-other"])
def test_a_long_header_is_not_sent_back(in_process: InProcess, name: str) -> None:
    keyed = in_process.with_settings(api_keys=("secret",))
    answer = keyed.post("/embed", {"inputs": "a"}, headers={name: LONG})
    assert answer.status_code == 401 and LONG[:201] not in answer.text + str(answer.headers)
