"""The parts of a report, which are written as text for a terminal and as a page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

#: Columns of a text.
WIDTH = 100
#: CSS of a page, in light and in dark.
STYLE = Path(__file__).with_name("page.css").read_text()

_BAR = 30
_INKS = "#=+."
_BELOW = " " * 4
_BETWEEN = "  "
# However narrow the terminal is, so much of a line is left for words.
_LEAST_WORDS = 40


class Heading(str):
    """A title of what follows."""


class Caution(str):
    """A paragraph that a page shows as a warning."""


class Drawing(str):
    """HTML of a page, which a text leaves out."""


@dataclass(frozen=True)
class Words:
    """A column of words, which stand on the left; the last one of a table is wrapped.

    Attributes:
        title: title of the column.
        most: most characters of a cell in a text, where a longer one is cut.
    """

    title: str = ""
    most: int | None = None


@dataclass(frozen=True)
class Bars:
    """A column of bars. All bars of a table have one scale.

    Attributes:
        names: names of the amounts that are laid end to end.
    """

    names: Sequence[str]


@dataclass(frozen=True)
class Bar:
    """A cell of such a column.

    Attributes:
        amounts: an amount for each name, not negative.
        interval: ends of an interval of their sum, which a page shows.
        label: text before the bar.
    """

    amounts: Sequence[float]
    interval: tuple[float, float] | None = None
    label: str = ""

    @property
    def end(self) -> float:
        """Returns how far the bar reaches."""
        return max(sum(self.amounts), *(self.interval or (0.0,)))


#: A string is the title of a column of numbers, which stand on the right.
Column = str | Words | Bars
Cell = str | Bar


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        columns: columns; without any title there is no head.
        rows: rows of a cell a column.
        below: text below each row, if there is any.
        marked: number of a row that a page sets off.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    below: Sequence[str] = ()
    marked: int | None = None


_KINDS = {str: "", Words: ' class="words"', Bars: ' class="bars"'}

#: A plain string is a paragraph.
Part = str | Table


def as_text(parts: Iterable[Part], width: int = WIDTH) -> str:
    """Returns a report as lines of at most `width` characters, but for longer words and numbers.

    Args:
        parts: parts of the report, not HTML.
        width: columns of the terminal.
    """
    written = (
        "\n".join(_table_lines(part, width) if isinstance(part, Table) else _wrapped(part, width))
        for part in parts
        if not isinstance(part, Drawing)
    )
    return "\n\n".join(written)


def as_html(title: str, parts: Iterable[Part]) -> str:
    """Returns a report as a page that loads nothing from elsewhere.

    Args:
        title: title of the page, not HTML.
        parts: parts of the report, of which drawings alone are HTML.
    """
    named = escape(title)
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{named}</title><style>\n{STYLE}</style></head><body><main>",
            f"<h1>{named}</h1>",
            *map(_html_of, parts),
            "</main></body></html>\n",
        ]
    )


def _wrapped(text: str, width: int, first: str = "", following: str = "") -> list[str]:
    # Neither commands nor paths are cut: they are there to be copied.
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [first.rstrip()]


def _table_lines(table: Table, width: int) -> Iterator[str]:
    bars = [cell for row in table.rows for cell in row if isinstance(cell, Bar)]
    longest = max((sum(bar.amounts) for bar in bars), default=0.0)
    head = [_title(column) for column in table.columns]
    texts = [
        [_text_of(cell, column, longest) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    shown = [head, *texts] if any(head) else texts
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    if any(head):
        yield from _row_lines(table.columns, head, widths, width)
    for number, row in enumerate(texts):
        yield from _row_lines(table.columns, row, widths, width)
        if table.below and table.below[number]:
            yield from _wrapped(table.below[number], width, _BELOW, _BELOW)


def _row_lines(
    columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int], width: int
) -> list[str]:
    placed = [
        cell.rjust(wide) if isinstance(column, str) else cell.ljust(wide)
        for cell, column, wide in zip(cells, columns, widths, strict=True)
    ]
    if not isinstance(columns[-1], Words):
        return [_BETWEEN.join(placed).rstrip()]
    start = "".join(cell + _BETWEEN for cell in placed[:-1])
    most = max(width, len(start) + _LEAST_WORDS)
    return [line.rstrip() for line in _wrapped(cells[-1], most, start, " " * len(start))]


def _title(column: Column) -> str:
    if isinstance(column, str):
        return column
    if isinstance(column, Words):
        return column.title
    if len(column.names) == 1:
        return column.names[0]
    return _BETWEEN.join(f"{ink} {name}" for ink, name in zip(_INKS, column.names, strict=False))


def _text_of(cell: Cell, column: Column, longest: float) -> str:
    if isinstance(cell, str):
        most = column.most if isinstance(column, Words) else None
        return cell if most is None or len(cell) <= most else f"{cell[: most - 3]}..."
    bar, reached = "", 0.0
    for ink, amount in zip(_INKS, cell.amounts, strict=False):
        reached += amount
        bar += ink * ((round(reached / longest * _BAR) if longest else 0) - len(bar))
    return f"{cell.label} {bar}".strip()


def _html_of(part: Part) -> str:
    if isinstance(part, Drawing):
        return part
    if isinstance(part, Heading):
        return f"<h2>{escape(part)}</h2>"
    if isinstance(part, Caution):
        return f'<p class="problem">{escape(part)}</p>'
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>"
    return f'<div class="table"><table>\n{"".join(_html_rows(part))}</table></div>'


def _html_rows(table: Table) -> Iterator[str]:
    bars = [cell for row in table.rows for cell in row if isinstance(cell, Bar)]
    longest = max((bar.end for bar in bars), default=0.0)
    kinds = [_KINDS[type(column)] for column in table.columns]
    titles = list(map(_html_title, table.columns))
    if any(titles):
        head = (f"<th{kind}>{title}</th>" for kind, title in zip(kinds, titles, strict=True))
        yield f"<tr>{''.join(head)}</tr>\n"
    for number, row in enumerate(table.rows):
        cells = (
            f"<td{kind}>{escape(cell) if isinstance(cell, str) else _html_bar(cell, longest)}</td>"
            for kind, cell in zip(kinds, row, strict=True)
        )
        mark = ' class="marked"' if number == table.marked else ""
        yield f"<tr{mark}>{''.join(cells)}</tr>\n"
        if table.below and table.below[number]:
            text = f"<div>{escape(table.below[number])}</div>"
            yield f'<tr class="below"><td class="words" colspan="{len(row)}">{text}</td></tr>\n'


def _html_title(column: Column) -> str:
    if not isinstance(column, Bars) or len(column.names) == 1:
        return escape(_title(column))
    return " ".join(f'<i class="key"></i> {escape(name)}' for name in column.names)


def _html_bar(bar: Bar, longest: float) -> str:
    scale = longest or 1.0
    parts = [f'<i style="width:{amount / scale:.1%}"></i>' for amount in bar.amounts]
    if bar.interval:
        low, high = bar.interval
        parts.append(f'<b style="left:{low / scale:.1%};width:{(high - low) / scale:.1%}"></b>')
    label = f'<span class="label">{escape(bar.label)}</span>' if bar.label else ""
    return f'{label}<span class="bar">{"".join(parts)}</span>'
