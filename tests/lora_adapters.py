"""Saves random LoRA adapters of tiny models."""

from pathlib import Path

import peft
import torch
import transformers
from torch import nn


def save_adapter(
    base: Path, folder: Path, kind: type = transformers.AutoModel, seed: int = 0, **config: object
) -> nn.Module:
    """Saves a random adapter of the model in `base`; returns peft's model, not merged."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(kind.from_pretrained(base), peft.LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
            elif parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model.eval()
