"""Where a checkpoint is found: folders, the hub cache offline, subfolders, damaged JSON."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bytetx import config as config_module
from bytetx.config import load_config, read_json, resolve_checkpoint, transformer_folder
from bytetx.errors import CheckpointError

ROOT = Path(__file__).resolve().parent.parent


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"model_type": "bert"})
    assert resolve_checkpoint(tmp_path) == resolve_checkpoint(str(tmp_path)) == tmp_path
    assert transformer_folder(tmp_path) == tmp_path
    assert load_config(tmp_path) == {"model_type": "bert"}


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no config.json; give the folder that save_pre"):
        resolve_checkpoint(tmp_path)


def test_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", "")
    with pytest.raises(CheckpointError, match="is a file; give the checkpoint's folder"):
        resolve_checkpoint(path)


def hub_cache(folder: Path, repo: str) -> Path:
    """The layout huggingface_hub keeps: refs name a commit, snapshots hold its files."""
    commit = "1" * 40
    repo_folder = folder / f"models--{repo.replace('/', '--')}"
    write(repo_folder / "refs" / "main", commit)
    write(repo_folder / "snapshots" / commit / "config.json", {"model_type": "bert"})
    return repo_folder / "snapshots" / commit


def test_a_hub_id_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub_cache(tmp_path, "someone/model")
    actual_download = config_module.snapshot_download
    monkeypatch.setattr(
        config_module,
        "snapshot_download",
        lambda repo, **options: actual_download(repo, cache_dir=tmp_path, **options),
    )
    assert resolve_checkpoint("someone/model", local_files_only=True) == snapshot
    with pytest.raises(CheckpointError, match="'someone/other' is no local folder, it is not in"):
        resolve_checkpoint("someone/other", local_files_only=True)
    with pytest.raises(CheckpointError, match="it is not in the local hub cache"):
        resolve_checkpoint("someone/model", revision="2" * 40, local_files_only=True)


@pytest.mark.parametrize(
    "settings", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_a_hub_that_cannot_be_reached(settings: dict[str, str], tmp_path: Path) -> None:
    code = (
        "from bytetx.config import resolve_checkpoint, CheckpointError\n"
        "try: resolve_checkpoint('someone/model')\n"
        "except CheckpointError as error: print('refused:', error)"
    )
    environment = {
        k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_ENDPOINT")
    }
    environment |= {"HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)} | settings
    start = time.monotonic()
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("refused: 'someone/model' is no local folder"), done.stderr
    assert "download it once while online, or give a folder" in done.stdout
    assert time.monotonic() - start < 30  # mostly the import of torch on a busy machine


@pytest.mark.parametrize("name", ["a/b/c", "no such folder", "", "-", "x" * 200])
def test_what_can_be_no_hub_id(name: str) -> None:
    with pytest.raises(CheckpointError):
        resolve_checkpoint(name, local_files_only=True)


def modules_json(folder: Path, *modules: tuple[str, str]) -> None:
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    write(folder / "modules.json", entries)


def test_a_transformer_in_a_subfolder(tmp_path: Path) -> None:
    modules_json(tmp_path, ("0_Transformer", "Transformer"), ("1_Pooling", "Pooling"))
    write(tmp_path / "0_Transformer" / "config.json", {"model_type": "bert"})
    assert resolve_checkpoint(tmp_path) == tmp_path
    assert transformer_folder(tmp_path) == tmp_path / "0_Transformer"


def test_a_transformer_beside_modules_json(tmp_path: Path) -> None:
    modules_json(tmp_path, ("", "Transformer"), ("1_Pooling", "Pooling"))
    assert transformer_folder(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "must hold a JSON list of objects"),
        ("[1]", "must hold a JSON list of objects"),
        ("[", "cannot be read as JSON"),
        ("[]", "names no Transformer module, only: nothing"),
        ('[{"type": "x.BoW", "path": ""}]', "only: x.BoW"),
        ('[{"type": "x.Transformer", "path": "../out"}]', "'../out' must lie inside the folder"),
        ('[{"type": "x.Transformer", "path": "/etc"}]', "'/etc' must lie inside the folder"),
        ('[{"type": "x.Transformer", "path": 3}]', "3 must lie inside the folder"),
        ('[{"type": "x.Transformer", "path": "gone"}]', "'gone', which is not there"),
    ],
)
def test_damaged_modules_json(content: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "modules.json", content)
    with pytest.raises(CheckpointError, match=message):
        transformer_folder(tmp_path)


def test_code_of_the_checkpoint_never_runs(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "own.Config", "AutoModel": "own.Model", "AutoTokenizer": ["own.T"]}
    write(tmp_path / "config.json", {"model_type": "bert", "auto_map": auto_map})
    write(tmp_path / "own.py", "raise SystemExit('this must never run')")
    with pytest.raises(
        CheckpointError, match="own code for AutoConfig, AutoModel, and bytetx never"
    ):
        load_config(tmp_path)
    del auto_map["AutoConfig"], auto_map["AutoModel"]  # a tokenizer's code changes no tensor
    write(tmp_path / "config.json", {"model_type": "bert", "auto_map": auto_map})
    assert load_config(tmp_path)["model_type"] == "bert"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1, 2]",
        "null",
        "\x00",
        '{"a": 1' + "0" * 5000 + "}",
        "[" * 100_000,
        '{"a": "\\ud800',
    ],
    ids=["empty", "open", "list", "null", "nul", "long number", "deep", "surrogate"],
)
def test_damaged_json(content: str, tmp_path: Path) -> None:
    path = write(tmp_path / "config.json", content)
    with pytest.raises(
        CheckpointError, match=r"config\.json (cannot be read|must hold a JSON obj)"
    ):
        load_config(tmp_path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_json(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_json(path)
