"""The README's pictures, drawn from the records: rates side by side, on light and on dark pages."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.plot_gpu import draw_gpu
from benchmarks.records import Record, of_one_device, read_records
from benchmarks.theme import OURS, Theme, draw_themes
from bytetx.errors import BytetxError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches: the picture, the words above and below the bars, a bar's row, the space between panels.
_WIDTH, _HEAD, _FOOT, _ROW, _GAP = 9.6, 1.16, 0.5, 0.31, 0.42
_LEFT, _RIGHT = 1.85, 1.5  # for the names; for the ratios
_COLUMNS = (50, 96)  # points from the bars' end to the right edge of each column of ratios
_BAR = 0.7  # of a row
_NAMES = {"openvino": "OpenVINO", "openvino-nncf": "OpenVINO int8", "onnxruntime": "ONNX Runtime"}
_PANELS = (("fp32", "float32"), ("bf16", "bfloat16"))


@dataclass(frozen=True, slots=True)
class Bar:
    """One engine's tokens/s; sorted_rate where it was also measured on texts sorted by length."""

    name: str
    rate: float
    sorted_rate: float | None


def draw(records_file: Path, *, device: str | None = None) -> list[Path]:
    """Draws a file's records as .svg files beside it, for light and for dark pages; their paths.

    device: a part of the name of the device to show, where the file has records of several.
    Raises BytetxError where matplotlib is missing, or records that a picture needs.
    """
    records = of_one_device(read_records(records_file), device)
    is_cpu = any(record.suite == "cpu" for record in records)
    paths = _draw_cpu(records_file, records) if is_cpu else []
    paths += draw_gpu(records_file, records)
    if not paths:
        raise BytetxError(f"{records_file} holds no record that there is a picture of")
    return paths


def _draw_cpu(records_file: Path, every: list[Record]) -> list[Path]:
    """Draws the MiniLM cases as two .svg files beside the records' file; returns their paths."""
    records = {record.case: record for record in every if record.suite == "cpu"}
    panels = [(title, dtype, _bars(records, dtype)) for dtype, title in _PANELS]
    return draw_themes(records_file.with_suffix(""), partial(_draw, panels=panels, records=records))


def _bars(records: dict[str, Record], dtype: str) -> list[Bar]:
    """Ours first, then the rivals, fastest first; sentence-transformers sorts by itself."""
    arrival = records.get(_case(dtype))
    if arrival is None:
        raise BytetxError(
            f"no record of case {_case(dtype)} to draw; run: "
            f"python -m benchmarks cpu --record FILE --case minilm-{dtype}"
        )
    by_length = records.get(f"minilm-{dtype}-sorted")
    sorted_values = {OURS: by_length.ours, **by_length.rivals} if by_length else {}
    bars = [
        Bar(name, 1e6 / value, 1e6 / sorted_values[name] if name in sorted_values else None)
        for name, value in {OURS: arrival.ours, **arrival.rivals}.items()
    ]
    return [bars[0], *sorted(bars[1:], key=lambda bar: -bar.rate)]


def _case(dtype: str) -> str:
    return f"minilm-{dtype}-arrival"


def _draw(
    path: Path,
    theme: Theme,
    *,
    panels: list[tuple[str, str, list[Bar]]],
    records: dict[str, Record],
) -> None:
    from matplotlib.figure import Figure

    rows = [len(bars) for _, _, bars in panels]
    height = _HEAD + _FOOT + _ROW * sum(rows) + _GAP * (len(rows) - 1)  # inches
    figure = Figure(figsize=(_WIDTH, height), facecolor=theme.page)
    rates = [bar.sorted_rate or bar.rate for _, _, bars in panels for bar in bars]
    floors = [floor for _, dtype, _ in panels if (floor := records[_case(dtype)].floor)]
    widest = max(rates + [1e6 / floor for floor in floors])
    top = height - _HEAD
    for title, dtype, bars in panels:
        top -= _ROW * len(bars)
        box = (
            _LEFT / _WIDTH,
            top / height,
            1 - (_LEFT + _RIGHT) / _WIDTH,
            _ROW * len(bars) / height,
        )
        ax = figure.add_axes(box, xlim=(0, widest * 1.02))
        top -= _GAP
        _draw_bars(ax, theme, bars)
        _draw_floor(ax, theme, records[_case(dtype)].floor)
        ax.annotate(title, (0, 1), (-_LEFT * 72 + 12, 5), "axes fraction", "offset points",
                    fontsize=10.5, fontweight="bold", color=theme.muted)  # fmt: skip
        for column, words in zip(_COLUMNS, ("arrival", "sorted"), strict=True):
            ax.annotate(words, (1, 1), (column, 5), "axes fraction", "offset points",
                        ha="right", fontsize=9, color=theme.muted)  # fmt: skip
    _draw_head(figure, theme, records[_case(panels[0][1])])
    _draw_legend(figure, theme)
    figure.savefig(path, facecolor=theme.page, metadata={"Date": None})


def _draw_bars(ax: "Axes", theme: Theme, bars: list[Bar]) -> None:
    for row, bar in enumerate(bars):
        is_ours = bar.name == OURS
        end = bar.rate
        if bar.sorted_rate is not None and bar.sorted_rate > 1.03 * bar.rate:
            end = bar.sorted_rate
            ax.barh(row, end, height=_BAR, color=theme.faint)
        ax.barh(row, bar.rate, height=_BAR, color=theme.ours if is_ours else theme.rival)
        words = f"{bar.rate:,.0f}" + (f", sorted {end:,.0f}" if end > bar.rate else "")
        colour, weight = (theme.ours, "bold") if is_ours else (theme.muted, "normal")
        ax.annotate(words, (end, row), (6, 0), textcoords="offset points", va="center_baseline",
                    fontsize=9.5, color=colour, fontweight=weight, backgroundcolor=theme.page,
                    bbox={"facecolor": theme.page, "linewidth": 0, "pad": 1.5})  # fmt: skip
        if not is_ours:
            _draw_ratios(ax, theme, row, ours=bars[0], rival=bar)
    ax.set_yticks(range(len(bars)), [_NAMES.get(bar.name, bar.name) for bar in bars], fontsize=10.5)
    ax.set_ylim(len(bars) - 0.5, -0.5)
    ax.set_facecolor(theme.page)
    ax.spines[:].set_visible(False)
    ax.tick_params(axis="both", length=0, labelcolor=theme.text, pad=8)
    ax.tick_params(axis="x", labelbottom=False)
    ax.get_yticklabels()[0].set(fontweight="bold", color=theme.ours)


def _draw_ratios(ax: "Axes", theme: Theme, row: int, *, ours: Bar, rival: Bar) -> None:
    """How many times faster ours is, in the two columns right of the bars."""
    cells = [f"{ours.rate / rival.rate:.1f}×", ""]
    if ours.sorted_rate is not None and rival.sorted_rate is not None:
        cells[1] = f"{ours.sorted_rate / rival.sorted_rate:.1f}×"
    for column, cell, colour in zip(_COLUMNS, cells, (theme.text, theme.muted), strict=True):
        ax.annotate(cell, (1, row), (column, 0), ("axes fraction", "data"), "offset points",
                    ha="right", va="center_baseline", fontsize=10.5, color=colour,
                    fontweight="bold")  # fmt: skip


def _draw_floor(ax: "Axes", theme: Theme, floor: float | None) -> None:
    """A line where the layers' GEMMs and attention alone, at the measured GEMM rate, would end."""
    if floor is not None:
        ax.axvline(1e6 / floor, color=theme.muted, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0)


def _draw_head(figure: "Figure", theme: Theme, record: Record) -> None:
    shape, height = record.shape, figure.get_figheight()
    mean = float(shape["tokens"]) / float(shape["sequences"])
    figure.text(0.16 / _WIDTH, 1 - 0.36 / height, "Tokens per second, strings in, vectors out",
                fontsize=14, fontweight="bold", color=theme.text)  # fmt: skip
    words = (
        f"all-MiniLM-L6-v2 on {record.device}; {shape['sequences']} English texts of {mean:.0f} "
        "tokens"
    )
    figure.text(0.16 / _WIDTH, 1 - 0.62 / height, words, fontsize=10, color=theme.muted)
    figure.text(1 - (_RIGHT * 72 - _COLUMNS[1]) / 72 / _WIDTH, 1 - 0.78 / height,
                "bytetx is faster by", fontsize=9, ha="right", color=theme.muted)  # fmt: skip


def _draw_legend(figure: "Figure", theme: Theme) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys = [
        Patch(color=theme.rival, label="texts as they arrive"),
        Patch(color=theme.faint, label="texts sorted by length first"),
        Line2D([], [], color=theme.muted, linestyle=(0, (4, 3)), label="the machine's GEMM rate"),
    ]
    figure.legend(handles=keys, loc="lower left", bbox_to_anchor=(0, 0), ncols=3, frameon=False,
                  fontsize=9, labelcolor=theme.muted, handlelength=1.6, columnspacing=1.4,
                  borderaxespad=0.8)  # fmt: skip
