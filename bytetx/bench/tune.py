"""`bytetx bench linear --tune`: measures every way to cut a GEMM, and writes the table of the best.

bytetx/ops/linear_plan.py reads it. Each line is one layer of an encoder with what follows it there.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from bytetx.bench.gpu import DTYPES, capture, num_rotated, replay_us
from bytetx.bench.linear import Operands, Shape, make_operands, work_of
from bytetx.errors import BytetxError
from bytetx.ops.linear import run_kernel
from bytetx.ops.linear_plan import CUBLAS, LinearPlan, Tiling, tilings

# (n, k, what follows): the layers of MiniLM, BERT base and BERT large.
_LAYERS = [
    layer
    for hidden in (384, 768, 1024)
    for layer in (
        (3 * hidden, hidden, "bias"),
        (hidden, hidden, "residual"),
        (4 * hidden, hidden, "gelu"),
        (hidden, 4 * hidden, "residual"),
    )
]
_ROWS = [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
_SPLITS = (1, 2, 3, 4, 6, 8)
_FEW_ROWS_END = 512  # tilings for few rows are tried up to here, those for many from here on
_SPLIT_FEATURES = 128  # k that one CTA has at least
_SAMPLE_US = 1_500
_SAMPLES = 3
# A read of the residual by whoever comes next, where the product does not add it.
_COPY_BYTES_PER_US = 4.0e6

Candidate = tuple[str, int]  # tiling or CUBLAS, splits


def tune(path: Path) -> Iterator[str]:
    """Measures and yields a text a line; writes the table at the end.

    Raises BytetxError where there is no GPU that the kernels run on.
    """
    if not torch.cuda.is_available() or not tilings():
        raise BytetxError("--tune needs a Hopper GPU and bytetx._cuda: see `bytetx info`")
    lines = []
    for dtype in DTYPES:
        for n, k, epilogue in _LAYERS:
            plans = [(m, *_best(Shape("", m, n, k, epilogue, dtype))) for m in _ROWS]
            line = {"n": n, "k": k, "dtype": dtype, "epilogue": epilogue, "plans": plans}
            lines.append(json.dumps(line))
            yield lines[-1]
    device = json.dumps(torch.cuda.get_device_name())
    body = ",\n  ".join(lines)
    path.write_text(f'{{"device": {device}, "lines": [\n  {body}\n]}}\n', encoding="utf-8")


def _best(shape: Shape) -> Candidate:
    torch.manual_seed(0)
    count = num_rotated(int(work_of(shape).num_bytes))
    operands = [make_operands(shape) for _ in range(count)]
    times = {
        candidate: _microseconds(shape, operands, candidate) for candidate in _candidates(shape)
    }
    return min(times, key=times.__getitem__)


def _candidates(shape: Shape) -> list[Candidate]:
    found = [(CUBLAS, 1)]
    for tiling in tilings():
        if tiling.is_for_few_rows and shape.m <= _FEW_ROWS_END:
            most = min(8, shape.k // _SPLIT_FEATURES)
            found += [(tiling.name, splits) for splits in _SPLITS if splits <= most]
        if not tiling.is_for_few_rows and shape.m >= _FEW_ROWS_END:
            found.append((tiling.name, 1))
    return found


@torch.inference_mode()
def _microseconds(shape: Shape, operands: list[Operands], candidate: Candidate) -> float:
    name, splits = candidate
    if name == CUBLAS:
        call = partial(_cublas, epilogue=shape.epilogue)
    else:
        plan = LinearPlan(_named(name).index, splits)
        call = partial(_kernel, plan=plan, epilogue=shape.epilogue)

    def run() -> None:
        for o in operands:
            call(o)

    graph = capture(run)
    replays = max(1, round(_SAMPLE_US / replay_us(graph, 1)))
    times = sorted(replay_us(graph, replays) for _ in range(_SAMPLES))
    extra = 0.0
    if name == CUBLAS and shape.epilogue == "residual":
        extra = shape.m * shape.n * DTYPES[shape.dtype].itemsize / _COPY_BYTES_PER_US
    return times[_SAMPLES // 2] / len(operands) + extra


def _named(name: str) -> Tiling:
    return next(tiling for tiling in tilings() if tiling.name == name)


def _kernel(o: Operands, *, plan: LinearPlan, epilogue: str) -> None:
    residual = o.residual if epilogue == "residual" else None
    activation = "gelu" if epilogue == "gelu" else "none"
    run_kernel(o.x, o.prepared, plan=plan, activation=activation, residual=residual)


def _cublas(o: Operands, *, epilogue: str) -> None:
    d = F.linear(o.x, o.weight, o.bias)
    if epilogue == "gelu":
        F.gelu(d)
