"""An encoder step as one int32 block: its texts, padded to a bucket's sizes for CUDA graphs."""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from bytetx.encode.step import Step
from bytetx.packed import PackedBatch
from bytetx.runtime.buckets import FILLER_TOKENS, Bucket
from bytetx.runtime.step_layout import Field, StepLayout


@dataclass(frozen=True, slots=True)
class EncodeLayout:
    """The block of a step of a bucket's sizes."""

    bucket: Bucket
    has_token_types: bool
    block: StepLayout = field(compare=False)

    @property
    def num_ints(self) -> int:
        return self.block.num_ints

    def write(self, block: np.ndarray, step: Step) -> None:
        """Fills a host block from a step on the host; tokens beyond its own are zeros."""
        batch, prompt_tokens = step.batch, step.requests.prompt_tokens
        arrays = {
            "cu_seqlens": self._cu_seqlens(batch),
            "prompt_tokens": np.empty(0, np.int32) if prompt_tokens is None else prompt_tokens,
            "input_ids": batch.input_ids.numpy(),
            "position_ids": batch.position_ids.numpy(),
        }
        if batch.token_type_ids is not None:
            arrays["token_type_ids"] = batch.token_type_ids.numpy()
        self.block.write(block, arrays)

    def read(self, block: torch.Tensor, step: Step, *, max_seqlen: int) -> Step:
        """The step with views of a device block; `seqlens` stays that of the texts alone."""
        views = self.block.views(block)
        batch = PackedBatch(
            input_ids=views["input_ids"],
            position_ids=views["position_ids"],
            token_type_ids=views.get("token_type_ids"),
            cu_seqlens=views["cu_seqlens"],
            seqlens=step.batch.seqlens,
            max_seqlen=max_seqlen,
        )
        return Step(step.requests, batch, views["prompt_tokens"])

    def _cu_seqlens(self, batch: PackedBatch) -> np.ndarray:
        """The texts', then empty sequences, then fillers over the rows that the bucket adds."""
        bucket, num_tokens = self.bucket, batch.total_tokens
        cu_seqlens = np.full(bucket.batch_size + 1, num_tokens, dtype=np.int32)
        cu_seqlens[: batch.batch_size + 1] = batch.cu_seqlens.numpy()
        ends = num_tokens + FILLER_TOKENS * np.arange(1, bucket.num_fillers + 1)
        cu_seqlens[bucket.num_texts + 1 :] = np.minimum(ends, bucket.total_tokens)
        return cu_seqlens


@lru_cache(maxsize=256)
def encode_layout(bucket: Bucket, *, has_token_types: bool) -> EncodeLayout:
    """The layout of a step of these sizes."""
    tokens = ("input_ids", "position_ids", *(("token_type_ids",) if has_token_types else ()))
    fields = [Field("cu_seqlens", (bucket.batch_size + 1,))]
    fields += [Field("prompt_tokens", (bucket.batch_size,))]
    fields += [Field(name, (bucket.total_tokens,)) for name in tokens]
    return EncodeLayout(bucket, has_token_types, StepLayout(fields))
