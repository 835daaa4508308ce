"""Passes of which some rows are read: those are the rows of a whole pass."""

from pathlib import Path

import pytest
import torch
from tiny import load, random_ids, save, tiny_model

FAMILIES = ["bert", "deberta-v2", "deberta", "electra", "mpnet", "modernbert", "eurobert"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_rows_that_are_read_are_those_of_the_whole_pass(
    family: str, num_layers: int, tmp_path: Path
) -> None:
    loaded = load(save(tiny_model(family, num_hidden_layers=num_layers), tmp_path))
    batch = loaded.pack(random_ids([1, 7, 0, 40, 2]))
    whole = loaded.transformer.forward(batch)
    is_post = loaded.spec.layer_spec.norm_placement == "post"
    for rows in ([0], [0, 3, 8, 20, 49], list(range(50))):
        read = torch.tensor(rows)
        found = loaded.transformer.forward(batch, read_rows=read)
        assert found.shape == whole.shape
        torch.testing.assert_close(found[read], whole[read], rtol=1e-5, atol=1e-5)
        if is_post and num_layers > 1:  # else the test would pass without any selection
            others = torch.ones(50, dtype=torch.bool)
            others[read] = False
            assert not found[others].any()


def test_outputs_of_each_layer_are_whole(tmp_path: Path) -> None:
    loaded = load(save(tiny_model("bert"), tmp_path))
    batch, layers = loaded.pack(random_ids([5, 3])), []
    read = torch.tensor([0, 5])
    found = loaded.transformer.forward(batch, read_rows=read, on_layer=layers.append)
    assert torch.equal(layers[-1], found) and torch.equal(found, loaded.transformer.forward(batch))
