"""The feed-forward half of a layer: a mixture of one expert is the dense layer."""

from pathlib import Path

import pytest
import torch
from tiny import load, one_thread, random_ids, save, tiny_model  # noqa: F401  (a fixture)
from tiny_decoders import tiny_decoder

from bytetx.nn.layer import DenseFeedForward, ExpertFeedForward, LocalRows, RowPass
from bytetx.ops.experts import ExpertsWeight
from bytetx.ops.linear import prepare_linear

ROWS = 5


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "gpt_neox"])
def test_one_expert_gives_what_the_dense_layer_gives(name: str, tmp_path: Path) -> None:
    """After post-norms, before a gate, with output norms, and beside the attention's half."""
    model = tiny_model(name) if name == "bert" else tiny_decoder(name)
    layers = load(save(model, tmp_path)).transformer.layers
    layer, placement = layers.weights[0], layers.layer_spec.norm_placement
    dense = layer.feed_forward
    assert isinstance(dense, DenseFeedForward)
    hidden = layers.spec.hidden_size
    generator = torch.Generator().manual_seed(1)
    h, x, half = torch.randn(3, ROWS, hidden, generator=generator)
    router = prepare_linear(torch.zeros(1, hidden), None, prepack=False)
    experts = ExpertsWeight(router, (dense.first,), (dense.out,), top_k=1, normalizes=True)
    mixture = ExpertFeedForward(experts, dense.activation, dense.out_norm)
    step = RowPass(LocalRows(), placement == "post", None)
    norm = layer.ffn_norm if placement == "post" else layers.weights[1].attn_norm
    partial = half if placement == "parallel" else None
    expected = dense.run(h, x.clone(), norm, step, partial=partial)
    found = mixture.run(h, x.clone(), norm, step, partial=partial)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)
    assert mixture.num_bytes == dense.num_bytes + router.num_bytes


def test_experts_are_not_mapped_as_two_layers(tmp_path: Path) -> None:
    layers = load(save(tiny_decoder("qwen3_moe"), tmp_path), prepack=False).transformer.layers
    layer = layers.weights[0]
    assert len(layer.linears) == 2
    with pytest.raises(TypeError, match="experts are not two linear layers"):
        layer.shard(range(8))
