"""Records of several machines: their lines, names, pictures and the README's tables."""

from dataclasses import replace
from pathlib import Path

import pytest
from bench_record import RECORD
from paths import ROOT
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.markdown import GPU_ROWS, cpu_table, gpu_table
from benchmarks.measure import cpu_model
from benchmarks.plot import draw
from benchmarks.records import Record, read_records, write_record
from bytetx.errors import BytetxError


def two_machines(path: Path) -> None:
    for device, factor in (("AMD EPYC family 26 model 2", 1.0), ("AMD EPYC family 25 model 1", 2)):
        for case in ("minilm-fp32-arrival", "minilm-bf16-arrival"):
            ours, rivals = factor * RECORD.ours, {"transformers": 200.0 * factor**2}
            shape = RECORD.shape | {"gemm_gflops": 500 / factor}
            record = replace(RECORD, case=case, device=device, ours=ours, rivals=rivals)
            write_record(path, replace(record, shape=shape, dtype=case.split("-")[1]))


def test_a_case_has_a_line_for_each_machine(tmp_path: Path) -> None:
    path = tmp_path / "cpu.jsonl"
    two_machines(path)
    before = read_records(path)
    assert len(before) == 4 and len({record.device for record in before}) == 2
    write_record(path, replace(before[2], ours=7.0))
    assert read_records(path) == [*before[:2], replace(before[2], ours=7.0), before[3]]


def test_a_picture_shows_one_machine_and_names_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "cpu.jsonl"
    two_machines(path)
    with pytest.raises(BytetxError, match="cpu are of 2 devices.*--device.*family 26.*family 25"):
        draw(path)
    with pytest.raises(BytetxError, match="named like 'Xeon'; there are: AMD EPYC family 26"):
        draw(path, device="Xeon")
    drawn = [draw(path, device=family)[0].read_text() for family in ("family 26", "family 25")]
    assert drawn[0] != drawn[1]  # words are drawn as curves, and stand in comments
    for family, picture in zip((26, 25), drawn, strict=True):
        assert f"all-MiniLM-L6-v2 on AMD EPYC family {family} model" in picture
    longer = replace(read_records(path)[0], device="AMD EPYC family 26 model 2 bf16")
    write_record(path, longer)  # a name that another one begins with is no part of it
    assert draw(path, device="AMD EPYC family 26 model 2")[0].read_text() == drawn[0]
    arguments = ["plot", str(path), "--device", "family 25"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and path.with_suffix(".svg").read_text() == drawn[1]


def test_a_table_gives_tokens_a_second_and_ratios() -> None:
    record = replace(RECORD, rivals={"transformers": 200.0, "openvino-nncf": 60.0})
    table = cpu_table({("cpu", record.case): record})
    assert table.splitlines()[-1] == (
        "| MiniLM fp32, as they come | **20,000** | 16,667 (1.20×) |  |  | 5,000 (4.0×) |"
    )


def table_of(record: Record) -> str:
    return gpu_table({(record.suite, record.case): record})


def test_a_gpu_s_table_quotes_the_strongest_rival() -> None:
    rivals = {
        "sentence-transformers": 1000.0,
        "sentence-transformers-fa2-32": 300.0,
        "sentence-transformers-fa2-1024": 100.0,
    }
    record = replace(RECORD, suite="text", case="minilm-strings", unit="us/text", device="a GPU")
    table = table_of(replace(record, ours=12.5, rivals=rivals))
    assert table.startswith("| what | bytetx | best rival |  |\n| --- | --: |")
    assert table.endswith(
        "| **80 k texts/s** | sentence-transformers, FlashAttention-2 unpadded, batches of 1024: "
        "10 k | 8.0× |"
    )
    layers = replace(RECORD, suite="encoder", case="base-ln128x256", unit="ms", ours=9.0)
    layers = replace(layers, rivals={"transformers": 63.0, "packed-torch-compiled": 13.5})
    lines = table_of(layers).splitlines()[-2:]
    assert lines[0].endswith("| **9 ms** | packed torch 13.5 | 1.50× |")
    assert lines[1].endswith("padded batch |  | transformers 63 | 7.0× |")


def test_every_line_of_the_readme_s_gpu_table_is_a_case_of_its_suite() -> None:
    records = ROOT / "benchmarks" / "h200.jsonl"
    known = {(record.suite, record.case) for record in read_records(records)}
    assert {(row.suite, row.case) for row in GPU_ROWS} <= known


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (
            {"cpu family": 26, "model": 2, "model name": "AMD EPYC", "stepping": 1},
            "AMD EPYC family 26 model 2 stepping 1",
        ),
        (
            {
                "cpu family": 25,
                "model": 1,
                "model name": "AMD EPYC-Milan Processor",
                "stepping": 1,
            },
            "AMD EPYC-Milan Processor family 25 model 1 stepping 1",
        ),
        (
            {"cpu family": 6, "model": 143, "model name": "Intel(R) Xeon(R) CPU @ 2.60GHz"},
            "Intel(R) Xeon(R) CPU @ 2.60GHz family 6 model 143",
        ),
        (
            {"cpu family": 6, "model": 143, "model name": "Intel(R) Xeon(R) Platinum 8481C"},
            "Intel(R) Xeon(R) Platinum 8481C",
        ),
        ({"model name": "a processor"}, "a processor"),
        ({"bogomips": 50}, ""),
    ],
)
def test_processors_of_one_name_are_told_apart(lines: dict[str, object], name: str) -> None:
    cpuinfo = "".join(f"{key}\t: {value}\n" for key, value in {"processor": 0, **lines}.items())
    assert cpu_model(f"{cpuinfo}\n{cpuinfo.replace(': 0', ': 1')}") == name


def test_an_arm_processor_is_named_by_its_part() -> None:
    name = cpu_model("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n\n")
    assert name.endswith(" implementer 0x41 part 0xd4f")
