"""The registry of operations: order, fall-through op by op, one choice per class, reports."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint

import bytetx
from bytetx.ops import native
from bytetx.ops.backend_report import backend_report
from bytetx.ops.norm import LAYER_NORM, layer_norm
from bytetx.ops.registry import OPERATIONS, Operation

CPU = torch.device("cpu")


@pytest.fixture
def toy() -> Iterator[Operation]:
    operation = Operation("toy")
    yield operation
    del OPERATIONS["toy"]


def test_the_first_that_runs_and_takes_the_call_is_chosen_once(toy: Operation) -> None:
    asked: list[torch.device] = []

    def why_missing(device: torch.device) -> str:
        asked.append(device)
        return "this machine lacks it"

    toy.register("absent", why_missing=why_missing)(lambda: "absent")
    toy.register("even", takes=lambda device, width: width % 2 == 0)(lambda: "even")
    toy.in_torch()(lambda: "torch")
    assert [toy.choose(CPU, width).run() for width in (4, 5, 4, 5)] == ["even", "torch"] * 2
    assert len(asked) == 2  # once a class
    report = {op.op: op for op in backend_report().ops}["toy"]
    assert report.cpu == "even: this machine lacks it"
    toy.register("new", first=True)(lambda: "new")
    assert toy.choose(CPU, 4).run() == "new"


def test_no_backend_is_an_error_that_names_the_class(toy: Operation) -> None:
    toy.register("even", "cuda", takes=lambda device, width: width % 2 == 0)(lambda: None)
    with pytest.raises(LookupError, match=r"no backend of toy takes \[5\] on cpu"):
        toy.choose(CPU, 5)
    assert {op.op: op.cpu for op in backend_report().ops}["toy"] == "none: on GPUs alone"


def test_an_architecture_that_has_one_op_serves_that_op_alone(tmp_path: Path) -> None:
    """The other operations of a model, and other widths of this one, fall through."""
    folder, texts = save_checkpoint(tmp_path), ["a fox", "the quick brown fox"]
    plain = bytetx.load(folder, device="cpu")
    wanted, width = plain.embed(texts).vectors, plain.spec.hidden_size
    calls = []

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **options) -> torch.Tensor:
        calls.append(x.shape)
        return fallback.run(x, weight, bias, **options)

    fallback = LAYER_NORM.choose(CPU, torch.float32, width)
    takes = {"takes": lambda device, dtype, size: size == width}
    LAYER_NORM.register("toy architecture", "cpu", first=True, **takes)(run)
    try:
        found = bytetx.load(folder, device="cpu").embed(texts).vectors
        assert len(calls) == 2 * plain.spec.num_layers
        np.testing.assert_array_equal(found, wanted)
        layer_norm(torch.ones(1, width + 1), torch.ones(width + 1), None, eps=1e-5)
        assert len(calls) == 2 * plain.spec.num_layers
        report = {op.op: op.cpu for op in backend_report().ops}
        assert report["layer_norm"] == "toy architecture"
        assert report["pool"].startswith("native")
    finally:
        del LAYER_NORM.backends[0]
        native.forget_lookups()


def test_a_core_that_lacks_an_op_leaves_it_to_the_next_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A partial native core switches nothing else off."""
    core = native._modules["cpu"]
    assert not isinstance(core, str)

    class Partial:
        __name__ = "bytetx._cpu"

        def __getattr__(self, name: str) -> object:
            if name == "layer_norm":
                raise AttributeError(name)
            return getattr(core, name)

    monkeypatch.setitem(native._modules, "cpu", Partial())
    native.forget_lookups()
    try:
        report = {op.op: op.cpu for op in backend_report().ops}
        assert report["layer_norm"] == "torch: no kernel for layer_norm in bytetx._cpu"
        assert report["rms_norm"].startswith("native")
        assert LAYER_NORM.choose(CPU, torch.float32, 8).name == "torch"
    finally:
        monkeypatch.undo()
        native.forget_lookups()
