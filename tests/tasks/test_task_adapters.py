"""Adapters of a checkpoint's tasks, chosen by each call and each text, against merged models."""

import asyncio
import json
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
from bytetx import AsyncModel
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


@pytest.mark.feature("Tasks", "A task for each text, all in one step")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_text_has_its_own_task(dtype: str, folders, references) -> None:
    model = bytetx.load(folders[0], dtype=dtype)
    tasks = [([*TASKS, None] * 2)[number] for number in range(len(INPUTS))]
    found = model.embed(INPUTS, task=tasks)
    for row, (vector, task) in enumerate(zip(found.vectors, tasks, strict=True)):
        wanted = references[task][row]
        if dtype == "float32":
            np.testing.assert_allclose(vector, wanted, atol=TOLERANCE)
        assert vector @ wanted > 0.999
        alone = model.embed([INPUTS[row]], task=task).vectors[0]
        np.testing.assert_allclose(vector, alone, atol=1e-6 if dtype == "float32" else 2e-2)
    chunks = model.embed_chunks(INPUTS, task=tasks).vectors
    np.testing.assert_allclose(chunks, found.vectors, atol=1e-6)


def test_a_text_beside_others_of_other_tasks_has_the_same_vector(folders) -> None:
    model, text = bytetx.load(folders[0]), INPUTS[1]
    alone = model.embed([text], task="separation").vectors[0]
    for others in ([], ["classification"], [None, "retrieval.query"], TASKS):
        found = model.embed([text] * (1 + len(others)), task=["separation", *others]).vectors
        np.testing.assert_allclose(found[0], alone, atol=1e-6)


def test_spans_of_texts_with_prompts_of_other_lengths(folders) -> None:
    model, whole = bytetx.load(folders[0]), [text for text in INPUTS if text][:3]
    spans = [[(0, 1), (0, len(text))] for text in whole]
    tasks = ["retrieval.query", "separation", None]
    mixed = model.embed_spans(whole, spans, task=tasks).vectors.reshape(3, 2, -1)
    for row, task in enumerate(tasks):
        alone = model.embed_spans([whole[row]], [spans[row]], task=task).vectors
        np.testing.assert_allclose(mixed[row], alone, atol=1e-5)


def test_tasks_are_read_when_the_model_is_loaded(folders, tmp_path) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "gone")
    model = bytetx.load(folder)
    wanted = bytetx.load(folders[0]).embed(INPUTS, task="separation").vectors
    shutil.rmtree(folder)
    np.testing.assert_array_equal(model.embed(INPUTS, task="separation").vectors, wanted)
    assert tuple(model.checkpoint.tasks.adapters) == tuple(TASKS)


def test_callers_of_other_tasks_share_a_step(folders, references) -> None:
    async def run() -> None:
        async with AsyncModel(bytetx.load(folders[0])) as model:
            tasks = [None, *TASKS]
            calls = [model.embed(INPUTS, task=task) for task in tasks]
            soon = [model.embed_soon(INPUTS, task=task) for task in tasks]
            mixed = [TASKS[0], None] * (len(INPUTS) // 2)
            for found, task in zip(await asyncio.gather(*calls, *soon), tasks * 2, strict=True):
                np.testing.assert_allclose(found.vectors, references[task], atol=TOLERANCE)
            found = (await model.embed(INPUTS, task=mixed)).vectors
            wanted = [references[task][row] for row, task in enumerate(mixed)]
            np.testing.assert_allclose(found, wanted, atol=TOLERANCE)

    asyncio.run(run())


def test_the_default_task(folders, references, tmp_path) -> None:
    """config.json names it, or the arguments of sentence-transformers' first module."""
    folder = shutil.copytree(folders[0], tmp_path / "default")
    edit_json(folder / "config.json", default_task="separation")
    model = bytetx.load(folder)
    np.testing.assert_allclose(
        model.embed(INPUTS).vectors, references["separation"], atol=TOLERANCE
    )
    settings = {"max_seq_length": 64, "model_args": {"default_task": "retrieval.query"}}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    found = bytetx.load(folder).embed(INPUTS).vectors
    np.testing.assert_allclose(found, references["retrieval.query"], atol=TOLERANCE)
    settings["model_args"]["default_task"] = "summary"
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"default_task must be one of 'retrieval\.query'"):
        bytetx.load(folder)


def test_int8_weights_keep_the_changes_in_floats(folders, references) -> None:
    model = bytetx.load(folders[0], dtype="int8")
    found = model.embed(INPUTS, task=["classification"] * len(INPUTS)).vectors
    assert (found * references["classification"]).sum(1).min() > 0.99


def test_modes_that_take_no_adapters_say_so(folders) -> None:
    with pytest.raises(OptionError, match="adapter for each task"):
        bytetx.load(folders[0], batch_invariant=True)


def test_a_module_in_the_models_folder_reads_no_settings(folders, caplog) -> None:
    bytetx.load(folders[0], device="cpu")
    assert "does not know" not in caplog.text


def test_one_graph_serves_all_tasks(folders) -> None:
    context = bytetx.load(folders[0]).context
    captures = [embed(context, [], EmbedOptions(task=name)).task.capture for name in (None, *TASKS)]
    assert all(isinstance(capture, Capture) for capture in captures)
    assert len(set(captures)) == 1


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
    listed = r"'retrieval\.query', 'retrieval\.passage'.*, got"
    for name in ("query", "retrieval_query", "", 3):
        with pytest.raises(OptionError, match=listed):
            model.embed(INPUTS, task=name)
    with pytest.raises(OptionError, match=listed):
        model.embed(INPUTS, task=["query"] * len(INPUTS))
    with pytest.raises(OptionError, match="one for each of 8 inputs, got 7"):
        model.embed(INPUTS, task=[TASKS[0]] * 7)
    with pytest.raises(OptionError, match="task has 7 entries"):
        model.embed(iter(INPUTS), task=[TASKS[0]] * 7)
    with pytest.raises(OptionError, match="a list of names and None, got"):
        model.embed(INPUTS, task=[["query"]] * len(INPUTS))
    plain = bytetx.load(save_checkpoint(tmp_path / "plain"))
    with pytest.raises(OptionError, match=r"'query' or 'document'.*no adapters.*'separation'"):
        plain.embed(INPUTS, task="separation")
    np.testing.assert_array_equal(
        plain.embed(INPUTS, task="query").vectors, plain.embed(INPUTS).vectors
    )
    with pytest.raises(OptionError, match=r"'query' or 'document'.*no adapters.*'separation'"):
        plain.embed(INPUTS, task=["query", "separation", *["document"] * 6])


def test_queries_and_documents_in_one_call(tmp_path) -> None:
    """A checkpoint that has prompts, and no adapters."""
    folder = save_checkpoint(tmp_path / "plain")
    settings = {"prompts": {"query": "find: ", "passage": "text: "}}
    add_sentence_files(folder, transformer="sentence_transformers.models.Transformer")
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    model = bytetx.load(folder)
    tasks = ["query", "document", None, "query", "document", None, "query", "query"]
    found = model.embed(INPUTS, task=tasks).vectors
    for row, task in enumerate(tasks):
        alone = model.embed([INPUTS[row]], task=task).vectors[0]
        np.testing.assert_allclose(found[row], alone, atol=1e-6)
    query, document = model.embed(["a"] * 2, task=["query", "document"]).vectors
    assert np.abs(query - document).max() > 1e-3


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
    assert tuple(model.checkpoint.tasks.adapters) == tuple(wanted)
    for task, vectors in wanted.items():
        np.testing.assert_allclose(model.embed(INPUTS, task=task).vectors, vectors, atol=TOLERANCE)
    stock = transformers.JinaEmbeddingsV3Model.from_pretrained(base).eval()
    plain = expected(stock, base, INPUTS)
    np.testing.assert_allclose(model.embed(INPUTS).vectors, plain, atol=TOLERANCE)
    assert np.abs(wanted["separation"] - plain).max() > 1e-2
    own = base / "separation"
    with pytest.raises(OptionError, match="is a task of this checkpoint"):
        model.add_adapter("separation", own)
    with pytest.raises(CheckpointError, match="changes 'embeddings.word_embeddings.weight'"):
        model.add_adapter("own", own)
    adapted = peft.get_peft_model(
        stock, peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["k_proj"])
    )
    adapted.save_pretrained(tmp_path / "own")
    model.add_adapter("own", tmp_path / "own")
    found = model.embed(INPUTS, adapter="own", prompt="").vectors
    wanted = expected(adapted.merge_and_unload().eval(), base, INPUTS)
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    with pytest.raises(OptionError, match="exclude each other"):
        model.embed(INPUTS, adapter="own", task="separation")


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
