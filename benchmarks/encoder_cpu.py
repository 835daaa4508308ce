"""Suite `encoder` on a CPU: whole ModernBERTs and DeBERTas in fp32, against transformers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.lengths import Lengths, dense
from benchmarks.right_runs import right_runs
from benchmarks.rivals import versions
from benchmarks.suite import Case, Measurement, Suite, select
from benchmarks.token_inputs import TokenInputs, WholeModel
from benchmarks.whole_models import load_whole_model

_SIZES = ("modernbert-base", "deberta-v3-base")
_DTYPE = "fp32"


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: the lengths in tokens, and which model.  max_rounds, seconds: as in alternate()."""

    name: str
    size: str  # one of WHOLE_MODELS
    lengths: np.ndarray  # int64 [batch_size]
    max_rounds: int = 3
    seconds: float = 60.0


def encoder_cpu_suite(*, patterns: list[str]) -> Suite:
    """The suite's selected cases.  patterns: parts or globs of case names; empty means all.

    Raises BytetxError where no case fits.
    """
    chosen = select(shapes(), patterns, name=lambda shape: shape.name)

    def cases() -> Iterator[Case]:
        contest = Contest()
        for shape in chosen:
            yield Case(shape.name, "ms", _DTYPE, partial(contest.measure, shape))

    return Suite(
        name="encoder",
        device=measure.device_name(),
        versions=versions(("transformers", "disentangled-flash")),
        cases=cases(),
    )


def shapes() -> list[Shape]:
    """Lengths of the same kinds as on a GPU, fewer of them."""
    draw = Lengths()
    lengths = {
        "1x128": dense(128, 1),
        "a06-512x8": draw.uniform(512, 8),
        "ln128x32": draw.lognormal(128, 0.8, 32, 4, 512),
        "mean-40x64": draw.lognormal(40, 0.65, 64, 4, 128),
    }
    return [
        Shape(f"{size}-{name}", size, found) for size in _SIZES for name, found in lengths.items()
    ]


class Contest:
    """Measures cases one after another; keeps one model at a time."""

    def __init__(self) -> None:
        self._size: str | None = None

    def measure(self, shape: Shape) -> Measurement:
        """Ours and the rivals in turn, from token ids to the last hidden states."""
        if shape.size != self._size:
            self._load(shape.size)
        notes = list(self._notes)
        inputs = TokenInputs(shape.lengths, vocab_size=self.model.spec.vocab_size, device="cpu")
        runs = {
            name: _without_grad(run)
            for name, run in right_runs(self.model.runs(inputs), None, notes).items()
        }
        timing = measure.alternate(
            runs.pop("ours"),
            runs,
            min_rounds=2,
            max_rounds=shape.max_rounds,
            seconds=shape.seconds,
        )
        flop = measure.encoder_flop(self.model.spec, shape.lengths.tolist())
        return Measurement(
            ours=timing.ours * 1e3,
            rivals={name: seconds * 1e3 for name, seconds in timing.rivals.items()},
            floor=flop / self.gemm_flops * 1e3,
            shape={
                "batch_size": len(shape.lengths),
                "total_tokens": int(shape.lengths.sum()),
                "max_seqlen": inputs.max_seqlen,
                "rounds": timing.rounds,
                "flop": flop,
                "gemm_gflops": round(self.gemm_flops / 1e9),
            },
            notes=tuple(notes),
        )

    def _load(self, size: str) -> None:
        self._size, self._notes = size, list[str]()
        self.model: WholeModel = load_whole_model(size, torch.float32, self._notes, device="cpu")
        self.gemm_flops = measure.gemm_flops(self.model.spec, torch.float32)


def _without_grad(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return torch.inference_mode()(run)
