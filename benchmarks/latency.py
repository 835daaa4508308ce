"""Suite `latency`: one text at a time on a GPU, and one sequence through the layers alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import bytetx
from benchmarks import gpu_rivals
from benchmarks.bert import (
    SIZES,
    LayerInputs,
    PackedTorch,
    random_bert,
    random_checkpoint,
)
from benchmarks.encoder import work_of
from benchmarks.gpu import DTYPES, Gpu, capture, gpu_suite, wall_us
from benchmarks.lengths import dense
from benchmarks.rivals import load_rivals
from benchmarks.suite import Measurement, Suite, measured
from bytetx.checkpoint.demo import demo_checkpoint
from bytetx.cli.passages import Lognormal, english_passages

_TEXT_TOKENS = 128
_LAYER_TOKENS = (32, 128, 512)
_ROUNDS = 30
_WARM_UP = 20  # the native tokenizer is made within the first ten texts of this length
_RIVALS = ("sentence-transformers", "transformers")


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: a text of about _TEXT_TOKENS tokens, or num_tokens through the layers alone."""

    name: str
    model: str  # a key of SIZES, or another name for the checkpoint itself
    num_tokens: int | None = None
    checkpoint: Path | None = None  # None: all-MiniLM-L6-v2
    dtype: str = "fp16"


def suite(*, patterns: list[str], model: Path | None = None) -> Suite:
    """model: an encoder's folder to measure instead of the demo checkpoint; it also lends its
    tokenizer to the models of random weights."""
    packages = ("transformers", "sentence-transformers")
    cases = shapes(model)
    return gpu_suite("latency", cases, measure, patterns=patterns, unit="us", packages=packages)


def shapes(checkpoint: Path | None) -> list[Shape]:
    own = checkpoint.resolve().name if checkpoint else "minilm"
    models = (own, *SIZES)
    texts = [Shape(f"{model}-text", model, checkpoint=checkpoint) for model in models]
    layers = [Shape(f"{size}-layers-{n}", size, n) for size in SIZES for n in _LAYER_TOKENS]
    return texts + layers


def measure(shape: Shape, gpu: Gpu) -> Measurement:
    """Medians of the time until the result is there, the launches included."""
    if shape.num_tokens is not None:
        return _measure_layers(shape, gpu, shape.num_tokens)
    real = shape.checkpoint or demo_checkpoint()
    if shape.model not in SIZES:
        return _measure_text(shape, gpu, real)
    with random_checkpoint(shape.model, DTYPES[shape.dtype], like=real) as folder:
        return _measure_text(shape, gpu, folder)


def _measure_text(shape: Shape, gpu: Gpu, checkpoint: Path) -> Measurement:
    """A string in, a vector on the host out."""
    dtype = DTYPES[shape.dtype]
    model = bytetx.load(checkpoint, device="cuda", dtype=dtype)
    text, num_tokens = one_text(model, _TEXT_TOKENS)
    loaded = load_rivals(_RIVALS, checkpoint, dtype, loaders=gpu_rivals.LOADERS)
    runs: dict[str, Callable[[], object]] = {"ours": partial(model.embed, [text])}
    runs |= {rival.name: partial(rival.embed, [text]) for rival in loaded.rivals}
    found = {name: _latency_us(run) for name, run in runs.items()}
    work = work_of(model.spec, dense(num_tokens, 1), dtype)
    sizes = {"tokens": num_tokens, "rounds": _ROUNDS}
    return measured(found, gpu.rates.floor_us(work), sizes, loaded.notes)


@torch.inference_mode()
def _measure_layers(shape: Shape, gpu: Gpu, num_tokens: int) -> Measurement:
    """Embedded tokens in, hidden states on the GPU out; ours and packed torch as one graph."""
    dtype, lengths = DTYPES[shape.dtype], dense(num_tokens, 1)
    bert = random_bert(SIZES[shape.model], dtype)
    inputs = LayerInputs(bert, lengths)
    padded, mask = inputs.padded()
    packed_torch = PackedTorch(bert.model)
    ours = capture(partial(bert.transformer.layers.run, lambda: inputs.x, inputs.batch))
    max_seqlen = inputs.max_seqlen
    theirs = capture(
        partial(packed_torch.encode, inputs.x, inputs.cu_seqlens, max_seqlen=max_seqlen)
    )
    found = {
        "ours": _latency_us(ours.replay),
        "transformers": _latency_us(lambda: bert.model.encoder(padded, attention_mask=mask)),
        "packed-torch-graph": _latency_us(theirs.replay),
    }
    floor = gpu.rates.floor_us(work_of(bert.spec, lengths, dtype))
    return measured(found, floor, {"tokens": num_tokens, "rounds": _ROUNDS})


def one_text(model: "bytetx.Model", num_tokens: int) -> tuple[str, int]:
    """A passage of real English cut at a word to at most num_tokens tokens, and its length."""
    longer = Lognormal(1.5 * num_tokens, 0.01, num_tokens, 2 * num_tokens)
    words = english_passages(1, lengths=longer)[0].split()
    assert model.tokenizer is not None
    while (found := model.tokenizer.count_tokens(" ".join(words))) > num_tokens:
        words.pop()
    return " ".join(words), found


def _latency_us(run: Callable[[], object]) -> float:
    for _ in range(_WARM_UP):
        run()
    return wall_us(run, rounds=_ROUNDS)
