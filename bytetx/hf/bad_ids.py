"""Ids outside their tables: an error at once on a CPU, at a later call on a GPU."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from bytetx.errors import InputError
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch

NAMES = ("input_ids", "position_ids", "token_type_ids")  # the order of an op's bad_ids


@dataclass(frozen=True, slots=True)
class Words:
    """on_device: int32 [3] that kernels write.  on_host: pinned, what it was after a call."""

    on_device: torch.Tensor
    on_host: torch.Tensor

    def send(self) -> None:
        """Copies them to the host, after what was launched before."""
        self.on_host.copy_(self.on_device, non_blocking=True)


class BadIds:
    """Bad ids that GPUs found in one model's calls; each thread has its own words on each GPU.

    A call does not wait for the GPU: the words are copied to the host after it, and the thread's
    next call reads them.  Their addresses never change, because a CUDA graph may write them.
    """

    def __init__(self) -> None:
        self._words: dict[tuple[int, int], Words] = {}

    def run_forward(
        self,
        transformer: Transformer,
        batch: PackedBatch,
        *,
        on_layer: Callable[[torch.Tensor], None] | None = None,
        on_kv: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Runs transformer.forward.

        Bad ids raise InputError: on a CPU before it, on a GPU at a later call.
        """
        words = None
        if batch.device.type == "cuda":
            words = self.words_on(batch.device)
        else:
            _check_on_host(batch, transformer)
        if words is not None:
            batch = replace(batch, bad_ids=words.on_device)
        x = transformer.forward(batch, on_layer=on_layer, on_kv=on_kv)
        if words is not None:
            words.send()
        return x

    def words_on(self, device: torch.device) -> Words | None:
        """The calling thread's on this GPU; None where none can be had."""
        key = _key_of(device)
        if key not in self._words:
            if torch.cuda.is_current_stream_capturing():  # pinned memory cannot be had now
                return None
            with torch.inference_mode(False):
                self._words[key] = Words(
                    torch.zeros(3, dtype=torch.int32, device=device),
                    torch.zeros(3, dtype=torch.int32, pin_memory=True),
                )
            torch.cuda.current_stream(device).synchronize()  # once, for the thread's other streams
        return self._words[key]

    def raise_found(self, transformer: Transformer) -> None:
        """Raises InputError, once, where an earlier call of this thread had a bad id."""
        device = transformer.embeddings.word.device
        words = self._words.get(_key_of(device)) if device.type == "cuda" else None
        if words is None:
            return
        found = words.on_host.tolist()
        if not any(found):
            return
        if not torch.cuda.is_current_stream_capturing():
            words.on_device.zero_()
            words.send()
            torch.cuda.current_stream(device).synchronize()  # older copies may not have ended
        sizes = _table_sizes(transformer)
        named = [
            f"{name} with {bad}, where ids are 0 to {size - 1}"
            for name, bad, size in zip(NAMES, found, sizes, strict=True)
            if bad and size is not None
        ]
        raise InputError(
            f"an earlier call of this model on this thread got {' and '.join(named)}; its outputs "
            "are NaN in those rows and what depends on them. This call did not run: repeat it"
        )


def require_ids(name: str, ids: torch.Tensor, size: int) -> None:
    """Raises InputError where one of the ids, on the host, is outside a table of `size` rows."""
    if not ids.numel():
        return
    low, high = map(int, ids.aminmax())
    if low < 0 or high >= size:
        rows = f"the table has {size} rows (ids 0 to {size - 1})"
        raise InputError(f"{name} holds {low if low < 0 else high}, but {rows}")


def _check_on_host(batch: PackedBatch, transformer: Transformer) -> None:
    """Raises InputError for the first id of a batch on the CPU that is outside its table."""
    given = (
        None if batch.inputs_embeds is not None else batch.input_ids,
        batch.position_ids,
        batch.token_type_ids,
    )
    for name, ids, size in zip(NAMES, given, _table_sizes(transformer), strict=True):
        if size is not None and ids is not None:
            require_ids(name, ids, size)


def _table_sizes(transformer: Transformer) -> tuple[int | None, int | None, int | None]:
    """Rows of the tables that ids are looked up in."""
    table = transformer.embeddings
    tables = (table.word, table.position, table.token_type)
    word, position, token_type = (None if t is None else t.shape[0] for t in tables)
    return word, position, token_type


def _key_of(device: torch.device) -> tuple[int, int]:
    index = torch.cuda.current_device() if device.index is None else device.index
    return threading.get_ident(), index
