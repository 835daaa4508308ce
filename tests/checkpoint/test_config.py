"""Where a checkpoint is found: folders, the hub cache offline, subfolders, damaged JSON."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from paths import ROOT

from bytetx.checkpoint import hub as hub_module
from bytetx.checkpoint.files import load_config, resolve_checkpoint, transformer_folder
from bytetx.checkpoint.side_files import read_json
from bytetx.errors import CheckpointError
from bytetx.nn.loading import load_spec


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
    write(repo_folder / "snapshots" / commit / "model.safetensors", "")
    return repo_folder / "snapshots" / commit


def test_a_hub_id_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub_cache(tmp_path, "someone/model")
    actual_download = hub_module.snapshot_download
    monkeypatch.setattr(
        hub_module,
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
        "from bytetx.checkpoint.files import resolve_checkpoint, CheckpointError\n"
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


ANSWERS = {
    "missing": (404, "RepoNotFound", "the hub has no such model: check the name"),
    "private": (401, "RepoNotFound", "the hub has no such model: .*log in with `hf auth login`"),
    "gated": (403, "GatedRepo", "is gated: accept its terms on huggingface.co, then log in"),
    "revised": (404, "RevisionNotFound", "has no revision 'v9' on the hub"),
    "down": (500, "", "is not in the local hub cache at revision 'v9', and the hub cannot be"),
}


class Hub(BaseHTTPRequestHandler):
    """A hub that refuses every model for the reason in its name."""

    def do_GET(self) -> None:
        status, code, _ = next(a for name, a in ANSWERS.items() if name in self.path)
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


def test_each_refusal_of_the_hub_has_its_own_error(tmp_path: Path) -> None:
    code = (
        "from bytetx.checkpoint.files import resolve_checkpoint, CheckpointError\n"
        f"for name in {list(ANSWERS)!r}:\n"
        "    try: resolve_checkpoint('someone/' + name, revision='v9')\n"
        "    except CheckpointError as error: print(error)"
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
        environment |= {"HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "NO_PROXY": "*"}
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        server.shutdown()
    lines = done.stdout.splitlines()
    assert len(lines) == len(ANSWERS), done.stderr
    for (name, (_, _, message)), line in zip(ANSWERS.items(), lines, strict=True):
        assert re.match(f"'someone/{name}' .*{message}", line), line


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (
            ["config.json", "pytorch_model.bin"],
            "has no weights in safetensors, only pytorch_model.bin",
        ),
        (["config.json", "tf_model.h5"], "has no weights in safetensors, none in a format"),
        (["README.md", "model-q4.gguf"], r"has its weights in GGUF \(model-q4.gguf\), of which"),
        (["README.md"], "has no config.json; give the folder that save_pretrained wrote"),
    ],
    ids=str,
)
def test_what_a_hub_repository_holds_instead(
    held: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in held:
        if name.endswith((".json", ".safetensors")):  # what is fetched
            write(tmp_path / name, {"model_type": "bert"})
    monkeypatch.setattr(hub_module, "snapshot_download", lambda repo, **options: str(tmp_path))
    monkeypatch.setattr(hub_module, "list_repo_files", lambda repo, revision: held)
    with pytest.raises(CheckpointError, match=f"'someone/model' {message}"):
        resolve_checkpoint("someone/model")


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        (["gliner_config.json", "pytorch_model.bin"], "pytorch_model.bin"),
        (["config.json", "encoder_config/config.json", "pytorch_model.bin"], "pytorch_model.bin"),
        (["gliner_config.json", "model.safetensors", "pytorch_model.bin"], "model.safetensors"),
        (["config.json", "model.safetensors", "pytorch_model.bin"], "model.safetensors"),
        (
            ["config.json", "model.safetensors", "1_WeightedLayerPooling/pytorch_model.bin"],
            "1_WeightedLayerPooling/pytorch_model.bin",
        ),
    ],
    ids=str,
)
def test_plain_tensors_are_fetched_where_they_are_read(
    held: list[str], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repo: str, *, allow_patterns: list[str], **options: object) -> str:
        for name in held:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(hub_module, "snapshot_download", download)
    monkeypatch.setattr(hub_module, "list_repo_files", lambda repo, revision: held)
    folder = resolve_checkpoint("someone/model")
    assert (folder / wanted).is_file()
    assert (folder / "pytorch_model.bin").is_file() == (wanted == "pytorch_model.bin")


def test_an_unexpected_client_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class ProxyError(Exception):
        """As the hub's HTTP library has its own, which are no OSError."""

    def broken(repo: str, **options: object) -> str:
        raise ProxyError("407")

    monkeypatch.setattr(hub_module, "snapshot_download", broken)
    with pytest.raises(CheckpointError, match="'a/b' is neither .*: ProxyError: 407"):
        resolve_checkpoint("a/b")


def test_folders_that_are_no_checkpoint_but_something_known(tmp_path: Path) -> None:
    gguf = write(tmp_path / "gguf" / "model-q4.gguf", "")
    for path in (gguf, gguf.parent):
        with pytest.raises(CheckpointError, match="model-q4.gguf is no GGUF file"):
            resolve_checkpoint(path)
    write(gguf.parent / "config.json", {"model_type": "llama"})
    write(gguf.parent / "model-q8.gguf", "")
    with pytest.raises(CheckpointError, match="holds 2 GGUF models: model-q4.gguf, model-q8.gguf"):
        resolve_checkpoint(gguf.parent)
    write(gguf.parent / "model.safetensors", "")
    assert resolve_checkpoint(gguf.parent) == gguf.parent


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
        ("[]", "names no Transformer or StaticEmbedding module, only: nothing"),
        ('[{"type": "x.BoW", "path": ""}]', "only: x.BoW"),
        (
            '[{"type": "x.Transformer", "path": "../out"}]',
            "path must be a path inside the folder, got '../out'",
        ),
        (
            '[{"type": "x.Transformer", "path": "/etc"}]',
            "path must be a path inside the folder, got '/etc'",
        ),
        ('[{"type": "x.Transformer", "path": 3}]', "path must be a path inside the folder, got 3"),
        ('[{"type": "x.Transformer", "path": "gone"}]', "'gone', which does not exist"),
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
        load_spec(tmp_path)
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
    with pytest.raises(CheckpointError, match="cannot be read: there is no such file"):
        read_json(path)
