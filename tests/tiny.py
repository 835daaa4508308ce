"""Small random checkpoints of every family, and the parts of bytetx that run them."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from bytetx.checkpoint.spec import ModelSpec
from bytetx.checkpoint.weights import Weights
from bytetx.nn.loading import load_spec
from bytetx.nn.tensors import TensorLoader
from bytetx.nn.transformer import Transformer
from bytetx.packed import PackedBatch, pack, split

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

VOCAB_SIZE = 60
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 72,
}
# What the published checkpoints of DeBERTa v3 have, with fewer buckets.
DEBERTA_V3 = {
    "relative_attention": True,
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
# family: (stem of its class names, config that differs from SIZES)
FAMILIES = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1}),
    "camembert": ("Camembert", {"type_vocab_size": 1}),
    "distilbert": ("DistilBert", {}),
    "mpnet": ("MPNet", {}),
    "electra": ("Electra", {"embedding_size": 32}),
    "modernbert": ("ModernBert", {"local_attention": 8, "pad_token_id": 0}),
    "albert": ("Albert", {"embedding_size": 32, "num_hidden_groups": 2}),
    "xlm-roberta-xl": ("XLMRobertaXL", {}),
    "roberta-prelayernorm": ("RobertaPreLayerNorm", {}),
    "nomic_bert": ("NomicBert", {"pad_token_id": 0}),
    "gte": ("Gte", {"pad_token_id": 0}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", {}),
    "deberta-v2": ("DebertaV2", DEBERTA_V3),
    "deberta": ("Deberta", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "eurobert": ("EuroBert", {"num_key_value_heads": 1, "pad_token_id": 0, "mask_token_id": 3}),
    "ultrabert": (
        "Ultrabert",
        {"num_key_value_heads": 1, "sliding_window": 8, "prediction_head_size": 28}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
}
# An older transformers lacks the newest classes.
FAMILIES = {
    name: (stem, own)
    for name, (stem, own) in FAMILIES.items()
    if hasattr(transformers, f"{stem}Model")
}
_DISTILBERT_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, and lose much where the machine is busy.

    A test module that imports this fixture runs each of its tests on one thread.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def tiny_model(family: str, head: str = "Model", **config: object) -> nn.Module:
    """A transformers model in eval mode; weights spread so far that every part of it shows."""
    stem, own = FAMILIES[family]
    labels = {} if "id2label" in config else {"num_labels": 3}
    settings = SIZES | labels | own | config
    if family == "distilbert":
        settings = {_DISTILBERT_KEYS.get(key, key): value for key, value in settings.items()}
    model = getattr(transformers, stem + head)(getattr(transformers, stem + "Config")(**settings))
    randomize(model)
    return model.eval()


def randomize(model: nn.Module, *, std: float = 0.2) -> None:
    """Normal weights and biases, norm scales around 1; no pad row of zeros is left."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = name.lower().rpartition(".")[0].rpartition(".")[2]
            is_scale = "norm" in module and name.endswith("weight")
            parameter.normal_(1.0 if is_scale else 0.0, std, generator=generator)


def save(model: nn.Module, folder: Path, **options: object) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint: its spec, tensors, encoder, and the loader that heads take."""

    spec: ModelSpec
    weights: Weights
    transformer: Transformer
    loader: TensorLoader

    def pack(self, ids: Sequence[Sequence[int]], **options: object) -> PackedBatch:
        return pack(
            ids,
            has_token_types=self.spec.num_token_types > 0,
            position_offset=self.spec.position_offset,
            **options,
        )

    def rows(self, ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Last hidden states, [len, hidden_size] a sequence."""
        batch = self.pack(ids)
        return split(self.transformer.forward(batch), batch)


def load(folder: Path, dtype: torch.dtype = torch.float32, *, prepack: bool = True) -> Loaded:
    spec = load_spec(folder)
    weights = Weights(folder, spec)
    options = {"dtype": dtype, "device": "cpu", "prepack": prepack}
    transformer = Transformer.from_tensors(spec, weights, **options)
    return Loaded(spec, weights, transformer, TensorLoader(weights, **options))


def random_ids(seqlens: Sequence[int], *, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Ids that are never a special token (5 and up): Hugging Face skips pad ids in positions."""
    rng = np.random.default_rng(sum(seqlens))
    return [rng.integers(5, vocab_size, seqlen).tolist() for seqlen in seqlens]


def same_rows(one: Loaded, other: Loaded) -> bool:
    """Whether two checkpoints give the same hidden states, bit for bit."""
    ids = random_ids([9, 2])
    return all(torch.equal(a, b) for a, b in zip(one.rows(ids), other.rows(ids), strict=True))


def half_errors(loaded: Loaded, model: nn.Module) -> tuple[float, float]:
    """(our mean squared error, transformers') of last hidden states in a half type, against f64.

    model: transformers' own, in that type; loaded: from its files.
    """
    exact, ids = copy.deepcopy(model).double(), random_ids([40] * 12)
    ours = theirs = 0.0
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        with torch.no_grad():
            wanted, found = (
                one(torch.tensor([sequence])).last_hidden_state[0] for one in (exact, model)
            )
        ours += (rows.double() - wanted).square().mean().item()
        theirs += (found.double() - wanted).square().mean().item()
    return ours, theirs
