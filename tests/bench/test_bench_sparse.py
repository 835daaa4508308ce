"""The SPLADE case of the benchmarks: its model, its rival, its ratio and its floor."""

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import SENTENCES, save_checkpoint

from benchmarks import cpu, sparse, text
from benchmarks.measure import encoder_flop
from bytetx.checkpoint.spec import ModelSpec

pytest.importorskip("sentence_transformers")

TEXTS = [sentence for sentence in SENTENCES if sentence] * 3
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


@pytest.fixture
def like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose tokenizer and vocabulary the tiny model takes."""
    monkeypatch.setitem(sparse.SIZES, "base", TINY)
    monkeypatch.setattr(sparse, "_ACTIVE_DIMS", 12)
    return save_checkpoint(tmp_path / "like")


def seconds(spec: ModelSpec, lengths: list[int]) -> float:
    return sparse.splade_flop(spec, lengths) / 1e15


def test_sparse_encoder_is_measured_beside_embed(like: Path) -> None:
    found = sparse.measure_sparse(
        TEXTS,
        like=like,
        dtype=torch.float32,
        device="cpu",
        rivals=sparse.CPU_RIVALS,
        floor=seconds,
        max_rounds=2,
    )
    assert found.notes == () and set(found.rivals) == {"sparse-encoder"}
    assert found.shape["sequences"] == len(TEXTS) and found.shape["rounds"] == 2
    assert found.floor is not None and 0 < found.floor < found.ours
    ratio = found.ours / float(found.shape["embed_us"])
    assert found.shape["of_embed"] == pytest.approx(ratio, rel=1e-2)
    assert 6 < float(found.shape["active_dims"]) < 24  # about 12, and not half of 150


def test_ratio_to_embed_is_no_rival() -> None:
    others = {"embed": 8.0, "sparse-encoder": 30.0}
    found = sparse.sparse_measurement(10.0, others, floor=4.0, shape={"tokens": 9}, notes=["a"])
    assert found.rivals == {"sparse-encoder": 30.0}
    assert found.shape == {"tokens": 9, "embed_us": 8.0, "of_embed": 1.25}
    assert (found.ours, found.floor, found.notes) == (10.0, 4.0, ("a",))


def test_flop_of_the_head_is_counted(like: Path) -> None:
    import bytetx

    with sparse.random_splade(TEXTS[:2], like=like, dtype=torch.float32, device="cpu") as folder:
        spec = bytetx.load(folder, device="cpu").spec
    head = 2 * (32 * 32 + 32 * spec.vocab_size)
    assert sparse.splade_flop(spec, [3, 4]) - encoder_flop(spec, [3, 4]) == 7 * head


def test_rivals_that_fail_or_differ_are_noted(like: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(folder: Path, *, dtype: torch.dtype, device: str, unpads: bool) -> object:
        if unpads:
            raise ModuleNotFoundError("No module named 'sentence_transformers'")
        return Zeros()

    class Zeros:
        def encode(self, texts: list[str], **options: object) -> torch.Tensor:
            return torch.zeros(len(texts), size).to_sparse()

    import bytetx

    with sparse.random_splade(TEXTS[:2], like=like, dtype=torch.float32, device="cpu") as folder:
        model = bytetx.load(folder, device="cpu")
        size = model.spec.vocab_size
        monkeypatch.setattr(sparse, "load_sparse_encoder", load)
        notes: list[str] = []
        names = ("sparse-encoder", "sparse-encoder-fa2-256")
        options = {"dtype": torch.float32, "device": "cpu", "notes": notes}
        assert sparse._rival_runs(names, folder, model, TEXTS, **options) == {}
    assert notes[0] == "sparse-encoder left out: its relative distance to ours is 1.0e+00"
    assert notes[1].startswith("sparse-encoder-fa2-256 left out: ModuleNotFoundError")


def test_suites_list_the_case() -> None:
    assert [shape.name for shape in text.shapes(None)][-1] == "splade-base-strings"
    suite = cpu.suite(patterns=[cpu.SPARSE_CASE], quick=True)
    assert suite.name == "cpu" and cpu.SPARSE_CASE == "bert-base-fp32-splade"
    assert np.isin("sparse-encoder", sparse.CPU_RIVALS)


@pytest.mark.gpu
def test_sparse_encoders_measure_on_a_gpu(like: Path) -> None:
    found = sparse.measure_sparse(
        TEXTS,
        like=like,
        dtype=torch.float16,
        device="cuda",
        rivals=tuple(sparse.RIVALS),
        floor=seconds,
    )
    assert set(found.rivals) == set(sparse.RIVALS), found.notes
