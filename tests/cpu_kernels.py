"""Helpers of the tests of CPU kernels: NaN in fresh memory, instruction sets, dtypes, activations.

A test file gives the fixtures a name of its own to use them: `isa = cpu_kernels.isa`.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from bytetx.ops import native

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
EXACT_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


VECTOR_ISAS = [isa for isa in native.available_isas() if isa != "portable"]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty fills with NaN (floats) and all ones (bytes: NaN as f32, -1 as int32)."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=native.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=DTYPES.values(), ids=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
