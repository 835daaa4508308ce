"""SamplingParams: what is refused, and in which words."""

import math

import pytest

from bytetx.errors import InputError
from bytetx.sampling import SamplingParams


def test_values_are_kept_in_one_form() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3], logit_bias={1: -math.inf, 2: 1})
    assert params.stop == ("x",) and params.stop_token_ids == (3,)
    assert params.logit_bias == {1: -math.inf, 2: 1.0}
    assert not params.is_greedy and SamplingParams(temperature=0).is_greedy
    assert not params.has_penalties and SamplingParams(presence_penalty=0.1).has_penalties


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 0, "n must be an integer, at least 1, got 0"),
        ("n", True, "n must be an integer"),
        ("max_tokens", 0, "max_tokens must be an integer, at least 1"),
        ("min_tokens", -1, "min_tokens must be an integer, at least 0"),
        ("min_tokens", 300, r"min_tokens must be at most max_tokens \(256\), got 300"),
        ("temperature", -0.1, "temperature must be a number, at least 0, got -0.1"),
        ("temperature", math.nan, "temperature must be a number"),
        ("top_k", -1, "top_k must be an integer"),
        ("top_k", 1.5, "top_k must be an integer"),
        ("top_p", 1.1, "top_p must be a number, at least 0 and at most 1, got 1.1"),
        ("min_p", -0.5, "min_p must be a number"),
        ("repetition_penalty", 0, "repetition_penalty must be a number, above 0, got 0"),
        ("presence_penalty", math.inf, "presence_penalty must be a number, finite"),
        ("frequency_penalty", "1", "frequency_penalty must be a number"),
        ("logit_bias", [1], "logit_bias must map token ids to numbers"),
        ("logit_bias", {-1: 0.0}, "logit_bias's token must be an integer"),
        ("logit_bias", {1: math.inf}, r"logit_bias\[1\] must be a number"),
        ("seed", 2**64, "seed must be an integer, 0 ... 18446744073709551615"),
        ("stop", "", "stop must be a string or strings, none of them empty"),
        ("stop", ["a", 1], "stop must be a string or strings"),
        ("stop", 5, "stop must be a string or strings"),
        ("stop_token_ids", "12", "stop_token_ids must be a list of token ids"),
        ("stop_token_ids", [-1], "stop_token_ids must be an integer"),
        ("ignore_eos", 1, "ignore_eos must be True or False"),
        ("logprobs", 1025, "logprobs must be an integer, 0 ... 1024"),
        ("prompt_logprobs", -1, "prompt_logprobs must be an integer"),
        ("logits_processors", [1], "logits_processors must be a list of functions"),
    ],
)
def test_a_bad_value_is_named(name: str, value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**{name: value})


def test_greedy_answers_are_not_asked_for_twice() -> None:
    with pytest.raises(InputError, match="n must be 1 where temperature is 0"):
        SamplingParams(n=2, temperature=0)


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(InputError, match=r"logit_bias .* below vocab_size \(10\), got 12"):
        SamplingParams(logit_bias={12: 1.0}).check_vocab(10)
