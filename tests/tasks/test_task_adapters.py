"""Jina embeddings v3's adapters of tasks, chosen by each call, against merged models."""

import shutil
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from checkpoints import edit_json, save_checkpoint, texts
from jina_adapters import (
    ALPHA,
    PROMPTS,
    RANK,
    TASKS,
    add_sentence_files,
    merged_models,
    save_with_adapters,
)
from safetensors.torch import load_file, save_file
from tiny import one_thread  # noqa: F401  (a fixture)
from torch import nn

import bytetx
from bytetx.encode.step import Capture
from bytetx.errors import CheckpointError, OptionError
from bytetx.tasks.embed import EmbedOptions, embed

INPUTS = ["a", "antidisestablishmentarianism", *texts(6, max_words=3)]
TOLERANCE = 1e-5  # of vectors of unit length in fp32


def expected(model: nn.Module, folder: Path, inputs: list[str]) -> np.ndarray:
    """Mean pooling and l2 norm of each text alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    with torch.no_grad():
        for text in inputs:
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            rows.append(nn.functional.normalize(hidden.mean(0), dim=0).numpy())
    return np.stack(rows)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(with adapters, the same base model as transformers saves it)"""
    root = tmp_path_factory.mktemp("jina")
    base = save_checkpoint(root / "base", "jina_embeddings_v3")
    return save_with_adapters(root / "adapters", base), base


@pytest.fixture(scope="module")
def references(folders: tuple[Path, Path]) -> dict[str | None, np.ndarray]:
    folder, base = folders
    models = merged_models(folder, base)
    return {
        task: expected(model, base, [PROMPTS.get(task, "") + text for text in INPUTS])
        for task, model in models.items()
    }


@pytest.mark.feature("Tasks", "LoRA adapters of tasks in one checkpoint")
def test_each_task_gives_the_vectors_of_its_merged_model(folders, references) -> None:
    model = bytetx.load(folders[0])
    for task in (None, *TASKS, None, TASKS[0]):
        found = model.embed(INPUTS, task=task).vectors
        np.testing.assert_allclose(found, references[task], atol=TOLERANCE)
    differences = [np.abs(references[a] - references[b]).max() for a, b in pairwise(TASKS)]
    assert min(differences) > 1e-2  # the adapters matter
    assert not any("lora" in name for name in model.checkpoint.unused_tensors)


def test_prompts(folders, references) -> None:
    model, task = bytetx.load(folders[0]), "retrieval.query"
    prompted = [PROMPTS[task] + text for text in INPUTS]
    found = model.embed(prompted, task=task, prompt="").vectors
    np.testing.assert_allclose(found, references[task], atol=TOLERANCE)
    named = model.embed(INPUTS, task="separation", prompt_name=task).vectors
    np.testing.assert_allclose(named, model.embed(prompted, task="separation").vectors, atol=1e-6)


def test_prompts_of_config_json_serve_where_no_others_are(folders, references, tmp_path) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "plain")
    (folder / "config_sentence_transformers.json").unlink()
    found = bytetx.load(folder).embed(INPUTS, task="retrieval.passage").vectors
    np.testing.assert_allclose(found, references["retrieval.passage"], atol=TOLERANCE)


def test_chunks_and_spans_of_a_task(folders, references) -> None:
    model, task = bytetx.load(folders[0]), "text-matching"
    chunks = model.embed_chunks(INPUTS, task=task)
    np.testing.assert_allclose(chunks.vectors, references[task], atol=TOLERANCE)
    whole = [text for text in INPUTS if text]
    spans = [[(0, len(text))] for text in whole]
    own, other = (model.embed_spans(whole, spans, task=name).vectors for name in (task, None))
    assert np.abs(own - other).max() > 1e-2


def test_tasks_share_the_word_table_and_are_made_once(folders) -> None:
    model = bytetx.load(folders[0])
    tasks = model.checkpoint.tasks
    assert tasks.names == tuple(TASKS)
    assert not tasks._made
    model.embed(INPUTS, task="separation")
    first = tasks.transformer("separation")
    model.embed(INPUTS, task="separation")
    assert tasks.transformer("separation") is first
    assert list(tasks._made) == ["separation"]
    assert first.embeddings.word is model.transformer.embeddings.word


def test_a_module_in_the_models_folder_reads_no_settings(folders, caplog) -> None:
    bytetx.load(folders[0], device="cpu")
    assert "does not know" not in caplog.text


def test_graphs_are_captured_for_each_task(folders) -> None:
    model = bytetx.load(folders[0])
    context = model.context
    captures = [embed(context, [], EmbedOptions(task=name)).task.capture for name in (None, *TASKS)]
    assert all(isinstance(capture, Capture) for capture in captures)
    assert len({capture.key for capture in captures}) == len(captures)
    assert captures[1] == embed(context, [], EmbedOptions(task=TASKS[0])).task.capture


def test_threads_with_different_tasks_get_their_own_vectors(folders, references) -> None:
    model, wrong = bytetx.load(folders[0]), []
    start = threading.Barrier(4)

    def run(task: str | None) -> None:
        start.wait()
        for _ in range(5):
            found = model.embed(INPUTS, task=task).vectors
            if np.abs(found - references[task]).max() > TOLERANCE:
                wrong.append(task)

    threads = [threading.Thread(target=run, args=(t,)) for t in (None, *TASKS[:3])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_bf16_rounds_merged_weights_once(folders, references) -> None:
    model = bytetx.load(folders[0], dtype="bfloat16")
    found = model.embed(INPUTS, task="classification").vectors
    cosines = (found * references["classification"]).sum(1)
    assert cosines.min() > 0.999


def test_wrong_names_list_the_tasks(folders, tmp_path) -> None:
    model = bytetx.load(folders[0])
    for name in ("query", "retrieval_query", "", 3):
        with pytest.raises(OptionError, match=r"'retrieval\.query', 'retrieval\.passage'.*, got"):
            model.embed(INPUTS, task=name)
    plain = bytetx.load(save_checkpoint(tmp_path / "plain"))
    with pytest.raises(OptionError, match=r"'query' or 'document'.*no adapters.*'separation'"):
        plain.embed(INPUTS, task="separation")
    np.testing.assert_array_equal(
        plain.embed(INPUTS, task="query").vectors, plain.embed(INPUTS).vectors
    )


def drop_factor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["roberta.encoder.layers.0.mlp.fc1.parametrizations.weight.0.lora_B"]
    save_file(tensors, path)


DAMAGES = {
    "no such tensor": drop_factor,
    r"imply .* of shape \(5, \d+, 3\), got \(5, \d+, 4\)": lambda folder: edit_json(
        folder / "config.json", lora_rank=3
    ),
    "of 2 tasks": lambda folder: edit_json(folder / "config.json", lora_adaptations=["a", "b"]),
    "each once": lambda folder: edit_json(folder / "config.json", lora_adaptations=["a"] * 5),
    "lora_rank": lambda folder: edit_json(folder / "config.json", lora_rank="four"),
}


@pytest.mark.parametrize("text", DAMAGES)
def test_damaged_adapters(text: str, folders, tmp_path) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "damaged")
    DAMAGES[text](folder)
    with pytest.raises(CheckpointError, match=text):
        bytetx.load(folder)


def test_keys_that_are_null_count_as_absent(folders, tmp_path) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "nothing")
    edit_json(folder / "config.json", lora_rank=None, lora_alpha=1, task_instructions=None)
    wanted = bytetx.load(folder).embed(INPUTS, task="separation").vectors
    edit_json(folder / "config.json", lora_alpha=None)
    np.testing.assert_array_equal(
        bytetx.load(folder).embed(INPUTS, task="separation").vectors, wanted
    )


def test_adapters_in_subfolders(tmp_path: Path) -> None:
    """The layout of jina-embeddings-v3-hf: transformers' class, and a folder of peft's for each."""
    base = save_checkpoint(tmp_path / "base", "jina_embeddings_v3")
    add_sentence_files(base, transformer="sentence_transformers.models.Transformer")
    targets = ["q_proj", "v_proj", "o_proj", "fc1", "fc2", "word_embeddings"]
    wanted = {}
    for task in ("retrieval.query", "separation"):
        torch.manual_seed(len(task))
        model = transformers.JinaEmbeddingsV3Model.from_pretrained(base)
        config = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=targets, init_lora_weights=False
        )
        adapted = peft.get_peft_model(model, config)
        adapted.save_pretrained(base / task.replace(".", "_"))
        inputs = [PROMPTS[task] + text for text in INPUTS]
        wanted[task] = expected(adapted.merge_and_unload().eval(), base, inputs)
    model = bytetx.load(base)
    assert model.checkpoint.tasks.names == tuple(wanted)
    for task, vectors in wanted.items():
        np.testing.assert_allclose(model.embed(INPUTS, task=task).vectors, vectors, atol=TOLERANCE)
    stock = transformers.JinaEmbeddingsV3Model.from_pretrained(base).eval()
    plain = expected(stock, base, INPUTS)
    np.testing.assert_allclose(model.embed(INPUTS).vectors, plain, atol=TOLERANCE)
    assert np.abs(wanted["separation"] - plain).max() > 1e-2


def test_an_adapter_alone_merges_into_stacked_weights(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base", "jina_embeddings_v3")
    model = transformers.JinaEmbeddingsV3Model.from_pretrained(base)
    config = peft.LoraConfig(r=2, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    edit_json(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(base))
    wanted = expected(adapted.merge_and_unload().eval(), base, INPUTS)
    found = bytetx.load(tmp_path / "adapter").embed(INPUTS, normalize=True).vectors
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
