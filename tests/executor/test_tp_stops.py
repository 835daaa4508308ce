"""A rank that is stopped or hangs ends its group, and is named; a short stop ends nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import SENTENCES, save_checkpoint
from other_processes import is_running
from paths import ROOT
from tiny import one_thread, random_ids, save  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.errors import GroupError, InputError
from bytetx.executor import heartbeat, launch, leader
from bytetx.executor.heartbeat import is_stopped
from bytetx.model import Model
from bytetx.parallel.row_scheme import RowScheme

LIMIT_S = 1.0
# Far above the limits, far below the day that a collective may take.
SECONDS = 60.0
WIDER = {"num_attention_heads": 4}

Fault = Callable[[str, int, str], None]


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fault:
    """fault(when, rank, what): what a worker does at its next start, join, load or forward."""
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.setenv("FAULTY_WORKERS", str(folder))
    spawn = leader.spawn
    monkeypatch.setattr(
        leader,
        "spawn",
        lambda size, *, module, **options: spawn(size, module="faulty_workers", **options),
    )
    monkeypatch.setattr(heartbeat, "PATIENCE", 3)
    return lambda when, rank, what: (folder / f"{when}-{rank}").write_text(what) and None


def loaded(folder: Path, tp: int) -> Model:
    return bytetx.load(folder, device="cpu", tp=tp, group_timeout=LIMIT_S)


def assert_over(model: Model, error: str) -> None:
    """Every further call raises the same at once, and nothing is left of the other ranks."""
    workers = model.checkpoint.executor.workers
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(GroupError, match=error):
            model.embed(SENTENCES)
    assert time.monotonic() - started < LIMIT_S
    model.close()
    assert not any(is_running(process.pid) for process in workers._processes)
    assert not workers._folder.exists()
    assert all(channel.fileno() == -1 for channel in workers._channels)
    assert listening() == set()


def listening() -> set[str]:
    """Sockets at which this process listens."""
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in open_fds()}
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    found = {f"socket:[{line.split()[9]}]" for line in lines if line.split()[3] == "0A"}
    return own & found


def open_fds() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


def until_it_fails(do: Callable[[], object], error: str) -> None:
    end = time.monotonic() + SECONDS
    with pytest.raises(GroupError, match=error):
        while time.monotonic() < end:
            do()


@pytest.mark.parametrize("tp", [2, 3])
def test_a_stopped_rank_at_rest(tp: int, tmp_path: Path) -> None:
    model = loaded(save_checkpoint(tmp_path, "bert", num_attention_heads=6, hidden_size=48), tp)
    model.embed(SENTENCES)
    workers = model.checkpoint.executor.workers
    process = workers._processes[-1]
    process.send_signal(signal.SIGSTOP)
    assert workers._has_ended.wait(SECONDS)  # without a call
    error = (
        rf"rank {tp - 1} \(process {process.pid}\) is stopped .* for 1 s, .* load the model again"
    )
    assert_over(model, error)


@pytest.mark.parametrize("what", ["embed", "generate"])
def test_a_stopped_rank_that_others_wait_for(what: str, fault: Fault, tmp_path: Path) -> None:
    tp = {"embed": 3, "generate": 2}[what]
    if what == "embed":
        folder = save_checkpoint(tmp_path / "m", "bert", num_attention_heads=6, hidden_size=48)
        model = loaded(folder, tp)
        do = partial(model.embed, SENTENCES)
    else:
        model = loaded(save(tiny_decoder("llama"), tmp_path / "m"), tp)
        do = partial(model.generate, random_ids([9, 20, 3]))
    do()
    fault("forward", tp - 1, "stop")
    until_it_fails(do, rf"rank {tp - 1} \(process \d+\) is stopped")
    if what == "embed":
        assert_over(model, rf"rank {tp - 1} \(process \d+\) is stopped")
    model.close()


@pytest.mark.parametrize("when", ["start", "join", "load"])
def test_a_rank_that_is_stopped_while_the_model_loads(
    when: str, fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = []
    monkeypatch.setattr(launch, "Workers", recorded(groups, launch.Workers))
    tp = 3 if when == "load" else 2
    fault(when, tp - 1, "stop")
    folder = save_checkpoint(tmp_path / "m", "bert", num_attention_heads=6, hidden_size=48)
    started = time.monotonic()
    with pytest.raises(GroupError, match=rf"rank {tp - 1} \(process \d+\) is stopped"):
        loaded(folder, tp)
    assert time.monotonic() - started < SECONDS
    (workers,) = groups
    assert not any(is_running(process.pid) for process in workers._processes)
    assert not workers._folder.exists()


def recorded(found: list[object], kind: type) -> Callable[..., object]:
    def make(*arguments: object, **options: object) -> object:
        found.append(kind(*arguments, **options))
        return found[-1]

    return make


def test_a_rank_that_hangs_is_named(fault: Fault, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "m", "bert", num_attention_heads=6, hidden_size=48)
    model = loaded(folder, 3)
    model.embed(SENTENCES)
    fault("forward", 2, "hang")
    error = r"^rank 2 \(process \d+\) made no progress for \d+ s"
    until_it_fails(partial(model.embed, SENTENCES), error)
    assert_over(model, error)


def test_short_stops_and_a_held_lock_end_nothing(fault: Fault, tmp_path: Path) -> None:
    """Python's lock is held for longer than the limit by a rank that runs."""
    model = loaded(save_checkpoint(tmp_path / "m", "bert", **WIDER), 2)
    wanted = model.embed(SENTENCES)
    process = model.checkpoint.executor.workers._processes[0]
    process.send_signal(signal.SIGSTOP)
    threading.Timer(0.3 * LIMIT_S, lambda: process.send_signal(signal.SIGCONT)).start()
    assert np.array_equal(model.embed(SENTENCES), wanted)
    fault("forward", 1, "hold")
    assert np.array_equal(model.embed(SENTENCES), wanted)
    model.close()
    assert process.poll() == 0


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    ("what", "dtype"),
    [
        ("stop", "float32"),
        ("stop", "bfloat16"),
        ("hang", "float32"),
        ("hang on the GPU", "float32"),
    ],
)
def test_gpu_ranks_that_stop_or_hang(what: str, dtype: str, fault: Fault, tmp_path: Path) -> None:
    """With NCCL, and with the fused ops, whose kernels wait for ten seconds at most and then trap.

    The limits are shorter than that, and longer than graphs, handles and imports take.
    """
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    folder = save_checkpoint(tmp_path / "m", "bert", **sizes)
    model = bytetx.load(folder, device="cuda", dtype=dtype, tp=2, group_timeout=5)
    wanted = model.embed(SENTENCES)
    fault("forward", 1, what)
    error = r"rank 1 \(process \d+\) (is stopped|made no progress)|timed out waiting for rank 1"
    until_it_fails(partial(model.embed, SENTENCES), error)
    assert not any(is_running(p.pid) for p in model.checkpoint.executor.workers._processes)
    model.close()
    with bytetx.load(folder, device="cuda", dtype=dtype, tp=2) as again:  # the device has survived
        assert np.allclose(again.embed(SENTENCES), wanted, atol=1e-3)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("what", ["stop", "hang", "hang on the GPU"])
def test_ranks_on_one_gpu_that_stop_or_hang(what: str, fault: Fault, tmp_path: Path) -> None:
    """One rank more than there are GPUs: fused ops, and gloo for what is not fused."""
    folder = save_checkpoint(tmp_path / "m", "bert", hidden_size=256, num_attention_heads=4)
    size, device = torch.cuda.device_count() + 1, torch.device("cuda", 0)
    options = {"shared_bytes": 64 << 20, "rows": RowScheme(64, ((256, 64), (0, 16)))}
    workers, group = leader.start_ranks(size, device, group_timeout=5, **options)
    checkpoint = leader.load_on_ranks(folder, group, workers, dtype=torch.bfloat16)
    model = Model(checkpoint, cuda_graphs=False)  # gloo's collectives are no graph's
    wanted = model.embed(SENTENCES)
    fault("forward", 1, what)
    error = r"rank 1 \(process \d+\) (is stopped|made no progress)|timed out waiting for rank 1"
    until_it_fails(partial(model.embed, SENTENCES), error)
    assert not any(is_running(process.pid) for process in workers._processes)
    model.close()
    with bytetx.load(folder, device="cuda", dtype="bfloat16") as again:  # the device has survived
        assert np.allclose(again.embed(SENTENCES), wanted, atol=0.05)


SCRIPT = """
import bytetx, sys
model = bytetx.load(sys.argv[1], device="cpu", tp=2, group_timeout=1)
print(model.checkpoint.executor.workers._processes[0].pid, flush=True)
for line in sys.stdin:
    print(len(model.embed([line])), flush=True)
"""


@pytest.fixture
def rank_0(tmp_path: Path) -> subprocess.Popen[str]:
    folder = save_checkpoint(tmp_path, "bert", **WIDER)
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        yield process
        process.kill()


def test_a_stopped_rank_0_goes_on_with_its_workers(rank_0: subprocess.Popen[str]) -> None:
    """However long it was stopped; its workers wait."""
    worker = int(rank_0.stdout.readline())
    rank_0.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        rank_0.wait(2.5 * LIMIT_S)
    assert is_running(worker)
    rank_0.send_signal(signal.SIGCONT)
    print("a text", file=rank_0.stdin, flush=True)
    assert rank_0.stdout.readline() == "1\n"


def until_stopped(pid: int) -> None:
    """Until every thread is stopped."""
    end = time.monotonic() + SECONDS
    while not all(is_stopped(int(thread.name)) for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_stopped_workers_end_with_rank_0(rank_0: subprocess.Popen[str]) -> None:
    """The kernel continues and ends a stopped process group that loses its last parent.

    The wait matters: SIGSTOP takes effect after the call that sends it has returned.
    """
    worker = int(rank_0.stdout.readline())
    os.kill(worker, signal.SIGSTOP)
    until_stopped(worker)
    rank_0.kill()
    rank_0.wait()
    end = time.monotonic() + SECONDS
    while is_running(worker) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(worker)


@pytest.mark.parametrize("given", [0, -1, 0.5, float("nan"), "30", True, None])
def test_group_timeout_is_seconds(given: object, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "bert")
    with pytest.raises(InputError, match="group_timeout must be at least 1 .seconds., got"):
        bytetx.load(folder, device="cpu", group_timeout=given)
