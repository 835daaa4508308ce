"""Fits the temperatures of decision.json to labelled requests, and says how calibrated answers are.

Source of the method: Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599).
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import typer

from bytetx.checkpoint.decision_files import DECISION_FILE, KINDS
from bytetx.checkpoint.side_files import read_json
from bytetx.cli.files.command import load_model
from bytetx.cli.files.options import JobOptions
from bytetx.cli.files.reader import open_sources, read_records
from bytetx.cli.files.records import Shape
from bytetx.errors import InputError, shown

_NUM_BINS = 10
# A fitted temperature is at most so many times as high or low as the one before: a few questions
# that are all answered right would make every answer certain.
_MOST_FACTOR = 20.0
_STEPS = 60  # halvings of the interval, which end far below a rounding error


@dataclass(frozen=True, slots=True)
class Labelled:
    """One answered question: log-probabilities of its options, f64, and the right one's place."""

    kind: str
    log_chances: np.ndarray
    right: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """How well probabilities fit the right answers.

    accuracy: share of questions whose likeliest option is right.  ece: expected calibration error,
    the mean distance of confidence and accuracy over ten bins of confidence.  brier: mean squared
    distance of the probabilities from the right answer.  nll: mean negative log-likelihood.
    bins: (questions, mean confidence, accuracy) of each bin that has questions.
    """

    count: int
    accuracy: float
    ece: float
    brier: float
    nll: float
    bins: Sequence[tuple[int, float, float]]


def calibrate_decisions(
    options: JobOptions, labelled: str, *, order: str, picture: str | None
) -> str:
    """Writes decision.json (and the picture). Returns a table for people."""
    if options.files:
        raise typer.BadParameter("--calibrate reads its own file; leave FILES out")
    if picture is not None and not picture.lower().endswith(".svg"):
        raise typer.BadParameter(f"--reliability must name an .svg file, got {picture}")
    rows = list(_read_rows(labelled))
    folder, model = load_model(options, "decide")
    given = options.model or ""
    target = options.output_path or (folder / DECISION_FILE if Path(given).is_dir() else None)
    if target is None:
        raise typer.BadParameter(f"{given} is no folder to write into; give -o decision.json")
    answers = model.decide([request for request, _ in rows], order=order)
    questions: list[Labelled] = []
    for row, answer in zip(rows, answers, strict=True):
        questions += _labelled(row[1], answer)
    temperatures: dict[str, float] = {}
    lines, before_after = [_HEAD], []
    for kind in KINDS:
        own = [one for one in questions if one.kind == kind]
        was = model.checkpoint.decisions.temperature_of(kind)
        if not own:
            continue
        factor = fitted_factor(own)
        temperatures[kind] = float(f"{was * factor:.6g}")
        before, after = measure(own), measure([_cooled(one, factor) for one in own])
        lines.append(_row(kind, before, after, was, temperatures[kind]))
        before_after.append((kind, before, after))
    _write_config(target, folder / DECISION_FILE, temperatures)
    if picture is not None:
        Path(picture).write_text(reliability_svg(before_after), encoding="utf-8")
    return "\n".join([*lines, f"wrote {target}"])


def _read_rows(path: str) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """(request, right answers by the question's name) of each line. InputError for a bad one."""
    found = False
    for record in read_records(open_sources([path]), Shape((), decisions=True)):
        value = record.value
        if isinstance(value, str):
            value = _parsed(value, record.where)
        if isinstance(value, InputError):
            raise value
        assert isinstance(value, dict)  # so the shape says
        answers = value.get("answers")
        if not isinstance(answers, dict) or not answers:
            raise InputError(
                f'{record.where} must have "answers", the right answer by the name of the '
                f"question, got {shown(answers)}"
            )
        found = True
        yield {key: entry for key, entry in value.items() if key != "answers"}, answers
    if not found:
        raise InputError(f"{path} has no labelled requests")


def _parsed(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return InputError(f"{where} is no JSON: {error}")
    return value if isinstance(value, dict) else InputError(f"{where} is no JSON object")


def _labelled(given: Mapping[str, Any], answers: Mapping[str, Any]) -> Iterator[Labelled]:
    """The questions of a request that have more than one option. given: the right answers."""
    for name, right in given.items():
        if name not in answers:
            raise InputError(
                f"answers names {shown(name)}, and there is no such question; there are: "
                f"{', '.join(map(str, answers))}"
            )
        answer = answers[name]
        chances = answer.get("probabilities") or {
            "true": answer["noul"],
            "false": 1 - answer["noul"],
        }
        key = str(right).lower() if isinstance(right, bool) else str(right)
        if key not in chances:
            raise InputError(
                f"the answer {shown(right)} to {shown(name)} is none of: {', '.join(chances)}"
            )
        if len(chances) > 1:
            values = np.maximum(np.array(list(chances.values())), 1e-300)
            yield Labelled(answer["type"], np.log(values), list(chances).index(key))


def fitted_factor(questions: Sequence[Labelled]) -> float:
    """The factor of the temperature at which the right answers are the likeliest.

    The negative log-likelihood is convex in the inverse of the temperature: its derivative, the
    mean score less that of the right answer, is bisected.
    """

    def slope(inverse: float) -> float:
        total = 0.0
        for one in questions:
            chances = _softmax(one.log_chances * inverse)
            total += float(chances @ one.log_chances) - float(one.log_chances[one.right])
        return total

    low, high = -np.log(_MOST_FACTOR), np.log(_MOST_FACTOR)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if slope(float(np.exp(middle))) <= 0:
            low = middle
        else:
            high = middle
    return float(np.exp(-(low + high) / 2))


def _cooled(one: Labelled, factor: float) -> Labelled:
    """The question at another temperature."""
    return replace(one, log_chances=np.log(np.maximum(_softmax(one.log_chances / factor), 1e-300)))


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    chances: np.ndarray = weights / weights.sum()
    return chances


def measure(questions: Sequence[Labelled]) -> Calibration:
    """The calibration of at least one question."""
    chances = [np.exp(one.log_chances) for one in questions]
    confidence = np.array([one.max() for one in chances])
    right = np.array([one.right for one in questions])
    is_right = np.array([int(c.argmax()) for c in chances]) == right
    brier = [
        float(((c - (np.arange(len(c)) == r)) ** 2).sum())
        for c, r in zip(chances, right.tolist(), strict=True)
    ]
    places = np.minimum((confidence * _NUM_BINS).astype(int), _NUM_BINS - 1)
    bins = [
        (int(own.sum()), float(confidence[own].mean()), float(is_right[own].mean()))
        for own in (places == place for place in range(_NUM_BINS))
        if own.any()
    ]
    count = len(questions)
    return Calibration(
        count,
        float(is_right.mean()),
        sum(size * abs(mean - share) for size, mean, share in bins) / count,
        float(np.mean(brier)),
        float(np.mean([-one.log_chances[one.right] for one in questions])),
        bins,
    )


_HEAD = (
    f"{'type':<8}{'questions':>10}{'accuracy':>10}{'temperature':>22}{'ECE':>18}{'Brier':>18}"
    f"{'NLL':>18}"
)


def _row(kind: str, before: Calibration, after: Calibration, was: float, now: float) -> str:
    def pair(one: float, other: float) -> str:
        return f"{one:.4f} -> {other:.4f}"

    return (
        f"{kind:<8}{before.count:>10}{before.accuracy:>10.4f}{f'{was:.6g} -> {now:.6g}':>22}"
        f"{pair(before.ece, after.ece):>18}{pair(before.brier, after.brier):>18}"
        f"{pair(before.nll, after.nll):>18}"
    )


def _write_config(target: Path, source: Path, temperatures: Mapping[str, float]) -> None:
    """The checkpoint's decision.json, or what the target has, with these temperatures."""
    own = next((path for path in (target, source) if path.is_file()), None)
    content = {} if own is None else read_json(own)
    content["temperature"] = {**(content.get("temperature") or {}), **temperatures}
    text = json.dumps(content, indent=2, ensure_ascii=False)
    partial = target.with_name(f"{target.name}.partial")
    try:
        partial.write_text(f"{text}\n", encoding="utf-8")
        os.replace(partial, target)  # whole or not at all
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}") from error


# A panel of the picture, and the space around its square.
_SIDE, _MARGIN = 220, 40


def reliability_svg(panels: Sequence[tuple[str, Calibration, Calibration]]) -> str:
    """A picture with a panel for each type: accuracy over confidence, before and after."""
    width, height = len(panels) * (_SIDE + 2 * _MARGIN), _SIDE + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, (kind, before, after) in enumerate(panels):
        left = place * (_SIDE + 2 * _MARGIN) + _MARGIN
        parts += _panel(kind, before, after, left=left)
    return "\n".join([*parts, "</svg>\n"])


def _panel(kind: str, before: Calibration, after: Calibration, *, left: int) -> list[str]:
    x: Callable[[float], float] = lambda share: left + share * _SIDE  # noqa: E731
    y: Callable[[float], float] = lambda share: _MARGIN + (1 - share) * _SIDE  # noqa: E731
    frame = f'<rect x="{left}" y="{_MARGIN}" width="{_SIDE}" height="{_SIDE}"'
    parts = [
        f'{frame} fill="none" stroke="#888"/>',
        f'<line x1="{x(0)}" y1="{y(0)}" x2="{x(1)}" y2="{y(1)}" stroke="#bbb"/>',
        f'<text x="{left}" y="{_MARGIN - 22}" font-weight="bold">{kind}, {before.count} questions'
        "</text>",
        f'<text x="{x(0.5)}" y="{_MARGIN + _SIDE + 28}" text-anchor="middle">confidence</text>',
        f'<text x="{left - 8}" y="{y(1) + 4}" text-anchor="end">1</text>',
        f'<text x="{left - 8}" y="{y(0) + 4}" text-anchor="end">0</text>',
    ]
    for name, colour, one in (("before", "#c44", before), ("after", "#26a", after)):
        points = " ".join(f"{x(mean):.1f},{y(share):.1f}" for _, mean, share in one.bins)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts += [
            f'<circle cx="{x(mean):.1f}" cy="{y(share):.1f}" r="3" fill="{colour}">'
            f"<title>{size} questions</title></circle>"
            for size, mean, share in one.bins
        ]
        shift = 0 if name == "before" else _SIDE / 2
        parts.append(
            f'<text x="{left + shift}" y="{_MARGIN - 8}" fill="{colour}">{name}: ECE '
            f"{one.ece:.3f}</text>"
        )
    return parts
