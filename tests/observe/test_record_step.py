"""Steps of real jobs over gloo, recorded, joined and replayed."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ExecutionTraceObserver
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec_bls.sharding.simulation.recorded.replay import replay

from tests.distributed.dlrm import make_batch, make_dlrm
from tests.processes import run
from torchrec_bls.cli.main import run as run_command
from torchrec_bls.observe import record_step
from torchrec_bls.observe.traces.execution_trace import read_execution_trace
from torchrec_bls.observe.traces.kineto import METADATA, TraceError, execution_trace_of
from torchrec_bls.observe.traces.lateness import lateness_of
from torchrec_bls.observe.traces.read_job import read_job, traces_in
from torchrec_bls.rank_steps import Begin, SeenCollective

RANKS, STEPS, LATE = 2, 6, 1
# Much longer than a step, and than what other processes keep a rank waiting for.
DELAY_S = 0.2


def record(rank: int, folder: Path, step: Callable[[], None]) -> None:
    for _ in range(2):
        step()
    with record_step(folder) as end_of_step:
        for _ in range(STEPS):
            if rank == LATE:
                time.sleep(DELAY_S)
            step()
            end_of_step()


def train(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pairs = dist.new_group(list(range(RANKS)))
    batch = torch.rand(32, 64)

    def step() -> None:
        optimizer.zero_grad()
        received = torch.empty_like(batch)
        dist.all_to_all_single(received, batch, group=pairs)
        model(received).sum().backward()
        optimizer.step()

    record(rank, folder, step)


def infer(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    model = make_dlrm(EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})).eval()
    batch = make_batch(rank, 0)

    def step() -> None:
        with torch.no_grad():
            model(batch)

    record(rank, folder, step)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    run(RANKS, train, folder)
    return folder


@pytest.fixture(scope="module")
def inference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inference")
    run(RANKS, infer, folder)
    return folder


def with_clocks_apart(folder: Path, to: Path, offset_us: int) -> list[Path]:
    """Copies traces, with the clock of the late rank so far ahead."""
    paths = []
    for rank, path in enumerate(traces_in(folder)):
        content = json.loads(path.read_text())
        content["baseTimeNanoseconds"] += 1000 * offset_us * (rank == LATE)
        paths.append(to / path.name)
        paths[-1].write_text(json.dumps(content))
        execution_trace_of(paths[-1]).write_bytes(execution_trace_of(path).read_bytes())
    return paths


@pytest.mark.parametrize("job", ["training", "inference"])
def test_who_was_late_whatever_the_clocks_say(
    job: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(job)
    found = read_job(traces_in(folder))
    assert found.recording.steps == STEPS
    assert found.recording.trains == (job == "training")
    lateness = lateness_of(found)
    assert lateness.slowest == LATE
    # The delay, but for what the other rank did meanwhile, and no longer than a step.
    assert 0.2 * DELAY_S * 1e6 < lateness.waited_us[0, LATE] <= found.step_us
    apart = read_job(with_clocks_apart(folder, tmp_path, 50_000))
    assert apart.offsets[LATE] - found.offsets[LATE] == pytest.approx(50_000, abs=1)
    assert lateness_of(apart).slowest == LATE


@pytest.mark.parametrize("job", ["training", "inference"])
def test_a_replay_takes_as_long_as_the_job(job: str, request: pytest.FixtureRequest) -> None:
    found = read_job(traces_in(request.getfixturevalue(job)))
    delays = np.zeros((RANKS, STEPS))
    # Both are of the same recording, however long its steps took.
    assert replay(found.recording, 0, delays).step_us == pytest.approx(found.step_us, rel=0.2)
    delays[1 - LATE] = 2e6 * DELAY_S
    # The other rank is now the late one.
    held_up = replay(found.recording, 0, delays).step_us
    assert held_up == pytest.approx(2e6 * DELAY_S + found.step_us - 1e6 * DELAY_S, rel=0.3)


def test_gloo_leaves_groups_and_sequence_numbers_to_the_flight_recorder(training: Path) -> None:
    content = json.loads(traces_in(training)[0].read_text())
    collectives = content[METADATA]["collectives"]
    # An all-to-all in the second group, an all-reduce of the gradients in the first.
    assert [each["name"] for each in collectives] == ["gloo:all_to_all", "gloo:all_reduce"] * STEPS
    groups = [each["group"] for each in collectives]
    assert groups == groups[:2] * STEPS and groups[0] != groups[1]
    for i in range(2):
        sequences = [each["sequence"] for each in collectives[i::2]]
        assert sequences == list(range(sequences[0], sequences[0] + STEPS))
    assert collectives[0]["input_sizes"] == [[32, 64]]
    first_step = read_job(traces_in(training)).recording.ranks[0][0]
    seen = [op.by for op in first_step if isinstance(op, Begin)]
    assert [each.sent_bytes for each in seen if isinstance(each, SeenCollective)] == [
        4 * 32 * 64,
        4 * (64 * 64 + 64 + 64 + 1),
    ]
    # What Kineto and the execution trace have of them by themselves.
    works = [event for event in content["traceEvents"] if event["name"].startswith("gloo:")]
    assert works and not any("Collective name" in event["args"] for event in works)
    nodes = read_execution_trace(execution_trace_of(traces_in(training)[0]))
    ids = sorted(event["args"]["Record function id"] for event in works)
    names = {event["args"]["Record function id"]: event["name"] for event in works}
    # DDP goes on when a work's future is done, and gloo ends the work's range after that: the
    # recording may end in between, and lack the last one.
    assert set(ids[:-1]) <= nodes.keys()
    assert all(nodes[id_].name == names[id_] for id_ in ids if id_ in nodes)


def test_the_commands_read_what_was_recorded(
    inference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["trace", *map(str, traces_in(inference))]) == 0
    text = capsys.readouterr().out
    assert f"Rank {LATE} holds the others up: it waited least" in text and "bound 8: " in text
    assert run_command(["simulate", f"--trace={inference}", "--bound=0,2", "--batches=12"]) == 0
    assert f"2 ranks, inference, {STEPS} recorded steps" in capsys.readouterr().out


def test_a_profile_says_nothing_of_a_training(
    training: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = map(str, traces_in(training))
    assert run_command(["trace", *traces, "--profile=epyc-milan-2-cores"]) == 1
    assert "it trains, or steps wait for what earlier ones" in capsys.readouterr().err


def test_nothing_is_left_of_a_block_that_raises(tmp_path: Path) -> None:
    with pytest.raises(KeyError), record_step(tmp_path) as end_of_step:
        end_of_step()
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with record_step(tmp_path) as end_of_step:
        torch.ones(2).sum()
        end_of_step()
    assert {path.name for path in tmp_path.iterdir()} == {
        "rank0.json",
        "execution_trace_rank0.json",
    }
    with pytest.raises(TraceError, match="nor collectives of gloo"):
        read_job(traces_in(tmp_path))


def test_a_block_without_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step was recorded: call"), record_step(tmp_path):
        torch.ones(2).sum()
    assert list(tmp_path.iterdir()) == []


def test_recording_twice_at_once(tmp_path: Path) -> None:
    with record_step(tmp_path) as end_of_step:
        with pytest.raises(RuntimeError, match="records steps already"), record_step(tmp_path):
            pass
        end_of_step()
    assert len(list(tmp_path.iterdir())) == 2


def test_another_observer_of_the_process(tmp_path: Path) -> None:
    other = ExecutionTraceObserver().register_callback(str(tmp_path / "other.json"))
    try:
        with (
            pytest.raises(RuntimeError, match="an ExecutionTraceObserver is registered"),
            record_step(tmp_path),
        ):
            pass
    finally:
        other.unregister_callback()


def test_folders_that_cannot_be_written_to(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"none is no folder: make it"),
        record_step(tmp_path / "none"),
    ):
        pass
    (tmp_path / "rank0.json").mkdir()
    with pytest.raises(ValueError, match=r"can't write .*rank0.json"), record_step(tmp_path):
        pass
