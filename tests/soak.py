"""Resident memory over many calls of random sizes: python tests/soak.py --calls 2000.

Embeds and generates with small random models, and prints resident memory as it goes. Fails where
the last half of the calls grows by 1 % or more. --sweep first runs a call of each row count that
CPU GEMMs run at, so that a short soak starts where a long one ends up.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from checkpoints import SENTENCES, save_causal, save_checkpoint
from other_processes import resident_mib

import bytetx
from bytetx.model import Model
from bytetx.ops.native import tile_rows
from bytetx.sampling_params import SamplingParams

MAX_POSITIONS = 512
FIRST_ID, LAST_ID = 5, 90  # that every tokenizer of the tests has
CACHE_TOKENS = 4096  # its memory is resident once every page of it was used
MAX_GROWTH = 0.01  # of the last half of the calls
_WORDS = " ".join(SENTENCES).split()
# Memory is the median of so many readings: a call's own buffers come and go.
_READINGS = 25


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        models = load_models(Path(folder), getattr(torch, options.dtype))
    rng = np.random.default_rng(options.seed)
    if options.sweep:
        sweep(*models, rng)
    readings = soak(random_calls(*models, rng), options.calls)
    start, middle, end = (
        median(readings[at : at + _READINGS])
        for at in (0, len(readings) // 2, len(readings) - _READINGS)
    )
    found = {"start_mib": start, "middle_mib": middle, "end_mib": end}
    print(json.dumps(found | {"growth_of_last_half": end / middle - 1}))
    return int(end / middle - 1 >= MAX_GROWTH)


def load_models(folder: Path, dtype: torch.dtype) -> tuple[Model, Model]:
    """An encoder and a causal model."""
    positions = MAX_POSITIONS
    bert = save_checkpoint(folder / "bert", "bert", max_position_embeddings=positions)
    gpt = save_causal(folder / "gpt2", "gpt2", n_positions=positions)
    gc.collect()
    encoder, causal = (bytetx.load(path, device="cpu", dtype=dtype) for path in (bert, gpt))
    return encoder, causal


def sweep(encoder: Model, causal: Model, rng: np.random.Generator) -> None:
    """Steps of each row count up to a full one, and as many sequences at a time as there can be."""
    m, longest = 0, MAX_POSITIONS - 8
    while m < max(encoder.token_budget, causal.token_budget):
        m = tile_rows(m + 1)
        bounds = np.linspace(0, m, -(-m // longest) + 1, dtype=int)
        # Of other tokens each time: what the cache knows of a prompt is no work.
        texts = [rng.integers(FIRST_ID, LAST_ID, n).tolist() for n in np.diff(bounds)]
        encoder.embed(texts)
        generate(causal, texts, SamplingParams(max_tokens=1))
        if m <= 64:
            generate(causal, [[FIRST_ID + i] for i in range(m)], SamplingParams(max_tokens=2))


def generate(causal: Model, prompts: list[str | list[int]], params: SamplingParams) -> None:
    causal.generate(prompts, params, kv_cache_tokens=CACHE_TOKENS)


def random_calls(encoder: Model, causal: Model, rng: np.random.Generator) -> Callable[[], None]:
    """A function that makes one call: one text or many, of one token up to all positions."""

    def text(longest: int) -> str | list[int]:
        if rng.random() < 0.2:
            return " ".join(rng.choice(_WORDS, rng.integers(1, 8)))
        drawn = int(np.exp(rng.uniform(0, np.log(longest + 1))))
        length = int(rng.choice([1, drawn, drawn, longest], p=[0.1, 0.4, 0.4, 0.1]))
        return rng.integers(FIRST_ID, LAST_ID, length).tolist()

    def call() -> None:
        num_texts = int(rng.choice([1, 1, 2, 5, 20, 70]))
        if rng.random() < 0.5:
            encoder.embed([text(MAX_POSITIONS) for _ in range(num_texts)], truncate=True)
            return
        max_tokens = int(rng.integers(1, 12))
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=float(rng.choice([0.0, 1.0])),
            frequency_penalty=float(rng.choice([0.0, 0.0, 0.5])),
            logprobs=2 if rng.random() < 0.1 else None,
        )
        prompts = [text(MAX_POSITIONS - max_tokens) for _ in range(num_texts)]
        generate(causal, prompts, params)

    return call


def soak(call: Callable[[], None], num_calls: int) -> list[float]:
    """Resident MiB after each call."""
    readings = []
    for number in range(1, num_calls + 1):
        call()
        readings.append(resident_mib())
        if number % max(num_calls // 10, 1) == 0:
            print(f"{number:6,} calls: {readings[-1]:,.1f} MiB", file=sys.stderr, flush=True)
    return readings


if __name__ == "__main__":
    sys.exit(main())
