"""A checkpoint's own Python never runs, and nothing but the job reads the job's stdin."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import edit_json, save_checkpoint, save_sentence_model
from paths import ROOT
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Pooling

# Answers that transformers takes as consent, then ordinary lines.
LINES = ["1", "y", "yes", "a dog"]
AUTO_MAP = {
    "AutoConfig": "own.Config",
    "AutoModel": "own.Model",
    "AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"],
}


def own_code(folder: Path) -> Path:
    """A module that writes a file when it is imported; the path of that file."""
    mark = folder.parent / "the code ran"
    (folder / "own.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "from transformers import BertConfig as Config, BertModel as Model\n"
        "from transformers import BertTokenizer as Tokenizer\n"
        "from torch.nn import Identity as Module\n"
    )
    return mark


def embed(folder: Path) -> subprocess.CompletedProcess:
    """`bytetx embed` of LINES from stdin."""
    return subprocess.run(
        [sys.executable, "-m", "bytetx", "embed", "-m", str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "BYTETX_THREADS": "1"},
        input="".join(f"{line}\n" for line in LINES),
        capture_output=True,
        text=True,
        cwd=folder.parent,
    )


def without_tokenizer_json(folder: Path) -> None:
    """The same vocabulary as a file that only transformers reads."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.get)) + "\n")
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")


def name_in_tokenizer_config(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", auto_map=AUTO_MAP)


def name_in_tokenizer_class(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", tokenizer_class="own.Tokenizer")


def name_in_config(folder: Path) -> None:
    edit_json(folder / "config.json", auto_map=AUTO_MAP)


def name_in_a_tokenizers_part_of_config(folder: Path) -> None:
    auto_map = {"AutoTokenizer": AUTO_MAP["AutoTokenizer"]}
    edit_json(folder / "config.json", auto_map=auto_map)


def name_in_another_config(folder: Path) -> None:
    """A config that transformers reads instead of config.json: of a model that it does not know."""
    own = {"auto_map": AUTO_MAP, "model_type": "own"}
    other = json.loads((folder / "config.json").read_text()) | own
    (folder / "config.4.0.0.json").write_text(json.dumps(other))
    edit_json(folder / "config.json", configuration_files=["config.4.0.0.json"])
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("tokenizer_class", None)
    path.write_text(json.dumps(settings))


ATTACKS = [
    name_in_tokenizer_config,
    name_in_tokenizer_class,
    name_in_config,
    name_in_a_tokenizers_part_of_config,
    name_in_another_config,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.__name__ for attack in ATTACKS])
def test_code_of_a_checkpoint_runs_when_a_line_consents(
    attack: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "model")
    without_tokenizer_json(folder)
    mark = own_code(folder)
    attack(folder)
    ran = embed(folder)
    assert not mark.exists()
    if ran.returncode == 0:
        assert len(ran.stdout.splitlines()) == len(LINES)
        assert f"{len(LINES)} texts" in ran.stderr
    else:
        assert ran.returncode == 1 and ran.stdout == ""
        assert ran.stderr.startswith("error: ") and "Traceback" not in ran.stderr
        assert "never runs such code" in ran.stderr or "tokenizer_class" in ran.stderr


def test_code_beside_a_tokenizer_json(tmp_path: Path) -> None:
    """Nothing asks for it, so the texts run."""
    folder = save_checkpoint(tmp_path / "model")
    mark = own_code(folder)
    name_in_tokenizer_config(folder)
    name_in_a_tokenizers_part_of_config(folder)
    ran = embed(folder)
    assert ran.returncode == 0 and len(ran.stdout.splitlines()) == len(LINES)
    assert not mark.exists()


def test_code_that_modules_json_names(tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path, [Pooling(48)])
    mark = own_code(folder)
    entries = json.loads((folder / "modules.json").read_text())
    entries.append({"idx": 2, "name": "2", "path": "", "type": "own.Module"})
    (folder / "modules.json").write_text(json.dumps(entries))
    ran = embed(folder)
    assert ran.returncode == 1 and not mark.exists()
    assert "module 'own.Module' is not supported" in ran.stderr


def test_a_vocabulary_alone_gives_the_same_vectors(tmp_path: Path) -> None:
    """The conversion that keeps the checkpoint's other files from transformers changes no token."""
    folder = save_checkpoint(tmp_path / "model")
    wanted = embed(folder)
    without_tokenizer_json(folder)
    assert embed(folder).stdout == wanted.stdout != ""


@pytest.mark.feature("Checkpoints", "no code of a checkpoint runs")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model.joblib"])
def test_weights_that_unpickle_are_never_opened(name: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    mark = tmp_path / "the code ran"

    class Bomb:
        def __reduce__(self) -> tuple:
            return Path.touch, (mark,)

    (folder / "model.safetensors").unlink()
    torch.save({"a": Bomb()}, folder / name)
    ran = embed(folder)
    assert ran.returncode == 1 and not mark.exists()
    assert "no model.safetensors" in ran.stderr or "are refused" in ran.stderr


def test_a_dense_layer_in_a_pickle_runs_no_code(tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path / "model", [Pooling(48), Dense(48, 8)])
    mark = tmp_path / "the code ran"

    class Bomb:
        def __reduce__(self) -> tuple:
            return Path.touch, (mark,)

    (folder / "2_Dense" / "model.safetensors").unlink()
    torch.save({"linear.weight": Bomb()}, folder / "2_Dense" / "pytorch_model.bin")
    ran = embed(folder)
    assert ran.returncode == 1 and not mark.exists()
    assert "cannot be read as plain tensors" in ran.stderr


@pytest.mark.parametrize("name", ["sparse_linear.pt", "colbert_linear.pt"])
def test_layers_in_a_pickle_run_no_code(name: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    mark = tmp_path / "the code ran"

    class Bomb:
        def __reduce__(self) -> tuple:
            return Path.touch, (mark,)

    torch.save({"weight": Bomb(), "bias": torch.zeros(1)}, folder / name)
    ran = embed(folder)
    assert ran.returncode == 1 and not mark.exists()
    assert "cannot be read as plain tensors" in ran.stderr


def calls(*names: str, folders: Sequence[str] = ("bytetx",)) -> list[tuple[str, ast.Call]]:
    """(place, call) of every call in these folders of a function or method with such a name."""
    found = []
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", None))
                if name in names:
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno}", node))
    return found


def test_every_call_that_could_run_code_forbids_it() -> None:
    """Where options travel in a dict, the dict is written in the lines before the call."""
    names = ("from_pretrained", "SentenceTransformer", "CrossEncoder")
    found = calls(*names, folders=("bytetx", "benchmarks"))
    assert len(found) >= 5
    for place, call in found:
        path, line = place.split(":")
        lines = (ROOT / path).read_text().splitlines()[int(line) - 6 : call.end_lineno]
        says = "\n".join(lines).replace('"trust_remote_code": False', "trust_remote_code=False")
        assert "trust_remote_code=False" in says, place


def test_nothing_unpickles_or_asks() -> None:
    """bytetx.executor.control pickles what ranks of one group tell one another, and no file.

    One call of torch.load reads plain tensors alone.
    """
    assert calls("input") == []
    functions = {
        place: ast.unparse(call.func) for place, call in calls("load", "loads", "Unpickler")
    }
    loads = [(p, ast.unparse(c)) for p, c in calls("load") if functions[p] == "torch.load"]
    assert [place.split(":")[0] for place, _ in loads] == ["bytetx/checkpoint/pickled.py"]
    assert all("weights_only=True" in call for _, call in loads)
    plain = {place for place, _ in loads}
    unpickling = [
        place
        for place, name in functions.items()
        if name.startswith("torch.") and place not in plain
    ]
    unpickling += [place for place, name in functions.items() if "pickle" in name.lower()]
    assert all(place.startswith("bytetx/executor/control.py") for place in unpickling)
    for _, call in calls("load"):
        assert not any(keyword.arg == "allow_pickle" for keyword in call.keywords)
    sources = "".join(path.read_text() for path in (ROOT / "bytetx").rglob("*.py"))
    for name in ("joblib", "dill", "cloudpickle", "shelve"):
        assert f"import {name}" not in sources
