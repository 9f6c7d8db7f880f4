"""Curves: the points are where their values belong."""

from xml.etree import ElementTree

import pytest

from torchrec_bls.rendering.chart import Curves, charts

HALVES = Curves("bound", "a < b", {"<one>": [(0, 2.0), (4, 8.0)], "two": [(0, 0.0), (2, 5.0)]})


def figure_of(curves: Curves) -> ElementTree.Element:
    (figure,) = ElementTree.fromstring(charts(curves))
    return figure


def points_of(figure: ElementTree.Element) -> list[list[tuple[float, float]]]:
    lines = (each.attrib["points"].split() for each in figure.iter("polyline"))
    return [[tuple(map(float, point.split(","))) for point in line] for line in lines]  # type: ignore[misc]


def test_points_are_in_proportion() -> None:
    one, two = points_of(figure_of(HALVES))
    left, right = one[0][0], one[1][0]
    assert two[0][0] == left and two[1][0] == pytest.approx((left + right) / 2)
    ground = two[0][1]
    heights = [ground - y for _, y in (*one, two[1])]
    assert heights == pytest.approx([heights[1] / 4, heights[1], heights[1] * 5 / 8], abs=0.1)


def test_axes_and_legend_are_named() -> None:
    figure = figure_of(HALVES)
    texts = [each.text for each in figure.iter("text")]
    assert texts[:3] == ["0", "2", "4"] and texts[-2:] == ["bound", "a < b"]
    assert texts[3:-2] == ["0", "2", "4", "6", "8"]
    assert ["".join(each.itertext()) for each in figure.iter("span")] == [" <one>", " two"]


def test_labels_of_the_abscissa_do_not_lie_on_each_other() -> None:
    bounds = [(x, 1.0) for x in (0, 1, 2, 4, 8, 16, 32, 64)]
    figure = figure_of(Curves("bound", "y", {"": bounds}))
    texts = [each for each in figure.iter("text") if each.attrib["text-anchor"] == "middle"][:-2]
    assert [each.text for each in texts] == ["0", "4", "8", "16", "32", "64"]
    assert len(points_of(figure)[0]) == len(bounds)


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (1.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (9.9, ["0", "2", "4", "6", "8", "10"]),
        (0.00031, ["0", "0.0001", "0.0002", "0.0003", "0.0004"]),
        (2300.0, ["0", "500", "1000", "1500", "2000", "2500"]),
        (0.0, ["0", "1"]),
    ],
)
def test_ticks_are_round_and_few(highest: float, ticks: list[str]) -> None:
    texts = [each.text for each in figure_of(Curves("x", "y", {"": [(3, highest)]})).iter("text")]
    assert texts == ["3", *ticks, "x", "y"]
