"""A simulated and a measured trace in one file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torchrec_bls.sharding.simulation.engine.timeline import simulate
from torchrec_bls.sharding.simulation.program import Ranks, graph_of
from torchrec_bls.sharding.simulation.report.perfetto import trace_events
from torchrec_bls.sharding.simulation.report.side_by_side import side_by_side

from torchrec_bls.rank_steps import Begin, Exchange, Messages, Wait, Work


def simulated() -> list[Any]:
    rows = Exchange("rows")
    post = Begin(rows, Messages(), work_us=1.0, finish_us=1.0)
    program = [Work([2.0, 9.0], "load"), post, Wait(rows)]
    timeline = simulate(graph_of(program, Ranks.on_hosts(2, 2, 2), 3))
    return trace_events(timeline, [(0, "main"), (1, "main")])


def process(number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}


def measured() -> list[Any]:
    """As `torchrec-bls trace` merges it: numbers that a simulation has too, and other times."""
    events: list[dict[str, Any]] = []
    for rank in (0, 1):
        here = {"pid": 100 * rank, "tid": 7}
        events += [
            process(100 * rank, f"rank {rank}"),
            {"ph": "M", "name": "process_sort_index", "args": {"sort_index": 9}, **here},
            {"ph": "X", "name": "post", "ts": 500.0 + rank, "dur": 3.0, **here},
            {"ph": "s", "id": 0, "name": "flow", "ts": 501.0, **here},
            process(100 * rank + 1, f"rank {rank}, python 4711"),
        ]
    return events


def test_ranks_stand_side_by_side() -> None:
    events = json.loads(json.dumps(side_by_side(simulated(), measured())))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert sorted(names.values(), key=lambda name: (name[:6], "measured" in name, name)) == [
        "rank 0 simulated",
        "rank 0 measured",
        "rank 0 measured, python 4711",
        "rank 1 simulated",
        "rank 1 measured",
        "rank 1 measured, python 4711",
    ]
    in_order = [names[pid] for pid in sorted(names, key=lambda pid: (order[pid], names[pid]))]
    assert in_order[:2] == ["rank 0 simulated", "rank 0 measured"]
    assert in_order[3:5] == ["rank 1 simulated", "rank 1 measured"]


def test_nothing_of_either_is_lost_or_taken_for_the_others() -> None:
    one, other = simulated(), measured()
    events = side_by_side(one, other)
    slices = [each for each in events if each["ph"] == "X"]
    assert len(slices) == sum(each["ph"] == "X" for each in one) + 2
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    for side, trace in (("simulated", one), ("measured", other)):
        own = [each for each in slices if side in names[each["pid"]]]
        assert min(each["ts"] for each in own) == 0.0
        expected = sorted(e["dur"] for e in trace if e["ph"] == "X")
        assert sorted(each["dur"] for each in own) == expected
    arrows = {
        side: {e["id"] for e in events if e["ph"] == "s" and side in names[e["pid"]]}
        for side in ("simulated", "measured")
    }
    assert arrows["simulated"] and arrows["measured"]
    assert not arrows["simulated"] & arrows["measured"]


def test_traces_that_say_too_little() -> None:
    with pytest.raises(ValueError, match="the measured trace has no slices"):
        side_by_side(simulated(), [process(0, "rank 0")])
    slices = [{"ph": "X", "name": "post", "pid": 5, "tid": 7, "ts": 1.0, "dur": 3.0}]
    with pytest.raises(ValueError, match="the measured trace has a process 'python'"):
        side_by_side(simulated(), [process(5, "python"), *slices])
    with pytest.raises(ValueError, match="the measured trace has a process ''"):
        side_by_side(simulated(), slices)
