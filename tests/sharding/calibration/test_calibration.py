import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torchrec_bls.sharding.calibration import lookups, steps
from torchrec_bls.sharding.calibration import run as calibration
from torchrec_bls.sharding.calibration.collectives import CollectiveTask
from torchrec_bls.sharding.calibration.configurations import LookupConfiguration
from torchrec_bls.sharding.calibration.fit import lookup_retest_percent, lookup_time
from torchrec_bls.sharding.calibration.records import Records, read_records
from torchrec_bls.sharding.calibration.step_models import StepTask
from torchrec_bls.sharding.cost_interface import LookupWork
from torchrec_bls.sharding.costs.fitting.repeats import LOOKUP_TIMES
from torchrec_bls.sharding.costs.machine import Machine, this_machine
from torchrec_bls.sharding.costs.profile import ProfileError, load_profile
from torchrec_bls.sharding.costs.profiled import ProfiledCosts

from tests.mutations.files import write_measurements
from torchrec_bls.cli.main import run

MEMORY = {"buffer_bytes": [2**14, 2**15], "bytes_per_us": [9e3, 8e3], "row_us": [0.01, 0.02]}
SETTINGS = calibration.Settings(
    minutes=0.12, memory_bytes=2**22, world_sizes=(2,), between=2, uneven=2
)
WORK = LookupWork(
    rows=1000, dim=16, weight_bytes=4, samples=100, pooling=5.0, unique_rows=200, pooled=True
)


@pytest.mark.full
@pytest.mark.slow
def test_a_calibration_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "EVICTION_BYTES", 2**16)
    monkeypatch.setattr(calibration, "_ROUNDS", 1)
    monkeypatch.setattr(calibration, "_LEAST_STEP_TURNS", 1)
    monkeypatch.setattr(calibration, "_STEP_TURNS", 1)
    monkeypatch.setattr(calibration, "_LEAST_STEP_MODELS", 2)
    # Every group of lookups takes 89.8 ms by this clock, whatever the machine is busy with. 14 of
    # them fill the first visit's 1.248 s, but not as the records have them, in milliseconds.
    clock = SimpleNamespace(monotonic=(0.0898 * tick for tick in itertools.count()).__next__)
    monkeypatch.setattr(calibration, "time", clock)
    out = tmp_path / "profile.json"
    made = calibration.calibrate(out, "this machine", SETTINGS)
    profile = load_profile(out)
    assert profile.as_json() == made.as_json()
    assert profile.machine == this_machine()
    assert {"lookup_forward", "all_to_all_bls_2_ranks"} <= set(profile.retest_percent)
    for (_, backend, _), model in profile.collectives.items():
        assert (model.work is None) == (backend != "gloo")
    # Of channels over TCP only what they carry.
    over_tcp = {operation for operation, backend, _ in profile.collectives if backend == "tcp"}
    assert over_tcp == {"all_to_all"}
    costs = ProfiledCosts(profile)
    for estimate in (
        costs.lookup_forward([WORK]),
        costs.lookup_backward([WORK]),
        costs.all_to_all([4096.0, 4096.0], [4096.0, 4096.0], "bls"),
        costs.all_reduce(4096.0, 2, "gloo"),
    ):
        assert 0 < estimate.low <= estimate.microseconds <= estimate.high < 1e7

    _, entries = read_records(calibration.measurements_of(out))
    kinds = {(entry["backend"], entry["training"]) for entry in entries if entry["kind"] == "steps"}
    assert kinds == {
        (backend, training) for backend in ("bls", "gloo") for training in (True, False)
    }

    # A run that was killed in the middle of a line goes on with what is missing, and only that.
    file = calibration.measurements_of(out)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:20])
    calibration.calibrate(out, "this machine", SETTINGS)
    again = file.read_text().splitlines(keepends=True)
    assert again[: len(lines) - 1] == lines[:-1]
    first, *_ = (json.loads(line) for line in again[len(lines) - 1 :])
    assert what(first) == what(json.loads(lines[-1]))
    assert len({what(json.loads(line)) for line in again}) == len(again)


class Stop(Exception):
    pass


class Measurer:
    """Stands in for what measures: the same task takes the same time, and after so many
    measurements it stops."""

    def __init__(self, left: float) -> None:
        self.left = left

    def counted(self) -> None:
        if not self.left:
            raise Stop
        self.left -= 1

    def memory(self, most_bytes: int) -> dict[str, Any]:
        self.counted()
        return MEMORY

    def measure(
        self, configurations: list[LookupConfiguration], rounds: int
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        self.counted()
        found: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for each in configurations:
            counts = [1] * len(each.tables)
            workload = {"configuration": each.as_json(), "lookups": counts, "unique_rows": counts}
            times = {f"{name}_us": [each.seed + 1.0] for name in ("forward", "backward")}
            found.append(({**workload, "reuse_factors": [[1.0]] * len(counts)}, times))
        return found

    def collectives(self, tasks: list[CollectiveTask]) -> Iterator[list[dict[str, Any]]]:
        for task in tasks:
            self.counted()
            of_task = {"backend": task.backend, "world_size": task.world_size, "us": [1.0]}
            yield [{**message.as_json(), **of_task} for message in task.messages]

    def steps(
        self, world_size: int, tasks: list[StepTask], *, pinned: bool
    ) -> Iterator[dict[str, list[float]]]:
        for task in tasks:
            self.counted()
            yield {name: [float(task.model.batch)] for name in task.plans}


def test_a_calibration_that_stops_now_and_then_measures_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrated(name: str, most: float) -> list[dict[str, Any]] | None:
        measurer = Measurer(most)
        monkeypatch.setattr(calibration, "measure_memory", measurer.memory)
        monkeypatch.setattr(lookups, "LookupTimer", lambda optimizer: measurer)
        monkeypatch.setattr(calibration, "measure_collectives", measurer.collectives)
        monkeypatch.setattr(steps, "measure_steps", measurer.steps)
        out = tmp_path / f"{name}.json"
        try:
            calibration.calibrate(out, name, SETTINGS)
        except Stop:
            return None
        return read_records(calibration.measurements_of(out))[1]

    clock = SimpleNamespace(monotonic=(0.09 * tick for tick in itertools.count()).__next__)
    monkeypatch.setattr(calibration, "time", clock)
    monkeypatch.setattr(calibration, "_MOST_LOOKUPS", 100)  # drawing takes time
    monkeypatch.setattr(calibration, "fit_profile", lambda *_, **__: SimpleNamespace(save=print))
    at_once = calibrated("at once", math.inf)
    assert at_once is not None and len({what(entry) for entry in at_once}) == len(at_once)
    visits = {(entry["kind"], entry.get("visit")) for entry in at_once}
    assert visits == {
        ("memory", None),
        ("workload", None),
        ("steps", None),
        *itertools.product(("lookup", "retest"), range(3)),
        *itertools.product(("collectives",), (0, 2)),
    }
    attempts = iter(range(100))
    again = next(filter(None, (calibrated("again", 3) for _ in attempts)), None)
    assert again == at_once and next(attempts) > 10


def what(entry: dict[str, Any]) -> tuple[Any, ...]:
    names = ("kind", "visit", "index", "backend", "world_size")
    return tuple(entry.get(name) for name in names)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 2}, "settings {'seed': 1}, not {'seed': 2}"),
        ({"cpu": "another"}, "cpu a processor, not another"),
        ({"cores": 3}, "cores 2, not 3"),
        ({"versions": {"torch": "3"}}, "versions {'torch': '2'}, not {'torch': '3'}"),
    ],
)
def test_measurements_of_another_machine_or_other_settings(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "m.jsonl"
    machine = Machine("cpu", "a processor", 2, 2**30, versions={"torch": "2"})
    Records(path, {"seed": 1}, machine).add("memory", 0.5, MEMORY)
    again = Records(path, {"seed": 1}, machine)
    assert again.of("memory") == [{"kind": "memory", "seconds": 0.5, **MEMORY}]
    assert again.seconds("memory") == 0.5
    settings = {"seed": change.pop("seed", 1)}
    with pytest.raises(ProfileError, match=f"{re.escape(said)}.*remove it to start anew"):
        Records(path, settings, dataclasses.replace(machine, **change))


def test_the_times_of_lookups_by_hand() -> None:
    # No repeat decides alone: neither the luckiest nor the one that something disturbed.
    assert LOOKUP_TIMES["geometric mean"]([1.0, 10.0, 100.0]) == pytest.approx(10.0)
    assert LOOKUP_TIMES["tenth percentile"]([9.0, *range(10, 20)]) == pytest.approx(10.0)


def retested(repeats: Callable[[float], Iterable[float]]) -> list[dict[str, Any]]:
    """Forty lookups of 10 to 400 microseconds, each measured twice."""
    entries: list[dict[str, Any]] = []
    for index in range(40):
        entries.append(
            {"kind": "workload", "index": index, "configuration": {"pooled": index % 2 == 0}}
        )
        for kind in ("lookup", "retest"):
            times = {f"{d}_us": list(repeats(10.0 * (index + 1))) for d in ("forward", "backward")}
            entries.append({"kind": kind, "index": index, **times})
    return entries


def test_the_time_of_a_lookup_is_what_repeats_best() -> None:
    random = np.random.default_rng(0)
    # Few calls are disturbed, and those by far; or all of them are, more or less.
    quiet = retested(lambda us: us * (1 + 5 * (random.random(15) < 0.2) * random.random(15)))
    busy = retested(lambda us: us * np.exp(random.normal(0, 0.4, 15)))
    assert lookup_time(quiet) == "tenth percentile"
    assert lookup_time(busy) == "geometric mean"
    assert lookup_time([]) == "tenth percentile"


def test_how_much_two_measurements_of_a_lookup_differ() -> None:
    factor = iter([1.0, 1.1, 1.2, 1.0] * 40)  # forward, backward of a lookup, then of its retest
    entries = retested(lambda us: [us * next(factor)] * 3)
    for time in LOOKUP_TIMES:
        assert lookup_retest_percent(entries, "forward", time) == pytest.approx(20.0)
        assert lookup_retest_percent(entries, "backward", time, pooled=True) == pytest.approx(
            100 * (1 - 1 / 1.1)
        )
    assert lookup_retest_percent([], "forward", "geometric mean") is None


def test_measurements_of_before_may_have_dense_layers(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    Records(path, {}, Machine("cpu", "a processor", 2, 2**30)).add("memory", 0.5, MEMORY)
    line = json.loads(path.read_text().splitlines()[-1])
    common = {"seconds": line["seconds"], "kind": "dense"}
    dense = common | {
        "visit": 0,
        "index": 3,
        "op": {"kind": "linear"},
        "times": {"forward_us": [1]},
    }
    path.write_text(f"{path.read_text()}{json.dumps(dense)}\n")
    _, entries = read_records(path)
    assert [entry["kind"] for entry in entries] == ["memory", "dense"]


def test_measurements_that_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    Records(path, {}, Machine("cpu", "a processor", 2, 2**30)).add("memory", 0.5, MEMORY)
    whole = path.read_text()
    path.write_text(whole.replace('{"kind":"m', "{m") + "{}\n")
    with pytest.raises(ProfileError, match="line 2 is no JSON"):
        read_records(path)
    path.write_text("{}\n")
    with pytest.raises(ProfileError, match="is not a torchrec-bls measurements"):
        read_records(path)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("memory", {"row_us": [1]}, "buffer_bytes, bytes_per_us and row_us differ in length"),
        ("workload", {"index": -1}, "index: expected int >= 0, got -1"),
        ("workload", {"configuration": {}}, "configuration: 'tables' is missing"),
        ("workload", {"lookups": []}, "need an item for each of 2 tables"),
        ("lookup", {"index": 8}, "index: no workload 8 stands before it"),
        ("lookup", {"forward_us": "1"}, "forward_us: expected array, got '1'"),
        ("retest", {"index": 8}, "index: no lookup 8 stands before it"),
        ("collectives", {"messages": []}, "messages: the visit before measured others"),
        ("steps", {"model": {"name": "m"}}, "model: 'collections' is missing"),
        ("steps", {"us": {"best": [1.0]}}, "us: Invalid enum value 'best'"),
        ("steps", {"world_size": 2**30}, "ids is larger than any that is measured"),
        ("steps", {"kind": "step"}, "Invalid value 'step'"),
    ],
)
def test_a_measurement_of_another_form_is_refused_with_its_place(
    tmp_path: Path, kind: str, change: dict[str, Any], said: str
) -> None:
    path = write_measurements(tmp_path)
    read_records(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    number = max(n for n, line in enumerate(lines) if line.get("kind") == kind)
    lines[number] |= change
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ProfileError, match=re.escape(said)) as caught:
        read_records(path)
    assert str(caught.value).startswith(f"{path}, line {number + 1}: ")
    assert str(caught.value).endswith(": remove the file")


def test_the_command_measures_the_world_sizes_that_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[calibration.Settings] = []

    def calibrate(out: Path, name: str, settings: calibration.Settings) -> None:
        asked.append(settings)
        raise ProfileError("that was all")

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    command = ["calibrate", "--out", str(tmp_path / "profile.json")]
    for more in ([], ["--world-sizes", "3", "8"]):
        assert run([*command, *more]) == 1
    assert [settings.world_sizes for settings in asked] == [(2, 4), (3, 8)]
    assert run([*command, "--world-sizes", "1"]) == 1
    assert "world sizes of at least 2" in capsys.readouterr().err


def test_the_command_refuses_another_kind_of_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["calibrate", "--out", str(tmp_path / "profile.txt")]) == 1
    assert "a profile is a .json file" in capsys.readouterr().err
