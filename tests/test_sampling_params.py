"""SamplingParams: what is refused, and in which words."""

import math

import pytest

from bytetx.errors import InputError
from bytetx.sampling_params import SamplingParams


def test_values_are_kept_in_one_form() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3], logit_bias={1: -math.inf, 2: 1})
    assert params.stop == ("x",) and params.stop_token_ids == (3,)
    assert params.logit_bias == {1: -math.inf, 2: 1.0}
    assert not params.is_greedy and SamplingParams(temperature=0).is_greedy
    assert not params.has_penalties and SamplingParams(presence_penalty=0.1).has_penalties


def test_the_ends_of_every_range_are_taken() -> None:
    for name, values in {
        "n": (1, 16384),
        "temperature": (0, 2, 2.0, 1e-9),
        "top_p": (1, 1.0, 1e-9),
        "top_k": (0, 1, 10**9),
        "min_p": (0, 1),
        "repetition_penalty": (1e-3, 10),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2.0, 2.0),
        "seed": (-(2**63), 0, 2**64 - 1),
        "logprobs": (0, 1024),
        "prompt_logprobs": (0, 1024),
    }.items():
        for value in values:
            assert getattr(SamplingParams(**{name: value}), name) == value


def test_what_vllm_writes_for_none_is_none_here() -> None:
    params = SamplingParams(
        top_k=-1, seed=-1, stop=None, stop_token_ids=None, logits_processors=None
    )
    assert params == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 0, "n must be an integer, 1 ... 16384, got 0"),
        ("n", 16385, "n must be an integer, 1 ... 16384, got 16385"),
        ("n", True, "n must be an integer"),
        ("max_tokens", 0, "max_tokens must be an integer, at least 1"),
        ("min_tokens", -1, "min_tokens must be an integer, at least 0"),
        ("min_tokens", 300, r"min_tokens must be at most max_tokens \(256\), got 300"),
        ("temperature", -0.1, r"temperature must be a number in \[0, 2\], got -0.1"),
        ("temperature", 2.1, r"temperature must be a number in \[0, 2\], got 2.1"),
        ("temperature", math.nan, "temperature must be a number"),
        ("top_k", -2, "top_k must be an integer, at least 1, or 0 or -1, which keep all, got -2"),
        ("top_k", 1.5, "top_k must be an integer"),
        ("top_k", True, "top_k must be an integer"),
        ("top_p", 1.1, r"top_p must be a number in \(0, 1\], got 1.1"),
        ("top_p", 0, r"top_p must be a number in \(0, 1\], got 0"),
        ("min_p", -0.5, r"min_p must be a number in \[0, 1\], got -0.5"),
        ("min_p", 1.01, r"min_p must be a number in \[0, 1\], got 1.01"),
        ("repetition_penalty", 0, "repetition_penalty must be a finite number above 0, got 0"),
        ("repetition_penalty", 1e-308, r"repetition_penalty must be a number in \[1.17549e-38, "),
        ("repetition_penalty", 1e308, "repetition_penalty must be a number in"),
        ("repetition_penalty", math.inf, "repetition_penalty must be a finite number above 0"),
        ("presence_penalty", 2.01, r"presence_penalty must be a number in \[-2, 2\], got 2.01"),
        ("presence_penalty", math.inf, "presence_penalty must be a number in"),
        ("frequency_penalty", -2.5, r"frequency_penalty must be a number in \[-2, 2\], got -2.5"),
        ("frequency_penalty", "1", "frequency_penalty must be a number"),
        ("logit_bias", [1], "logit_bias must map token ids to numbers"),
        ("logit_bias", {-1: 0.0}, "logit_bias's token must be an integer"),
        ("logit_bias", {1: math.inf}, r"logit_bias\[1\] must be a finite number, got inf"),
        ("logit_bias", {1: 1e308}, r"logit_bias\[1\] must be a number in .*38\], got 1e\+308"),
        ("logit_bias", {1: math.nan}, r"logit_bias\[1\] must be a finite number, got nan"),
        ("seed", 2**64, "seed must be an integer, -9223372036854775808 ... 18446744073709551615"),
        ("seed", -(2**63) - 1, "seed must be an integer"),
        ("stop", "", "stop must be a string or strings, none of them empty"),
        ("stop", ["a", 1], "stop must be a string or strings"),
        ("stop", 5, "stop must be a string or strings"),
        ("stop_token_ids", "12", "stop_token_ids must be a list of token ids"),
        ("stop_token_ids", [-1], "stop_token_ids must be an integer"),
        ("ignore_eos", 1, "ignore_eos must be True or False"),
        ("skip_special_tokens", None, "skip_special_tokens must be True or False"),
        ("include_stop_str_in_output", 1, "include_stop_str_in_output must be True or False"),
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
