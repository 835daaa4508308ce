"""Rivals on a GPU, from texts or token ids to vectors on the host."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.bert import PackedTorch
from benchmarks.flash_attn import flash_attn_package
from benchmarks.rivals import (
    BATCH_SIZE,
    Inputs,
    Loader,
    PaddedRival,
    Rival,
    SentenceTransformersRival,
    encoder_of,
    tokenizer_of,
)
from bytetx.errors import BytetxError
from bytetx.packed import pack

_LARGE_BATCH = 256  # where sentence-transformers' padded batches are fastest on an H200
_PACKED_TOKENS = 32768  # of one packed batch: enough for a small model's GEMMs


class PackedTorchRival:
    """Token ids to unit vectors with packed torch: F.linear, FlashAttention-2, mean pooling."""

    name = "packed-torch"
    sorts_itself = False

    def __init__(self, checkpoint: Path, dtype: torch.dtype):
        from transformers import AutoModel

        options = {"dtype": dtype, "trust_remote_code": False}
        model = AutoModel.from_pretrained(checkpoint, **options).eval().to("cuda")
        self._embeddings, self._layers = model.embeddings, PackedTorch(model)

    def embed(self, inputs: Inputs) -> np.ndarray:
        batches = cut_by_tokens(cast(Sequence[Sequence[int]], inputs), _PACKED_TOKENS)
        return np.concatenate([self._embed_batch(batch) for batch in batches])

    @torch.inference_mode()
    def _embed_batch(self, token_ids: Sequence[Sequence[int]]) -> np.ndarray:
        batch, tables = pack(token_ids, device="cuda"), self._embeddings
        x = F.embedding(batch.input_ids, tables.word_embeddings.weight)
        x = x + F.embedding(batch.position_ids, tables.position_embeddings.weight)
        x = tables.LayerNorm(x + tables.token_type_embeddings.weight[0])
        x = self._layers.encode(x, batch.cu_seqlens, max_seqlen=batch.max_seqlen)
        counts = batch.cu_seqlens.diff()
        owners = torch.arange(batch.batch_size, device="cuda")
        owners = owners.repeat_interleave(counts, output_size=batch.total_tokens)
        sums = x.new_zeros((batch.batch_size, x.shape[1]), dtype=torch.float32)
        sums.index_add_(0, owners, x.float())
        return F.normalize(sums / counts.unsqueeze(1), dim=1).cpu().numpy()


def cut_by_tokens(
    token_ids: Sequence[Sequence[int]], num_tokens: int
) -> Iterator[Sequence[Sequence[int]]]:
    """Consecutive runs of sequences, each of at most num_tokens tokens or of one sequence."""
    first = total = 0
    for i, ids in enumerate(token_ids):
        if total + len(ids) > num_tokens and i > first:
            yield token_ids[first:i]
            first, total = i, 0
        total += len(ids)
    if first < len(token_ids):
        yield token_ids[first:]


def _transformers(checkpoint: Path, dtype: torch.dtype) -> Rival:
    """AutoModel with its default attention, batches of 32."""
    model = encoder_of(checkpoint, dtype).to("cuda")
    return PaddedRival("transformers", tokenizer_of(checkpoint), model, device="cuda")


def load_unpadded(
    checkpoint: Path, dtype: torch.dtype, *, name: str, batch_size: int, device: str = "cuda"
) -> Rival:
    """sentence-transformers with FlashAttention-2, which then packs each batch.

    Raises BytetxError where it pads nevertheless, for then it is another rival.
    """
    with flash_attn_package():
        rival = SentenceTransformersRival(
            checkpoint,
            dtype,
            device=device,
            name=name,
            batch_size=batch_size,
            attention="flash_attention_2",
        )
    if not rival.unpads:
        raise BytetxError("this version of sentence-transformers pads; version 6 unpads")
    return rival


# By batch size: the best one is the rival.
PADDED = {
    "sentence-transformers": BATCH_SIZE,
    f"sentence-transformers-{_LARGE_BATCH}": _LARGE_BATCH,
}
UNPADDED = {f"sentence-transformers-fa2-{batch_size}": batch_size for batch_size in (32, 256, 1024)}


# Each rival: the modules it needs, and how it is loaded.
LOADERS: dict[str, tuple[tuple[str, ...], Loader]] = {
    "transformers": (("transformers",), _transformers),
    **{
        name: (
            ("sentence_transformers",),
            partial(SentenceTransformersRival, device="cuda", name=name, batch_size=size),
        )
        for name, size in PADDED.items()
    },
    "packed-torch": (("transformers",), PackedTorchRival),
    **{
        name: (("sentence_transformers",), partial(load_unpadded, name=name, batch_size=size))
        for name, size in UNPADDED.items()
    },
}
