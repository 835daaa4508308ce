"""Where a group listens, and what strangers can do there: nothing is unpickled, nothing hangs."""

import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from multiprocessing.connection import Listener
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import SENTENCES, make_tokenizer, save_checkpoint
from other_processes import Bomb
from paths import ROOT
from tiny import one_thread, random_ids, save  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.errors import GroupError, InputError
from bytetx.executor import torchrun
from bytetx.executor.channel import Channel
from bytetx.executor.control import UNKNOWN_CODE, Workers
from bytetx.executor.launch import new_rendezvous_folder
from bytetx.executor.leader import load_on_ranks, start_ranks
from bytetx.executor.torchrun import TorchrunLeader, TorchrunRank, torchrun_rank
from bytetx.model import Model
from bytetx.parallel.row_scheme import RowScheme

SECONDS = 60.0
LOOPBACK = ("127.", "::1")
LISTENS = "0A"


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket at which processes listen."""
    inodes = {inode for pid in pids for inode in socket_inodes(pid)}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and rest[5] in inodes:
                address, port = local.split(":")
                words = [address[i : i + 8] for i in range(0, len(address), 8)]
                packed = b"".join(struct.pack("=I", int(word, 16)) for word in words)
                found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def listening_unix(pids: Iterable[int]) -> set[str]:
    """Names of the unix sockets at which processes listen, but for that of NVIDIA's driver."""
    inodes = {inode for pid in pids for inode in socket_inodes(pid)}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    accepts = 0x10000
    names = {
        " ".join(line[7:]) for line in lines if int(line[3], 16) & accepts and line[6] in inodes
    }
    return {name for name in names if not name.startswith("@cuda-uvmfd-")}


def socket_inodes(pid: int) -> Iterator[str]:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue  # it was closed meanwhile
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    folder = save(tiny_decoder("llama"), tmp_path / "model")
    before = listening([os.getpid()])
    with bytetx.load(folder, device="cpu", tp=2) as model:
        yield model
    assert listening([os.getpid()]) == before


def pids_of(model: Model) -> list[int]:
    processes = model.checkpoint.executor.workers._processes
    return [os.getpid(), *(process.pid for process in processes)]


def test_every_socket_is_on_loopback_at_rest_and_while_it_generates(model: Model) -> None:
    pids, found = pids_of(model), []
    found.append(listening(pids))
    done = threading.Event()

    def poll() -> None:
        while not done.is_set():
            found.append(listening(pids))

    polling = threading.Thread(target=poll)
    polling.start()
    model.generate(random_ids([9, 20, 3]))
    done.set()
    polling.join()
    assert len(found) > 1 and found[0]  # gloo's
    for address, _ in set().union(*found):
        assert address.startswith(LOOPBACK), address
    assert listening_unix(pids) == set()


@pytest.mark.gpus(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_socket_of_gpu_ranks_is_on_loopback(dtype: str, tmp_path: Path) -> None:
    """NCCL's, and those of torch's symmetric memory."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    folder = save(tiny_decoder("llama", num_key_value_heads=2, **sizes), tmp_path)
    before = listening([os.getpid()])
    with bytetx.load(folder, device="cuda", dtype=dtype, tp=2) as model:
        model.generate(random_ids([9, 20, 3]))
        found = listening(pids_of(model)) - before
        print(found, listening_unix(pids_of(model)))
        assert all(address.startswith(LOOPBACK) for address, _ in found), found
    assert "NCCL_SOCKET_IFNAME" not in os.environ


@pytest.mark.gpus(1)
def test_every_socket_of_ranks_that_share_a_gpu_is_on_loopback(tmp_path: Path) -> None:
    """Gloo's, and those that pass memory from process to process."""
    folder = save_checkpoint(tmp_path, "bert", hidden_size=256, num_attention_heads=4)
    before = listening([os.getpid()])
    size, device = torch.cuda.device_count() + 1, torch.device("cuda", 0)
    rows = RowScheme(64, ((256, 64), (0, 16)))
    workers, group = start_ranks(size, device, shared_bytes=64 << 20, rows=rows)
    checkpoint = load_on_ranks(folder, group, workers, dtype=torch.bfloat16)
    with Model(checkpoint, cuda_graphs=False) as model:
        model.embed(SENTENCES)
        found = listening(pids_of(model)) - before
        assert all(address.startswith(LOOPBACK) for address, _ in found), found


def test_strangers_at_every_port_do_no_harm(model: Model, tmp_path: Path) -> None:
    """Garbage, half a message, nothing, a pickle that writes a file."""
    prompts, bomb = random_ids([9, 20, 3]), pickle.dumps(Bomb(tmp_path / "written"))
    wanted = [answer.token_ids for answer in greedy(model, prompts)]
    framed = struct.pack("!i", len(bomb)) + bomb  # as multiprocessing's connections send it
    payloads = (b"", b"\0", b"\xff" * 5000, bomb, framed, framed[:20], b"GET / HTTP/1.1\r\n\r\n")
    connections = []
    for address in listening(pids_of(model)):
        for payload in payloads:
            connections.append(socket.create_connection(address, timeout=SECONDS))
            connections[-1].sendall(payload)
    assert connections
    assert [answer.token_ids for answer in greedy(model, prompts)] == wanted
    for connection in connections:
        connection.close()
    assert [answer.token_ids for answer in greedy(model, prompts)] == wanted
    assert not (tmp_path / "written").exists()


def greedy(model: Model, prompts: list[list[int]]) -> list[object]:
    params = bytetx.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return list(model.generate(prompts, params))


def torchrun_variables(rank: int, port: int, size: int = 2) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "a-test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@pytest.fixture
def poisoned_store(tmp_path: Path) -> Iterator[dist.TCPStore]:
    """A store as torchrun's, in which an attacker has set the address of rank 0.

    Who connects to it is sent a pickle that writes a file.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    key = bytes(32)
    listener = Listener(str(tmp_path / "attacker"), authkey=key)
    text = f'["{tmp_path / "attacker"}", "{key.hex()}"]'
    for name in ("control", "bytetx-0/control"):
        store.set(name, text)

    def serve() -> None:
        while True:
            try:
                connection = listener.accept()
                connection.recv_bytes()
                connection.send(Bomb(tmp_path / "written"))
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    yield store
    listener.close()


class Ended:
    """In place of the process of a rank that is a thread of this one."""

    def __init__(self, pid: int):
        self.pid = pid

    def poll(self) -> int:
        return UNKNOWN_CODE

    def wait(self, timeout: float | None = None) -> int:
        return UNKNOWN_CODE


def test_torchrun_ranks_take_no_address_from_the_store(
    poisoned_store: dist.TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 comes first, finds the attacker's address only, and waits for rank 0.

    Rank 2 comes last, so that the rendezvous is open until strangers have connected.
    """
    monkeypatch.setattr(torchrun, "_TorchrunProcess", Ended)
    variables = (torchrun_variables(rank, poisoned_store.port, size=3) for rank in range(3))
    (leader_rank, *ranks), found = map(torchrun_rank, variables), []
    threads = [
        threading.Thread(target=lambda rank=rank: found.append(rank.connect()), daemon=True)
        for rank in ranks
    ]
    threads[0].start()
    threads[0].join(0.5)
    leader = TorchrunLeader(leader_rank)
    with socket.socket(socket.AF_UNIX) as garbage, socket.socket(socket.AF_UNIX) as silent:
        for connection in (garbage, silent):
            connection.connect(leader_rank.address)
        garbage.sendall(pickle.dumps(Bomb(tmp_path / "written")))
        threads[1].start()
        workers, store = leader.workers()
    for thread in threads:
        thread.join(SECONDS)
    assert len(found) == 2 and None not in found and not (tmp_path / "written").exists()
    assert store.timeout <= timedelta(minutes=2)
    for connection, _ in found:
        connection.reply()
    workers.wait_for_replies()
    workers.close()
    for connection, _ in found:
        assert connection.receive(lambda: None) is None


def test_a_job_of_torchrun_with_a_poisoned_store(
    poisoned_store: dist.TCPStore, tmp_path: Path
) -> None:
    folder = save(tiny_decoder("llama", vocab_size=400), tmp_path / "model")
    make_tokenizer("bpe").save_pretrained(folder)
    (tmp_path / "in.txt").write_text("\n".join(SENTENCES[:3]))
    command = [sys.executable, "-m", "bytetx", "generate", str(tmp_path / "in.txt"), "-m"]
    command += [str(folder), "--device", "cpu", "--temperature", "0", "--max-tokens", "5"]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | torchrun_variables(rank, poisoned_store.port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in (1, 0)
    ]
    (other, other_errors), (answers, errors) = (p.communicate(timeout=300) for p in ranks)
    assert not (tmp_path / "written").exists()
    assert [p.returncode for p in ranks] == [0, 0], (errors, other_errors)
    assert answers.count(b"\n") == 3 and not other


def test_ranks_that_are_never_used_end() -> None:
    ranks = [TorchrunRank(rank, 2, f"never-connected-{os.getpid()}") for rank in (0, 1)]
    leader, found = TorchrunLeader(ranks[0]), []
    worker = threading.Thread(target=lambda: found.append(ranks[1].connect()))
    worker.start()
    leader.close()
    worker.join(SECONDS)
    assert found == [None]


def test_a_socket_that_is_taken_is_an_error() -> None:
    rank = TorchrunRank(0, 2, f"taken-{os.getpid()}")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(rank.address)
        with pytest.raises(InputError, match="another process holds the socket of torchrun"):
            TorchrunLeader(rank)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_users_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 0, and as a worker."""
    monkeypatch.setattr(torchrun, "RENDEZVOUS_TIMEOUT", timedelta(seconds=1))
    ranks = [TorchrunRank(rank, 2, f"refused-{os.getpid()}") for rank in (0, 1)]
    leader = TorchrunLeader(ranks[0])
    hello = struct.pack("<BII", 0, 4, 1)
    says = f"s.connect({ranks[0].address!r}); s.sendall({hello!r}); assert not s.recv(1)"
    as_nobody(says).wait(SECONDS)
    with pytest.raises(GroupError, match="1 of torchrun's 2 ranks did not connect within 1 s: 1"):
        leader.workers()
    listens = f"s.bind({ranks[0].address!r}); s.listen(); print(flush=True); s.accept()"
    with as_nobody(listens) as impostor:
        impostor.stdout.readline()
        with pytest.raises(GroupError, match="another user's process holds the socket"):
            ranks[1].connect()
        impostor.wait(SECONDS)


def as_nobody(code: str) -> subprocess.Popen[bytes]:
    code = f"import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); {code}"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd="/")


def test_ranks_of_one_job_have_one_name() -> None:
    first = torchrun_rank(torchrun_variables(0, 29500))
    assert first.name == torchrun_rank(torchrun_variables(1, 29500)).name
    assert first.name != torchrun_rank(torchrun_variables(1, 29501)).name
    again = torchrun_variables(1, 29500) | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert first.name != torchrun_rank(again).name
    with pytest.raises(InputError, match="all ranks of a model must be on one"):
        torchrun_rank(torchrun_variables(0, 29500) | {"LOCAL_WORLD_SIZE": "1"})


def test_an_invalid_reply_of_a_worker_ends_the_group() -> None:
    for data in (b"\xff" * 64, struct.pack("<BI", 5, 3) + b"abc", struct.pack("<BI", 99, 0)):
        ours, theirs = socket.socketpair()
        workers = Workers([Channel(ours)], [])
        theirs.sendall(data)
        with pytest.raises(GroupError, match="rank 1 sent an invalid reply"):
            workers.wait_for_replies()
        workers.close()
        theirs.close()


def test_the_rendezvous_folder_is_private_and_removed_afterwards(model: Model) -> None:
    folder = new_rendezvous_folder()
    assert folder.stat().st_mode & 0o777 == 0o700 and folder.stat().st_uid == os.getuid()
    folder.rmdir()
    used = model.checkpoint.executor.workers._folder
    assert used.parent == folder.parent and not used.exists()


def test_the_command_line_takes_a_timeout(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "bert", num_attention_heads=4)
    (tmp_path / "in.txt").write_text("a text\n")
    command = [sys.executable, "-m", "bytetx", "embed", str(tmp_path / "in.txt"), "-m", str(folder)]
    command += ["--device", "cpu", "--tp", "2", "--threads", "1", "-o", str(tmp_path / "out.npy")]
    done = subprocess.run([*command, "--group-timeout", "0"], cwd=ROOT, capture_output=True)
    assert done.returncode == 2 and b"--group-timeout" in done.stderr
    done = subprocess.run([*command, "--group-timeout", "60"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr
