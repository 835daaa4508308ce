"""Suite `text`: from texts, or from their token ids, to vectors on the host, on one GPU."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

import bytetx
from benchmarks import gpu_rivals, sparse
from benchmarks.bert import random_checkpoint
from benchmarks.encoder import work_of
from benchmarks.flash_attn import flash_attn_package
from benchmarks.gpu import DTYPES, Gpu, Work, gpu_suite
from benchmarks.lengths import Lengths
from benchmarks.measure import alternate
from benchmarks.rivals import Inputs, Rival, load_rivals, right_rivals
from benchmarks.suite import Measurement, Suite
from benchmarks.texts import random_token_ids
from bytetx.checkpoint.demo import demo_checkpoint
from bytetx.checkpoint.spec import ModelSpec
from bytetx.cli.passages import Lognormal, english_passages

_NUM_TEXTS = 16384
_LENGTHS = Lognormal(94, 0.6, 4, 200)  # 89 tokens on average by MiniLM's tokenizer, at most 247
_NUM_RIVAL_TEXTS = 8192  # the first ones: a rival's time a text is the same, and seconds are saved
_NUM_SPARSE_TEXTS = 4096
_NUM_CHECKED = 64  # embedded by everyone before the clock starts
_WARM_UP = 2  # whole runs of ours, which capture the graphs that later runs replay; 1 of a rival's
_MAX_COSINE_DISTANCE = 1e-3  # beyond which a rival did other work than ours in f16
_RIVALS = {
    "strings": ("sentence-transformers", "sentence-transformers-256", *gpu_rivals.UNPADDED),
    "ids": ("transformers", "packed-torch"),
}
_SPARSE = "sparse"


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: a checkpoint (None: all-MiniLM-L6-v2), and what goes in, a key of _RIVALS.

    inputs: or _SPARSE, texts to SPLADE's weights with the checkpoint's tokenizer.
    lengths: of random token ids, through BERT-base of random weights; None: real texts.
    """

    name: str
    inputs: str
    checkpoint: Path | None
    lengths: tuple[int, ...] | None = None
    dtype: str = "fp16"


def suite(*, patterns: list[str], model: Path | None = None) -> Suite:
    """model: an encoder's folder to measure instead of the demo checkpoint."""
    packages = ("transformers", "sentence-transformers", "tokenizers", "flash-attn")
    cases = shapes(model)
    return gpu_suite("text", cases, measure, patterns=patterns, unit="us/text", packages=packages)


def shapes(checkpoint: Path | None) -> list[Shape]:
    model = checkpoint.resolve().name if checkpoint else "minilm"
    real = [Shape(f"{model}-{inputs}", inputs, checkpoint) for inputs in _RIVALS]
    draw = Lengths()
    served = {
        "ln128": draw.lognormal(128, 0.8, 4096, 4, 512),
        "mean-20": draw.lognormal(20, 0.65, 2048, 3, 128),
    }
    ids = [
        Shape(f"base-ids-{name}", "ids", checkpoint, tuple(lengths.tolist()))
        for name, lengths in served.items()
    ]
    return [*real, *ids, Shape("splade-base-strings", _SPARSE, checkpoint)]


def measure(shape: Shape, gpu: Gpu) -> Measurement:
    """Model.embed against its rivals; the floor is the GPU's, whatever goes in."""
    real = shape.checkpoint or demo_checkpoint()
    if shape.inputs == _SPARSE:
        return _measure_sparse(shape, gpu, real)
    is_random = shape.lengths is not None
    source = random_checkpoint("base", DTYPES[shape.dtype], like=real) if is_random else None
    with source or nullcontext(real) as checkpoint:
        return _measure(shape, gpu, checkpoint)


def _measure(shape: Shape, gpu: Gpu, checkpoint: Path) -> Measurement:
    model = bytetx.load(checkpoint, device="cuda", dtype=DTYPES[shape.dtype])
    inputs, lengths = _inputs(shape, model)
    loaded = load_rivals(
        _RIVALS[shape.inputs], checkpoint, DTYPES[shape.dtype], loaders=gpu_rivals.LOADERS
    )
    notes = list(loaded.notes)
    runs = _rival_runs(model, inputs, loaded.rivals, notes)
    if shape.inputs == "strings":
        assert model.tokenizer is not None
        runs["tokenizer"] = partial(model.tokenizer.backend.encode_batch_fast, inputs)
    ours = partial(model.embed, inputs)
    for _ in range(_WARM_UP):
        ours()
    for run in runs.values():
        run()
    timing = alternate(ours, runs, min_rounds=2, max_rounds=2, seconds=0.0)
    seconds = dict(timing.rivals)
    tokenizer_us = seconds.pop("tokenizer", 0.0) / len(inputs) * 1e6
    num_shared = min(_NUM_RIVAL_TEXTS, len(inputs))
    work = work_of(model.spec, np.array(lengths), DTYPES[shape.dtype])
    return Measurement(
        ours=timing.ours / len(inputs) * 1e6,
        rivals={name: found / num_shared * 1e6 for name, found in seconds.items()},
        floor=gpu.rates.floor_us(work) / len(inputs),
        shape={
            "sequences": len(inputs),
            "tokens": sum(lengths),
            "max_seqlen": max(lengths),
            "rival_sequences": num_shared,
            "tokenizer_us": round(tokenizer_us, 3),
            **_flash_attention(runs),
        },
        notes=tuple(notes),
    )


def _measure_sparse(shape: Shape, gpu: Gpu, real: Path) -> Measurement:
    """embed_sparse, and embed of the same texts, through BERT-base of random weights."""

    def floor(spec: ModelSpec, lengths: list[int]) -> float:
        return gpu.rates.floor_us(Work(0.0, sparse.splade_flop(spec, lengths))) / 1e6

    return sparse.measure_sparse(
        english_passages(_NUM_SPARSE_TEXTS, lengths=_LENGTHS),
        like=real,
        dtype=DTYPES[shape.dtype],
        device="cuda",
        rivals=tuple(sparse.RIVALS),
        floor=floor,
    )


def _flash_attention(runs: Iterable[str]) -> dict[str, str]:
    """Whose FlashAttention-2 kernels the unpadded rivals ran, where there are any."""
    if gpu_rivals.UNPADDED.keys().isdisjoint(runs):
        return {}
    with flash_attn_package() as origin:
        return {"flash_attention_2": origin}


def _inputs(shape: Shape, model: "bytetx.Model") -> tuple[Inputs, list[int]]:
    """Strings or token ids, and their lengths in tokens."""
    if shape.lengths is not None:
        vocab_size = model.spec.vocab_size
        return random_token_ids(list(shape.lengths), vocab_size=vocab_size), list(shape.lengths)
    passages = english_passages(_NUM_TEXTS, lengths=_LENGTHS)
    assert model.tokenizer is not None
    ids = [encoding.ids for encoding in model.tokenizer.encode(passages)]
    return passages if shape.inputs == "strings" else ids, list(map(len, ids))


def _rival_runs(
    model: "bytetx.Model", inputs: Inputs, rivals: Sequence[Rival], notes: list[str]
) -> dict[str, Callable[[], object]]:
    """A run over the rivals' share of the inputs for each whose vectors are ours.

    transformers gets its share sorted by length, longest first, as users sort.
    """
    some = inputs[:_NUM_CHECKED]
    ours = model.embed(some).vectors
    runs: dict[str, Callable[[], object]] = {}
    for rival in right_rivals(rivals, some, ours, limit=_MAX_COSINE_DISTANCE, notes=notes):
        share = inputs[:_NUM_RIVAL_TEXTS]
        if rival.name == "transformers":
            share = cast(Inputs, sorted(share, key=len, reverse=True))
        runs[rival.name] = partial(rival.embed, share)
    return runs
