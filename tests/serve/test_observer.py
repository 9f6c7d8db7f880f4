"""What a service counts is what Prometheus scrapes."""

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.states import made_up_state, made_up_status
from torchrec_bls.serve.observer import Observer, WorkCollector
from torchrec_bls.serve.outcomes import Outcome
from torchrec_bls.serve.predictor import Costs
from torchrec_bls.serve.status import Refreshes


def scrape(observer: Observer) -> dict[str, float]:
    """Returns the values by name and labels, as in `name{label=value}`."""
    values = {}
    for family in text_string_to_metric_families(observer.exposition().decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            name = sample.name.removeprefix("torchrec_bls_")
            values[f"{name}{{{labels}}}" if labels else name] = sample.value
    return values


def test_requests_are_counted_by_outcome() -> None:
    observer = Observer(lambda: None)
    for outcome in (Outcome.OK, Outcome.OK, Outcome.REFUSED):
        observer.ended(outcome, time.monotonic())
    values = scrape(observer)
    expected = {f"requests_total{{outcome={each.label}}}": 0.0 for each in Outcome}
    expected |= {"requests_total{outcome=ok}": 2.0, "requests_total{outcome=refused}": 1.0}
    assert {key: value for key, value in values.items() if "outcome" in key} == expected


def test_times_are_of_answers_alone() -> None:
    observer = Observer(lambda: None)
    observer.ended(Outcome.OK, time.monotonic() - 0.5, queue_s=0.004)
    observer.ended(Outcome.REFUSED, time.monotonic() - 9.0)
    values = scrape(observer)
    assert values["request_seconds_count"] == values["queue_seconds_count"] == 1
    assert 0.5 <= values["request_seconds_sum"] < 9.0
    assert values["queue_seconds_sum"] == 0.004
    assert values["queue_seconds_bucket{le=0.003}"] == 0
    assert values["queue_seconds_bucket{le=0.005}"] == 1


def test_batches_are_compared_with_their_predictions() -> None:
    observer = Observer(lambda: None)
    observer.batch(30, 0.003, 0.002)
    values = scrape(observer)
    assert values["batch_samples_sum"] == 30
    assert values["batch_seconds_over_predicted_sum"] == pytest.approx(1.5)


def test_freshness_is_of_changes_to_newer_weights() -> None:
    states = [made_up_state(trained=None)]
    observer = Observer(lambda: states[-1])

    def change(trained: float | None) -> None:
        states.append(made_up_state(trained=trained))
        observer.changed_version()

    now = time.time()
    change(now - 500)  # what it began with
    assert observer.freshness is None and scrape(observer)["freshness_seconds_count"] == 0
    change(now - 1.2)
    change(now - 500)  # somebody has gone back
    change(None)
    change(now - 1.2)  # and returns
    values = scrape(observer)
    assert values["freshness_seconds_count"] == 1
    assert 1.2 <= values["freshness_seconds_sum"] == observer.freshness < 30
    assert values["freshness_seconds_bucket{le=1.0}"] == 0
    change(now + 3600)  # by a clock that is ahead
    assert observer.freshness == 0


def test_work_and_refreshes_are_read_at_each_scrape() -> None:
    facts: dict[str, Any] = {
        "waiting": 0,
        "costs": Costs(1e-3, 2e-6, 3e-8),
        "told": made_up_status(),
    }
    observer = Observer(made_up_state)
    observer.add(
        WorkCollector(
            lambda: facts["waiting"], lambda: facts["costs"], lambda: 2.5, lambda: facts["told"]
        )
    )
    values = scrape(observer)
    assert values["requests_waiting"] == values["refresh_problem"] == 0
    assert values["failed_refreshes_total"] == 0
    assert values["model_seconds_total"] == 2.5
    assert values["predicted_cost_seconds{of=batch}"] == 1e-3
    assert values["predicted_cost_seconds{of=sample}"] == 2e-6
    assert values["predicted_cost_seconds{of=id}"] == 3e-8
    assert values["version_serial{process=reader}"] == 3
    facts |= {
        "waiting": 5,
        "told": made_up_status(Refreshes(2, "NaN in table t"), ready=1, death=4),
    }
    values = scrape(observer)
    assert values["requests_waiting"] == 5
    assert values["failed_refreshes_total"] == 2
    assert (values["workers{state=wanted}"], values["workers{state=ready}"]) == (2, 1)
    assert values["worker_starts_total{cause=start}"] == 2
    assert values["worker_starts_total{cause=death}"] == 4
    assert values["refresh_problem"] == 1
