"""The workers of a tensor-parallel group: each runs, on its shard, what rank 0 asks for."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from bytetx.checkpoint.families import read_families
from bytetx.errors import GroupError
from bytetx.executor.control import LeaderConnection
from bytetx.executor.decode_worker import DecodeRunner
from bytetx.executor.launch import connect_to_leader, rendezvous_store
from bytetx.executor.messages import (
    Decode,
    DropCache,
    Forward,
    Join,
    Load,
    Logits,
    Message,
    NewCache,
    batch_of,
    decode,
    flat_size,
    numbers_of,
)
from bytetx.executor.torchrun import TorchrunRank
from bytetx.nn.checkpoint_heads import Heads
from bytetx.nn.grid_blocks import grid_blocks, grid_transformer
from bytetx.nn.kv_cache import KvCache, allocate_cache
from bytetx.nn.loading import load_shard, load_spec
from bytetx.nn.transformer import Transformer
from bytetx.parallel.tp import Store, TpGroup, end_rendezvous, gpu_of, join_group

# Between two queries of the device.
_MARK_SECONDS = 0.2


def main(arguments: Sequence[str]) -> None:
    """A process that bytetx.executor.launch.spawn started.

    arguments: rank, size, its end of the socketpair, the folder of the rendezvous, threads.
    """
    rank, size, fd, folder, num_threads = arguments
    leader = connect_to_leader(fd, folder)
    torch.set_num_threads(int(num_threads))
    store = rendezvous_store(Path(folder), int(size))
    serve(leader, rank=int(rank), size=int(size), store=store)


def serve_torchrun_rank(torchrun: TorchrunRank) -> None:
    """A rank that torchrun started, until rank 0 ends it."""
    connected = torchrun.connect()
    if connected is None:
        return  # rank 0 loads no model over the group
    leader, store = connected
    serve(leader, rank=torchrun.rank, size=torchrun.size, store=store)


def serve(leader: LeaderConnection, *, rank: int, size: int, store: Store) -> None:
    """Does what rank 0 asks until it closes. Ends the process where that fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what an interrupt means
    worker = _RankWorker(leader, rank=rank, size=size, store=store)
    try:
        leader.reply()
        while (message := leader.receive(worker.check)) is not None:
            worker.do(decode(message))
            worker.count_message()
        worker.finish()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        leader.fail(worker.fault_text() or text)
        _end(1)
    _end(0)


def _end(code: int) -> None:
    """At once: destructors of collectives may wait for ranks that are gone."""
    sys.stderr.flush()
    os._exit(code)


class _RankWorker:
    """A rank's shard of the model and what belongs to it."""

    def __init__(self, leader: LeaderConnection, *, rank: int, size: int, store: Store):
        self._leader, self._rank, self._size = leader, rank, size
        self._store = store
        self._num_done = 0  # messages, on this rank's host
        self._marks: _DeviceMarks | None = None
        self._caches: dict[int, KvCache] = {}
        self._decoders: dict[int, DecodeRunner] = {}  # by cache id
        self._joined: TpGroup | None = None
        self._loaded: Transformer | None = None
        self._heads = Heads()
        self._dtype = torch.float32

    @property
    def _group(self) -> TpGroup:
        assert self._joined is not None  # rank 0 sends Join first
        return self._joined

    @property
    def _transformer(self) -> Transformer:
        assert self._loaded is not None  # rank 0 sends Load before steps
        return self._loaded

    def do(self, message: Message) -> None:
        match message:
            case Forward():
                self._forward(message)
            case Decode():
                self._decode(message)
            case Logits():
                self._logits(message)
            case NewCache():
                self._caches[message.cache_id] = self._new_cache(message)
            case DropCache():
                self._drop_cache(message.cache_id)
            case Join():
                self._join(message)
            case Load():
                self._load(message)

    def count_message(self) -> None:
        """Counts a message that is done; rank 0 hears of it when the device has done it, too."""
        self._num_done += 1
        self._poll_device()

    def _poll_device(self) -> None:
        if self._marks is None:
            self._leader.num_done = self._num_done
        else:
            self._leader.num_done = self._marks.num_done(self._num_done)

    def fault_text(self) -> str | None:
        """Which wait of a kernel of this rank expired."""
        return None if self._joined is None else self._joined.fault_text()

    def check(self) -> None:
        """Raises a GroupError where a wait of a kernel expired, which no call reports."""
        self._poll_device()
        fault = self.fault_text()
        if fault is not None:
            raise GroupError(fault)

    def finish(self) -> None:
        """Waits for what rank 0 may still wait for, too."""
        if self._joined is not None and self._joined.device.type == "cuda":
            torch.cuda.synchronize(self._joined.device)

    def _join(self, message: Join) -> None:
        device = torch.device("cpu")
        if message.device_type == "cuda":
            device = gpu_of(self._rank)
            torch.cuda.set_device(device)
            torch.cuda.set_stream(torch.cuda.Stream(device))  # the default one captures no graph
            self._marks = _DeviceMarks()
        self._joined = group = join_group(
            self._store,
            rank=self._rank,
            size=self._size,
            device=device,
            workspace_bytes=message.workspace_bytes,
            rows=message.rows,
            grid=message.grid,
        )
        end_rendezvous(self._store)
        self._leader.num_collectives = group.num_collectives
        self._leader.reply()

    def _load(self, message: Load) -> None:
        self._dtype = message.dtype
        self._decoders.clear()
        families = read_families(message.families)
        blocks = grid_blocks(load_spec(message.folder, families), self._group)
        local, self._heads = load_shard(
            message.folder,
            blocks,
            dtype=message.dtype,
            device=self._group.device,
            families=families,
            on_tensor=self._leader.step,
        )
        self._leader.reply()
        self._loaded = grid_transformer(local, self._group)

    @torch.inference_mode()
    def _forward(self, message: Forward) -> None:
        flat = numbers_of(message)
        if flat is None:
            flat = torch.empty(flat_size(message), dtype=torch.int32, device=self._group.device)
            self._group.collectives.broadcast(flat)
        batch = batch_of(message, flat)
        cache = None if message.past is None else self._caches[message.past[0]]
        on_layer = _ignore if message.wants_layers else None
        self._transformer.forward(batch, cache=cache, on_layer=on_layer)

    @torch.inference_mode()
    def _decode(self, message: Decode) -> None:
        decoder = self._decoders.get(message.cache_id)
        if decoder is None:
            assert self._heads.lm is not None  # rank 0 has the same heads
            decoder = self._decoders[message.cache_id] = DecodeRunner(
                self._transformer,
                self._heads.lm,
                cache=self._caches[message.cache_id],
                receive=self._group.collectives.broadcast,
                device=self._group.device,
            )
        decoder.run(
            message.num_rows,
            message.num_pages,
            is_greedy=message.is_greedy,
            is_captured=message.is_captured,
        )

    def _drop_cache(self, cache_id: int) -> None:
        decoder = self._decoders.pop(cache_id, None)
        if decoder is not None:
            decoder.clear()
        del self._caches[cache_id]

    @torch.inference_mode()
    def _logits(self, message: Logits) -> None:
        head, spec = getattr(self._heads, message.head), self._transformer.spec
        shape = (message.num_rows, spec.output_size)
        rows = torch.empty(shape, dtype=self._dtype, device=self._group.device)
        head.forward(self._group.collectives.broadcast(rows))

    def _new_cache(self, message: NewCache) -> KvCache:
        spec = self._transformer.spec
        return allocate_cache(
            num_layers=spec.num_layers,
            num_pages=message.num_pages,
            page_size=message.page_size,
            num_kv_heads=self._transformer.blocks.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self._dtype,
            has_codes=message.has_codes,
            device=self._group.device,
        )


class _DeviceMarks:
    """Which messages the GPU has finished: one event at a time, recorded now and then.

    Only the main thread queries it: a query of another thread would end a graph's capture.
    """

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._marked = self._finished = 0
        self._next_s = 0.0

    def num_done(self, num_started: int) -> int:
        """How many of num_started messages are known to have ended on the current stream."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return self._finished
        if self._marked > self._finished:
            if not self._event.query():
                return self._finished
            self._finished = self._marked
        if num_started > self._finished:
            self._event.record()
            self._marked = num_started
        self._next_s = now_s + _MARK_SECONDS
        return self._finished


def _ignore(x: torch.Tensor) -> None:
    pass
