"""Curves as SVG for a page that loads nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from torchrec_bls.rendering.document import Drawing

#: Each has a contrast of 3 with the cards of light and of dark pages.
COLOURS = ("#4c86c6", "#c97427", "#4aa564", "#d05656", "#9a76c9", "#a9765f", "#d173b5", "#8a8f98")
# As wide as on a phone, where letters are then as large as their font says.
_WIDTH, _HEIGHT = 350, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 14, 46
_MOST_TICKS = 6
_APART = 16  # least distance of labels below the abscissa


@dataclass(frozen=True)
class Curves:
    """Curves in one pair of axes, whose ordinate begins at 0.

    Attributes:
        x: title of the abscissa.
        y: title of the ordinate.
        points: abscissa and ordinate of the points of each curve by its name, from left to right;
            none is negative.
    """

    x: str
    y: str
    points: Mapping[str, Sequence[tuple[float, float]]]


def charts(*several: Curves) -> Drawing:
    """Returns charts, which stand beside each other where there is room."""
    return Drawing(f'<div class="charts">{"".join(map(_figure, several))}</div>')


def _figure(curves: Curves) -> str:
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(curves.points))]
    names = (
        f'<span><i class="key" style="background:{colour}"></i> {escape(name)}</span>'
        for name, colour in zip(curves.points, colours, strict=True)
    )
    every = [point for points in curves.points.values() for point in points]
    across = sorted({x for x, _ in every})
    ticks = _ticks(max(y for _, y in every))
    low, wide = across[0], (across[-1] - across[0]) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - low) / wide * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y / ticks[-1] * (_HEIGHT - _TOP - _BOTTOM),
        )

    bottom = _HEIGHT - _BOTTOM
    parts, free = [], 0.0
    for x in across:
        if (at := place(x, 0)[0]) >= free:
            parts.append(_text(at, bottom + 16, f"{x:g}", "middle"))
            free = at + _APART
    for tick in ticks:
        height = place(low, tick)[1]
        parts.append(
            f'<line class="grid" x1="{_LEFT}" y1="{height:.1f}" x2="{_WIDTH}" y2="{height:.1f}"/>'
        )
        parts.append(_text(_LEFT - 6, height + 4, f"{tick:g}", "end"))
    for colour, points in zip(colours, curves.points.values(), strict=True):
        places = [place(*point) for point in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, curves.x, "middle"))
    middle = (_TOP + bottom) / 2
    turned = f' transform="rotate(-90 14 {middle:.1f})"'
    parts.append(_text(14, middle, curves.y, "middle", turned))
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(curves.y)}">'
        f"{''.join(parts)}</svg><figcaption>{''.join(names)}</figcaption></figure>"
    )


def _ticks(highest: float) -> list[float]:
    """Returns few round numbers from 0 to no less than `highest`."""
    if not highest > 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest))
    step = next(
        each * power
        for each in (0.2, 0.5, 1.0, 2.0)
        if math.ceil(highest / (each * power)) < _MOST_TICKS
    )
    return [round(number * step, 12) for number in range(math.ceil(highest / step) + 1)]


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
