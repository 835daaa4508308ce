"""bytetx embed --task: a checkpoint's adapters of tasks, and the prompts of queries."""

import json
from pathlib import Path

import numpy as np
from checkpoints import save_checkpoint
from cli_runs import Bytetx
from jina_adapters import save_with_adapters

from bytetx import load

TEXTS = ["a", "two words"]


def test_a_task_runs_with_its_adapter(bytetx: Bytetx, tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base", "jina_embeddings_v3")
    folder = save_with_adapters(tmp_path / "adapters", base)
    Path("t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    task = "retrieval.query"
    assert bytetx("embed", "t.jsonl", "-m", folder, "-o", "v.npy", "--task", task).code == 0
    wanted = load(folder).embed(TEXTS, task=task).vectors
    np.testing.assert_allclose(np.load("v.npy"), wanted, atol=1e-6)
    failed = bytetx("embed", "t.jsonl", "-m", folder, "-o", "w.npy", "--task", "clustering")
    assert failed.code == 2
    assert "'text-matching'" in failed.err
    assert not Path("w.npy").exists()
