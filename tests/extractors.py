"""A small random GLiNER checkpoint, written without the gliner package."""

import json
from pathlib import Path

import tokenizers
import torch
from checkpoints import make_tokenizer
from safetensors.torch import save_file
from tiny import tiny_model

_SIZE = 48  # the encoder's rows have as many features


def save_extractor(folder: Path) -> Path:
    """BERT with spans of at most 3 words, without an LSTM."""
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer("wordpiece", max_tokens=64)
    marks = [tokenizers.AddedToken(mark, special=True) for mark in ("<<ENT>>", "<<SEP>>")]
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
    }
    (folder / "gliner_config.json").write_text(json.dumps(config, default=str))
    return folder
