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
`floor` for the fraction of the floor, or `shape.KEY`. Figures that no record holds are marked with
a comment that says how they were measured, or what else they are:

    <!-- apart: ... -->          in a paragraph, list item or table row, for that block;
                                 on lines of its own directly above a table, for the table;
    <!-- apart section: ... -->  directly under a heading, for everything up to the next
                                 heading of the same or a higher level.

A comment in a sentence stands behind words of its line: Markdown takes a line that begins with one
as HTML and ends the paragraph before it. tests/test_docs.py fails where a generated table is stale,
where a figure is not what its record says, and where a page has a figure with neither.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import geometric_mean, mean

from benchmarks.markdown import Row, cpu_table, gpu_table, ratio_words
from benchmarks.records import Record, read_records

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# The names of machines in comments: a file of records and the device in it.
MACHINES = {
    "cpu-avx512": ("cpu", "AMD EPYC family 25 model 17 stepping 1, 2 threads, AVX512 bf16"),
    "cpu-avx512-fast": ("cpu", "AMD EPYC, 2 threads, AVX512 bf16"),
    "cpu-avx512-serve": ("cpu", "AMD EPYC family 26 model 2 stepping 1, 2 threads, AVX512 bf16"),
    "cpu-xeon": (
        "cpu",
        "Intel(R) Xeon(R) Processor family 6 model 207 stepping 2, 2 threads, AVX512 bf16",
    ),
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
    Row("BERT-base's layers, 256 texts, 128 tokens on average", "encoder", "base-ln128x256"),
    Row("attention, 2048 sequences of 9 tokens on average", "attention", "mean-9"),
)
_OURS = {
    "Model.embed",
    "one-gpu",
    "bytetx-nccl",
    "ours-fp16",
    "ours-bf16",
    "without adapters",
}  # other ways to run bytetx, no rivals


_NO: Mapping[str, str] = {}
_FA = {"flash-attention-2": "FlashAttention-2", "flash-attention-3": "FlashAttention-3"}
_FA_PAGES = {
    "flash-attention-3-page-16": "FlashAttention-3, pages of 16",
    "flash-attention-3-page-256": "pages of 256",
}
_DECODE = {"flash-attention-3-page-256": "FlashAttention-3, pages of 256", "sdpa": "SDPA"}
_ADAPTERS = {"without adapters": "without adapters", "peft": "peft"}
_PROMPTS = "(prefill|chunks|mixed)-.*"
_CUBLAS = {"cublas": "cuBLAS, bias alone"}
_UNFUSED = {"cublas-unfused": "`F.linear`, then `F.gelu`"}
_COMMUNICATION = ("ag_gemm", "gemm_rs", "gemm_ar")


def _behind(machine: str) -> str:
    """Every case in which a rival is faster by more than two engines of the same kernels differ."""
    lines = ["| suite | case | rival | its time over ours |", "|---|---|---|--:|"]
    for (suite, case), record in sorted(records(machine).items()):
        rival = strongest(record)
        if rival is not None and record.ratio(rival) < 0.98 and not suite.endswith("-triton"):
            lines.append(f"| `{suite}` | `{case}` | {rival} | {record.ratio(rival):.2f} |")
    return "\n".join(lines)


def _spread(machine: str, suites: Sequence[str] = ()) -> str:
    """For each suite, our time over that of the strongest rival: least, geometric mean, most.

    suites: those to list, or all but Triton's where it is empty.
    """
    lines = [
        "| suite | cases | least | mean | most | case of the most |",
        "|---|--:|--:|--:|--:|---|",
    ]
    every = sorted({suite for suite, _ in records(machine) if not suite.endswith("-triton")})
    for suite in suites or every:
        shares = {
            case: 1 / record.ratio(rival)
            for (of, case), record in records(machine).items()
            if of == suite and (rival := strongest(record)) is not None
        }
        if shares:
            worst = max(shares, key=shares.__getitem__)
            middle = geometric_mean(shares.values())
            lines.append(
                f"| `{suite}` | {len(shares)} | {min(shares.values()):.2f} | {middle:.2f} "
                f"| {shares[worst]:.2f} | `{worst}` |"
            )
    return "\n".join(lines)


def _cases(machine: str, suite: str, cases: str = ".*", rivals: Mapping[str, str] = _NO) -> str:
    """The records of a suite: our time, the fraction of the floor, and our ratio to rivals.

    cases: a pattern of the cases to list. rivals: those to list, with the heads of their columns;
    where it is empty, the strongest of each case.
    """
    found = [
        (case, record)
        for (of, case), record in records(machine).items()
        if of == suite and re.fullmatch(cases, case)
    ]
    unit = found[0][1].unit.replace("us", "µs")
    heads = list(rivals.values()) or ["strongest rival", "its time over ours"]
    lines = [f"| case | {unit} | of the floor | {' | '.join(heads)} |"]
    lines.append("|---|--:|--:|" + ("--:|" * len(heads) if rivals else "---|--:|"))
    for case, record in found:
        assert record.unit == found[0][1].unit, f"{suite} has several units"
        best = strongest(record)
        names = list(rivals) or [best or ""]
        ratios = [
            ratio_words(record.ratio(name)) if name in record.rivals else "" for name in names
        ]
        cells = ratios if rivals else [*names, *ratios]
        floor = "" if record.floor_fraction is None else f"{record.floor_fraction:.2f}"
        lines.append(f"| `{case}` | {_three_digits(record.ours)} | {floor} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


_GRIDS = ("one", "data2", "z2", "y2", "x2")


def _grids(machine: str) -> str:
    """Milliseconds of `embed` on each grid, measured / planned, and how good the plans are."""
    lines = [
        "| case | one GPU | `data2` | `z2` | `y2` | `x2` | planner's first |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    gaps: list[float] = []
    errors: list[float] = []
    for (suite, case), record in sorted(records(machine).items(), key=_model_and_tokens):
        if suite == "grids":
            chosen = str(record.shape["chosen"])
            times = {**record.rivals, chosen: record.ours}
            planned = {grid: float(record.shape[f"planned_{grid}_ms"]) for grid in _GRIDS}
            cells = [f"{_three_digits(times[g])} / {_three_digits(planned[g])}" for g in _GRIDS]
            fastest = str(record.shape["fastest"])
            gaps.append(record.ours / times[fastest] - 1)
            errors += [abs(planned[grid] / times[grid] - 1) for grid in _GRIDS]
            behind = f", `{fastest}` is {gaps[-1]:.1%} faster" if fastest != chosen else ""
            lines.append(f"| `{case}` | {' | '.join(cells)} | `{chosen}`{behind} |")
    within = [sum(gap <= limit for gap in gaps) for limit in (0, 0.01, 0.03)]
    lines += [
        "",
        f"The planner's mean error over these {len(errors)} times is {mean(errors):.1%}. Its first "
        f"grid is the fastest in {within[0]} of {len(gaps)} cases, within 1 % of it in {within[1]} "
        f"and within 3 % in {within[2]}.",
    ]
    return "\n".join(lines)


# Rows of the page that says how many GPUs a load needs: suite, case, and what the case is.
_SIZES = (
    ("text", "minilm-strings", "all-MiniLM-L6-v2's shape, English strings"),
    ("encoder", "base-mean-64x1024", "BERT-base's layers"),
    ("encoder", "base-ln128x256", "BERT-base's layers"),
    ("encoder", "base-a06-512x64", "BERT-base's layers"),
    ("encoder", "large-ln128x256", "BERT-large's layers"),
    ("encoder", "large-ln128x256-fp8", "BERT-large's layers, FP8"),
    ("encoder", "modernbert-base-ln128x256", "ModernBERT-base"),
    ("encoder", "modernbert-large-ln128x256", "ModernBERT-large"),
    ("encoder", "deberta-v3-base-ln128x256", "DeBERTa-v3-base"),
)
_CPU_SIZES = (
    *((f"minilm-{dtype}-arrival", f"all-MiniLM-L6-v2, {dtype}") for dtype in ("fp32", "bf16")),
    ("minilm-int8-arrival", "all-MiniLM-L6-v2, int8"),
    *((f"bert-base-{dtype}-arrival", f"BERT-base, {dtype}") for dtype in ("fp32", "bf16")),
)


def _gpu_sizes(machines: Sequence[str]) -> str:
    """Texts and tokens a second of one GPU, by model and length."""
    heads = [f"{name.upper()}: texts/s | tokens/s" for name in machines]
    lines = [f"| model | tokens of a text | {' | '.join(heads)} |"]
    lines.append(f"|---|--:|{'--:|--:|' * len(machines)}")
    for suite, case, title in _SIZES:
        cells = []
        tokens = texts = 1.0
        for machine in machines:
            record = records(machine).get((suite, case))
            if record is None:
                cells += ["", ""]
                continue
            texts = float(record.shape.get("batch_size") or record.shape["sequences"])
            tokens = float(record.shape.get("total_tokens") or record.shape["tokens"])
            seconds = record.ours * _SECONDS[record.unit.partition("/")[0]]
            seconds *= texts if record.unit.endswith("/text") else 1
            cells += [_two_digits(texts / seconds), _two_digits(tokens / seconds)]
        lines.append(f"| {title} | {tokens / texts:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cpu_sizes(machines: Sequence[str]) -> str:
    """Tokens a second of two threads of a CPU, texts in the order of their arrival."""
    heads = [MACHINES[name][1].replace(" stepping 1", "") for name in machines]
    lines = [f"| model, tokens/s | {' | '.join(heads)} |", f"|---|{'--:|' * len(heads)}"]
    for case, title in _CPU_SIZES:
        found = (records(machine).get(("cpu", case)) for machine in machines)
        cells = ["" if one is None else _two_digits(1e6 / one.ours) for one in found]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}"


def _model_and_tokens(entry: tuple[tuple[str, str], Record]) -> tuple[str, int, str]:
    (_, case), _ = entry
    model, lengths, tokens = case.rsplit("-", 2)
    return model, int(tokens), lengths


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
    "2xh100-grids": lambda: _grids("2xh100"),
    "h100-communication": lambda: _spread("h100", _COMMUNICATION),
    "h200-communication": lambda: _spread("h200", _COMMUNICATION),
    "h200-attention": lambda: _cases("h200", "attention", rivals=_FA),
    "h200-decode": lambda: _cases("h200", "decode", "decode-.*-b(1|16|256)-.*", _DECODE),
    "h100-prompts": lambda: _cases("h100", "decode", _PROMPTS, _FA_PAGES),
    "h200-prompts": lambda: _cases("h200", "decode", _PROMPTS, _FA_PAGES),
    "h200-sample": lambda: _cases("h200", "decode", "sample-.*"),
    "h100-residual": lambda: _cases("h100", "linear", ".*-(65536|8192)-residual", _CUBLAS),
    "h200-norm": lambda: _cases("h200", "norm"),
    "h200-families": lambda: _cases("h200", "families"),
    "h200-adapters": lambda: _cases("h200", "adapters", rivals=_ADAPTERS),
    "h100-maxsim": lambda: _cases("h100", "maxsim"),
    "h200-maxsim": lambda: _cases("h200", "maxsim"),
    "h200-triton-attention": lambda: _cases("h200", "attention-triton"),
    "h200-triton-prompts": lambda: _cases("h200", "decode-triton", _PROMPTS),
    "h200-triton-gelu": lambda: _cases("h200", "linear-triton", ".*-gelu", _UNFUSED),
    "gpu-sizes": lambda: _gpu_sizes(("h200", "h100")),
    "cpu-sizes": lambda: _cpu_sizes(("cpu-avx512-fast", "cpu-avx512", "cpu-avx2")),
    "h200-triton-encoder": lambda: _cases("h200", "encoder-triton"),
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
_UNIT = r"texts/s|tokens/s|requests/s|µs|us|ms|s|×|times|%|MiB"
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

_FIGURE = re.compile(
    rf"(?<![\w.^-])({_NUMBER})(?:\*\*)?"
    r"(?:×|x|[ \u202f]?(?:texts/s|tokens/s|requests/s|µs|us|ms|s|%|MiB|MB|GB|GB/s|TB/s|TFLOP/s"
    r"|GFLOP/s|(?:tokens|texts|requests) (?:a|per) second|times as|times faster))(?![\w/]| ?\d)"
)
_CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_REASON = r"\s+(?!-->)(?:(?!-->).)+-->"  # a mark without a reason is none
_APART = re.compile(rf"<!-- apart:{_REASON}", re.DOTALL)
_APART_TABLE = re.compile(rf"^ *<!-- apart:(?s:{_REASON})\n(?: *\|.*(?:\n|\Z))+", re.MULTILINE)
_APART_SECTION = re.compile(rf"\s*<!-- apart section:{_REASON}", re.DOTALL)
_HEADING = re.compile(r"^(#+) .*$", re.MULTILINE)


def untied_figures(text: str) -> Iterator[str]:
    """Figures of a page with neither a record nor a word on how they were measured apart."""
    text = _APART_TABLE.sub("", _without_apart_sections(_CODE.sub("", _BLOCK.sub("", text))))
    for block in re.split(r"\n\s*\n|\n(?= *[|*-] ?)", text):
        if not _APART.search(block):
            bare = re.sub(r"<!--.*?-->", "", _TIED.sub("", block), flags=re.DOTALL)
            yield from (found[0] for found in _FIGURE.finditer(bare))


def _without_apart_sections(text: str) -> str:
    """The page without those sections, subsections included, that a mark exempts as a whole."""
    headings = list(_HEADING.finditer(text))
    starts = [heading.start() for heading in headings]
    kept = [text[: starts[0]] if starts else text]
    exempt = 0  # the level of the heading whose section is left out, 0 for none
    for heading, end in zip(headings, [*starts, len(text)][1:], strict=True):
        level = len(heading[1])
        if exempt and level > exempt:
            continue
        exempt = level if _APART_SECTION.match(text, heading.end()) else 0
        if not exempt:
            kept.append(text[heading.start() : end])
    return "".join(kept)


def main(pages: Sequence[Path] = PAGES) -> None:
    """Write the generated tables of all pages again."""
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if (new := with_tables(text)) != text:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
