"""An encoder step as one int32 block: its texts, padded to a bucket's sizes for CUDA graphs."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from bytetx.buckets import Bucket
from bytetx.encode.request import Requests
from bytetx.encode.step import Step
from bytetx.packed import positions_of, prefix_sums
from bytetx.runtime.batch_layout import BatchLayout

_NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class EncodeLayout:
    """The block of a step of a bucket's sizes."""

    batch: BatchLayout

    @property
    def bucket(self) -> Bucket:
        return self.batch.bucket

    @property
    def num_ints(self) -> int:
        return self.batch.num_ints

    def write(self, block: np.ndarray, requests: Requests, *, position_offset: int) -> None:
        """Fills a host block from the texts of a step; tokens beyond their own are zeros."""
        seqlens, ids = requests.seqlens, requests.token_ids
        cu_seqlens = prefix_sums(seqlens)
        types, prompt_tokens = requests.token_type_ids, requests.prompt_tokens
        arrays = {
            "cu_seqlens": cu_seqlens,
            "input_ids": ids,
            "position_ids": positions_of(ids, seqlens, cu_seqlens, position_offset=position_offset),
            "token_type_ids": _NONE if types is None else types,
            "prompt_tokens": _NONE if prompt_tokens is None else prompt_tokens,
        }
        self.batch.write_arrays(block, arrays)

    def read(self, block: torch.Tensor, step: Step, *, max_seqlen: int) -> Step:
        """The step with views of a device block; `seqlens` stays that of the texts alone."""
        seqlens = step.batch.seqlens
        batch, columns = self.batch.read(block, seqlens=seqlens, max_seqlen=max_seqlen)
        sizes = step.batch.total_tokens, step.batch.batch_size
        if sizes == (self.bucket.total_tokens, self.bucket.batch_size):  # without padding
            batch = replace(batch, on_host=step.batch)
        return Step(step.requests, batch, columns["prompt_tokens"])


@lru_cache(maxsize=256)
def encode_layout(bucket: Bucket, *, has_token_types: bool) -> EncodeLayout:
    """The layout of a step of these sizes."""
    layout = BatchLayout(bucket, has_token_types=has_token_types, columns=("prompt_tokens",))
    return EncodeLayout(layout)
