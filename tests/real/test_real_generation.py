"""Trained causal models: transformers' greedy tokens, and its log-perplexity in bf16."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import bytetx
from bytetx import SamplingParams
from bytetx.checkpoint.weights import Weights

pytestmark = pytest.mark.real

NUM_NEW_TOKENS = 64


def token_ids(folder: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text).input_ids for text in texts]


@torch.no_grad()
def logits(model: PreTrainedModel, ids: list[int], *, num_last: int = 0) -> torch.Tensor:
    """[num_last, vocab_size]; num_last: 0 for all tokens."""
    found: torch.Tensor = model(torch.tensor([ids]), logits_to_keep=num_last).logits[0]
    return found


@pytest.mark.parametrize(
    "checkpoint", ["SmolLM2-135M-Instruct-GGUF", "gemma-3-270m-GGUF"], indirect=True
)
def test_a_gguf_file_has_the_weights_and_ids_of_transformers(
    checkpoint: Path, lee_texts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """transformers' reader of GGUF gives these weights, in float32, and these ids for the texts."""
    monkeypatch.setenv("HOME", str(tmp_path))
    ours = bytetx.load(checkpoint, device="cpu", dtype="float32", generation_config="none")
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    theirs = AutoTokenizer.from_pretrained(checkpoint, gguf_file="model.gguf")
    tokenizer = ours.checkpoint.tokenizer
    assert tokenizer is not None
    prompts = [" ".join(text.split()[: 3 + i * 7 % 18]) for i, text in enumerate(lee_texts)]
    ids = [theirs(text).input_ids for text in prompts]
    assert [one.ids for one in tokenizer.encode(prompts)] == ids
    spec = ours.checkpoint.spec
    weights = Weights(ours.checkpoint.folder, spec).cast(torch.float32)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            weights[name.removeprefix("model.")], parameter, rtol=0, atol=1e-6
        )
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for prompt, found in zip(ids[::5], ours.generate(ids[::5], params), strict=True):
        new = list(found.outputs[0].token_ids)
        choices = logits(model, [*prompt, *new[:-1]], num_last=len(new))
        chosen = choices.gather(1, torch.tensor(new)[:, None])[:, 0]
        assert (choices.amax(1) - chosen).max() <= 1e-4


@pytest.mark.parametrize("checkpoint", ["SmolLM2-135M-Instruct", "gemma-3-270m"], indirect=True)
def test_greedy_tokens_are_those_of_transformers(checkpoint: Path, lee_texts: list[str]) -> None:
    """Each token is transformers' choice behind those before it, so that all of them are."""
    # Beginnings of 3 to 20 words, so that steps hold prompts of many lengths, and a text that is
    # longer than the 512 tokens which Gemma's local layers see.
    beginnings = [" ".join(text.split()[: 3 + i * 7 % 18]) for i, text in enumerate(lee_texts)]
    prompts = token_ids(checkpoint, [*beginnings, " ".join(lee_texts[:8])])
    assert len(prompts[-1]) > 512
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    ours = bytetx.load(checkpoint, device="cpu", dtype="float32", generation_config="none")
    found = [list(one.outputs[0].token_ids) for one in ours.generate(prompts, params)]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    num_equal, largest_gap = 0, 0.0
    for prompt, new in zip(prompts, found, strict=True):
        assert len(new) == NUM_NEW_TOKENS
        choices = logits(model, [*prompt, *new[:-1]], num_last=NUM_NEW_TOKENS)
        chosen = choices.gather(1, torch.tensor(new)[:, None])[:, 0]
        largest_gap = max(largest_gap, (choices.amax(1) - chosen).max().item())
        num_equal += choices.argmax(1).tolist() == new
    print(f"{checkpoint.name}: {num_equal} of {len(prompts)} equal, gap {largest_gap:.2g}")
    # A gap is a tie but for the order of sums: logits are some tens, and off by some 1e-5.
    assert largest_gap <= 1e-4
    assert num_equal >= len(prompts) - 1


@pytest.mark.parametrize("checkpoint", ["SmolLM2-135M-Instruct"], indirect=True)
def test_log_likelihoods_in_bf16_err_no_more_than_those_of_transformers(
    checkpoint: Path, lee_texts: list[str]
) -> None:
    ids = token_ids(checkpoint, lee_texts)

    def log_likelihoods(model: PreTrainedModel) -> list[np.ndarray]:
        """f64, of each text's tokens behind the first; one text's logits are held at a time."""
        return [
            logits(model, one)[:-1].double().log_softmax(-1)[range(len(one) - 1), one[1:]].numpy()
            for one in ids
        ]

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    theirs = log_likelihoods(model)
    exact = log_likelihoods(model.float())  # the same weights, whose arithmetic errs by 1e-6
    scores = bytetx.load(checkpoint, device="cpu", dtype="bfloat16").score(ids)
    ours = [score.token_log_likelihoods.astype(np.float64) for score in scores]

    def errors(found: list[np.ndarray]) -> tuple[float, float]:
        """Root mean squares over tokens and over texts' log-perplexities."""
        off = [a - b for a, b in zip(found, exact, strict=True)]
        tokens, texts = np.concatenate(off), np.array([one.mean() for one in off])
        return math.sqrt((tokens**2).mean()), math.sqrt((texts**2).mean())

    for what, our, their in zip(("tokens", "texts"), errors(ours), errors(theirs), strict=True):
        print(f"{what}: ours err by {our:.5f}, those of transformers by {their:.5f}")
        assert our <= their, what
