"""Jina embeddings v5 text: adapters of tasks on EuroBERT and on Qwen3, against peft's models."""

import json
import shutil
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from checkpoints import edit_json, save_causal, save_checkpoint, texts, write_config
from torch import nn

import bytetx
from bytetx.errors import CheckpointError, OptionError

TASKS = ["retrieval", "text-matching", "clustering", "classification"]
PROMPTS = {"query": "q: ", "document": "d: "}
CLASSES = {"eurobert": transformers.EuroBertModel, "qwen3": transformers.Qwen3Model}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
INPUTS = ["a", "antidisestablishmentarianism", *texts(6, max_words=3)]
TOLERANCE, POSITIONS = 1e-4, 128


def save_v5(folder: Path, trunk: str) -> dict[str, nn.Module]:
    """A checkpoint in the layout of jinaai/jina-embeddings-v5-text-nano and -small; returns peft's
    models by task."""
    if trunk == "eurobert":
        save_checkpoint(folder, trunk, max_position_embeddings=POSITIONS)
    else:
        save_causal(folder, trunk, "Model", max_position_embeddings=POSITIONS)
    edit_json(folder / "tokenizer_config.json", model_max_length=POSITIONS)
    models = {}
    for seed, task in enumerate(TASKS):
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=TARGETS,
            init_lora_weights=False,
            task_type="FEATURE_EXTRACTION",
        )
        model = peft.get_peft_model(CLASSES[trunk].from_pretrained(folder), config)
        model.save_pretrained(folder / "adapters" / task)
        models[task] = model.eval()
    given = json.loads((folder / "config.json").read_text())
    given["rope_theta"] = given.pop("rope_parameters")["rope_theta"]
    code = {
        "AutoConfig": "configuration_jina_embeddings_v5.JinaEmbeddingsV5Config",
        "AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model",
    }
    own = {"architectures": ["JinaEmbeddingsV5Model"], "model_type": "jina_embeddings_v5"}
    write_config(folder, given | own | {"auto_map": code, "task_names": TASKS})
    module = {"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"}
    module["kwargs"] = ["task", "truncate_dim"]
    (folder / "modules.json").write_text(json.dumps([module]))
    settings = {"prompts": PROMPTS, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return models


def expected(model: nn.Module, folder: Path, inputs: list[str]) -> np.ndarray:
    """The last token's unit vector of each text alone."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    rows = []
    with torch.no_grad():
        for text in inputs:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            hidden = model(input_ids=ids).last_hidden_state[0, -1]
            rows.append(nn.functional.normalize(hidden, dim=0).numpy())
    return np.stack(rows)


@pytest.fixture(scope="module", params=list(CLASSES))
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, np.ndarray]]:
    """(a checkpoint, the vectors of each task, with the prompts of documents)"""
    folder = tmp_path_factory.mktemp("v5") / request.param
    models = save_v5(folder, request.param)
    prompted = [PROMPTS["document"] + text for text in INPUTS]
    wanted = {task: expected(model, folder, prompted) for task, model in models.items()}
    queries = [PROMPTS["query"] + text for text in INPUTS]
    wanted["retrieval.query"] = expected(models["retrieval"], folder, queries)
    wanted["retrieval.passage"] = wanted["retrieval"]
    return folder, wanted


@pytest.mark.feature("Checkpoints", "Jina embeddings v5 text, with an adapter for each task")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_of_each_task(dtype: str, saved: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, wanted = saved
    model = bytetx.load(folder, dtype=dtype)
    assert list(model.checkpoint.tasks.adapters) == [
        *("retrieval", "retrieval.query", "retrieval.passage"),
        *("text-matching", "clustering", "classification"),
    ]
    for task, vectors in wanted.items():
        found = model.embed(INPUTS, task=task).vectors
        if dtype == "float32":
            np.testing.assert_allclose(found, vectors, atol=TOLERANCE)
        assert (found * vectors).sum(1).min() > 0.99
    named = model.embed(INPUTS, task="retrieval", prompt_name="query").vectors
    np.testing.assert_array_equal(named, model.embed(INPUTS, task="retrieval.query").vectors)
    assert np.abs(wanted["retrieval"] - wanted["clustering"]).max() > 1e-2
    assert np.abs(wanted["retrieval"] - wanted["retrieval.query"]).max() > 1e-2


def test_tasks_of_single_texts_share_a_step(saved: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, wanted = saved
    model, names = bytetx.load(folder), list(wanted)
    tasks = [names[row % len(names)] for row in range(len(INPUTS))]
    found = model.embed(INPUTS, task=tasks).vectors
    right = np.stack([wanted[task][row] for row, task in enumerate(tasks)])
    np.testing.assert_allclose(found, right, atol=TOLERANCE)
    # Prefixes that texts have in common, and that were kept, are those of one task.
    long = ["a fox " * 16 + text for text in INPUTS]
    for _ in range(3):
        for task in names:
            both = model.embed(long, task=task).vectors, model.embed(long[:1], task=task).vectors
            np.testing.assert_allclose(both[0][:1], both[1], atol=1e-5)
    mixed = model.embed(long, task=tasks).vectors
    for row, task in enumerate(tasks):
        alone = bytetx.load(folder).embed([long[row]], task=task).vectors[0]
        np.testing.assert_allclose(mixed[row], alone, atol=1e-5)


def test_hidden_states_of_each_task(saved: tuple[Path, dict[str, np.ndarray]]) -> None:
    """Those whose last row, of length 1, is the text's vector."""
    folder, wanted = saved
    model, names = bytetx.load(folder), list(wanted)
    tasks = [names[row % len(names)] for row in range(len(INPUTS))]

    def last(given: object, **options: object) -> np.ndarray:
        rows = np.stack([states[-1, -1] for states in model.hidden_states(given, **options)])
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    for task in names:
        np.testing.assert_allclose(last(INPUTS, task=task), wanted[task], atol=TOLERANCE)
    right = np.stack([wanted[task][row] for row, task in enumerate(tasks)])
    np.testing.assert_allclose(last(INPUTS, task=tasks), right, atol=TOLERANCE)
    for wrong in (None, "separation"):
        with pytest.raises(OptionError, match="task must be one of 'retrieval'"):
            model.hidden_states(INPUTS, task=wrong)


def test_texts_beyond_the_models_positions(saved: tuple[Path, dict[str, np.ndarray]]) -> None:
    model = bytetx.load(saved[0])
    with pytest.raises(bytetx.TooLongError):
        model.embed(["a " * 400], task="clustering")
    cut = model.embed(["a " * 400], task="clustering", truncate=True).vectors
    assert np.isfinite(cut).all()
    chunks = model.embed(["a " * 400], task="clustering", overflow="chunk").vectors
    assert np.isfinite(chunks).all()


def test_a_task_must_be_named(saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    folder, wanted = saved
    model = bytetx.load(folder)
    listed = "task must be one of 'retrieval', 'retrieval.query'.*'classification', got "
    for task in (None, "separation", ["retrieval", None]):
        with pytest.raises(OptionError, match=listed):
            model.embed(INPUTS[:2], task=task)
    own = shutil.copytree(folder, tmp_path / "default")
    (own / "sentence_bert_config.json").write_text('{"model_args": {"default_task": "clustering"}}')
    found = bytetx.load(own).embed(INPUTS).vectors
    np.testing.assert_allclose(found, wanted["clustering"], atol=TOLERANCE)


def test_damaged_checkpoints(saved: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "damaged")
    edit_json(folder / "config.json", task_names=[*TASKS, "code"])
    with pytest.raises(CheckpointError, match="task_names has 'code'.*adapters of 'retrieval'"):
        bytetx.load(folder)
    edit_json(folder / "config.json", task_names=TASKS)
    edit_json(folder / "adapters" / "clustering" / "adapter_config.json", r=5)
    with pytest.raises(CheckpointError, match="clustering"):
        bytetx.load(folder)
    shutil.rmtree(folder / "adapters" / "clustering")
    with pytest.raises(CheckpointError, match="'adapters/clustering' with adapter_config.json"):
        bytetx.load(folder)
