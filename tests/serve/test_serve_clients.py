"""Clients that people have, unchanged, against a server process."""

import numpy as np
import openai
import pytest
from cohere import Client, ClientV2
from huggingface_hub import InferenceClient
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from serving import InProcess, Server

from bytetx import SamplingParams

TEXTS = ["The quick brown fox", "jumps over the lazy dog", "a"]
DOCUMENTS = ["New York is big.", "San Francisco isn't far from Oakland", "the lazy dog"]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame", max_retries=0)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests keep the hub's client offline; the server here is on the loopback address."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def hugging_face(server: Server, name: str) -> InferenceClient:
    return InferenceClient(base_url=f"{server.url}/models/{name}", token="sesame")


@pytest.mark.feature("Server", "routes of OpenAI: embeddings")
def test_openai_embeddings(client: openai.OpenAI, in_process: InProcess) -> None:
    """Floats, and the base64 that the client asks for by itself, are Model's own vectors."""
    expected = in_process.model("embedder").embed(TEXTS)
    for options in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="embedder", input=TEXTS, **options)
        vectors = np.array([row.embedding for row in answer.data], dtype=np.float32)
        np.testing.assert_allclose(vectors, expected.vectors, atol=1e-6)
        assert answer.usage.prompt_tokens == expected.stats.num_tokens
    short = client.embeddings.create(model="embedder", input="a", dimensions=8)
    np.testing.assert_allclose(
        short.data[0].embedding,
        in_process.model("embedder").embed(["a"], dimensions=8)[0],
        atol=1e-6,
    )


def test_openai_models_and_errors(client: openai.OpenAI, server: Server) -> None:
    names = [model.id for model in client.models.list()]
    assert names[0] == "embedder" and "writer" in names
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model="nothing", input="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="embedder", input=[])
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


@pytest.mark.feature("Server", "routes of OpenAI: completions")
def test_openai_completions(client: openai.OpenAI, in_process: InProcess) -> None:
    """The same text as Model's, whole and streamed; usage, stop strings, seeds, logprobs."""
    model = in_process.model("writer")
    options = {"model": "writer", "prompt": "The quick", "max_tokens": 12, "temperature": 0}
    expected = model.generate(["The quick"], SamplingParams(max_tokens=12, temperature=0))[0]
    answer = client.completions.create(**options)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == expected.num_prompt_tokens
    assert answer.usage.completion_tokens == len(expected.token_ids)
    usage = {"include_usage": True}
    chunks = list(client.completions.create(**options, stream=True, stream_options=usage))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected.text
    assert chunks[-1].choices == [] and chunks[-1].usage == answer.usage
    assert len(chunks) > 3

    stop = expected.text[4:6]
    stopped = client.completions.create(**options, stop=stop).choices[0]
    assert stopped.text == expected.text[: expected.text.index(stop)]
    assert stopped.finish_reason == "stop"

    sampled = options | {"temperature": 1, "n": 2}
    first = client.completions.create(**sampled, seed=3, logprobs=2)
    again = client.completions.create(**sampled, seed=3)
    assert [c.text for c in first.choices] == [c.text for c in again.choices]
    assert first.choices[0].text != first.choices[1].text
    direct = model.generate(["The quick"], SamplingParams(max_tokens=12, seed=3, n=2, logprobs=2))[
        0
    ]
    for choice, output in zip(first.choices, direct.outputs, strict=True):
        assert choice.text == output.text
        given = [entry.logprob for entry in output.logprobs]
        np.testing.assert_allclose(choice.logprobs.token_logprobs, given, atol=1e-4)
        assert len(choice.logprobs.top_logprobs[0]) >= 2


def test_openai_completions_of_several_prompts(
    client: openai.OpenAI, in_process: InProcess
) -> None:
    prompts = ["The quick", "New York", [5, 6, 7]]
    params = SamplingParams(max_tokens=6, temperature=0)
    expected = [out.text for out in in_process.model("writer").generate(prompts, params)]
    texts = ["The quick", "New York"]
    answer = client.completions.create(model="writer", prompt=texts, max_tokens=6, temperature=0)
    assert [choice.text for choice in answer.choices] == expected[:2]
    streamed = ["", ""]
    for chunk in client.completions.create(
        model="writer", prompt=texts, max_tokens=6, temperature=0, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == expected[:2]
    ids = client.completions.create(model="writer", prompt=[5, 6, 7], max_tokens=6, temperature=0)
    assert ids.choices[0].text == expected[2]


@pytest.mark.feature("Server", "routes of OpenAI: chats")
def test_openai_chat(client: openai.OpenAI, in_process: InProcess) -> None:
    messages = [{"role": "user", "content": "The quick"}]
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=1)
    expected = in_process.model("writer").generate([messages], params)[0]
    options = {"model": "writer", "max_completion_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(
        messages=messages, **options, logprobs=True, top_logprobs=1
    )
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    given = [token.logprob for token in answer.choices[0].logprobs.content]
    np.testing.assert_allclose(given, [entry.logprob for entry in expected.logprobs], atol=1e-4)
    parts = [{"role": "user", "content": [{"type": "text", "text": "The quick"}]}]
    chunks = list(client.chat.completions.create(messages=parts, **options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason


def test_openai_stream_may_be_left(client: openai.OpenAI, server: Server) -> None:
    """The generation of a client that leaves ends, and the server goes on."""
    stream = client.completions.create(model="writer", prompt="a", max_tokens=80, stream=True)
    next(iter(stream))
    stream.close()
    with server.client() as http:
        assert http.get("/health").status_code == 200


@pytest.mark.usefixtures("online")
def test_hugging_face_client(server: Server, in_process: InProcess) -> None:
    embedder = hugging_face(server, "embedder")
    expected = in_process.model("embedder").embed(["the fox"]).vectors
    np.testing.assert_allclose(embedder.feature_extraction("the fox"), expected, atol=1e-6)
    prompted = in_process.model("embedder").embed(["the fox"], prompt_name="query").vectors
    answer = embedder.feature_extraction("the fox", prompt_name="query", normalize=True)
    np.testing.assert_allclose(answer, prompted, atol=1e-6)
    model = in_process.model("embedder")
    scores = model.similarity(model.embed(TEXTS[:1]), model.embed(TEXTS[1:]))[0].tolist()
    assert embedder.sentence_similarity(TEXTS[0], TEXTS[1:]) == pytest.approx(scores, abs=1e-6)


@pytest.mark.usefixtures("online")
def test_hugging_face_client_of_labels(server: Server, in_process: InProcess) -> None:
    expected = in_process.model("classifier").classify(["the fox"])[0]
    given = hugging_face(server, "classifier").text_classification("the fox")
    assert [(entry.label, entry.score) for entry in given] == [
        (entry.label, pytest.approx(entry.score, abs=1e-6)) for entry in expected
    ]
    text = "Angela Merkel met Zaphod"
    tags = in_process.model("tagger").tag([text])[0]
    entities = hugging_face(server, "tagger").token_classification(text)
    assert [(e.entity_group, e.word, e.start, e.end) for e in entities] == [
        (t.entity, t.word, t.start, t.end) for t in tags
    ]


@pytest.mark.usefixtures("online")
def test_hugging_face_client_of_chats(server: Server, in_process: InProcess) -> None:
    messages = [{"role": "user", "content": "The quick"}]
    params = SamplingParams(max_tokens=8, temperature=0)
    expected = in_process.model("writer").generate([messages], params)[0].text
    client = InferenceClient(base_url=f"{server.url}/v1", token="sesame")
    answer = client.chat_completion(messages, model="writer", max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == expected
    chunks = client.chat_completion(
        messages, model="writer", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_langchain(server: Server, in_process: InProcess) -> None:
    embedder = OpenAIEmbeddings(
        model="embedder",
        base_url=f"{server.url}/v1",
        api_key="sesame",
        check_embedding_ctx_length=False,
    )
    expected = in_process.model("embedder").embed(TEXTS).vectors
    np.testing.assert_allclose(embedder.embed_documents(TEXTS), expected, atol=1e-6)
    chat = ChatOpenAI(
        model="writer",
        base_url=f"{server.url}/v1",
        api_key="sesame",
        max_tokens=8,
        temperature=0,
    )
    messages = [{"role": "user", "content": "The quick"}]
    params = SamplingParams(max_tokens=8, temperature=0)
    text = in_process.model("writer").generate([messages], params)[0].text
    assert chat.invoke("The quick").content == text
    assert "".join(str(chunk.content) for chunk in chat.stream("The quick")) == text


@pytest.mark.feature("Server", "routes of Cohere")
@pytest.mark.parametrize("kind", [Client, ClientV2])
def test_cohere_rerank(kind: type, server: Server, in_process: InProcess) -> None:
    client = kind(api_key="sesame", base_url=server.url)
    hits = in_process.model("reranker").rerank("a big town", DOCUMENTS)
    answer = client.rerank(model="reranker", query="a big town", documents=DOCUMENTS, top_n=2)
    assert [(hit.index, hit.relevance_score) for hit in answer.results] == [
        (hit.index, pytest.approx(hit.score, abs=1e-6)) for hit in hits[:2]
    ]
