"""Rank 0 of a model that several ranks share: whatever it computes, the others compute with it."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Thread

import torch

from bytetx.checkpoint.files import load_config
from bytetx.checkpoint.spec import ModelSpec, build_spec
from bytetx.checkpoint.weights import Weights
from bytetx.errors import BytetxError, GroupError, InputError
from bytetx.executor.control import Followers
from bytetx.executor.heartbeat import DEFAULT_LIMIT_S
from bytetx.executor.launch import spawn
from bytetx.executor.messages import (
    Decode,
    DropCache,
    Join,
    Load,
    Logits,
    Message,
    NewCache,
    encode,
    flat_batch,
    forward_message,
)
from bytetx.executor.torchrun import TorchrunLead
from bytetx.nn.heads import LmHead, MaskedLMHead
from bytetx.nn.kv_cache import KvCache
from bytetx.nn.loading import (
    Heads,
    LoadedCheckpoint,
    load_checkpoint,
    resolve_device,
    resolve_dtype,
)
from bytetx.nn.sentence_modules import load_sentence_spec
from bytetx.nn.sharded_blocks import ShardedBlocks
from bytetx.nn.transformer import Transformer
from bytetx.ops.comm_workspace import workspace_bytes
from bytetx.ops.linear import DTYPE_NAMES
from bytetx.packed import PackedBatch
from bytetx.parallel.layout import split_model
from bytetx.parallel.row_scheme import RowScheme, row_scheme
from bytetx.parallel.tp import TpGroup, end_meeting, join_group

# Between looks at the other ranks while this one joins them.
_LOOK_SECONDS = 0.1


def load_shared(
    folder: Path,
    *,
    ranks: int | TorchrunLead,
    device: str | torch.device,
    dtype: str | torch.dtype,
    token_budget: Callable[[ModelSpec, torch.device], int],
    shares_memory: bool = True,
    rows: RowScheme | None = None,
    group_timeout: float = DEFAULT_LIMIT_S,
) -> LoadedCheckpoint:
    """A checkpoint of which every rank holds a share; this process is rank 0.

    ranks: how many to start on this machine, this one included, or those of torchrun.
    token_budget: rows of the model's largest step on a device.  shares_memory: whether GPUs that
    can reach into one another's memory for the fused ops, which are of half types; else all is
    NCCL's.
    rows: None is the scheme that was measured for the device and the model's hidden size.
    group_timeout: seconds, as of bytetx.load.
    Raises InputError where the model cannot be split so or there are fewer GPUs, and GroupError
    where a rank fails.
    """
    size = ranks if isinstance(ranks, int) else ranks.size
    device = _device_of_rank_0(device, size)
    sentence = load_sentence_spec(folder)
    spec = build_spec(load_config(sentence.folder))
    split_model(spec, rank=0, size=size)  # what cannot be split is refused before ranks start
    dtype = resolve_dtype(dtype, device, saved=Weights(sentence.folder, spec).dtype)
    shared_bytes = 0
    if shares_memory and device.type == "cuda" and dtype in DTYPE_NAMES:
        sizes = {"hidden_size": spec.hidden_size, "size": size, "itemsize": dtype.itemsize}
        shared_bytes = workspace_bytes(max_tokens=token_budget(spec, device), **sizes)
    rows = rows or row_scheme(device.type, size, spec.hidden_size)
    options = {"shared_bytes": shared_bytes, "rows": rows, "group_timeout": group_timeout}
    followers, group = start_ranks(ranks, device, **options)
    try:
        checkpoint = load_led(folder, group, followers, dtype=dtype)
    except BaseException as error:
        _give_up(followers, error)
        raise
    close = weakref.finalize(checkpoint.transformer, followers.close)
    return replace(checkpoint, close=close)


def load_led(
    folder: Path, group: TpGroup, followers: Followers, *, dtype: torch.dtype
) -> LoadedCheckpoint:
    """A checkpoint onto ranks that have met; they let go of the one before it."""
    followers.send(encode(Load(folder, dtype)))
    spec = build_spec(load_config(load_sentence_spec(folder).folder))
    blocks = ShardedBlocks(spec, group, split_model(spec, rank=0, size=group.size))
    # A rank that fails is told of before this one has read its share.
    options = {"blocks": blocks, "on_tensor": followers.check}
    checkpoint = load_checkpoint(folder, device=group.device, dtype=dtype, **options)
    followers.await_answers()
    blocks.sync_kernel_support(checkpoint.transformer.layers.weights)
    lead = _Lead(group, followers, spec)
    heads = checkpoint.heads
    led = {
        name: kind(**{f.name: getattr(head, f.name) for f in fields(head)}, lead=lead)
        for name, kind in (("lm", _LedLmHead), ("masked_lm", _LedMaskedLMHead))
        if (head := getattr(heads, name)) is not None
    }
    heads = Heads(heads.sequence, heads.token, led.get("masked_lm"), led.get("lm"))
    return replace(
        checkpoint, transformer=_LedTransformer(checkpoint.transformer, lead), heads=heads
    )


def _device_of_rank_0(device: str | torch.device, size: int) -> torch.device:
    own = resolve_device(device)
    if own.type == "cuda":
        if own.index:
            raise InputError(f"tp={size} takes GPUs 0 to {size - 1}, got device {str(device)!r}")
        if size > torch.cuda.device_count():
            raise InputError(
                f"tp={size} needs {size} GPUs, torch sees {torch.cuda.device_count()} CUDA devices"
            )
    return own


def start_ranks(
    ranks: int | TorchrunLead,
    device: torch.device,
    *,
    shared_bytes: int = 0,
    rows: RowScheme | None = None,
    group_timeout: float = DEFAULT_LIMIT_S,
) -> tuple[Followers, TpGroup]:
    """The other ranks, and the group that this one has joined with them; they close together."""
    if isinstance(ranks, int):
        size, options = ranks, {"num_threads": max(1, torch.get_num_threads() // ranks)}
        followers, store = spawn(
            size, module="bytetx.executor.worker", limit_s=group_timeout, **options
        )
    else:
        size = ranks.size
        followers, store = ranks.followers(group_timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        followers.await_answers()  # they are there: what they meet at the store has an end
        followers.send(encode(Join(device.type, shared_bytes, rows)))
        options = {"workspace_bytes": shared_bytes, "rows": rows}
        group = _while_well(
            followers, lambda: join_group(store, rank=0, size=size, device=device, **options)
        )
        followers.num_collectives = group.num_collectives
        followers.on_end = group.abort
        followers.await_answers()
        end_meeting(store)
        if device.type == "cpu":
            followers.remove_folder()
    except BaseException as error:
        _give_up(followers, error)
        raise
    return followers, group


def _while_well(followers: Followers, join: Callable[[], TpGroup]) -> TpGroup:
    """join(), in a thread that is left alone where a follower ends: what it waits for may be gone.

    Raises GroupError then.
    """
    found: Future[TpGroup] = Future()

    def run() -> None:
        try:
            found.set_result(join())
        except BaseException as error:
            found.set_exception(error)

    Thread(target=run, name="bytetx-join", daemon=True).start()
    while not wait([found], timeout=_LOOK_SECONDS).done:
        followers.check()
    return found.result()


def _give_up(followers: Followers, error: BaseException) -> None:
    """Ends the followers; raises a GroupError where one of them is why, and not the checkpoint."""
    try:
        if not isinstance(error, BytetxError):
            followers.check()
    except GroupError as reason:
        raise reason from error
    finally:
        followers.close()


class _Lead:
    """Asks the other ranks for what this one is about to compute; threads take turns."""

    def __init__(self, group: TpGroup, followers: Followers, spec: ModelSpec):
        self.group, self.followers, self.spec = group, followers, spec
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread whose step consists of several passes
        self._cache_ids: dict[int, int] = {}  # by the id of a cache's first tensor
        self._dropped: deque[int] = deque()  # ids of caches that are gone here
        self._num_caches = 0
        self._last_step: torch.cuda.Event | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """What all ranks do together; a failure in it, whatever it is, ends the group.

        On GPUs a step begins after the one before it, for they may be on different streams, and
        the ranks share memory.
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
                self.followers.raise_failure(error, reason=self.group.fault_text() or "")
            except BaseException:
                self.followers.close()
                raise

    def check(self) -> None:
        """Raises a GroupError where a rank is gone, or one of them waited for another in vain."""
        waited = self.group.fault_text()
        if waited is not None:
            self.followers.raise_failure(reason=waited)
        self.followers.check()

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """In a step whose passes the others run without being asked for each."""
        self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = None

    @property
    def is_in_whole_step(self) -> bool:
        return self._owner == threading.get_ident()

    def send(self, message: Message) -> None:
        self.followers.send(encode(message))

    def cache_id(self, cache: KvCache | None) -> int | None:
        """The number of a cache, of which the others have one that is as large."""
        if cache is None:
            return None
        owner = cache.layers[0].k_cache
        known = self._cache_ids.get(id(owner))
        if known is not None:
            return known
        cache_id = self._cache_ids[id(owner)] = self._num_caches
        self._num_caches += 1
        weakref.finalize(owner, _forget, self._cache_ids, id(owner), self._dropped).atexit = False
        self.send(NewCache(cache_id, cache.num_pages, cache.page_size))
        return cache_id


def _forget(cache_ids: dict[int, int], owner_id: int, dropped: deque[int]) -> None:
    dropped.append(cache_ids.pop(owner_id))


class _LedTransformer(Transformer):
    """Rank 0's share; its forward pass is every rank's."""

    has_followers = True

    def __init__(self, own: Transformer, lead: _Lead):
        vars(self).update(vars(own))
        self._lead = lead

    @property
    def is_capturable(self) -> bool:
        """Only decode steps are: others ask the ranks each time."""
        return False

    def check(self) -> None:
        self._lead.check()

    @contextmanager
    def decode_step(
        self, cache: KvCache, *, num_rows: int, num_pages: int, is_greedy: bool, is_captured: bool
    ) -> Iterator[None]:
        lead, options = self._lead, (num_rows, num_pages, is_greedy, is_captured)
        with lead.step():
            lead.send(Decode(lead.cache_id(cache), *options))
            with lead.whole_step():
                yield

    def share(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self._lead.group.collectives.broadcast(tensor)

    @torch.inference_mode()
    def forward(
        self,
        batch: PackedBatch,
        *,
        cache: KvCache | None = None,
        on_layer: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        lead = self._lead
        if lead.is_in_whole_step:
            return super().forward(batch, cache=cache, on_layer=on_layer)
        with lead.step():
            message = forward_message(
                batch, cache_id=lead.cache_id(cache), wants_layers=on_layer is not None
            )
            lead.send(message)
            lead.group.collectives.broadcast(flat_batch(batch))
            return super().forward(batch, cache=cache, on_layer=on_layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LedLmHead(LmHead):
    lead: _Lead

    @torch.inference_mode()
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return _led_logits(self.lead, "lm", rows, lambda own: LmHead.forward(self, own))


@dataclass(frozen=True, slots=True, kw_only=True)
class _LedMaskedLMHead(MaskedLMHead):
    lead: _Lead

    @torch.inference_mode()
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return _led_logits(
            self.lead, "masked_lm", rows, lambda own: MaskedLMHead.forward(self, own)
        )


def _led_logits(
    lead: _Lead,
    head: str,
    rows: torch.Tensor,
    forward: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    if not rows.shape[0]:
        return rows.new_empty((0, lead.spec.vocab_size))
    if lead.is_in_whole_step:
        return forward(rows)
    with lead.step():
        lead.send(Logits(head, rows.shape[0]))
        return forward(lead.group.collectives.broadcast(rows.contiguous()))
