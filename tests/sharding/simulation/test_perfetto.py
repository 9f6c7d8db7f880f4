"""Traces of simulations: what the slices, arrows and counters say."""

import json

import numpy as np
import pytest
from torchrec_bls.sharding.simulation.perfetto import trace_events
from torchrec_bls.sharding.simulation.program import Collect, Compute, Post, Ranks, graph_of
from torchrec_bls.sharding.simulation.timeline import Timeline, simulate

_THREADS = [(0, "main"), (1, "main")]


def _timeline(bound: int = 0, slow: float = 10.0) -> Timeline:
    program = [Compute("load", [2.0, slow]), Post("rows", 1.0), Collect("rows", 1.0, lag=bound)]
    return simulate(graph_of(program, Ranks.on_hosts(2, 2, 2), 3))


def test_it_is_json_that_names_ranks_and_threads() -> None:
    trace = json.loads(json.dumps(trace_events(_timeline(), _THREADS)))
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert names == ["rank 0", "rank 1", "main", "main"]


def test_slices_fill_each_thread_without_overlaps() -> None:
    timeline = _timeline()
    events = trace_events(timeline, _THREADS)["traceEvents"]
    for thread in range(2):
        own = [each for each in events if each["ph"] == "X" and each["tid"] == thread]
        own.sort(key=lambda each: each["ts"])
        ends = [each["ts"] + each["dur"] for each in own]
        assert [each["ts"] for each in own[1:]] == pytest.approx(ends[:-1])
        assert ends[-1] == pytest.approx(float(timeline.end.max()))


def test_waits_say_for_whom_and_arrows_begin_there() -> None:
    events = trace_events(_timeline(), _THREADS)["traceEvents"]
    waits = [each for each in events if each.get("cat") == "wait" and each["ph"] == "X"]
    # Rank 0 is done with its post at 3, rank 1 at 11, and so on in each step.
    assert [(each["pid"], each["name"], each["dur"]) for each in waits] == [
        (0, "waits for rank 1", 8.0)
    ] * 3
    begins = [each for each in events if each["ph"] == "s"]
    ends = [each for each in events if each["ph"] == "f"]
    assert {each["id"] for each in begins} == {each["id"] for each in ends} == {0, 1, 2}
    for begin in begins:
        inside = [
            each
            for each in events
            if each["ph"] == "X"
            and each["tid"] == begin["tid"] == 1
            and each["ts"] <= begin["ts"] < each["ts"] + each["dur"]
        ]
        assert [each["name"] for each in inside] == ["post rows"]


def test_the_counter_is_the_lag() -> None:
    events = trace_events(_timeline(bound=2, slow=100.0), _THREADS)["traceEvents"]
    ahead = [each for each in events if each["ph"] == "C"]
    most = {pid: max(e["args"]["steps"] for e in ahead if e["pid"] == pid) for pid in (0, 1)}
    assert most == {0: 2, 1: 0}
    assert np.all(np.diff([each["ts"] for each in ahead]) >= 0)


def test_other_threads_than_the_timelines() -> None:
    with pytest.raises(ValueError, match="1 names were given for 2 threads"):
        trace_events(_timeline(), _THREADS[:1])
