"""Bars as SVG for a page that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_COLOURS = ("#4878a8", "#e0904a", "#7aa874", "#a06ea8")
_LABELS, _WIDTH, _VALUES = 160, 480, 60  # pixels: names on the left, bars, numbers
_BAR, _GAP, _LEGEND = 11, 8, 24


def bars(labels: Sequence[str], series: Mapping[str, Sequence[float | None]], form: str) -> str:
    """Returns a group of horizontal bars for each label.

    Args:
        labels: labels of the groups.
        series: bar of each group, by the name in the legend; at most four names. None: no bar.
        form: format of the numbers, "{:.2f}" for instance.
    """
    highest = max((v for values in series.values() for v in values if v is not None), default=0.0)
    per_group = len(series) * _BAR + _GAP
    height = _LEGEND + len(labels) * per_group
    parts = [
        f"<svg width='{_LABELS + _WIDTH + _VALUES}' height='{height}' font-size='10' "
        "font-family='sans-serif'>"
    ]
    for number, name in enumerate(series):
        x = _LABELS + number * 140
        parts.append(_box(x, 4, 10, _COLOURS[number]) + _text(x + 14, 13, name))
    for group, label in enumerate(labels):
        top = _LEGEND + group * per_group
        middle = top + len(series) * _BAR / 2 + 4
        parts.append(_text(_LABELS - 6, middle, label, anchor="end"))
        for number, values in enumerate(series.values()):
            value = values[group]
            if value is None:
                continue
            y = top + number * _BAR
            width = value / highest * _WIDTH if highest > 0 else 0.0
            parts.append(_box(_LABELS, y, width, _COLOURS[number]))
            parts.append(_text(_LABELS + width + 4, y + _BAR - 2, form.format(value)))
    return "\n".join([*parts, "</svg>"])


def _box(x: float, y: float, width: float, colour: str) -> str:
    return f"<rect x='{x}' y='{y}' width='{width:.1f}' height='{_BAR - 1}' fill='{colour}'/>"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(text)}</text>"
