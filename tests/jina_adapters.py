"""Small random checkpoints of Jina embeddings v3 with adapters of tasks, in the hub's layout."""

import copy
import json
import shutil
from pathlib import Path

import torch
import transformers
from checkpoints import write_config
from safetensors.torch import load_file, save_file
from torch import nn

TASKS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]
PROMPTS = {
    "retrieval.query": "query: ",
    "retrieval.passage": "passage: ",
    "separation": "",
    "classification": "",
    "text-matching": "",
}
RANK, ALPHA = 4, 6
_POOLING = {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 48}


def save_with_adapters(folder: Path, base: Path, *, prefix: str = "roberta.") -> Path:
    """A copy of a base model in the layout of jinaai/jina-embeddings-v3: factors of all tasks
    beside each weight, under XLM-RoBERTa's model_type and the names of its own code."""
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    saved, generator = {}, torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        stem, _, part = f"{prefix}{name}".rpartition(".")
        if tensor.dim() != 2:
            saved[f"{stem}.{part}"] = tensor
            continue
        wide, narrow = (len(TASKS), tensor.shape[0], RANK), (len(TASKS), RANK, tensor.shape[1])
        rows, columns = (torch.randn(s, generator=generator) * 0.1 for s in (wide, narrow))
        a, b = (rows, columns) if "embeddings" in stem else (columns, rows)
        saved[f"{stem}.parametrizations.weight.original"] = tensor
        saved[f"{stem}.parametrizations.weight.0.lora_A"] = a
        saved[f"{stem}.parametrizations.weight.0.lora_B"] = b
    save_file(saved, folder / "model.safetensors")
    given = json.loads((folder / "config.json").read_text())
    given.pop("rope_parameters")
    code = "jinaai/xlm-roberta-flash-implementation--"
    write_config(
        folder,
        given
        | {
            "model_type": "xlm-roberta",
            "architectures": ["XLMRobertaModel"],
            "auto_map": {
                "AutoConfig": f"{code}configuration_xlm_roberta.XLMRobertaFlashConfig",
                "AutoModel": f"{code}modeling_lora.XLMRobertaLoRA",
                "AutoModelForMaskedLM": f"{code}modeling_xlm_roberta.XLMRobertaForMaskedLM",
            },
            "emb_pooler": None,
            "load_trained_adapters": True,
            "lora_adaptations": TASKS,
            "lora_alpha": ALPHA,
            "lora_rank": RANK,
            "position_embedding_type": "rotary",
            "rotary_emb_base": 20000.0,
            "task_instructions": PROMPTS,
        },
    )
    add_sentence_files(folder, transformer="custom_st.Transformer")
    return folder


def add_sentence_files(folder: Path, *, transformer: str) -> None:
    """The files of sentence-transformers, whose first module is the hub's own code there."""
    modules = [
        {"idx": 0, "name": "transformer", "path": "", "type": transformer},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
        {"idx": 2, "name": "2", "path": "", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(_POOLING))
    settings = {"prompts": PROMPTS}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def merged_models(folder: Path, base: Path) -> dict[str | None, nn.Module]:
    """transformers' class with each task's adapter merged in float64, and None's without any.

    base: where the model without adapters was saved.
    """
    model = transformers.JinaEmbeddingsV3Model.from_pretrained(base).eval()
    saved = load_file(folder / "model.safetensors")
    models: dict[str | None, nn.Module] = {None: model}
    for index, task in enumerate(TASKS):
        merged = copy.deepcopy(model)
        for name, parameter in merged.named_parameters():
            stem, _, part = name.rpartition(".")
            rows = None
            for i, key in enumerate(("q_proj", "k_proj", "v_proj")):
                if key in stem:
                    rows = slice(i * 48, (i + 1) * 48)
            factors = f"roberta.{file_stem(stem)}.parametrizations.weight.0.lora_"
            if part != "weight" or f"{factors}A" not in saved:
                continue
            a, b = (saved[f"{factors}{letter}"][index].double() for letter in "AB")
            delta = (a @ b if "embeddings" in stem else b @ a) * ALPHA / RANK
            with torch.no_grad():
                parameter.copy_(parameter.double() + (delta if rows is None else delta[rows]))
        models[task] = merged
    return models


def file_stem(stem: str) -> str:
    """The name in the files of a module of transformers' class."""
    names = {"layers.": "encoder.layers.", "self_attn.o_proj": "mixer.out_proj"}
    names |= {f"self_attn.{key}_proj": "mixer.Wqkv" for key in "qkv"}
    for old, new in names.items():
        stem = stem.replace(old, new)
    return stem
