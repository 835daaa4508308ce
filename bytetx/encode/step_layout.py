"""An encoder step as one int32 block: its texts, padded to a bucket's sizes for CUDA graphs."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from bytetx.buckets import FILLER_TOKENS, Bucket, bucket_of
from bytetx.encode.request import Requests
from bytetx.encode.step import Step
from bytetx.ops import native
from bytetx.ops.native_params import StepBlockLayout
from bytetx.packed import positions_of, prefix_sums
from bytetx.runtime.batch_layout import BatchLayout

_NONE = np.empty(0, dtype=np.int32)


class EncodeLayout:
    """The block of a step of a bucket's sizes. There is one object for each of its arguments.

    position_offset: of the family.
    """

    def __init__(self, batch: BatchLayout, *, position_offset: int):
        self.batch, self._position_offset = batch, position_offset
        self.bucket, self.num_ints = batch.bucket, batch.num_ints
        bucket = batch.bucket
        self._native = StepBlockLayout(
            cu_seqlens=batch.start("cu_seqlens"),
            prompt_tokens=batch.start("prompt_tokens"),
            input_ids=batch.start("input_ids"),
            position_ids=batch.start("position_ids"),
            token_type_ids=batch.start("token_type_ids"),
            num_texts=bucket.num_texts,
            num_fillers=bucket.num_fillers,
            filler_tokens=FILLER_TOKENS,
            total_tokens=bucket.total_tokens,
            position_offset=position_offset,
        )

    def write(self, block: np.ndarray, requests: Requests) -> None:
        """Fills a host block from the texts of a step; tokens beyond their own are zeros."""
        ids, seqlens = requests.token_ids, requests.seqlens
        types, prompt_tokens = requests.token_type_ids, requests.prompt_tokens
        write = native.write_step_block()
        if write is not None:
            return write(self._native, block, ids, seqlens, types, prompt_tokens)
        cu_seqlens = prefix_sums(seqlens)
        arrays = {
            "cu_seqlens": cu_seqlens,
            "input_ids": ids,
            "position_ids": positions_of(
                ids, seqlens, cu_seqlens, position_offset=self._position_offset
            ),
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
def encode_layout(
    bucket: Bucket, *, has_token_types: bool, position_offset: int = 0
) -> EncodeLayout:
    """The layout of a step of these sizes."""
    layout = BatchLayout(bucket, has_token_types=has_token_types, columns=("prompt_tokens",))
    return EncodeLayout(layout, position_offset=position_offset)


@lru_cache(maxsize=4096)
def padded_layout(
    total_tokens: int,
    num_texts: int,
    *,
    max_tokens: int,
    has_token_types: bool,
    position_offset: int,
) -> EncodeLayout | None:
    """The layout of the bucket for so many tokens and texts; None where it exceeds max_tokens'."""
    bucket = bucket_of(total_tokens, num_texts, max_tokens=max_tokens)
    if bucket is None:
        return None
    return encode_layout(bucket, has_token_types=has_token_types, position_offset=position_offset)
