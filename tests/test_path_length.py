"""How many files, functions and calls of bytetx one call runs: a reader follows them.

The bounds are those of today, rounded up a little; a change lowers them, or says why it does not.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import save_causal, save_checkpoint
from hf_models import padded_inputs, tiny_model
from path_lengths import path_length

import bytetx


def embed(folder: Path) -> Callable[[], object]:
    model = bytetx.load(save_checkpoint(folder), device="cpu")
    return lambda: model.embed(["a fox"])


def generate(folder: Path) -> Callable[[], object]:
    model = bytetx.load(save_causal(folder), device="cpu")
    params = bytetx.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    return lambda: model.generate(["a fox"], params)


def wrap(folder: Path) -> Callable[[], object]:
    model = bytetx.wrap(tiny_model("bert").eval())
    inputs = padded_inputs([5, 4], side="right")

    def call() -> None:
        with torch.inference_mode():
            model(**inputs)

    return call


@pytest.mark.parametrize(
    ("make", "num_files", "num_functions", "num_calls"),
    [(embed, 26, 113, 210), (generate, 40, 203, 696), (wrap, 22, 98, 178)],
)
def test_a_call_is_short(
    make: Callable[[Path], Callable[[], object]],
    num_files: int,
    num_functions: int,
    num_calls: int,
    tmp_path: Path,
) -> None:
    files, functions, calls = path_length(lambda: make(tmp_path))
    assert calls <= num_calls, calls
    assert files <= num_files, files
    assert functions <= num_functions, functions
