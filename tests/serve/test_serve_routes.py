"""Every route of the application, in process: answers are Model's, forms are TEI's and OpenAI's."""

import asyncio
import base64
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
import transformers
from checkpoints import SENTENCES, save_checkpoint, save_sentence_model
from draft_oracle import MAX_DRAFT, Oracle, oracle  # noqa: F401  (oracle: a fixture)
from serving import InProcess

import bytetx
from bytetx import SamplingParams
from bytetx.encode.request import RunStats
from bytetx.errors import OptionError
from bytetx.serve.calls import Call, Outcome
from bytetx.serve.engine import TASKS, model_facts
from bytetx.serve.errors import ServeError
from bytetx.serve.loading import close_models, load_models
from bytetx.serve.settings import ModelSource, ServeSettings, model_sources
from bytetx.tasks.task import TextOptions
from bytetx.tasks.vectors import TokenEmbeddings

TEXTS = [text for text in SENTENCES if text]
LONG = "New York is big. " + "the quick brown fox jumps over the lazy dog " * 20


@pytest.mark.feature("Server", "routes of TEI")
def test_embed(in_process: InProcess) -> None:
    model = in_process.model("embedder")
    answer = in_process.post("/embed", {"inputs": TEXTS})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    expected = model.embed(TEXTS, truncate=True)
    np.testing.assert_array_equal(np.array(answer.json(), np.float32), expected.vectors)
    single = in_process.post("/embed", {"inputs": TEXTS[0]}).json()
    np.testing.assert_array_equal(np.array(single, np.float32), expected.vectors[:1])
    plain = model.embed(TEXTS[:1], normalize=False, dimensions=16, prompt_name="query")
    given = {"normalize": False, "dimensions": 16, "prompt_name": "query"}
    answer = in_process.post("/embed", {"inputs": TEXTS[0], **given})
    np.testing.assert_array_equal(np.array(answer.json(), np.float32), plain.vectors)
    ids = in_process.post("/embed", {"inputs": [[2, 30, 31, 3], [2, 40, 3]]}).json()
    by_ids = model.embed([[2, 30, 31, 3], [2, 40, 3]]).vectors
    np.testing.assert_array_equal(np.array(ids, np.float32), by_ids)


def test_embed_truncates_on_either_side(in_process: InProcess) -> None:
    model = in_process.model("embedder")
    ids = model.tokenizer.untruncated().encode([LONG])[0].ids
    left = [ids[0], *ids[-model.max_tokens + 1 :]]
    given = {"inputs": LONG, "truncate": True}
    right = in_process.post("/embed", given)
    np.testing.assert_allclose(right.json(), model.embed([LONG], truncate=True), atol=1e-6)
    answer = in_process.post("/embed", given | {"truncation_direction": "Left"})
    np.testing.assert_allclose(answer.json(), model.embed([left]).vectors, atol=1e-6)
    assert np.abs(np.array(answer.json()) - right.json()).max() > 1e-3
    prompted = given | {"truncation_direction": "Left", "prompt_name": "query"}
    # The prompt is part of the text, whose beginning is what is cut.
    answer = in_process.post("/embed", prompted)
    np.testing.assert_allclose(answer.json(), model.embed([left]).vectors, atol=1e-6)
    refused = in_process.post("/embed", {"inputs": LONG, "truncate": False})
    assert refused.status_code == 413 and "set truncate" in refused.json()["error"]


@pytest.mark.parametrize(("name", "path"), [("embedder", "/embed"), ("classifier", "/predict")])
def test_truncation_on_the_left_is_asked_for(in_process: InProcess, name: str, path: str) -> None:
    route = f"/models/{name}{path}"
    left = {"truncate": False, "truncation_direction": "Left"}
    refused = in_process.post(route, left | {"inputs": LONG})
    assert refused.status_code == 413 and "set truncate" in refused.json()["error"]
    short = in_process.post(route, left | {"inputs": TEXTS[0]})
    assert short.json() == in_process.post(route, {"inputs": TEXTS[0]}).json()


def test_pairs_are_truncated_on_the_left(in_process: InProcess) -> None:
    """As TEI does it: from the beginning of the longer side, token by token."""
    short = "New York is big"
    for name, query, document in (
        ("classifier", short, LONG),
        ("classifier", LONG, short),
        ("classifier", LONG, f"a fox {LONG}"),
        ("reranker", short, LONG),
    ):
        model = in_process.model(name)
        theirs = transformers.AutoTokenizer.from_pretrained(
            model.checkpoint.folder, truncation_side="left"
        )
        cut = theirs(query, document, truncation="longest_first", max_length=model.max_tokens)
        left_model = model._cutting_left()
        reader = left_model.context.reader(TextOptions(truncate=True))
        found = reader.read([(query, document)], 0).requests
        assert found.token_ids.tolist() == cut["input_ids"]
        assert found.token_type_ids.tolist() == cut["token_type_ids"]
        if name == "reranker":
            path, body = "/rerank", {"query": query, "texts": [document]}
            wanted = left_model.rerank(query, [document], truncate=True)
        else:
            path, body = "/predict", {"inputs": [query, document]}
            wanted = left_model.classify([(query, document)], truncate=True)[0]
        given = {"truncation_direction": "Left", "truncate": True, "model": name}
        left = in_process.post(path, body | given).json()
        right = in_process.post(path, body | {"model": name}).json()
        scores = [[row["score"] for row in rows] for rows in (left, right)]
        np.testing.assert_allclose(scores[0], [row.score for row in wanted], atol=1e-6)
        assert np.abs(np.subtract(*scores)).max() > 1e-6


def test_token_ids_are_not_cut_on_the_left(in_process: InProcess) -> None:
    left = {"truncation_direction": "Left", "truncate": True}
    answer = in_process.post("/embed", left | {"inputs": [5] * 300})
    assert answer.status_code == 413 and "token ids" in answer.json()["error"]


def test_truncation_on_the_left_pools_no_prompt(tmp_path: Path) -> None:
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    pooling = modules.Pooling(48, "mean", include_prompt=False)
    path = save_sentence_model(tmp_path, [pooling], prompts={"query": "the quick brown "})
    settings = ServeSettings(model_sources([f"embedder={path}"]), device="cpu")
    one = InProcess(settings, load_models(settings))
    right = {"inputs": [TEXTS[0], "a fox"], "prompt_name": "query"}
    left = right | {"truncation_direction": "Left", "truncate": True}
    try:
        assert one.post("/embed", left).json() == one.post("/embed", right).json()
        refused = one.post("/embed", left | {"inputs": ["a fox", LONG]})
        assert refused.status_code == 422 and "does not pool" in refused.json()["error"]
        assert one.post("/embed", left | {"inputs": LONG, "prompt_name": None}).status_code == 200
    finally:
        asyncio.run(close_models(one.served))


def test_truncation_is_counted(in_process: InProcess) -> None:
    one = in_process.with_settings()
    for direction in ("Left", "Right"):
        one.post("/embed", {"inputs": [LONG, "a"], "truncation_direction": direction})
    assert 'bytetx_truncated_inputs_total{model="embedder"} 2.0' in one.get("/metrics").text
    strict = in_process.with_settings(auto_truncate=False)
    assert strict.post("/embed", {"inputs": LONG}).status_code == 413
    assert strict.post("/embed", {"inputs": LONG, "truncate": True}).status_code == 200


def test_embed_all(in_process: InProcess) -> None:
    answer = in_process.post("/embed_all", {"inputs": TEXTS[:3], "prompt_name": "query"}).json()
    model = in_process.model("embedder")
    expected = model.hidden_states([f"the quick brown {text}" for text in TEXTS[:3]])
    for given, states in zip(answer, expected, strict=True):
        np.testing.assert_allclose(given, states[0], atol=1e-5)


def test_late_interaction_is_not_truncated_on_the_left() -> None:
    """It would lose its marker: an error says so; where nothing is truncated, nothing changes."""

    async def embed_tokens(inputs: list[str], **options: object) -> TokenEmbeddings:
        assert options == {"truncate": False, "task": "document"}
        return TokenEmbeddings(np.zeros((1, 2), np.float32), np.array([0, 1]), stats=RunStats())

    served = SimpleNamespace(
        facts=SimpleNamespace(gives_token_vectors=True),
        model=SimpleNamespace(embed_tokens=embed_tokens),
    )

    def call(**options: object) -> Outcome:
        return asyncio.run(TASKS["embed_tokens"](served, Call("m", "embed_tokens", ["a"], options)))

    with pytest.raises(ServeError, match="Right"):
        call(left=True, truncate=True)
    assert call(left=True, truncate=False).arrays[0].shape == (1, 2)


def test_embed_sparse(in_process: InProcess) -> None:
    answer = in_process.post("/embed_sparse", {"inputs": TEXTS[:2], "model": "sparse"}).json()
    expected = in_process.model("sparse").embed_sparse(TEXTS[:2])
    for given, vector in zip(answer, expected, strict=True):
        assert [entry["index"] for entry in given] == vector.indices.tolist()
        np.testing.assert_allclose([entry["value"] for entry in given], vector.values, atol=1e-6)


def test_predict(in_process: InProcess) -> None:
    """A string, a pair, and a batch of both, each in TEI's form."""
    model = in_process.model("classifier")

    def rows(inputs: object, **options: object) -> list:
        body = {"inputs": inputs, "model": "classifier", **options}
        answer = in_process.post("/predict", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def expected(texts: list, **options: object) -> list:
        return [
            [{"score": pytest.approx(x.score, abs=1e-6), "label": x.label} for x in labels]
            for labels in model.classify(texts, **options)
        ]

    assert rows("the fox") == expected(["the fox"])[0]
    assert rows(["the fox", "a dog"]) == expected([("the fox", "a dog")])[0]
    assert rows([["the fox"], ["a", "dog"]]) == expected(["the fox", ("a", "dog")])
    assert rows("a", raw_scores=True) == expected(["a"], raw_scores=True)[0]
    assert rows("a", top_k=1) == expected(["a"], top_k=1)[0]


def test_predict_tokens(in_process: InProcess) -> None:
    model, text = in_process.model("tagger"), "Angela Merkel met Zaphod in Berlin"
    body = {"inputs": text, "model": "tagger"}
    for strategy in ("none", "simple", "max"):
        answer = in_process.post("/predict_tokens", body | {"aggregation_strategy": strategy})
        tags = model.tag([text], aggregation=strategy)[0]
        key = "entity" if strategy == "none" else "entity_group"
        assert [(e[key], e["word"], e["start"], e["end"]) for e in answer.json()] == [
            (tag.entity, tag.word, tag.start, tag.end) for tag in tags
        ]
        scores = [tag.score for tag in tags]
        np.testing.assert_allclose([e["score"] for e in answer.json()], scores, atol=1e-6)
        assert ("index" in answer.json()[0]) == (strategy == "none")
    answer = in_process.post("/predict_tokens", body | {"decoding": "argmax"})
    assert answer.json() == in_process.post("/predict_tokens", body).json()
    answer = in_process.post("/predict_tokens", body | {"decoding": "viterbi"})
    assert answer.status_code == 422 and "needs tags with prefixes" in answer.json()["error"]
    assert in_process.post("/predict_tokens", body | {"decoding": "beam"}).status_code == 422
    batch = in_process.post("/predict_tokens", body | {"inputs": [text, "a"]}).json()
    assert len(batch) == 2 and isinstance(batch[0], list)
    chunked = in_process.post("/predict_tokens", body | {"inputs": LONG, "stride": 8}).json()
    tags = model.tag([LONG], overflow="chunk", stride=8)[0]
    assert [(e["start"], e["end"]) for e in chunked] == [(tag.start, tag.end) for tag in tags]
    assert chunked[-1]["end"] > 150


def test_rerank(in_process: InProcess) -> None:
    hits = in_process.model("reranker").rerank("a town", TEXTS[:4], raw_scores=True)
    body = {"query": "a town", "texts": TEXTS[:4], "model": "reranker", "raw_scores": True}
    answer = in_process.post("/rerank", body | {"return_text": True}).json()
    assert answer == [
        {"index": hit.index, "score": pytest.approx(hit.score, abs=1e-5), "text": hit.document}
        for hit in hits
    ]
    assert "text" not in in_process.post("/rerank", body).json()[0]


@pytest.mark.parametrize("version", ["1", "2"])
def test_rerank_of_cohere(in_process: InProcess, version: str) -> None:
    hits = in_process.model("reranker").rerank("a town", TEXTS[:4])
    documents = [{"text": TEXTS[0]}, *TEXTS[1:4]]
    body = {"query": "a town", "documents": documents, "model": "reranker"}
    answer = in_process.post(
        f"/v{version}/rerank", body | {"return_documents": True, "top_n": 3}
    ).json()
    assert answer["results"] == [
        {
            "index": hit.index,
            "relevance_score": pytest.approx(hit.score, abs=1e-6),
            "document": {"text": hit.document},
        }
        for hit in hits[:3]
    ]
    assert answer["meta"]["api_version"]["version"] == version
    assert answer["usage"]["prompt_tokens"] == hits.stats.num_tokens


@pytest.mark.feature("Server", "an instruction for each rerank request")
def test_instruction_of_a_rerank_request(in_process: InProcess) -> None:
    instruction, texts = "Is it a town?", TEXTS[:3]
    hits = in_process.model("writer").rerank("a town", texts, instruction=instruction)
    wanted = {hit.index: pytest.approx(hit.score, abs=1e-5) for hit in hits}
    body = {"query": "a town", "model": "writer", "instruction": instruction}
    answer = in_process.post("/rerank", body | {"texts": texts}).json()
    assert {row["index"]: row["score"] for row in answer} == wanted
    answer = in_process.post("/v1/rerank", body | {"documents": texts}).json()
    assert {row["index"]: row["relevance_score"] for row in answer["results"]} == wanted
    del body["instruction"]
    answer = in_process.post("/rerank", body | {"texts": texts}).json()
    assert {row["index"]: row["score"] for row in answer} != wanted
    body = {"query": "a town", "model": "reranker", "instruction": instruction}
    for path, key in (("/rerank", "texts"), ("/v1/rerank", "documents")):
        refused = in_process.post(path, body | {key: texts})
        assert refused.status_code in (400, 413, 422)
        assert "instruction is for causal rerankers and chat models" in refused.text


def test_a_classifier_with_two_labels_reranks_and_stays_a_classifier(tmp_path: Path) -> None:
    """Two labels may be of anything; only /rerank takes them for a score."""
    folder = save_checkpoint(tmp_path, head="ForSequenceClassification", num_labels=2)
    facts = model_facts(ModelSource("one", str(folder)), bytetx.load(folder, device="cpu"))
    assert facts.main_task == "classify" and "rerank" in facts.tasks


def test_similarity(in_process: InProcess) -> None:
    model = in_process.model("embedder")
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:4]}
    scores = model.similarity(model.embed(TEXTS[:1]), model.embed(TEXTS[1:4]))[0].tolist()
    answer = in_process.post("/similarity", {"inputs": inputs}).json()
    assert answer == pytest.approx(scores, abs=1e-6)
    prompted = in_process.post(
        "/similarity", {"inputs": inputs, "parameters": {"prompt_name": "query"}}
    )
    assert prompted.json() != pytest.approx(scores, abs=1e-4)


def test_tokenize_and_decode(in_process: InProcess) -> None:
    text = "The quick brown fox"
    (tokens,) = in_process.post("/tokenize", {"inputs": text}).json()
    encoding = in_process.model("embedder").tokenizer.encode([text], with_offsets=True)[0]
    assert [token["id"] for token in tokens] == encoding.ids
    assert [token["special"] for token in tokens] == [True] + [False] * (len(tokens) - 2) + [True]
    for token, (start, end) in zip(tokens[1:-1], encoding.offsets[1:-1], strict=True):
        assert (token["start"], token["stop"], token["text"]) == (start, end, text[start:end])
    plain = in_process.post("/tokenize", {"inputs": [text], "add_special_tokens": False}).json()
    assert plain == [tokens[1:-1]]
    long = in_process.post("/tokenize", {"inputs": LONG}).json()[0]
    assert len(long) > in_process.model("embedder").max_tokens
    ids = [token["id"] for token in tokens]
    assert in_process.post("/decode", {"ids": ids}).json() == ["the quick brown fox"]
    whole = {"ids": [ids], "skip_special_tokens": False}
    assert in_process.post("/decode", whole).json() == ["[CLS] the quick brown fox [SEP]"]
    wrong = in_process.post("/decode", {"ids": [10**6]})
    assert wrong.status_code == 422 and "1000000" in wrong.json()["error"]


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("embedder", "/embed", {"inputs": "a"}),
        ("classifier", "/predict", {"inputs": "a"}),
        ("reranker", "/rerank", {"query": "a", "texts": ["b", "c"]}),
        ("reranker", "/predict", {"inputs": ["a", "b"]}),
        ("tagger", "/predict_tokens", {"inputs": "a fox"}),
        ("sparse", "/embed_sparse", {"inputs": "a"}),
    ],
)
def test_the_root_is_what_the_model_is_for(
    in_process: InProcess, name: str, path: str, body: dict
) -> None:
    if name == "sparse":  # a masked language model is an embedder unless it says that it is SPLADE
        pytest.importorskip("sentence_transformers")
        body, path = {"inputs": "a"}, "/embed"
    expected = in_process.post(f"/models/{name}{path}", body)
    assert expected.status_code == 200
    alone = in_process.with_settings(only=name)
    for answer in (
        alone.post("/", body),
        in_process.post(f"/models/{name}", body),
        in_process.post("/", body | {"model": name}),
    ):
        assert answer.json() == expected.json()


def test_embeddings(in_process: InProcess) -> None:
    expected = in_process.model("embedder").embed(TEXTS[:3])
    body = {"input": TEXTS[:3], "model": "embedder"}
    answer = in_process.post("/v1/embeddings", body).json()
    assert answer["object"] == "list" and answer["model"] == "embedder"
    assert [row["index"] for row in answer["data"]] == [0, 1, 2]
    rows = np.array([row["embedding"] for row in answer["data"]], np.float32)
    np.testing.assert_array_equal(rows, expected.vectors)
    tokens = expected.stats.num_tokens
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    packed = in_process.post("/v1/embeddings", body | {"encoding_format": "base64"}).json()
    raw = b"".join(base64.b64decode(row["embedding"]) for row in packed["data"])
    assert raw == expected.vectors.astype("<f4").tobytes()
    ids = in_process.post("/v1/embeddings", {"input": [2, 30, 3]}).json()["data"][0]["embedding"]
    by_ids = in_process.model("embedder").embed([[2, 30, 3]]).vectors[0]
    np.testing.assert_array_equal(np.array(ids, np.float32), by_ids)


def test_completions_take_vllms_names(in_process: InProcess) -> None:
    model = in_process.model("writer")
    options = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}}
    params = SamplingParams(max_tokens=6, seed=5, ignore_eos=True, min_tokens=2, **options)
    body = {"model": "writer", "prompt": "New York", "max_tokens": 6, "seed": 5}
    more = options | {"logit_bias": {"7": 2.0}, "ignore_eos": True, "min_tokens": 2}
    answer = in_process.post("/v1/completions", body | more).json()
    assert answer["choices"][0]["text"] == model.generate(["New York"], params)[0].text


def test_completions_with_drafts(
    in_process: InProcess,
    checkpoints: dict[str, Path],
    oracle: type[Oracle],  # noqa: F811
) -> None:
    """The answers and logprobs without them, whole and streamed; counts in the metrics."""
    sources = model_sources([f"writer={checkpoints['writer']}"])
    settings = ServeSettings(sources, device="cpu", num_speculative_tokens=MAX_DRAFT)
    drafting = InProcess(settings, load_models(settings))
    body = {"model": "writer", "prompt": "a quick fox", "max_tokens": 40, "temperature": 0}
    body |= {"logprobs": 1, "ignore_eos": True}
    model, params = in_process.model("writer"), SamplingParams(temperature=0, max_tokens=40)
    (prompt,) = model.encode_prompts([body["prompt"]])
    (answer,) = model.generate([prompt], replace(params, ignore_eos=True))
    oracle.answers = [prompt + answer.token_ids]
    wanted, found = (
        one.post("/v1/completions", body).json()["choices"][0] for one in (in_process, drafting)
    )
    assert found["text"] == wanted["text"] and found["finish_reason"] == "length"
    assert found["logprobs"]["tokens"] == wanted["logprobs"]["tokens"]
    events = drafting.post("/v1/completions", body | {"stream": True}).text.split("\n\n")
    pieces = [
        orjson.loads(event.removeprefix("data: "))["choices"][0]
        for event in events
        if event.startswith("data: {")
    ]
    assert "".join(piece["text"] for piece in pieces) == wanted["text"]
    tokens = [token for piece in pieces for token in piece["logprobs"]["tokens"]]
    assert tokens == wanted["logprobs"]["tokens"] and len(pieces) < len(tokens)
    counts = {
        name: float(re.search(rf"bytetx_spec_decode_num_{name}_tokens_total\{{.* (.*)", page)[1])
        for page in [drafting.get("/metrics").text]
        for name in ("draft", "accepted")
    }
    assert counts["draft"] >= counts["accepted"] > 10
    with pytest.raises(OptionError, match="num_speculative_tokens must be an integer from 0"):
        ServeSettings(sources, num_speculative_tokens=-1)


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        ("completions", {"echo": True}, "echo"),
        ("completions", {"temperature": 7}, "temperature"),
        ("completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("completions", {"prompt": [10**6]}, "1000000"),
        (
            "chat/completions",
            {"tools": [{}], "tool_choice": "required"},
            "tools: [0].function must",
        ),
        ("chat/completions", {"tools": "search"}, "tools"),
        ("chat/completions", {"response_format": {"type": "json"}}, "response_format"),
        ("completions", {"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        ("completions", {"guided_regex": "(a"}, "structured_outputs.regex: "),
        ("completions", {"guided_json": {"type": "strin"}}, "structured_outputs.json: "),
        ("completions", {"guided_grammar": "nonsense"}, "structured_outputs.grammar: "),
        ("completions", {"guided_choice": []}, "structured_outputs.choice must be"),
        ("completions", {"guided_regex": "a", "guided_json": {}}, "exclude each other"),
        ("completions", {"structured_outputs": {"structural_tag": "a"}}, "structural_tag"),
        ("completions", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{}]}]}, "content"),
        ("chat/completions", {"model": "embedder"}, "cannot generate"),
    ],
)
def test_what_generation_refuses(
    in_process: InProcess, path: str, change: dict, named: str
) -> None:
    for stream in (False, True):
        messages = [{"role": "user", "content": "a"}]
        body = {"model": "writer", "prompt": "a", "messages": messages, "stream": stream}
        answer = in_process.post(f"/v1/{path}", body | change)
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"]


def test_info_models_and_page(in_process: InProcess) -> None:
    info = in_process.get("/info").json()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["max_input_length"] == in_process.model("embedder").max_tokens
    assert info["max_client_batch_size"] == 32 and info["payload_limit"] == 2_000_000
    assert "reranker" in in_process.get("/models/reranker/info").json()["model_type"]
    labels = in_process.get("/models/classifier/info").json()["model_type"]["classifier"]
    assert labels["id2label"]["1"] == "LABEL_1" and labels["label2id"]["LABEL_1"] == 1
    assert "token_classifier" in in_process.get("/models/tagger/info").json()["model_type"]
    names = [model["id"] for model in in_process.get("/v1/models").json()["data"]]
    assert names == [one.facts.name for one in in_process.served]
    for path in ("/", "/docs"):
        assert in_process.get(path).headers["content-type"].startswith("text/html")
    schema = in_process.get("/openapi.json").json()
    assert "/embed" in schema["paths"] and "EmbedRequest" in schema["components"]["schemas"]


def test_stats(in_process: InProcess) -> None:
    one = in_process.with_settings()
    assert one.get("/stats.json").json()["latency_ms"] == {"p50": None, "p95": None, "p99": None}
    before = one.get("/stats.json").json()["totals"]["padding_saved_tokens"]  # of the models' life
    one.post("/embed", {"inputs": ["a", "the fox"]})
    one.post("/embed", {"inputs": 7})
    stats = one.get("/stats.json").json()
    lengths = [len(x) for x in one.model("embedder").tokenizer.encode(["a", "the fox"])]
    step = stats["steps"][-1]
    assert step["sequences"] == 2 and step["tokens"] == sum(lengths)
    assert step["padded_tokens"] == 2 * max(lengths) and step["seconds"] > 0
    saved = stats["totals"]["padding_saved_tokens"] - before
    assert saved == 2 * max(lengths) - sum(lengths) > 0
    keys = {"models", "uptime_s", "queue", "rates", "latency_ms", "routes", "totals", "steps"}
    assert stats.keys() == keys
    assert stats["models"][0].keys() == {
        *("name", "family", "dtype", "device", "parameters", "max_tokens", "tasks", "adapters")
    }
    (route,) = stats["routes"]
    assert route.pop("route") == "/embed" and route.pop("requests") == 1
    assert route == stats["latency_ms"]
    assert stats["totals"]["prefix_saved_tokens"] == 0 < stats["totals"]["text_tokens"]
    assert stats["totals"]["requests"] == 2 and stats["totals"]["errors"] == 1
    assert (
        stats["totals"]["tokens"] == one.model("embedder").embed(["a", "the fox"]).stats.num_tokens
    )
    assert stats["latency_ms"]["p50"] > 0 and stats["queue"].keys() == {
        *("requests", "tokens", "running")
    }


@pytest.mark.feature("Server", "metrics of Prometheus")
def test_metrics(in_process: InProcess) -> None:
    """Ours, and TEI's names for the same numbers."""
    one = in_process.with_settings()
    one.post("/embed", {"inputs": ["a", "b"]})
    one.post("/embed", {"inputs": 7})
    text = one.get("/metrics").text
    for line in (
        'bytetx_requests_total{route="/embed",status="200"} 1.0',
        'bytetx_requests_total{route="/embed",status="422"} 1.0',
        'bytetx_request_failures_total{err="validation"} 1.0',
        'bytetx_inputs_total{model="embedder"} 2.0',
        "bytetx_request_duration_seconds_count 1.0",
        "bytetx_request_tokenization_duration_seconds_count 1.0",
        "bytetx_request_queue_duration_seconds_count 1.0",
        "bytetx_request_inference_duration_seconds_count 1.0",
        'te_request_count{method="single"} 2.0',
        'te_request_success{method="single"} 1.0',
        'te_request_failure{err="validation"} 1.0',
        "te_request_duration_count 1.0",
        "te_queue_size 0.0",
    ):
        assert line in text.splitlines()
    assert "bytetx_padding_saved_tokens_total" in text
    assert 'bytetx_spec_decode_num_draft_tokens_total{model="writer"} 0.0' in text.splitlines()
    ours = in_process.with_settings(metrics_names=("bytetx",)).get("/metrics").text
    assert "te_request" not in ours and "bytetx_requests" in ours
