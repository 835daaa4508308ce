"""`python -m benchmarks linear --tune`: measures every way to cut a GEMM, and keeps the best.

bytetx/ops/linear_plan.py reads it. Each line is one layer of a model with what follows it there.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.gpu import DTYPES, graph_us, num_rotated
from benchmarks.linear import Operands, Shape, make_operands, work_of
from bytetx.errors import BytetxError
from bytetx.ops import native
from bytetx.ops.linear import run_kernel
from bytetx.ops.linear_plan import (
    CUBLAS,
    GATED,
    RESIDUAL,
    LinearPlan,
    Tiling,
    gating_tilings,
    parts_in_table,
    ranked_plans,
    tilings,
)
from bytetx.ops.norm import WIDTHS, fused_workspace, layer_norm
from bytetx.ops.norm import run_fused_kernel as run_norm_kernel

# (n, k, what follows, dtype): MiniLM, BERT base (GPT-2's, too) and BERT large; Qwen3-0.6B and Llama
# 8B, whose gates and values are the columns of one product.
_LAYERS = [
    layer
    for hidden in (384, 768, 1024)
    for layer in (
        (3 * hidden, hidden, "bias", "fp16"),
        (hidden, hidden, "residual", "fp16"),
        (4 * hidden, hidden, "gelu", "fp16"),
        (hidden, 4 * hidden, "residual", "fp16"),
    )
] + [
    layer
    for hidden, attended, qkv, inner in ((1024, 2048, 4096, 3072), (4096, 4096, 6144, 14336))
    for layer in (
        (qkv, hidden, "bias", "bf16"),
        (hidden, attended, "residual", "bf16"),
        (2 * inner, hidden, "gated", "bf16"),
        (hidden, inner, "residual", "bf16"),
    )
]
# Up to 4096 a tile more or less in an SM's share decides: hence the short steps.
_ROWS = [
    *(32, 64, 128, 192, 256, 384),
    *range(512, 2304, 128),
    *range(2304, 4096, 256),
    *(4096, 5120, 6144, 7168, 8192, 12288, 16384, 32768, 65536),
]
_FAR_OFF = 1.35  # what is predicted to take that many times the least is not measured
_MOST_CANDIDATES = 8
_SAMPLE_US = 1_000
_SAMPLES = 3
_COPY_BYTES_PER_US = 4.0e6
_EPS = 1e-12

_ACTIVATIONS = {"gelu": "gelu", GATED: "silu"}

Candidate = tuple[str, int]  # tiling or CUBLAS, split_k


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate and its time."""

    us: float
    candidate: Candidate


def tune(path: Path) -> Iterator[str]:
    """Measures and yields a text for each line; writes the table at the end.

    Raises BytetxError where there is no GPU that the kernels run on.
    """
    if not torch.cuda.is_available() or not tilings():
        raise BytetxError("--tune needs a Hopper GPU and bytetx._cuda: see `bytetx info`")
    lines = []
    for layer in _LAYERS:
        for line in tune_layer(*layer):
            lines.append(json.dumps(line))
            yield lines[-1]
    device = json.dumps(torch.cuda.get_device_name())
    body = ",\n  ".join(lines)
    path.write_text(f'{{"device": {device}, "lines": [\n  {body}\n]}}\n', encoding="utf-8")


def tune_layer(n: int, k: int, epilogue: str, dtype: str) -> Iterator[dict[str, object]]:
    """The layer's line, and the one of its product with the bias alone."""
    head = {"n": n, "k": k, "dtype": dtype}
    if epilogue == GATED:
        gated = [_best(Shape("", m, n, k, GATED, dtype)) for m in _ROWS]
        yield {**head, "epilogue": GATED, **_plans(gated)}
        return
    shapes = [Shape("", m, n, k, "bias", dtype) for m in _ROWS]
    plain = [_best(shape) for shape in shapes]
    yield {**head, "epilogue": "bias", **_plans(plain)}
    if epilogue == "bias":
        return
    best = [_best(replace(shape, epilogue=epilogue)) for shape in shapes]
    if epilogue != RESIDUAL:
        yield {**head, "epilogue": epilogue, **_plans(best)}
        return
    left = [
        alone.us + _read_us(shape) < fused.us
        for shape, alone, fused in zip(shapes, plain, best, strict=True)
    ]
    normalized = [
        n in WIDTHS and _norms_faster(shape, alone, fused, left=is_left)
        for shape, alone, fused, is_left in zip(shapes, plain, best, left, strict=True)
    ]
    flags = {"residual_in_norm": left, **({"normalized": normalized} if n in WIDTHS else {})}
    line = {**head, "epilogue": RESIDUAL, **_plans(best, flags)}
    # Those were chosen in whole layers, which these chains of one product say little of.
    parts = parts_in_table(n, k, dtype)
    yield {**line, "parts": parts} if parts else line


def _plans(found: list[Found], flags: dict[str, list[bool]] | None = None) -> dict[str, object]:
    """The best of each of _ROWS, as a line has it: the last row of every run of one plan.

    flags: what else a line says of rows, by its name there.
    """
    flags = flags or {}
    kept: list[tuple[int, Candidate, tuple[bool, ...]]] = []
    for i, (m, best) in enumerate(zip(_ROWS, found, strict=True)):
        said = tuple(of[i] for of in flags.values())
        if kept and kept[-1][1:] == (best.candidate, said):
            kept.pop()
        kept.append((m, best.candidate, said))
    line: dict[str, object] = {"plans": [(m, *candidate) for m, candidate, _ in kept]}
    for i, name in enumerate(flags):
        line[name] = [m for m, _, said in kept if said[i]]
    return line


def _read_us(shape: Shape) -> float:
    """A read of the residual by whoever comes next, where the product does not add it."""
    return shape.m * shape.n * DTYPES[shape.dtype].itemsize / _COPY_BYTES_PER_US


def _best(shape: Shape) -> Found:
    torch.manual_seed(0)
    count = num_rotated(int(work_of(shape).num_bytes))
    operands = [make_operands(shape) for _ in range(count)]
    runs = {c: partial(_run, c, operands, shape.epilogue) for c in _candidates(shape)}
    times = graph_us(runs, calls=count, samples=_SAMPLES, sample_us=_SAMPLE_US)
    return min((Found(us, c) for c, us in times.items()), key=lambda found: found.us)


def _norms_faster(shape: Shape, alone: Found, fused: Found, *, left: bool) -> bool:
    """Return whether one kernel for product, residual and layer norm beats two.

    left: the best two are `alone` and a norm that reads the residual, else `fused` and a norm.
    """
    if native.kernel("linear_norm", torch.device("cuda")) is None:
        return False
    torch.manual_seed(0)
    operands = [make_operands(shape) for _ in range(num_rotated(int(work_of(shape).num_bytes)))]
    norm_weight, norm_bias = torch.randn(2, shape.n, device="cuda", dtype=DTYPES[shape.dtype])
    workspace = fused_workspace(shape.m, shape.n, torch.device("cuda"))
    call = _caller(alone.candidate, "bias") if left else _caller(fused.candidate, RESIDUAL)

    def one() -> None:
        for o in operands:
            run_norm_kernel(
                o.x,
                o.prepared,
                residual=o.residual,
                norm=(norm_weight, norm_bias),
                eps=_EPS,
                workspace=workspace,
            )

    def two() -> None:
        for o in operands:
            residual = o.residual if left else None
            layer_norm(call(o), norm_weight, norm_bias, eps=_EPS, residual=residual)

    runs = {"one": one, "two": two}
    times = graph_us(runs, calls=len(operands), samples=_SAMPLES, sample_us=_SAMPLE_US)
    return times["one"] < times["two"]


def _candidates(shape: Shape) -> list[Candidate]:
    """Return the plans that are predicted to take the least time, and cuBLAS."""
    able = gating_tilings() if shape.epilogue == GATED else tilings()
    ranked = ranked_plans(able, shape.m, shape.n, shape.k)
    near = [(t.name, s) for us, t, s in ranked if us < _FAR_OFF * ranked[0][0]]
    found = near[:_MOST_CANDIDATES]
    return found if shape.epilogue in (RESIDUAL, GATED) else [*found, (CUBLAS, 1)]


def _run(candidate: Candidate, operands: list[Operands], epilogue: str) -> None:
    call = _caller(candidate, epilogue)
    for o in operands:
        call(o)


def _caller(candidate: Candidate, epilogue: str) -> Callable[[Operands], torch.Tensor]:
    name, split_k = candidate
    if name == CUBLAS:
        return partial(_cublas, epilogue=epilogue)
    plan = LinearPlan(_named(name).index, split_k)
    return partial(_kernel, plan=plan, epilogue=epilogue)


def _named(name: str) -> Tiling:
    return next(tiling for tiling in tilings() if tiling.name == name)


def _kernel(o: Operands, *, plan: LinearPlan, epilogue: str) -> torch.Tensor:
    residual = o.residual if epilogue == RESIDUAL else None
    return run_kernel(
        o.x,
        o.prepared,
        plan=plan,
        activation=_ACTIVATIONS.get(epilogue, "none"),
        residual=residual,
        is_gated=epilogue == GATED,
    )


def _cublas(o: Operands, *, epilogue: str) -> torch.Tensor:
    d = F.linear(o.x, o.weight, o.bias)
    return F.gelu(d) if epilogue == "gelu" else d
