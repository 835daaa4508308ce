"""The suite that holds the planner against measured grids, with models that only wait."""

import time
from dataclasses import dataclass

import pytest
import torch

from benchmarks import grids
from bytetx.errors import BytetxError
from bytetx.parallel.grid import Grid
from bytetx.parallel.planner.machine import load_machine
from bytetx.parallel.planner.shapes import SHAPES


@dataclass
class WaitingModel:
    seconds: float
    num_calls: int = 0

    def embed(self, texts: list[list[int]], *, pooling: str) -> None:
        self.num_calls += 1
        time.sleep(self.seconds)


def test_cases_are_batches_of_five_sizes_of_each_family() -> None:
    cases = grids.shapes()
    assert len(cases) == 10 * len(grids.FAMILIES) == len({case.name for case in cases})
    for case in cases:
        family = grids.FAMILIES[case.family]
        assert sum(case.lengths) == int(case.name.rpartition("-")[2]) in family.tokens
        assert 0 < min(case.lengths) <= max(case.lengths) <= family.longest
        assert len(case.lengths) >= 2  # each slot of two has a text
        assert ("ragged" in case.name) == (len(set(case.lengths)) > 1)


def test_a_case_says_what_the_planner_chose_and_what_was_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grids, "_HOT_S", 0.0)
    monkeypatch.setattr(grids, "_TIMED_S", 0.0)
    monkeypatch.setattr(grids, "_ROUNDS", 3)
    waits = {Grid(): 0.02, Grid(data=2): 0.02, Grid(z=2): 0.001, Grid(y=2): 0.03}
    models = {grid: WaitingModel(seconds) for grid, seconds in waits.items()}
    family = grids.Models(SHAPES["bert-large"], "fp16", models)
    case = grids.Shape("bert-large-equal-2048", "bert-large", (512,) * 4)
    found = grids.measure(case, family, load_machine("h100-nvlink"))
    assert found.shape["chosen"] == "data2" and found.shape["fastest"] == "z2"
    assert found.shape["beaten_by"] == "z2"
    assert found.ours == pytest.approx(20, rel=0.5) and set(found.rivals) == {"one", "z2", "y2"}
    ms = found.rivals | {"data2": found.ours}
    errors = [abs(float(found.shape[f"planned_{grid}_ms"]) / ms[grid] - 1) for grid in ms]
    assert found.shape["mean_error"] == pytest.approx(sum(errors) / 4, abs=2e-3)
    assert all(model.num_calls == 3 + 3 * 2 for model in models.values())


def test_a_batch_of_one_text_leaves_slots_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "_HOT_S", 0.0)
    monkeypatch.setattr(grids, "_TIMED_S", 0.0)
    models = {grid: WaitingModel(0.0) for grid in (Grid(), Grid(data=2), Grid(y=2))}
    family = grids.Models(SHAPES["bert-large"], "fp16", models)
    case = grids.Shape("one", "bert-large", (512,))
    found = grids.measure(case, family, load_machine("h100-nvlink"))
    assert found.shape["chosen"] == "y2" and set(found.rivals) == {"one"}


def test_it_needs_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BytetxError, match="two GPUs or more, and torch finds 1"):
        grids.suite(patterns=[], machine="h100-nvlink")


def test_a_grid_is_faster_where_it_is_in_every_round() -> None:
    assert grids.is_faster([1.0, 2.0], [1.1, 2.1])
    assert not grids.is_faster([1.0, 2.0], [1.1, 1.9])
    assert not grids.is_faster([1.0, 2.0], [1.0, 2.0])


def test_the_share_of_copies_that_kernels_cover() -> None:
    kernels = [(0.0, 10.0), (5.0, 12.0), (20.0, 30.0)]
    assert grids.covered_share([(0, 10)], kernels) == 1
    assert grids.covered_share([(8, 16)], kernels) == 0.5  # to 12
    assert grids.covered_share([(10, 22), (40, 44)], kernels) == 0.25  # 2 + 2 of 16
    assert grids.covered_share([(12, 20)], kernels) == 0
    assert grids.covered_share([], kernels) is None and grids.covered_share([(1, 2)], []) == 0
    assert grids.hidden_share(lambda: None) is None or torch.cuda.is_available()
