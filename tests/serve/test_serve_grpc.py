"""TEI's gRPC interface, by stubs that protoc makes: the answers of HTTP, its limits and errors."""

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from paths import ROOT
from serving import Server, start_server

pytest.importorskip("grpc_tools", reason="the extra grpc")

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_tools import protoc

TEXTS = ["The quick brown fox", "jumps over the lazy dog", "a"]
LONG = "fox " * 2000
MODELS = ("embedder", "classifier", "reranker", "sparse")
KEY = (("authorization", "Bearer sesame"),)
SERVING = health_pb2.HealthCheckResponse.SERVING


def of(model: str) -> tuple[tuple[str, str], ...]:
    return (*KEY, ("model", model))


@pytest.fixture(scope="module")
def tei(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ModuleType, ModuleType]]:
    """(messages, stubs), generated as a client generates them."""
    folder = tmp_path_factory.mktemp("stubs")
    source = ROOT / "bytetx/serve"
    outs = [f"--python_out={folder}", f"--grpc_python_out={folder}"]
    assert protoc.main(["protoc", f"-I{source}", *outs, "tei.proto"]) == 0
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("tei_pb2"), importlib.import_module("tei_pb2_grpc")
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def server(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    models = [part for name in MODELS for part in ("--model", f"{name}={checkpoints[name]}")]
    options = ["--api-key", "sesame", "--grpc-port", "0", "--payload-limit", "100000"]
    log = tmp_path_factory.mktemp("grpc") / "log"
    with start_server([*models, *options], log=log) as running:
        yield running
        assert "Traceback" not in running.read_log()


def connect(server: Server) -> grpc.Channel:
    return grpc.insecure_channel(f"127.0.0.1:{server.wait_for(r'gRPC on port ([0-9]+)').group(1)}")


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with connect(server) as found:
        yield found


def over_http(server: Server, path: str, **body: object) -> Any:
    with server.client() as client:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


def error_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call) if hasattr(call, "__next__") else call()
    return caught.value.code(), caught.value.details()  # type: ignore[attr-defined]


@pytest.mark.feature("Server", "TEI's gRPC with health and reflection (--grpc-port)")
def test_embed(server: Server, channel: grpc.Channel, tei: tuple[ModuleType, ModuleType]) -> None:
    messages, stubs = tei
    stub = stubs.EmbedStub(channel)
    expected = over_http(server, "/embed", inputs=TEXTS)
    answer = stub.Embed(messages.EmbedRequest(inputs=TEXTS[0]), metadata=KEY)
    np.testing.assert_allclose(answer.embeddings, expected[0], atol=1e-6)
    assert answer.metadata.compute_chars == len(TEXTS[0]) and answer.metadata.compute_tokens > 2
    request = messages.EmbedRequest(inputs=TEXTS[0], prompt_name="query", dimensions=8)
    wanted = over_http(server, "/embed", inputs=TEXTS[0], prompt_name="query", dimensions=8)
    np.testing.assert_allclose(stub.Embed(request, metadata=KEY).embeddings, wanted[0], atol=1e-6)
    for cut in ("Left", "Right"):
        direction = messages.TruncationDirection.Value(f"TRUNCATION_DIRECTION_{cut.upper()}")
        request = messages.EmbedRequest(
            inputs=LONG + "dog", truncate=True, truncation_direction=direction
        )
        wanted = over_http(
            server, "/embed", inputs=LONG + "dog", truncate=True, truncation_direction=cut
        )
        np.testing.assert_allclose(
            stub.Embed(request, metadata=KEY).embeddings, wanted[0], atol=1e-6
        )
    every = stub.EmbedAll(messages.EmbedAllRequest(inputs=TEXTS[1]), metadata=KEY)
    rows = over_http(server, "/embed_all", inputs=TEXTS[1])[0]
    np.testing.assert_allclose([row.embeddings for row in every.token_embeddings], rows, atol=1e-6)
    sparse = stub.EmbedSparse(messages.EmbedSparseRequest(inputs=TEXTS[1]), metadata=of("sparse"))
    pairs = over_http(server, "/embed_sparse", inputs=TEXTS[1], model="sparse")[0]
    assert [one.index for one in sparse.sparse_embeddings] == [pair["index"] for pair in pairs]


def test_streams_answer_in_order(
    server: Server, channel: grpc.Channel, tei: tuple[ModuleType, ModuleType]
) -> None:
    messages, stubs = tei
    texts = [" ".join(TEXTS[i % 3] for i in range(n % 7 + 1)) for n in range(100)]
    requests = (messages.EmbedRequest(inputs=text, truncate=True) for text in texts)
    answers = stubs.EmbedStub(channel).EmbedStream(requests, metadata=KEY)
    rows = np.array([answer.embeddings for answer in answers])
    wanted = [over_http(server, "/embed", inputs=text)[0] for text in texts[:7]]
    np.testing.assert_allclose(rows[:7], wanted, atol=1e-5)
    np.testing.assert_allclose(rows[7:14], wanted, atol=1e-5)  # lengths repeat
    assert len(rows) == 100
    assert list(stubs.EmbedStub(channel).EmbedStream(iter(()), metadata=KEY)) == []


def test_predict_rerank_tokenize(
    server: Server, channel: grpc.Channel, tei: tuple[ModuleType, ModuleType]
) -> None:
    messages, stubs = tei
    predict = stubs.PredictStub(channel)
    found = predict.Predict(messages.PredictRequest(inputs="a fox"), metadata=of("classifier"))
    wanted = over_http(server, "/predict", inputs="a fox", model="classifier")
    assert [one.label for one in found.predictions] == [row["label"] for row in wanted]
    pair = messages.PredictPairRequest(inputs=["a fox", "a dog"], raw_scores=True)
    body = {"inputs": [["a fox", "a dog"]], "raw_scores": True, "model": "classifier"}
    wanted = over_http(server, "/predict", **body)[0]
    for answer in (
        predict.PredictPair(pair, metadata=of("classifier")),
        *predict.PredictPairStream(iter([pair]), metadata=of("classifier")),
    ):
        scores = [one.score for one in answer.predictions]
        np.testing.assert_allclose(scores, [row["score"] for row in wanted], atol=1e-5)
    rerank = stubs.RerankStub(channel)
    given = {"query": "fox", "texts": TEXTS, "return_text": True}
    wanted = over_http(server, "/rerank", **given, model="reranker")
    parts = [
        messages.RerankStreamRequest(query="fox", text=text, return_text=True) for text in TEXTS
    ]
    for answer in (
        rerank.Rerank(messages.RerankRequest(**given), metadata=of("reranker")),
        rerank.RerankStream(iter(parts), metadata=of("reranker")),
    ):
        assert [(one.index, one.text) for one in answer.ranks] == [
            (row["index"], row["text"]) for row in wanted
        ]
    tokenize = stubs.TokenizeStub(channel)
    encoded = tokenize.Tokenize(
        messages.EncodeRequest(inputs="a fox", add_special_tokens=True), metadata=KEY
    )
    tokens = over_http(server, "/tokenize", inputs=["a fox"])[0]
    assert [(one.id, one.special) for one in encoded.tokens] == [
        (row["id"], row["special"]) for row in tokens
    ]
    assert not encoded.tokens[0].HasField("start") and encoded.tokens[1].stop == 1
    ids = messages.DecodeRequest(ids=[one.id for one in encoded.tokens], skip_special_tokens=True)
    assert tokenize.Decode(ids, metadata=KEY).text == "a fox"


def test_info_health_reflection(
    server: Server, channel: grpc.Channel, tei: tuple[ModuleType, ModuleType]
) -> None:
    messages, stubs = tei
    stub = stubs.InfoStub(channel)
    info = stub.Info(messages.InfoRequest(), metadata=KEY)
    assert info.model_type == messages.MODEL_TYPE_EMBEDDING and info.model_dtype == "float32"
    assert info.max_client_batch_size == 32 and not info.HasField("max_batch_requests")
    other = stub.Info(messages.InfoRequest(), metadata=of("reranker"))
    assert other.model_type == messages.MODEL_TYPE_RERANKER
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "tei.v1.Embed"):
        assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == SERVING
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([listing])
    )
    services = {one.name for one in next(answers).list_services_response.service}
    assert {"tei.v1.Embed", "tei.v1.Rerank", "grpc.health.v1.Health"} <= services


def test_errors(server: Server, channel: grpc.Channel, tei: tuple[ModuleType, ModuleType]) -> None:
    messages, stubs = tei
    stub, code = stubs.EmbedStub(channel), grpc.StatusCode

    def embed(text: str, metadata: Any = KEY, **fields: object) -> Any:
        return lambda: stub.Embed(messages.EmbedRequest(inputs=text, **fields), metadata=metadata)

    assert error_of(embed("a", ()))[0] == code.UNAUTHENTICATED
    assert error_of(embed("a", of("nothing")))[0] == code.NOT_FOUND
    found, said = error_of(embed(LONG))
    assert found == code.INVALID_ARGUMENT and "tokens" in said
    found, said = error_of(embed("a", prompt_name="none"))
    assert found == code.INVALID_ARGUMENT and "none" in said
    assert error_of(embed("a", of("reranker")))[0] == code.FAILED_PRECONDITION
    assert error_of(embed("a" * 99_990))[0] == code.INVALID_ARGUMENT  # with its fields
    assert error_of(embed("a" * 200_000))[0] == code.RESOURCE_EXHAUSTED  # gRPC's own limit
    # What came before the wrong message of a stream is answered.
    given = [messages.EmbedRequest(inputs=text) for text in ("a", LONG, "a")]
    answers = stub.EmbedStream(iter(given), metadata=KEY)
    assert len(next(answers).embeddings) == 48
    assert error_of(answers)[0] == code.INVALID_ARGUMENT
    rerank = stubs.RerankStub(channel)
    assert (
        error_of(lambda: rerank.RerankStream(iter(()), metadata=of("reranker")))[0]
        == code.INVALID_ARGUMENT
    )


def test_bytes_of_other_clients(channel: grpc.Channel) -> None:
    """Numbers of fields as TEI has them: inputs 1, truncate 2, normalize 3; embeddings 1."""
    call = channel.unary_unary("/tei.v1.Embed/Embed")
    answer = call(b"\x0a\x01a\x10\x01\x18\x00", metadata=KEY)
    assert answer[:1] == b"\x0a"
    assert int.from_bytes(answer[1:2], "little") == 192 & 0x7F | 0x80  # 48 floats, packed


def test_bytes_that_are_no_message(channel: grpc.Channel) -> None:
    wrong, code = b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT
    one = channel.unary_unary("/tei.v1.Embed/Embed")
    each = channel.stream_stream("/tei.v1.Embed/EmbedStream")
    gathered = channel.stream_unary("/tei.v1.Rerank/RerankStream")
    calls = (
        lambda: one(wrong, metadata=KEY),
        lambda: one(b"\x0a\x02\xff\xfe", metadata=KEY),  # no UTF-8
        lambda: list(each(iter([wrong]), metadata=KEY)),
        lambda: gathered(iter([wrong]), metadata=of("reranker")),
        lambda: gathered(iter([b"\x12\x01a", wrong]), metadata=of("reranker")),
    )
    for call in calls:
        found, said = error_of(call)
        assert found == code and "cannot be read" in said


def test_a_stream_with_one_answer_has_the_limits_of_a_body(
    server: Server, channel: grpc.Channel, tei: tuple[ModuleType, ModuleType]
) -> None:
    """It is refused where it gets too long or has no key, however much the client would send."""
    messages, stubs = tei
    stub = stubs.RerankStub(channel)

    def endless() -> Iterator[Any]:
        while True:
            yield messages.RerankStreamRequest(query="a", text="fox " * 5_000, truncate=True)

    for metadata, code in (
        (of("reranker"), grpc.StatusCode.INVALID_ARGUMENT),
        ((), grpc.StatusCode.UNAUTHENTICATED),
    ):
        call = stub.RerankStream.future(endless(), metadata=metadata, timeout=20)
        found, _ = error_of(call.result)
        assert found == code
    with pytest.raises(grpc.RpcError):  # it waits for a text that does not come
        stub.RerankStream(_then_nothing(messages), metadata=of("reranker"), timeout=0.5)
    server.wait_until_idle()
    given = [messages.RerankStreamRequest(query="a", text=text) for text in TEXTS]
    assert len(stub.RerankStream(iter(given), metadata=of("reranker")).ranks) == len(TEXTS)


def _then_nothing(messages: ModuleType) -> Iterator[Any]:
    yield messages.RerankStreamRequest(query="a", text="b")
    time.sleep(3)


def test_calls_that_are_cancelled_leave_nothing(
    server: Server, channel: grpc.Channel, tei: tuple[ModuleType, ModuleType]
) -> None:
    messages, stubs = tei
    stub = stubs.EmbedStub(channel)
    for _ in range(20):
        stub.Embed.future(messages.EmbedRequest(inputs=TEXTS[0]), metadata=KEY).cancel()

    def endless() -> Iterator[Any]:
        while True:
            yield messages.EmbedRequest(inputs=TEXTS[0])

    stream = stub.EmbedStream(endless(), metadata=KEY)
    assert len(next(stream).embeddings) == 48
    stream.cancel()
    server.wait_until_idle()
    answer = stub.Embed(messages.EmbedRequest(inputs="a"), metadata=KEY)
    assert len(answer.embeddings) == 48


@pytest.mark.parametrize("frontends", [1, 2])
def test_it_drains(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    tei: tuple[ModuleType, ModuleType],
    frontends: int,
) -> None:
    messages, stubs = tei
    model = ["--model", f"embedder={checkpoints['embedder']}"]
    options = [*model, "--grpc-port", "0", "--frontends", str(frontends)]
    with start_server(options, log=tmp_path / "log") as running, connect(running) as channel:
        stub = stubs.EmbedStub(channel)
        end = time.monotonic() + 60
        while time.monotonic() < end:  # front-ends get ready one after another
            try:
                answer = stub.Embed(messages.EmbedRequest(inputs="a"), wait_for_ready=True)
                break
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
                time.sleep(0.1)
        assert len(answer.embeddings) == 48
        assert running.stop() == 0
        assert error_of(lambda: stub.Embed(messages.EmbedRequest(inputs="a")))[0] == (
            grpc.StatusCode.UNAVAILABLE
        )


def test_a_port_that_is_taken(server: Server, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    taken = server.wait_for(r"gRPC on port ([0-9]+)").group(1)
    model = ["--model", f"embedder={checkpoints['embedder']}"]
    for frontends in ("1", "2"):
        options = [*model, "--grpc-port", taken, "--frontends", frontends]
        log = tmp_path / frontends
        with pytest.raises(AssertionError), start_server(options, log=log):
            pass  # it ends by itself
        assert f"cannot listen on 127.0.0.1:{taken}" in log.read_text()
