"""bytetx generate: prompts in files, answers in jsonl and parquet, every option."""

import json
import re
from pathlib import Path

import pyarrow.parquet
import pytest
from chat_templates import TEMPLATE
from checkpoints import save_causal
from cli_runs import Bytetx

import bytetx as api
from bytetx.sampling_params import SamplingParams

PROMPTS = ["the quick brown fox", "packed", "no pad token is computed"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_causal(tmp_path_factory.mktemp("causal"), kind="bytes")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.feature("Command line", "`bytetx generate`")
def test_a_file_of_prompts(bytetx: Bytetx, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n")
    ran = bytetx(
        *("generate", "prompts.txt", "-m", folder, "--temperature", 0, "--max-tokens", 7),
        *("--kv-cache-tokens", 80, "-o", "out.jsonl"),
    )
    assert ran.code == 0, ran.err
    wanted = api.load(folder).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=7))
    found = rows(tmp_path / "out.jsonl")
    for row, answer in zip(found[:-1], wanted, strict=True):
        assert row["text"] == answer.text and row["finish_reason"] == answer.finish_reason
        assert row["num_prompt_tokens"] == answer.num_prompt_tokens
        assert row["num_tokens"] == len(answer.token_ids)
    assert "weights" in ran.err and "(80 tokens)" in ran.err


def test_keys_and_values_in_fp8(bytetx: Bytetx, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    command = ("generate", "prompts.txt", "-m", folder, "--temperature", 0, "--max-tokens", 7)
    ran = bytetx(*command, "--kv-cache-dtype", "fp8", "-o", "out.jsonl")
    assert ran.code == 0, ran.err
    model = api.load(folder, kv_cache_dtype="fp8")
    wanted = model.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=7))
    found = rows(tmp_path / "out.jsonl")
    assert [row["text"] for row in found] == [answer.text for answer in wanted]
    wrong = bytetx(*command, "--kv-cache-dtype", "int8")
    assert wrong.code != 0 and "kv_cache_dtype must be auto" in wrong.err


def test_options_of_the_chat_template(bytetx: Bytetx, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    chat = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "is"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"text": chat}))
    command = ("generate", "chats.jsonl", "-m", folder, "--temperature", 0, "--max-tokens", 5)
    model, params = api.load(folder), SamplingParams(temperature=0, max_tokens=5)
    lengths = set()
    for given in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        ran = bytetx(*command, "--chat-template-kwargs", json.dumps(given))
        wanted = model.generate([chat], params, chat_template_kwargs=given)[0]
        assert ran.rows[0]["num_prompt_tokens"] == wanted.num_prompt_tokens
        assert ran.rows[0]["text"] == wanted.text
        lengths.add(wanted.num_prompt_tokens)
    assert len(lengths) == 3
    for wrong, says in (
        ("{", "is no JSON"),
        ("[]", "must be a JSON object"),
        ('{"messages": []}', "takes no messages"),
    ):
        ran = bytetx(*command, "--chat-template-kwargs", wrong)
        assert ran.code in (1, 2) and says in ran.err and "Traceback" not in ran.err


def test_drafts_change_no_answer(bytetx: Bytetx, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    command = ("generate", "prompts.txt", "-m", folder, "--temperature", 0, "--max-tokens", 40)
    plain = bytetx(*command)
    ran = bytetx(*command, "--num-speculative-tokens", 4)
    assert ran.code == 0 and ran.rows == plain.rows
    assert "drafts of at most 4 tokens" in ran.err and "drafts" not in plain.err
    assert bytetx(*command, "--num-speculative-tokens", 33).code == 2


def test_sampling_options(bytetx: Bytetx, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    options = {"temperature": 1.5, "top_p": 0.9, "top_k": 30, "seed": 3, "max_tokens": 12}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    wanted = api.load(folder).generate(PROMPTS, SamplingParams(**options))
    ran = bytetx("generate", "prompts.txt", "-m", folder, *given)
    assert [row["text"] for row in ran.rows] == [answer.text for answer in wanted]
    other = bytetx("generate", "prompts.txt", "-m", folder, *given, "--seed", 4)
    assert [row["text"] for row in other.rows] != [row["text"] for row in ran.rows]
    stop = wanted[0].text[1:3]
    ran = bytetx("generate", "prompts.txt", "-m", folder, *given, "--stop", stop, "--stop", "none")
    assert ran.rows[0]["finish_reason"] == "stop" and stop not in ran.rows[0]["text"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.3),
        ("top_k", 3),
        ("min_p", 0.4),
        ("repetition_penalty", 3.0),
        ("presence_penalty", 2.0),
        ("frequency_penalty", -2.0),
    ],
)
def test_each_sampling_option_is_the_parameter(
    bytetx: Bytetx,  # noqa: F811
    folder: Path,
    tmp_path: Path,
    name: str,
    value: float,
) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    shared = {"seed": 3, "max_tokens": 12}
    command = ("generate", "prompts.txt", "-m", folder, "--seed", 3, "--max-tokens", 12)
    ran = bytetx(*command, f"--{name.replace('_', '-')}={value}")
    model = api.load(folder)
    wanted = model.generate(PROMPTS, SamplingParams(**{name: value}, **shared))
    plain = model.generate(PROMPTS, SamplingParams(**shared))
    texts = [row["text"] for row in ran.rows]
    assert texts == [answer.text for answer in wanted] != [answer.text for answer in plain]


def test_all_tokens_by_top_k_of_minus_one(
    bytetx: Bytetx,  # noqa: F811
    folder: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    command = ("generate", "prompts.txt", "-m", folder, "--seed", 3, "--max-tokens", 12)
    assert bytetx(*command, "--top-k", -1).rows == bytetx(*command).rows


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--top-p=0", "top_p must be a number in (0, 1], got 0.0"),
        ("--top-p=1.5", "top_p must be a number in (0, 1], got 1.5"),
        ("--top-k=-2", "top_k must be an integer, at least 1, or 0 or -1, which keep all, got -2"),
        ("--min-p=2", "min_p must be a number in [0, 1], got 2.0"),
        ("--temperature=-1", "temperature must be a number in [0, 2], got -1.0"),
        ("--repetition-penalty=0", "repetition_penalty must be a finite number above 0, got 0.0"),
        ("--presence-penalty=3", "presence_penalty must be a number in [-2, 2], got 3.0"),
        ("--frequency-penalty=-3", "frequency_penalty must be a number in [-2, 2], got -3.0"),
        ("--seed=18446744073709551616", "seed must be an integer"),
    ],
)
def test_an_option_beyond_its_range_is_wrong_usage(
    bytetx: Bytetx,  # noqa: F811
    folder: Path,
    tmp_path: Path,
    option: str,
    message: str,
) -> None:
    (tmp_path / "prompts.txt").write_text("a prompt\n")
    ran = bytetx("generate", "prompts.txt", "-m", folder, option)
    assert ran.code == 2
    assert message in " ".join(ran.err.split())


def test_chats_and_what_is_wrong_with_a_line(
    bytetx: Bytetx,  # noqa: F811
    folder: Path,
    tmp_path: Path,
) -> None:
    chat = [{"role": "user", "content": "hello"}]
    lines = [{"m": chat}, {"m": [{"role": "user"}]}, {"m": [5, 6]}, {"m": [7] * 200}, {"m": 3}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = ("generate", "chats.jsonl", "-c", "m", "-m", folder, "--temperature", 0)
    ran = bytetx(*command, "--max-tokens", 5)
    assert ran.code == 0
    model, params = api.load(folder), SamplingParams(temperature=0, max_tokens=5)
    assert ran.rows[0]["text"] == model.generate([chat], params)[0].text
    assert ran.rows[2]["text"] == model.generate([[5, 6]], params)[0].text
    errors = [row.get("error", "") for row in ran.rows]
    assert "message 0 of the chat" in errors[1] and "at most 96" in errors[3]
    assert "chats.jsonl line 5" in errors[4] and "truncate" not in "".join(errors)
    assert bytetx(*command, "--truncate").code == 2
    assert bytetx(*command, "-c", "n").code == 2
    assert bytetx(*command, "--top-p", 1.5).code == 2


def test_resume_and_parquet(bytetx: Bytetx, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    command = ("generate", "prompts.txt", "-m", folder, "--seed", 5, "--max-tokens", 6)
    assert bytetx(*command, "-o", "out.parquet").code == 0
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["text"] for row in table] == [row["text"] for row in bytetx(*command).rows]
    assert bytetx(*command, "-o", "out.parquet", "--resume").code == 0
    score = bytetx("score", "prompts.txt", "-m", folder, "-o", "scores.parquet")
    assert score.code == 0, score.err
    assert len(pyarrow.parquet.read_table(tmp_path / "scores.parquet")) == len(PROMPTS)


@pytest.mark.feature("Command line", "`bytetx generate` by a schema, a regex or a choice")
def test_the_form_of_answers(bytetx: Bytetx, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "prompts.txt").write_text("a fox\nthe dog\n")
    (tmp_path / "schema.json").write_text('{"type": "array", "items": {"enum": [1, 2]}}')
    command = ("generate", "prompts.txt", "-m", folder, "--max-tokens", 60)
    for options, fits in (
        (["--json-schema=schema.json", "--temperature=0"], r"\[[12,\s]*\]?"),
        (["--regex=[a-c]{3}"], "[a-c]{3}"),
        (["--choice=yes", "--choice=no"], "yes|no"),
    ):
        texts = [row["text"] for row in bytetx(*command, *options).rows]
        assert len(texts) == 2 and all(re.fullmatch(fits, text) for text in texts), texts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--regex=a", "--choice=b"], "exclude each other"),
        (["--json-schema=nowhere.json"], "nowhere.json cannot be read"),
        (["--regex="], "structured_outputs.regex must be a text that is not empty"),
    ],
)
def test_two_forms_or_no_file_are_wrong_usage(
    bytetx: Bytetx,  # noqa: F811
    folder: Path,
    tmp_path: Path,
    options: list[str],
    words: str,
) -> None:
    (tmp_path / "prompts.txt").write_text("a fox\n")
    ran = bytetx("generate", "prompts.txt", "-m", folder, *options)
    assert ran.code == 2 and words in " ".join(ran.err.split()), ran.err
