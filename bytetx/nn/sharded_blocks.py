"""Blocks whose layers are split over the ranks of a group, between which rows are dealt, too."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.blocks import NormWeight, RowWeight, WholeBlocks
from bytetx.ops.comm_gemm import (
    RowNorm,
    all_gather_gemm,
    column_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
)
from bytetx.ops.embedding import embed
from bytetx.ops.gated import GatedWeight
from bytetx.ops.linear import LinearWeight, linear
from bytetx.parallel.layout import ModelSplit, deal_features, has_even_shares
from bytetx.parallel.tp import TpGroup


class SplitLayer(Protocol):
    """What a layer of either kind of model has."""

    qkv: LinearWeight
    attn_out: RowWeight
    ffn_in: LinearWeight | GatedWeight
    ffn_out: RowWeight


class ShardedBlocks:
    """The calls of WholeBlocks, of every rank at the same time with the same rows in total."""

    is_capturable = True  # by graphs that all ranks replay together

    def __init__(self, spec: ModelSpec, group: TpGroup, split: ModelSplit):
        self.num_heads, self.num_kv_heads = len(split.heads), len(split.kv_heads)
        self.group, self.split = group, split
        self.peers = replace(group.peers, is_even=has_even_shares(spec, group.size))
        self.whole_blocks = WholeBlocks(spec)
        self.norm_eps = spec.norm_eps
        is_rms = spec.decoder is not None and spec.decoder.norm == "rms_norm"
        self.norm_kind = "rms_norm" if is_rms else "layer_norm"

        self._vocab_offsets = deal_features(spec.vocab_size, group.size)

    def agree_on_kernels(self, layers: Iterable[SplitLayer]) -> None:
        """Once all ranks have loaded: the fused ops' kernels run on all of them, or on none.

        layers: this rank's.  All ranks call it. Shares may differ by a head, and a kernel that
        takes one of them alone would wait in vain for the others.
        """
        workspace = self.group.workspace
        if workspace is None:
            return  # on every rank
        has_all = workspace.memory is not None and all(map(_has_kernels, layers))
        lacking = torch.tensor([float(not has_all)], device=self.group.device)
        if self.group.collectives.all_reduce(lacking).item():
            self.peers = replace(self.peers, workspace=None)

    def begin(self, total_tokens: int) -> "_Rows":
        return _Rows(self, self.group.rows.offsets(total_tokens, self.group.size))

    def gather_vocab(self, logits: Tensor) -> Tensor:
        """[n, this rank's words] -> [n, vocab_size], the same on every rank."""
        if not logits.shape[0]:
            return logits.new_empty((0, self._vocab_offsets[-1]))
        return self.group.collectives.all_gather_columns(logits, self._vocab_offsets)


def _has_kernels(layer: SplitLayer) -> bool:
    """Empty shares have none."""
    columns, rows = (layer.qkv, layer.ffn_in), (layer.attn_out.linear, layer.ffn_out.linear)
    return all(w.has_kernel and w.n > 0 for w in columns) and all(
        w.has_kernel and w.k > 0 for w in rows
    )


class _Rows:
    """The rows of one pass: dealt to the ranks as offsets say, or all on every rank (None)."""

    def __init__(self, blocks: ShardedBlocks, offsets: Sequence[int] | None):
        self._blocks, self._offsets = blocks, offsets
        self._peers, self._collectives = blocks.peers, blocks.group.collectives

    def own(self, x: Tensor) -> Tensor:
        if self._offsets is None:
            return x
        return x[self._offsets[self._peers.rank] : self._offsets[self._peers.rank + 1]]

    def whole(self, x: Tensor) -> Tensor:
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

        word: this rank's words and, behind them, a row of zeros.
        """
        if inputs_embeds is None:
            words = self._words(input_ids, word)
        else:
            words = self.own(inputs_embeds).contiguous()
        return embed(
            self.own(input_ids),
            None if position is None else self.own(position_ids),
            None if token_type is None else self.own(token_type_ids),
            word=word,
            position=position,
            token_type=token_type,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            eps=eps,
            inputs_embeds=words,
            bad_ids=bad_ids,
        )

    def _words(self, input_ids: Tensor, word: Tensor) -> Tensor:
        """Each row comes from one rank and is zero on the others: their sum is exact."""
        vocab = self._blocks.split.vocab
        is_own = (input_ids >= vocab.start) & (input_ids < vocab.stop)
        local_ids = torch.where(is_own, input_ids - vocab.start, len(vocab))
        partial = embed(local_ids.int(), None, None, word=word)
        if self._offsets is None:
            summed = self._collectives.all_reduce(partial)
        else:
            summed = self._collectives.reduce_scatter(partial, self._offsets)
        return summed.to(word.dtype)

    def column(
        self, x: Tensor, w: LinearWeight | GatedWeight, *, activation: str = "none"
    ) -> Tensor:
        if self._offsets is not None:
            offsets = self._offsets
            return all_gather_gemm(
                x, w, peers=self._peers, row_offsets=offsets, activation=activation
            )
        return column_gemm(x, w, peers=self._peers, activation=activation)

    def partial(self, x: Tensor, w: RowWeight) -> Tensor:
        """Without the bias, which the loader put into the other half's."""
        assert w.bias is None
        return linear(x, w.linear)

    def project(
        self,
        x: Tensor,
        w: RowWeight,
        *,
        residual: Tensor,
        norm: NormWeight,
        partial: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        blocks = self._blocks
        row_norm = RowNorm(norm.weight, norm.bias, blocks.norm_eps, blocks.norm_kind)
        options = {"residual": residual, "bias": w.bias, "partial": partial, "norm": row_norm}
        if self._offsets is None:
            return gemm_all_reduce(x, w.linear, peers=self._peers, **options)
        offsets = self._offsets
        return gemm_reduce_scatter(x, w.linear, peers=self._peers, row_offsets=offsets, **options)

    def project_norm(
        self, x: Tensor, w: RowWeight, *, residual: Tensor, norm: NormWeight
    ) -> Tensor:
        return self.project(x, w, residual=residual, norm=norm)[0]

    def norm(self, x: Tensor, norm: NormWeight) -> Tensor:
        return self._blocks.whole_blocks.norm(x, norm)
