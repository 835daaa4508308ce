"""Links of the planner: which groups leave a node, what hides there, and at which rates."""

from dataclasses import replace
from pathlib import Path

import pytest

from bytetx.cli.calibrate import Found, machine_text
from bytetx.cli.calibrate_links import Link
from bytetx.parallel.grid import AXES, Grid, grids_of
from bytetx.parallel.planner.machine import Machine, load_machine
from bytetx.parallel.planner.plan import plan


def lies_inside(machine: Machine, grid: Grid, axis: str) -> bool:
    """Whether each group lies in one node, rank by rank."""
    nodes = [
        {rank // machine.gpus_per_node for rank in grid.group(axis, member)}
        for member in range(grid.size)
    ]
    return all(len(node) == 1 for node in nodes)


@pytest.mark.parametrize("gpus", [4, 6, 8, 12, 16, 24, 40])
@pytest.mark.parametrize("name", ["h200-nvlink", "alps"])
def test_a_group_that_crosses_nodes_had_the_rate_of_one(name: str, gpus: int) -> None:
    machine = load_machine(name)
    for grid in grids_of(gpus):
        for axis in AXES:
            inner, size = grid.inner(axis), grid.length(axis)
            if size == 1:
                continue
            found = machine.is_inside(inner, size, ranks=gpus)
            assert found == lies_inside(machine, grid, axis), (grid, axis)


def test_a_ring_across_nodes_is_as_fast_as_its_slowest_link() -> None:
    machine = replace(load_machine("h200-nvlink"), inter_gbps=10_000.0)
    inside, across = (
        machine.collective_us("all_gather", 2**40, inner=1, size=3, ranks=ranks)
        for ranks in (6, 24)
    )
    assert across == pytest.approx(inside, rel=1e-3)


def test_kernels_hid_sums_between_nodes() -> None:
    for name in ("h200-nvlink", "h100-nvlink"):
        for gpus, is_inside in ((8, True), (16, False)):
            one = plan("llama-70b", machine=name, gpus=gpus, lengths=512, batch=64)
            rows = [t for t in one.explain(f"y{gpus}").prefill.transfers if t.transfer.is_of_layer]
            assert rows
            for row in rows:
                assert bool(row.hides_behind) == is_inside
                assert is_inside or row.exposed_us == row.wait_us


def test_a_measured_rate_of_sums_was_dropped_beside_a_table_of_gathers(tmp_path: Path) -> None:
    published = load_machine("frontier")  # which has one table for all kinds
    assert published.inside_gbps(1, 2) == published.inside_gbps(1, 2, is_all_reduce=True)
    found = Found(gemms=[(16, 768, 1.0)], hbm_gbps=10.0)
    found.attention = {causal: [(64, 64, 1.0)] for causal in (False, True)}
    found.links = [Link(1, 2, "all_gather", 9, 9, 0.1), Link(1, 2, "all_reduce", 9, 9, 0.5)]
    file = tmp_path / "here.toml"
    file.write_text(machine_text(found, size=2))
    machine = load_machine(file)
    assert machine.inside_gbps(1, 2) == pytest.approx(0.1)
    assert machine.inside_gbps(1, 2, is_all_reduce=True) == pytest.approx(0.5)
