"""Ties the figures of README.md and docs/ to the records in benchmarks/.

    python docs/figures.py

writes the generated tables again, each between two marker lines:

    <!-- figures: begin NAME -->
    <!-- figures: end -->

NAME is a key of TABLES below. A figure in a sentence is followed by a comment that names its
record:

    BERT-base takes 0.262 ms<!-- h200 encoder/base-1x128 --> per text, 1.7×<!-- h200
    encoder/base-1x128 best --> as fast as the strongest rival.

The comment is MACHINE SUITE/CASE and what of the record is meant: nothing for our value, a rival's
name for its value, `best` for our ratio to the strongest rival, `x RIVAL` for that to one rival,
`floor` for the fraction of the floor, or `shape.KEY`. Figures that no record holds stand in a
paragraph, list or table row with a comment that begins with `apart:` and says how they were
measured. tests/test_docs.py fails where a generated table is stale, where a figure is not what its
record says, and where a page of STRICT has a figure with neither.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import geometric_mean

from bytetx.bench.markdown import Row, cpu_table, gpu_table
from bytetx.bench.records import Record, read_records

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# The names of machines in comments: a file of records and the device in it.
MACHINES = {
    "cpu-avx512": ("cpu", "AMD EPYC family 25 model 17 stepping 1, 2 threads, AVX512 bf16"),
    "cpu-avx512-fast": ("cpu", "AMD EPYC, 2 threads, AVX512 bf16"),
    "cpu-avx512-serve": ("cpu", "AMD EPYC family 26 model 2 stepping 1, 2 threads, AVX512 bf16"),
    "cpu-avx2": ("cpu", "AMD EPYC family 25 model 1 stepping 1, 2 threads, AVX2"),
    "h100": ("h100", "NVIDIA H100 80GB HBM3"),
    "2xh100": ("h100", "2 x NVIDIA H100 80GB HBM3"),
    "h200": ("h200", "NVIDIA H200"),
}

Records = Mapping[tuple[str, str], Record]


@cache
def records(machine: str) -> Records:
    """The records of a machine of MACHINES, by suite and case."""
    file, device = MACHINES[machine]
    found = read_records(BENCHMARKS / f"{file}.jsonl")
    return {(r.suite, r.case): r for r in found if r.device == device}


# ---- generated tables

_CPU_README = (
    "minilm-fp32-arrival",
    "minilm-bf16-arrival",
    "minilm-int8-arrival",
    "bert-base-fp32-arrival",
)
_GPU_README = (
    Row("English strings to vectors, all-MiniLM-L6-v2's shape", "text", "minilm-strings"),
    Row("one text of 128 tokens, string to vector, the same", "latency", "minilm-text"),
    Row("BERT-base's layers, 256 texts of 128 tokens on average", "encoder", "base-ln128x256"),
    Row("attention, 2048 sequences of 9 tokens on average", "attention", "mean-9"),
)
_OURS = {
    "Model.embed",
    "one-gpu",
    "bytetx-nccl",
    "ours-fp16",
}  # other ways to run bytetx, no rivals


def _behind(machine: str) -> str:
    """Every case in which a rival is faster by more than two engines of the same kernels differ."""
    lines = ["| suite | case | rival | its time over ours |", "|---|---|---|--:|"]
    for (suite, case), record in sorted(records(machine).items()):
        rival = strongest(record)
        if rival is not None and record.ratio(rival) < 0.98 and not suite.endswith("-triton"):
            lines.append(f"| `{suite}` | `{case}` | {rival} | {record.ratio(rival):.2f} |")
    return "\n".join(lines)


def _spread(machine: str) -> str:
    """For each suite, our time over that of the strongest rival: least, geometric mean, most."""
    lines = [
        "| suite | cases | least | mean | most | case of the most |",
        "|---|--:|--:|--:|--:|---|",
    ]
    suites = sorted({suite for suite, _ in records(machine) if not suite.endswith("-triton")})
    for suite in suites:
        shares = {
            case: 1 / record.ratio(rival)
            for (of, case), record in records(machine).items()
            if of == suite and (rival := strongest(record)) is not None
        }
        if shares:
            worst = max(shares, key=shares.__getitem__)
            mean = geometric_mean(shares.values())
            lines.append(
                f"| `{suite}` | {len(shares)} | {min(shares.values()):.2f} | {mean:.2f} "
                f"| {shares[worst]:.2f} | `{worst}` |"
            )
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "readme-cpu": lambda: cpu_table(records("cpu-avx512"), _CPU_README),
    "readme-gpu": lambda: gpu_table(records("h200"), _GPU_README),
    "cpu-avx512": lambda: cpu_table(records("cpu-avx512")),
    "cpu-avx512-fast": lambda: cpu_table(records("cpu-avx512-fast")),
    "cpu-avx2": lambda: cpu_table(records("cpu-avx2")),
    "h100": lambda: gpu_table(records("h100")),
    "h200": lambda: gpu_table(records("h200")),
    "h100-spread": lambda: _spread("h100"),
    "h200-spread": lambda: _spread("h200"),
    "h100-behind": lambda: _behind("h100"),
    "h200-behind": lambda: _behind("h200"),
}

_BLOCK = re.compile(r"(<!-- figures: begin ([\w-]+) -->\n)(.*?)(<!-- figures: end -->)", re.DOTALL)


def strongest(record: Record) -> str | None:
    """The name of the fastest rival of a record, or None where it has no rival."""
    names = (name for name in record.rivals if name not in _OURS)
    return min(names, key=record.rivals.__getitem__, default=None)


def with_tables(text: str) -> str:
    """The text of a page with every generated table written again."""
    return _BLOCK.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[4]}", text)


# ---- figures in sentences

_NUMBER = r"\d+(?:[ \u202f,]\d{3})*(?:\.\d+)?"
_UNIT = r"texts/s|tokens/s|µs|us|ms|s|×|times|%|MiB"
_TIED = re.compile(
    rf"({_NUMBER})(?:\*\*)?[ \u202f]?({_UNIT})?(?:\*\*)?"
    r"<!--\s+([\w-]+)\s+([\w.-]+)/([\w.*-]+)(?:\s+([^>]+?))?\s+-->"
)
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a page and the value of the record that its comment names."""

    shown: str
    value: float
    place: str

    @property
    def is_true(self) -> bool:
        """Whether `shown` is `value` rounded to as many digits as `shown` has."""
        plain = re.sub(r"[ \u202f,]", "", self.shown)
        decimals = len(plain.partition(".")[2])
        zeros = 0 if decimals else len(plain) - len(plain.rstrip("0"))
        step = 10.0 ** (-decimals or zeros)
        return abs(float(plain) - self.value) <= 0.5000001 * step


def tied_figures(text: str) -> Iterator[Figure]:
    """The figures of a page that name a record; KeyError where there is no such record."""
    for found in _TIED.finditer(text):
        number, unit, machine, suite, case, what = found.groups()
        record = records(machine)[suite, case]
        value = _value(record, " ".join((what or "").split()), unit)
        yield Figure(number, value, f"{machine} {suite}/{case} {what or ''}".strip())


def _value(record: Record, what: str, unit: str | None) -> float:
    if what == "floor":
        assert record.floor_fraction is not None, f"{record.case} has no floor"
        return record.floor_fraction
    if what.startswith("shape."):
        return float(record.shape[what.removeprefix("shape.")])
    if what == "best":
        rival = strongest(record)
        assert rival is not None, f"{record.case} has no rival"
        return record.ratio(rival)
    if what.startswith("x "):
        return record.ratio(what.removeprefix("x "))
    value = record.rivals[what] if what else record.ours
    kind, _, thing = record.unit.partition("/")
    if unit is None or unit == record.unit or kind not in _SECONDS:
        return value
    seconds = value * _SECONDS[kind]
    return 1 / seconds if unit == f"{thing}s/s" else seconds / _SECONDS[unit]


# ---- figures that name nothing

STRICT = [ROOT / "README.md", ROOT / "docs" / "performance.md"]
_FIGURE = re.compile(
    rf"(?<![\w.-])({_NUMBER})(?:\*\*)?[ \u202f]?"
    r"(?:texts/s|tokens/s|µs|us|ms|s|×|%|MiB|MB|GB|TFLOP/s|GFLOP/s"
    r"|(?:tokens|texts|requests) (?:a|per) second|times as|times faster)(?![\w/]| ?\d)"
)
_CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def untied_figures(text: str) -> Iterator[str]:
    """Figures of a page with neither a record nor a word on how they were measured apart."""
    text = _CODE.sub("", _BLOCK.sub("", text))
    for block in re.split(r"\n\s*\n|\n(?=[|*-] ?)", text):
        if "<!-- apart:" not in block:
            bare = re.sub(r"<!--.*?-->", "", _TIED.sub("", block), flags=re.DOTALL)
            yield from (found[0] for found in _FIGURE.finditer(bare))


def main(pages: Sequence[Path] = PAGES) -> None:
    """Write the generated tables of all pages again."""
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if (new := with_tables(text)) != text:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
