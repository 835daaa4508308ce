"""Models on grids of processes: every task gives the answers of one process."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import SENTENCES, save_checkpoint
from tiny import one_thread, random_ids, save, tiny_model  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import tiny_decoder

from bytetx import Model, SamplingParams, load, plan
from bytetx.cli.commands import main
from bytetx.errors import InputError, OptionError
from bytetx.executor import load as executor_load
from bytetx.executor import messages
from bytetx.executor.messages import Join, decode, encode
from bytetx.nn.loading import load_spec
from bytetx.parallel.grid import Grid

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
# Processes take seconds to start: one grid with every axis that generates, one of each family.
# tests/grids.py runs them all.
PROMPTS = [5, 13, 20, 2, 30, 1, 1]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_decoder("llama", **SIZES), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def shared(llama: Path) -> Iterator[Model]:
    with load(llama, device="cpu", grid="data2.z2") as model:
        yield model


def test_generation_and_scores(llama: Path, shared: Model) -> None:
    local, prompts = load(llama, device="cpu"), random_ids(PROMPTS)
    for options in ({}, {"kv_cache_tokens": 160}):  # the second one preempts
        found, wanted = (m.generate(prompts, GREEDY, **options) for m in (shared, local))
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    for ours, theirs in zip(shared.score(prompts), local.score(prompts), strict=True):
        assert abs(ours.log_likelihood - theirs.log_likelihood) < 1e-3


def test_prompts_with_equal_beginnings(llama: Path, shared: Model) -> None:
    """No slot reads a page that another one wrote."""
    same = random_ids([40])[0]
    prompts = [[*same, i] for i in range(6)] + [same[:17]]
    local = load(llama, device="cpu")
    for _ in range(2):
        found, wanted = (m.generate(prompts, GREEDY) for m in (shared, local))
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]


def test_batches_that_no_message_holds_are_broadcast(
    llama: Path, shared: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, prompts = load(llama, device="cpu"), random_ids(PROMPTS)
    begun = shared.checkpoint.executor.group.collectives.num_begun
    shared.score(prompts)
    assert shared.checkpoint.executor.group.collectives.num_begun == begun
    monkeypatch.setattr(messages, "_MAX_NUMBERS_BYTES", 0)
    for ours, theirs in zip(shared.score(prompts), local.score(prompts), strict=True):
        assert abs(ours.log_likelihood - theirs.log_likelihood) < 1e-3
    assert shared.checkpoint.executor.group.collectives.num_begun > begun


def test_a_model_of_several_ranks_is_not_pickled(shared: Model) -> None:
    import pickle

    with pytest.raises(pickle.PicklingError, match="its ranks belong to this process"):
        pickle.dumps(shared)


def test_embeddings_by_the_command_line(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "bert", **SIZES)
    texts = [text for text in SENTENCES if 0 < len(text) < 60]
    source, output = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    source.write_text("".join(f"{text}\n" for text in texts))
    arguments = ["embed", str(source), "-m", str(folder), "-o", str(output), "--device", "cpu"]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--grid", "z2"])
    assert not end.value.code
    assert np.allclose(np.load(output), load(folder, device="cpu").embed(texts), atol=2e-4)


def test_what_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="leave out tp"):
        load(llama, device="cpu", grid="data2", tp=2)
    with pytest.raises(OptionError, match="data2.z2"):
        load(llama, device="cpu", grid="w2")
    with pytest.raises(InputError, match="must divide the hidden size"):
        load(llama, device="cpu", grid="x3")
    deberta = save(tiny_model("deberta-v2", **SIZES), tmp_path)
    with pytest.raises(InputError, match="use data, z or y"):
        load(deberta, device="cpu", grid="x2")


def test_a_grid_in_a_message() -> None:
    join = Join("cpu", 0, None, Grid(data=2, z=3))
    assert decode(encode(join)) == join
    damaged = encode(join).replace(b"data2", b"dat2x")
    with pytest.raises(ValueError, match="no message"):
        decode(damaged)


def test_a_grid_of_one_is_one_process(llama: Path) -> None:
    model = load(llama, device="cpu", grid="1")
    assert not model.checkpoint.executor.has_workers
    assert torch.equal(
        model.transformer.embeddings.word, load(llama, device="cpu").transformer.embeddings.word
    )


@pytest.mark.feature("Several devices", "the grid that the planner chooses")
def test_auto_is_the_plan_of_all_gpus(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(gpus: int, name: str) -> Grid | None:
        monkeypatch.setattr(executor_load, "resolve_device", lambda device: torch.device("cuda", 0))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return executor_load._planned_grid(llama, 1, device="auto", dtype="auto", families=None)

    assert planned(1, "NVIDIA H200") is None
    half = load_spec(llama).max_positions // 2  # texts, and as many tokens of answers
    options = {"lengths": half, "batch": 64, "output_tokens": half, "dtype": "float16"}
    assert planned(4, "NVIDIA H200") == plan(llama, gpus=4, **options).best.grid
    with pytest.raises(OptionError, match="this is NVIDIA L4"):
        planned(2, "NVIDIA L4")
    monkeypatch.undo()
    assert not load(llama, device="cpu", grid="auto").checkpoint.executor.has_workers
