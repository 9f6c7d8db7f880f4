"""Events of traces: a file that ui.perfetto.dev opens, arrows that hit their slices."""

import json
from pathlib import Path

from torchrec_bls.rendering.trace import (
    Moment,
    arrow,
    counter,
    moved,
    process_name,
    slice_of,
    thread_name,
    write_trace,
)


def test_a_file_has_all_events(tmp_path: Path) -> None:
    events = [
        process_name(1, "rank 1"),
        thread_name(1, 0, "main"),
        slice_of("step", Moment(1, 0, 2.0), 5.0, args={"step": 3}),
        counter("slots", 1, 4.0, slots=2),
    ]
    write_trace(tmp_path / "trace.json", iter(events))
    assert json.loads((tmp_path / "trace.json").read_text()) == {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "rank 1"}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 0, "args": {"name": "main"}},
            {
                **{"ph": "X", "name": "step", "pid": 1, "tid": 0},
                **{"ts": 2.0, "dur": 3.0, "args": {"step": 3}},
            },
            {"ph": "C", "name": "slots", "pid": 1, "ts": 4.0, "args": {"slots": 2}},
        ],
    }


def test_an_arrow_begins_within_the_slice_that_ends_there() -> None:
    begin, end = arrow("rows", "message", "0", Moment(0, 2, 7.0), Moment(1, 3, 7.0))
    assert 6.999 < begin["ts"] < 7.0 and end["ts"] == 7.0
    assert (begin["pid"], begin["tid"], end["pid"], end["tid"]) == (0, 2, 1, 3)
    assert {each: begin[each] for each in ("name", "cat", "id")} == {
        each: end[each] for each in ("name", "cat", "id")
    }


def test_events_of_two_sources_have_other_arrows_and_one_clock() -> None:
    event = {"ph": "s", "id": 7, "pid": "python", "ts": 10.0, "name": "x"}
    assert moved(event, 3, -4.0, "rank 1") == {
        **event,
        **{"id": "rank 1 7", "pid": 3, "ts": 6.0},
    }
    named = process_name(5, "rank 0")
    assert moved(named, 2, 1.0, "a") == {**named, "pid": 2}
