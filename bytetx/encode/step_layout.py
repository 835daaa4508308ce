"""An encoder step as one int32 block: its texts, padded to a bucket's sizes for CUDA graphs."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from bytetx.buckets import Bucket
from bytetx.encode.step import Step
from bytetx.runtime.batch_layout import BatchLayout


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

    def write(self, block: np.ndarray, step: Step) -> None:
        """Fills a host block from a step on the host; tokens beyond its own are zeros."""
        prompt_tokens = step.requests.prompt_tokens
        column = np.empty(0, np.int32) if prompt_tokens is None else prompt_tokens
        self.batch.write(block, step.batch, {"prompt_tokens": column})

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
