"""The page of a simulation: what it says, and that it needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from torchrec_bls.sharding.problem.options import make_problem
from torchrec_bls.sharding.search.search import search
from torchrec_bls.sharding.simulation.bounds import BoundOutcome, Simulation, simulate_bounds
from torchrec_bls.sharding.simulation.choose_codec import choose_codec
from torchrec_bls.sharding.simulation.data_parallel import DenseSteps
from torchrec_bls.sharding.simulation.delays import read_delays
from torchrec_bls.sharding.simulation.program import Ranks
from torchrec_bls.sharding.simulation.report.outcomes import TAKEN, as_html
from torchrec_bls.sharding.simulation.wire.codecs import FP32, CodecCosts

from tests.sharding.additive_costs import AdditiveTestCosts, random_workload, roomy

CODECS = [FP32, CodecCosts("a<b", 1.0, 8.0)]


def simulated(ranks: int) -> tuple[str, list[BoundOutcome], BoundOutcome]:
    costs, workload = AdditiveTestCosts(), random_workload(3, 6)
    job = roomy(ranks, training=False)
    plan = search(make_problem(workload, job, costs)).plan
    simulation = Simulation(
        Ranks.on_hosts(ranks, ranks, ranks, link_bytes_per_us=10.0),
        read_delays("uniform:0-1ms"),
        40,
        dense=DenseSteps(forward_us=200.0),
        codecs=CODECS,
    )
    outcomes = simulate_bounds(plan, workload, job, costs, [0, 2], simulation)
    chosen = choose_codec(outcomes)
    return as_html(outcomes, chosen, job, simulation), outcomes, chosen


class Tables(HTMLParser):
    """Cells of all tables, row by row, and the tags that are still open."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        while self.tags and self.tags.pop() != tag:
            pass


def test_the_page_has_cells_curves_and_causes() -> None:
    text, outcomes, chosen = simulated(2)
    parser = Tables()
    parser.feed(text)
    head = next(i for i, row in enumerate(parser.rows) if row[:2] == ["bound", "codec"])
    cells = parser.rows[head + 1 : head + 1 + len(outcomes)]
    assert [row[:3] for row in cells] == [
        [str(each.bound), each.codec, f"{each.step_us / 1000:.3f}"] for each in outcomes
    ]
    taken = [(row[0], row[1]) for row in cells if row[-1] == TAKEN]
    assert taken == [(str(chosen.bound), chosen.codec)]
    causes = parser.rows[head + 2 + len(outcomes) :]
    # What the end of the simulation is due to adds up to it.
    assert sum(float(row[-2].rstrip("%")) for row in causes) == pytest.approx(100, abs=1)
    assert sum(float(row[-3]) for row in causes) == pytest.approx(
        chosen.timeline.end.max() / 1000 / 40, abs=0.02
    )
    # Throughput, latency and memory, each with a curve a codec.
    assert text.count("<svg") == text.count("</svg>") == 3
    assert text.count("<polyline") == 3 * len(CODECS)


def test_it_needs_nothing_from_elsewhere() -> None:
    text, _, _ = simulated(2)
    assert not re.search(r"<(script|link|img|iframe)|(src|href)=.?(https?:|//)|@import", text)
    assert text == simulated(2)[0]


def test_notes_are_those_of_the_text() -> None:
    assert "extrapolated, not validated" in simulated(9)[0]
    text, _, _ = simulated(8)
    assert "extrapolated" not in text
    assert "gradients travel as float32" in text
    assert "what they send each other passes the link" in text
