"""The static case: who is compared, and what leaves a rival out."""

from pathlib import Path

import numpy as np
import pytest
from checkpoints import SENTENCES, make_tokenizer

from benchmarks import cpu, static

TEXTS = [text for text in SENTENCES if text.isascii()]


@pytest.fixture
def like(tmp_path: Path) -> Path:
    make_tokenizer("wordpiece").save_pretrained(tmp_path)
    return tmp_path


def test_both_packages_are_measured(like: Path) -> None:
    found = static.measure_static(TEXTS, like=like, min_rounds=1, max_rounds=1, seconds=1.0)
    assert found.rivals.keys() == set(static.RIVALS) and not found.notes
    assert found.shape["sequences"] == len(TEXTS) and found.floor is None
    assert cpu.suite(patterns=[cpu.STATIC_CASE], quick=True).name == "cpu"


def test_a_rival_with_other_vectors_is_left_out(
    like: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, folder: Path) -> object:
        if name == "model2vec":
            raise ModuleNotFoundError("No module named 'model2vec'")
        return lambda texts: np.zeros((len(texts), 256), dtype=np.float32)

    monkeypatch.setattr(static, "_load", load)
    found = static.measure_static(TEXTS, like=like, min_rounds=1, max_rounds=1, seconds=1.0)
    assert not found.rivals
    assert found.notes[0].startswith("model2vec left out: ModuleNotFoundError")
    assert found.notes[1].startswith("sentence-transformers left out: its vectors differ")
