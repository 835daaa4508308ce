"""Tables of records as Markdown, which docs/figures.py writes into the pages."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.records import Record

Records = Mapping[tuple[str, str], Record]  # of one device, by suite and case

_CPU_CASES = {
    "minilm-fp32-arrival": "MiniLM fp32, as they come",
    "minilm-fp32-sorted": "MiniLM fp32, sorted first",
    "minilm-bf16-arrival": "MiniLM bf16, as they come",
    "minilm-bf16-sorted": "MiniLM bf16, sorted first",
    "minilm-int8-arrival": "MiniLM int8, as they come",
    "minilm-int8-sorted": "MiniLM int8, sorted first",
    "bert-base-fp32-arrival": "BERT-base fp32, as they come",
    "bert-base-bf16-arrival": "BERT-base bf16, as they come",
}
_CPU_RIVALS = {
    "openvino": "OpenVINO",
    "onnxruntime": "ONNX Runtime",
    "sentence-transformers": "sentence-transformers",
    "transformers": "transformers",
}
_INT8_RIVALS = {"openvino": "openvino-nncf"}  # in the same column
_NAMES = {
    "flash-attention-2": "FlashAttention-2",
    "flash-attention-3": "FlashAttention-3",
    "flash-attention-3-page-16": "FlashAttention-3, pages of 16",
    "flash-attention-3-page-256": "FlashAttention-3, pages of 256",
    "packed-torch": "packed torch",
    "packed-torch-graph": "packed torch",
    "packed-torch-compiled": "packed torch",
    "sdpa": "torch's SDPA",
    "sentence-transformers-256": "sentence-transformers, batches of 256",
    "transformers-continuous": "transformers' continuous batching",
}
_UNPADDED = "sentence-transformers-fa2-"  # and the batch size


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a GPU's table.

    rivals: how the names of those compared with begin, of which the fastest stands in the line.
    Empty is every rival, so that none that is stronger can be left out.
    """

    what: str
    suite: str
    case: str
    rivals: tuple[str, ...] = ()


GPU_ROWS = (
    Row("BERT-base's layers, one text of 128", "encoder", "base-1x128"),
    Row("the same, 256 texts, lognormal around 128", "encoder", "base-ln128x256"),
    Row("the same, transformers' padded batch", "encoder", "base-ln128x256", ("transformers",)),
    Row("BERT-large's layers, 64 texts of 102 to 512", "encoder", "large-a06-512x64"),
    Row("all-MiniLM-L6-v2, English strings to vectors on the host", "text", "minilm-strings"),
    Row("the same from token ids", "text", "minilm-ids"),
    Row("one text of 128 tokens, string to vector", "latency", "minilm-text"),
    Row("attention, 2048 sequences of 9 on average", "attention", "mean-9"),
    Row("attention, 16 sequences of 4096", "attention", "dense-4096"),
    Row("attention, causal, bf16, 16 of 2048, 16 heads of 128", "attention", "causal-dense-2048"),
    Row(
        "decode attention from pages, bf16, Qwen3-0.6B, 256 sequences of 100 to 2048 keys",
        "decode",
        "decode-qwen3-0.6b-b256-ragged",
    ),
    Row("choosing 256 tokens of 151 936 by `top_p`", "decode", "sample-top-p-0.9-b256"),
    Row("Qwen3-0.6B's shape, bf16, 64 prompts, 128 tokens each", "generate", "qwen3-0.6b-64x128"),
    Row(
        "the same, transformers' continuous batching",
        "generate",
        "qwen3-0.6b-64x128",
        ("transformers-continuous",),
    ),
    Row(
        "Qwen3-0.6B's shape, bf16, 256 prompts of 100 to 1024 tokens, as many out (149 k)",
        "generate",
        "qwen3-0.6b-256",
    ),
)


def _cpu_cases(records: Records) -> list[str]:
    return [case for case in _CPU_CASES if ("cpu", case) in records]


def cpu_table(records: Records, cases: Collection[str] = tuple(_CPU_CASES)) -> str:
    """Return tokens per second of one CPU's `cases`, with the rivals' and our ratio to them."""

    def cell(record: Record, rival: str) -> str:
        name = _rival_in(record, rival)
        if name is None:
            return ""
        return f"{1e6 / record.rivals[name]:,.0f} ({ratio_words(record.ratio(name))})"

    lines = []
    for case in _cpu_cases(records):
        if case in cases:
            record = records["cpu", case]
            own = f"**{1e6 / record.ours:,.0f}**"
            lines.append([_CPU_CASES[case], own, *(cell(record, rival) for rival in _CPU_RIVALS)])
    return _table(["texts in, vectors out", "bytetx", *_CPU_RIVALS.values()], lines)


def _rival_in(record: Record, column: str) -> str | None:
    """The record's rival that stands in this column."""
    return next((n for n in (column, _INT8_RIVALS.get(column)) if n in record.rivals), None)


def _gpu_rows(records: Records, rows: Sequence[Row] = GPU_ROWS) -> list[Row]:
    return [row for row in rows if (row.suite, row.case) in records]


def gpu_table(records: Records, rows: Sequence[Row] = GPU_ROWS) -> str:
    """Return one GPU's figures of those `rows` that it has records of, each with its best rival."""
    lines = []
    for row in _gpu_rows(records, rows):
        record = records[row.suite, row.case]
        own = "" if row.rivals else f"**{_amount(record, record.ours, with_unit=True)}**"
        rival = _best_rival(record, row)
        if rival is None:
            lines.append([row.what, own, "", ""])
            continue
        value = _amount(record, record.rivals[rival], with_unit=False)
        name = _name(rival)
        words = f"{name}{':' * (',' in name)} {value}"
        lines.append([row.what, own, words, ratio_words(record.ratio(rival))])
    return _table(["what", "bytetx", "best rival", ""], lines)


def _best_rival(record: Record, row: Row) -> str | None:
    names = [name for name in record.rivals if not row.rivals or name in row.rivals]
    return min(names, key=record.rivals.__getitem__, default=None)


def _name(rival: str) -> str:
    if rival.startswith(_UNPADDED):
        size = rival.removeprefix(_UNPADDED)
        return f"sentence-transformers, FlashAttention-2 unpadded, batches of {size}"
    return _NAMES.get(rival, rival)


def _amount(record: Record, value: float, *, with_unit: bool) -> str:
    """A rate for times of one thing each, else the time, in the unit that ours is told in."""
    unit, _, thing = record.unit.partition("/")
    if thing:
        rate = 1e6 / value
        words = f"{rate / 1e3:.3g} k" if rate >= 1e3 else f"{rate:.3g}"
        return f"{words} {thing}s/s" if with_unit else words
    if unit == "us" and record.ours >= 100:
        unit, value = "ms", value / 1e3
    words = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{words} {unit.replace('us', 'µs')}" if with_unit else words


def ratio_words(ratio: float) -> str:
    """Two digits, and three from one to two, where a tenth says too little."""
    if ratio < 2:
        return f"{ratio:.2f}×"
    return f"{ratio:.1f}×" if ratio < 9.95 else f"{ratio:.0f}×"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))
