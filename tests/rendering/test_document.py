"""Reports as text and as pages: what stands where, and that nothing is taken for HTML."""

import re
from xml.etree import ElementTree

import pytest

from torchrec_bls.rendering.chart import COLOURS
from torchrec_bls.rendering.document import (
    STYLE,
    Bar,
    Bars,
    Caution,
    Drawing,
    Heading,
    Table,
    Words,
    as_html,
    as_text,
)

NAMES = Table(
    [Words("name", most=6), "ms", Words("why")],
    [["<b>&", "1.5", "short"], ["longer name", "12.25", "word " * 30]],
    ["", "a note"],
)
BARS = Table(
    ["rank", Bars(("compute", "send")), Bars(["all"])],
    [["0", Bar((10, 20), (25, 40)), Bar([20], label="20")], ["1", Bar((0, 10)), ""]],
)


def tree_of(*parts: str | Table) -> ElementTree.Element:
    return ElementTree.fromstring(as_html("A <title>", parts))


def cells_of(row: ElementTree.Element) -> list[str]:
    return ["".join(cell.itertext()) for cell in row]


def test_a_text_is_aligned_and_wrapped() -> None:
    lines = as_text([NAMES], 60).splitlines()
    assert lines[:2] == ["name       ms  why", "<b>&      1.5  short"]
    assert lines[2].startswith("lon...  12.25  word word")
    # The last column goes on where it began.
    assert lines[3].startswith(" " * 15 + "word") and lines[-1] == "    a note"
    assert max(map(len, lines)) <= 60


def test_parts_of_a_text_are_apart_and_drawings_left_out() -> None:
    parts = ["one " * 30, Heading("Title"), Drawing("<svg/>"), Caution("mind this"), NAMES]
    text = as_text(parts, 50)
    assert text.startswith("one one") and "\n\nTitle\n\nmind this\n\nname" in text
    assert "svg" not in text
    assert as_text([Table([Words(), ""], [["a", "1"]])]) == "a  1"


def test_commands_and_paths_are_not_cut() -> None:
    command = "/a/long-long-path " * 4
    assert "/a/long-long-path\n/a/long-long-path" in as_text([command], 10)


def test_bars_of_a_text_have_one_scale() -> None:
    head, first, second = as_text([BARS]).splitlines()
    assert head.split() == ["rank", "#", "compute", "=", "send", "all"]
    assert re.findall(r"#+=*|=+", first) == ["#" * 10 + "=" * 20, "#" * 20]
    assert re.findall(r"#+=*|=+", second) == ["=" * 10]
    assert as_text([Table([Bars(["x"])], [[Bar([0.0])]])]) == "x\n"


def test_a_page_has_the_same_words() -> None:
    page = tree_of("a < b", Heading("<h>"), Caution("&c"), NAMES)
    assert "".join(page.find(".//title").itertext()) == "A <title>"  # type: ignore[union-attr]
    assert [each.text for each in page.iter("p")] == ["a < b", "&c"]
    assert [each.text for each in page.iter("h2")] == ["<h>"]
    rows = [cells_of(row) for row in page.iter("tr")]
    assert rows == [
        ["name", "ms", "why"],
        ["<b>&", "1.5", "short"],
        ["longer name", "12.25", "word " * 30],
        ["a note"],
    ]


def test_bars_of_a_page_have_one_scale() -> None:
    page = tree_of(BARS)
    widths = [each.attrib["style"] for each in page.findall(".//td//i")]
    assert widths == [f"width:{w}.0%" for w in ("25", "50", "50", "0", "25")]
    (interval,) = page.findall(".//td//b")
    assert interval.attrib["style"] == "left:62.5%;width:37.5%"
    assert cells_of(next(page.iter("tr"))) == ["rank", " compute  send", "all"]


def test_one_row_of_a_page_may_be_set_off() -> None:
    rows = [["1"], ["2"], ["3"]]
    (marked,) = tree_of(Table(["a"], rows, marked=1)).findall(".//tr[@class='marked']")
    assert cells_of(marked) == ["2"]
    assert not tree_of(Table(["a"], rows)).findall(".//tr[@class]")


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_a_page_has_contrast_enough(scheme: int) -> None:
    named = {
        name: re.findall(rf"--{name}: (#\w+);", STYLE)[scheme]
        for name in (
            *("text", "faint", "page", "card", "good", "bad", "bad-card", "good-card"),
            *("first", "second"),
        )
    }
    for ink, *grounds in (
        ("text", "page", "card", "bad-card", "good-card"),
        ("faint", "page", "card"),
        ("good", "card"),
        ("bad", "card"),
    ):
        for ground in grounds:
            assert contrast(named[ink], named[ground]) >= 4.5, (ink, ground)
    for colour in (*COLOURS, named["first"], named["second"]):
        assert contrast(colour, named["card"]) >= 3, colour


def contrast(one: str, other: str) -> float:
    """By WCAG 2.2, of which 4.5 is asked of text and 3 of curves and bars."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    shares = [value / 255 for value in bytes.fromhex(digits)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(w * value for w, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_page_needs_nothing_from_elsewhere() -> None:
    text = as_html("x", [NAMES, BARS])
    assert not re.search(r"<(script|link|img|iframe)|src=|href=|url\(|@import|https?:", text)


@pytest.mark.parametrize("table", [Table([], []), Table(["a"], [])])
def test_a_table_without_rows(table: Table) -> None:
    assert as_text([table]) == ("a" if table.columns else "")
    tree_of(table)
