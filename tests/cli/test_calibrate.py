"""The machine file that --calibrate writes, measured by two threads and by loaded models."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tiny import one_thread  # noqa: F401  (a fixture)

from bytetx import plan
from bytetx.cli import calibrate, calibrate_links, calibrate_passes
from bytetx.errors import InputError
from bytetx.parallel.grid import Grid
from bytetx.parallel.planner.machine import Around, load_machine
from bytetx.parallel.tp import GroupCollectives


def test_the_fit_of_a_link() -> None:
    alpha, per_byte = calibrate_links.line([(n, 30 + n / 400e3) for n in (1e3, 1e5, 1e7, 1e8)])
    assert alpha == pytest.approx(30) and per_byte == pytest.approx(1 / 400e3)
    alpha, per_byte = calibrate_links.line([(1e3, 90.0), (1e6, 80.0), (1e7, 70.0)])  # noise alone
    assert alpha >= 0 and per_byte > 0


def test_every_group_of_a_node_is_measured() -> None:
    assert set(calibrate.groups_of(8)) == {(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)}
    assert calibrate.groups_of(1) == []


@pytest.mark.feature("Several devices", "measured machines for the planner")
def test_measured_machines_can_be_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(
        calibrate._CPU,
        gemm_rows=(4, 8),
        features=(64, 128),
        tokens=64,
        lengths=(16, 32),
        copy_bytes=1 << 16,
        payloads=(1 << 12, 1 << 14),
    )
    monkeypatch.setattr(calibrate, "_CPU", small)
    monkeypatch.setattr(calibrate, "_MOST_FLOP", 2 * 4 * 128**2)
    monkeypatch.setattr(calibrate.torch.cuda, "is_available", lambda: False)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(calibrate.measure, store, rank=i, size=2) for i in range(2)]
        found = [rank.result() for rank in ranks]
    assert found[0].gemms == found[1].gemms
    rates = {(m, features): rate for m, features, rate in found[0].gemms}
    assert rates[8, 128] == rates[4, 128]  # too long to be measured
    found[0].around = {"slots": Around(100.0, 0.5)}
    path = tmp_path / "here.toml"
    path.write_text(calibrate.machine_text(found[0], size=2))
    machine = load_machine(path)
    assert machine.gpus_per_node == 2 and set(machine.table) == {(1, 2)}
    assert machine.gemm_table.at(4, 64) == pytest.approx(rates[4, 64], rel=1e-3)
    assert set(machine.attention_tables) == {False, True}
    assert machine.graph_tokens == 0 and machine.copies_gbps == 0
    planned = plan("bert-base", machine=path, batch=8).find(Grid(z=2))
    assert planned is not None
    assert planned.prefill.around_us == 100 + 0.5 * planned.num_tokens


def test_what_a_pass_takes_around_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text more takes as long as another one; a rank alone is measured without a grid."""
    monkeypatch.setattr(calibrate_passes, "_BATCHES", (1, 3))
    monkeypatch.setattr(calibrate_passes, "_ROUNDS", 3)
    found = calibrate_passes.measure_around(1, device="cpu")
    assert set(found) == {"one"} and found["one"].us >= 0 and found["one"].us_per_token > 0
    monkeypatch.setattr(calibrate_passes, "_median_us", lambda run: len(run.args[0]) * 10.0)
    around = calibrate_passes._around(SimpleNamespace(embed=print))  # it is not called
    tokens = calibrate_passes._TEXT_TOKENS
    assert around == Around(0.0, pytest.approx(10 / tokens))


def test_what_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="is no folder"):
        calibrate.calibrate_to_file(tmp_path / "none" / "m.toml", ranks=2)
    monkeypatch.setattr(calibrate.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="needs 2 GPUs"):
        calibrate.calibrate_to_file(tmp_path / "m.toml", ranks=2)


def test_a_failure_leaves_no_file_and_an_old_one_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(size: int, *, has_gpus: bool) -> str:
        raise InputError("a rank ended")

    monkeypatch.setattr(calibrate, "_measured_text", fail)
    old = tmp_path / "old.toml"
    old.write_text("# of yesterday")
    for path in (tmp_path / "new.toml", old):
        with pytest.raises(InputError, match="a rank ended"):
            calibrate.calibrate_to_file(path, ranks=2)
    assert list(tmp_path.iterdir()) == [old] and old.read_text() == "# of yesterday"


def test_the_host_is_measured_by_launches() -> None:
    alone = GroupCollectives(None, rank=0, size=1)
    op_us, collective_us = calibrate.host_us(alone, torch.float32, torch.device("cpu"))
    assert 0 < op_us < 1e5
    assert collective_us == 0
