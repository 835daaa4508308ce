"""BatchLayout: a packed batch without a cache as one int32 block, padded to a bucket's sizes."""

from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
import torch

from bytetx.buckets import FILLER_TOKENS, Bucket
from bytetx.packed import PackedBatch
from bytetx.runtime.step_layout import BlockField, StepLayout


class BatchLayout:
    """The block of a batch of a bucket's sizes. Two of equal sizes are equal."""

    def __init__(
        self, bucket: Bucket, *, has_token_types: bool, columns: Iterable[BlockField] = ()
    ):
        """columns: further arrays."""
        columns = tuple(columns)
        self.bucket, self._key = bucket, (bucket, has_token_types, columns)
        tokens = ("input_ids", "position_ids", *(("token_type_ids",) if has_token_types else ()))
        fields = [BlockField("cu_seqlens", (bucket.batch_size + 1,))]
        fields += columns
        fields += [BlockField(name, (bucket.total_tokens,)) for name in tokens]
        self._block = StepLayout(fields)
        self._filler_ends = FILLER_TOKENS * np.arange(1, bucket.num_fillers + 1, dtype=np.int32)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchLayout) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def num_ints(self) -> int:
        return self._block.num_ints

    def write(
        self, block: np.ndarray, batch: PackedBatch, columns: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Fills a host block from a batch on the host; tokens beyond its own are zeros."""
        arrays = {
            **(columns or {}),
            "cu_seqlens": batch.cu_seqlens.numpy(),
            "input_ids": batch.input_ids.numpy(),
            "position_ids": batch.position_ids.numpy(),
        }
        if batch.token_type_ids is not None:
            arrays["token_type_ids"] = batch.token_type_ids.numpy()
        self.write_arrays(block, arrays)

    def write_arrays(self, block: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        """`write` from the batch's int32 arrays and the further columns, by their names."""
        cu_seqlens = self.padded(arrays["cu_seqlens"])
        self._block.write(block, {**arrays, "cu_seqlens": cu_seqlens})

    def write_array(self, block: np.ndarray, name: str, array: np.ndarray) -> None:
        """Fills one array of a host block; what is beyond its own is zeros."""
        self._block.write_array(block, name, array)

    def start(self, name: str) -> int:
        """Where an array begins in the block, in int32s; -1 where there is none of this name."""
        return self._block.start(name)

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays of a device block by their names."""
        return self._block.views(block)

    def read(
        self, block: torch.Tensor, *, seqlens: torch.Tensor, max_seqlen: int
    ) -> tuple[PackedBatch, dict[str, torch.Tensor]]:
        """The batch as views of a device block, and the further columns.

        seqlens: those of the sequences alone, without fillers.
        """
        views = self.views(block)
        batch = PackedBatch(
            input_ids=views.pop("input_ids"),
            position_ids=views.pop("position_ids"),
            token_type_ids=views.pop("token_type_ids", None),
            cu_seqlens=views.pop("cu_seqlens"),
            seqlens=seqlens,
            max_seqlen=max_seqlen,
        )
        return batch, views

    def padded(self, cu_seqlens: np.ndarray) -> np.ndarray:
        """The texts', then empty sequences, then fillers over the rows that the bucket adds."""
        bucket, num_tokens = self.bucket, cu_seqlens[-1]
        padded = np.full(bucket.batch_size + 1, num_tokens, dtype=np.int32)
        padded[: len(cu_seqlens)] = cu_seqlens
        fillers = padded[bucket.num_texts + 1 :]
        np.minimum(self._filler_ends + num_tokens, bucket.total_tokens, out=fillers)
        return padded


@lru_cache(maxsize=256)
def batch_layout(bucket: Bucket, *, has_token_types: bool) -> BatchLayout:
    """The layout of a batch of these sizes, without further columns."""
    return BatchLayout(bucket, has_token_types=has_token_types)
