"""Small random models of every family and head, as transformers builds them."""

import warnings
from collections.abc import Iterator

import pytest
import torch
import transformers
from tiny import one_thread  # noqa: F401  (a fixture that is taken from here)
from torch import nn

from bytetx.hf import FallbackWarning

VOCAB_SIZE = 60
MAX_POSITIONS = 48

_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
}
_DISTILBERT_SIZES = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 96,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
}

_T5_SIZES = {
    "d_model": 64,
    "d_kv": 16,
    "num_layers": 2,
    "num_heads": 4,
    "d_ff": 96,
    "vocab_size": VOCAB_SIZE,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
_BOS = {"classifier_pooling": "bos"}

_DEBERTA_SIZES = _SIZES | {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "type_vocab_size": 2,
    "pad_token_id": 1,
}
_DEBERTA_V3 = {
    "position_buckets": 8,
    "max_relative_positions": 20,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}

# family: (stem of its class names, sizes)
FAMILIES = {
    "bert": ("Bert", _SIZES),
    "roberta": ("Roberta", _SIZES | {"type_vocab_size": 2}),
    "xlm-roberta": ("XLMRoberta", _SIZES),
    "camembert": ("Camembert", _SIZES),
    "distilbert": ("DistilBert", _DISTILBERT_SIZES),
    "mpnet": ("MPNet", _SIZES),
    "electra": ("Electra", _SIZES | {"embedding_size": 32}),
    "albert": ("Albert", _SIZES | {"embedding_size": 32, "num_hidden_groups": 2}),
    "xlm-roberta-xl": ("XLMRobertaXL", _SIZES),
    "roberta-prelayernorm": ("RobertaPreLayerNorm", _SIZES),
    "modernbert": ("ModernBert", _SIZES | {"local_attention": 6, "pad_token_id": 1}),
    "eurobert": ("EuroBert", _SIZES | {"num_key_value_heads": 2, "pad_token_id": 1} | _BOS),
    "ultrabert": (
        "Ultrabert",
        _SIZES
        | {"num_key_value_heads": 2, "pad_token_id": 1, "sliding_window": 6}
        | {"prediction_head_size": 40, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "nomic_bert": ("NomicBert", _SIZES | {"pad_token_id": 1}),
    "gte": ("Gte", _SIZES | {"pad_token_id": 1, "type_vocab_size": 2}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", _SIZES),
    "deberta": ("Deberta", _DEBERTA_SIZES),
    "deberta-v2": ("DebertaV2", _DEBERTA_SIZES | _DEBERTA_V3 | {"conv_kernel_size": 3}),
    "deberta-v3": ("DebertaV2", _DEBERTA_SIZES | _DEBERTA_V3),
    "t5": ("T5", _T5_SIZES),
    "mt5": ("MT5", _T5_SIZES | {"feed_forward_proj": "gated-gelu"}),
}
# An older transformers lacks the newest classes.
FAMILIES = {
    name: (stem, sizes)
    for name, (stem, sizes) in FAMILIES.items()
    if hasattr(transformers, f"{stem}Config")
}
HEADS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForMaskedLM",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForPreTraining",
)
# Heads of T5 and mT5 that have a decoder, too.
_ENCODER_DECODERS = [
    (stem, f"For{task}")
    for stem in ("T5", "MT5")
    for task in ("SequenceClassification", "QuestionAnswering")
]
FAMILY_HEADS = [
    (family, head)
    for family, (stem, _) in FAMILIES.items()
    for head in HEADS
    if hasattr(transformers, stem + head) and (stem, head) not in _ENCODER_DECODERS
]


@pytest.fixture(autouse=True)
def fallbacks_are_errors() -> Iterator[None]:
    """A test that compares with the stock model must not compare the stock model with itself.

    A test module that imports this fixture has it in each of its tests.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


def tiny_model(family: str, head: str = "Model", **config: object) -> nn.Module:
    """A model with random weights of a size that makes every layer matter, in eval mode."""
    stem, sizes = FAMILIES[family]
    torch.manual_seed(7)
    num_labels = 2 if head in ("ForQuestionAnswering", "ForPreTraining") else 3
    settings = sizes | {"num_labels": num_labels} | config
    if head == "Model" and family in ("t5", "mt5"):
        head = "EncoderModel"
    model = getattr(transformers, stem + head)(getattr(transformers, stem + "Config")(**settings))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
        elif "norm" in name.lower() and name.endswith("weight"):
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.uniform_(parameter, -0.5, 0.5)
    return model.eval()


def padded_inputs(
    seqlens: list[int], *, side: str = "right", pad_token_id: int = 1, width: int | None = None
) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask, int64 [batch_size, width]; ids never are the pad token."""
    generator = torch.Generator().manual_seed(sum(seqlens) + len(seqlens))
    width = max(seqlens) if width is None else width
    input_ids = torch.full((len(seqlens), width), pad_token_id)
    mask = torch.zeros_like(input_ids)
    for row, seqlen in enumerate(seqlens):
        columns = slice(0, seqlen) if side == "right" else slice(width - seqlen, width)
        input_ids[row, columns] = torch.randint(4, VOCAB_SIZE, (seqlen,), generator=generator)
        mask[row, columns] = 1
    return {"input_ids": input_ids, "attention_mask": mask}


def zeroed(x: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
    """A stock output as wrap's rule for pads has it; one that has no positions as it is."""
    if is_token.shape != x.shape[: is_token.dim()]:
        return x
    return x.masked_fill(
        ~is_token.bool().reshape(is_token.shape + (1,) * (x.dim() - is_token.dim())), 0
    )


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def rms_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).square().mean().sqrt().item()
