"""Rows whose results are not finite: an error each, in every command and format of output."""

# ruff: noqa: F811  (fixtures of test_cli)

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import save_causal, save_checkpoint, save_m3
from cli_runs import Bytetx
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

WORD = "lazy"
TEXTS = ["New York is big", f"a {WORD} dog", "a", "it isn't far"]
IS_BAD = [False, True, False, False]


def poisoned(folder: Path, value: float) -> Path:
    """The checkpoint whose tokens of WORD alone overflow."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in (*TEXTS, "a dog [MASK]", "is it")]
    tokens = sorted(set(ids.pop(1)) - {token for others in ids for token in others})
    assert tokens
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("word_embeddings.weight", "wte.weight")):
            tensor[tokens] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, head = tmp_path_factory.mktemp("poisoned"), "ForSequenceClassification"
    saved = {
        "encoder": save_checkpoint(root / "a"),
        "classes": save_checkpoint(root / "b", head=head, id2label={0: "no", 1: "yes"}),
        "tags": save_checkpoint(root / "c", head="ForTokenClassification"),
        "masks": save_checkpoint(root / "d", head="ForMaskedLM", tie_word_embeddings=False),
        "answers": save_checkpoint(root / "e", head="ForQuestionAnswering", num_labels=2),
        "pairs": save_checkpoint(root / "f", head=head, num_labels=1),
        "m3": save_m3(root / "g", suffix=".safetensors"),
        "causal": save_causal(root / "h", "gpt2", tie_word_embeddings=False),
    }
    return {name: poisoned(folder, 3e38) for name, folder in saved.items()}


COMMANDS: dict[str, tuple[str, list[Any]]] = {
    **{
        f"embed {precision}": ("encoder", ["embed", "--precision", precision])
        for precision in ("float32", "float16", "binary", "ubinary")
    },
    "embed int8": ("encoder", ["embed", "--precision", "int8", "--ranges", "ranges.npy"]),
    "embed chunks": (
        "encoder",
        ["embed", "--precision", "binary", "--overflow", "chunk", "--stride", "2"],
    ),
    "embed-sparse": ("masks", ["embed-sparse"]),
    "embed-sparse m3": ("m3", ["embed-sparse"]),
    "embed-tokens": ("m3", ["embed-tokens", "--precision", "binary"]),
    "classify": ("classes", ["classify"]),
    "tag": ("tags", ["tag", "--aggregation", "none"]),
    "fill-mask": ("masks", ["fill-mask"]),
    "answer": ("answers", ["answer"]),
}


@pytest.mark.parametrize(
    ("name", "out"),
    [
        (name, out)
        for name, out in product(COMMANDS, ("v.npy", "v.jsonl", "v.parquet", "-"))
        if out != "v.npy" or COMMANDS[name][1][0] == "embed"  # others have no vectors
    ],
)
def test_a_row_that_is_not_finite_is_an_error(
    bytetx: Bytetx, folders: dict[str, Path], name: str, out: str
) -> None:
    model, command = COMMANDS[name]
    np.save("ranges.npy", np.stack([np.full(48, -2.0), np.full(48, 2.0)]).astype(np.float32))
    end = " [MASK]" if name == "fill-mask" else ""
    rows = [{"text": text + end, "question": "is it", "context": text} for text in TEXTS]
    Path("in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ran = bytetx(command[0], "in.jsonl", "-m", folders[model], *command[1:], "-o", out)
    assert ran.code == 0 and "1 error" in ran.err, ran.err
    if out == "v.npy":
        errors = list(map(json.loads, Path("v.npy.errors.jsonl").read_text().splitlines()))
        assert [row["index"] for row in errors] == [1] and "not finite" in errors[0]["error"]
        return
    if out == "v.parquet":
        found = pytest.importorskip("pyarrow.parquet").read_table(out).to_pylist()
    else:
        lines = ran.out if out == "-" else Path(out).read_text()
        found = list(map(json.loads, lines.splitlines()))
    assert [row.get("error") is not None for row in found] == IS_BAD
    assert "in.jsonl line 2: the text gave numbers that are not finite" in found[1]["error"]


def test_documents_and_prompts(bytetx: Bytetx, folders: dict[str, Path]) -> None:
    Path("in.txt").write_text("\n".join(TEXTS))
    ran = bytetx("rerank", "in.txt", "-m", folders["pairs"], "--query", "a")
    assert ran.code == 0, ran.err
    assert [hit["index"] for hit in ran.rows[0]["hits"] if "error" in hit] == [1]
    for command in (["generate", "--max-tokens", "3", "--temperature", "0"], ["score"]):
        ran = bytetx(command[0], "in.txt", "-m", folders["causal"], *command[1:])
        assert ran.code == 0, ran.err
        is_error = ["error" in row for row in ran.rows]
        assert is_error == IS_BAD, ran.rows
