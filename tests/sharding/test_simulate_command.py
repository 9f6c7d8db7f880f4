"""`torchrec-bls simulate` on files good and bad."""

import json
from pathlib import Path

import pytest

from tests.sharding.synthetic import small_profile
from torchrec_bls.cli.main import run

TABLES = [
    {"name": "users", "rows": 5000, "dim": 64, "pooling_factor": 2.5},
    {"name": "items", "rows": 9000, "dim": 32, "pooling_factor": 8.0},
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "model.json").write_text(json.dumps({"tables": TABLES}))
    small_profile().save(tmp_path / "profile.json")
    return tmp_path


def simulate(files: Path, *others: str, ranks: int = 2) -> int:
    model, profile = str(files / "model.json"), str(files / "profile.json")
    arguments = ["--model", model, "--profile", profile, "--ranks", str(ranks), "--batch", "64"]
    return run(["simulate", *arguments, "--batches", "50", *others])


def test_the_bound_that_delays_are_worth(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = [f"--{kind}={files / f'{kind}.json'}" for kind in ("json", "perfetto")]
    assert simulate(files, "--delays", "uniform:0-10ms", "--choose", "bound", *out) == 0
    text = capsys.readouterr().out
    assert "delays uniform:0-10ms" in text and "<- take this" in text
    report = json.loads((files / "json.json").read_text())
    assert [each["bound"] for each in report["bounds"]] == [0, 1, 2, 4, 8]
    steps = [each["step_us"] for each in report["bounds"]]
    assert steps[0] == max(steps)
    assert report["chosen_bound"] > 0
    events = json.loads((files / "perfetto.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    # The trace is that of the last bound.
    assert max(event["args"]["step"] for event in events if "step" in event.get("args", {})) == 65


def test_without_delays_lag_is_not_worth_its_memory(files: Path) -> None:
    out = files / "figures.json"
    assert simulate(files, "--choose", "bound", f"--json={out}") == 0
    assert json.loads(out.read_text())["chosen_bound"] == 0


def test_a_saved_plan_is_simulated(files: Path) -> None:
    model, profile = str(files / "model.json"), str(files / "profile.json")
    saved = files / "plan.json"
    same = ["--model", model, "--profile", profile, "--ranks", "2", "--batch", "64", "--inference"]
    assert run(["plan", *same, f"--save={saved}"]) == 0
    given, anew = files / "given.json", files / "anew.json"
    assert simulate(files, f"--plan={saved}", f"--json={given}") == 0
    assert simulate(files, f"--json={anew}") == 0
    assert given.read_text() == anew.read_text()


def test_many_ranks_are_said_to_be_extrapolated(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(files, "--bound", "0", ranks=16) == 0
    assert "16 ranks: extrapolated, not validated." in capsys.readouterr().out
    assert simulate(files, "--bound", "0", ranks=8) == 0
    assert "extrapolated" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--bound", "0,x"], "--bound is '0,x', but must be numbers with commas"),
        (["--bound", "-1"], "the bound not negative"),
        (["--training", "--bound", "0,1"], "bound is 1, but only bound 0 trains"),
        (["--backend", "gloo", "--bound", "0,1"], "bound is 1 over gloo, but only bounded-lag"),
        (["--cores-per-host", "0"], "cores_per_host is 0"),
        (["--delays", "often"], "delays 'often' are none of"),
        (["--delays", "uniform:0--5ms"], "negative or no number"),
        (["--delays", "constant:nanms"], "negative or no number"),
        (["--delays", "ranks:1ms"], "delays of 1 ranks were given for 2"),
        (["--choose", "bound", "--max-memory-gib", "0"], "no bound is within the limits"),
        (["--choose", "bound", "--max-latency-ms", "0"], "no bound is within the limits"),
        (["--batches", "3"], "3 batches are too few to tell a step at bound 0 from: take 9"),
        (["--plan", "none.json"], "none.json"),
        (["--profile", "none"], "no profile 'none'"),
    ],
)
def test_bad_options(
    files: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(files, *options) == 1
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    (error,) = (line for line in lines if line.startswith("torchrec-bls simulate: "))
    assert said in error


def test_a_plan_of_other_tables_or_ranks(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, profile = str(files / "model.json"), str(files / "profile.json")
    saved = files / "plan.json"
    assert (
        run(["plan", "--model", model, "--profile", profile, "--ranks", "2", f"--save={saved}"])
        == 0
    )
    assert simulate(files, f"--plan={saved}", ranks=4) == 1
    assert "is a plan for 2 ranks, and --ranks is 4" in capsys.readouterr().err
    (files / "model.json").write_text(json.dumps({"tables": TABLES[:1]}))
    assert simulate(files, f"--plan={saved}") == 1
    assert "plans table 'items' and 0 more that the model does not have" in capsys.readouterr().err
