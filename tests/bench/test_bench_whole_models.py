"""python -m benchmarks encoder from token ids: whole models, their rivals and floors, on a CPU."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import encoder, gpu, whole_models
from benchmarks.cli import app
from benchmarks.measure import encoder_flop
from benchmarks.records import read_records
from benchmarks.right_runs import right_runs
from bytetx.checkpoint.spec import build_spec
from bytetx.errors import BytetxError

pytest.importorskip("transformers")

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}
MODELS = ("modernbert-base", "deberta-v3-base")
DISENTANGLED_FLASH = {"disentangled-flash-packed"} if find_spec("disentangled_flash") else set()
RIVALS = {
    "modernbert-base": {"transformers"},
    "deberta-v3-base": {"transformers"} | DISENTANGLED_FLASH,
}
LENGTHS = np.array([3, 40, 1, 300, 17, 5, 9, 80, 2])  # more than one padded batch


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every whole model in a tiny size."""
    pads = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    special = pads | {"cls_token_id": 1, "sep_token_id": 2}
    monkeypatch.setitem(whole_models.MODERNBERT_SIZES, "modernbert-base", TINY | special)
    monkeypatch.setitem(whole_models.DEBERTA_SIZES, "deberta-v3-base", TINY)


def test_names_of_cases_are_unique_on_both_devices() -> None:
    for shapes in (encoder.shapes(), encoder.cpu_shapes()):
        assert len({shape.name for shape in shapes}) == len(shapes)
    longest = [s.lengths.max() for s in encoder.shapes() if s.size in whole_models.DEBERTA_SIZES]
    assert len(longest) == 4 and max(longest) == 512  # what the model has positions for


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("size", MODELS)
def test_every_engine_runs_the_same_whole_model(size: str) -> None:
    notes: list[str] = []
    model = whole_models.load_whole_model(size, torch.float32, notes, device="cpu")
    inputs = whole_models.TokenInputs(LENGTHS, vocab_size=100, device="cpu")
    runs = model.runs(inputs)
    assert list(runs)[0] == "ours" and set(runs) == RIVALS[size] | {"ours"}
    with torch.inference_mode():
        ours = runs.pop("ours")()
        assert ours.shape == (LENGTHS.sum(), 64)
        for run in runs.values():
            torch.testing.assert_close(run(), ours, atol=1e-4, rtol=0)


def test_padded_batches_keep_the_order_and_every_token() -> None:
    inputs = whole_models.TokenInputs(LENGTHS, vocab_size=100, device="cpu")
    batches = inputs.padded(4)
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(4, 300), (4, 80), (1, 2)]
    assert all(torch.equal(batch.mask > 0, batch.input_ids > 0) for batch in batches)
    kept = torch.cat([batch.input_ids.flatten()[batch.rows] for batch in batches])
    assert torch.equal(kept, inputs.packed_ids[0])


def test_a_missing_package_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(model: torch.nn.Module, *, backend: str) -> None:
        raise ModuleNotFoundError("No module named 'disentangled_flash'")

    monkeypatch.setitem(whole_models.DEBERTA_SIZES, "deberta-v3-base", TINY)
    monkeypatch.setattr(whole_models, "_disentangled_flash", missing)
    notes: list[str] = []
    model = whole_models.Deberta("deberta-v3-base", torch.float32, notes, device="cpu")
    assert model.packed is None
    assert [note.partition(":")[0] for note in notes] == ["disentangled-flash-packed left out"]


@pytest.mark.parametrize(("terms", "num_terms"), [("c2p|p2c", 2), ("c2p", 1)])
def test_flop_of_disentangled_attention_by_hand(terms: str, num_terms: int) -> None:
    config = {"model_type": "deberta-v2", "relative_attention": True, "position_buckets": 4}
    spec = build_spec(TINY | config | {"pos_att_type": terms, "max_position_embeddings": 12})
    gemm = 2 * (4 * 64 * 64 + 2 * 64 * 128)
    scores = 4 * 64 * (3 * 3 + 8 * 8)
    # Distances up to 2 are buckets of their own, those of 3 to 11 share the third and fourth.
    bucket = [0, 1, 2, 3, 3, 3, 3, 3]
    positions = 3 * 3 + sum(1 + bucket[i] + bucket[7 - i] for i in range(8))
    assert spec.num_layers == 2
    expected = 2 * (gemm * 11 + scores + 2 * 64 * num_terms * positions)
    assert encoder_flop(spec, [3, 0, 8]) == expected


@pytest.mark.usefixtures("tiny")
def test_suite_on_a_cpu_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_file = tmp_path / "cpu.jsonl"
    small = [encoder.Shape(f"{size}-tiny", size, LENGTHS[:3], "fp32") for size in MODELS]
    monkeypatch.setattr(encoder, "cpu_shapes", lambda: small)
    monkeypatch.setattr(encoder, "_CPU_ROUNDS", 2)
    monkeypatch.setattr("benchmarks.measure._RATE_ROWS", (32,))
    words = ["encoder", "--device", "cpu", "--record", str(record_file)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    records = {record.case: record for record in read_records(record_file)}
    assert list(records) == ["modernbert-base-tiny", "deberta-v3-base-tiny"]
    for size in MODELS:
        record = records[f"{size}-tiny"]
        assert (record.suite, record.dtype, record.unit) == ("encoder", "fp32", "ms")
        assert set(record.rivals) == RIVALS[size]
        assert record.shape["total_tokens"] == 44 and record.shape["rounds"] == 2
        assert record.command == "python -m benchmarks encoder --device cpu"
        assert record.floor is not None and 0 < record.floor < 1e3


def test_devices_are_named_in_errors() -> None:
    result = CliRunner().invoke(app, ["encoder", "--device", "tpu"])
    assert result.exit_code == 2 and "--device is cuda or cpu, not 'tpu'" in result.output
    result = CliRunner().invoke(app, ["encoder", "--device", "cpu", "--case", "nothing"])
    assert result.exit_code == 2 and "modernbert-base-1x128" in result.output


@pytest.mark.usefixtures("tiny")
def test_a_rival_that_computes_something_else_is_left_out() -> None:
    notes: list[str] = []
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: torch.ones(3, 4),
        "same": lambda: torch.ones(3, 4),
        "half": lambda: torch.full((3, 4), 0.5),
    }
    assert list(right_runs(runs, None, notes)) == ["ours", "same"]
    assert notes == ["half left out: its relative distance to ours is 5.0e-01"]
    with pytest.raises(BytetxError, match="not finite"):
        right_runs({"ours": lambda: torch.full((1, 1), torch.nan)}, None, notes)


@pytest.mark.gpu
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("size", MODELS)
def test_whole_models_measure_on_a_gpu(size: str) -> None:
    found = encoder.Contest().measure(encoder.Shape("tiny", size, LENGTHS), gpu.Gpu())
    assert RIVALS[size] <= set(found.rivals), found.notes
    assert found.floor is not None and 0 < found.floor < found.ours
    json.dumps(found.shape)
