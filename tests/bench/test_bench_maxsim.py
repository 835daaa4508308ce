"""python -m benchmarks maxsim: every engine's scores, the floor, and a run on a CPU."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import gpu, maxsim
from benchmarks.cli import app
from benchmarks.records import read_records

pytest.importorskip("sentence_transformers")

RIVALS = {"sentence-transformers-padded", "sentence-transformers-lists", "packed-torch"}
TINY = maxsim.Shape("tiny", np.array([3, 5, 1]), np.array([4, 1, 9, 30]), "fp32")


def test_every_engine_gives_the_scores_of_the_definition() -> None:
    runs = maxsim.make_runs(TINY, "cpu")
    assert set(runs) == RIVALS | {"ours"}
    torch.manual_seed(0)
    queries, documents = (
        torch.nn.functional.normalize(torch.randn(int(seqlens.sum()), 128), dim=1)
        for seqlens in (TINY.query_seqlens, TINY.seqlens)
    )
    wanted = torch.tensor(
        [
            [float((q @ d.T).max(dim=1).values.sum()) for d in documents.split([4, 1, 9, 30])]
            for q in queries.split([3, 5, 1])
        ]
    )
    for run in runs.values():
        torch.testing.assert_close(run(), wanted, atol=1e-5, rtol=1e-5)


def test_work_by_hand() -> None:
    work = maxsim.work_of(TINY)
    assert work.flop == 2 * 9 * 44 * 128
    assert work.num_bytes == 4 * ((9 + 44) * 128 + 3 * 4)
    half = maxsim.work_of(replace(TINY, dtype="fp16"))
    assert half.num_bytes == 2 * (9 + 44) * 128 + 4 * 12


def test_cases_are_those_of_the_targets() -> None:
    for shapes in (maxsim.shapes(), maxsim.cpu_shapes()):
        assert len({shape.name for shape in shapes}) == len(shapes) == 2
        assert all(set(shape.query_seqlens.tolist()) == {32} for shape in shapes)
    many, one = maxsim.shapes()
    assert (len(many.query_seqlens), len(many.seqlens)) == (32, 4096)
    assert (len(one.query_seqlens), len(one.seqlens)) == (1, 1000)


def test_suite_on_a_cpu_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpu.jsonl"
    monkeypatch.setattr(maxsim, "cpu_shapes", lambda: [TINY])
    monkeypatch.setattr("benchmarks.measure._SQUARE", 64)
    found = CliRunner().invoke(app, ["maxsim", "--device", "cpu", "--record", str(file)])
    assert found.exit_code == 0, found.output
    (record,) = read_records(file)
    assert (record.suite, record.case, record.unit) == ("maxsim", "tiny", "us")
    assert set(record.rivals) == RIVALS
    assert record.command == "python -m benchmarks maxsim --device cpu"
    assert record.floor is not None and record.floor > 0
    assert record.shape["flop"] == 2 * 9 * 44 * 128 and record.shape["max_seqlen"] == 30


def test_times_the_floor_is_ours_over_it() -> None:
    found = maxsim._measurement(TINY, {"ours": 30.0, "packed-torch": 45.0}, 12.0, ["a note"])
    assert found.shape["times_floor"] == 2.5 and found.rivals == {"packed-torch": 45.0}
    assert (found.ours, found.floor, found.notes) == (30.0, 12.0, ("a note",))


def test_a_missing_package_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers.util", None)
    monkeypatch.setattr(maxsim, "_gemm_flops", lambda: 1e9)
    found = maxsim.measure_cpu(TINY)
    assert set(found.rivals) == {"packed-torch"}
    assert [note.partition(":")[0] for note in found.notes] == [
        "sentence-transformers-padded left out",
        "sentence-transformers-lists left out",
    ]


@pytest.mark.usefixtures("no_gpu")
def test_suite_asks_for_a_gpu() -> None:
    found = CliRunner().invoke(app, ["maxsim"])
    assert found.exit_code == 1 and "the maxsim suite needs a CUDA GPU" in found.output
    found = CliRunner().invoke(app, ["maxsim", "--device", "tpu"])
    assert found.exit_code == 2 and "--device is cuda or cpu, not 'tpu'" in found.output


@pytest.mark.gpu
def test_maxsim_measures() -> None:
    found = maxsim.measure(replace(TINY, dtype="fp16"), gpu.Gpu())
    assert set(found.rivals) == RIVALS, found.notes
    assert found.floor is not None and 0 < found.floor < found.ours
    json.dumps(found.shape)
