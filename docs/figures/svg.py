"""Boxes, arrows and labels as SVG that is legible on light and on dark pages.

The background is transparent. Text stands in white on filled boxes, or in a grey that both kinds of
page contrast with.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

BLUE, ORANGE, GREEN, PURPLE, GREY = "#3f6f9f", "#b8652a", "#3d7a55", "#7a5a95", "#687078"
_LABEL = "#7f8892"
_LINE = 17


class Drawing:
    """A picture; coordinates are pixels from its upper left corner."""

    def __init__(self, width: int, height: int, description: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-size="13" '
            'font-family="system-ui, sans-serif">\n'
            f"<title>{escape(description)}</title>\n"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="{_LABEL}"/></marker>'
            "</defs>\n"
        )
        self._parts: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, text: str, fill: str = BLUE) -> None:
        """Draws a filled box; the first line of its text is bold."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}"/>'
        )
        self._text(x + width / 2, y + height / 2, text, "middle", "#ffffff", bold_first=True)

    def bar(
        self, x: float, y: float, width: float, height: float, fill: str, text: str = ""
    ) -> None:
        """Draws a plain filled rectangle with small text in its middle."""
        self._parts.append(
            f'<rect x="{_short(x)}" y="{_short(y)}" width="{_short(width)}" '
            f'height="{_short(height)}" fill="{fill}"/>'
        )
        if text:
            self._text(x + width / 2, y + height / 2, text, "middle", "#ffffff", size=11)

    def line(
        self, *points: tuple[float, float], colour: str = _LABEL, dashed: bool = False
    ) -> None:
        """Draws a line through the points."""
        path = "M" + " ".join(f"{_short(x)} {_short(y)}" for x, y in points)
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>'
        )

    def dot(self, x: float, y: float, colour: str) -> None:
        """Draws the mark of a point."""
        self._parts.append(f'<circle cx="{_short(x)}" cy="{_short(y)}" r="4" fill="{colour}"/>')

    def frame(self, x: int, y: int, width: int, height: int, title: str) -> None:
        """Draws an outline around boxes, with a title inside its upper left corner."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="none" '
            f'stroke="{_LABEL}" stroke-width="1.5"/>'
        )
        self._text(x + 12, y + 16, title, "start", _LABEL, bold_first=True)

    def arrow(self, *points: tuple[int, int]) -> None:
        """Draws a line through the points, with a tip at its end."""
        path = "M" + " ".join(f"{x} {y}" for x, y in points)
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="{_LABEL}" stroke-width="1.6" '
            'marker-end="url(#tip)"/>'
        )

    def label(
        self, x: float, y: float, text: str, anchor: str = "middle", *, bold: bool = False
    ) -> None:
        """Writes text around (x, y): anchor start, middle or end."""
        self._text(x, y, text, anchor, _LABEL, bold_first=bold)

    def legend(self, x: float, y: float, entries: Mapping[str, str]) -> None:
        """Draws a row of coloured squares, each with its name."""
        for name, colour in entries.items():
            self.bar(x, y - 6, 12, 12, colour)
            self.label(x + 18, y, name, "start")
            x += 38 + 7 * len(name)

    def save(self, script: str) -> None:
        """Writes the picture beside the script that draws it."""
        Path(script).with_suffix(".svg").write_text(str(self))

    def __str__(self) -> str:
        return f"{self._head}{chr(10).join(self._parts)}\n</svg>\n"

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str,
        fill: str,
        *,
        bold_first: bool = False,
        size: int | None = None,
    ) -> None:
        lines = text.split("\n")
        top = y - (len(lines) - 1) * _LINE / 2
        for row, line in enumerate(lines):
            weight = ' font-weight="600"' if bold_first and row == 0 else ""
            smaller = f' font-size="{size}"' if size else ""
            self._parts.append(
                f'<text x="{_short(x)}" y="{_short(top + row * _LINE)}" text-anchor="{anchor}" '
                f'fill="{fill}" dominant-baseline="central"{weight}{smaller}>{escape(line)}</text>'
            )


def _short(number: float) -> str:
    return f"{round(number, 1):g}"
