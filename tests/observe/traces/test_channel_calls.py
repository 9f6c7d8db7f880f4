"""Traces of ranks, joined: clocks, who waited for whom, and what a bound would save."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.observe.traces.jobs import run_job, traces_of
from torchrec_bls import BoundedLagChannel
from torchrec_bls.cli.main import run
from torchrec_bls.observe.traces.channel_calls import (
    ChannelCalls,
    JoinedTraces,
    job_of_channels,
    join,
    read_channel_calls,
)
from torchrec_bls.observe.traces.kineto import TraceError, read_kineto
from torchrec_bls.observe.traces.lateness import lateness_of
from torchrec_bls.observe.traces.merged_trace import merged_trace
from torchrec_bls.processes import run as run_ranks

RANKS, BATCHES = 4, 120


def written(folder: Path, traces: list[dict[str, Any]]) -> list[Path]:
    paths = [folder / f"rank{rank}.json" for rank in range(len(traces))]
    for path, trace in zip(paths, traces, strict=True):
        path.write_text(json.dumps(trace))
    return paths


def read_trace(path: Path, rank: int) -> ChannelCalls:
    return read_channel_calls(read_kineto(path, rank))


def joined(folder: Path, times: np.ndarray, offsets: np.ndarray, **others: Any) -> JoinedTraces:
    paths = written(folder, traces_of(times, offsets, **others))
    return join([read_trace(path, rank) for rank, path in enumerate(paths)])


def durations(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.uniform(500, 1500, (RANKS, BATCHES)) for _ in range(3)]


@pytest.mark.parametrize("where", [0, 1], ids=["loading", "lookup"])
@pytest.mark.parametrize("late", range(RANKS))
def test_the_late_rank_is_named_whatever_the_clocks_say(
    tmp_path: Path, late: int, where: int
) -> None:
    work = durations(late)
    work[where][late] += 2000
    times, _ = run_job(*work)
    offsets = np.random.default_rng(late).uniform(-50_000, 50_000, RANKS)
    found = joined(tmp_path, times, offsets)
    assert np.abs(found.offsets - (offsets - offsets[0])).max() < 100
    lateness = lateness_of(job_of_channels(found))
    assert lateness.slowest == late
    assert lateness.waited_us[late].sum() < 0.3 * lateness.waited_us.sum(axis=1).max()


@pytest.mark.parametrize("in_turn", [False, True], ids=["alike", "late in turn"])
def test_no_rank_is_named_where_nobody_is_late(
    tmp_path: Path, in_turn: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(8):
        work = durations(seed)
        if in_turn:
            work[0][np.arange(BATCHES) % RANKS, np.arange(BATCHES)] += 5000
        times, _ = run_job(*work)
        found = joined(tmp_path, times, np.zeros(RANKS))
        assert lateness_of(job_of_channels(found)).slowest is None
    # The command also replays the job under bounds, which takes a second or two.
    paths = [str(tmp_path / f"rank{rank}.json") for rank in range(RANKS)]
    out = tmp_path / "found.json"
    assert run(["trace", *paths, f"--json={out}"]) == 0
    assert "No rank stands out: were rank " in capsys.readouterr().out
    assert json.loads(out.read_text())["slowest"] is None


def test_waits_are_those_of_the_job(tmp_path: Path) -> None:
    times, step = run_job(*durations(1))
    job = job_of_channels(joined(tmp_path, times, np.zeros(RANKS)))
    lateness = lateness_of(job)
    assert job.step_us == pytest.approx(step, rel=0.02)
    waited = 0.0
    for channel in range(2):
        sent = times[channel, 0, 1].max(axis=0)
        waited += np.maximum(sent - times[channel, 1, 0], 0).sum() / BATCHES
    # Roundings of clocks of some ten microseconds move between ranks.
    assert lateness.waited_us.sum() == pytest.approx(waited, rel=0.1)
    assert (np.diag(lateness.waited_us) < 50).all()


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_what_a_bound_saves_is_what_the_job_takes_with_it(tmp_path: Path, bound: int) -> None:
    work = durations(2)
    work[0] += np.random.default_rng(3).uniform(0, 5000, (RANKS, BATCHES))
    times, _ = run_job(*work)
    offsets = np.random.default_rng(4).uniform(-50_000, 50_000, RANKS)
    paths = written(tmp_path, traces_of(times, offsets))
    assert run(["trace", *map(str, paths), f"--json={tmp_path / 'out.json'}"]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    _, with_bound = run_job(*work, bound=bound)
    assert report["step_us_by_bound"][str(bound)] == pytest.approx(with_bound, rel=0.05)


def test_steps_that_not_all_recorded_are_left_out(tmp_path: Path) -> None:
    times, _ = run_job(*durations(5))
    traces = traces_of(times, np.zeros(RANKS), first=1000)
    for rank, trace in enumerate(traces):
        gone = {f"seq={1000 + each} " for each in range(rank)}
        trace["traceEvents"] = [
            event
            for event in trace["traceEvents"]
            if not any(number in event["name"] for number in gone)
        ]
    paths = written(tmp_path, traces)
    found = join([read_trace(path, rank) for rank, path in enumerate(paths)])
    assert found.start.shape == (4, RANKS, BATCHES - (RANKS - 1))
    np.testing.assert_allclose(
        found.end[0] - found.start[0], times[0, 0, 1, :, 3:] - times[0, 0, 0, :, 3:], atol=1e-6
    )


def test_ranks_are_those_that_the_files_say_and_may_be_compressed(tmp_path: Path) -> None:
    times, _ = run_job(*durations(6))
    paths = []
    for rank, trace in reversed(list(enumerate(traces_of(times, np.zeros(RANKS))))):
        paths.append(tmp_path / f"{rank}.json.gz")
        paths[-1].write_bytes(gzip.compress(json.dumps(trace).encode()))
    found = join([read_trace(path, number) for number, path in enumerate(paths)])
    assert [each.trace.source for each in found.traces] == list(reversed(paths))


def test_times_count_from_the_base_that_a_trace_names(tmp_path: Path) -> None:
    times, _ = run_job(*durations(7))
    offsets = np.array([0.0, 30.0, -7.0, 500.0])
    traces = traces_of(times, np.zeros(RANKS))
    for trace, offset in zip(traces, offsets, strict=True):
        trace["baseTimeNanoseconds"] = int(1e12 + 1000 * offset)
    paths = written(tmp_path, traces)
    found = join([read_trace(path, rank) for rank, path in enumerate(paths)])
    assert np.abs(found.offsets - offsets).max() < 100


def test_one_trace_has_all_ranks_by_one_clock(tmp_path: Path) -> None:
    times, _ = run_job(*durations(8))
    offsets = np.array([0.0, 40_000.0, -40_000.0, 123.0])
    merged = merged_trace(job_of_channels(joined(tmp_path, times, offsets)))
    names = {
        event["pid"]: event["args"]["name"] for event in merged if event["name"] == "process_name"
    }
    assert names == {0: "rank 0", 100: "rank 1", 200: "rank 2", 300: "rank 3"}
    for rank in range(RANKS):
        (added,) = (e for e in merged if e["name"] == "aten::add" and e["pid"] == 100 * rank)
        assert abs(added["ts"]) < 200
    arrows = [event["id"] for event in merged if event["ph"] == "s"]
    assert len(set(arrows)) == RANKS


def test_the_command_says_it_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = durations(9)
    work[0][2] += 3000
    times, _ = run_job(*work)
    paths = written(tmp_path, traces_of(times, np.zeros(RANKS)))
    out = tmp_path / "all.json"
    assert run(["trace", *map(str, paths), f"--perfetto={out}"]) == 0
    text = capsys.readouterr().out
    assert "4 ranks, 120 steps at bound 0" in text
    assert "Rank 2 holds the others up: it waited least" in text
    assert "bound 8: " in text and "last as long as the recorded ones" not in text
    assert len(json.loads(out.read_text())["traceEvents"]) > 4 * 4 * BATCHES


def test_nothing_is_said_of_bounds_for_jobs_that_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times, _ = run_job(*durations(10), bound=1)
    paths = written(tmp_path, traces_of(times, np.zeros(RANKS), bound=1))
    assert run(["trace", *map(str, paths)]) == 0
    text = capsys.readouterr().out
    assert "steps at bound 1" in text and "What a bound would make" not in text


GOOD = {"ph": "X", "name": "bls::a post seq=0 lag=0 bound=0", "pid": 1, "tid": 1, "ts": 1, "dur": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no JSON, or cut off"),
        ('{"traceEvents": [', "is no JSON, or cut off"),
        (
            '{"traceEvents": [], "x": ' + "[" * 10**5,
            "objects too deep in each other: record all ranks",
        ),
        ("[]", r"rank0.json: expected object, got \[\]: record all ranks"),
        ('{"traceEvents": 7}', "traceEvents: expected array, got 7"),
        ('{"traceEvents": [7]}', r"traceEvents\[0\]: expected object, got 7"),
        ('{"traceEvents": []}', "has no posts or waits of bounded-lag channels"),
        (
            '{"traceEvents": [], "baseTimeNanoseconds": "x"}',
            "Nanoseconds: expected .*, got 'x'",
        ),
        (
            json.dumps({"traceEvents": [{**GOOD, "dur": "long"}]}),
            "dur: expected float, got 'long'",
        ),
        (json.dumps({"traceEvents": [{**GOOD, "ts": None}]}), "has a range without times"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=message):
        read_trace(path, 0)


def test_compressed_files_that_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [GOOD]}).encode())[:-9])
    with pytest.raises(TraceError, match=r"is a damaged \.gz, or cut off"):
        read_trace(path, 0)


def without(traces: list[dict[str, Any]], rank: int, text: str) -> list[dict[str, Any]]:
    events = traces[rank]["traceEvents"]
    traces[rank]["traceEvents"] = [event for event in events if text not in event["name"]]
    return traces


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda traces: traces[:1] + traces[2:], r"traces are of ranks \[0, 2, 3\]"),
        (lambda traces: traces[:2] * 2, r"traces are of ranks \[0, 0, 1, 1\]"),
        (
            lambda traces: without(traces, 2, "embeddings wait"),
            "ranks 0 and 2 do not both have a wait of channel 'ebc.table_wise.embeddings'",
        ),
        (
            lambda traces: without(traces, 3, "ids post seq=17 "),
            "rank 3 has no post of channel 'ebc.table_wise.ids' with sequence number 17",
        ),
        (
            lambda traces: without(traces, 1, "seq="),
            "has no posts or waits of bounded-lag channels",
        ),
        (
            lambda traces: [without([trace], 0, "embeddings post")[0] for trace in traces],
            "channel 'ebc.table_wise.embeddings' lacks posts or waits: record whole steps",
        ),
    ],
)
def test_traces_that_do_not_join(tmp_path: Path, change: Any, message: str) -> None:
    times, _ = run_job(*durations(11))
    paths = written(tmp_path, change(traces_of(times, np.zeros(RANKS))))
    with pytest.raises(TraceError, match=message):
        join([read_trace(path, rank) for rank, path in enumerate(paths)])


def test_ranks_that_recorded_different_steps(tmp_path: Path) -> None:
    times, _ = run_job(*durations(12))
    later = traces_of(times, np.zeros(RANKS), first=1000)
    paths = written(tmp_path, [*traces_of(times, np.zeros(RANKS))[:3], later[3]])
    with pytest.raises(TraceError, match=r"no two steps .*0: '0 to 119'.*3: '1000 to 1119'"):
        join([read_trace(path, rank) for rank, path in enumerate(paths)])


def test_the_command_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def profile_steps(rank: int, folder: Path) -> None:
    name = "ebc.table_wise.ids"
    with BoundedLagChannel(dist.group.WORLD, slot_bytes=256, name=name) as channel:
        for step in range(5):
            if step == 2:
                profiler = profile(activities=[ProfilerActivity.CPU])
                profiler.start()
            channel.post([[], []])
            channel.wait().release()
        profiler.stop()
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json"))


def test_what_the_profiler_writes_is_read(tmp_path: Path) -> None:
    run_ranks(2, profile_steps, tmp_path, deadline_s=60, backend="gloo")
    for rank in range(2):
        # As of the other rank, were the file not to say whose it is.
        trace = read_trace(tmp_path / f"rank{rank}.json", 1 - rank)
        assert trace.rank == rank
        assert trace.bounds == {"ebc.table_wise.ids": 0}
        for action in ("post", "wait"):
            calls = trace.calls["ebc.table_wise.ids", action]
            assert sorted(calls) == [2, 3, 4]
            assert all(begin <= end for begin, end in calls.values())
