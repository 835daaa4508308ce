"""Every causal family against transformers, on small random checkpoints, without a cache."""

from pathlib import Path

import pytest
import torch
from tiny import load, one_thread, random_ids, save  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import DECODERS, WINDOW, expected, tiny_decoder

from bytetx import heads
from bytetx.packed import split

TOLERANCE = 1e-4  # of the issue: last hidden states in fp32
SEQLENS = [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 40, 3]


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.shape == wanted.shape
    assert (actual - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", DECODERS)
def test_hidden_states_and_logits(name: str, tmp_path: Path) -> None:
    model = tiny_decoder(name)
    loaded = load(save(model, tmp_path))
    head = heads.load_lm(loaded.spec, loaded.loader, word=loaded.transformer.embeddings.word)
    ids, layers = random_ids(SEQLENS), []
    batch = loaded.pack(ids)
    last = loaded.transformer.forward(batch, on_layer=layers.append)
    assert len(layers) == loaded.spec.num_layers + 1
    logits = split(head.forward(last), batch)
    states = [split(x, batch) for x in layers]
    for i, sequence in enumerate(ids):
        wanted = expected(model, sequence)
        for layer, rows in enumerate(states):
            if (
                rows[i].shape == wanted.hidden_states[layer][0].shape
            ):  # OPT-350m's last is projected
                assert_close(rows[i], wanted.hidden_states[layer][0])
        assert_close(logits[i], wanted.logits[0])
    assert loaded.weights.unused() == []


@pytest.mark.parametrize("name", DECODERS)
def test_base_checkpoint(name: str, tmp_path: Path) -> None:
    model = tiny_decoder(name, "Model")
    loaded = load(save(model, tmp_path), prepack=False)
    ids = random_ids([5, 17])
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert_close(rows, expected(model, sequence).last_hidden_state[0])
    assert loaded.weights.unused() == []
