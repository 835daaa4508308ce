"""Layers that no family has yet: what the fields of LayerSpec mean in any combination."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_models import tiny_model
from tiny import Loaded, load, one_thread, random_ids, save  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import tiny_decoder

from bytetx.checkpoint.layer_spec import LayerSpec
from bytetx.nn.transformer import Transformer
from bytetx.ops.linear import LinearWeight
from bytetx.ops.panels import PanelFinder
from bytetx.packed import split

LENGTHS = [1, 30, 7, 40]


def loaded_as(loaded: Loaded, layers: LayerSpec) -> Loaded:
    """The same tensors as layers of another kind."""
    spec = replace(loaded.spec, layer_spec=layers)
    transformer = Transformer.from_tensors(
        spec, loaded.weights, dtype=torch.float32, device="cpu", prepack=True
    )
    return replace(loaded, spec=spec, transformer=transformer)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "gpt2"])
def test_layers_of_causal_families_without_a_causal_mask(name: str, tmp_path: Path) -> None:
    model = tiny_decoder(name)
    causal = load(save(model, tmp_path))
    loaded = loaded_as(causal, replace(causal.spec.layer_spec, causal=False))
    ids = random_ids(LENGTHS)
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        length = len(sequence)
        mask = torch.zeros(1, 1, length, length)  # added to the scores: every token sees all
        with torch.no_grad():
            expected = model.base_model(torch.tensor([sequence]), attention_mask=mask)
        assert torch.allclose(rows, expected.last_hidden_state[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("window", ["mistral", "mistral-full"])
def test_windowed_layers_have_their_own_rotation(window: str, tmp_path: Path) -> None:
    loaded = load(save(tiny_decoder(window), tmp_path))
    layers = loaded.spec.layer_spec
    assert layers.rotary is not None
    other = replace(layers.rotary, theta=50.0)
    both = loaded_as(loaded, replace(layers, windowed_rotary=other))
    expected = loaded_as(loaded, replace(layers, rotary=other)) if layers.window else loaded
    ids = random_ids(LENGTHS)
    assert all(torch.equal(a, b) for a, b in zip(both.rows(ids), expected.rows(ids), strict=True))


def test_an_encoder_takes_no_cache(tmp_path: Path) -> None:
    loaded = load(save(tiny_decoder("llama"), tmp_path))
    encoder = loaded_as(loaded, replace(loaded.spec.layer_spec, causal=False))
    batch = encoder.pack(random_ids([3]))
    with pytest.raises(ValueError, match="cache must be None"):
        encoder.transformer.forward(batch, cache=object())
    assert len(split(encoder.transformer.forward(batch), batch)) == 1


@pytest.mark.parametrize("name", ["bert", "llama", "qwen3", "gpt2"])
def test_short_texts_keep_the_bits_of_a_batch_from_the_first_to_the_last(
    name: str, tmp_path: Path
) -> None:
    """Passes of few rows go another way from the second one on."""
    model = tiny_model("bert") if name == "bert" else tiny_decoder(name)
    loaded = load(save(model, tmp_path))
    ids = random_ids([9, 40, 3, 30, 12, 1])
    wanted = loaded.rows(ids)
    before = [w for layer in loaded.transformer.layers.weights for w in layer.linears]
    for _ in range(3):
        for sequence, rows in zip(ids, wanted, strict=True):
            assert torch.equal(loaded.rows([sequence])[0], rows)
    weights = loaded.transformer.layers.weights
    matrices = [getattr(w, "fused", w) for layer in weights for w in layer.linears]
    is_known = PanelFinder().find(matrices[0]) is not None and not has_panels(matrices[0])
    assert any(w.few_rows is not None for w in matrices) == is_known
    # Adapters know weights by their identity.
    after = [w for layer in weights for w in layer.linears]
    assert all(w is known for w, known in zip(after, before, strict=True))


def has_panels(w: LinearWeight) -> bool:
    """Whether our kernel runs any number of rows."""
    return w.weight.dtype == torch.int32
