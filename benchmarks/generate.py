"""Suite `generate`: ragged prompts and answers on a GPU, against transformers; FP8 against bf16."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bytetx
from benchmarks.causal import (
    Request,
    decode_bytes,
    prefill_work,
    random_checkpoint,
    random_prompts,
    uniform_requests,
)
from benchmarks.generate_rivals import measure_transformers
from benchmarks.gpu import DTYPES, FP8, Gpu, Work, gpu_suite, without_fp8
from benchmarks.suite import Measurement, Suite
from bytetx.generate.engine import GenerationEngine
from bytetx.model import Model
from bytetx.sampling_params import SamplingParams

_ROUNDS = 2
_WARM_UPS = 2  # a step is captured when it comes again: that of one prompt in the second round
_PAGES_EACH = 16  # tokens of a sequence's last page
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: a model of SHAPES, its requests, and who else runs them.

    dtype: a key of DTYPES, or FP8, which is beside our own bf16.
    """

    name: str
    model: str
    requests: tuple[Request, ...]
    dtype: str = "bf16"
    has_rivals: bool = True
    note: str | None = None


def suite(*, patterns: list[str]) -> Suite:
    notes: list[str] = []
    chosen = without_fp8(shapes(), patterns, notes)
    options: dict[str, Any] = {"patterns": patterns, "unit": "s", "packages": ("transformers",)}
    return gpu_suite("generate", chosen, partial(measure, notes=notes), **options)


def shapes() -> list[Shape]:
    """A load that takes transformers minutes, and small ones that it can run, too."""
    many = uniform_requests(256, (100, 1024), (100, 1024))
    note = (
        "vLLM 0.24.0 took 5.66 s for such a load, on an H200 on another day; transformers would "
        "take minutes"
    )
    return [
        Shape("qwen3-0.6b-256", "qwen3-0.6b", tuple(many), has_rivals=False, note=note),
        Shape(
            "qwen3-0.6b-64x128",
            "qwen3-0.6b",
            tuple(uniform_requests(64, (100, 1024), (128, 128))),
        ),
        Shape(
            "qwen3-0.6b-prefill-64",
            "qwen3-0.6b",
            tuple(uniform_requests(64, (100, 1024), (1, 1))),
            note="one token each: the fraction of the floor is the share of the GEMM rate reached",
        ),
        Shape(
            "qwen3-0.6b-1x256",
            "qwen3-0.6b",
            tuple(uniform_requests(1, (100, 100), (256, 256))),
            note="one sequence: the fraction of the floor is the share of the memory rate reached",
        ),
        Shape("gpt2-124m-64x128", "gpt2-124m", tuple(uniform_requests(64, (50, 500), (128, 128)))),
        *(
            Shape(f"llama-8b-4-{name}-fp8", "llama-8b-4", tuple(requests), FP8, has_rivals=False)
            for name, requests in (
                ("prefill-8x2048", uniform_requests(8, (2048, 2048), (1, 1))),
                ("64x128", uniform_requests(64, (100, 100), (128, 128))),
                ("1x256", uniform_requests(1, (100, 100), (256, 256))),
            )
        ),
    ]


def measure(shape: Shape, gpu: Gpu, *, notes: Sequence[str] = ()) -> Measurement:
    """Seconds from the first request to the last token, greedy, without ends of text."""
    is_fp8, requests = shape.dtype == FP8, shape.requests
    dtype = torch.bfloat16 if is_fp8 else DTYPES[shape.dtype]
    rivals: dict[str, float] = {}
    notes = [*notes, *([shape.note] if shape.note else [])]
    sizes: dict[str, int] = {}
    with random_checkpoint(shape.model, dtype) as folder:
        ours = _measure_ours(shape, folder, FP8 if is_fp8 else dtype)
        if is_fp8:
            plain = _measure_ours(shape, folder, dtype)
            rivals["ours-bf16"] = plain.seconds
            sizes["bf16_peak_mib"] = plain.peak_bytes // _MIB
        if shape.has_rivals:
            (num_tokens,) = {r.output_tokens for r in requests}
            prompts = random_prompts(requests, vocab_size=ours.spec.vocab_size, seed=0)
            rivals, more = measure_transformers(folder, dtype, prompts, num_tokens)
            notes += more
    spec = ours.spec
    layer_bytes = 1 if is_fp8 else dtype.itemsize
    layers_speed = gpu.fp8_flops / gpu.rates.gemm_flops if is_fp8 else 1.0
    decode = Work(decode_bytes(spec, requests, dtype, layer_bytes=layer_bytes))
    prefill = prefill_work(spec, requests, layers_speed=layers_speed)
    output_tokens = sum(r.output_tokens for r in requests)
    return Measurement(
        ours=ours.seconds,
        rivals=rivals,
        floor=(gpu.rates.floor_us(decode) + gpu.rates.floor_us(prefill)) / 1e6,
        shape={
            "requests": len(requests),
            "prompt_tokens": sum(r.prompt_tokens for r in requests),
            "output_tokens": output_tokens,
            "output_tokens_per_second": round(output_tokens / ours.seconds),
            "steps": ours.num_steps,
            "graphs": ours.num_graphs,
            "peak_mib": ours.peak_bytes // _MIB,
            "computed_mib": ours.computed_bytes // _MIB,
            **sizes,
        },
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """Results of our runs: the median of their seconds, and the memory of the first to the last.

    computed_bytes: weights, cache and workspace, as they are known before.
    """

    spec: Any
    seconds: float
    num_steps: int
    num_graphs: int
    peak_bytes: int
    computed_bytes: int


def _measure_ours(shape: Shape, folder: Path, dtype: str | torch.dtype) -> _Found:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = bytetx.load(folder, device="cuda", dtype=dtype)
    sizes = {
        "kv_cache_tokens": sum(
            r.prompt_tokens + r.output_tokens + _PAGES_EACH for r in shape.requests
        ),
        "max_num_seqs": len(shape.requests),
    }
    engine, seconds, num_steps = model.engine(**sizes), [], 0
    for seed in range(_ROUNDS + _WARM_UPS):
        found, num_steps = _run(model, engine, shape, seed=seed)
        seconds.append(found)
    return _Found(
        model.spec,
        statistics.median(seconds[_WARM_UPS:]),
        num_steps,
        engine.num_graphs,
        torch.cuda.max_memory_allocated() - before,
        model.generation_sizes(**sizes).total_bytes,
    )


def _run(model: Model, engine: GenerationEngine, shape: Shape, *, seed: int) -> tuple[float, int]:
    """(seconds, steps) of all requests, with prompts of this seed."""
    prompts = random_prompts(shape.requests, vocab_size=model.spec.vocab_size, seed=seed)
    torch.cuda.synchronize()
    began, num_steps = time.perf_counter(), 0
    for prompt, request in zip(prompts, shape.requests, strict=True):
        params = SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)
        engine.add_request(prompt, params, streams=False)
    while engine.has_work:
        engine.step()
        num_steps += 1
    return time.perf_counter() - began, num_steps
