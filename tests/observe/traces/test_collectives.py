"""Traces of jobs over gloo, joined: clocks, who waited for whom, what a bound would save."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchrec_bls.sharding.costs.profile import load_profile
from torchrec_bls.sharding.costs.profiled import ProfiledCosts
from torchrec_bls.sharding.simulation.recorded.replay import replay

from tests.observe.traces.gloo_jobs import CALL_US, SENT_FLOATS, TOOK_US, GlooJob, written
from torchrec_bls.cli.main import run
from torchrec_bls.observe.traces.clock_offsets import UnrelatedClocksError
from torchrec_bls.observe.traces.kineto import TraceError
from torchrec_bls.observe.traces.lateness import lateness_of
from torchrec_bls.observe.traces.read_job import read_job
from torchrec_bls.observe.traces.recorded_job import RecordedJob
from torchrec_bls.rank_steps import Wait

RANKS, BATCHES = 4, 24


def durations(seed: int, batches: int = BATCHES) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.uniform(500, 1500, (RANKS, batches)) for _ in range(3)]


def job_of(folder: Path, traces: list[dict[str, Any]]) -> RecordedJob:
    return read_job(written(folder, traces))


@pytest.mark.parametrize("where", [0, 1], ids=["loading", "forward"])
def test_the_late_rank_is_named_and_clocks_are_recovered(tmp_path: Path, where: int) -> None:
    right = 0
    for seed in range(8):
        late = seed % RANKS
        work = durations(seed)
        work[where][late] += 1000
        offsets = np.random.default_rng(seed).uniform(-50_000, 50_000, RANKS)
        found = job_of(tmp_path, GlooJob(*work).traces(offsets))
        assert np.abs(found.offsets - (offsets - offsets[0])).max() < 100
        right += lateness_of(found).slowest == late
    assert right == 8


@pytest.mark.parametrize("in_turn", [False, True], ids=["alike", "late in turn"])
def test_no_rank_is_named_where_nobody_is_late(tmp_path: Path, in_turn: bool) -> None:
    for seed in range(8):
        work = durations(seed)
        if in_turn:
            work[0][np.arange(BATCHES) % RANKS, np.arange(BATCHES)] += 5000
        found = lateness_of(job_of(tmp_path, GlooJob(*work).traces(np.zeros(RANKS))))
        assert found.waited_least is not None and found.slowest is None, found.waited_least


def test_waits_are_those_of_the_job(tmp_path: Path) -> None:
    job = GlooJob(*durations(1))
    found = job_of(tmp_path, job.traces(np.zeros(RANKS)))
    assert found.step_us == pytest.approx(job.step_us, rel=0.01)
    waited = lateness_of(found).waited_us.sum(axis=1)
    np.testing.assert_allclose(waited, job.waited.mean(axis=1), rtol=0.02)


def test_a_replay_takes_as_long_as_the_job(tmp_path: Path) -> None:
    job = GlooJob(*durations(2))
    offsets = np.array([0.0, 40_000.0, -40_000.0, 123.0])
    found = job_of(tmp_path, job.traces(offsets))
    done = replay(found.recording, 0, np.zeros((RANKS, BATCHES)))
    assert done.step_us == pytest.approx(job.step_us, rel=1e-3)
    # Another 700 us a batch on rank 1, in loading.
    work = durations(2)
    work[0][1] += 700
    delays = np.zeros((RANKS, BATCHES))
    delays[1] = 700
    assert replay(found.recording, 0, delays).step_us == pytest.approx(
        GlooJob(*work).step_us, rel=1e-3
    )


def pipeline_step_us(work: list[np.ndarray], bound: int) -> float:
    """Returns a mean step of the job with lag: what follows a wait is of an older batch."""
    load, lookup, dense = work
    now = np.zeros(RANKS)
    posted = np.zeros((2, BATCHES))
    for step in range(BATCHES + 2 * bound):
        if step < BATCHES:
            now = now + load[:, step] + CALL_US
            posted[0, step] = now.max()
        if 0 <= (batch := step - bound) < BATCHES:
            now = np.maximum(now, posted[0, batch]) + TOOK_US + lookup[:, batch] + CALL_US
            posted[1, batch] = now.max()
        if 0 <= (batch := step - 2 * bound) < BATCHES:
            now = np.maximum(now, posted[1, batch]) + TOOK_US + dense[:, batch]
    return float(now.max()) / BATCHES


def test_what_a_bound_saves_is_what_the_job_takes_with_it(tmp_path: Path) -> None:
    work = durations(3)
    work[0] += np.random.default_rng(4).uniform(0, 5000, (RANKS, BATCHES))
    offsets = np.random.default_rng(5).uniform(-50_000, 50_000, RANKS)
    paths = written(tmp_path, GlooJob(*work).traces(offsets))
    out = tmp_path / "out.json"
    assert run(["trace", *map(str, paths), f"--json={out}"]) == 0
    found = json.loads(out.read_text())["step_us_by_bound"]
    assert found["0"] == pytest.approx(GlooJob(*work).step_us, rel=0.01)
    for bound in (1, 2, 4, 8):
        assert found[str(bound)] == pytest.approx(pipeline_step_us(work, bound), rel=0.01)


def test_a_folder_stands_for_its_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = written(tmp_path, GlooJob(*durations(6)).traces(np.zeros(RANKS)))
    said = []
    for given in ([str(tmp_path)], [str(path) for path in paths]):
        assert run(["trace", *given]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_the_command_says_it_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = durations(6)
    work[1][2] += 3000
    paths = written(tmp_path, GlooJob(*work).traces(np.zeros(RANKS)))
    assert run(["trace", *map(str, paths), f"--perfetto={tmp_path / 'all.json'}"]) == 0
    text = capsys.readouterr().out
    assert f"4 ranks, {BATCHES} steps at bound 0" in text
    assert "Rank 2 holds the others up: it waited least" in text
    assert "bound 8: " in text
    # Over channels they would be shorter.
    assert "Exchanges are taken to last as long as the recorded ones." in text
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 100, 200, 300}


def test_steps_that_not_all_recorded_are_left_out(tmp_path: Path) -> None:
    job = GlooJob(*durations(7))
    traces = job.traces(np.zeros(RANKS))
    traces[1]["torchrec_bls"]["steps"] = BATCHES - 3
    found = job_of(tmp_path, traces)
    assert found.recording.steps == BATCHES - 3


def test_nothing_is_said_of_bounds_where_there_is_a_backward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = GlooJob(*durations(8)).traces(np.zeros(RANKS))
    first = traces[0]["traceEvents"][1]
    name = "autograd::engine::evaluate_function: AddmmBackward0"
    traces[0]["traceEvents"].append({**first, "name": name, "dur": 0.0})
    paths = written(tmp_path, traces)
    assert run(["trace", *map(str, paths)]) == 0
    assert "What a bound would make" not in capsys.readouterr().out
    assert run(["simulate", f"--trace={tmp_path}", "--bound=0,1"]) == 1
    assert "bound is 1, but the recorded job trains" in capsys.readouterr().err
    assert run(["simulate", f"--trace={tmp_path}", "--bound=0"]) == 0
    assert "4 ranks, training, 24 recorded steps" in capsys.readouterr().out


def removed(trace: dict[str, Any], name: str, number: int) -> None:
    """Removes an event of a name by its place among these."""
    own = [event for event in trace["traceEvents"] if event["name"] == name]
    trace["traceEvents"].remove(own[number])


def lacks_a_collective(traces: list[dict[str, Any]]) -> None:
    removed(traces[2], "c10d::alltoall_base_", 7)
    removed(traces[2], "gloo:all_to_all", 7)
    del traces[2]["torchrec_bls"]["collectives"][7]


def other_collective(traces: list[dict[str, Any]]) -> None:
    for event in traces[1]["traceEvents"]:
        event["name"] = event["name"].replace("alltoall_base_", "allreduce_")
        event["name"] = event["name"].replace("all_to_all", "all_reduce")
    for entry in traces[1]["torchrec_bls"]["collectives"]:
        entry["name"] = "gloo:all_reduce"


def other_sequences(traces: list[dict[str, Any]]) -> None:
    for entry in traces[3]["torchrec_bls"]["collectives"]:
        entry["sequence"] += 2


def other_steps(traces: list[dict[str, Any]]) -> None:
    traces[0]["torchrec_bls"]["steps"] += 1000
    for event in traces[0]["traceEvents"]:
        if event["name"].startswith("ProfilerStep#"):
            number = int(event["name"].split("#")[1])
            event["name"] = f"ProfilerStep#{number + 1000}"


def several_groups(traces: list[dict[str, Any]]) -> None:
    for trace in traces:
        trace["distributedInfo"]["pg_config"].append({"pg_name": "1", "ranks": [0, 1]})
        del trace["torchrec_bls"]


def without_events(name: str) -> Callable[[list[dict[str, Any]]], None]:
    def change(traces: list[dict[str, Any]]) -> None:
        events = traces[1]["traceEvents"]
        traces[1]["traceEvents"] = [event for event in events if name not in event["name"]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lacks_a_collective,
            "rank 2 has 1 collectives of process group '0' in step 3, but rank 0 2: it lacks "
            "number 1, all_to_all with sequence number 107",
        ),
        (
            other_collective,
            "collective 0 of process group '0' in step 0 is all_reduce with sequence number 100 "
            "on rank 1, but all_to_all .* different jobs",
        ),
        (other_sequences, "sequence number 102 on rank 3, but .* 100 on rank 0.*different steps"),
        (other_steps, r"no step was recorded by all ranks; .*0: '1000 to 1023'.*1: '0 to 23'"),
        (lambda traces: traces.pop(1), r"ranks \[0, 2, 3\]: rank 1 is missing"),
        (lambda traces: traces.pop(), r"ranks \[0, 1, 2\]: rank 3 is missing"),
        (several_groups, "has 2 process groups and does not say which .*record_step"),
        (without_events("ProfilerStep"), r"has no steps \(ranges ProfilerStep#0"),
        (
            without_events("all"),
            "has neither posts or waits of bounded-lag channels nor collectives of gloo",
        ),
        (without_events("c10d"), "rank 1 called 0 collectives, but gloo did 48"),
        (
            lambda traces: traces[0]["torchrec_bls"].update(format=9),
            "was recorded in format 9, but only 1 is known here",
        ),
        (lambda traces: traces[0].update(schemaVersion=2), "has schemaVersion 2, but only 1"),
        (
            lambda traces: traces[0]["torchrec_bls"]["collectives"].pop(),
            "the flight recorder has 47 of 48 collectives",
        ),
        (
            lambda traces: traces[0]["torchrec_bls"]["collectives"][5].update(name="gloo:barrier"),
            "the flight recorder's collective 5 is a gloo:barrier, but gloo did gloo:all_to_all",
        ),
    ],
)
def test_traces_that_do_not_join(tmp_path: Path, change: Any, message: str) -> None:
    traces = GlooJob(*durations(9)).traces(np.zeros(RANKS))
    change(traces)
    with pytest.raises(TraceError, match=message):
        job_of(tmp_path, traces)


def test_collectives_of_the_profiler_alone(tmp_path: Path) -> None:
    traces = GlooJob(*durations(12)).traces(np.zeros(RANKS), recorded=False)
    with pytest.raises(TraceError, match=r"profiler alone never do: record them with torchrec"):
        job_of(tmp_path, traces)


def test_calls_that_gloo_did_otherwise(tmp_path: Path) -> None:
    traces = GlooJob(*durations(10)).traces(np.zeros(RANKS))
    name = next(e for e in traces[1]["traceEvents"] if e["name"].startswith("c10d"))
    name["name"] = "c10d::barrier"
    with pytest.raises(
        TraceError, match="rank 1 called c10d::barrier as its collective 0, but gloo"
    ):
        job_of(tmp_path, traces)


def test_clocks_that_nothing_relates(tmp_path: Path) -> None:
    traces = GlooJob(*durations(11)).traces(np.zeros(RANKS))
    for trace in traces:
        for event in (*trace["traceEvents"], *trace["torchrec_bls"]["collectives"]):
            event["name"] = event["name"].replace("alltoall_base_", "broadcast_")
            event["name"] = event["name"].replace("all_to_all", "broadcast")
    with pytest.raises(UnrelatedClocksError, match="no collective is one of all ranks"):
        job_of(tmp_path, traces)


def overlapped(ends_at: float) -> dict[str, Any]:
    """A rank that works from 0 to 100 while a collective runs, and reads its result at 150."""

    def event(name: str, thread: int, begin: float, end: float, number: int) -> dict[str, Any]:
        category = "cpu_op" if "::" in name else "user_annotation"
        where = {"ph": "X", "cat": category, "name": name, "tid": thread}
        ids = {"args": {"Record function id": number}}
        return {**where, **ids, "ts": begin, "dur": end - begin}

    return {
        "traceEvents": [
            event("ProfilerStep#0", 1, 0, 200, 1),
            event("c10d::allreduce_", 1, 0, 10, 2),
            event("gloo:all_reduce", 2, 10, ends_at, 3),
            event("aten::mm", 1, 10, 110, 4),
            event("aten::view", 1, 110, 112, 5),
            event("aten::add", 1, 150, 190, 6),
        ]
    }


def execution_trace(ids: list[int]) -> dict[str, Any]:
    tensors = {2: [[[90, 7, 0, 4, 4, "cpu"]], "<Object>"], 6: [[91, 7, 0, 4, 4, "cpu"], 1]}
    names = {1: "ProfilerStep#0", 2: "c10d::allreduce_", 4: "aten::mm", 6: "aten::add"}
    nodes = [
        {
            "name": names.get(number, "other"),
            "inputs": {"values": tensors.get(number, [[92, 8, 0, 4, 4, "cpu"]])},
            "attrs": [{"name": "rf_id", "value": number}],
        }
        for number in ids
    ]
    return {"schema": "1.1.1-chakra.0.0.4", "nodes": nodes}


def waits_of(folder: Path, trace: dict[str, Any]) -> list[Wait]:
    found = job_of(folder, [trace])
    return [op for op in found.recording.ranks[0][0] if isinstance(op, Wait)]


def test_a_result_that_was_there_in_time_is_waited_for_where_it_is_read(tmp_path: Path) -> None:
    assert waits_of(tmp_path, overlapped(90)) == []
    (tmp_path / "execution_trace_rank0.json").write_text(json.dumps(execution_trace([2, 4, 6])))
    found = job_of(tmp_path, [overlapped(90)])
    # It is read at 150: had it come later, all that follows would have waited.
    names = [type(op).__name__ for op in found.recording.ranks[0][0]]
    assert names == ["Work", "Begin", "Work", "Wait", "Work"]
    works = [op.us for op in found.recording.ranks[0][0] if type(op).__name__ == "Work"]
    assert works == [10, 140, 50]


@pytest.mark.parametrize(
    ("ends_at", "waits"), [(140, True), (105, False), (113, False), (153, False)]
)
def test_a_rank_waited_if_it_ran_nothing_and_then_went_on(
    tmp_path: Path, ends_at: float, waits: bool
) -> None:
    assert bool(waits_of(tmp_path, overlapped(ends_at))) == waits


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema": "1.1.1-chakra.0.0.4", "nodes": [', "is no JSON, or cut off"),
        ("[]", r"expected object, got \[\]: it is no execution trace"),
        ('{"schema": "2.0", "nodes": []}', "has schema '2.0', but only 1.1"),
        ('{"schema": "1.1.1-chakra.0.0.4", "nodes": [7]}', r"nodes\[0\]: expected object, got 7"),
        (json.dumps(execution_trace([1001])), "no record-function id in common"),
    ],
)
def test_execution_traces_that_are_none(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "execution_trace_rank0.json").write_text(content)
    with pytest.raises(TraceError, match=message):
        job_of(tmp_path, [overlapped(90)])


def simulate(folder: Path, *options: str) -> dict[str, Any]:
    out = folder / "figures.json"
    assert run(["simulate", f"--trace={folder}", *options, f"--json={out}"]) == 0
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_simulate_replays_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = GlooJob(*durations(12, batches=8))
    written(tmp_path, job.traces(np.zeros(RANKS)))
    perfetto, page = tmp_path / "trace.json", tmp_path / "page.html"
    files = f"--perfetto={perfetto}", f"--html={page}", "--choose=bound"
    report = simulate(tmp_path, "--bound=0,2", "--batches=32", *files)
    cells = re.findall(r"<td.*?>(.*?)</td>", page.read_text())
    assert len(cells) == 2 * 8 and "&lt;- take this" in cells
    assert page.read_text().count('<tr class="marked">') == 1
    titles = re.findall(r'<svg .*? aria-label="(.*?)"', page.read_text())
    assert titles == ["steps a second", "latency of a batch, ms"]
    steps = [each["step_us"] / 1000 for each in report["bounds"]]
    assert [float(cell) for cell in cells[1::8]] == pytest.approx(steps, abs=1e-3)
    assert report["ranks"] == RANKS and report["recorded_steps"] == 8
    assert [each["bound"] for each in report["bounds"]] == [0, 2]
    assert report["bounds"][0]["step_us"] == pytest.approx(job.step_us, rel=0.02)
    assert "4 ranks, inference, 8 recorded steps" in capsys.readouterr().out
    events = json.loads(perfetto.read_text())["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    sides = ("simulated", "measured")
    assert named == {f"rank {rank} {side}" for rank in range(RANKS) for side in sides}
    held_up = simulate(tmp_path, "--bound=0", "--batches=32", "--delays=constant:3ms")
    assert held_up["bounds"][0]["step_us"] == pytest.approx(job.step_us + 3000, rel=0.02)


def test_exchanges_of_another_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = GlooJob(*durations(14, batches=8))
    paths = written(tmp_path, job.traces(np.zeros(RANKS)))
    profile = "epyc-milan-2-cores"
    bytes_sent = [4.0 * SENT_FLOATS] * RANKS
    costs = ProfiledCosts(load_profile(profile))
    us = costs.all_to_all(bytes_sent, bytes_sent, "bls").microseconds
    # Loads and lookups until the last rank posts, reading beside, and no worker that is called.
    load, lookup, dense = job.load_us, job.lookup_us, job.dense_us
    ended, expected = np.zeros(RANKS), []
    for batch in range(8):
        ids = (ended + load[:, batch] + CALL_US).max() + us
        rows = (ids + lookup[:, batch] + CALL_US).max() + us
        ended = rows + dense[:, batch]
        expected.append(ended.max())
    report = simulate(tmp_path, "--bound=0", "--batches=8", f"--profile={profile}")
    assert report["bounds"][0]["step_us"] == pytest.approx(expected[-1] / 8, rel=0.01)
    assert report["channels_of"] == profile
    text = " ".join(capsys.readouterr().out.split())
    assert f"Exchanges are over channels, by profile {profile}." in text
    assert run(["trace", *map(str, paths), f"--profile={profile}"]) == 0
    said = re.search(f"by profile {profile}: bound 0 takes (.*) ms", capsys.readouterr().out)
    assert said is not None
    assert float(said[1]) == pytest.approx(expected[-1] / 8 / 1000, rel=0.01)


def test_bytes_that_were_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = GlooJob(*durations(15, batches=4)).traces(np.zeros(RANKS))
    for trace in traces:
        for entry in trace["torchrec_bls"]["collectives"]:
            entry["input_dtypes"] = ["Undefined"]
    written(tmp_path, traces)
    assert run(["simulate", f"--trace={tmp_path}", "--profile=epyc-milan-2-cores"]) == 1
    assert "how many bytes all_to_all 0 of process group '0' sent" in capsys.readouterr().err


def test_a_bound_is_chosen_within_a_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, GlooJob(*durations(12, batches=8)).traces(np.zeros(RANKS)))
    late = ("--bound=0,1,8", "--batches=200", "--delays=uniform:0-20ms", "--choose=bound")
    report = simulate(tmp_path, *late)
    step_us = {each["bound"]: each["step_us"] for each in report["bounds"]}
    near = [bound for bound, us in step_us.items() if us <= 1.03 * min(step_us.values())]
    assert report["chosen"] == min(near) > 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "<- take this" in line)
    assert line.split()[0] == str(report["chosen"])
    latency = {each["bound"]: each["latency_us"] / 1000 for each in report["bounds"]}
    limit = (latency[0] + latency[1]) / 2
    assert simulate(tmp_path, *late, f"--max-latency-ms={limit}")["chosen"] == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--plan=plan.json"], "so cannot be used with --plan: leave that out"),
        (["--dense-ms=3", "--link=1gbit"], "cannot be used with --link, --dense-ms: leave"),
        (["--choose=bound,codec"], "leaves nothing to choose but the bound: give --choose bound"),
        (["--max-latency-ms=9"], "leaves nothing to choose but the bound: give --choose bound"),
        (["--choose=bound", "--max-latency-ms=-1"], "must be a positive number"),
        (
            ["--choose=bound", "--max-latency-ms=1e-9"],
            "no bound has batches of 1e-09 ms: the least",
        ),
        (["--delays=ranks:1ms"], "delays of 1 ranks were given for 4"),
        (["--batches=0"], "of 4 ranks and 1 or more batches"),
        (["--bound=-1"], "bound is -1"),
        (["--profile=none"], "no profile 'none': give a .json file"),
    ],
)
def test_bad_options(
    tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, GlooJob(*durations(13, batches=4)).traces(np.zeros(RANKS)))
    assert run(["simulate", f"--trace={tmp_path}", *options]) == 1
    assert said in capsys.readouterr().err


def test_a_folder_without_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", f"--trace={tmp_path}"]) == 1
    assert "has no traces rank0.json, rank1.json, ...: record_step writes them" in (
        capsys.readouterr().err
    )
