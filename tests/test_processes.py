"""Models in several processes: forked children never hang, and pickles load the model anew."""

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from tiny import one_thread, save  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.errors import ForkError, InputError
from bytetx.runtime import forking

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ["a text", "another text, which is longer", "x"]
WORKING = (
    "embed",
    "classify",
    "generate",
    "load",
    "grandchild",
    "threads",
    "other thread",
    "async engine of the child",
    "closes the parent's engine",
    "unused async model",
    "after the stream",
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("encoder"), head="ForSequenceClassification")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_decoder("llama"), tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module", params=["", "true"], ids=["plain", "TOKENIZERS_PARALLELISM"])
def children(request: pytest.FixtureRequest, encoder: Path, decoder: Path) -> dict[str, str]:
    """Return what became of each child that forked.py forked."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    environment.pop("TOKENIZERS_PARALLELISM", None)
    if request.param:
        environment["TOKENIZERS_PARALLELISM"] = request.param
    command = [sys.executable, str(ROOT / "tests" / "forked.py"), str(encoder), str(decoder)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert "computes with one thread" in ran.stderr
    return json.loads(ran.stdout)


def test_a_child_forked_after_an_embed_hung(children: dict[str, str]) -> None:
    assert {name: children[name] for name in WORKING} == dict.fromkeys(WORKING, "done")


def test_what_lives_in_the_parents_threads_is_an_error_in_a_child(children: dict[str, str]) -> None:
    assert children["async engine of the parent"].startswith("ForkError: the engine's thread runs")
    assert children["async model of the parent"].startswith("ForkError: an AsyncModel that was")
    assert children["unfinished stream"].startswith("ForkError: a stream of results belongs to")
    for name in ("beside an unfinished stream", "while another thread computes"):
        assert children[name].startswith("ForkError: this process was forked while bytetx was"), (
            name
        )
        assert "spawn" in children[name]
    assert set(children) - set(WORKING) == {
        "async engine of the parent",
        "async model of the parent",
        "unfinished stream",
        "beside an unfinished stream",
        "while another thread computes",
    }


@pytest.mark.feature("Python", "models in other processes")
def test_a_model_works_in_spawned_processes(encoder: Path, decoder: Path) -> None:
    model, gpt = bytetx.load(encoder, token_budget=64), bytetx.load(decoder)
    params = bytetx.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        vectors = pool.submit(model.embed, TEXTS)
        labels = pool.submit(model.classify, TEXTS)
        answers = pool.submit(gpt.generate, [[3, 4], [5]], params)
        failing = pool.submit(model.embed, ["a " * 5000])
        np.testing.assert_allclose(vectors.result().vectors, model.embed(TEXTS).vectors, atol=1e-6)
        assert [row[0].label for row in labels.result()] == [
            row[0].label for row in model.classify(TEXTS)
        ]
        assert [answer.token_ids for answer in answers.result()] == [
            answer.token_ids for answer in gpt.generate([[3, 4], [5]], params)
        ]
        with pytest.raises(InputError, match=r"texts\[0\] has more than"):
            failing.result()


def test_a_pickled_model_keeps_its_options(
    encoder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(encoder.parent)
    options = {"dtype": "bf16", "token_budget": 77, "cuda_graphs": False}
    packed = pickle.dumps(bytetx.load(encoder.name, **options))
    assert len(packed) < 1000
    monkeypatch.chdir(tmp_path)
    copy = pickle.loads(packed)
    assert (copy.checkpoint.dtype, copy.token_budget) == (torch.bfloat16, 77)
    assert copy.cuda_graphs is False and copy.embed(TEXTS).shape[0] == 3


def test_what_cannot_be_pickled_says_so(encoder: Path, decoder: Path) -> None:
    model = bytetx.load(encoder)
    model.close()
    with pytest.raises(pickle.PicklingError, match="closed model"):
        pickle.dumps(model)
    with pytest.raises(pickle.PicklingError, match="an engine cannot be pickled"):
        pickle.dumps(bytetx.load(decoder).engine())
    with (
        bytetx.load(encoder, tp=2, device="cpu") as shared,
        pytest.raises(pickle.PicklingError, match="loaded with tp"),
    ):
        pickle.dumps(shared)


def test_a_forked_child_ended_the_ranks_of_its_parents_model(encoder: Path) -> None:
    with bytetx.load(encoder, tp=2, device="cpu") as shared:
        before = shared.embed(TEXTS).vectors
        child = os.fork()
        if child == 0:
            try:
                shared.embed(TEXTS)
            except ForkError:
                shared.close()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        np.testing.assert_array_equal(shared.embed(TEXTS).vectors, before)


def test_cuda_in_a_forked_child_is_an_error_and_not_the_cpu(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    for device in ("auto", "cuda"):
        with pytest.raises(ForkError, match=r"uses CUDA.*spawn"):
            bytetx.load(encoder, device=device)
    assert bytetx.load(encoder, device="cpu").embed(TEXTS).shape[0] == 3
    monkeypatch.setattr(forking._PROCESS, "is_forked", True)
    with pytest.raises(ForkError, match="uses CUDA"), forking.computing(torch.device("cuda")):
        pass
