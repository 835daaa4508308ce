"""A small random GLiNER checkpoint, written without the gliner package."""

import json
from pathlib import Path

import tokenizers
import torch
from checkpoints import make_tokenizer
from safetensors.torch import save_file
from tiny import tiny_model

_SIZE = 48  # the encoder's rows have as many features


def save_extractor(folder: Path, *, relations: bool = False) -> Path:
    """BERT with spans of at most 3 words, without an LSTM.  relations: of each pair of them."""
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer("wordpiece", max_tokens=64)
    marks = [
        tokenizers.AddedToken(mark, special=True) for mark in ("<<ENT>>", "<<REL>>", "<<SEP>>")
    ]
    tokenizer.add_tokens(marks)
    tokenizer.save_pretrained(folder)
    encoder = tiny_model("bert", vocab_size=len(tokenizer))
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"token_rep_layer.bert_layer.model.{name}": tensor.clone()
        for name, tensor in encoder.state_dict().items()
    }
    span = "span_rep_layer.span_rep_layer"
    parts = {f"{span}.project_start": 1, f"{span}.project_end": 1}
    parts |= {f"{span}.out_project": 2, "prompt_rep_layer": 1}
    parts |= {"pair_rep_layer": 2} if relations else {}
    for stem, width in parts.items():
        for layer, shape in (("0", (4 * _SIZE, width * _SIZE)), ("3", (_SIZE, 4 * _SIZE))):
            weight = torch.randn(shape, generator=generator)
            tensors[f"{stem}.{layer}.weight"] = weight * 0.1
            tensors[f"{stem}.{layer}.bias"] = torch.randn(shape[0], generator=generator) * 0.1
    save_file(tensors, folder / "model.safetensors")
    config = {
        "encoder_config": encoder.config.to_dict(),
        "hidden_size": _SIZE,
        "max_width": 3,
        "num_rnn_layers": 0,
        "relations_layer": "none" if relations else None,
    }
    (folder / "gliner_config.json").write_text(json.dumps(config, default=str))
    return folder


def save_schema_model(folder: Path) -> Path:
    """A GLiNER2 model: BERT with spans of at most 3 words, which counts one instance."""
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer("wordpiece", max_tokens=64)
    marks = ["SEP_STRUCT", "SEP_TEXT", "P", "C", "E", "R", "L", "EXAMPLE", "OUTPUT", "DESCRIPTION"]
    tokenizer.add_tokens([tokenizers.AddedToken(f"[{mark}]", special=True) for mark in marks])
    tokenizer.save_pretrained(folder)
    encoder = tiny_model("bert", vocab_size=len(tokenizer), max_position_embeddings=2048)
    tensors = {f"encoder.{name}": tensor.clone() for name, tensor in encoder.state_dict().items()}
    span, counts = "span_rep.span_rep_layer", "count_embed"
    shapes = {
        f"{span}.project_start.0": (4 * _SIZE, _SIZE),
        f"{span}.project_start.3": (_SIZE, 4 * _SIZE),
        f"{span}.project_end.0": (4 * _SIZE, _SIZE),
        f"{span}.project_end.3": (_SIZE, 4 * _SIZE),
        f"{span}.out_project.0": (4 * _SIZE, 2 * _SIZE),
        f"{span}.out_project.3": (_SIZE, 4 * _SIZE),
        "classifier.0": (2 * _SIZE, _SIZE),
        "classifier.2": (1, 2 * _SIZE),
        "count_pred.0": (2 * _SIZE, _SIZE),
        "count_pred.2": (20, 2 * _SIZE),
        f"{counts}.projector.0": (4 * _SIZE, 2 * _SIZE),
        f"{counts}.projector.2": (_SIZE, 4 * _SIZE),
    }
    generator = torch.Generator().manual_seed(6)
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) * 0.3
        tensors[f"{name}.bias"] = torch.zeros(shape[0])
    tensors["count_pred.2.bias"][1] = 100
    tensors[f"{counts}.pos_embedding.weight"] = torch.randn((20, _SIZE), generator=generator)
    for part in ("ih", "hh"):
        weight = torch.randn((3 * _SIZE, _SIZE), generator=generator) * 0.1
        tensors[f"{counts}.gru.weight_{part}_l0"] = weight
        tensors[f"{counts}.gru.bias_{part}_l0"] = torch.zeros(3 * _SIZE)
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "extractor", "span_head": {"max_width": 3}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "encoder_config").mkdir()
    encoder.config.save_pretrained(folder / "encoder_config")
    return folder
