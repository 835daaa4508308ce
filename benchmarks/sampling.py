"""Cases of suite `decode` that choose a step's tokens, against torch's own operations."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu import DTYPES, Gpu, Run, Work, graph_us, num_rotated
from benchmarks.suite import Measurement, measured
from bytetx.ops.sample_tokens import sample_tokens
from bytetx.ops.sampling import Filters, is_bad_row, sample

_VOCABULARY = 151_936  # of Qwen3
_LIMITS = {"all": (0, 1.0), "top-k-50": (50, 1.0), "top-p-0.9": (0, 0.9), "both": (20, 0.95)}


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: rows of logits, of which each keeps top_k tokens, then top_p of their weight."""

    name: str
    num_rows: int
    top_k: int
    top_p: float
    dtype: str = "bf16"


def shapes() -> list[Shape]:
    found = [
        Shape(f"sample-{limits}-b{rows}", rows, *_LIMITS[limits])
        for limits in _LIMITS
        for rows in (1, 64, 256)
    ]
    return [*found, Shape("sample-top-p-0.9-f32-b256", 256, *_LIMITS["top-p-0.9"], dtype="f32")]


def measure(shape: Shape, gpu: Gpu) -> Measurement:
    """One step's choice; the floor is one pass over the logits, ours makes two to four."""
    torch.manual_seed(0)
    dtype = DTYPES.get(shape.dtype, torch.float32)
    size = (shape.num_rows, _VOCABULARY)
    num_bytes = shape.num_rows * _VOCABULARY * dtype.itemsize
    logits = [
        torch.randn(size, device="cuda").mul_(2).to(dtype) for _ in range(num_rotated(num_bytes))
    ]
    ones = torch.ones(shape.num_rows, device="cuda")
    positions = torch.arange(shape.num_rows, device="cuda")
    filters = Filters(
        top_k=positions.new_full(positions.shape, shape.top_k) if shape.top_k else None,
        top_p=ones * shape.top_p if shape.top_p < 1 else None,
        max_top_k=shape.top_k,
        has_open_nucleus=shape.top_p < 1 and not shape.top_k,
    )
    numbers = positions

    def theirs(x: Tensor) -> Tensor:
        chosen = sample(x, ones, filters, seeds=numbers, positions=numbers, has_greedy=False)
        return torch.where(is_bad_row(x), -1, chosen)

    def ours(x: Tensor) -> Tensor:
        return sample_tokens(x, ones, filters, seeds=numbers, positions=numbers, has_greedy=False)

    def in_turn(choose: Callable[[Tensor], Tensor]) -> Run:
        def run() -> None:
            for x in logits:
                choose(x)

        return run

    runs = {"ours": in_turn(ours), "torch": in_turn(theirs)}
    found = graph_us(runs, calls=len(logits))
    sizes = {"batch_size": shape.num_rows, "vocab_size": _VOCABULARY, "bytes": num_bytes}
    return measured(found, gpu.rates.floor_us(Work(num_bytes)), sizes)
