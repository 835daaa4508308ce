"""The machine file that --calibrate writes, measured by two threads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny import one_thread  # noqa: F401  (a fixture)

from bytetx import plan
from bytetx.errors import InputError
from bytetx.executor import calibrate
from bytetx.parallel.grid import Grid
from bytetx.parallel.planner.machine import load_machine
from bytetx.parallel.tp import GroupCollectives


def test_the_fit_of_a_link() -> None:
    alpha, per_byte = calibrate._line([(n, 30 + n / 400e3) for n in (1e3, 1e5, 1e7, 1e8)])
    assert alpha == pytest.approx(30) and per_byte == pytest.approx(1 / 400e3)
    alpha, per_byte = calibrate._line([(1e3, 90.0), (1e6, 80.0), (1e7, 70.0)])  # noise alone
    assert alpha >= 0 and per_byte > 0


def test_every_group_of_a_node_is_measured() -> None:
    assert set(calibrate._groups(8)) == {(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)}
    assert calibrate._groups(1) == []


def test_measured_machines_can_be_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        calibrate, "_CPU", calibrate._Sizes((4, 8), 64, 1 << 16, (1 << 12, 1 << 14))
    )
    monkeypatch.setattr(calibrate.torch.cuda, "is_available", lambda: False)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(calibrate._measure, store, rank=i, size=2) for i in range(2)]
        texts = [rank.result() for rank in ranks]
    path = tmp_path / "here.toml"
    path.write_text(texts[0])
    machine = load_machine(path)
    assert machine.gpus_per_node == 2 and set(machine.table) == {(1, 2)}
    assert machine.rate(100) == machine.gemm_table[0][1] > 0
    assert plan("bert-base", machine=path, batch=8).find(Grid(z=2)) is not None


def test_what_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="is no folder"):
        calibrate.calibrate_to_file(tmp_path / "none" / "m.toml", ranks=2)
    monkeypatch.setattr(calibrate.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="needs 2 GPUs"):
        calibrate.calibrate_to_file(tmp_path / "m.toml", ranks=2)


def test_the_host_is_measured_by_launches() -> None:
    alone = GroupCollectives(None, rank=0, size=1)
    op_us, collective_us = calibrate._host_us(alone, torch.float32, torch.device("cpu"))
    assert 0 < op_us < 1e5
    assert collective_us == 0
