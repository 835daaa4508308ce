"""Blocks whose layers are sharded over the ranks of a group, and in long passes their rows, too."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.layer import LayerWeights, Rows
from bytetx.nn.weight_gather import WeightGather
from bytetx.ops.comm_gemm import (
    all_gather_gemm,
    column_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
)
from bytetx.ops.embedding import embed
from bytetx.ops.linear_rotary import HeadRotation
from bytetx.ops.norm import RowNorm
from bytetx.ops.weight import Weight
from bytetx.parallel.layout import ModelShard, feature_offsets, has_even_shards
from bytetx.parallel.tp import TpGroup


class ShardedBlocks:
    """The calls of LocalBlocks, made by all ranks at the same time with the same total rows."""

    # All ranks replay their CUDA graphs together.
    is_capturable = True
    shard: ModelShard | None
    hidden: range | None = None
    weight_gather: WeightGather | None = None

    def __init__(self, spec: ModelSpec, group: TpGroup, shard: ModelShard):
        self.num_heads, self.num_kv_heads = len(shard.heads), len(shard.kv_heads)
        self.group, self.shard, self.vocab = group, shard, shard.vocab
        self.peers = replace(group.peers, is_even=has_even_shards(spec, group.size))
        self.spec = spec
        self._vocab_offsets = feature_offsets(spec.vocab_size, group.size)

    def sync_kernel_support(self, layers: Iterable[LayerWeights]) -> None:
        """Once all ranks have loaded: the fused ops' kernels run on all of them, or on none.

        layers: this rank's.  All ranks call it. Shards may differ by a head, and where only some
        ranks take a kernel, it would wait for the others without end.
        """
        workspace = self.group.workspace
        if workspace is None:
            return  # the same decision on every rank
        has_all = workspace.memory is not None and all(map(_has_kernels, layers))
        lacking = torch.tensor([float(not has_all)], device=self.group.device)
        if self.group.collectives.all_reduce(lacking).item():
            self.peers = replace(self.peers, workspace=None)

    def begin(self, total_tokens: int) -> Rows:
        return ShardedRows(self, self.group.rows.offsets(total_tokens, self.group.size))

    def gather_vocab(self, logits: Tensor) -> Tensor:
        """[n, this rank's part of the vocabulary] -> [n, vocab_size], the same on every rank."""
        if not logits.shape[0]:
            return logits.new_empty((0, self._vocab_offsets[-1]))
        return self.group.collectives.all_gather_columns(logits, self._vocab_offsets)


def _has_kernels(layer: LayerWeights) -> bool:
    """Empty shards have none; the sums of experts go through collectives."""
    return all(w.has_kernel and w.n > 0 and w.k > 0 for w in layer.linears)


class ShardedRows(Rows):
    """The rows of one pass: sharded as offsets say, or all on every rank (None)."""

    def __init__(self, blocks: ShardedBlocks, offsets: Sequence[int] | None):
        self._blocks, self._offsets = blocks, offsets
        self._peers, self._collectives = blocks.peers, blocks.group.collectives

    def local(self, x: Tensor) -> Tensor:
        if self._offsets is None:
            return x
        return x[self._offsets[self._peers.rank] : self._offsets[self._peers.rank + 1]]

    def gather(self, x: Tensor) -> Tensor:
        return x if self._offsets is None else self._collectives.all_gather(x, self._offsets)

    def embed(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
        *,
        word: Tensor,
        position: Tensor | None = None,
        token_type: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_bias: Tensor | None = None,
        eps: float = 1e-12,
        inputs_embeds: Tensor | None = None,
        bad_ids: Tensor | None = None,
    ) -> Tensor:
        """bytetx.ops.embedding.embed of this rank's rows.

        word: this rank's part of the vocabulary and, behind it, a row of zeros.
        """
        if inputs_embeds is None:
            inputs_embeds = self._embed_words(input_ids, word)
        else:
            inputs_embeds = self.local(inputs_embeds).contiguous()
        return embed(
            self.local(input_ids),
            self._local_ids(position, position_ids),
            self._local_ids(token_type, token_type_ids),
            word=word,
            position=position,
            token_type=token_type,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            eps=eps,
            inputs_embeds=inputs_embeds,
            bad_ids=bad_ids,
        )

    def _local_ids(self, table: Tensor | None, ids: Tensor | None) -> Tensor | None:
        return None if table is None or ids is None else self.local(ids)

    def _embed_words(self, input_ids: Tensor, word: Tensor) -> Tensor:
        """Each row comes from one rank and is zero on the others: their sum is exact."""
        vocab = self._blocks.vocab
        is_local = (input_ids >= vocab.start) & (input_ids < vocab.stop)
        local_ids = torch.where(is_local, input_ids - vocab.start, len(vocab))
        partial = embed(local_ids.int(), None, None, word=word)
        return self.sum_ranks(partial).to(word.dtype)

    def column_parallel(self, x: Tensor, w: Weight, *, activation: str = "none") -> Tensor:
        if self._offsets is None:
            return column_gemm(x, w, peers=self._peers, activation=activation)
        return all_gather_gemm(
            x, w, peers=self._peers, row_offsets=self._offsets, activation=activation
        )

    def project_heads(self, x: Tensor, w: Weight, rotation: HeadRotation) -> Tensor:
        d = self.column_parallel(x, w)
        rotation.turn(d)
        return d

    def row_parallel(
        self,
        x: Tensor,
        w: Weight,
        *,
        residual: Tensor,
        norm: RowNorm | None,
        partial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert norm is not None  # layers without a last norm are not shared
        if self._offsets is None:
            return gemm_all_reduce(
                x,
                w,
                peers=self._peers,
                residual=residual,
                bias=w.sum_bias,
                partial=partial,
                norm=norm,
            )
        return gemm_reduce_scatter(
            x,
            w,
            peers=self._peers,
            row_offsets=self._offsets,
            residual=residual,
            bias=w.sum_bias,
            partial=partial,
            norm=norm,
        )

    def row_parallel_post_norm(
        self, x: Tensor, w: Weight, *, residual: Tensor, norm: RowNorm
    ) -> Tensor:
        return self.row_parallel(x, w, residual=residual, norm=norm)[0]

    def row_parallel_output_norm(
        self,
        x: Tensor,
        w: Weight,
        *,
        residual: Tensor,
        output_norm: RowNorm,
        norm: RowNorm | None,
    ) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros_like(residual)
        d, _ = self.row_parallel(x, w, residual=zeros, norm=output_norm)
        return self.norm_sum(d, residual=residual, norm=norm)

    def sum_ranks(self, partial: Tensor) -> Tensor:
        if self._offsets is None:
            return self._collectives.all_reduce(partial)
        return self._collectives.reduce_scatter(partial, self._offsets)

    def norm_projections(
        self, q: Tensor, k: Tensor, q_norm: RowNorm, k_norm: RowNorm
    ) -> tuple[Tensor, Tensor]:
        """The squares of all ranks' heads are summed; each rank norms its own heads."""
        spec = self._blocks.spec
        # Ranks that share a key head would count it several times.
        copies = max(1, self._peers.size // spec.num_kv_heads)
        q_size, k_size = (n * spec.head_dim for n in (spec.num_heads, spec.num_kv_heads * copies))
        q_squares, k_squares = (x.float().square().sum((1, 2)) for x in (q, k))
        shares = torch.stack([q_squares / q_size, k_squares / k_size])
        scales = torch.rsqrt(self._collectives.all_reduce(shares) + spec.norm_eps)
        new_q, new_k = (
            (x.float() * scale[:, None, None] * norm.weight.view(x.shape[1:])).to(x.dtype)
            for x, scale, norm in zip((q, k), scales, (q_norm, k_norm), strict=True)
        )
        return new_q, new_k
