"""Trained embedders: sentence-transformers' vectors, TEI's published ones, and people's ranking."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

import bytetx

pytestmark = pytest.mark.real

EMBEDDERS = [
    "all-mpnet-base-v2",
    "all-MiniLM-L6-v2",
    "sre-embedding-model",
    "paraphrase-MiniLM-L3-v2",
]
TEI = json.loads(Path(__file__).with_name("tei.json").read_text())
DATA = "gensim/test/test_data/"

Rank = Callable[[Callable[[list[str]], np.ndarray]], float]


@pytest.fixture(scope="module")
def human_ranks(human: zipfile.ZipFile, lee_texts: list[str]) -> dict[str, Rank]:
    """The rank correlations of an embedder's cosines with what people said of the same pairs."""
    lee = np.loadtxt(human.read(f"{DATA}similarities0-1.txt").decode().splitlines())
    rows, columns = np.triu_indices(len(lee), k=1)

    def rank_lee(embed: Callable[[list[str]], np.ndarray]) -> float:
        vectors = embed(lee_texts)
        return _spearman((vectors[rows] * vectors[columns]).sum(1), lee[rows, columns])

    return {
        "Lee": rank_lee,
        "WordSim-353": _word_pairs(human, "wordsim353.tsv"),
        "SimLex-999": _word_pairs(human, "simlex999.txt"),
    }


def _word_pairs(human: zipfile.ZipFile, name: str) -> Rank:
    lines = human.read(DATA + name).decode().splitlines()
    pairs = [line.split("\t") for line in lines if not line.startswith("#")]

    def rank(embed: Callable[[list[str]], np.ndarray]) -> float:
        words = sorted({word for pair in pairs for word in pair[:2]})
        vectors = dict(zip(words, embed(words), strict=True))
        cosines = np.array([vectors[a] @ vectors[b] for a, b, _ in pairs])
        return _spearman(cosines, np.array([float(value) for _, _, value in pairs]))

    return rank


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    return float(spearmanr(a, b).statistic)


def _unit_vectors(folder: Path, dtype: str) -> Callable[[list[str]], np.ndarray]:
    model = bytetx.load(folder, device="cpu", dtype=dtype)
    return lambda texts: model.embed(texts, normalize=True).vectors


@pytest.mark.parametrize("checkpoint", EMBEDDERS, indirect=True)
def test_vectors_are_those_of_sentence_transformers(checkpoint: Path, lee_texts: list[str]) -> None:
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(checkpoint), device="cpu").encode(
        lee_texts, normalize_embeddings=True
    )
    off = np.abs(_unit_vectors(checkpoint, "float32")(lee_texts) - theirs).max()
    print(f"{checkpoint.name}: off by {off:.2g}")
    # Numbers of unit vectors: sums of fp32 in another order. Wrong models are off by 1e-3 and more.
    assert off <= 1e-6


@pytest.mark.parametrize("checkpoint", ["tokenlearn-static-model"], indirect=True)
def test_vectors_are_those_of_model2vec(checkpoint: Path, human_ranks: dict[str, Rank]) -> None:
    """Words and whole texts have the same vectors, which rank as people do."""
    from model2vec import StaticModel

    theirs, ours = StaticModel.from_pretrained(checkpoint), _unit_vectors(checkpoint, "float32")
    for data, rank in human_ranks.items():
        print(f"{checkpoint.name}, {data}: {(found := rank(_both(ours, theirs.encode))):.4f}")
        assert found > 0.15  # vectors of 64 numbers; chance stays within 0.1


def _both(
    ours: Callable[[list[str]], np.ndarray], theirs: Callable[[list[str]], np.ndarray]
) -> Callable[[list[str]], np.ndarray]:
    """Ours, once they have been held against theirs."""

    def embed(texts: list[str]) -> np.ndarray:
        vectors = ours(texts)
        assert np.abs(vectors - theirs(texts)).max() <= 1e-6
        return vectors

    return embed


@pytest.mark.parametrize("checkpoint", EMBEDDERS, indirect=True)
def test_low_precision_ranks_as_float32_does(
    checkpoint: Path, human_ranks: dict[str, Rank], subtests: pytest.Subtests
) -> None:
    models = {dtype: _unit_vectors(checkpoint, dtype) for dtype in ("float32", "bfloat16", "int8")}
    for data, rank in human_ranks.items():
        found = {dtype: rank(embed) for dtype, embed in models.items()}
        print(
            f"{checkpoint.name}, {data}:", {name: round(value, 4) for name, value in found.items()}
        )
        with subtests.test(data):
            assert found["float32"] > 0.2  # about words these models of sentences know less
            assert abs(found["bfloat16"] - found["float32"]) <= 0.002
            assert abs(found["int8"] - found["float32"]) <= 0.006


@pytest.mark.parametrize("checkpoint", TEI["checkpoints"], indirect=True)
def test_vectors_are_those_that_tei_publishes(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["hidden_act"] = "gelu_new"  # TEI computes GELU by tanh, whatever a checkpoint asks for
    (folder / "config.json").write_text(json.dumps(config))
    modules = json.loads((folder / "modules.json").read_text())
    means = [module for module in modules if not module["type"].endswith("Normalize")]
    (folder / "modules.json").write_text(json.dumps(means))  # TEI's snapshots are not normalised
    ours = bytetx.load(folder, device="cpu", dtype="float32").embed(TEI["texts"])
    theirs = np.array(TEI["checkpoints"][checkpoint.name]["vectors"])
    off = np.abs(ours.vectors[:, : theirs.shape[1]] - theirs).max()
    print(f"{checkpoint.name}: off by {off:.2g}")
    assert off <= 2e-5  # of numbers up to 1, sums of fp32 in another order
