"""Layers without attention: borders of chunks, batch mates, states, and what is refused by name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import load, one_thread, random_ids, save  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import CachedRun, expected, tiny_decoder

import bytetx
from bytetx.errors import CheckpointError, OptionError
from bytetx.ops.delta_chunk import CHUNK

HYBRIDS = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
BORDERS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 0, 2 * CHUNK + 5, 2, 190]


@pytest.mark.parametrize("name", ["lfm2", *HYBRIDS])
def test_texts_of_several_chunks(name: str, tmp_path: Path) -> None:
    sizes = {"max_position_embeddings": 192}
    model = tiny_decoder(name, "Model", **sizes)
    loaded = load(save(model, tmp_path))
    ids = random_ids(BORDERS)
    ids[-1] = [7] * 190  # equal keys: powers of their products would overflow
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        if sequence:
            assert (rows - expected(model, sequence).last_hidden_state[0]).abs().max() < 1e-4
            assert (rows - loaded.rows([sequence])[0]).abs().max() < 1e-5


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_state_over_borders_of_chunks(name: str, tmp_path: Path) -> None:
    loaded = load(save(tiny_decoder(name, "Model"), tmp_path))
    ids = random_ids([190, 66, 3])
    cached, rows = CachedRun(loaded, page_size=16), [[] for _ in ids]
    for counts in ([1, 65, 0], [64, 1, 1], [100, 0, 2], [25, 0, 0]):
        for pieces, piece in zip(rows, cached.step(ids, counts), strict=True):
            pieces.append(piece)
    for pieces, wanted in zip(rows, loaded.rows(ids), strict=True):
        assert (torch.cat(pieces) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    folder = save(tiny_decoder(name), tmp_path)
    model = bytetx.load(folder)
    with pytest.raises(OptionError, match="cannot undo a rejected guess"):
        model.generate([[5, 6]], num_speculative_tokens=2)
    with pytest.raises(OptionError, match="layers without attention"):
        bytetx.load(folder, dtype="fp8")
    with pytest.raises(bytetx.errors.BytetxError, match="layers with attention alone"):
        bytetx.load(folder, tp=2)
    if name == "qwen3_5":
        with pytest.raises(OptionError, match="delta nets"):
            bytetx.load(folder, batch_invariant=True)


def test_no_layer_with_attention_is_refused(tmp_path: Path) -> None:
    folder = save(tiny_decoder("lfm2", layer_types=["conv"] * 3), tmp_path)
    with pytest.raises(CheckpointError, match="at least one must be 'full_attention'"):
        bytetx.load(folder)


def test_experts_saved_in_two_tensors(tmp_path: Path) -> None:
    """As checkpoints of the model that reads images have them, and its class in memory."""
    model = tiny_decoder("qwen3_5_moe", "Model")
    folder = save(model, tmp_path / "each")
    both = tmp_path / "both"
    both.mkdir()
    (both / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = {name: t.contiguous() for name, t in model.state_dict().items()}
    assert any("experts.gate_up_proj" in name for name in tensors)
    save_file(tensors, both / "model.safetensors", metadata={"format": "pt"})
    ids = random_ids([5, 70])
    found = [bytetx.load(path).hidden_states(ids) for path in (folder, both)]
    for one, other in zip(*found, strict=True):
        assert (torch.as_tensor(one) == torch.as_tensor(other)).all()
