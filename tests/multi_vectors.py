"""A random model of late interaction, saved by sentence-transformers."""

import string
from pathlib import Path

from checkpoints import save_causal, save_checkpoint
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from tiny import randomize
from tiny_decoders import DECODERS
from torch import nn


def save_multi_vector(
    folder: Path, family: str = "bert", *, skips: object = "document", **options: object
) -> Path:
    """A random MultiVectorEncoder, saved. options: of its Transformer module."""
    save_base = save_causal if family in DECODERS else save_checkpoint
    base = save_base(folder / "base", family)
    dense = Dense(48, 20, activation_function=nn.Identity(), module_input_name="token_embeddings")
    randomize(dense)
    modules = [
        Transformer(str(base), **options),
        dense,
        MultiVectorMask(skiplist_words=list(string.punctuation), skiplist_tasks=skips),
        Normalize(module_input_name="token_embeddings"),
    ]
    prompts = {"query": "the query: ", "document": "not "}
    MultiVectorEncoder(modules=modules, device="cpu", prompts=prompts).save_pretrained(
        str(folder / "model")
    )
    return folder / "model"
