"""Model.generate against transformers.generate, for every causal family, in every kind of step."""

from pathlib import Path

import pytest
import torch
from tiny import one_thread, random_ids, save  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import DECODERS, tiny_decoder
from torch import nn

import bytetx
from bytetx.model import Model
from bytetx.sampling import SamplingParams

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SEQLENS = [1, 13, 6, 37, 2]


def greedy(model: nn.Module, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    """What transformers goes on with after one prompt, alone and with its own cache."""
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
    ids = model.generate(torch.tensor([prompt]), pad_token_id=0, **options)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_as_transformers(name: str, tmp_path: Path) -> None:
    theirs, prompts = tiny_decoder(name), random_ids(SEQLENS)
    wanted = [greedy(theirs, prompt) for prompt in prompts]
    checkpoint = bytetx.load(save(theirs, tmp_path)).checkpoint
    model = Model(checkpoint)
    together = model.generate(prompts, GREEDY)
    assert [answer.token_ids for answer in together] == wanted
    assert [answer.num_prompt_tokens for answer in together] == SEQLENS
    assert {answer.finish_reason for answer in together} == {"length"}
    alone = [Model(checkpoint).generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    assert alone == wanted
    again = model.generate(prompts, GREEDY)  # now with the pages of the first time
    assert [answer.token_ids for answer in again] == wanted
    pieces = Model(checkpoint, token_budget=5)  # prompts in pieces of up to 5 tokens
    assert [answer.token_ids for answer in pieces.generate(prompts, GREEDY)] == wanted
    # 64 tokens of cache for sequences of up to 57: they throw each other out.
    tight = Model(checkpoint).generate(prompts, GREEDY, kv_cache_tokens=64)
    assert [answer.token_ids for answer in tight] == wanted
