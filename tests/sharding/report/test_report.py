"""Reports: width, contents, machines' form, pages and figures; and the command that prints them."""

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from torchrec_bls.sharding.problem.options import make_problem
from torchrec_bls.sharding.problem.tables import TABLE_WISE, Table, UniformReuse, Workload
from torchrec_bls.sharding.report.figure import save_figure
from torchrec_bls.sharding.report.plan_report import PlanReport, make_report
from torchrec_bls.sharding.search.search import search

from tests.sharding.additive_costs import AdditiveTestCosts, random_workload, roomy

COSTS = AdditiveTestCosts()


def report_of(workload: Workload, ranks: int) -> PlanReport:
    found = search(make_problem(workload, roomy(ranks), COSTS))
    return make_report(workload, found, COSTS)


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return report_of(random_workload(0, 12), 4)


@pytest.mark.parametrize("ranks", [1, 4, 48])
def test_text_fits_and_names_everything(ranks: int) -> None:
    named = [Table("<b>&" + "long" * 12, 100, 32), Table("few", 1_000_000_000, 256)]
    report = report_of(Workload([*random_workload(0, 3).tables, *named]), ranks)
    lines = report.as_text().splitlines()
    assert max(len(line) for line in lines) <= 100
    for name in ("t0", "t1", "t2", "<b>&longlong", "few"):
        assert any(line.startswith(name) for line in lines)
    assert any("1,000,000,000 x 256" in line for line in lines)
    assert sum(line.strip().startswith(f"{ranks - 1} ") for line in lines) == 1 or ranks > 32


def test_what_is_too_long_for_a_line_goes_on_in_the_next(report: PlanReport) -> None:
    decision = dataclasses.replace(
        report.decisions[0],
        reason="the step is as long, but other ranks are closer to the mean",
        runner_up="column_wise, 4 x 16 columns",
        runner_up_us=1234.5,
    )
    text = dataclasses.replace(report, decisions=[decision]).as_text()
    assert max(len(line) for line in text.splitlines()) <= 100
    whole = f"{decision.reason}; runner-up {decision.runner_up}, +1,234.5 us"
    assert whole in " ".join(text.split())


def test_runner_up_and_reasons(report: PlanReport) -> None:
    for decision in report.decisions:
        assert decision.reason
        assert decision.runner_up != decision.choice
        # Nothing is left on the table: no other option alone makes the step shorter.
        assert decision.runner_up_us > -1e-6 * report.objective_us
    only = Workload([Table("t", 50, 32, sharding_types=(TABLE_WISE,))], {"t": UniformReuse(50)})
    [decision] = report_of(only, 2).decisions
    assert decision.runner_up is None
    assert decision.reason == "the only way that sharder and constraints leave"


def test_measurement_beside_the_prediction(report: PlanReport) -> None:
    step = report.rating.step.microseconds
    measured = report.with_measurement({"step": step / 1.1, "forward": 3 * step})
    text = measured.as_text()
    assert "+10.0%  yes" in text
    assert text.count("  no") == 1
    assert "Measured" in measured.as_html()
    assert "measured" not in report.as_text()
    with pytest.raises(ValueError, match="measured 'lunch', but the prediction has step, ids"):
        report.with_measurement({"lunch": 1.0})
    with pytest.raises(ValueError, match="'step' is 0 microseconds"):
        report.with_measurement({"step": 0})


def test_json_says_the_same(report: PlanReport) -> None:
    record = json.loads(json.dumps(report.as_json()))
    assert record["step_us"]["predicted"] == report.rating.step.microseconds
    assert len(record["ranks"]) == 4
    assert sum(rank["shards"] for rank in record["ranks"]) == sum(
        len(decision["ranks"]) for decision in record["decisions"]
    )
    assert record["lower_bound_us"] <= record["objective_us"]


class Tags(HTMLParser):
    """Counts what is left open, and keeps the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "html"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "html"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_whole_and_names_are_escaped() -> None:
    tags = Tags()
    tags.feed(report_of(Workload([Table("<script>x", 100, 32)]), 2).as_html())
    assert tags.open == []
    assert "<script>x" in tags.text


def test_figure(report: PlanReport, tmp_path: Path) -> None:
    save_figure(report.with_measurement({"step": 1000}), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
