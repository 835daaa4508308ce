"""A rank that dies or fails takes its group down at once, and says so; shards hold shares alone."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import SENTENCES, make_tokenizer, save_checkpoint
from other_processes import is_running
from paths import ROOT
from tiny import one_thread, random_ids, save, tiny_model  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.checkpoint import saved_tensor
from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import CheckpointError, GroupError, InputError
from bytetx.executor.channel import Channel
from bytetx.executor.control import FAILED, Workers
from bytetx.executor.leader import load_on_ranks, start_ranks
from bytetx.model import Model
from bytetx.nn.loading import load_shard, load_spec
from bytetx.nn.sharded_blocks import ShardedBlocks
from bytetx.ops.comm_workspace import Workspace
from bytetx.parallel.layout import shard_model
from bytetx.parallel.row_scheme import row_scheme
from bytetx.parallel.tp import TpGroup

# Far above what a group needs to end (about a second), far below any timeout of a collective.
SECONDS = 20.0
WIDER = {"num_attention_heads": 4}


def shared_model(folder: Path, size: int) -> tuple[Model, Workers]:
    workers, group = start_ranks(size, torch.device("cpu"))
    checkpoint = load_on_ranks(folder, group, workers, dtype=torch.float32)
    return Model(checkpoint, token_budget=64), workers


def test_a_killed_rank_ends_the_group_while_it_works(tmp_path: Path) -> None:
    model, workers = shared_model(save(tiny_decoder("llama"), tmp_path), 2)
    prompts = random_ids([9, 20, 3] * 4)
    process = workers._processes[0]
    killer = threading.Timer(0.5, lambda: process.send_signal(signal.SIGKILL))
    killer.start()
    end = time.monotonic() + SECONDS
    with pytest.raises(GroupError, match="rank 1 was killed by SIGKILL; .* load the model again"):
        while time.monotonic() < end:
            model.generate(prompts)
    with pytest.raises(GroupError, match="rank 1 was killed by SIGKILL"):
        model.generate(prompts)
    assert all(process.poll() is not None for process in workers._processes)
    workers.close()


def test_the_death_of_one_rank_is_not_blamed_on_the_others(tmp_path: Path) -> None:
    model, workers = shared_model(save_checkpoint(tmp_path, "bert", **WIDER), 4)
    assert len(model.embed(SENTENCES)) == len(SENTENCES)
    workers._processes[1].send_signal(signal.SIGKILL)
    end = time.monotonic() + SECONDS
    with pytest.raises(GroupError, match="rank 2 was killed by SIGKILL"):
        while time.monotonic() < end:
            model.embed(SENTENCES)
    workers.close()


def test_a_rank_that_fails_says_why(tmp_path: Path) -> None:
    model, workers = shared_model(save_checkpoint(tmp_path, "bert", **WIDER), 2)
    workers.send(b"nonsense")
    end = time.monotonic() + SECONDS
    with pytest.raises(GroupError, match="rank 1 failed: ValueError: no message begins with b'n'"):
        while time.monotonic() < end:
            model.embed(SENTENCES)
    workers.close()


def test_an_error_is_no_answer() -> None:
    """A wait for replies raises the failure of a rank."""
    ours, theirs = map(Channel, socket.socketpair())
    workers = Workers([ours], [])
    theirs.send(FAILED, b"the disk is full")
    with pytest.raises(GroupError, match="rank 1 failed: the disk is full"):
        workers.wait_for_replies()
    workers.close()


def test_a_failure_of_rank_0_ends_the_group(tmp_path: Path) -> None:
    """Its steps are out of step with the others' from then on."""
    model, workers = shared_model(save_checkpoint(tmp_path, "bert", **WIDER), 2)
    model.transformer.layers.weights[1] = None
    with pytest.raises(GroupError, match="rank 0 failed, .*: AttributeError: 'NoneType'"):
        model.embed(SENTENCES)
    with pytest.raises(GroupError, match="rank 0 failed"):
        model.embed(SENTENCES)
    assert workers._processes[0].poll() is not None
    workers.close()


def test_an_expired_wait_is_the_reason(tmp_path: Path) -> None:
    """A kernel leaves who waited for whom; nothing else on that rank's side says so."""
    model, workers = shared_model(save_checkpoint(tmp_path, "bert", **WIDER), 2)
    executor, fault = model.checkpoint.executor, torch.tensor([1, 0, 1, 17, 4, 5, 0, 0])
    workspace = Workspace((), (), 0, 0, fault, None, fault)
    executor.group = replace(executor.group, workspace=workspace)
    with pytest.raises(GroupError, match="rank 0 timed out waiting for rank 1: flag 17 is 4, exp"):
        model.embed(SENTENCES)
    assert workers._processes[0].poll() is not None
    workers.close()


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    folder = save(tiny_model("bert", **WIDER), tmp_path)
    code = (
        "import bytetx, sys, time\n"
        f"model = bytetx.load({str(folder)!r}, device='cpu', tp=2)\n"
        "process = model.checkpoint.executor.workers._processes[0]\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    pid = int(process.stdout.readline())
    assert is_running(pid)
    process.kill()
    process.wait()
    end = time.monotonic() + SECONDS
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(pid)
    process.stdout.close()


def test_load_close_and_what_cannot_be_split(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "bert", **WIDER)
    wanted = bytetx.load(folder, device="cpu").embed(SENTENCES)
    with bytetx.load(folder, device="cpu", tp=2) as model:
        processes = model.checkpoint.executor.workers._processes
        assert np.allclose(model.embed(SENTENCES), wanted, atol=1e-4)
        assert model.info()["tp"] == 2
        assert len(processes) == 1 and processes[0].poll() is None
    assert processes[0].poll() == 0
    with pytest.raises(GroupError, match="the model is closed"):
        model.embed(SENTENCES)
    with pytest.raises(InputError, match="tp must be one of 1 ... 4 for a model of 4 attention"):
        bytetx.load(folder, device="cpu", tp=5)
    with pytest.raises(InputError, match="tp must be a positive integer, got 0"):
        bytetx.load(folder, device="cpu", tp=0)


def test_a_damaged_checkpoint_is_a_checkpoint_error(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "bert", **WIDER)
    os.truncate(folder / "model.safetensors", 4000)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        bytetx.load(folder, device="cpu", tp=2)


@pytest.mark.parametrize("launcher", ["--tp", "torchrun"])
def test_the_command_line(launcher: str, tmp_path: Path) -> None:
    folder = save(tiny_decoder("llama", vocab_size=400), tmp_path / "model")
    make_tokenizer("bpe").save_pretrained(folder)
    (tmp_path / "in.txt").write_text("\n".join(SENTENCES[:3]))
    command = ["-m", "bytetx", "generate", str(tmp_path / "in.txt"), "-m", str(folder)]
    command += ["--device", "cpu", "--temperature", "0", "--max-tokens", "5", "--threads", "1"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    shared = [*torchrun, *command] if launcher == "torchrun" else [*command, "--tp", "2"]
    # torchrun releases its free port before a rank binds it: another process may take it.
    together = run_python(shared, attempts=2 if launcher == "torchrun" else 1)
    assert together.count(b"\n") == 3
    assert together == run_python(command)


def run_python(arguments: list[str], *, attempts: int = 1) -> bytes:
    """Return what it prints; where it fails, its errors are the test's."""
    command = [sys.executable, *arguments]
    for _ in range(attempts):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300)
        if done.returncode == 0:
            return done.stdout
        print(done.stderr.decode(errors="replace"))
    pytest.fail(f"exit code {done.returncode}")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_reads_its_share_alone(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor in memory is larger than the largest share of one, and they add up to the model."""
    wide = {"hidden_size": 256, "num_attention_heads": 8, "vocab_size": 4096}
    if name == "bert":
        model = tiny_model(name, "ForMaskedLM", intermediate_size=1024, **wide)
    elif name == "gpt2":
        model = tiny_decoder(name, n_embd=256, n_head=8, vocab_size=4096)
    else:
        model = tiny_decoder(name, intermediate_size=1024, num_key_value_heads=8, **wide)
    folder, size, sizes = save(model, tmp_path), 4, []
    allocate, staged = saved_tensor._allocate, saved_tensor.SavedTensor._staged

    def tracked(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        sizes.append(int(np.prod(shape)))
        return allocate(shape, dtype)

    def tracked_piece(
        self: saved_tensor.SavedTensor, file: object, shape: tuple[int, ...]
    ) -> torch.Tensor:
        assert np.prod(shape) <= saved_tensor._PIECE_NUMBERS
        return staged(self, file, shape)

    monkeypatch.setattr(saved_tensor, "_allocate", tracked)
    monkeypatch.setattr(saved_tensor.SavedTensor, "_staged", tracked_piece)
    monkeypatch.setattr(saved_tensor, "_PIECE_NUMBERS", 8192)
    transformer, _ = load_shard(
        folder, blocks_of(load_spec(folder), 1, size), dtype=dtype, device=torch.device("cpu")
    )
    largest = max(p.numel() for p in model.parameters())
    assert largest == 4096 * 256
    assert max(sizes) == largest // size
    # Every rank has all norms, positions, biases of sums and small layers of heads;
    # a masked-LM head reads the words that are tied to it a second time.
    share = sum(p.numel() for p in model.parameters() if p.dim() == 2) / size
    head = 256 * 256 + largest / size if name == "bert" else 0
    assert sum(sizes) < 1.2 * share + head + 200 * 256
    assert transformer.blocks.num_heads == 2


def blocks_of(spec: ModelSpec, rank: int, size: int) -> ShardedBlocks:
    """A rank's blocks without a group: enough to load."""
    group = TpGroup(rank, size, torch.device("cpu"), None, None, row_scheme("cpu", size))
    return ShardedBlocks(spec, group, shard_model(spec, rank=rank, size=size))
