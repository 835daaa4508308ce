"""The benchmarks: texts, records, table, plots, and a whole quick run on a tiny checkpoint."""

import io
import json
import math
import shlex
import string
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from bench_record import RECORD
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import texts
from benchmarks.cli import app
from benchmarks.cpu_generate import measure_generate
from benchmarks.measure import alternate, encoder_flop
from benchmarks.memory import measure_memory
from benchmarks.plot import draw
from benchmarks.records import read_records, source_sha256, write_record
from benchmarks.rivals import load_rivals
from benchmarks.suite import Case, Measurement, Suite, is_selected, run_suite
from benchmarks.table import records_table, summary_line
from bytetx.checkpoint.spec import build_spec
from bytetx.cli import passages as prose
from bytetx.errors import BytetxError


def test_passages_are_deterministic_english_of_the_profile() -> None:
    passages = prose.english_passages(256)
    assert passages == prose.english_passages(256)
    assert passages != prose.english_passages(256, seed=1)
    assert len(set(passages)) == 256
    words = " ".join(passages).split()
    # English's commonest word is 4 to 8 % of technical prose; code and tables have none.
    assert 0.04 < words.count("the") / len(words) < 0.08
    logs = [math.log(len(passage.split())) for passage in passages]
    mean = sum(logs) / len(logs)
    sigma = math.sqrt(sum((x - mean) ** 2 for x in logs) / len(logs))
    # The standard error of sigma over 256 draws is sigma / sqrt(512) = 0.02: three of them.
    assert abs(sigma - prose.PASSAGE_TEXTS.sigma) < 0.06


def test_passages_of_one_word_and_none() -> None:
    assert prose.english_passages(0) == []
    tiny = prose.Lognormal(mean=3, sigma=0.1, lo=3, hi=3)
    assert all(len(text.split()) == 1 for text in prose.english_passages(5, lengths=tiny))


@pytest.mark.parametrize("profile", texts.PROFILES)
@pytest.mark.parametrize("total_tokens", [0, 1, 700, 4096])
def test_profiles_sum_exactly_and_stay_in_bounds(profile: str, total_tokens: int) -> None:
    lengths = texts.profile_lengths(profile, total_tokens=total_tokens)
    assert sum(lengths) == total_tokens
    assert lengths == texts.profile_lengths(profile, total_tokens=total_tokens)
    lo = min(part.lo for _, part in texts.PROFILES[profile])
    hi = max(part.hi for _, part in texts.PROFILES[profile])
    assert all(lo <= length <= hi for length in lengths[:-1])
    ids = texts.random_token_ids(lengths, vocab_size=50)
    assert [len(row) for row in ids] == lengths
    assert all(0 < token < 50 for row in ids for token in row)


def test_unknown_profile_lists_the_known() -> None:
    with pytest.raises(ValueError, match="query.*mixed.*'tweets'"):
        texts.profile_lengths("tweets", total_tokens=10)


def test_record_replaces_its_case_and_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cpu.jsonl"
    other_case = replace(RECORD, case="minilm-bf16-arrival", ours=25.0)
    other_suite = replace(RECORD, suite="attention", ours=1.0, floor=None)
    for record in (RECORD, other_case, other_suite):
        write_record(path, record)
    kept = path.read_text().splitlines()
    write_record(path, replace(other_case, ours=24.0))
    lines = path.read_text().splitlines()
    assert [lines[0], lines[2]] == [kept[0], kept[2]]
    assert json.loads(lines[1]) == asdict(replace(other_case, ours=24.0))
    assert read_records(path) == [RECORD, replace(other_case, ours=24.0), other_suite]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("line", ["{", "[]", '{"suite": "cpu"}', '{"suite": "cpu", "x": 1}'])
def test_broken_record_line_is_named_and_nothing_is_lost(tmp_path: Path, line: str) -> None:
    path = tmp_path / "cpu.jsonl"
    path.write_text(json.dumps(asdict(RECORD)) + "\n" + line + "\n")
    before = path.read_text()
    with pytest.raises(BytetxError, match=r"cpu\.jsonl:2 is no bench record"):
        write_record(path, RECORD)
    assert path.read_text() == before


def test_source_hash_follows_content_and_names_of_the_measured_code(tmp_path: Path) -> None:
    kernel, op = tmp_path / "csrc" / "cpu" / "norm.cpp", tmp_path / "bytetx" / "ops" / "norm.py"
    for file in (kernel, op):
        file.parent.mkdir(parents=True)
        file.write_text("first")
    first = source_sha256(tmp_path)
    assert len(first) == 64
    (tmp_path / "bytetx" / "cli.py").write_text("not measured code")
    (op.parent / "norm.cpython-311.pyc").write_text("not source")
    (tmp_path / "csrc" / "README.md").write_text("what was learned")
    assert source_sha256(tmp_path) == first
    op.write_text("second")
    second = source_sha256(tmp_path)
    kernel.rename(kernel.with_name("layer_norm.cpp"))
    assert len({first, second, source_sha256(tmp_path)}) == 3


def test_table_shows_ratios_rate_and_the_floors_fraction() -> None:
    memory = replace(RECORD, case="memory", unit="MiB", rivals={}, floor=None)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(records_table([RECORD, memory], width=160))
    text = console.export_text()
    for shown in ("20,000", "50 us", "80%", "200  4.00x", "125  2.50x", "50 MiB"):
        assert shown in text
    narrow = Console(width=80, record=True, file=io.StringIO())
    narrow.print(records_table([RECORD, memory], width=80))
    text = narrow.export_text()
    assert "4.00x" in text and "200" not in text and "…" not in text
    assert summary_line(RECORD).endswith("; 4.00x transformers, 2.50x sentence-transformers")
    assert summary_line(memory) == "memory: 50 MiB"


def test_ours_runs_before_each_rival() -> None:
    ran: list[str] = []
    timing = alternate(
        lambda: ran.append("ours"),
        {name: lambda name=name: ran.append(name) for name in "ab"},
        min_rounds=2,
        max_rounds=2,
        seconds=0.0,
    )
    assert ran == ["ours", "a", "ours", "b"] * 2
    assert timing.rounds == 2
    assert set(timing.rivals) == {"a", "b"}


def test_run_suite_records_each_case_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"

    def fails() -> Measurement:
        raise BytetxError("the second case breaks")

    found = Measurement(1 / 3, {"rival": 2 / 3}, None, {"m": 8}, notes=("a note",))
    cases = [Case("one", "us", "fp32", lambda: found), Case("two", "us", "fp32", fails)]
    run = run_suite(Suite("demo", "a processor", {}, cases), command="bench", record_to=path)
    record, notes = next(run)
    assert (record.ours, record.rivals, notes) == (0.3333, {"rival": 0.6667}, ("a note",))
    with pytest.raises(BytetxError, match="second case"):
        next(run)
    assert read_records(path) == [record]


def test_case_patterns() -> None:
    assert is_selected("minilm-fp32-arrival", [])
    assert is_selected("minilm-fp32-arrival", ["bf16", "fp32"])
    assert is_selected("minilm-fp32-arrival", ["minilm-*-arrival"])
    assert not is_selected("minilm-fp32-arrival", ["minilm-*-sorted"])


def test_flop_of_one_layer_by_hand() -> None:
    config = {
        "model_type": "bert",
        "hidden_size": 4,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 10,
        "max_position_embeddings": 16,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    }
    # qkv 4x12, output 4x4, FFN 4x8 and 8x4, two flop each; scores and their product with v.
    gemm = 2 * (4 * 12 + 4 * 4 + 4 * 8 + 8 * 4)
    expected = 3 * gemm + 2 * (2 * 3 * 3 * 4) + 0
    assert encoder_flop(build_spec(config), [3, 0]) == expected


def test_plots_for_light_and_dark_pages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "cpu.jsonl"
    write_record(path, RECORD)
    with pytest.raises(BytetxError, match="minilm-bf16-arrival.*--case minilm-bf16"):
        draw(path)
    for case in ("minilm-fp32-sorted", "minilm-bf16-arrival"):
        write_record(path, replace(RECORD, case=case))
    drawn = draw(path)
    assert [file.name for file in drawn] == ["cpu.svg", "cpu-dark.svg"]
    first = [file.read_bytes() for file in drawn]
    assert first[0] != first[1]
    assert [file.read_bytes() for file in draw(path)] == first


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer BERT whose WordPiece vocabulary is single characters."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    folder.mkdir()
    letters = string.ascii_lowercase + string.digits + string.punctuation
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary += [*letters, *(f"##{letter}" for letter in string.ascii_lowercase)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=2048)
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def test_quick_run_on_a_tiny_checkpoint(tiny_checkpoint: Path) -> None:
    pytest.importorskip("sentence_transformers")
    arguments = ["cpu", "--quick", "--model", str(tiny_checkpoint), "--case", "fp32-arrival"]
    result = CliRunner().invoke(app, [*arguments, "--case", "bf16-ids-mixed"])
    assert result.exit_code == 0, result.output
    assert "tiny-fp32-arrival" in result.output
    assert "tiny-bf16-ids-mixed" in result.output
    assert "x transformers" in result.output
    assert "x sentence-transformers" in result.output
    assert "cosine distance" not in result.output


def test_generation_against_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    tiny = partial(transformers.GPT2Config, n_embd=16, n_layer=2, n_head=2)
    monkeypatch.setattr(transformers, "GPT2Config", tiny)
    options = {"min_rounds": 1, "max_rounds": 1, "seconds": 0.0}
    found = measure_generate(3, 4, **options)
    assert found.notes == ()
    assert found.rivals.keys() == {"transformers"}
    assert found.shape["prompts"] == 3
    assert found.shape["prompt_tokens"] <= 3 * found.shape["max_prompt"] <= 3 * 512


def test_recorded_run_on_a_tiny_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    arguments = ["cpu", "--model", str(tiny_checkpoint), "--case", "fp32-ids-query"]
    result = CliRunner().invoke(app, [*arguments, "--record", str(path)])
    assert result.exit_code == 0, result.output
    (record,) = read_records(path)
    assert (record.suite, record.case, record.dtype) == ("cpu", "tiny-fp32-ids-query", "fp32")
    assert record.source == source_sha256()
    assert record.shape["tokens"] == 4096
    assert "transformers" in record.rivals
    words = [
        "python",
        "-m",
        "benchmarks",
        "cpu",
        "--case",
        "fp32-ids-query",
        "--model",
        str(tiny_checkpoint),
    ]
    assert record.command == shlex.join(words)


def test_memory_case_counts_what_must_be_held(tiny_checkpoint: Path) -> None:
    found = measure_memory(tiny_checkpoint, "fp32", 64)
    assert found.shape["texts"] == 64
    assert found.ours > 0
    parts = [found.shape[f"{part}_mib"] for part in ("weights", "workspace", "results")]
    assert found.floor == sum(parts)


def test_a_rival_that_does_not_load_is_noted(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    loaded = load_rivals(["transformers"], tmp_path / "nowhere", torch.float32)
    assert loaded.rivals == ()
    assert loaded.notes[0].startswith("transformers left out: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick", "--record", "x.jsonl"], "--quick measures too little"),
        (["--plot"], "add --record FILE"),
        (["--case", "t5"], "no case fits t5; the cases are: minilm-fp32-arrival"),
    ],
)
def test_wrong_options_say_what_to_do(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["cpu", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_table_of_linear_layers_has_all_of_them(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    result = CliRunner().invoke(app, ["linear", "--tune", str(table), "--case", "gpt3"])
    assert result.exit_code == 2 and "give one of them" in " ".join(result.output.split())
    assert not table.exists()


@pytest.mark.usefixtures("no_gpu")
def test_attention_suite_asks_for_a_gpu() -> None:
    result = CliRunner().invoke(app, ["attention"])
    assert result.exit_code == 1
    assert "the attention suite needs a CUDA GPU" in " ".join(result.output.split())
