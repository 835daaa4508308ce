"""The other ranks of a model: each computes, with its share, what rank 0 asks for."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import GroupError
from bytetx.executor.control import Follower
from bytetx.executor.decode_worker import DecodeShare
from bytetx.executor.launch import follower_of, meeting_store
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
)
from bytetx.executor.torchrun import TorchrunRank
from bytetx.nn.kv_cache import KvCache, allocate_cache
from bytetx.nn.loading import Heads, load_share
from bytetx.nn.sharded_blocks import ShardedBlocks
from bytetx.nn.transformer import Transformer
from bytetx.parallel.layout import split_model
from bytetx.parallel.tp import Store, TpGroup, end_meeting, gpu_of, join_group

# Between questions to the device.
_MARK_SECONDS = 0.2


def main(arguments: Sequence[str]) -> None:
    """A process that bytetx.executor.launch.spawn started.

    arguments: rank, size, its end of the socketpair, the folder where the ranks meet, threads.
    """
    rank, size, fd, folder, num_threads = arguments
    follower = follower_of(fd, folder)
    torch.set_num_threads(int(num_threads))
    store = meeting_store(Path(folder), int(size))
    serve(follower, rank=int(rank), size=int(size), store=store)


def follow_torchrun(own: TorchrunRank) -> None:
    """A rank that torchrun started, until rank 0 ends it."""
    led = own.follow()
    if led is None:
        return  # rank 0 had no use for it
    follower, store = led
    serve(follower, rank=own.rank, size=own.size, store=store)


def serve(follower: Follower, *, rank: int, size: int, store: Store) -> None:
    """Does what rank 0 asks until it asks for no more. Ends the process where that fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what an interrupt means
    own = _Rank(follower, rank=rank, size=size, store=store)
    try:
        follower.answer()
        while (message := follower.receive(own.check)) is not None:
            own.do(decode(message))
            own.has_done_one()
        own.finish()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        follower.fail(own.fault_text() or text)
        _end(1)
    _end(0)


def _end(code: int) -> None:
    """At once: destructors of collectives may wait for ranks that are gone."""
    sys.stderr.flush()
    os._exit(code)


class _Rank:
    """A rank's share and what belongs to it."""

    def __init__(self, follower: Follower, *, rank: int, size: int, store: Store):
        self._follower, self._rank, self._size = follower, rank, size
        self._store = store
        self._num_done = 0  # messages, on this rank's host
        self._marks: _DeviceMarks | None = None
        self._caches: dict[int, KvCache] = {}
        self._decodes: dict[int, DecodeShare] = {}  # by their cache
        self._group: TpGroup | None = None
        self._transformer: Transformer | None = None
        self._heads = Heads()
        self._dtype = torch.float32

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

    def has_done_one(self) -> None:
        """Counts a message; rank 0 is told of it when the device has done it, too."""
        self._num_done += 1
        self._look_at_device()

    def _look_at_device(self) -> None:
        if self._marks is None:
            self._follower.num_done = self._num_done
        else:
            self._follower.num_done = self._marks.num_done(self._num_done)

    def fault_text(self) -> str | None:
        """For whom a kernel of this rank waited in vain."""
        return None if self._group is None else self._group.fault_text()

    def check(self) -> None:
        """Raises a GroupError where a kernel waited in vain: no call of this rank tells it so."""
        self._look_at_device()
        waited = self.fault_text()
        if waited is not None:
            raise GroupError(waited)

    def finish(self) -> None:
        """Waits for what rank 0 may still wait for, too."""
        if self._group is not None and self._group.device.type == "cuda":
            torch.cuda.synchronize(self._group.device)

    def _join(self, message: Join) -> None:
        device = torch.device("cpu")
        if message.device_type == "cuda":
            device = gpu_of(self._rank)
            torch.cuda.set_device(device)
            torch.cuda.set_stream(torch.cuda.Stream(device))  # the default one captures no graph
            self._marks = _DeviceMarks()
        self._group = join_group(
            self._store,
            rank=self._rank,
            size=self._size,
            device=device,
            workspace_bytes=message.workspace_bytes,
            rows=message.rows,
        )
        end_meeting(self._store)
        self._follower.num_collectives = self._group.num_collectives
        self._follower.answer()

    def _load(self, message: Load) -> None:
        self._dtype = message.dtype
        self._decodes.clear()
        self._transformer, self._heads = load_share(
            message.folder,
            self._blocks,
            dtype=message.dtype,
            device=self._group.device,
            on_tensor=self._follower.step,
        )
        self._follower.answer()
        self._transformer.blocks.sync_kernel_support(self._transformer.layers.weights)

    def _blocks(self, spec: ModelSpec) -> ShardedBlocks:
        split = split_model(spec, rank=self._rank, size=self._size)
        return ShardedBlocks(spec, self._group, split)

    @torch.inference_mode()
    def _forward(self, message: Forward) -> None:
        flat = torch.empty(flat_size(message), dtype=torch.int32, device=self._group.device)
        batch = batch_of(message, self._group.collectives.broadcast(flat))
        cache = None if message.past is None else self._caches[message.past[0]]
        on_layer = _ignore if message.wants_layers else None
        self._transformer.forward(batch, cache=cache, on_layer=on_layer)

    @torch.inference_mode()
    def _decode(self, message: Decode) -> None:
        share = self._decodes.get(message.cache_id)
        if share is None:
            share = self._decodes[message.cache_id] = DecodeShare(
                self._transformer,
                self._heads.lm,
                cache=self._caches[message.cache_id],
                receive=self._group.collectives.broadcast,
                device=self._group.device,
            )
        sizes = message.num_rows, message.num_pages
        share.run(*sizes, is_greedy=message.is_greedy, is_captured=message.is_captured)

    def _drop_cache(self, cache_id: int) -> None:
        share = self._decodes.pop(cache_id, None)
        if share is not None:
            share.clear()
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
            device=self._group.device,
        )


class _DeviceMarks:
    """Which messages the GPU has finished: an event now and then, and one at a time.

    The main thread alone asks for it: another one's question would end a graph's capture.
    """

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._marked = self._finished = 0
        self._next_s = 0.0

    def num_done(self, num_started: int) -> int:
        """Of num_started messages, those that are known to have ended on the current stream."""
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
