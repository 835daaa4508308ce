"""Every grid of two and four processes, and a choice of eight: python tests/grids.py.

Embeds, scores and generates with small random models, on each grid and in one process, and fails
where the answers differ. --families and --grids choose some; all of them take about half an hour
on two cores.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from checkpoints import SENTENCES, save_checkpoint
from tiny import random_ids, save
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.parallel.grid import grids_of

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
OF_EIGHT = ("data8", "z8", "data4.z2", "data2.z2.y2", "z4.y2", "y4.x2", "data2.y2.x2", "z2.y2.x2")
GRIDS = [str(grid) for size in (2, 4) for grid in grids_of(size)] + list(OF_EIGHT)
ENCODERS = ("bert", "modernbert", "albert", "electra")
DECODERS = ("gpt2", "llama", "gpt_neox")
TOLERANCE = 2e-4  # see tests/nn/test_grids.py
GREEDY = bytetx.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answers(model: bytetx.Model, family: str) -> list[np.ndarray]:
    if family in ENCODERS:
        texts = [text for text in SENTENCES if 0 < len(text) < 60]
        return [np.asarray(model.embed(texts, truncate=True))]
    prompts = random_ids([5, 13, 20, 2, 30, 1, 1])
    found = [np.asarray([one.log_likelihood for one in model.score(prompts)])]
    for options in ({}, {"kv_cache_tokens": 160}):  # the second one preempts
        generated = model.generate(prompts, GREEDY, **options)
        found.append(np.asarray([answer.token_ids for answer in generated]))
    return found


def checkpoint(family: str, folder: Path) -> Path:
    if family in ENCODERS:
        return save_checkpoint(folder / family, family, **SIZES)
    config = {"rotary_pct": 0.5} if family == "gpt_neox" else {}
    return save(tiny_decoder(family, **SIZES, **config), folder / family)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=[*ENCODERS, *DECODERS])
    parser.add_argument("--grids", nargs="*", default=GRIDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for family in options.families:
            path = checkpoint(family, Path(folder))
            wanted = answers(bytetx.load(path, device="cpu"), family)
            for grid in options.grids:
                started = time.monotonic()
                with bytetx.load(path, device="cpu", grid=grid) as model:
                    found = answers(model, family)
                worst = max(
                    float(np.abs(ours - theirs).max())
                    for ours, theirs in zip(found, wanted, strict=True)
                )
                is_right = worst <= TOLERANCE * (1 if family in ENCODERS else 10)
                num_wrong += not is_right
                seconds = time.monotonic() - started
                verdict = "ok" if is_right else "WRONG"
                print(f"{family} {grid}: {verdict}, {worst:.1e}, {seconds:.0f} s", flush=True)
    raise SystemExit(f"{num_wrong} grids are wrong" if num_wrong else 0)


if __name__ == "__main__":
    main()
