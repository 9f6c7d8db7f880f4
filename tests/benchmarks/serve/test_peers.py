"""Peers of the service: their bytes, the search for their best batches, their pages."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from benchmarks.serve import shape, traffic
from benchmarks.serve.outcome import Outcome
from benchmarks.serve.peers import grid, page, wire
from benchmarks.serve.peers.serving import Batching, Serving, told


def _bodies(count: int) -> tuple[list[traffic.Request], list[bytes]]:
    requests = list(traffic.requests(count, shape.QUICK_ROWS))
    return requests, [wire.encode(r, "/score").partition(b"\r\n\r\n")[2] for r in requests]


def test_a_batch_has_the_ids_of_each_key_side_by_side() -> None:
    requests, bodies = _bodies(3)
    batch = wire.joined(bodies)
    ends = np.cumsum([len(each.dense) for each in requests])
    for request, end in zip(requests, ends, strict=True):
        samples = len(request.dense)
        for sample in range(samples):
            at = end - samples + sample
            assert np.array_equal(batch.dense[at], request.dense[sample])
            for key in range(shape.TABLES):
                of_batch = batch.values[key * ends[-1] + at]
                assert of_batch == request.values[key * samples + sample]
    assert batch.lengths.tolist() == [1] * (shape.TABLES * ends[-1])


def test_each_request_gets_its_own_scores() -> None:
    requests, bodies = _bodies(4)
    sizes = [len(each.dense) for each in requests]
    scores = np.arange(sum(sizes), dtype=np.float32)
    answers = wire.parted(scores, bodies)
    of_requests = [wire.scores_of(b"HTTP/1.1 200 OK\r\n\r\n" + each) for each in answers]
    assert [len(each) for each in of_requests] == sizes
    assert np.array_equal(np.concatenate(of_requests), scores)


def test_a_body_of_another_size_is_refused() -> None:
    _, (body,) = _bodies(1)
    with pytest.raises(ValueError):
        wire.joined([body + b"\0" * 8])
    with pytest.raises(ValueError):
        wire.joined([body[:-8]])


def test_a_peer_is_told_how_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving("folder", 1000, "INT8", 8000, Batching(8, None), 20, 5)
    for name, value in serving.environment().items():
        monkeypatch.setenv(name, value)
    assert told() == serving


def _run_of(capacity: float) -> Any:
    """A server that answers all up to its capacity, and half of the requests beyond it."""

    def run(rate: float, seconds: float, seed: int) -> Outcome:
        in_time = 1000 if rate <= capacity else 500
        return Outcome(
            **{field.name: 0 for field in dataclasses.fields(Outcome)}
            | {"rate": rate, "seconds": seconds, "offered": 1000, "in_time": in_time}
        )

    return run


@pytest.mark.parametrize("capacity", [45.0, 299.0, 300.0, 1234.0])
def test_the_search_comes_within_a_few_percent(capacity: float) -> None:
    found = grid.rough_capacity(_run_of(capacity), first=300.0, step_s=1.0)
    assert capacity / 1.06 < found <= capacity


def test_the_search_ends_where_nothing_is_in_time() -> None:
    assert grid.rough_capacity(_run_of(1.0), first=300.0, step_s=1.0) == 0.0


_GRID = {
    "results": [
        {"peer": "mosec", "requests": 4, "wait_ms": 1, "capacity": 300.0},
        {"peer": "mosec", "requests": 8, "wait_ms": 1, "capacity": 500.0},
        {"peer": "bentoml", "requests": 16, "wait_ms": None, "capacity": 200.0},
        {"peer": "mosec", "requests": 16, "wait_ms": 3, "capacity": 400.0},
    ],
    "environment": {
        **dict.fromkeys(("cpu", "cores", "load_average", "kernel", "commit", "command"), "-"),
        "date": "2026-11-28T00:00:00+00:00",
        "versions": {"torch": "-"},
    },
}


def test_the_setting_with_the_highest_capacity_is_taken() -> None:
    assert grid.chosen(_GRID) == {
        "mosec": (Batching(8, 1), 500.0),
        "bentoml": (Batching(16, None), 200.0),
    }
    section = page.grid_section(_GRID)
    assert "| Mosec | 8 | 1 | **500** |" in section
    assert "| BentoML | 16 |  | **200** |" in section
    assert "| Mosec | 16 | 3 | 400 |" in section


def test_the_page_names_a_peer_that_was_faster() -> None:
    def result(server: str, capacity: float, mib: int) -> dict[str, Any]:
        load = {"of": "ours", "in_time_rate": capacity, "late_share": 0.25}
        return {
            "tables": "float",
            "server": server,
            "capacity": capacity,
            "overload": [{**load, "share": 1.5}, {**load, "share": 3.0}],
            "pss_bytes": (100 + mib) << 20,
            "pss_without_tables_bytes": 100 << 20,
        }

    results = [result("ours", 400.0, 1300), result("mosec", 500.0, 1301)]
    section = page.section({**_GRID, "results": results})
    assert (
        "| float | torchrec-bls serve | 400 | 1.00 | 400 (25.0 %) | 400 (25.0 %) |  | 1300 |"
        in section
    )
    assert "- float: Mosec has 1.25 times ours" in section
