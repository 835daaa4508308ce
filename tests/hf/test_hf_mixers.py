"""wrap for models without attention in some layers: as stock, or the original by name."""

import copy

import pytest
import torch
from hf_models import (  # noqa: F401  (one_thread: a fixture)
    largest_difference,
    one_thread,
    padded_inputs,
    rms_difference,
)
from tiny_decoders import tiny_decoder

from bytetx.hf import FallbackWarning, wrap

SEQLENS = [9, 1, 23, 14]
NAMES = ["lfm2", "qwen3_5", "qwen3_5_moe", "qwen3_next"]


def stock_and_wrapped(name: str, **config: object) -> tuple:
    stock = tiny_decoder(name, **config)
    return stock, wrap(copy.deepcopy(stock))


@pytest.mark.filterwarnings("error::bytetx.hf.FallbackWarning")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_without_a_cache(name: str, side: str) -> None:
    stock, wrapped = stock_and_wrapped(name)
    inputs = padded_inputs(SEQLENS, side=side)
    is_token = inputs["attention_mask"].bool()
    with torch.inference_mode():
        want, have = (m(**inputs, use_cache=False).logits[is_token] for m in (stock, wrapped))
    assert largest_difference(have, want) < 1e-4


@pytest.mark.filterwarnings("error::bytetx.hf.FallbackWarning")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much_as_stock(name: str, dtype: torch.dtype) -> None:
    exact = tiny_decoder(name)
    stock, wrapped = copy.deepcopy(exact).to(dtype), wrap(copy.deepcopy(exact)).to(dtype)
    inputs = padded_inputs(SEQLENS)
    is_token = inputs["attention_mask"].bool()
    with torch.inference_mode():
        reference, theirs, ours = (
            m(**inputs, use_cache=False).logits[is_token] for m in (exact, stock, wrapped)
        )
    assert rms_difference(ours, reference) <= 2 * rms_difference(theirs, reference)


@pytest.mark.parametrize("name", NAMES)
def test_what_runs_the_original_forward_says_so(name: str) -> None:
    stock, wrapped = stock_and_wrapped(name)
    inputs = padded_inputs(SEQLENS)
    holes = padded_inputs([20, 20])
    holes["attention_mask"][0, 3:9] = 0
    for given, reason in (
        (inputs | {"use_cache": True}, "what layers without attention remember"),
        (holes | {"use_cache": False}, "a mask with holes"),
    ):
        with torch.inference_mode(), pytest.warns(FallbackWarning, match=reason):
            have = wrapped(**given)
        with torch.inference_mode():
            want = stock(**given)
        is_token = given["attention_mask"].bool()
        assert torch.equal(have.logits[is_token], want.logits[is_token])


def test_pads_that_biases_make_tokens_of_run_as_stock() -> None:
    stock, wrapped = stock_and_wrapped("lfm2-biases", pad_token_id=0)
    inputs = padded_inputs(SEQLENS, side="left", pad_token_id=0)
    options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
    with pytest.warns(FallbackWarning, match="pads before a text"):
        have = wrapped.generate(**inputs, **options)
    assert torch.equal(have, stock.generate(**inputs, **options))
