"""generation_config.json: where generation starts for parameters that a request leaves unset."""

import logging
import pickle
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import edit_json, save_causal
from cli_runs import Bytetx

import bytetx
from bytetx.errors import CheckpointError, InputError, OptionError
from bytetx.model import Model
from bytetx.sampling_params import SamplingDefaults, SamplingParams

PROMPT = [5, 9, 7, 30]
SHORT = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_causal(tmp_path_factory.mktemp("plain"), eos_token_id=None)
    (folder / "generation_config.json").write_text("{}")
    return folder


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own, to write a generation_config.json into."""
    for path in plain.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def load(folder: Path, *, generation_config: str | Path = "auto", **keys: object) -> Model:
    edit_json(folder / "generation_config.json", **keys)
    return bytetx.load(folder, device="cpu", generation_config=generation_config)


def tokens(model: Model, params: SamplingParams = SHORT) -> list[int]:
    return list(model.generate([PROMPT], params)[0].token_ids)


@pytest.mark.feature("Generation", "defaults of `generation_config.json`")
@pytest.mark.parametrize(
    ("keys", "params"),
    [
        ({"temperature": 0.3}, {"temperature": 0.3}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"do_sample": False}, {"temperature": 0}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0}),
        ({"do_sample": True, "temperature": 0.4}, {"temperature": 0.4}),
        ({"top_k": 2}, {"top_k": 2}),
        ({"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}, {}),
        ({"top_k": -1, "top_p": None, "temperature": None}, {}),
        ({"top_p": 0.3}, {"top_p": 0.3}),
        ({"min_p": 0.5}, {"min_p": 0.5}),
        ({"repetition_penalty": 3}, {"repetition_penalty": 3.0}),
        ({"suppress_tokens": [3, 9, 10**6]}, {"logit_bias": dict.fromkeys((3, 9), -torch.inf)}),
        ({"bad_words_ids": [[3], [9]]}, {"logit_bias": dict.fromkeys((3, 9), -torch.inf)}),
        ({"temperature": 0.8, "top_k": 9, "top_p": 0.9}, dict(temperature=0.8, top_k=9, top_p=0.9)),
    ],
)
def test_a_default_is_the_parameter(
    folder: Path, keys: dict[str, object], params: dict[str, object]
) -> None:
    model = load(folder, **keys)
    other = load(folder, **dict.fromkeys(keys))
    assert tokens(model) == tokens(other, replace(SHORT, **params))


@pytest.mark.parametrize(
    "keys",
    [
        {"repetition_penalty": 2.0},
        {"suppress_tokens": list(range(0, 260, 2))},
        {"bad_words_ids": [[token] for token in range(1, 260, 2)]},
        {"max_length": 9},
        {"max_new_tokens": 7, "max_length": 9},
        {"max_new_tokens": 20, "min_new_tokens": 9, "eos_token_id": list(range(100))},
        {"max_new_tokens": 20, "min_length": 15, "eos_token_id": list(range(100))},
    ],
)
def test_greedy_tokens_are_those_of_transformers(folder: Path, keys: dict[str, object]) -> None:
    model = load(folder, **{"do_sample": False, "max_new_tokens": 16} | keys)
    if "max_length" in keys and "max_new_tokens" not in keys:
        model = load(folder, max_new_tokens=None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    wanted = theirs.generate(torch.tensor([PROMPT]), pad_token_id=0)[0, len(PROMPT) :].tolist()
    assert tokens(model, SamplingParams()) == wanted
    assert model.info()["generation_defaults"]["temperature"] == 0


def test_what_a_request_sets_wins_field_by_field(folder: Path) -> None:
    keys = {"temperature": 0, "top_k": 3, "repetition_penalty": 3.0, "max_new_tokens": 2}
    model, plain = load(folder, **keys), load(folder, **dict.fromkeys(keys))
    all_own = SamplingParams(
        temperature=1, top_k=0, repetition_penalty=1, max_tokens=12, seed=3, ignore_eos=True
    )
    assert tokens(model, all_own) == tokens(plain, SHORT)
    assert tokens(model, replace(all_own, top_k=-1)) == tokens(plain, SHORT)
    some = replace(all_own, repetition_penalty=None)
    assert tokens(model, some) == tokens(plain, replace(SHORT, repetition_penalty=3.0))
    assert len(tokens(model, SamplingParams(ignore_eos=True))) == 2
    assert len(tokens(model, SamplingParams(ignore_eos=True, max_tokens=None))) > 12
    with pytest.raises(InputError, match="n must be 1 where temperature is 0"):
        model.generate([PROMPT], SamplingParams(n=2))
    assert len(model.generate([PROMPT], SamplingParams(n=2, temperature=1))[0].outputs) == 2


def test_defaults_of_lengths() -> None:
    def resolved(defaults: SamplingDefaults, num_prompt_tokens: int = 0, **given: Any) -> Any:
        params = SamplingParams(**given)
        return params.resolved(defaults, num_prompt_tokens=num_prompt_tokens)

    assert resolved(SamplingDefaults(max_length=20), 15).max_tokens == 5
    assert resolved(SamplingDefaults(max_length=9), 9).max_tokens == 1
    least = SamplingDefaults(min_tokens=5, min_length=12)
    for prompt, most, wanted in ((10, 256, 5), (3, 256, 9), (3, 4, 4), (3, None, 9)):
        assert resolved(least, prompt, max_tokens=most).min_tokens == wanted
    assert resolved(least, min_tokens=2).min_tokens == 2
    assert resolved(SamplingDefaults()).max_tokens == 256
    assert resolved(SamplingDefaults(max_tokens=3), max_tokens=None).max_tokens is None
    with pytest.raises(InputError, match=r"min_tokens must be at most max_tokens \(9\), got 200"):
        resolved(SamplingDefaults(max_tokens=9), min_tokens=200)


def test_what_is_unset_stays_unset_in_copies() -> None:
    defaults = SamplingDefaults(temperature=0.5, stop=("x",))
    params = SamplingParams(max_tokens=5, top_p=None, temperature=None)
    assert params.temperature == 1.0 and params == SamplingParams(max_tokens=5)
    for copied in (replace(params, seed=1), pickle.loads(pickle.dumps(params)), deepcopy(params)):
        resolved = copied.resolved(defaults, num_prompt_tokens=1)
        assert (resolved.temperature, resolved.stop, resolved.max_tokens) == (0.5, ("x",), 5)
    given = SamplingParams(temperature=1.0, stop=())
    assert given.resolved(defaults, num_prompt_tokens=1) is given


def test_the_switch(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    defaults = load(folder, temperature=0, eos_token_id=list(range(260)))
    assert len(tokens(defaults, SamplingParams())) == 1
    library = tokens(load(folder, generation_config="none"))
    assert library != tokens(defaults)
    assert tokens(load(folder, generation_config="vllm")) == library
    vllm = load(folder, generation_config="vllm")
    assert len(tokens(vllm, SamplingParams(seed=3, max_tokens=12))) == 1  # the file's ends
    own = load(folder, generation_config="none")
    assert len(tokens(own, SamplingParams(seed=3, max_tokens=12))) == 12
    assert tokens(pickle.loads(pickle.dumps(own))) == library
    other = tmp_path_factory.mktemp("other") / "generation_config.json"
    other.write_text('{"repetition_penalty": 3.0}')
    wanted = tokens(own, replace(SHORT, repetition_penalty=3.0))
    for path in (other, other.parent, str(other)):
        assert tokens(load(folder, generation_config=path)) == wanted
    for wrong in ("vLLM", "/nowhere", "", 3, None):
        with pytest.raises(OptionError, match="generation_config must be auto, vllm, none, or a p"):
            bytetx.load(folder, generation_config=wrong)  # type: ignore[arg-type]


def test_a_damaged_file_that_is_not_read_does_no_harm(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    assert len(tokens(bytetx.load(folder, generation_config="none"))) == 12
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read as JSON"):
        bytetx.load(folder)


@pytest.mark.parametrize(
    ("key", "value", "needs"),
    [
        ("temperature", -0.5, "a finite number from 0"),
        ("temperature", "0.7", "a finite number from 0"),
        ("temperature", True, "a finite number from 0"),
        ("temperature", 1e300, "a finite number from 0"),
        ("temperature", float("nan"), "a finite number from 0"),
        ("top_k", 2.5, "an integer from -1"),
        ("top_k", -2, "an integer from -1"),
        ("top_p", 0, "a number above 0, at most 1"),
        ("top_p", 1.5, "a number above 0, at most 1"),
        ("min_p", -0.1, "a number from 0 to 1"),
        ("repetition_penalty", 0, "a finite number above 0"),
        ("repetition_penalty", float("inf"), "a finite number above 0"),
        ("do_sample", "no", "true or false"),
        ("max_new_tokens", 0, "an integer from 1"),
        ("max_length", 1e3, "an integer from 1"),
        ("min_new_tokens", [], "an integer from 0"),
        ("eos_token_id", "</s>", "a token id"),
        ("stop_strings", [""], "text"),
        ("suppress_tokens", 5, "a list"),
        ("bad_words_ids", [5], "a list"),
    ],
)
def test_a_wrong_value_names_file_and_key(
    folder: Path, key: str, value: object, needs: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key} must be .*{needs}"):
        load(folder, **{key: value})


def test_what_is_not_supported_is_named_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    off = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "guidance_scale": None}
    with caplog.at_level(logging.INFO, logger="bytetx"):
        model = load(folder, **off, top_k=4)
        tokens(model)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    (line,) = [message for message in caplog.messages if "generation starts from" in message]
    assert "generation_config.json: top_k 4;" in line and "generation_config='vllm'" in line
    caplog.clear()
    keys = {
        "no_repeat_ngram_size": 2,
        "num_beams": 4,
        "typical_p": 0.9,
        "forced_eos_token_id": 2,
        "begin_suppress_tokens": [3],
        "sequence_bias": [[[3], 1.0]],
        "bad_words_ids": [[3], [4, 5]],
        "guidance_scale": 1.5,
        "penalty_alpha": 0.6,
        "num_return_sequences": 2,
    }
    with caplog.at_level(logging.WARNING, logger="bytetx"):
        model = load(folder, **keys)
        for _ in range(2):
            tokens(model)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert all(key in warning for key in keys) and "generation_config.json" in warning
    caplog.clear()
    load(folder, generation_config="vllm")
    assert not caplog.records


def test_the_end_of_the_tokenizer_ends_a_text(folder: Path) -> None:
    """As in vLLM, whose tokenizer's ends count beside those of generation_config.json."""
    model = load(folder)
    first, second, third = tokens(model)[:3]
    name = model.tokenizer.token(second)  # type: ignore[union-attr]
    edit_json(folder / "tokenizer_config.json", eos_token=name)
    params = replace(SHORT, ignore_eos=False)
    for switch in ("auto", "vllm", "none"):
        found = load(folder, generation_config=switch).generate([PROMPT], params)[0]
        assert list(found.token_ids) == [first, second] and found.finish_reason == "stop"
    for ends in ([third], None, -1):
        assert tokens(load(folder, eos_token_id=ends), params) == [first, second]
    assert tokens(load(folder, eos_token_id=first), params) == [first]
    assert len(tokens(model, SHORT)) == 12


def test_an_end_beyond_the_vocabulary_is_none(folder: Path) -> None:
    """min_tokens forbids ends, and a token that is no column of the logits broke the step."""
    model = load(folder, eos_token_id=[10**6])
    params = SamplingParams(seed=3, max_tokens=4, min_tokens=3)
    assert len(tokens(model, params)) == 4


def test_stop_strings_and_old_files_with_the_keys_in_config_json(folder: Path) -> None:
    answer = load(folder).generate([PROMPT], SHORT)[0]
    stop = answer.text[2:4]
    assert stop not in load(folder, stop_strings=[stop]).generate([PROMPT], SHORT)[0].text
    model = load(folder, stop_strings=stop)
    assert model.generate([PROMPT], replace(SHORT, stop=()))[0].text == answer.text
    edit_json(folder / "config.json", repetition_penalty=3.0)
    assert tokens(load(folder, stop_strings=None)) == list(answer.token_ids)
    old = {"do_sample": False, "max_length": 20, "top_k": 50, "num_beams": 1, "min_length": 0}
    edit_json(folder / "config.json", **old)  # what transformers of 2020 wrote into all of them
    (folder / "generation_config.json").unlink()
    wanted = tokens(model, replace(SHORT, repetition_penalty=3.0, stop=()))
    assert tokens(bytetx.load(folder)) == wanted
    assert tokens(bytetx.load(folder, generation_config="vllm")) == list(answer.token_ids)


def test_encoders_do_not_read_the_file(tmp_path: Path) -> None:
    save_causal(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["Qwen3Model"])
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    assert len(bytetx.load(tmp_path).embed(["a text"])) == 1


def test_the_command_line(bytetx: Bytetx, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    edit_json(folder / "generation_config.json", do_sample=False, max_new_tokens=5)
    (tmp_path / "prompts.txt").write_text("the quick brown fox\npacked\n")
    command = ("generate", "prompts.txt", "-m", folder)
    ran = bytetx(*command)
    assert ran.code == 0, ran.err
    assert "generation_config.json: temperature 0, max_tokens 5" in " ".join(ran.err.split())
    assert ran.rows == bytetx(*command).rows and {row["num_tokens"] for row in ran.rows} == {5}
    explicit = bytetx(
        *command, "--generation-config", "none", "--temperature", 0, "--max-tokens", 5
    )
    assert explicit.rows == ran.rows and "bytetx's own defaults" in " ".join(explicit.err.split())
    assert {row["num_tokens"] for row in bytetx(*command, "--max-tokens", 3).rows} == {3}
    assert bytetx(*command, "--generation-config", "vllm", "-o", "out.jsonl").code == 0
    assert bytetx(*command, "--generation-config", "nothing").code == 2
