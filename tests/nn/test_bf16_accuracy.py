"""bf16 on a CPU: log-likelihoods are no farther from float64 than those of transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import bytetx

VOCAB_SIZE = 400


def llama(seed: int) -> PreTrainedModel:
    """Random, in bf16; norms that scale as trained ones do, layers enough for errors to add up."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.2, 1.7)
    return model.bfloat16()


@torch.no_grad()
def log_likelihoods(model: PreTrainedModel, ids: torch.Tensor) -> np.ndarray:
    """f64 [texts, tokens - 1] of every token behind the first."""
    logprobs = model(ids).logits.double().log_softmax(-1)
    return logprobs[:, :-1].gather(2, ids[:, 1:, None])[..., 0].numpy()


@pytest.mark.parametrize("seed", [0, 1])
def test_log_likelihoods_err_no_more_than_transformers(tmp_path: Path, seed: int) -> None:
    model = llama(seed)
    model.save_pretrained(tmp_path)
    ids = torch.randint(5, VOCAB_SIZE, (12, 60))
    theirs, exact = log_likelihoods(model, ids), log_likelihoods(model.double(), ids)
    loaded = bytetx.load(tmp_path, device="cpu", dtype="bfloat16")
    scores = loaded.score(ids.tolist())
    ours = np.stack([np.asarray(one.token_log_likelihoods)[-59:] for one in scores])

    def error(found: np.ndarray) -> float:
        return float(np.sqrt(np.square(found - exact).mean()))

    # About 0.85 of theirs: norms, rotation, attention and gates are rounded once each.
    assert error(ours) <= error(theirs)
