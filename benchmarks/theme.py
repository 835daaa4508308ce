"""Colours and file handling that the README's pictures share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bytetx.errors import BytetxError

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
