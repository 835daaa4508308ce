"""bytetx: transformer inference on packed tokens; no pad token is ever computed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bytetx.errors import (
    BytetxError,
    CheckpointError,
    ClosedError,
    DeadlineError,
    DeviceLostError,
    DeviceMemoryError,
    ForkError,
    GroupError,
    InputError,
    NotFiniteError,
    OptionError,
    QueueFullError,
    StepError,
    TooLargeError,
    TooLongError,
    WeightFormatError,
)

if TYPE_CHECKING:
    from bytetx.async_model import AsyncModel
    from bytetx.hf import unwrap, wrap
    from bytetx.model import Model, load
    from bytetx.packed import PackedBatch, pack
    from bytetx.parallel.planner.plan import plan
    from bytetx.sampling_params import SamplingParams, StructuredOutputsParams
    from bytetx.tasks.search import maxsim, semantic_search, similarity

__version__ = "0.1.0"

__all__ = [
    "AsyncModel",
    "BytetxError",
    "CheckpointError",
    "ClosedError",
    "DeadlineError",
    "DeviceLostError",
    "DeviceMemoryError",
    "ForkError",
    "GroupError",
    "InputError",
    "Model",
    "NotFiniteError",
    "OptionError",
    "PackedBatch",
    "QueueFullError",
    "SamplingParams",
    "StepError",
    "StructuredOutputsParams",
    "TooLargeError",
    "TooLongError",
    "WeightFormatError",
    "__version__",
    "load",
    "maxsim",
    "pack",
    "plan",
    "semantic_search",
    "similarity",
    "unwrap",
    "wrap",
]

# Where each public name lives; it is imported at first use, so that `import bytetx` takes no torch.
_HOMES = {
    "AsyncModel": "bytetx.async_model",
    "Model": "bytetx.model",
    "PackedBatch": "bytetx.packed",
    "SamplingParams": "bytetx.sampling_params",
    "StructuredOutputsParams": "bytetx.sampling_params",
    "load": "bytetx.model",
    "maxsim": "bytetx.tasks.search",
    "pack": "bytetx.packed",
    "plan": "bytetx.parallel.planner.plan",
    "semantic_search": "bytetx.tasks.search",
    "similarity": "bytetx.tasks.search",
    "unwrap": "bytetx.hf",
    "wrap": "bytetx.hf",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bytetx' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
