"""Reports as text and as pages: what stands where, and that nothing is taken for HTML."""

import re
from xml.etree import ElementTree

import pytest

from torchrec_bls.rendering.document import (
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


def test_a_page_needs_nothing_from_elsewhere() -> None:
    text = as_html("x", [NAMES, BARS])
    assert not re.search(r"<(script|link|img|iframe)|src=|href=|url\(|@import|https?:", text)


@pytest.mark.parametrize("table", [Table([], []), Table(["a"], [])])
def test_a_table_without_rows(table: Table) -> None:
    assert as_text([table]) == ("a" if table.columns else "")
    tree_of(table)
