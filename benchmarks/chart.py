"""A picture of groups of bars, ours and its rivals' side by side, with ratios at the right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bytetx.errors import BytetxError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = "bytetx"


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one picture; GitHub's own page and text colours, so that it sits in the page."""

    suffix: str
    page: str
    text: str
    muted: str
    ours: str
    rival: str
    second: str  # another rival
    faint: str


LIGHT = Theme("", "#ffffff", "#1f2328", "#59636e", "#0969da", "#8c959f", "#c6cdd5", "#d8dee4")
DARK = Theme("-dark", "#0d1117", "#f0f6fc", "#9198a1", "#4493f8", "#6e7681", "#424a53", "#2b3138")


def draw_themes(stem: Path, draw: Callable[[Path, Theme], None]) -> list[Path]:
    """Calls draw(path, theme) for STEM.svg and STEM-dark.svg, and returns the two paths.

    Raises BytetxError where matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise BytetxError("plots need matplotlib: pip install matplotlib") from error
    paths = []
    # A fixed salt keeps the ids, and so the file, the same for the same records.
    with matplotlib.rc_context({"svg.hashsalt": OURS, "font.family": "DejaVu Sans"}):
        for theme in (LIGHT, DARK):
            path = stem.with_name(f"{stem.name}{theme.suffix}.svg")
            draw(path, theme)
            paths.append(path)
    return paths


# Inches: the picture, the words above and below the bars, a bar, the space after a group and
# between panels.
_WIDTH, _HEAD, _FOOT, _BAR, _AFTER_GROUP, _GAP = 9.6, 1.16, 0.5, 0.165, 0.115, 0.42
_LEFT, _MARGIN, _COLUMN = 2.05, 0.17, 0.98  # for the groups' names; right of, and for, the ratios
_WORDS = 0.75  # for the words behind the longest bar


@dataclass(frozen=True, slots=True)
class Group:
    """One case: its name; (length, words) of each engine's bar, None where it has none; ratios."""

    name: str
    bars: Sequence[tuple[float, str] | None]
    ratios: Sequence[str]


@dataclass(frozen=True, slots=True)
class Panel:
    """Groups under a title.  line: in Chart.line's place here."""

    title: str
    groups: Sequence[Group]
    line: float | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture's words and bars.

    engines: names in the legend, ours first, in the order of each group's bars.
    columns: what ours is compared with, in the order of each group's ratios.
    line: a length that a dashed line marks, and its name; None for no line.
    ratios: the words above the columns.
    """

    title: str
    subtitle: str
    panels: Sequence[Panel]
    engines: Sequence[str]
    columns: Sequence[str]
    line: tuple[float, str] | None = None
    ratios: str = "bytetx is faster than"


def draw_chart(path: Path, theme: Theme, *, chart: Chart) -> None:
    from matplotlib.figure import Figure

    heights = [sum(map(_group_height, panel.groups)) for panel in chart.panels]
    height = _HEAD + _FOOT + sum(heights) + _GAP * (len(heights) - 1)  # inches
    figure = Figure(figsize=(_WIDTH, height), facecolor=theme.page)
    right = _MARGIN + _COLUMN * len(chart.columns) + _WORDS
    longest = max(bar[0] for p in chart.panels for g in p.groups for bar in g.bars if bar)
    lines = [_line(panel, chart) for panel in chart.panels]
    longest = max(longest, *(line or 0.0 for line in lines))
    top = height - _HEAD
    for panel, inches, line in zip(chart.panels, heights, lines, strict=True):
        top -= inches
        box = (_LEFT / _WIDTH, top / height, 1 - (_LEFT + right) / _WIDTH, inches / height)
        ax = figure.add_axes(box, xlim=(0, longest), ylim=(inches, 0))
        top -= _GAP
        _style(ax, theme)
        _draw_panel(ax, theme, panel)
        _draw_columns(ax, theme, chart.columns, panel)
        if line:
            ax.axvline(line, color=theme.muted, linewidth=1.2, linestyle=(0, (4, 3)))
    _draw_head(figure, theme, chart)
    _draw_legend(figure, theme, chart)
    figure.savefig(path, facecolor=theme.page, metadata={"Date": None})


def _line(panel: Panel, chart: Chart) -> float | None:
    return panel.line or (chart.line[0] if chart.line else None)


def _group_height(group: Group) -> float:
    return _BAR * sum(bar is not None for bar in group.bars) + _AFTER_GROUP


def _style(ax: "Axes", theme: Theme) -> None:
    ax.set_facecolor("none")
    ax.spines[:].set_visible(False)
    ax.tick_params(axis="both", length=0, labelcolor=theme.text, pad=8, labelsize=9.5)
    ax.tick_params(axis="x", labelbottom=False)


def _draw_panel(ax: "Axes", theme: Theme, panel: Panel) -> None:
    ax.annotate(panel.title, (0, 1), (-_LEFT * 72 + 12, 6), "axes fraction", "offset points",
                fontsize=10.5, fontweight="bold", color=theme.muted)  # fmt: skip
    colours = _colours(theme)
    top, centres = 0.0, []
    for group in panel.groups:
        middle = top + (_group_height(group) - _AFTER_GROUP) / 2
        centres.append(middle)
        for engine, bar in enumerate(group.bars):
            if bar is None:
                continue
            length, words = bar
            y = top + _BAR / 2
            ax.barh(y, length, height=0.86 * _BAR, color=colours[engine])
            colour, weight = (theme.ours, "bold") if engine == 0 else (theme.muted, "normal")
            ax.annotate(words, (length, y), (5, 0), textcoords="offset points", fontsize=8,
                        va="center_baseline", color=colour, fontweight=weight,
                        bbox={"facecolor": theme.page, "linewidth": 0, "pad": 0.8})  # fmt: skip
            top += _BAR
        top += _AFTER_GROUP
    ax.set_yticks(centres, [group.name for group in panel.groups])


def _draw_columns(ax: "Axes", theme: Theme, columns: Sequence[str], panel: Panel) -> None:
    """Write how many times faster ours is than each column's engine, in words beside each group."""
    places = [(_WORDS + _COLUMN * (i + 1)) * 72 for i in range(len(columns))]  # points
    for place, name in zip(places, columns, strict=True):
        ax.annotate(name, (1, 1), (place, 6), "axes fraction", "offset points",
                    ha="right", fontsize=9, color=theme.muted)  # fmt: skip
    for middle, group in zip(ax.get_yticks(), panel.groups, strict=True):
        for place, words in zip(places, group.ratios, strict=True):
            ax.annotate(words, (1, middle), (place, 0), ("axes fraction", "data"), "offset points",
                        ha="right", va="center_baseline", fontsize=10, color=theme.text,
                        fontweight="bold")  # fmt: skip


def _draw_head(figure: "Figure", theme: Theme, chart: Chart) -> None:
    height = figure.get_figheight()
    figure.text(0.16 / _WIDTH, 1 - 0.36 / height, chart.title,
                fontsize=14, fontweight="bold", color=theme.text)  # fmt: skip
    figure.text(0.16 / _WIDTH, 1 - 0.62 / height, chart.subtitle, fontsize=10, color=theme.muted)
    figure.text(1 - _MARGIN / _WIDTH, 1 - 0.82 / height, chart.ratios,
                fontsize=9, ha="right", color=theme.muted)  # fmt: skip


def _draw_legend(figure: "Figure", theme: Theme, chart: Chart) -> None:
    from matplotlib.artist import Artist
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colours = _colours(theme)
    keys: list[Artist] = [
        Patch(color=colours[i], label=name) for i, name in enumerate(chart.engines)
    ]
    if chart.line:
        dashes = (0, (4, 3))
        keys.append(Line2D([], [], label=chart.line[1], color=theme.muted, linestyle=dashes))
    figure.legend(handles=keys, loc="lower left", bbox_to_anchor=(0, 0), ncols=len(keys),
                  frameon=False, fontsize=9, labelcolor=theme.muted, handlelength=1.6,
                  columnspacing=1.4, borderaxespad=0.8)  # fmt: skip


def _colours(theme: Theme) -> tuple[str, ...]:
    return theme.ours, theme.rival, theme.second
