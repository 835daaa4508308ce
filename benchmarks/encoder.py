"""Suite `encoder`: BERT's layers, whole ModernBERTs and DeBERTas on a GPU, against rivals."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import measure
from benchmarks import packed_encoders as packed_rival
from benchmarks.bert import (
    SIZES,
    Finish,
    LayerInputs,
    PackedTorch,
    compiled_finish,
    compiled_layers,
    finish_layer,
    random_bert,
)
from benchmarks.gpu import (
    DTYPES,
    FP8,
    Gpu,
    Work,
    cpu_suite,
    gpu_suite,
    graph_us,
    left_out,
    wall_us,
    without_fp8,
)
from benchmarks.lengths import Lengths, bytetransformer, dense
from benchmarks.measure import encoder_flop
from benchmarks.right_runs import right_runs
from benchmarks.suite import Measurement, Suite, measured
from benchmarks.whole_models import (
    DEBERTA_SIZES,
    MODERNBERT_SIZES,
    WHOLE_MODELS,
    ModernBert,
    TokenInputs,
    WholeModel,
    load_whole_model,
)
from bytetx.checkpoint.spec import ModelSpec
from bytetx.errors import OptionError
from bytetx.nn.transformer import Transformer

# ByteTransformer's kernels cannot run in this process. What its authors' program gave on an H200
# with its best settings for each longest sequence, in ms; said beside the case, never recorded.
_BYTETRANSFORMER_MS = {
    64: 1.19,
    128: 1.34,
    256: 2.23,
    384: 3.08,
    512: 3.65,
    768: 6.38,
    1024: 7.65,
}
# torch.compile takes seconds for each padded shape: two of them show what it brings.
_COMPILED_PADDED = ("base-1x128", "base-a06-256x16")
_GRAPHS = (
    "ours",
    "ours-fp16",
    "packed-torch-graph",
    "packed-torch-compiled",
)  # others: as launched
_CPU_SIZES, _CPU_ROUNDS = ("modernbert-base", "deberta-v3-base"), 3


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: the lengths in tokens, and which model."""

    name: str
    size: str  # a key of SIZES or of WHOLE_MODELS
    lengths: np.ndarray  # int64 [batch_size]
    dtype: str = "fp16"
    note: str | None = None


def suite(
    *, patterns: list[str], device: str = "cuda", packed_encoders: Path | None = None
) -> Suite:
    """device: cuda; or cpu, which runs whole models in fp32.  packed_encoders: where that package
    is installed, if not in this environment.

    Raises OptionError where it is not there.
    """
    if packed_encoders is not None and device == "cpu":
        raise OptionError("--packed-encoders needs a GPU; it goes with --device cuda")
    packed_rival.check_folder(packed_encoders)
    contest = Contest(packed_encoders)
    options: dict[str, Any] = {"patterns": patterns, "unit": "ms"}
    options["packages"] = ("transformers", "disentangled-flash")
    if device == "cpu":
        return cpu_suite("encoder", cpu_shapes(), contest.measure_on_cpu, **options)
    chosen = without_fp8(shapes(), patterns, contest.notes)
    return gpu_suite("encoder", chosen, contest.measure, **options)


def shapes() -> list[Shape]:
    """Single sequences, batches, and ByteTransformer's own table; models in turn, not mixed."""
    draw = Lengths()
    base = [
        Shape("base-1x32", "base", dense(32, 1)),
        Shape("base-1x128", "base", dense(128, 1)),
        Shape("base-a06-256x16", "base", draw.uniform(256, 16)),
        Shape("base-a06-512x64", "base", draw.uniform(512, 64)),
        Shape("base-ln128x256", "base", draw.lognormal(128, 0.8, 256, 4, 512)),
        Shape("base-mean-64x1024", "base", draw.lognormal(64, 0.8, 1024, 4, 512)),
    ]
    table = [
        Shape(
            f"bytetransformer-{longest}",
            "base",
            bytetransformer(longest),
            note=f"ByteTransformer's own kernels, on an H200 on another day: {ms} ms",
        )
        for longest, ms in _BYTETRANSFORMER_MS.items()
    ]
    large = [
        Shape("large-1x128", "large", dense(128, 1)),
        Shape("large-a06-512x64", "large", draw.uniform(512, 64)),
        Shape("large-ln128x256", "large", draw.lognormal(128, 0.8, 256, 4, 512)),
    ]
    fp8 = [
        Shape("base-a06-512x64-fp8", "base", base[3].lengths, FP8),
        Shape("base-ln128x256-fp8", "base", base[4].lengths, FP8),
        Shape("base-mean-64x1024-fp8", "base", base[5].lengths, FP8),
    ]
    large_fp8 = [Shape("large-ln128x256-fp8", "large", large[2].lengths, FP8)]
    long = np.array([8192, 4000, 2000, 700])
    modern = [
        Shape(f"{size}-{name}", size, lengths)
        for size in MODERNBERT_SIZES
        for name, lengths in (
            ("1x128", dense(128, 1)),
            ("a06-512x64", base[3].lengths),
            ("ln128x256", base[4].lengths),
            ("long", long),
        )
    ]
    pairs = draw.lognormal(40, 0.65, 256, 4, 128)
    deberta = [
        Shape(f"{size}-{name}", size, lengths)
        for size in DEBERTA_SIZES
        for name, lengths in (
            ("1x128", dense(128, 1)),
            ("a06-512x64", base[3].lengths),
            ("ln128x256", base[4].lengths),
            ("mean-40x256", pairs),
        )
    ]
    return base + table + fp8 + large + large_fp8 + modern + deberta


def cpu_shapes() -> list[Shape]:
    """Lengths of the same kinds as on a GPU, fewer of them."""
    draw = Lengths()
    lengths = {
        "1x128": dense(128, 1),
        "a06-512x8": draw.uniform(512, 8),
        "ln128x32": draw.lognormal(128, 0.8, 32, 4, 512),
        "mean-40x64": draw.lognormal(40, 0.65, 64, 4, 128),
    }
    return [
        Shape(f"{size}-{name}", size, found, "fp32")
        for size in _CPU_SIZES
        for name, found in lengths.items()
    ]


class Contest:
    """Measures cases one after another; keeps one model at a time."""

    def __init__(self, packed_encoders_folder: Path | None = None) -> None:
        self._size: str | None = None
        self.notes: list[str] = []  # with every model
        self._notes: list[str] = []
        self._packed_encoders_folder = packed_encoders_folder

    def measure(self, shape: Shape, gpu: Gpu) -> Measurement:
        """Ours and packed torch as replays of a graph, transformers as its users run it."""
        if shape.size in WHOLE_MODELS:
            return self._measure_whole(shape, gpu)
        if shape.size != self._size:
            self._load(shape)
        notes = [*self._notes, *([shape.note] if shape.note else [])]
        inputs = LayerInputs(self.bert, shape.lengths)
        if shape.dtype == FP8:
            return self._measure_fp8(shape, inputs, gpu)
        runs = right_runs(self._runs(shape, inputs), inputs, notes)
        found = graph_us({name: run for name, run in runs.items() if name in _GRAPHS})
        found |= {name: wall_us(run) for name, run in runs.items() if name not in _GRAPHS}
        found = {name: found[name] for name in runs}
        return _measured(found, shape, self.bert.spec, gpu, notes)

    def _measure_fp8(self, shape: Shape, inputs: LayerInputs, gpu: Gpu) -> Measurement:
        """E4M3 against our own f16, both as replays of a graph."""
        spec, weights = self.bert.spec, self.bert.model.state_dict()
        in_fp8 = Transformer.from_tensors(
            spec,
            weights,
            dtype=torch.float16,
            device="cuda",
            prepack=False,
            quantization="fp8",
        )
        engines = {
            "ours": in_fp8,
            "ours-fp16": self.bert.transformer,
        }
        runs = {
            name: partial(engine.layers.run, lambda: inputs.x, inputs.batch)
            for name, engine in engines.items()
        }
        with torch.inference_mode():
            rows, expected = (run().float() for run in runs.values())
        found = graph_us(runs)
        work = work_of(
            spec, shape.lengths, torch.float16, fp8_speed=gpu.fp8_flops / gpu.rates.gemm_flops
        )
        cosine = round(float(F.cosine_similarity(rows, expected).mean()), 5)
        sizes = {**_sizes(shape), "cosine": cosine}
        return measured(found, gpu.rates.floor_us(work), sizes, per=1e3)

    def _measure_whole(self, shape: Shape, gpu: Gpu) -> Measurement:
        """Ours as a replay of a graph, the rivals as their users run them; from token ids."""
        self._load_whole(shape, DTYPES[shape.dtype], device="cuda")
        notes = list(self._notes)
        inputs = TokenInputs(shape.lengths, vocab_size=self.model.spec.vocab_size)
        runs = right_runs(self.model.runs(inputs), None, notes)
        others = self._in_other_processes(inputs, runs["ours"], notes)
        found = graph_us({"ours": runs.pop("ours")})
        found |= {name: wall_us(run) for name, run in runs.items()} | others
        return _measured(found, shape, self.model.spec, gpu, notes)

    def measure_on_cpu(self, shape: Shape) -> Measurement:
        """Ours and the rivals in turn, from token ids to the last hidden states, in fp32."""
        if self._load_whole(shape, torch.float32, device="cpu"):
            self._gemm_flops = measure.gemm_flops(self.model.spec, torch.float32)
        notes = list(self._notes)
        inputs = TokenInputs(shape.lengths, vocab_size=self.model.spec.vocab_size, device="cpu")
        runs = right_runs(self.model.runs(inputs), None, notes)
        timed = {name: torch.inference_mode()(run) for name, run in runs.items()}
        timing = measure.alternate(
            timed.pop("ours"), timed, min_rounds=2, max_rounds=_CPU_ROUNDS, seconds=60.0
        )
        flop = encoder_flop(self.model.spec, shape.lengths.tolist())
        sizes = {
            **_sizes(shape),
            "rounds": timing.rounds,
            "flop": flop,
            "gemm_gflops": round(self._gemm_flops / 1e9),
        }
        return measured(timing.found, flop / self._gemm_flops, sizes, notes, per=1e-3)

    def _load_whole(self, shape: Shape, dtype: torch.dtype, *, device: str) -> bool:
        """Return whether the model is another one than before."""
        if shape.size == self._size:
            return False
        self._size, self._notes = shape.size, [*self.notes]
        self.model: WholeModel = load_whole_model(shape.size, dtype, self._notes, device=device)
        return True

    @torch.inference_mode()
    def _in_other_processes(
        self, inputs: TokenInputs, ours: Callable[[], Tensor], notes: list[str]
    ) -> dict[str, float]:
        """Microseconds of the rivals that cannot share this process."""
        if not isinstance(self.model, ModernBert):
            return {}
        folder = self._packed_encoders_folder
        return packed_rival.measure(self.model.padded, inputs, ours(), folder=folder, notes=notes)

    def _load(self, shape: Shape) -> None:
        self._size, self._notes = shape.size, [*self.notes]
        self.bert = random_bert(SIZES[shape.size], DTYPES.get(shape.dtype, torch.float16))
        self.packed_torch = PackedTorch(self.bert.model)
        self.finishes: dict[str, Finish] = {"packed-torch-graph": finish_layer}
        try:
            self.finishes["packed-torch-compiled"] = compiled_finish(self.bert)
        except Exception as error:  # a compiler may raise anything, and costs no other number
            self._notes.append(left_out("packed-torch-compiled", error))

    def _runs(self, shape: Shape, inputs: LayerInputs) -> dict[str, Callable[[], Tensor]]:
        """Every engine's forward pass; transformers' answers with the padded positions."""
        encoder, (padded, mask) = self.bert.model.encoder, inputs.padded()
        runs: dict[str, Callable[[], Tensor]] = {
            "ours": partial(self.bert.transformer.layers.run, lambda: inputs.x, inputs.batch),
            "transformers": lambda: encoder(padded, attention_mask=mask).last_hidden_state,
        }
        if shape.name in _COMPILED_PADDED:
            compiled = compiled_layers(encoder)
            runs["transformers-compiled"] = lambda: (
                compiled(padded, attention_mask=mask).last_hidden_state
            )
        for name, finish in self.finishes.items():
            runs[name] = partial(
                self.packed_torch.encode,
                inputs.x,
                inputs.cu_seqlens,
                max_seqlen=inputs.max_seqlen,
                finish=finish,
            )
        return runs


def _sizes(shape: Shape) -> dict[str, int | float | str]:
    return {
        "batch_size": len(shape.lengths),
        "total_tokens": int(shape.lengths.sum()),
        "max_seqlen": int(shape.lengths.max()),
    }


def _measured(
    found_us: dict[str, float], shape: Shape, spec: ModelSpec, gpu: Gpu, notes: list[str]
) -> Measurement:
    """Milliseconds of every engine, and the share of the GEMM rate that ours reaches."""
    work = work_of(spec, shape.lengths, DTYPES[shape.dtype])
    mfu = round(work.flop / gpu.rates.gemm_flops / found_us["ours"] * 1e6, 3)
    sizes = {**_sizes(shape), "flop": work.flop, "mfu": mfu}
    return measured(found_us, gpu.rates.floor_us(work), sizes, notes, per=1e3)


def work_of(
    spec: ModelSpec, lengths: np.ndarray, dtype: torch.dtype, *, fp8_speed: float = 1.0
) -> Work:
    """The layers' weights, their first input and their last output moved once; the model's FLOP.

    fp8_speed: how many times as fast as others the products are that dtype fp8 makes of E4M3 (all
    but attention's and its output projection); their FLOP count that much less.
    """
    hidden, inner = spec.hidden_size, spec.intermediate_size
    num_ffn = 3 if spec.is_gated else 2
    in_fp8 = spec.num_layers * (3 * hidden**2 + num_ffn * hidden * inner)
    tokens = int(lengths.sum())
    weights = in_fp8 + spec.num_layers * hidden**2
    flop = encoder_flop(spec, lengths.tolist()) - 2.0 * tokens * in_fp8 * (1 - 1 / fp8_speed)
    return Work((weights + 2 * tokens * hidden) * dtype.itemsize, flop)
