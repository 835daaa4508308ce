"""The suite of adapters: its engines compute the same, and a case says what it ran."""

from typing import Any

import numpy as np
import pytest
import torch

import bytetx
from benchmarks import adapters
from benchmarks.adapters import Shape

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = TINY | {"intermediate_size": 64}
    monkeypatch.setitem(adapters._ENCODERS, "tiny", ("Bert", sizes))
    heads = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300}
    monkeypatch.setitem(adapters.SHAPES, "tiny-causal", ("Qwen3", sizes | heads))


@pytest.mark.parametrize(
    "shape", [Shape("tiny", "all", 3, 40), Shape("tiny-causal", "qv", 2, 3, 4)]
)
def test_peft_runs_the_same_texts(shape: Shape) -> None:
    with adapters._checkpoint(shape, torch.float32) as folder:
        named = {one.name: one for one in sorted((folder / "adapters").iterdir())}
        assert len(named) == shape.num_adapters
        model = bytetx.load(folder, device="cpu", dtype="float32", adapters=named)
        texts = adapters._texts(shape, model.spec.vocab_size)
        each = [f"a{i % shape.num_adapters}" for i in range(shape.num_texts)]
        ours: Any = adapters._run(shape, model, texts, each)
        theirs: Any = adapters._peft(shape, folder, named, texts, each, "cpu", torch.float32)()
        if shape.tokens:
            assert [list(one.token_ids) for one in ours] == theirs
            return
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        np.testing.assert_allclose(np.asarray(ours)[order], torch.cat(theirs), atol=1e-4)


def test_a_case_has_its_rivals_and_sizes() -> None:
    shape = Shape("tiny", "qv", 2, 6, dtype="fp32")
    found = adapters._measure(shape, "cpu")
    assert set(found.rivals) == {"without adapters", "peft"} and found.ours > 0
    assert found.shape["texts"] == 6 and found.shape["adapters"] == 2
    assert shape.name == "tiny-ln128x6-qv-2"
    assert adapters.suite(patterns=["minilm*all*"], device="cpu").name == "adapters"
