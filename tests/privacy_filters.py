"""Small random checkpoints of OpenAI's privacy filter."""

from pathlib import Path

import pytest
import transformers
from tiny import VOCAB_SIZE, randomize
from torch import nn

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "sliding_window": 5,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "pad_token_id": 0,
    "rope_parameters": ROPE,
}


def privacy_filter(head: str = "ForTokenClassification", **config: object) -> nn.Module:
    """A transformers model in eval mode; skips the test where transformers lacks the class."""
    if not hasattr(transformers, "OpenAIPrivacyFilterConfig"):
        pytest.skip("this transformers has no OpenAIPrivacyFilterModel")
    settings = SIZES | ({} if "id2label" in config else {"num_labels": 9}) | config
    kind = getattr(transformers, f"OpenAIPrivacyFilter{head}")
    model = kind(transformers.OpenAIPrivacyFilterConfig(**settings))
    randomize(model)
    return model.eval()


def save_privacy_filter(folder: Path, **config: object) -> nn.Module:
    model = privacy_filter(**config)
    model.save_pretrained(folder)
    return model
