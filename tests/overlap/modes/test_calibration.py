"""All-reduces beside a backward are measured on real ranks, and added to a profile."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch._C._distributed_c10d import TCPStore
from torchrec_bls.sharding.costs.machine import this_machine
from torchrec_bls.sharding.costs.profile import Profile, load_profile

from tests import processes
from tests.sharding.synthetic import small_profile
from torchrec_bls.cli import main
from torchrec_bls.overlap.modes import calibration
from torchrec_bls.overlap.modes.calibration import (
    OverlapSettings,
    Samples,
    calibrate_overlap,
    measure_groups,
)
from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.overlap.modes.fitting import ModeSamples
from torchrec_bls.overlap.modes.mode import Mode, overlap_of, with_modes
from torchrec_bls.overlap.modes.timer import LEAST_SIZES, SIZES
from torchrec_bls.processes import run

# No time: as little as is measured in any case.
SETTINGS = OverlapSettings(0.0, (2,), sizes=tuple(16384 * (1 + step) for step in range(7)))
DEADLINE = 120.0


def profile_of_this_machine() -> Profile:
    return dataclasses.replace(small_profile(), machine=this_machine())


def measured_on_rank(rank: int) -> Samples:
    return measure_groups(SETTINGS)


def test_all_modes_are_measured_alone_and_beside_a_backward() -> None:
    of_ranks = processes.run(2, measured_on_rank, deadline=DEADLINE)
    for samples in of_ranks:
        assert set(samples) == {("gloo", 2), ("bls", 2)}
        assert list(samples["gloo", 2]) == ["float32", "uint8", "uint4"]
        assert list(samples["bls", 2]) == ["float32"]
    for key, modes in of_ranks[0].items():
        for name, mode in modes.items():
            # The largest are left out, for which there is no time.
            assert mode.bytes.tolist() == list(SETTINGS.sizes[:LEAST_SIZES])
            for field in ("alone_us", "overlapped_us", "compute_rate"):
                numbers = getattr(mode, field)
                assert numbers.shape == (6, LEAST_SIZES)
                assert (numbers > 0).all()
                # They are of the slowest rank, or of all ranks, and so the same on each.
                assert np.array_equal(numbers, getattr(of_ranks[1][key][name], field))


def joined(rank: int, port: int, file: Path) -> list[tuple[str, int]]:
    """What each process of torchrun does, with its environment."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    few = OverlapSettings(0.0, (7,), sizes=SETTINGS.sizes[:4])
    return list(calibrate_overlap(file, few))


def test_ranks_of_torchrun_are_measured_and_the_first_writes(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    profile_of_this_machine().save(file)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = [("gloo", 2), ("bls", 2)]
    assert run(2, joined, store.port, file, deadline_s=DEADLINE) == [groups, []]
    for modes in overlap_of(load_profile(file)).values():
        assert [mode.name for mode in modes if not mode.changes_values] == ["float32"]


def made_samples(settings: OverlapSettings) -> Samples:
    """What a machine without noise would be measured to take."""
    sizes = np.asarray(SIZES, dtype=np.float64)
    alone, beside = 200.0 + 0.001 * sizes, 500.0 + 0.002 * sizes
    rounds = np.ones((5, 1))
    alone, beside = rounds * alone, rounds * beside
    rate = rounds * np.full(len(sizes), 0.5)
    mode = ModeSamples(sizes, alone, beside, rate)
    return {("gloo", ranks): {"float32": mode, "uint8": mode} for ranks in settings.world_sizes}


def test_the_command_adds_to_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[OverlapSettings] = []

    def measure(settings: OverlapSettings) -> Samples:
        asked.append(settings)
        return made_samples(settings)

    monkeypatch.setattr(calibration, "measure_started", measure)
    old = Mode("old", ModeTimes(1.0, 1.0, 1.0, 1.0))
    before = with_modes(profile_of_this_machine(), {("gloo", 2): (old,), ("bls", 8): (old,)})
    file = tmp_path / "profile.json"
    before.save(file)
    command = ["calibrate", "--overlap", "--out", str(file)]
    assert main.run(command) == 0
    assert main.run([*command, "--world-sizes", "2", "3", "--minutes", "0.5"]) == 0
    assert [(each.minutes, each.world_sizes) for each in asked] == [(5.0, (2, 4)), (0.5, (2, 3))]

    after = load_profile(file)
    overlap = overlap_of(after)
    assert set(overlap) == {("gloo", ranks) for ranks in (2, 3, 4)} | {("bls", 8)}
    assert overlap["bls", 8] == (old,)
    float32, uint8 = overlap["gloo", 2]
    assert not float32.changes_values
    assert uint8.changes_values
    assert dataclasses.astuple(uint8.times) == pytest.approx(
        (200.0, 0.001, 0.002, 0.5, 300.0, 0.0), abs=1e-6
    )
    assert dataclasses.replace(after, overlap=()).as_json() == (
        dataclasses.replace(before, overlap=()).as_json()
    )
    printed = capsys.readouterr().out
    assert "profile.json: all-reduces of gloo among 3 ranks" in printed
    (cells, *_) = (re.split("  +", line) for line in printed.splitlines() if "uint8" in line)
    assert cells == ["", "uint8", "200", "500", "1,000", "2,000", "0.5", "0.5"]


def another_machine(file: Path) -> None:
    small_profile().save(file)


def no_profile(file: Path) -> None:
    file.write_text("{}")


def this_one(file: Path) -> None:
    profile_of_this_machine().save(file)


def another_overlap(file: Path) -> None:
    dataclasses.replace(profile_of_this_machine(), overlap=({"ranks": 2},)).save(file)


@pytest.mark.parametrize(
    ("prepare", "more", "said"),
    [
        (None, [], "there is no profile .*profile.json to add to: make one with `torchrec-bls"),
        (no_profile, [], "profile.json is not a torchrec-bls profile"),
        (another_machine, [], "is of a processor with 2 cores, and this machine is"),
        (another_overlap, [], 'profile.json: overlap.* remove its section "overlap", and measure'),
        (this_one, ["--world-sizes", "1"], "world sizes of at least 2"),
        (this_one, ["--minutes", "-1"], "-1.0 minutes"),
        (this_one, ["--name", "x", "--memory-gib", "2"], "--name, --memory-gib can't be changed"),
    ],
)
def test_what_the_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prepare: Any, more: list[str], said: str
) -> None:
    file = tmp_path / "profile.json"
    if prepare is not None:
        prepare(file)
    assert main.run(["calibrate", "--overlap", "--out", str(file), *more]) == 1
    assert re.search(said, capsys.readouterr().err)


def test_the_command_refuses_world_sizes_under_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    command = ["calibrate", "--overlap", "--out", str(tmp_path / "profile.json")]
    assert main.run([*command, "--world-sizes", "2"]) == 1
    assert "torchrun has started 4 ranks" in capsys.readouterr().err
