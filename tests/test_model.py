"""Model against transformers and sentence-transformers: embeddings and hidden states."""

import builtins
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SENTENCES, TOKENIZERS, save_checkpoint
from paths import ROOT
from rich.console import Console
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx import errors
from bytetx.cli.files.resume import Counts
from bytetx.cli.files.terminal import JobBar
from bytetx.encode.request import RunStats
from bytetx.tasks.results import Embeddings
from bytetx.tasks.vectors import SparseEmbeddings, TokenEmbeddings


@pytest.mark.feature("Tasks", "`hidden_states`")
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


def test_every_error_that_the_docs_name_is_importable() -> None:
    own = {
        name
        for name, kind in vars(errors).items()
        if name.endswith("Error") and isinstance(kind, type)
    }
    assert own <= set(bytetx.__all__)
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = set(re.findall(r"`(?:bytetx\.)?(\w+Error)`", "\n".join(p.read_text() for p in pages)))
    assert "QueueFullError" in named
    for name in named & own:
        assert getattr(bytetx, name) is getattr(errors, name)
    assert named <= own | set(dir(builtins))


def test_results_of_many_numbers_are_one_line() -> None:
    stats = RunStats(num_texts=2)
    vectors, bounds = np.zeros((2, 384), np.float32), np.array([0, 1, 2])
    results = (
        Embeddings(vectors, stats, {1: errors.InputError("no text")}),
        TokenEmbeddings(vectors, bounds, stats),
        SparseEmbeddings(np.zeros(2, np.int32), np.zeros(2, np.float32), bounds, 30522, stats),
        bytetx.semantic_search(vectors, vectors),
    )
    for result in results:
        assert "\n" not in repr(result) and len(repr(result)) < 100
    assert repr(results[0]) == "Embeddings(shape=(2, 384), dtype=float32, errors=1)"


def test_what_a_run_does_not_measure_is_none(tmp_path: Path) -> None:
    stats = bytetx.load(save_checkpoint(tmp_path)).embed(["a", "some words"]).stats
    assert stats.num_texts == 2 and stats.num_pad_tokens is not None and stats.seconds > 0
    assert stats.tokenize_seconds is stats.queue_seconds is stats.compute_seconds is None
    assert stats.num_draft_tokens is stats.num_accepted_tokens is None


def test_a_bar_says_that_the_first_batch_runs() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    bar = JobBar(console, total_bytes=100, title="embed")
    with bar as show:
        bar._progress.refresh()
        assert "first batch" in console.file.getvalue()
        show(Counts(num_texts=3), 50)
        bar._progress.refresh()
        assert "3 texts" in console.file.getvalue()
