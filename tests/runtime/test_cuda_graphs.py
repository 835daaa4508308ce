"""Captured steps on a GPU: the bits of eager ones, no wait for the device, bounded memory."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_json, save_checkpoint
from paths import ROOT

import bytetx
from bytetx.encode.cuda_queue import CudaQueue
from bytetx.errors import DeviceMemoryError, StepError
from bytetx.model import Model
from bytetx.runtime import cuda_graphs as graphs

pytestmark = pytest.mark.gpu

HEADS = {
    "embed": "Model",
    "classify": "ForSequenceClassification",
    "tag": "ForTokenClassification",
    "fill_mask": "ForMaskedLM",
    "hidden_states": "Model",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint a head, of sizes that the kernels take, with 300 positions."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 300}
    folders = {}
    for head in sorted(set(HEADS.values())):
        folders[head] = save_checkpoint(tmp_path_factory.mktemp(head), head=head, **sizes)
        edit_json(folders[head] / "tokenizer_config.json", model_max_length=300)
    return folders


def load(folder: Path, **options: object) -> Model:
    return bytetx.load(folder, device="cuda", **{"token_budget": 1024, **options})


def queue_of(model: Model) -> CudaQueue:
    queue = model._runner._queue
    if not model.transformer.is_capturable:
        pytest.skip("this GPU runs attention without a plan")
    return queue


def batch_of(seed: int, *, num_texts: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, num_texts)
    return [rng.integers(5, 60, length).tolist() for length in lengths]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("head", "options"),
    [
        ("Model", {}),
        ("Model", {"pooling": ["cls", "max"], "dimensions": 50, "normalize": True}),
        ("Model", {"pooling": "mean", "normalize": True}),
        ("ForSequenceClassification", {}),
        ("ForTokenClassification", {}),
    ],
)
def test_graphs_and_eager_give_the_same_bits(
    folders: dict[str, Path], head: str, options: dict, dtype: str
) -> None:
    task = {"Model": "embed", "ForSequenceClassification": "classify"}.get(head, "tag")
    if task != "embed":
        options = {"aggregation": "none", "ignore_labels": ()} if task == "tag" else {}
    captured = load(folders[head], dtype=dtype)
    eager = load(folders[head], dtype=dtype, cuda_graphs=False)
    queue = queue_of(captured)
    for seed in range(30):
        inputs = batch_of(seed, num_texts=1 + seed % 9 * (seed % 3))
        if task == "tag":
            inputs = ["a quick brown fox " * (1 + seed % 5)] * (1 + seed % 4)
        ours, theirs = (getattr(model, task)(inputs, **options) for model in (captured, eager))
        if task == "embed":
            np.testing.assert_array_equal(ours.vectors, theirs.vectors)
        else:
            assert list(ours) == list(theirs)
    assert queue.num_graphs > 0
    assert queue_of(eager).num_graphs == 0


def test_a_batch_beyond_every_bucket_runs(folders: dict[str, Path]) -> None:
    small = load(folders["Model"], token_budget=64)
    large = load(folders["Model"], token_budget=4096)
    queue = queue_of(small)
    inputs = [*batch_of(1, num_texts=4), [7] * 250]
    for _ in range(3):
        ours, theirs = small.embed(inputs).vectors, large.embed(inputs).vectors
        # f16 through two layers; tiles of a GEMM, and so the last bits, depend on its rows.
        assert np.abs(ours - theirs).max() < 2e-2
    assert queue.num_graphs >= 1


def test_lengths_of_one_bucket_do_not_mix(folders: dict[str, Path]) -> None:
    """Padding and what the batch before left behind are never read."""
    model = load(folders["Model"])
    queue_of(model)
    alone = {n: model.embed([[9] * n]).vectors[0] for n in (1, 2, 31, 32)}
    for _ in range(3):
        for n, expected in alone.items():
            np.testing.assert_array_equal(model.embed([[9] * n]).vectors[0], expected)
    assert np.isfinite(model.embed([[9], [9] * 2]).vectors).all()


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_launching_never_waits_for_the_gpu(
    folders: dict[str, Path], task: str, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folders[HEADS[task]], cuda_graphs=cuda_graphs)
    queue_of(model)
    texts = ["a quick [MASK] fox", "the lazy [MASK] dog jumps over"]
    run = getattr(model, task)
    for _ in range(3):  # eager, captured, replayed
        run(texts)
    launch, launched = model._runner.launch, []

    def watched(requests: object, task: object, **options: object) -> object:
        with no_waiting():
            launched.append(launch(requests, task, **options))
        return launched[-1]

    monkeypatch.setattr(model._runner, "launch", watched)
    run(texts)
    assert launched


def test_threads_share_a_model_and_models_a_gpu(folders: dict[str, Path]) -> None:
    models = [load(folders["Model"]) for _ in range(2)]
    queue_of(models[0])
    batches = [batch_of(seed, num_texts=6) for seed in range(5)]
    expected = [models[0].embed(batch).vectors for batch in batches]

    def work(model: Model) -> list[int]:
        return [
            i
            for i in [*range(len(batches))] * 10
            if not np.array_equal(model.embed(batches[i]).vectors, expected[i])
        ]

    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(work, models[i % 2]) for i in range(4)]
    assert [worker.result() for worker in workers] == [[]] * 4


def test_graphs_that_the_garbage_collector_finds_during_a_capture(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their destruction by the thread that captures would end its capture."""
    model = load(folders["Model"])
    capture_begin, gone = torch.cuda.CUDAGraph.capture_begin, load(folders["Model"])
    batch = batch_of(0, num_texts=6)
    expected = [gone.embed(batch).vectors for _ in range(3)][-1]
    assert queue_of(gone).num_graphs == 1
    cycle = [gone]
    cycle.append(cycle)

    def begin(graph: torch.cuda.CUDAGraph, **options: object) -> None:
        nonlocal gone, cycle
        capture_begin(graph, **options)
        gone = cycle = None
        assert len([[] for _ in range(10_000)])  # allocations start the collector

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(3):
            np.testing.assert_array_equal(model.embed(batch).vectors, expected)
    finally:
        gc.set_threshold(*threshold)
    assert queue_of(model).num_graphs == 1


def test_few_graphs_are_kept(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 3)
    model = load(folders["Model"])
    queue = queue_of(model)
    sizes = [20, 40, 75, 90, 100, 120, 130]
    expected = {n: model.embed([[9] * n]).vectors for n in sizes}
    for _ in range(3):
        for n in sizes:
            np.testing.assert_array_equal(model.embed([[9] * n]).vectors, expected[n])
            assert queue.num_graphs <= 3


FREED_MODEL = """
import gc, sys, torch, bytetx
torch.zeros(1, device="cuda")
torch.cuda.empty_cache()
before = torch.cuda.memory_reserved()
gc.disable()  # no cycle holds a model
model = bytetx.load(sys.argv[1], device="cuda", token_budget=1024)
for _ in range(3):
    for n in (20, 100, 250):
        model.embed([[9] * n] * 4)
queue = model._runner._queue
assert not model.transformer.is_capturable or queue.num_graphs == 3
assert torch.cuda.memory_reserved() > before
del model, queue
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == before, (torch.cuda.memory_reserved(), before)
"""


def test_a_model_that_goes_gives_its_memory_back(folders: dict[str, Path]) -> None:
    """In a process of its own: models of other tests go at any time."""
    command = [sys.executable, "-c", FREED_MODEL, str(folders["Model"])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_capture_that_fails_leaves_eager_steps(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(folders["Model"])
    queue = queue_of(model)
    forward = model.transformer.forward

    def waits(batch: object, **options: object) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            batch.cu_seqlens.tolist()
        return forward(batch, **options)

    expected = model.embed([[9] * 20]).vectors
    monkeypatch.setattr(model.transformer, "forward", waits)
    for _ in range(3):
        np.testing.assert_array_equal(model.embed([[9] * 20]).vectors, expected)
    assert queue.num_graphs == 0
    assert caplog.text.count("no CUDA graph for 32 tokens") == 1
    assert torch.rand(9, device="cuda").unique().numel() == 9  # torch's generator is free again
    monkeypatch.undo()
    for _ in range(3):
        model.embed([[9] * 100])
    assert queue.num_graphs == 1


@contextmanager
def memory_limit(room_bytes: int) -> Iterator[None]:
    """This process gets room_bytes more than it has now."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    limit_bytes = torch.cuda.memory_reserved() + room_bytes
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def take_what_is_left(streams: list[torch.cuda.Stream]) -> list[torch.Tensor]:
    """torch keeps the free memory of each stream apart."""
    taken = []
    for stream in streams:
        for num_bytes in (1 << 21, 1 << 19, 1 << 16, 1 << 13, 1 << 9):
            with suppress(torch.OutOfMemoryError), torch.cuda.stream(stream):
                while True:
                    taken.append(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))
    return taken


def test_a_step_beyond_the_memory_is_cut_in_two(folders: dict[str, Path]) -> None:
    model = load(folders["Model"], token_budget=1 << 18)
    queue_of(model)
    inputs = [[7] * 256] * 1024
    few = model.embed(inputs[:4]).vectors
    with memory_limit(model.spec.workspace_bytes(1 << 18, 2) // 4):
        vectors = model.embed(inputs).vectors
    assert np.abs(vectors - few[0]).max() < 2e-2  # as in the batch beyond every bucket
    np.testing.assert_array_equal(model.embed(inputs[:4]).vectors, few)


def test_no_memory_at_all_fails_texts_and_spares_the_process(folders: dict[str, Path]) -> None:
    model = load(folders["Model"], cuda_graphs=False)
    streams = [torch.cuda.current_stream(), queue_of(model)._stream]
    inputs = [[7] * 256] * 6
    expected = model.hidden_states(inputs)
    with memory_limit(0):
        taken = take_what_is_left(streams)
        failed = model.hidden_states(inputs, on_error="return")
        taken += take_what_is_left(streams)
        with pytest.raises(MemoryError, match="text 0 with 256 tokens does not fit the memory of"):
            model.hidden_states(inputs)
    assert all(isinstance(error, DeviceMemoryError) for error in failed)
    assert "cuda:0" in str(failed[0]) and failed.stats.num_errors == 6
    del taken
    np.testing.assert_array_equal(model.hidden_states(inputs), expected)


def test_a_failed_launch_costs_its_step_alone(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folders["Model"], token_budget=256)
    queue_of(model)
    expected = model.embed([[7] * 20]).vectors[0]
    forward = model.transformer.forward

    def broken(batch: object, **options: object) -> torch.Tensor:
        if batch.total_tokens > 200:
            raise RuntimeError("x.cu:9: cudaGetLastError(): invalid configuration argument")
        return forward(batch, **options)

    monkeypatch.setattr(model.transformer, "forward", broken)
    result = model.embed([[7] * 250, [7] * 20], on_error="return")
    assert isinstance(result.errors[0], StepError)
    assert "invalid configuration argument" in str(result.errors[0])
    np.testing.assert_array_equal(result.vectors[1], expected)


def test_a_lost_device_says_to_restart(folders: dict[str, Path]) -> None:
    """In a process of its own: no other test could go on after it."""
    code = f"""
import bytetx, torch
from bytetx.errors import DeviceLostError
model = bytetx.load({str(folders["Model"])!r}, device="cuda")
forward = model.transformer.forward
def broken(batch, **options):
    torch.zeros(2, device="cuda")[torch.full((1,), 9, device="cuda")]
    return forward(batch, **options)
model.transformer.forward = broken
for _ in range(2):
    try:
        model.embed([[7] * 9])
    except DeviceLostError as error:
        assert "restart the process" in str(error), error
        print("lost")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == ["lost", "lost"], run.stderr
