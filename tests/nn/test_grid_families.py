"""Every family on grids: what the planner offers can be loaded, and its counts are exact."""

from pathlib import Path

import pytest
import tiny
from test_grids import assert_one_devices_answers
from tiny import one_thread  # noqa: F401  (a fixture)
from tiny_decoders import DECODERS, tiny_decoder

from bytetx.errors import InputError, OptionError
from bytetx.nn.grid_blocks import check_grid
from bytetx.nn.loading import load_spec
from bytetx.parallel.grid import grids_of, parse_grid
from bytetx.parallel.planner.plan import why_not
from bytetx.parallel.planner.shapes import shape_of

MODELS = [*(("encoder", name) for name in tiny.FAMILIES), *(("decoder", name) for name in DECODERS)]


def save(kind: str, name: str, folder: Path) -> Path:
    model = tiny.tiny_model(name) if kind == "encoder" else tiny_decoder(name)
    return tiny.save(model, folder)


@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_the_planner_offered_grids_that_load_refuses(kind: str, name: str, tmp_path: Path) -> None:
    folder = save(kind, name, tmp_path)
    spec = load_spec(folder)
    if spec.experts is not None:
        with pytest.raises(OptionError, match="has experts"):
            shape_of(folder)
        return
    if spec.layer_spec.mixer is not None:
        with pytest.raises(OptionError, match="layers with attention, and .* has others"):
            shape_of(folder)
        for grid in grids_of(2):
            with pytest.raises(InputError, match="layers with attention alone"):
                check_grid(spec, grid)
        return
    shape = shape_of(folder)
    for grid in (grid for size in (2, 4, 8) for grid in grids_of(size)):
        try:
            check_grid(spec, grid)
            is_loaded = True
        except InputError:
            is_loaded = False
        assert (why_not(shape, grid) is None) == is_loaded, grid


def test_layers_that_share_their_weights_were_counted_each(tmp_path: Path) -> None:
    model = tiny.tiny_model("albert", num_hidden_layers=6)
    shape = shape_of(tiny.save(model, tmp_path))
    assert (shape.num_layers, shape.num_stored_layers) == (6, 2)
    saved = sum(weight.numel() for weight in model.parameters())
    assert shape.num_parameters == pytest.approx(saved, rel=0.3)  # without biases and norms


@pytest.mark.parametrize("grid", ["data2.y2", "z2.y2", "y2.x2"])
def test_norms_of_whole_projections_are_in_the_ledger(grid: str, tmp_path: Path) -> None:
    folder = tiny.save(tiny_decoder("olmo2"), tmp_path)
    assert_one_devices_answers(folder, parse_grid(grid))
