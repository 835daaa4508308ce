"""Model against transformers and sentence-transformers: embeddings and hidden states."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SENTENCES, TOKENIZERS, save_checkpoint
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx


@pytest.mark.parametrize("family", TOKENIZERS)
def test_hidden_states_equal_transformers(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, family)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoModel.from_pretrained(folder).eval()
    pairs = [(SENTENCES[0], SENTENCES[3]), (SENTENCES[6], "")]
    inputs = SENTENCES + pairs
    results = bytetx.load(folder).hidden_states(inputs, layers=(0, -1), truncate=True)
    for item, ours in zip(inputs, results, strict=True):
        encoded = tokenizer([item], return_tensors="pt", truncation=True)
        with torch.no_grad():
            states = reference(**encoded, output_hidden_states=True).hidden_states
        assert ours.shape == (2, encoded.input_ids.shape[1], 48)
        np.testing.assert_allclose(ours[0], states[0][0], atol=1e-5)
        np.testing.assert_allclose(ours[1], states[-1][0], atol=1e-4)


def test_two_threads_do_not_wait_for_each_other_in_short_steps(tmp_path: Path) -> None:
    """An encoder's steps of 1024 tokens took two contended threads twice the time of 2048."""
    folder = save_checkpoint(tmp_path)
    before = torch.get_num_threads()
    try:
        for num_threads, budget in ((1, 1024), (2, 2048), (16, 8192)):
            torch.set_num_threads(num_threads)
            assert bytetx.load(folder, device="cpu").token_budget == budget
    finally:
        torch.set_num_threads(before)
