"""Layers of real models with random weights, made in memory as one rank's share of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu import Run
from bytetx.checkpoint.norm_kinds import NORM_KINDS
from bytetx.checkpoint.spec import ModelSpec, build_spec
from bytetx.nn.blocks import Blocks
from bytetx.nn.kv_cache import KvCache, allocate_cache
from bytetx.nn.layer import DenseFeedForward, LayerWeights
from bytetx.nn.layers import Layers
from bytetx.nn.rotary import rotary_tables
from bytetx.nn.sharded_blocks import ShardedBlocks
from bytetx.ops.gated import prepare_gated
from bytetx.ops.linear import LinearWeight, prepare_linear
from bytetx.ops.norm import NORMS, RowNorm
from bytetx.ops.weight import Weight
from bytetx.packed import PackedBatch, Past, pack_columns
from bytetx.parallel.layout import shard_model
from bytetx.parallel.tp import TpGroup

_PAGE_SIZE = 16
# Without a vocabulary: what is measured are layers.
MODELS: dict[str, dict[str, object]] = {
    "gpt3": {"model_type": "gpt2", "n_embd": 12288, "n_head": 96, "n_layer": 96},
    "llama-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "rms_norm_eps": 1e-5,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    },
    "bert-large": {
        "model_type": "bert",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
    },
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48},
}


@dataclass(frozen=True, slots=True)
class Share:
    """The layers of one process. blocks: of all of a layer, or of a rank's shard."""

    spec: ModelSpec
    blocks: Blocks
    layers: Sequence[LayerWeights]

    @property
    def like(self) -> Tensor:
        """A tensor of the weights' dtype and device."""
        norm = self.layers[0].attn_norm
        assert norm is not None  # every model here has one
        return norm.weight


def spec_of(model: str) -> ModelSpec:
    return build_spec(dict(MODELS[model]))


def random_share(
    spec: ModelSpec,
    blocks: Blocks,
    *,
    count: int,
    dtype: torch.dtype,
    device: torch.device | str = "cuda",
) -> Share:
    """`count` layers, of the sizes that blocks.shard says."""
    like = torch.empty(0, dtype=dtype, device=device)
    return Share(spec, blocks, [_layer(spec, blocks, like) for _ in range(count)])


def shared_layers(spec: ModelSpec, group: TpGroup, *, count: int, dtype: torch.dtype) -> Share:
    """`count` layers, of which this rank holds its share; every rank calls it."""
    shard = shard_model(spec, rank=group.rank, size=group.size)
    blocks = ShardedBlocks(spec, group, shard)
    share = random_share(spec, blocks, count=count, dtype=dtype, device=group.device)
    blocks.sync_kernel_support(share.layers)
    return share


def without_kernels(share: Share, blocks: Blocks) -> Share:
    """The same weights for cuBLAS: every linear layer takes its reference path."""

    def plain(layer: LayerWeights) -> LayerWeights:
        return layer.converted(lambda w: replace(w, has_kernel=False))

    return Share(share.spec, blocks, list(map(plain, share.layers)))


def layers_run(share: Share, batch: PackedBatch, cache: KvCache | None) -> Run:
    """Runs the layers on a step's rows, sharded or not as the row scheme says.

    Sharded rows stay sharded: the gather after the last layer is not a part of a layer.
    """
    spec, blocks = share.spec, share.blocks
    rows = blocks.begin(batch.total_tokens)
    like = share.like
    x = _randn(like, batch.total_tokens, spec.hidden_size)
    x = rows.local(x).clone()
    if hasattr(rows, "_offsets"):
        rows.gather = _as_it_is  # type: ignore[method-assign]  # of this instance only
    rotary, is_post = spec.layer_spec.rotary, spec.layer_spec.norm_placement == "post"
    tables = {}
    if rotary is not None:
        tables[rotary] = rotary_tables(rotary, max_positions=spec.max_positions, device=like.device)
    norm = None if is_post else _norm(spec, like)
    layers = Layers(spec, share.layers, blocks=blocks, final_norm=norm, tables=tables)
    return partial(layers.run, lambda: x, batch, rows, cache=cache)


def prefill_batch(share: Share, lengths: np.ndarray) -> PackedBatch:
    """lengths: int64 [batch_size]."""
    ids = np.zeros(int(lengths.sum()), dtype=np.int32)
    return pack_columns(ids, lengths.astype(np.int32), device=share.like.device)


def decode_batch(share: Share, *, num_seqs: int, num_keys: int) -> tuple[PackedBatch, KvCache]:
    """A step of one token each behind num_keys - 1 others, and the pages of them all."""
    pages_each, device = -(-num_keys // _PAGE_SIZE), share.like.device
    cache = allocate_cache(
        num_layers=len(share.layers),
        num_pages=num_seqs * pages_each,
        page_size=_PAGE_SIZE,
        num_kv_heads=share.blocks.num_kv_heads,
        head_dim=share.spec.head_dim,
        dtype=share.like.dtype,
        device=device,
    )
    for layer in cache.layers:
        layer.k_cache.normal_()
        layer.v_cache.normal_()
    table = torch.randperm(num_seqs * pages_each, device=device, dtype=torch.int32)
    table = table.view(num_seqs, pages_each)
    last = num_keys - 1
    slots = table[:, last // _PAGE_SIZE] * _PAGE_SIZE + last % _PAGE_SIZE
    keys = torch.full((num_seqs,), num_keys, dtype=torch.int32, device=device)
    batch = PackedBatch(
        input_ids=torch.zeros_like(keys),
        position_ids=keys - 1,
        token_type_ids=None,
        cu_seqlens=torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
        seqlens=torch.ones(num_seqs, dtype=torch.int32),
        max_seqlen=1,
        past=Past(table, keys, slots, _PAGE_SIZE, num_keys),
    )
    return batch, cache


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _layer(spec: ModelSpec, blocks: Blocks, like: Tensor) -> LayerWeights:
    hidden, heads, kv_heads = spec.hidden_size, blocks.num_heads, blocks.num_kv_heads
    inner = spec.intermediate_size if blocks.shard is None else len(blocks.shard.inner)
    biases = set(spec.layer_spec.biases)
    biases |= {"qkv"} if "q" in biases else set()
    weight = partial(_linear, like)
    out: Callable[..., LinearWeight] = partial(_out_linear, like, blocks)
    ffn_in: Weight
    if spec.is_gated:
        gate, up = (_matrix(like, inner, hidden) for _ in range(2))
        ffn_in = prepare_gated(gate, up, prepack=False)
    else:
        ffn_in = weight(inner, hidden, has_bias="ffn_in" in biases)
    return LayerWeights(
        qkv=weight((heads + 2 * kv_heads) * spec.head_dim, hidden, has_bias="qkv" in biases),
        attn_out=out(hidden, heads * spec.head_dim, has_bias="attn_out" in biases),
        attn_norm=_norm(spec, like),
        ffn_norm=_norm(spec, like),
        feed_forward=DenseFeedForward(
            ffn_in, out(hidden, inner, has_bias="ffn_out" in biases), spec.activation
        ),
    )


def _linear(like: Tensor, n: int, k: int, *, has_bias: bool) -> LinearWeight:
    bias = _randn(like, n) if has_bias else None
    return prepare_linear(_matrix(like, n, k), bias, prepack=False)


def _out_linear(like: Tensor, blocks: Blocks, n: int, k: int, *, has_bias: bool) -> LinearWeight:
    """Make a linear layer; a rank's share has its bias beside it."""
    if blocks.shard is None:
        return _linear(like, n, k, has_bias=has_bias)
    bias = _randn(like, n) if has_bias else None
    return replace(_linear(like, n, k, has_bias=False), sum_bias=bias)


def _matrix(like: Tensor, n: int, k: int) -> Tensor:
    """Draw a matrix that keeps the features' magnitude."""
    return _randn(like, n, k).mul_(k**-0.5)


def _norm(spec: ModelSpec, like: Tensor) -> RowNorm:
    kind = spec.layer_spec.norm
    shift = like.new_zeros(spec.hidden_size) if NORM_KINDS[kind].has_shift else None
    return NORMS[kind](like.new_ones(spec.hidden_size), shift, spec.layer_norm_eps)


def _randn(like: Tensor, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=like.dtype, device=like.device)
