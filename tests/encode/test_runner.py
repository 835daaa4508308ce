"""Steps that fail: cut in two where memory is short, and told by op, shapes and remedy."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.buckets import Bucket
from bytetx.cli import commands as cli
from bytetx.encode.cuda_queue import encode_layout
from bytetx.encode.model_runner import StartedPass, step_error
from bytetx.encode.request import Requests
from bytetx.encode.step import Step
from bytetx.errors import DeviceLostError, DeviceMemoryError, InputError, StepError
from bytetx.model import Model
from bytetx.ops import host
from bytetx.ops.linear import linear, prepare_linear
from bytetx.packed import pack
from bytetx.runtime import faults

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def model(folder: Path) -> Model:
    return bytetx.load(folder, device="cpu", token_budget=64)


def some_ids(num_texts: int) -> list[list[int]]:
    return [[5 + i % 50] * (1 + 7 * i % 12) for i in range(num_texts)]


def limit_memory(model: Model, monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> list[int]:
    """A forward pass of more tokens runs out of memory; the list gets the sizes that ran."""
    forward, ran = model.transformer.forward, []

    def limited(batch: object, **options: object) -> torch.Tensor:
        if batch.total_tokens > max_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        ran.append(batch.total_tokens)
        return forward(batch, **options)

    monkeypatch.setattr(model.transformer, "forward", limited)
    return ran


@pytest.mark.parametrize("task", ["embed", "hidden_states"])
def test_a_step_beyond_the_memory_is_cut_in_two(
    model: Model, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    inputs = some_ids(40)
    expected = list(getattr(model, task)(inputs))
    ran = limit_memory(model, monkeypatch, max_tokens=20)
    for ours, theirs in zip(getattr(model, task)(inputs), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert max(ran) <= 20 and len(ran) > 10


def test_a_text_beyond_the_memory_fails_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [[5] * 4, [6] * 30, [7] * 9]
    expected = model.embed(inputs).vectors
    limit_memory(model, monkeypatch, max_tokens=20)
    with pytest.raises(MemoryError, match="text 1 with 30 tokens does not fit the memory of cpu"):
        model.embed(inputs)
    ours = model.embed(inputs, on_error="return")
    np.testing.assert_array_equal(ours.vectors[[0, 2]], expected[[0, 2]])
    assert np.isnan(ours.vectors[1]).all()
    assert ours.stats.num_errors == 1
    assert isinstance(ours.errors[1], DeviceMemoryError)
    states = model.hidden_states(inputs, on_error="return")
    assert isinstance(states[1], DeviceMemoryError) and states[2].shape[1] == 9


def test_no_text_fits(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memory(model, monkeypatch, max_tokens=0)
    results = model.hidden_states(some_ids(20), on_error="return")
    assert all(isinstance(result, DeviceMemoryError) for result in results)


def test_a_failure_holds_nothing_of_its_step(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit_memory(model, monkeypatch, max_tokens=20)
    with caplog.at_level(logging.DEBUG, logger="bytetx"):
        error = model.embed([[5] * 4, [6] * 30], on_error="return").errors[1]
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert error.__cause__.__traceback__ is None
    assert "in limited" in caplog.text  # the whole traceback, where it is asked for


def failed_linear() -> RuntimeError:
    """An error of a kernel, with the frames of a real call."""
    weight = prepare_linear(torch.zeros(4, 8), prepack=False)

    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("linear.cu:90: cudaGetLastError(): invalid configuration argument")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bytetx.ops.linear._rows_for_onednn", broken)
        with pytest.raises(RuntimeError) as raised:
            linear(torch.zeros(3, 8), weight)
    return raised.value


def requests(num_texts: int = 3) -> Requests:
    ids = np.arange(2 * num_texts, dtype=np.int32)
    is_truncated = np.zeros(num_texts, dtype=bool)
    return Requests(np.arange(num_texts), np.full(num_texts, 2, np.int32), ids, is_truncated)


def test_a_failed_kernel_is_named_with_its_shapes() -> None:
    error = failed_linear()
    where = faults.failed_op(error)
    assert where == "in linear(x float32 [3, 8] on cpu, w [4, 8])"
    failure = step_error(error, requests(), CUDA, where=where)
    assert isinstance(failure, StepError) and isinstance(failure, InputError)
    for part in ("cuda:0", "3 texts with 6 tokens", where, "invalid configuration", "cuda_graphs"):
        assert part in str(failure)


def test_blame_lets_go_of_the_activations() -> None:
    error = failed_linear()
    faults.failed_op(error)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "linear":
            assert "x" not in trace.tb_frame.f_locals
        trace = trace.tb_next


def test_errors_of_our_own_are_not_the_devices() -> None:
    for error in (NotImplementedError("x"), RecursionError("x"), ValueError("x")):
        assert not faults.is_of_device(error, CUDA)
    assert faults.is_of_device(RuntimeError("CUDA error: invalid argument"), CUDA)
    assert not faults.is_of_device(RuntimeError("x"), torch.device("cpu"))
    for text in (
        "can't allocate memory",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    ):
        assert faults.is_out_of_memory(RuntimeError(text))


def test_a_lost_device_says_to_restart() -> None:
    class Dead:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    part = StartedPass(Step(requests(), pack([[1, 2]] * 3), None), (), CUDA, Dead())
    with pytest.raises(DeviceLostError, match=r"cuda:0 failed .* 3 texts .*illegal.* restart the"):
        part.outputs()


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("has_types", [True, False])
def test_a_block_holds_a_padded_step(
    has_types: bool, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host.write_step_block() is not None
    if not is_native:
        monkeypatch.setattr(host, "write_step_block", lambda: None)
    ids = [[5, 6, 7], [], [1, 9]]  # 1 is a pad token where positions begin at 2
    types = [[0, 1, 1], [], [1, 0]] if has_types else None
    batch = pack(ids, token_type_ids=types, has_token_types=has_types, position_offset=2)
    columns = Requests(
        np.arange(3),
        np.array([3, 0, 2], np.int32),
        np.array([5, 6, 7, 1, 9], np.int32),
        np.zeros(3, bool),
        np.array([0, 1, 1, 1, 0], np.int32),
        prompt_tokens=np.array([1, 0, 2], np.int32),
    )
    step = Step(columns, batch, None)
    bucket = Bucket(96, num_texts=4, num_fillers=2)
    layout = encode_layout(bucket, has_token_types=has_types, position_offset=2)
    block = np.full(layout.num_ints, -1, dtype=np.int32)
    layout.write(block, columns)
    padded = layout.read(torch.from_numpy(block), step, max_seqlen=96)
    assert padded.batch.cu_seqlens.tolist() == [0, 3, 3, 5, 5, 69, 96]
    assert padded.prompt_tokens.tolist() == [1, 0, 2, 0, 0, 0]
    for name in ("input_ids", "position_ids", "token_type_ids"):
        ours, theirs = getattr(padded.batch, name), getattr(batch, name)
        if theirs is None:
            assert ours is None
            continue
        assert ours.shape == (96,) and ours.data_ptr() % 16 == block.ctypes.data % 16
        assert ours[:5].tolist() == theirs.tolist() and not ours[5:].any()


def test_the_command_line_tells_of_a_lost_device_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(*args: object, **options: object) -> None:
        raise faults.lost_error(RuntimeError("CUDA error: unspecified\nmore"), 3, CUDA)

    monkeypatch.setattr(cli, "_named", lambda arguments: app)
    with pytest.raises(SystemExit, match="1"):
        cli.main(["info"])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "restart the process" in lines[0]
