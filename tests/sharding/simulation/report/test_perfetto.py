"""Traces of simulations: what the slices, arrows and counters say."""

import json
from typing import Any

import numpy as np
import pytest
from torchrec_bls.sharding.simulation.engine.timeline import Timeline, simulate
from torchrec_bls.sharding.simulation.program import Ranks, graph_of
from torchrec_bls.sharding.simulation.report.perfetto import trace_events

from torchrec_bls.rank_steps import Begin, Exchange, Messages, Wait, Work

_THREADS = [(0, "main"), (1, "main")]
_ROWS = Exchange("rows")
_POST = Begin(_ROWS, Messages(), work_us=1.0, finish_us=1.0)


def _timeline(bound: int = 0, slow: float = 10.0) -> Timeline:
    program = [Work([2.0, slow], "load"), _POST, Wait(_ROWS, lag=bound)]
    return simulate(graph_of(program, Ranks.on_hosts(2, 2, 2), 3))


def test_it_is_json_that_names_ranks_and_threads() -> None:
    events = json.loads(json.dumps(trace_events(_timeline(), _THREADS)))
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["rank 0", "rank 1", "main", "main"]


def test_slices_fill_each_thread_without_overlaps() -> None:
    timeline = _timeline()
    events = trace_events(timeline, _THREADS)
    for thread in range(2):
        own = [each for each in events if each["ph"] == "X" and each["tid"] == thread]
        own.sort(key=lambda each: each["ts"])
        ends = [each["ts"] + each["dur"] for each in own]
        assert [each["ts"] for each in own[1:]] == pytest.approx(ends[:-1])
        assert ends[-1] == pytest.approx(float(timeline.end.max()))


def _slices_around(events: list[Any], arrow: Any) -> list[str]:
    return [
        each["name"]
        for each in events
        if each["ph"] == "X"
        and (each["pid"], each["tid"]) == (arrow["pid"], arrow["tid"])
        and each["ts"] <= arrow["ts"] < each["ts"] + each["dur"]
    ]


def test_waits_say_for_whom_and_arrows_begin_there() -> None:
    events = trace_events(_timeline(), _THREADS)
    waits = [each for each in events if each.get("cat") == "wait" and each["ph"] == "X"]
    # Rank 0 is done with its post at 3, rank 1 at 11, and so on in each step.
    assert [(each["pid"], each["name"], each["dur"]) for each in waits] == [
        (0, "waits for rank 1", 8.0)
    ] * 3
    arrows = [each for each in events if each.get("cat") == "wait"]
    begins = [each for each in arrows if each["ph"] == "s"]
    ends = [each for each in arrows if each["ph"] == "f"]
    assert {each["id"] for each in begins} == {each["id"] for each in ends} == {0, 1, 2}
    for begin in begins:
        assert begin["tid"] == 1
        assert _slices_around(events, begin) == ["post rows"]


def test_each_message_is_an_arrow_from_its_post_to_its_reading() -> None:
    events = trace_events(_timeline(bound=1), _THREADS)
    arrows = [each for each in events if each.get("cat") == "message"]
    begins = {each["id"]: each for each in arrows if each["ph"] == "s"}
    ends = {each["id"]: each for each in arrows if each["ph"] == "f"}
    # Three batches, each from rank to rank both ways.
    assert begins.keys() == ends.keys() and len(begins) == 6
    for name, begin in begins.items():
        end = ends[name]
        assert {begin["pid"], end["pid"]} == {0, 1}
        assert begin["ts"] < end["ts"]
        assert _slices_around(events, begin) == ["post rows"]
        assert _slices_around(events, end) == ["collect rows"]


def test_of_many_ranks_there_are_only_the_messages_that_were_waited_for() -> None:
    program = [Work(np.arange(9.0), "load"), _POST, Wait(_ROWS)]
    timeline = simulate(graph_of(program, Ranks.on_hosts(9, 9, 9), 2))
    events = trace_events(timeline, [(rank, "main") for rank in range(9)])
    assert {each["cat"] for each in events if each["ph"] == "s"} == {"wait"}


def test_slots_are_filled_until_the_last_receiver_releases_them() -> None:
    # Rank 0 posts at 2 and reads when rank 1 has posted at 11; both have read at 12.
    events = trace_events(_timeline(), _THREADS)
    counts = [each for each in events if each["name"] == "slots of rows"]
    of_rank = [
        [(each["ts"], each["args"]["slots"]) for each in counts if each["pid"] == rank]
        for rank in (0, 1)
    ]
    assert of_rank[0][:2] == [(2.0, 1), (12.0, 0)]
    assert of_rank[1][:2] == [(10.0, 1), (12.0, 0)]
    assert all(own[-1][1] == 0 for own in of_rank)
    ahead = trace_events(_timeline(bound=2, slow=100.0), _THREADS)
    # The two batches that it is ahead, and the one that it posts.
    slots = [each["args"]["slots"] for each in ahead if each["name"] == "slots of rows"]
    assert max(slots) == 3


def test_the_counter_is_the_lag() -> None:
    events = trace_events(_timeline(bound=2, slow=100.0), _THREADS)
    ahead = [each for each in events if each["name"] == "steps ahead"]
    most = {pid: max(e["args"]["steps"] for e in ahead if e["pid"] == pid) for pid in (0, 1)}
    assert most == {0: 2, 1: 0}
    assert np.all(np.diff([each["ts"] for each in ahead]) >= 0)


def test_other_threads_than_the_timelines() -> None:
    with pytest.raises(ValueError, match="1 names were given for 2 threads"):
        trace_events(_timeline(), _THREADS[:1])
