"""BERT of random weights, made in memory, and the engines that run its layers on a GPU."""

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lengths import prefix_sums
from benchmarks.rivals import quiet
from bytetx.checkpoint.files import load_config
from bytetx.checkpoint.spec import ModelSpec, build_spec
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch, pack

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
SIZES: dict[str, dict[str, int]] = {
    "base": {},
    "large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}


@dataclass(frozen=True, slots=True)
class Bert:
    """One set of weights as transformers' model and as ours; both hold the same numbers."""

    model: Any  # transformers' BertModel
    spec: ModelSpec
    transformer: Transformer


def random_bert(
    sizes: dict[str, int], dtype: torch.dtype, *, device: torch.device | str = "cuda"
) -> Bert:
    """A BERT of random weights; sizes: what differs from BERT-base, as in config.json."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig.from_dict(sizes)
    with quiet(), torch.device(device):
        model: Any = BertModel(config, add_pooling_layer=False)
        model = model.to(dtype).eval()
    spec = build_spec(config.to_dict())
    transformer = Transformer.from_tensors(
        spec, model.state_dict(), dtype=dtype, device=device, prepack=True
    )
    return Bert(model, spec, transformer)


@contextmanager
def random_checkpoint(
    size: str, dtype: torch.dtype, *, like: Path, device: str = "cuda"
) -> Iterator[Path]:
    """A folder, for a while, with a BERT of random weights and the tokenizer of another checkpoint.

    size: a key of SIZES.
    """
    sizes = SIZES[size] | {"vocab_size": load_config(like)["vocab_size"]}
    bert = random_bert(sizes, dtype, device=device)
    with tempfile.TemporaryDirectory(prefix="bytetx-bench-") as folder:
        with quiet():
            bert.model.save_pretrained(folder)
        for name in TOKENIZER_FILES:
            if (like / name).exists():
                shutil.copy(like / name, folder)
        del bert  # its memory is for those who load the folder
        yield Path(folder)


class LayerInputs:
    """Embedded tokens of sequences of the given lengths, packed, and padded as rivals want them.

    x: random [total_tokens, hidden_size].
    """

    @torch.inference_mode()
    def __init__(self, bert: Bert, lengths: np.ndarray, *, device: torch.device | str = "cuda"):
        size = (int(lengths.sum()), bert.spec.hidden_size)
        self.lengths = lengths
        self.max_seqlen = int(lengths.max())
        self.cu_seqlens = prefix_sums(lengths, device)
        self.x = torch.randn(size, device=device, dtype=bert.transformer.embeddings.word.dtype)
        self.batch = _batch(lengths, device)

    def is_real(self) -> Tensor:
        """bool [batch_size, max_seqlen]: which positions of the padded batch hold a token."""
        places = torch.arange(self.max_seqlen, device=self.x.device)
        return places < self.cu_seqlens.diff().unsqueeze(1)

    def padded(self) -> tuple[Tensor, Tensor | None]:
        """x [batch_size, max_seqlen, hidden_size], zeros where padded, and transformers' mask.

        The mask: bool [batch_size, 1, max_seqlen, max_seqlen], None where nothing is padded.
        """
        real = self.is_real()
        padded = self.x.new_zeros((*real.shape, self.x.shape[1]))
        padded[real] = self.x
        if real.all():
            return padded, None
        return padded, real[:, None, None].expand(-1, 1, self.max_seqlen, -1).contiguous()


def _batch(lengths: np.ndarray, device: torch.device | str) -> PackedBatch:
    """The lengths as the batch that our layers take; its ids are never read."""
    ids = [np.zeros(length, dtype=np.int32) for length in lengths]
    return pack(ids, has_token_types=True, device=device)


class PackedLayer(NamedTuple):
    """One layer's weights for PackedTorch, in the order of use."""

    qkv: Tensor
    qkv_bias: Tensor
    attn_out: Tensor
    attn_out_bias: Tensor
    attn_norm: Tensor
    attn_norm_bias: Tensor
    ffn_in: Tensor
    ffn_in_bias: Tensor
    ffn_out: Tensor
    ffn_out_bias: Tensor
    ffn_norm: Tensor
    ffn_norm_bias: Tensor


# (attended, x, layer) -> the layer's output
Finish = Callable[[Tensor, Tensor, PackedLayer], Tensor]


def finish_layer(attended: Tensor, x: Tensor, w: PackedLayer) -> Tensor:
    """All of a BERT layer that comes after attention, in torch's own operations."""
    size, eps = x.shape[-1:], 1e-12
    x = x + F.linear(attended, w.attn_out, w.attn_out_bias)
    x = F.layer_norm(x, size, w.attn_norm, w.attn_norm_bias, eps)
    inner = F.gelu(F.linear(x, w.ffn_in, w.ffn_in_bias))
    x = x + F.linear(inner, w.ffn_out, w.ffn_out_bias)
    return F.layer_norm(x, size, w.ffn_norm, w.ffn_norm_bias, eps)


class PackedTorch:
    """Packed tokens with what torch has: F.linear and the FlashAttention-2 kernel in it.

    The strongest encoder that a user can write in an afternoon; runs under a CUDA graph as it is.
    """

    def __init__(self, model: Any):  # transformers' BertModel
        self.layers = [_packed_layer(layer) for layer in model.encoder.layer]
        self.num_heads = model.config.num_attention_heads

    def encode(
        self, x: Tensor, cu_seqlens: Tensor, *, max_seqlen: int, finish: Finish = finish_layer
    ) -> Tensor:
        """x: [total_tokens, hidden_size].  finish: finish_layer, or what a compiler made of it."""
        for layer in self.layers:
            qkv = F.linear(x, layer.qkv, layer.qkv_bias)
            q, k, v = qkv.view(x.shape[0], 3, self.num_heads, -1).unbind(1)
            attended = flash_attention(q, k, v, cu_seqlens, max_seqlen=max_seqlen)
            x = finish(attended.reshape(x.shape), x, layer)
        return x


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    causal: bool = False,
    window: int = 0,
) -> Tensor:
    """FlashAttention-2's varlen kernel as torch ships it; window as in varlen_attention."""
    left = window - 1 if window else None
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, causal, False),
        scale=q.shape[-1] ** -0.5,
        window_size_left=left,
        window_size_right=0 if causal and window else left,
    )[0]
    return out


@torch.inference_mode()
def compiled_finish(bert: Bert) -> Finish:
    """finish_layer through torch.compile, for this model's sizes and any number of tokens."""
    finish = torch.compile(finish_layer, dynamic=False)
    layer = _packed_layer(bert.model.encoder.layer[0])
    size, like = (256, bert.spec.hidden_size), layer.qkv
    attended, x = (torch.randn(size, device=like.device, dtype=like.dtype) for _ in range(2))
    for tensor in (attended, x):
        torch._dynamo.mark_dynamic(tensor, 0)
    finish(attended, x, layer)
    return finish


def compiled_layers(encoder: Any) -> Any:
    """A copy of transformers' encoder whose layers go through torch.compile, one graph for all."""
    encoder = copy.deepcopy(encoder)
    for layer in encoder.layer:
        layer.compile(dynamic=False)
    return encoder


def _packed_layer(layer: Any) -> PackedLayer:
    attention, output = layer.attention.self, layer.attention.output
    projections = (attention.query, attention.key, attention.value)
    with torch.no_grad():
        qkv = torch.cat([projection.weight for projection in projections])
        qkv_bias = torch.cat([projection.bias for projection in projections])
    rest = (
        output.dense,
        output.LayerNorm,
        layer.intermediate.dense,
        layer.output.dense,
        layer.output.LayerNorm,
    )
    parts = [tensor.detach() for module in rest for tensor in (module.weight, module.bias)]
    return PackedLayer(qkv, qkv_bias, *parts)
