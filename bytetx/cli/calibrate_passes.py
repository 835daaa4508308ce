"""Measure what a pass takes around its layers: a model of two small layers, loaded as usual."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.torch import save_file

from bytetx.model import Model, load
from bytetx.parallel.planner.machine import Around

_HIDDEN, _INNER, _HEADS, _VOCAB, _LAYERS, _LONGEST = 512, 512, 16, 1024, 2, 512
_TEXT_TOKENS = 256
_BATCHES = (8, 128)  # texts of the two batches that a line is drawn through
_WARM_UP, _ROUNDS = 4, 15


def measure_around(size: int, *, device: str = "cuda") -> dict[str, Around]:
    """Measure one rank; `size` ranks with the same texts, the y axis; and `size` slots."""
    grids = {"one": None} | ({"ranks": f"y{size}", "slots": f"data{size}"} if size > 1 else {})
    found = {}
    with TemporaryDirectory(prefix="bytetx-calibrate-") as folder:
        _save_model(Path(folder))
        for kind, grid in grids.items():
            with load(folder, device=device, grid=grid, token_budget=1 << 16) as model:
                found[kind] = _around(model)
    return found


def _around(model: Model) -> Around:
    points = []
    for batch in _BATCHES:
        texts = np.random.default_rng(0).integers(1, _VOCAB, (batch, _TEXT_TOKENS)).tolist()
        us = _median_us(partial(model.embed, texts, pooling="mean"))
        points.append((batch * _TEXT_TOKENS, us))
    (few, short), (many, long) = points
    per_token = max(0.0, (long - short) / (many - few))
    return Around(max(0.0, short - few * per_token), per_token)


def _median_us(run: Callable[[], object]) -> float:
    for _ in range(_WARM_UP):
        run()
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


def _save_model(folder: Path) -> None:
    """A BERT of random weights."""
    config = {
        "model_type": "bert",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "vocab_size": _VOCAB,
        "max_position_embeddings": _LONGEST,
        "type_vocab_size": 2,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int) -> None:
        tensors[name] = torch.randn(shape, dtype=torch.float16) * 0.05

    def add_linear(name: str, outputs: int, inputs: int) -> None:
        add(f"{name}.weight", outputs, inputs)
        add(f"{name}.bias", outputs)

    def add_norm(name: str) -> None:
        tensors[f"{name}.weight"] = torch.ones(_HIDDEN, dtype=torch.float16)
        tensors[f"{name}.bias"] = torch.zeros(_HIDDEN, dtype=torch.float16)

    for table, rows in (("word", _VOCAB), ("position", _LONGEST), ("token_type", 2)):
        add(f"embeddings.{table}_embeddings.weight", rows, _HIDDEN)
    add_norm("embeddings.LayerNorm")
    for i in range(_LAYERS):
        _add_layer(f"encoder.layer.{i}", add_linear, add_norm)
    save_file(tensors, folder / "model.safetensors")


def _add_layer(
    layer: str, add_linear: Callable[[str, int, int], None], add_norm: Callable[[str], None]
) -> None:
    names: Sequence[str] = ("query", "key", "value")
    for name in names:
        add_linear(f"{layer}.attention.self.{name}", _HIDDEN, _HIDDEN)
    add_linear(f"{layer}.attention.output.dense", _HIDDEN, _HIDDEN)
    add_norm(f"{layer}.attention.output.LayerNorm")
    add_linear(f"{layer}.intermediate.dense", _INNER, _HIDDEN)
    add_linear(f"{layer}.output.dense", _HIDDEN, _INNER)
    add_norm(f"{layer}.output.LayerNorm")
