"""The rivals of suite `generate`: what they answer, and what is left of one that fails."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tiny_decoders import tiny_decoder

from benchmarks.causal import padded_generate
from benchmarks.generate_rivals import continuous_generate, measure_transformers

PROMPTS = [[5, 6, 7, 8], [9] * 30, [4, 3, 2, 1, 9, 8, 7]]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.filterwarnings("ignore:The `paged:FutureWarning")  # 5.17, which is measured, wants it
def test_both_ways_of_transformers_give_the_same_tokens() -> None:
    model = tiny_decoder("qwen3").eval()
    wanted = padded_generate(model, PROMPTS, 5)
    try:
        answers, seconds = continuous_generate(model, PROMPTS, 5)
    except MemoryError as error:
        if not str(error).endswith("available memory 0"):
            raise
        pytest.skip("this transformers finds no memory for a cache but that of a GPU")
    assert answers == wanted and 0 < seconds < 60


def test_a_rival_that_fails_leaves_a_note(tmp_path: Path) -> None:
    found, notes = measure_transformers(tmp_path, torch.float32, PROMPTS, 5)
    assert not found and len(notes) == 2
    assert "transformers left out" in notes[0] and "transformers-continuous left out" in notes[1]
