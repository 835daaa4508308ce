"""Small random static embeddings, as model2vec saves them."""

from pathlib import Path

import numpy as np
from checkpoints import make_tokenizer
from model2vec import StaticModel
from model2vec.quantization import quantize_embeddings

SIZE, LIMIT = 24, 32


def save_model2vec(
    folder: Path, kind: str = "wordpiece", *, weights: str = "plain", limit: int | None = LIMIT
) -> Path:
    """A random model, as model2vec saves it: with sentence-transformers' modules.json.

    weights: plain, weighted, mapped (a row for several tokens), int8 (and mapped), float16.
    """
    tokenizer = make_tokenizer(kind).backend_tokenizer
    num_tokens, rng = tokenizer.get_vocab_size(), np.random.default_rng(0)
    is_mapped = weights in ("mapped", "int8")
    num_rows = num_tokens // 3 if is_mapped else num_tokens
    table = rng.standard_normal((num_rows, SIZE)).astype(np.float32)
    if weights == "int8":
        table = quantize_embeddings(table, "int8")
    if weights == "float16":
        table = table.astype(np.float16)
    model = StaticModel(
        table,
        tokenizer,
        normalize=True,
        weights=None
        if weights in ("plain", "float16")
        else rng.uniform(0.1, 2, num_tokens).astype(np.float32),
        token_mapping=rng.integers(0, num_rows, num_tokens) if is_mapped else None,
        max_length=limit,
    )
    model.save_pretrained(folder)
    return folder


def bare(folder: Path) -> Path:
    """The same folder as one that model2vec alone describes."""
    (folder / "modules.json").unlink()
    return folder
