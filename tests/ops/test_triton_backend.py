"""Which backend serves: whole models on Triton's kernels, and what is said where there are none."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from checkpoints import SENTENCES, save_checkpoint
from privacy_filters import save_privacy_filter
from tiny import random_ids
from tiny_decoders import tiny_decoder

import bytetx
from bytetx import SamplingParams
from bytetx.ops import backend_report, native, triton_backend
from bytetx.ops.triton_backend import why_no_triton

CPU = torch.device("cpu")
TEXTS = [SENTENCES[0], "a", SENTENCES[4], "", "New York"]


class Counted:
    """The kernels, and the names of those that ran."""

    def __init__(self, kernels: ModuleType):
        self.kernels, self.used = kernels, set[str]()

    def __getattr__(self, name: str) -> object:
        self.used.add(name)
        return getattr(self.kernels, name)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """Triton's kernels serve the CPU in the native core's place, as Python."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here")
    from bytetx.ops import triton_kernels as kernels

    counted = Counted(kernels)
    with native.without_kernels("cpu"):
        monkeypatch.setattr(triton_backend, "_lookup", lambda device_type, index: counted)
        native.forget_lookups()
        yield counted


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "used"),
    [
        ("bert", {"embed", "norm", "pool"}),  # of f32 without a mask, attention is torch's
        ("modernbert", {"embed", "norm", "rotary", "gate_rows", "varlen_attention", "pool"}),
        ("deberta-v2", {"embed", "norm", "disentangled_attention", "pool"}),
        ("mpnet", {"embed", "norm", "varlen_attention", "pool"}),
    ],
)
def test_an_encoder(family: str, used: set[str], tmp_path: Path, interpreted: Counted) -> None:
    """Windows, biases of relative positions, rotary positions, gates."""
    folder = save_checkpoint(tmp_path / family, family)
    ours = bytetx.load(folder, device="cpu").embed(TEXTS, truncate=True).vectors
    assert used <= interpreted.used
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "_lookup", lambda device_type, index: "none")
        native.forget_lookups()
        right = bytetx.load(folder, device="cpu").embed(TEXTS, truncate=True).vectors
    np.testing.assert_allclose(ours, right, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sinks_of_an_encoder(tmp_path: Path, interpreted: Counted) -> None:
    save_privacy_filter(tmp_path)
    ids = random_ids([1, 7, 30])
    ours = bytetx.load(tmp_path, device="cpu").embed(ids).vectors
    assert "varlen_attention" in interpreted.used
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "_lookup", lambda device_type, index: "none")
        native.forget_lookups()
        right = bytetx.load(tmp_path, device="cpu").embed(ids).vectors
    np.testing.assert_allclose(ours, right, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "qwen3_5"])
def test_a_decoder(family: str, tmp_path: Path, interpreted: Counted) -> None:
    tiny_decoder(family).save_pretrained(tmp_path)
    prompts = [[5, 6, 7], [8] * 20, [9]]
    params = SamplingParams(max_tokens=6, temperature=0)
    model = bytetx.load(tmp_path, device="cpu")
    ours = [answer.token_ids for answer in model.generate(prompts, params)]
    assert {"paged_attention", "write_kv", "norm", "argmax"} <= interpreted.used
    if family == "qwen3_5":
        assert {"gated_delta_rule", "gated_norm", "short_conv"} <= interpreted.used
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "_lookup", lambda device_type, index: "none")
        native.forget_lookups()
        model = bytetx.load(tmp_path, device="cpu")
        right = [answer.token_ids for answer in model.generate(prompts, params)]
    assert ours == right


def test_why_triton_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert why_no_triton(CPU) == "the Triton kernels are for CUDA GPUs"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (7, 5))
    with native.without_kernels("cuda"):
        assert why_no_triton(gpu) == (
            "the Triton kernels are for sm_80 and later, whose tensor cores Triton uses, and this "
            "GPU is sm_75"
        )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (8, 6))
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: None)
    with native.without_kernels("cuda"):
        assert why_no_triton(gpu) == "Triton is not installed: run `pip install triton`"
        report = backend_report.backend_report()
    backing = {op.op: op.cuda for op in report.ops}
    assert backing["pool"] == (
        "torch: the native kernels for cuda are switched off; "
        "Triton is not installed: run `pip install triton`"
    )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_a_triton_that_does_not_run_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a C compiler: here there is no GPU to run on."""
    if torch.cuda.is_available():
        pytest.skip("it runs here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (8, 6))
    with native.without_kernels("cuda"):
        reason = why_no_triton(torch.device("cuda", 0))
    assert reason is not None and reason.startswith("Triton does not run here (")
    assert reason.endswith("it needs a C compiler and a version that fits torch's")


def test_switching_the_native_kernels_off_and_on() -> None:
    assert native.kernel("pool", CPU) is not None
    with native.without_kernels("cpu"):
        assert native.kernel("pool", CPU) is None
        assert native.why_no_kernel("pool", CPU) == ("the native kernels for cpu are switched off")
    assert native.kernel("pool", CPU) is not None
