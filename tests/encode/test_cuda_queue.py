"""The queue of a GPU on a CPU: fakes stand in for streams, events, pinned memory and graphs."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from fake_cuda import FakeEvent, FakeStream, fake_capture
from static_models import bare, save_model2vec
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.async_model import AsyncModel
from bytetx.encode import cuda_queue
from bytetx.encode.cuda_queue import CudaQueue, _copy
from bytetx.model import Model
from bytetx.nn.transformer import Transformer
from bytetx.runtime import cuda_graphs as graphs
from bytetx.runtime.on_stream import OnStream


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **o: empty(*a, **o))
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(cuda_queue, "OnStream", nullcontext)
    monkeypatch.setattr(graphs.GraphCache, "_capture", fake_capture)
    monkeypatch.setattr(graphs.GraphCache, "_reserve", lambda cache, total_tokens: None)
    monkeypatch.setattr(Transformer, "is_capturable", True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("roberta"), "roberta")


@pytest.fixture
def plain(folder: Path) -> Model:
    return bytetx.load(folder, device="cpu", token_budget=200)


def queued(model: Model, *, has_graphs: bool = True) -> tuple[Model, CudaQueue]:
    other = Model(model.checkpoint, token_budget=model.token_budget)
    queue = CudaQueue(
        model.transformer,
        device=torch.device("cpu"),
        max_tokens=model.token_budget,
        has_graphs=has_graphs,
    )
    other._runner._queue = queue
    return other, queue


def batches(num_batches: int) -> Iterator[list[list[int]]]:
    rng = np.random.default_rng(5)
    for _ in range(num_batches):
        lengths = rng.integers(1, 38, rng.integers(1, 7))
        yield [rng.integers(5, 50, length).tolist() for length in lengths]


@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls", ("max", "lasttoken")])
def test_padded_steps_give_what_plain_ones_do(
    plain: Model, has_graphs: bool, pooling: str | tuple[str, ...]
) -> None:
    model, queue = queued(plain, has_graphs=has_graphs)
    for batch in batches(40):
        ours = model.embed(batch, pooling=pooling, normalize=True).vectors
        theirs = plain.embed(batch, pooling=pooling, normalize=True).vectors
        np.testing.assert_array_equal(ours, theirs)
    assert (queue.num_graphs > 3) == has_graphs


@pytest.mark.parametrize("weights", ["plain", "mapped"])
def test_padded_steps_of_a_static_embedding(weights: str, tmp_path: Path) -> None:
    """Rows without layers, of texts without tokens, too."""
    folder = bare(save_model2vec(tmp_path / "model", weights=weights))
    plain = bytetx.load(folder, device="cpu", token_budget=200)
    model, queue = queued(plain)
    texts = ["", "鬱", "the quick fox", "jumps 鬱 over", "", "a dog"]
    for count in range(1, len(texts) + 1):
        for _ in range(3):
            ours = model.embed(texts[:count]).vectors
            np.testing.assert_array_equal(ours, plain.embed(texts[:count]).vectors)
    assert queue.num_graphs > 1


def test_outputs_of_tokens_end_with_the_last_text(plain: Model) -> None:
    model, _ = queued(plain)
    for batch in batches(5):
        ours, theirs = model.hidden_states(batch), plain.hidden_states(batch)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def test_callers_of_one_task_share_graphs_and_those_of_several_run_without(folder: Path) -> None:
    """Tasks that differ in `finish` alone are one task to the device."""
    plain = bytetx.load(folder, device="cpu", token_budget=200)
    model, queue = queued(plain)
    batch = [[7] * 20, [9] * 5, [8] * 9]

    async def main() -> None:
        async with AsyncModel(model) as batched:
            for _ in range(3):
                rows = await asyncio.gather(*(batched.embed([ids]) for ids in batch))
                wanted = plain.embed(batch).vectors
                np.testing.assert_array_equal(np.concatenate([r.vectors for r in rows]), wanted)
            assert queue.num_graphs > 0
            num_graphs = queue.num_graphs
            embedded, states = await asyncio.gather(
                batched.embed(batch, pooling="max"), batched.embed(batch, pooling="cls")
            )
            np.testing.assert_array_equal(embedded, plain.embed(batch, pooling="max"))
            np.testing.assert_array_equal(states, plain.embed(batch, pooling="cls"))
            assert queue.num_graphs == num_graphs

    asyncio.run(main())


def test_the_second_need_captures_and_the_third_replays(plain: Model) -> None:
    model, queue = queued(plain)
    counts = []
    for _ in range(4):
        model.embed([[7] * 20])
        counts.append(queue.num_graphs)
    assert counts == [0, 1, 1, 1]
    (captured,) = queue._graphs._graphs.values()
    assert captured.graph.num_replays == 3
    model.embed([[7] * 21, [8] * 3])  # another number of texts
    model.embed([[7] * 20], pooling="max")  # other work
    assert queue.num_graphs == 1


def test_the_least_recently_used_graph_goes(plain: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    model, queue = queued(plain)

    def tokens() -> list[int]:
        return [bucket.total_tokens for bucket, *_ in queue._graphs._graphs]

    for num_texts in (1, 1, 2, 2, 1, 4, 4):
        model.embed([[7] * 35] * num_texts)
    assert tokens() == [64, 192]


def test_a_refused_capture_is_tried_once(
    plain: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs.GraphCache, "_capture", refuse)
    model, queue = queued(plain)
    expected = plain.embed([[7] * 20]).vectors
    for _ in range(4):
        np.testing.assert_array_equal(model.embed([[7] * 20]).vectors, expected)
    assert queue.num_graphs == 0
    assert caplog.text.count("no CUDA graph for 32 tokens: operation not permitted") == 1


def test_steps_beyond_the_largest_bucket_have_no_graph(plain: Model) -> None:
    model, queue = queued(Model(plain.checkpoint, token_budget=16))
    for _ in range(3):
        ours = model.embed([[7] * 36]).vectors
    np.testing.assert_array_equal(ours, plain.embed([[7] * 36]).vectors)
    assert queue.num_graphs == 0


def test_memory_is_given_up_before_texts(plain: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model, queue = queued(plain)
    for _ in range(3):
        model.embed([[7] * 20])
    forward = model.transformer.forward

    sizes = []

    def forward_without_graphs(batch: object, **options: object) -> torch.Tensor:
        sizes.append(batch.total_tokens)
        if queue.num_graphs:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(batch, **options)

    monkeypatch.setattr(model.transformer, "forward", forward_without_graphs)
    vectors = model.embed([[7] * 30] * 2).vectors
    assert np.isfinite(vectors).all() and queue.num_graphs == 0
    assert sizes == [64, 64]


def test_graphs_that_come_back_at_once_end_in_cut_steps(
    plain: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fails behind its graph again and again must not be tried for ever."""
    model, _ = queued(plain)
    expected = plain.embed([[7] * 30] * 4).vectors

    def copy_out(queue: CudaQueue, outputs: tuple[torch.Tensor, ...], *, is_static: bool) -> object:
        if len(outputs[0]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return _copy(outputs, None)

    monkeypatch.setattr(CudaQueue, "_copy_out", copy_out)
    for _ in range(3):
        np.testing.assert_array_equal(model.embed([[7] * 30] * 4).vectors, expected)


def test_no_cycle_holds_a_queue(plain: Model) -> None:
    model, queue = queued(plain)
    for _ in range(3):
        model.embed([[7] * 20])
    (captured,) = queue._graphs._graphs.values()
    gone = [weakref.ref(queue), weakref.ref(captured.graph)]
    gc.disable()
    try:
        del model, queue, captured
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_the_streams_and_the_device_of_the_caller_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {"device": 0, "streams": [(10, 0, 1), (11, 1, 1)]}

    def set_stream(*, stream_id: int, device_index: int, device_type: int) -> None:
        state["device"] = device_index
        state["streams"][device_index] = (stream_id, device_index, device_type)

    fakes = {
        "_cuda_getDevice": lambda: state["device"],
        "_cuda_setDevice": lambda index: state.update(device=index),
        "_cuda_getCurrentStream": lambda index: state["streams"][index],
        "_cuda_setStream": set_stream,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch._C, name, fake, raising=False)
    stream = FakeStream()
    stream.device_index = 1
    with OnStream(stream):
        assert state == {"device": 1, "streams": [(10, 0, 1), (stream.stream_id, 1, 1)]}
    assert state == {"device": 0, "streams": [(10, 0, 1), (11, 1, 1)]}
