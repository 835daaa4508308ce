"""Pictures of the records: which cases they show, by which names, against which rivals."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.chart import OURS, Chart, Group, Panel, draw_chart, draw_themes
from benchmarks.records import Record, of_one_device, read_records
from bytetx.errors import BytetxError

_NAMES = {"openvino": "OpenVINO", "openvino-nncf": "OpenVINO int8", "onnxruntime": "ONNX Runtime"}
_FLOOR = (1.0, "what this GPU's measured rates allow")
_LINEAR_LAYERS = {
    "base-qkv": "768 to 2304",
    "base-attn-out": "768 to 768",
    "base-ffn-in": "768 to 3072",
    "base-ffn-out": "3072 to 768",
    "large-qkv": "1024 to 3072",
    "large-attn-out": "1024 to 1024",
    "large-ffn-in": "1024 to 4096",
    "large-ffn-out": "4096 to 1024",
}
# What follows each layer's GEMM in a BERT, of all that the suite measures at many tokens.
_EPILOGUES = {"qkv": "bias", "attn-out": "residual", "ffn-in": "gelu", "ffn-out": "residual"}
_LINEAR_TOKENS = (65536, 128)

Records = dict[str, Record]  # of one suite, by case


def draw(records_file: Path, *, device: str | None = None) -> list[Path]:
    """Draws each suite that has records and a picture as .svg files beside the records' file, for
    light and for dark pages; returns their paths.

    device: a part of the name of the device to show, where the file has records of several.
    Raises BytetxError where matplotlib is missing, or records that a picture needs.
    """
    every = of_one_device(read_records(records_file), device)
    paths: list[Path] = []
    for suite, make_chart in _CHARTS.items():
        records = {r.case: r for r in every if r.suite == suite}
        chart = make_chart(records) if records else None
        if chart is not None and any(panel.groups for panel in chart.panels):
            name = records_file.stem if suite == "cpu" else f"{records_file.stem}-{suite}"
            paths += draw_themes(records_file.with_name(name), partial(draw_chart, chart=chart))
    if not paths:
        raise BytetxError(f"{records_file} holds no record that there is a picture of")
    return paths


def _cpu(records: Records) -> Chart:
    """Tokens a second of MiniLM; sentence-transformers sorts by itself."""
    panels = []
    for dtype, title in (("fp32", "float32"), ("bf16", "bfloat16")):
        case = f"minilm-{dtype}-arrival"
        if case not in records:
            raise BytetxError(
                f"no record of case {case} to draw; run: "
                f"python -m benchmarks cpu --record FILE --case minilm-{dtype}"
            )
        arrival, by_length = records[case], records.get(f"minilm-{dtype}-sorted")
        own_sorted = _rate_bar(by_length.ours) if by_length else None
        groups = [Group(OURS, [_rate_bar(arrival.ours), None, own_sorted], ["", ""])]
        for name, value in sorted(arrival.rivals.items(), key=lambda item: item[1]):
            is_sorted = by_length is not None and name in by_length.rivals
            theirs = _rate_bar(by_length.rivals[name]) if by_length and is_sorted else None
            ratios = [_ratio(arrival, name), _ratio(by_length, name) if by_length else ""]
            groups.append(Group(_NAMES.get(name, name), [None, _rate_bar(value), theirs], ratios))
        panels.append(Panel(title, groups, 1e6 / arrival.floor if arrival.floor else None))
    shape = arrival.shape
    mean = float(shape["tokens"]) / float(shape["sequences"])
    return Chart(
        title="Tokens per second, strings in, vectors out",
        subtitle=f"all-MiniLM-L6-v2 on {arrival.device}; {shape['sequences']} English texts of "
        f"{mean:.0f} tokens",
        panels=panels,
        engines=(OURS, "texts as they arrive", "texts sorted by length first"),
        columns=("arrival", "sorted"),
        line=(0.0, "the machine's GEMM rate"),
        ratios="bytetx is faster by",
    )


def _attention(records: Records) -> Chart:
    group = partial(_floor_group, rivals=("flash-attention-2",), unit="µs")
    titles = {0: "fp16, 12 heads of 64", 1: "bf16, 16 heads of 128, causal"}
    panels = [
        Panel(title, [group(r) for r in records.values() if r.shape["causal"] == causal])
        for causal, title in titles.items()
    ]
    return Chart(
        title="Attention on packed sequences, as a fraction of what the GPU allows",
        subtitle=f"{_device(records)}; times of one call from replays of a CUDA graph",
        panels=[panel for panel in panels if panel.groups],
        engines=(OURS, "FlashAttention-2 as torch ships it"),
        columns=("FlashAttention-2",),
        line=_FLOOR,
    )


def _encoder(records: Records) -> Chart:
    sizes = {"base-": "BERT-base", "large-": "BERT-large"}
    packed = "packed torch"
    group = partial(_floor_group, rivals=(packed, "transformers"), unit="ms")

    def with_best_packed(record: Record) -> Record:
        values = [v for name, v in record.rivals.items() if name.startswith("packed-torch")]
        best = {packed: min(values)} if values else {}
        return replace(record, rivals=record.rivals | best)

    panels = [
        Panel(
            title,
            [
                group(with_best_packed(record))
                for case, record in records.items()
                if case.startswith(size) and record.dtype == "fp16"
            ],
        )
        for size, title in sizes.items()
    ]
    return Chart(
        title="BERT's layers, as a fraction of what the GPU allows",
        subtitle=f"{_device(records)}, fp16; sequences × their length in tokens",
        panels=[panel for panel in panels if panel.groups],
        engines=(OURS, "packed torch: FlashAttention-2, graph, torch.compile", "transformers"),
        columns=(packed, "transformers"),
        line=_FLOOR,
    )


def _linear(records: Records) -> Chart:
    rivals = ("cublas-unfused", "cublas")

    def panel(tokens: int) -> Panel:
        groups = []
        for layer, name in _LINEAR_LAYERS.items():
            epilogue = _EPILOGUES[layer.partition("-")[2]]
            record = records.get(f"{layer}-{tokens}-{epilogue}")
            if record is not None:
                label = f"{name}, {epilogue}"
                groups.append(_floor_group(record, rivals=rivals, unit="µs", name=label))
        return Panel(f"{tokens:,} tokens", groups)

    panels = [panel(tokens) for tokens in _LINEAR_TOKENS]
    return Chart(
        title="GEMMs with what follows them, as a fraction of what the GPU allows",
        subtitle=f"{_device(records)}, fp16; each with its bias",
        panels=[panel for panel in panels if panel.groups],
        engines=(OURS, "cuBLAS, and a second pass", "cuBLAS with the bias alone"),
        columns=("two passes", "bias alone"),
        line=_FLOOR,
    )


def _tp_layer(records: Records) -> Chart:
    models = {
        "gpt3": "GPT-3 175B",
        "llama-70b": "Llama-70B",
        "bert-large": "BERT-large",
        "gpt2-xl": "GPT-2 XL",
    }
    rivals = ("cublas-nccl", "one-gpu")
    by_size = sorted(records.values(), key=lambda record: record.shape["tp"])

    def panel(model: str, title: str) -> Panel:
        own = [r for r in by_size if r.case.startswith(f"tp{r.shape['tp']}-{model}-")]
        group = partial(_floor_group, rivals=rivals, unit="µs")
        return Panel(title, [group(r, name=f"{r.shape['tp']} GPUs, {_step(r)}") for r in own])

    panels = [panel(model, title) for model, title in models.items()]
    return Chart(
        title="One layer on several GPUs, as a fraction of what overlap can reach",
        subtitle=f"{_device(records)}, bf16; times from replays of a CUDA graph",
        panels=[panel for panel in panels if panel.groups],
        engines=(OURS, "cuBLAS, then NCCL", "bytetx on one GPU"),
        columns=("cuBLAS, NCCL", "one GPU"),
        line=(1.0, "the longer of computing and communicating alone"),
    )


def _step(record: Record) -> str:
    """Name the rows of a layer."""
    if record.shape["keys"]:
        return f"decode {record.shape['batch_size']}"
    tokens, count = int(record.shape["total_tokens"]), int(record.shape["batch_size"])
    return f"{count} × {tokens / count:,.0f} tokens"


def _text(records: Records) -> Chart | None:
    """The demo checkpoint's cases; None where another model was measured."""
    titles = {"minilm-strings": "strings in", "minilm-ids": "token ids in"}
    shown = {title: records[case] for case, title in titles.items() if case in records}
    if not shown:
        return None
    panels = []
    for title, record in shown.items():
        own = Group(OURS, [_rate_bar(record.ours), None], [""])
        theirs = [
            Group(name, [None, _rate_bar(value)], [_ratio(record, name)])
            for name, value in sorted(record.rivals.items(), key=lambda item: item[1])
        ]
        panels.append(Panel(title, [own, *theirs]))
    first = next(iter(shown.values()))
    mean = float(first.shape["tokens"]) / float(first.shape["sequences"])
    return Chart(
        title="Texts per second, to vectors on the host",
        subtitle=f"all-MiniLM-L6-v2, fp16, on {_device(records)}; English, {mean:.0f} tokens on "
        "average",
        panels=panels,
        engines=(OURS, "what else a user would run"),
        columns=("",),
        ratios="bytetx is faster by",
    )


def _floor_group(
    record: Record, *, rivals: Sequence[str], unit: str, name: str | None = None
) -> Group:
    """Bars as long as the fraction of the floor's rate that each reaches, with their times."""
    assert record.floor is not None
    values = [record.ours, *(record.rivals.get(rival) for rival in rivals)]
    bars = [(record.floor / v, f"{_number(v)} {unit}") if v else None for v in values]
    return Group(name or _lengths(record), bars, [_ratio(record, rival) for rival in rivals])


def _lengths(record: Record) -> str:
    """The sequences of a case: their number and their length in tokens."""
    batch_size, total = int(record.shape["batch_size"]), int(record.shape["total_tokens"])
    if batch_size * int(record.shape["max_seqlen"]) == total:
        return f"{batch_size} × {total // batch_size}"
    return f"{batch_size} × {total / batch_size:.0f} on average"


def _rate_bar(us_per_text: float) -> tuple[float, str]:
    rate = 1e6 / us_per_text
    return rate, f"{rate:,.0f}"


def _ratio(record: Record, rival: str) -> str:
    if rival not in record.rivals:
        return ""
    ratio = record.ratio(rival)
    return f"{ratio:.2f}×" if ratio < 2 else f"{ratio:.1f}×"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _device(records: Records) -> str:
    return next(iter(records.values())).device


_CHARTS: dict[str, Callable[[Records], Chart | None]] = {
    "cpu": _cpu,
    "attention": _attention,
    "linear": _linear,
    "encoder": _encoder,
    "text": _text,
    "tp_layer": _tp_layer,
}
