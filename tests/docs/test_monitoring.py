"""Dashboard and alerts ask for what the package exports, and are of the shape that their readers
want."""

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tests.paths import ROOT
from tests.serve.states import made_up_state, made_up_status
from torchrec_bls import ChannelStats

FOLDER = ROOT / "docs" / "guides" / "monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
ALERTS = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
PAGES = [ROOT / "docs/guides/monitoring.md", ROOT / "docs/design/straggler.md"]
# What Prometheus adds to each sample: the job that it scrapes.
ADDED = {"job"}
DURATION = re.compile(r"\d+[smhd]")
# Units that the dashboard's panels show figures in, of Grafana's list.
UNITS = {"short", "percentunit", "Bps", "cps", "s", "bytes"}


def exported() -> dict[str, set[str]]:
    """Returns the labels of each sample that the collectors export."""
    from torchrec_bls.observe.prometheus import ChannelCollector, ServingCollector
    from torchrec_bls.serve.observer import Observer, WorkCollector
    from torchrec_bls.serve.predictor import Costs

    stats = ChannelStats(
        messages=1,
        bytes=1,
        pulled_messages=0,
        largest_message=1,
        wait_seconds=(0.0, 1.0),
        lag_histogram=(1, 0, 0),
        slot_bytes=64,
        ring_bytes=64,
        seconds=1.0,
    )
    channel: Any = SimpleNamespace(name="ids", rank=0, stats=lambda: stats)
    registry = CollectorRegistry()
    registry.register(ChannelCollector(lambda: [channel]))
    registry.register(ServingCollector(lambda: made_up_state(rank=0, owners_gone=(0,))))
    observer = Observer(lambda: None)
    costs = Costs(1.0, 1.0, 1.0)
    observer.add(WorkCollector(lambda: 0, lambda: costs, lambda: 1.0, made_up_status))
    families = [
        *registry.collect(),
        *text_string_to_metric_families(observer.exposition().decode()),
    ]
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for page in PAGES:
        for query in re.findall(r"`([^`]*torchrec_bls_\w+\b[^`]*)`", page.read_text()):
            yield f"{page.stem}: {query}", query


def test_every_metric_is_exported() -> None:
    known = exported()
    for place, expression in expressions():
        names = set(re.findall(r"\btorchrec_bls_\w+", expression))
        # A histogram has its own name on pages, and three others where it is scraped.
        histograms = {name for name in names if f"{name}_bucket" in known}
        assert names and names - histograms <= known.keys(), place


def test_every_label_is_of_a_metric_beside_it() -> None:
    known = exported()
    for place, expression in expressions():
        metrics = set(re.findall(r"\btorchrec_bls_\w+", expression))
        labels = set().union(*(known.get(name, set()) for name in metrics)) | ADDED
        for clause in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            assert set(clause.split(", ")) <= labels, place


def test_the_page_says_what_each_outcome_means() -> None:
    from torchrec_bls.serve.outcomes import Outcome

    page = PAGES[0].read_text()
    assert [each.label for each in Outcome if f"`{each.label}`" not in page] == []


@pytest.mark.parametrize("opening, closing", ["()", "[]", "{}"])
def test_brackets_of_expressions_are_closed(opening: str, closing: str) -> None:
    for place, expression in expressions():
        assert expression.count(opening) == expression.count(closing), place


def test_alerts_are_rules_of_prometheus() -> None:
    assert set(ALERTS) == {"groups"}
    names = []
    for group in ALERTS["groups"]:
        assert set(group) == {"name", "rules"}
        for rule in group["rules"]:
            assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
            assert DURATION.fullmatch(rule["for"])
            assert set(rule["annotations"]) == {"summary", "description"}
            assert rule["labels"]["severity"] in {"info", "warning", "critical"}
            names.append(rule["alert"])
    assert len(names) == len(set(names)) >= 5
    page = PAGES[0].read_text()
    assert [name for name in names if f"`{name}`" not in page] == []


def test_alerts_name_labels_that_their_expression_has() -> None:
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            kept = set(re.findall(r"\b(?:by) \(([^)]*)\)", rule["expr"])[0].split(", "))
            if rule["alert"] == "BLSStraggler":  # bottomk keeps the labels of what it takes
                kept |= {"rank"}
            named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
            assert named <= kept, rule["alert"]


def test_the_dashboard_is_one_of_grafana() -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= DASHBOARD.keys()
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert panel["type"] in {"stat", "timeseries", "heatmap"}
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"] in UNITS
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(panel)))
        assert used <= variables | {"__rate_interval"}
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        covered = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not covered & places, f"{panel['title']} lies on another panel"
        places |= covered
