"""`torchrec-bls simulate` on files good and bad."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sharding.command_files import TABLES, files, run_on
from torchrec_bls.cli.main import run

__all__ = ["files"]  # a fixture


def simulate(files: Path, *others: str, ranks: int = 2) -> int:
    return run_on(files, "simulate", "--batches", "50", *others, ranks=ranks)


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
    # The trace is that of the choice: batches go on for two steps for each of the bound.
    last = max(event["args"]["step"] for event in events if "step" in event.get("args", {}))
    assert last == 49 + 2 * report["chosen_bound"]


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


def test_the_plan_whose_simulated_step_is_the_fastest(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(files, "--choose", "plan", "--bound", "0") == 0
    text = capsys.readouterr().out
    assert "whole steps with host costs of the profile" in text
    assert "plans were simulated" in text
    assert "<- take this" not in text
    assert simulate(files, "--choose", "plan,bound") == 0
    text = capsys.readouterr().out
    assert "plans were simulated" in text and "<- take this" in text


def test_a_plan_is_chosen_by_host_costs_of_its_kind(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(files, "--choose", "plan", "--bound", "0", "--backend", "gloo") == 1
    assert "needs host costs of inference over gloo, which the prof" in capsys.readouterr().err


def test_the_codec_that_a_link_is_worth(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = [{**table, "sharding_types": ["table_wise"]} for table in TABLES]
    (files / "model.json").write_text(json.dumps({"tables": whole}))
    out = [f"--{kind}={files / f'out.{kind}'}" for kind in ("json", "html")]
    both = ["--bound", "0,2", "--codec", "fp32,uint8", "--choose", "bound,codec", *out]
    # Between hosts of one rank each.
    # So slow is the link that bytes alone matter, however slow the machine is.
    assert simulate(files, *both, "--ranks-per-host", "1", "--link", "100kbit") == 0
    assert "a link of 0.0001 Gbit/s for each host" in capsys.readouterr().out
    report = json.loads((files / "out.json").read_text())
    assert (report["chosen_codec"], report["link_gbit"]) == ("uint8", pytest.approx(1e-4))
    cells = {(each["codec"], each["bound"]): each for each in report["bounds"]}
    assert set(cells) == {(codec, bound) for codec in ("fp32", "uint8") for bound in (0, 2)}
    # 64 rows of 64 columns and of 32 go to the other rank.
    assert cells["fp32", 0]["embedding_bytes"] == 64 * (64 + 32) * 4
    assert cells["uint8", 0]["embedding_bytes"] == 64 * (64 + 8 + 32 + 8)
    assert cells["uint8", 2]["step_us"] < cells["fp32", 2]["step_us"] / 2
    assert "take this" in (files / "out.html").read_text()


def test_on_one_host_the_link_is_between_its_ranks(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = []
    for link in ([], ["--link", "10mbit"]):
        out = files / "figures.json"
        assert simulate(files, "--bound", "0", *link, f"--json={out}") == 0
        steps.append(json.loads(out.read_text())["bounds"][0]["step_us"])
    assert steps[1] > 2 * steps[0]
    assert "All ranks are on one host" in capsys.readouterr().out


def test_the_codec_alone_is_chosen_at_one_bound(files: Path) -> None:
    out = files / "figures.json"
    one = ["--training", "--bound", "0", "--codec", "uint4,fp32", "--choose", "codec"]
    assert simulate(files, *one, "--link", "1kbit", f"--json={out}") == 0
    report = json.loads(out.read_text())
    assert (report["chosen_codec"], report["chosen_bound"]) == ("uint4", 0)


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
        (["--bound", "0,x"], "--bound is '0,x', but must be numbers separated by commas"),
        (["--bound", "-1"], "the bound not negative"),
        (["--training", "--bound", "0,1"], "bound is 1, but only bound 0 trains"),
        (["--backend", "gloo", "--bound", "0,1"], "bound is 1 over gloo, but only bounded-lag"),
        (["--cores-per-host", "0"], "cores_per_host is 0"),
        (["--delays", "often"], "delays 'often' are none of"),
        (["--delays", "uniform:0--5ms"], "negative or no number"),
        (["--delays", "constant:nanms"], "negative or no number"),
        (["--delays", "ranks:1ms"], "delays of 1 ranks were given for 2"),
        (
            ["--choose", "bound", "--max-memory-gib", "1e-6"],
            "no bound is within the limits",
        ),
        (
            ["--choose", "bound", "--max-latency-ms", "1e-6"],
            "no bound is within the limits",
        ),
        *(
            (["--choose", "bound", f"--max-{limit}={number}"], "but must be a positive number")
            for limit in ("memory-gib", "latency-ms")
            for number in ("0", "-1", "nan", "inf")
        ),
        (["--max-memory-gib", "1"], "--max-memory-gib is a limit of --choose"),
        (["--max-latency-ms", "1"], "--max-latency-ms is a limit of --choose"),
        (["--choose", "colour"], "--choose has 'colour', but must be of plan, bound, codec"),
        (["--choose", "bound,"], "--choose has '', but must be of plan, bound, codec"),
        (["--choose", "codec"], "--choose codec needs at least two, but --codec has only fp32"),
        (
            ["--choose", "bound,codec", "--codec", "fp16"],
            "at least two, but --codec has only fp16",
        ),
        (
            ["--choose", "codec", "--codec", "fp32,fp16"],
            "is codec, but --bound has several",
        ),
        (
            ["--choose", "bound", "--codec", "fp32,fp16"],
            "is bound, but --codec has several",
        ),
        (["--codec", "zip"], "codec 'zip' is none of fp32, fp16, bf16, uint8, uint4, uint2"),
        (["--codec", "fp32,fp32"], "codecs are fp32, fp32, and one is there twice"),
        (["--link", "fast"], "link 'fast' is no positive rate: give one with its unit, like 1gbit"),
        (["--link", "0gbit"], "link '0gbit' is no positive rate"),
        (["--link=-1gbit"], "link '-1gbit' is no positive rate"),
        (["--link", "nangbit"], "link 'nangbit' is no positive rate"),
        (["--dense-ms=-1"], "must be finite and not negative"),
        (["--dense-ms", "nan"], "must be finite and not negative"),
        (["--batches", "3"], "3 batches are too few to tell a step at bound 0 from: take 9"),
        (["--plan", "none.json"], "none.json"),
        (["--plan", "x.json", "--choose", "plan"], "and --plan gives one: leave one out"),
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 99}, "has version 99, and this package reads"),
        ({"format": "something"}, "is not a torchrec-bls profile"),
        (
            {"machine": {"kind": "cuda"}},
            "is of a machine of kind 'cuda', and the plan",
        ),
    ],
)
def test_profiles_of_another_version_or_kind(
    files: Path, changes: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = files / "profile.json"
    record = json.loads(profile.read_text())
    machine = record["machine"] | changes.pop("machine", {})
    profile.write_text(json.dumps(record | changes | {"machine": machine}))
    assert simulate(files, "--bound", "0") == 1
    assert said in capsys.readouterr().err


def test_a_plan_of_other_tables_or_ranks(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, profile = str(files / "model.json"), str(files / "profile.json")
    saved = files / "plan.json"
    assert (
        run(["plan", "--model", model, "--profile", profile, "--ranks", "2", f"--save={saved}"])
        == 0
    )
    assert simulate(files, f"--plan={saved}", ranks=4) == 1
    assert "is a plan for 2 ranks, but there are 4" in capsys.readouterr().err
    (files / "model.json").write_text(json.dumps({"tables": TABLES[:1]}))
    assert simulate(files, f"--plan={saved}") == 1
    assert "plans table 'items' and 0 more that the model does not have" in capsys.readouterr().err
