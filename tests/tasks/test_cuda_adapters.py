"""Adapters of single rows on a GPU: the CPU's results, also in graphs that serve other adapters."""

from pathlib import Path

import numpy as np
import pytest
from checkpoints import save_causal, save_checkpoint
from jina_adapters import TASKS, save_with_adapters
from lora_adapters import save_adapter
from tiny import random_ids

import bytetx
from bytetx.model import Model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_backend")]

SEQLENS = [1, 7, 30, 3, 12]
MIXED = [["a", None, "b", "a", "b"], ["b", "b", None, None, "c"], ["c", "a", "a", "b", "c"]]
GREEDY = bytetx.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def adapters_of(base: Path, folder: Path, targets: object) -> dict[str, Path]:
    """Ranks differ, and "c" changes more weights than the others."""
    configs = {"a": {"r": 3}, "b": {"r": 16}, "c": {"r": 40, "target_modules": "all-linear"}}
    for seed, (name, config) in enumerate(configs.items()):
        save_adapter(base, folder / name, seed=seed, **{"target_modules": targets, **config})
    return {name: folder / name for name in configs}


def both(base: Path, adapters: dict[str, Path], dtype: str = "float32") -> tuple[Model, Model]:
    """(on the CPU, on the GPU, with the first two adapters)"""
    first = {name: adapters[name] for name in "ab"}
    on_cpu = bytetx.load(base, device="cpu", dtype="float32", adapters=adapters)
    return on_cpu, bytetx.load(base, device="cuda", dtype=dtype, adapters=first)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_one_graph_serves_any_adapters(dtype: str, tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base")
    adapters = adapters_of(base, tmp_path, ["query", "value"])
    on_cpu, on_gpu = both(base, adapters, dtype)
    ids, close = random_ids(SEQLENS), {"rtol": 0, "atol": 1e-4 if dtype == "float32" else 2e-2}
    for each in (MIXED[0], MIXED[0][::-1], ["a"] * 5, ["b", None, None, None, None]) * 2:
        np.testing.assert_allclose(
            on_gpu.embed(ids, adapter=each), on_cpu.embed(ids, adapter=each), **close
        )
    on_gpu.add_adapter("c", adapters["c"])  # its rank is larger: tables grow
    for each in MIXED * 2:
        ours = on_gpu.embed(ids, adapter=each)
        np.testing.assert_allclose(ours, on_cpu.embed(ids, adapter=each), **close)
    plain = np.asarray(on_gpu.embed(ids))
    np.testing.assert_allclose(plain, on_cpu.embed(ids), **close)
    on_gpu.remove_adapter("b")
    on_gpu.add_adapter("d", adapters["b"])  # where b was
    ours = on_gpu.embed(ids, adapter=["d", "d", None, None, "c"])
    np.testing.assert_allclose(ours, on_cpu.embed(ids, adapter=MIXED[1]), **close)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tasks_of_a_checkpoint_change_words_too(dtype: str, tmp_path: Path) -> None:
    """One graph for texts of any tasks, whose first change is that of the word table."""
    base = save_checkpoint(tmp_path / "base", "jina_embeddings_v3")
    folder = save_with_adapters(tmp_path / "jina", base)
    on_cpu = bytetx.load(folder, device="cpu", dtype="float32")
    on_gpu = bytetx.load(folder, device="cuda", dtype=dtype)
    ids, close = random_ids(SEQLENS), {"rtol": 0, "atol": 1e-4 if dtype == "float32" else 2e-2}
    each = [*TASKS[:3], None, TASKS[4]]
    for tasks in (each, each[::-1], [TASKS[3]] * 5, [None, *TASKS[1:]], [None] * 5) * 2:
        ours = on_gpu.embed(ids, task=tasks)
        np.testing.assert_allclose(ours, on_cpu.embed(ids, task=tasks), **close)


def test_long_texts_and_many_of_them(tmp_path: Path) -> None:
    """Tiles of many rows, of several texts each, and steps of several sizes."""
    base = save_checkpoint(tmp_path / "base")
    on_cpu, on_gpu = both(base, adapters_of(base, tmp_path, ["query", "value", "dense"]))
    on_gpu.add_adapter("c", tmp_path / "c")
    ids = random_ids([(37 * i) % 40 + 1 for i in range(150)])
    each = [[None, "a", "b", "c"][i * i % 4] for i in range(150)]
    for _ in range(3):
        ours = on_gpu.embed(ids, adapter=each)
        np.testing.assert_allclose(ours, on_cpu.embed(ids, adapter=each), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_generation_gives_the_tokens_of_the_cpu(family: str, tmp_path: Path) -> None:
    base = save_causal(tmp_path / "base", family)
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "v_proj"]
    adapters = adapters_of(base, tmp_path, targets)
    on_cpu, on_gpu = both(base, adapters)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 90, size).tolist() for size in (1, 20, 3, 8, 5)]

    def tokens(model: Model, each: object) -> list[list[int]]:
        return [list(one.token_ids) for one in model.generate(prompts, GREEDY, adapter=each)]

    for each in (MIXED[0], ["b", "a", None, "b", None], "a", None):
        assert tokens(on_gpu, each) == tokens(on_cpu, each)
    on_gpu.add_adapter("c", adapters["c"])
    for each in MIXED[1:]:
        assert tokens(on_gpu, each) == tokens(on_cpu, each)
    alone = [list(on_gpu.generate(prompts[:1], GREEDY, adapter="c")[0].token_ids)]
    assert alone == tokens(on_cpu, "c")[:1]
