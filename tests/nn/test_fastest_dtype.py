"""dtype="fastest": which dtype it is on which processor, and what a loaded model says of it."""

from pathlib import Path

import pytest
import torch
from checkpoints import save_checkpoint

from bytetx import load
from bytetx.nn import loading
from bytetx.nn.loading import resolve_dtype
from bytetx.ops import linear as linear_ops
from bytetx.ops import native

CPU = torch.device("cpu")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("saved", [F32, BF16, F16])
def test_it_is_bfloat16_where_a_cpu_is_faster_with_it(
    saved: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "is_bf16_faster", lambda: True)
    assert resolve_dtype("fastest", CPU, saved=saved) == BF16
    assert resolve_dtype("auto", CPU, saved=saved) == F32
    monkeypatch.setattr(loading, "is_bf16_faster", lambda: False)
    assert resolve_dtype("fastest", CPU, saved=saved) == F32


@pytest.mark.parametrize("saved", [F32, BF16, F16])
def test_it_is_auto_on_a_gpu(saved: torch.dtype) -> None:
    cuda = torch.device("cuda")
    wanted = resolve_dtype("auto", cuda, saved=saved)
    assert resolve_dtype("fastest", cuda, saved=saved) == wanted


@pytest.mark.parametrize(
    ("has_bf16", "has_dot", "is_slow", "has_amx", "is_faster"),
    [
        (True, True, False, False, True),  # AMD's
        (True, True, True, False, False),  # Intel's without tiles
        (True, True, True, True, True),
        (True, False, False, False, False),  # AVX-512 or AVX2 alone
        (False, True, True, True, False),  # torch without oneDNN
    ],
)
def test_bf16_is_faster_with_instructions_that_outrun_f32(
    has_bf16: bool,
    has_dot: bool,
    is_slow: bool,
    has_amx: bool,
    is_faster: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    isas = ["portable", "slow_bf16_dot"] if is_slow else ["portable"]
    monkeypatch.setattr(native, "available_isas", lambda: isas)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_dot)
    for name, value in (("has_cpu_bf16", has_bf16), ("_has_amx", has_amx), ("_is_arm", False)):
        monkeypatch.setattr(linear_ops, name, lambda value=value: value)
    assert linear_ops.is_bf16_faster() is is_faster


@pytest.mark.parametrize("has_bf16", [True, False])
def test_info_says_what_it_was(
    has_bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "is_bf16_faster", lambda: has_bf16)
    with load(save_checkpoint(tmp_path), device="cpu", dtype="fastest") as model:
        assert model.info()["dtype"] == ("bfloat16" if has_bf16 else "float32")
