"""Suite `linear`: GEMMs of layers with what follows them fused, against cuBLAS on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu import DTYPES, Gpu, Work, gpu_suite, graph_us, num_rotated, sample_us_of
from benchmarks.suite import Measurement, Suite, measured
from bytetx.ops.gated import BLOCK, GatedWeight, gated_linear
from bytetx.ops.linear import LinearWeight, linear, prepare_linear
from bytetx.ops.linear_plan import GATED

EPILOGUES = ("bias", "gelu", "residual")  # each with the bias; gelu is the exact one, by erf

# (model, layer): n outputs, k inputs, and what follows the GEMM in a BERT layer.
_LAYERS = {
    ("base", "qkv"): (2304, 768, "bias"),
    ("base", "attn-out"): (768, 768, "residual"),
    ("base", "ffn-in"): (3072, 768, "gelu"),
    ("base", "ffn-out"): (768, 3072, "residual"),
    ("large", "qkv"): (3072, 1024, "bias"),
    ("large", "attn-out"): (1024, 1024, "residual"),
    ("large", "ffn-in"): (4096, 1024, "gelu"),
    ("large", "ffn-out"): (1024, 4096, "residual"),
}
_MANY_TOKENS = 65536
_FEW_TOKENS = (8192, 512, 128, 64, 32)
# Weights that L2 does not hold, of Llama-3 8B and GPT-3 175B: n, k, and what follows.
_LARGE_LAYERS = {
    "llama-8b-qkv": (6144, 4096, "bias"),
    "llama-8b-ffn-in": (28672, 4096, GATED),
    "llama-8b-ffn-out": (4096, 14336, "residual"),
    "gpt3-ffn-in": (49152, 12288, "gelu"),
}
_LARGE_TOKENS = 8192
_MIN_CALLS = 4  # in one graph, so that its start is no part of the time


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: [m, k] activations through a weight [n, k] with a bias, and what follows."""

    name: str
    m: int
    n: int
    k: int
    epilogue: str
    dtype: str = "fp16"


@dataclass(frozen=True, slots=True)
class Operands:
    """Operands of one call."""

    x: torch.Tensor  # [m, k]
    weight: torch.Tensor  # [n, k]
    bias: torch.Tensor  # [n]
    residual: torch.Tensor  # [m, n]
    prepared: LinearWeight


def suite(*, patterns: list[str]) -> Suite:
    return gpu_suite("linear", shapes(), measure, patterns=patterns, unit="us")


def shapes() -> list[Shape]:
    """BERT's layers with every epilogue at many tokens, all with their own at fewer."""
    many = [
        Shape(f"{model}-{layer}-{_MANY_TOKENS}-{epilogue}", _MANY_TOKENS, n, k, epilogue)
        for (model, layer), (n, k, _) in _LAYERS.items()
        for epilogue in EPILOGUES
    ]
    few = [
        Shape(f"{model}-{layer}-{m}-{epilogue}", m, n, k, epilogue)
        for m in _FEW_TOKENS
        for (model, layer), (n, k, epilogue) in _LAYERS.items()
    ]
    large = [
        Shape(f"{layer}-{_LARGE_TOKENS}-{epilogue}", _LARGE_TOKENS, n, k, epilogue, "bf16")
        for layer, (n, k, epilogue) in _LARGE_LAYERS.items()
    ]
    return many + few + large


def measure(shape: Shape, gpu: Gpu) -> Measurement:
    """Ours with everything fused; cuBLAS with the bias alone, or with a second pass."""
    work = work_of(shape)
    torch.manual_seed(0)
    operands = [make_operands(shape) for _ in range(num_rotated(int(work.num_bytes)))]
    calls = max(len(operands), _MIN_CALLS)
    turns = [operands[i % len(operands)] for i in range(calls)]

    def in_turn(call: Callable[[Operands], torch.Tensor]) -> None:
        for o in turns:
            call(o)

    calls_by_name: dict[str, Callable[[Operands], torch.Tensor]] = {
        "ours": partial(_ours, epilogue=shape.epilogue),
        "cublas": _cublas,
        **_RIVALS[shape.epilogue],
    }
    runs = {name: partial(in_turn, call) for name, call in calls_by_name.items()}
    found = graph_us(runs, calls=calls, sample_us=sample_us_of(work.flop))
    sizes = {"m": shape.m, "n": shape.n, "k": shape.k, "flop": work.flop}
    return measured(found, gpu.rates.floor_us(work), sizes, _NOTES)


def work_of(shape: Shape) -> Work:
    """Operands read once and the result written once; the product's FLOP."""
    m, n, k = shape.m, shape.n, shape.k
    ends = {"residual": 2 * m * n, GATED: m * n // 2}
    elements = m * k + n * k + n + ends.get(shape.epilogue, m * n)
    return Work(elements * DTYPES[shape.dtype].itemsize, 2.0 * m * n * k)


def make_operands(shape: Shape) -> Operands:
    random = partial(torch.randn, device="cuda", dtype=DTYPES[shape.dtype])
    weight = random(shape.n, shape.k)
    bias = random(shape.n)
    return Operands(
        x=random(shape.m, shape.k),
        weight=weight,
        bias=bias,
        residual=random(shape.m, shape.n),
        prepared=prepare_linear(weight, bias, prepack=True),
    )


def _ours(o: Operands, epilogue: str) -> torch.Tensor:
    if epilogue == GATED:
        weight = GatedWeight(o.prepared, o.prepared.n // 2, BLOCK)
        return gated_linear(o.x, weight, activation="silu")
    return linear(
        o.x,
        o.prepared,
        activation="gelu" if epilogue == "gelu" else "none",
        residual=o.residual if epilogue == "residual" else None,
    )


def _cublas(o: Operands) -> torch.Tensor:
    return F.linear(o.x, o.weight, o.bias)


def _cublas_then_gelu(o: Operands) -> torch.Tensor:
    return F.gelu(F.linear(o.x, o.weight, o.bias))


def _cublas_then_add(o: Operands) -> torch.Tensor:
    return F.linear(o.x, o.weight, o.bias).add_(o.residual)


def _cublas_then_gate(o: Operands) -> torch.Tensor:
    gates, values = F.linear(o.x, o.weight, o.bias).chunk(2, 1)
    return F.silu(gates).mul_(values)


def _cublaslt_gelu_tanh(o: Operands) -> torch.Tensor:
    """The one fused activation that torch offers, which is the other GELU."""
    return torch._addmm_activation(o.bias, o.x, o.weight.t(), use_gelu=True)


_RIVALS: dict[str, dict[str, Callable[[Operands], torch.Tensor]]] = {
    "bias": {},
    "gelu": {"cublas-unfused": _cublas_then_gelu, "cublaslt-gelu-tanh": _cublaslt_gelu_tanh},
    "residual": {"cublas-unfused": _cublas_then_add},
    GATED: {"cublas-unfused": _cublas_then_gate},
}
_NOTES = (
    "cublas: F.linear with the bias and nothing after it, whatever the case does",
    "cublas-unfused: F.linear, then F.gelu, add_, or F.silu and mul_",
    "cublaslt-gelu-tanh: cuBLASLt's fused GELU, which is the tanh one",
)
