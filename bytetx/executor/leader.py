"""Rank 0 of a tensor-parallel group: whatever it computes, the workers compute with it."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread

import torch

from bytetx.checkpoint.families import Families
from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import BytetxError, GroupError, InputError
from bytetx.executor.control import Workers
from bytetx.executor.heartbeat import DEFAULT_LIMIT_S
from bytetx.executor.launch import spawn
from bytetx.executor.messages import (
    Decode,
    DeviceType,
    DropCache,
    Head,
    Join,
    Load,
    Logits,
    Message,
    NewCache,
    encode,
    flat_batch,
    forward_message,
)
from bytetx.executor.torchrun import TorchrunLeader
from bytetx.nn.executor import Executor
from bytetx.nn.grid_blocks import check_grid, grid_blocks, grid_placement
from bytetx.nn.kv_cache import KvCache
from bytetx.nn.layers import OnKv, OnLayer
from bytetx.nn.loading import (
    LoadedCheckpoint,
    load_checkpoint,
    load_spec,
    overflows_float16,
    resolve_device,
    resolve_dtype,
    saved_dtype,
)
from bytetx.nn.transformer import Placement
from bytetx.ops.comm_workspace import workspace_bytes
from bytetx.ops.linear import DTYPE_NAMES
from bytetx.packed import PackedBatch
from bytetx.parallel.grid import Grid
from bytetx.parallel.row_scheme import RowScheme, row_scheme
from bytetx.parallel.tp import TpGroup, end_rendezvous, gpu_of, join_group

# Between checks of the workers while this rank joins the group.
_CHECK_SECONDS = 0.1


def load_sharded(
    folder: Path,
    *,
    ranks: int | TorchrunLeader,
    device: str | torch.device,
    dtype: str | torch.dtype,
    token_budget: Callable[[ModelSpec, torch.device], int],
    shares_memory: bool = True,
    rows: RowScheme | None = None,
    group_timeout: float = DEFAULT_LIMIT_S,
    grid: Grid | None = None,
    families: Families | None = None,
) -> LoadedCheckpoint:
    """A checkpoint of which every rank holds a shard; this process is rank 0.

    ranks: how many to start on this machine, this one included, or those of torchrun.
    token_budget: rows of the model's largest step on a device.  shares_memory: whether GPUs that
    can access one another's memory do so for the fused ops, which are of half types; else NCCL
    does all communication.
    rows: None is the scheme that was measured for the device and the model's hidden size.
    group_timeout: seconds, as of bytetx.load.  grid: of all ranks; None is y alone.
    families: None are those of models/.
    Raises InputError where the model cannot be sharded so or there are fewer GPUs, and GroupError
    where a rank fails.
    """
    size = ranks if isinstance(ranks, int) else ranks.size
    grid = Grid(y=size) if grid is None else grid
    device = _device_of_rank_0(device, grid)
    spec = load_spec(folder, families)
    check_grid(spec, grid)  # a model that cannot be sharded is refused before ranks start
    overflows, saved = overflows_float16(spec), saved_dtype(folder, spec)
    dtype = resolve_dtype(dtype, device, saved=saved, overflows_float16=overflows)
    shared_bytes = 0
    # Kernels over the peers' memory are for ranks that are all on y.
    if shares_memory and grid.is_y_alone and device.type == "cuda" and dtype in DTYPE_NAMES:
        shared_bytes = workspace_bytes(
            max_tokens=token_budget(spec, device),
            hidden_size=spec.hidden_size,
            size=size,
            itemsize=dtype.itemsize,
        )
    rows = rows or row_scheme(device.type, grid.y, spec.hidden_size)
    workers, group = start_ranks(
        ranks, device, shared_bytes=shared_bytes, rows=rows, group_timeout=group_timeout, grid=grid
    )
    try:
        checkpoint = load_on_ranks(folder, group, workers, dtype=dtype, families=families)
    except BaseException as error:
        _give_up(workers, error)
        raise
    weakref.finalize(checkpoint.transformer, workers.close)
    return checkpoint


def load_on_ranks(
    folder: Path,
    group: TpGroup,
    workers: Workers,
    *,
    dtype: torch.dtype,
    families: Families | None = None,
) -> LoadedCheckpoint:
    """A checkpoint onto ranks that have joined the group; they release the one before it."""
    workers.send(encode(Load(folder, dtype, None if families is None else families.folder)))
    spec = load_spec(folder, families)
    blocks = grid_blocks(spec, group)
    # A failure of a worker is reported before this rank has read its shard.
    checkpoint = load_checkpoint(
        folder,
        device=group.device,
        dtype=dtype,
        families=families,
        blocks=blocks,
        on_tensor=workers.check,
    )
    workers.wait_for_replies()
    whole = grid_placement(checkpoint.transformer, group)
    executor, heads = GroupExecutor(group, workers, spec), checkpoint.heads
    if blocks.shard is not None:  # the vocabulary is divided over y; else rank 0 has all of it
        lm, masked_lm = heads.lm, heads.masked_lm
        if lm is not None:
            lm = replace(lm, placement=partial(_group_logits, executor, "lm"))
        if masked_lm is not None:
            placement = partial(_group_logits, executor, "masked_lm")
            masked_lm = replace(masked_lm, placement=placement)
        heads = replace(heads, lm=lm, masked_lm=masked_lm)
    executor.release = whole.release
    transformer = checkpoint.transformer.placed(_GroupPlacement(whole, executor))
    return replace(checkpoint, transformer=transformer, heads=heads, executor=executor)


def _device_of_rank_0(device: str | torch.device, grid: Grid) -> torch.device:
    resolved = resolve_device(device)
    size, given = grid.size, f"tp={grid.y}" if grid.is_y_alone else f"grid {grid}"
    if resolved.type == "cuda":
        if resolved.index:
            raise InputError(f"{given} takes GPUs 0 to {size - 1}, got device {str(device)!r}")
        if size > torch.cuda.device_count():
            raise InputError(
                f"{given} needs {size} GPUs, torch sees {torch.cuda.device_count()} CUDA devices"
            )
    return resolved


def start_ranks(
    ranks: int | TorchrunLeader,
    device: torch.device,
    *,
    shared_bytes: int = 0,
    rows: RowScheme | None = None,
    group_timeout: float = DEFAULT_LIMIT_S,
    grid: Grid | None = None,
) -> tuple[Workers, TpGroup]:
    """The workers, and the group that this rank has joined with them; they close together."""
    is_cuda = device.type == "cuda"
    if isinstance(ranks, int):
        size = ranks
        workers, store = spawn(
            size,
            module="bytetx.executor.worker",
            num_threads=max(1, torch.get_num_threads() // ranks),
            limit_s=group_timeout,
            gpus=[_index_of(gpu_of(rank)) for rank in range(size)] if is_cuda else None,
        )
    else:
        size = ranks.size
        workers, store = ranks.workers(group_timeout)
    device_type: DeviceType = "cpu"
    if is_cuda:
        torch.cuda.set_device(device)
        device_type = "cuda"
    try:
        if is_cuda:
            _prepare(device, shares_memory=shared_bytes > 0)
        workers.wait_for_replies()  # they are there: their rendezvous at the store has an end
        workers.send(encode(Join(device_type, shared_bytes, rows, grid)))
        group = _join_while_healthy(
            workers,
            lambda: join_group(
                store,
                rank=0,
                size=size,
                device=device,
                workspace_bytes=shared_bytes,
                rows=rows,
                grid=grid,
            ),
        )
        workers.num_collectives = group.num_collectives
        workers.on_end = group.abort
        workers.wait_for_replies()
        end_rendezvous(store)
        if device.type == "cpu":
            workers.remove_folder()
    except BaseException as error:
        _give_up(workers, error)
        raise
    return workers, group


def _index_of(gpu: torch.device) -> int:
    assert gpu.index is not None  # gpu_of names one
    return gpu.index


def _prepare(device: torch.device, *, shares_memory: bool) -> None:
    """This rank's context and what joining imports, while the workers still import torch."""
    torch.zeros(1, device=device)
    if shares_memory:
        import_module("bytetx.parallel.symmetric")


def _join_while_healthy(workers: Workers, join: Callable[[], TpGroup]) -> TpGroup:
    """join(), in a thread that is abandoned where a worker ends, for which it may wait forever.

    Raises GroupError then.
    """
    found: Future[TpGroup] = Future()

    def run() -> None:
        try:
            found.set_result(join())
        except BaseException as error:
            found.set_exception(error)

    Thread(target=run, name="bytetx-join", daemon=True).start()
    while not wait([found], timeout=_CHECK_SECONDS).done:
        workers.check()
    return found.result()


def _give_up(workers: Workers, error: BaseException) -> None:
    """Ends the workers; raises a GroupError where one of them is the cause, not the checkpoint."""
    try:
        if not isinstance(error, BytetxError):
            workers.check()
    except GroupError as reason:
        raise reason from error
    finally:
        workers.close()


class GroupExecutor(Executor):
    """Has the workers run every step of this rank; one thread at a time."""

    has_workers = True

    def __init__(self, group: TpGroup, workers: Workers, spec: ModelSpec):
        self.group, self.workers, self.spec = group, workers, spec
        self.grid = Grid(y=group.size) if group.axes is None else group.axes.grid
        # Each slot of a grid writes the pages of its own sequences.
        self.shares_pages = group.axes is None or group.axes.slots.size == 1
        self._lock = threading.Lock()
        self._decoding_thread: int | None = None
        self._cache_ids: dict[int, int] = {}  # keys: the id of a cache's first tensor
        self._dropped: deque[int] = deque()  # ids of caches that are gone here
        self._num_caches = 0
        self._last_step: torch.cuda.Event | None = None
        # Frees this rank's graphs, which hold collectives of the group.
        self.release: Callable[[], object] = lambda: None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of work that all ranks do together; any failure in it ends the group.

        On GPUs a step begins after the one before it, because they may be on different streams,
        and the ranks share memory.
        """
        with self._lock:
            self.check()
            try:
                while self._dropped:
                    self.send(DropCache(self._dropped.popleft()))
                is_cuda = self.group.device.type == "cuda"
                if is_cuda and self._last_step is not None:
                    torch.cuda.current_stream().wait_event(self._last_step)
                yield
                if is_cuda:
                    self._last_step = torch.cuda.current_stream().record_event()
            except GroupError:
                raise
            except Exception as error:
                self.workers.raise_failure(error, reason=self.group.fault_text() or "")
            except BaseException:
                self.workers.close()
                raise

    def check(self) -> None:
        """Raises a GroupError where a rank is gone, or where a wait for another rank expired."""
        fault = self.group.fault_text()
        if fault is not None:
            self.workers.raise_failure(reason=fault)
        self.workers.check()

    @contextmanager
    def decode_step(
        self, cache: KvCache, *, num_rows: int, num_pages: int, is_greedy: bool, is_captured: bool
    ) -> Iterator[None]:
        with self.step():
            self.send(Decode(self.cache_id(cache), num_rows, num_pages, is_greedy, is_captured))
            self._decoding_thread = threading.get_ident()
            try:
                yield
            finally:
                self._decoding_thread = None

    @property
    def is_decoding(self) -> bool:
        """Whether this thread is in a decode step: workers run its passes without a message."""
        return self._decoding_thread == threading.get_ident()

    def broadcast(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self.group.collectives.broadcast(tensor)

    def close(self) -> None:
        self.release()
        self.workers.close()

    def send(self, message: Message) -> None:
        self.workers.send(encode(message))

    def cache_id(self, cache: KvCache) -> int:
        """The number of a cache, of which each worker has one of the same size."""
        owner = cache.layers[0].k_cache
        known = self._cache_ids.get(id(owner))
        if known is not None:
            return known
        cache_id = self._cache_ids[id(owner)] = self._num_caches
        self._num_caches += 1
        weakref.finalize(owner, _forget, self._cache_ids, id(owner), self._dropped).atexit = False
        self.send(NewCache(cache_id, cache.num_pages, cache.page_size, cache.has_codes))
        return cache_id


def _forget(cache_ids: dict[int, int], owner_id: int, dropped: deque[int]) -> None:
    dropped.append(cache_ids.pop(owner_id))


class _GroupPlacement(Placement):
    """Runs rank 0's part of a pass, and tells the other ranks to run theirs."""

    is_shared = True
    is_capturable = False  # passes send a message each time; each rank may replay its own layers

    def __init__(self, whole: Placement, executor: GroupExecutor):
        """whole: runs this rank's part of whole batches."""
        self.whole, self._executor = whole, executor
        # Workers run those of y alone as graphs.
        self.captures_decode_steps = executor.grid.is_y_alone

    def forward(
        self,
        batch: PackedBatch,
        *,
        cache: KvCache | None = None,
        on_layer: OnLayer | None = None,
        on_kv: OnKv | None = None,
    ) -> torch.Tensor:
        """on_kv: must be None; no rank has all keys and values."""
        if on_kv is not None:
            raise ValueError("on_kv must be None: each rank has the keys and values of its heads")
        executor = self._executor
        if executor.is_decoding:
            return self.whole.forward(batch, cache=cache, on_layer=on_layer)
        with executor.step():
            cache_id = None if cache is None else executor.cache_id(cache)
            message = forward_message(batch, cache_id=cache_id, wants_layers=on_layer is not None)
            executor.send(message)
            if message.numbers is None:
                executor.broadcast(flat_batch(batch))
            return self.whole.forward(batch, cache=cache, on_layer=on_layer)


def _group_logits(
    executor: GroupExecutor,
    head: Head,
    forward: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
) -> torch.Tensor:
    """Run rank 0's part of a head, and tell the other ranks to run theirs: a HeadPlacement."""
    if not rows.shape[0]:
        return rows.new_empty((0, executor.spec.vocab_size))
    if executor.is_decoding:
        return forward(rows)
    with executor.step():
        executor.send(Logits(head, rows.shape[0]))
        return forward(executor.group.collectives.broadcast(rows.contiguous()))
