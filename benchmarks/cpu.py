"""Suite `cpu`: encoders on this machine's CPU, from strings and from token ids, against rivals."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import numpy as np
import torch

import bytetx
from benchmarks import measure, rivals, sparse, static, texts
from benchmarks.bert import random_checkpoint
from benchmarks.cpu_generate import CASE as GENERATE_CASE
from benchmarks.cpu_generate import (
    LLAMA_CASES,
    gguf_cases,
    measure_generate,
    measure_gguf,
    measure_llama,
)
from benchmarks.memory import measure_memory
from benchmarks.rivals import Inputs, Rival
from benchmarks.suite import Case, Measurement, Suite, is_selected, measured, none_fits
from bytetx.checkpoint.demo import demo_checkpoint
from bytetx.checkpoint.gguf.file import GGUF_SUFFIX
from bytetx.checkpoint.spec import ModelSpec
from bytetx.cli.passages import english_passages
from bytetx.ops.int8_linear import why_no_int8_linear

SPARSE_CASE = "bert-base-fp32-splade"
STATIC_CASE = "static-fp32"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INT8 = "int8"
RIVALS = ("transformers", "openvino", "onnxruntime", "sentence-transformers")
_INT8_RIVALS = ("openvino-nncf",)
# Cosine distance beyond which a rival did other work than ours; bf16 rounds at 2^-9, int8 at 2^-8
# of the largest value.
_MAX_COSINE_DISTANCE = {"fp32": 1e-4, "bf16": 2e-2, INT8: 2e-2}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Amounts of a run: counts of texts, tokens and rounds; seconds per case."""

    num_texts: int = 256
    num_base_texts: int = 48
    profile_tokens: int = 4096
    num_memory_texts: int = 16384
    num_sparse_texts: int = 32
    num_static_texts: int = 8192
    min_rounds: int = 2
    max_rounds: int = 3
    seconds: float = 60.0
    num_prompts: int = 32
    num_new_tokens: int = 32


QUICK = Sizes(
    *(48, 4, 256, 512),
    num_sparse_texts=4,
    num_static_texts=64,
    min_rounds=1,
    max_rounds=1,
    num_prompts=2,
    num_new_tokens=2,
)
# The rivals of the larger model and of the length profiles: the reference and the fastest. All four
# there would make a run take a quarter of an hour on two cores.
_TWO_RIVALS = ("transformers", "openvino")
_CHECKED_INPUTS = 2 * rivals.BATCH_SIZE  # embedded by everyone before the clock starts


def suite(*, patterns: list[str], model: Path | None = None, quick: bool = False) -> Suite:
    """The suite's selected cases.

    model: an encoder's folder to measure instead of MiniLM and the BERT-base shape, or a decoder's
    GGUF file, in int4 beside llama.cpp.
    quick: few texts and one round.  Raises OptionError where no case fits.
    """
    names = [model.resolve().name] if model else ["minilm", "bert-base"]
    known = [case for name in names for case in _case_names(name)]
    if model is not None and model.suffix == GGUF_SUFFIX:
        known = list(gguf_cases(model))
    if model is None:
        known += [GENERATE_CASE, *LLAMA_CASES, SPARSE_CASE, STATIC_CASE]
    if not any(is_selected(name, patterns) for name in known):
        raise none_fits(patterns, known)
    return Suite(
        name="cpu",
        device=measure.device_name(),
        versions=rivals.versions((*RIVALS, "nncf", "llama-cpp-python", "model2vec")),
        cases=_cases(QUICK if quick else Sizes(), patterns, model),
    )


class Contest:
    """Ours and the rivals on one checkpoint in one dtype; each is loaded when first asked for."""

    def __init__(
        self, checkpoint: Path, dtype_name: str, *, sizes: Sizes, rival_names: tuple[str, ...]
    ):
        self.checkpoint, self.dtype_name, self.sizes = checkpoint, dtype_name, sizes
        self.is_int8 = dtype_name == INT8
        self.dtype = DTYPES["bf16" if self.is_int8 else dtype_name]
        self.rival_names = _INT8_RIVALS if self.is_int8 else rival_names

    @cached_property
    def model(self) -> "bytetx.Model":
        dtype = INT8 if self.is_int8 else self.dtype
        return bytetx.load(self.checkpoint, device="cpu", dtype=dtype)

    @cached_property
    def rivals(self) -> rivals.Loaded:
        return rivals.load_rivals(self.rival_names, self.checkpoint, self.dtype)

    @cached_property
    def gemm_flops(self) -> float:
        return measure.gemm_flops(
            self.model.spec, self.model.checkpoint.dtype, is_int8=self.is_int8
        )

    def texts(self, count: int, *, is_sorted: bool) -> Measurement:
        """Measure from strings; sorted means longest first by characters, as users sort."""
        passages = english_passages(count)
        if is_sorted:
            passages.sort(key=len, reverse=True)
        kept = [r for r in self.rivals.rivals if not (is_sorted and r.sorts_itself)]
        return self._measure(passages, kept, {"order": "sorted" if is_sorted else "arrival"})

    def token_ids(self, profile: str) -> Measurement:
        """Measure from token ids whose lengths follow a profile, in arrival order."""
        spec = self.model.spec
        lengths = texts.profile_lengths(profile, total_tokens=self.sizes.profile_tokens)
        lengths = [min(length, spec.max_positions) for length in lengths]
        ids = texts.random_token_ids(lengths, vocab_size=spec.vocab_size)
        names = (*_TWO_RIVALS, *_INT8_RIVALS)
        kept = [rival for rival in self.rivals.rivals if rival.name in names]
        return self._measure(ids, kept, {"order": "arrival", "profile": profile})

    def _measure(
        self, inputs: Inputs, competitors: Sequence[Rival], shape: dict[str, int | float | str]
    ) -> Measurement:
        sizes, notes = self.sizes, list(self.rivals.notes)
        lengths = self._lengths(inputs)
        some = inputs[:_CHECKED_INPUTS]
        ours = self.model.embed(some).vectors
        if self.is_int8:
            notes += self._losses(inputs, competitors)
        limit = _MAX_COSINE_DISTANCE[self.dtype_name]
        kept = rivals.right_rivals(competitors, some, ours, limit=limit, notes=notes)
        runs = {rival.name: partial(rival.embed, inputs) for rival in kept}
        timing = measure.alternate(
            partial(self.model.embed, inputs),
            runs,
            min_rounds=sizes.min_rounds,
            max_rounds=sizes.max_rounds,
            seconds=sizes.seconds,
        )
        total = sum(lengths)
        floor = measure.encoder_flop(self.model.spec, lengths) / self.gemm_flops
        recorded = {
            **shape,
            "sequences": len(lengths),
            "tokens": total,
            "max_seqlen": max(lengths),
            "rounds": timing.rounds,
            "gemm_gflops": round(self.gemm_flops / 1e9),
        }
        return measured(timing.found, floor, recorded, notes, per=total / 1e6)  # us/token

    def _losses(self, inputs: Inputs, competitors: Sequence[Rival]) -> list[str]:
        """Say how far the vectors of each are from those in fp32."""
        exact = bytetx.load(self.checkpoint, device="cpu", dtype=torch.float32)
        expected = exact.embed(inputs).vectors
        vectors = {"bytetx": self.model.embed(inputs).vectors}
        vectors |= {rival.name: rival.embed(inputs) for rival in competitors}
        losses = []
        for name, rows in vectors.items():
            norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(expected, axis=1)
            cosines = (rows * expected).sum(1) / norms
            losses.append(
                f"{name}: cosine to fp32 {cosines.mean():.4f} on average, {cosines.min():.4f} least"
            )
        return losses

    def _lengths(self, inputs: Inputs) -> list[int]:
        """Tokens of each input, special tokens included."""
        if isinstance(inputs[0], str):
            assert self.model.tokenizer is not None
            strings = cast(Sequence[str], inputs)
            return [len(encoding.ids) for encoding in self.model.tokenizer.encode(strings)]
        return [len(ids) for ids in inputs]


def _case_names(model: str) -> list[str]:
    names = []
    for dtype in DTYPES:
        names += [f"{model}-{dtype}-arrival", f"{model}-{dtype}-sorted"]
        if model != "bert-base":
            names += [f"{model}-{dtype}-ids-{profile}" for profile in texts.PROFILES]
            names.append(f"{model}-{dtype}-memory")
    if why_no_int8_linear() is None:
        names += [f"{model}-{INT8}-{kind}" for kind in _int8_kinds(model)]
    return names


def _int8_kinds(model: str) -> list[str]:
    profiles = [] if model == "bert-base" else [f"ids-{profile}" for profile in texts.PROFILES]
    return ["arrival", "sorted", *profiles]


def _cases(sizes: Sizes, patterns: list[str], checkpoint: Path | None) -> Iterator[Case]:
    if checkpoint is not None and checkpoint.suffix == GGUF_SUFFIX:
        for name, shape in gguf_cases(checkpoint).items():
            if is_selected(name, patterns):
                measure_case = partial(
                    measure_gguf,
                    checkpoint,
                    shape,
                    min_rounds=sizes.min_rounds,
                    max_rounds=sizes.max_rounds,
                    seconds=sizes.seconds,
                )
                yield Case(name, "us/token", "int4", measure_case)
        return
    if checkpoint is not None:
        name = checkpoint.resolve().name
        yield from _model_cases(name, checkpoint, sizes, patterns)
        return
    demo = demo_checkpoint()
    yield from _model_cases("minilm", demo, sizes, patterns)
    if any(is_selected(name, patterns) for name in _case_names("bert-base")):
        with random_checkpoint("base", torch.float32, like=demo, device="cpu") as base:
            yield from _model_cases("bert-base", base, sizes, patterns)
    counts = {GENERATE_CASE: sizes.num_prompts, **LLAMA_CASES}
    for name, count in counts.items():
        if is_selected(name, patterns):
            is_llama = name in LLAMA_CASES
            measure_case = partial(
                measure_llama if is_llama else measure_generate,
                count,
                sizes.num_new_tokens,
                min_rounds=sizes.min_rounds,
                max_rounds=sizes.max_rounds,
                seconds=sizes.seconds,
            )
            yield Case(name, "us/token", "bf16" if is_llama else "fp32", measure_case)
    if is_selected(SPARSE_CASE, patterns):
        yield Case(SPARSE_CASE, "us/text", "fp32", partial(_measure_sparse, sizes, demo))
    if is_selected(STATIC_CASE, patterns):
        measure_static = partial(
            static.measure_static,
            english_passages(sizes.num_static_texts),
            like=demo,
            min_rounds=sizes.min_rounds,
            max_rounds=sizes.max_rounds,
            seconds=sizes.seconds,
        )
        yield Case(STATIC_CASE, "us/text", "fp32", measure_static)


def _measure_sparse(sizes: Sizes, demo: Path) -> Measurement:
    """SPLADE over BERT-base's shape; the floor is the GEMMs' at the rate of the layers'."""

    def floor(spec: ModelSpec, lengths: list[int]) -> float:
        return sparse.splade_flop(spec, lengths) / measure.gemm_flops(spec, torch.float32)

    return sparse.measure_sparse(
        english_passages(sizes.num_sparse_texts),
        like=demo,
        dtype=torch.float32,
        device="cpu",
        rivals=sparse.CPU_RIVALS,
        floor=floor,
        max_rounds=sizes.max_rounds,
    )


def _model_cases(model: str, checkpoint: Path, sizes: Sizes, patterns: list[str]) -> Iterator[Case]:
    """The selected cases of one checkpoint; one dtype's models are dropped before the next's."""
    is_base = model == "bert-base"
    count = sizes.num_base_texts if is_base else sizes.num_texts
    rival_names = _TWO_RIVALS if is_base else RIVALS
    for dtype in (*DTYPES, INT8):
        contest = Contest(checkpoint, dtype, sizes=sizes, rival_names=rival_names)
        measures: dict[str, Callable[[], Measurement]] = {
            "arrival": partial(contest.texts, count, is_sorted=False),
            "sorted": partial(contest.texts, count, is_sorted=True),
            **{f"ids-{p}": partial(contest.token_ids, p) for p in texts.PROFILES},
            "memory": partial(measure_memory, checkpoint, dtype, sizes.num_memory_texts),
        }
        for name in _case_names(model):
            prefix = f"{model}-{dtype}-"
            if name.startswith(prefix) and is_selected(name, patterns):
                kind = name.removeprefix(prefix)
                unit = "MiB" if kind == "memory" else "us/token"
                yield Case(name, unit, dtype, measures[kind])
