"""What a plan says, without processes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.overlap.plans import FLOAT32, UINT8, layers_of, make_model, plan_of, profile_with
from torchrec_bls.overlap.bucket_plan import load_plan
from torchrec_bls.overlap.measured.trial import Trial
from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.overlap.modes.mode import Mode
from torchrec_bls.overlap.search.timeline import Group

MIB = 2**20


def test_buckets_by_their_parameters() -> None:
    plan = plan_of((Group(1), Group(2, mode=1), Group(1)), FLOAT32, UINT8)
    first, second, third = plan.buckets
    assert first.parameters == ("6.bias", "6.weight") and first.bytes == 4 * 65
    assert second.parameters == ("4.bias", "4.weight", "2.bias", "2.weight")
    assert (second.mode, third.mode, third.bytes) == ("uint8", "float32", 4 * 64 * 65)


def test_the_prediction_by_hand() -> None:
    # Layers of 1 ms each, 260 bytes and three times 16,640; an all-reduce takes 100 us and 30 ns/B.
    prediction = plan_of((Group(1), Group(3))).prediction
    assert prediction.alone_us == pytest.approx(4000)
    planned = 4000 + 100 + 3 * 16_640 * 3e-2
    assert prediction.planned.timeline.finish == pytest.approx(planned)
    everything = 4000 + 100 + (260 + 3 * 16_640) * 3e-2
    assert prediction.torchrec_default.timeline.finish == pytest.approx(everything)
    assert prediction.ddp_default.timeline.finish == pytest.approx(everything)  # less than 1 MiB
    assert prediction.gain_over_torchrec == pytest.approx(1 - planned / everything)
    assert prediction.gain_over_ddp == prediction.gain_over_torchrec


def test_all_reduces_take_as_long_as_in_place() -> None:
    plan = plan_of((Group(1), Group(2), Group(1)))
    # One all-reduce of everything behind the backward takes twice as long as calibrated.
    slower = replace(plan, reduced_us=tuple(2 * each for each in plan.reduced_us))
    after = slower.prediction
    everything = 4000 + 2 * (100 + (260 + 3 * 16_640) * 3e-2)
    assert after.torchrec_default.timeline.finish == pytest.approx(everything)
    # The second group begins after 3 of 4 ms, and takes 2.2 ms; the third comes behind it.
    begin = after.planned.timeline.begin
    assert begin == pytest.approx([1000, 3000, 3000 + 2 * (100 + 2 * 16_640 * 3e-2)])
    last = 2 * (100 + 16_640 * 3e-2)
    assert after.planned.timeline.finish == pytest.approx(begin[-1] + last)
    assert after.alone_us == plan.prediction.alone_us
    assert slower.modes == plan.modes
    assert "measured 3.21 ms, by the profile 1.61 ms" in slower.report()


def test_disturbances_of_single_layers_count_for_the_whole_backward() -> None:
    plan = plan_of((Group(1),) * 4)
    # Each of four backwards has another layer that takes 3 ms in place of 1.
    layers = tuple(
        replace(layer, compute_us=tuple(3000.0 if at == number else 1000.0 for at in range(4)))
        for number, layer in enumerate(plan.layers)
    )
    varied = replace(plan, layers=layers, reduced_us=plan.reduced_us[:1] * 4)
    assert varied.prediction.alone_us == pytest.approx(6000)
    without = tuple(replace(layer, compute_us=(0.0,) * 3) for layer in plan.layers)
    assert replace(plan, layers=without).prediction.alone_us == 0


def test_buckets_are_exact_sizes_for_ddp() -> None:
    plan = plan_of((Group(1),) * 4)
    assert plan.replaces_ddp_default and plan.replaces_torchrec_default
    caps = plan.ddp_kwargs()["bucket_cap_mb_list"]
    assert [int(cap * MIB) for cap in caps] == [260, 16_640, 16_640, 16_640]


def test_defaults_stay_where_nothing_was_tried() -> None:
    plan = replace(plan_of((Group(1),) * 4), trial=None)
    assert not plan.replaces_ddp_default and plan.ddp_kwargs() == {}
    assert "it stays" in plan.report() and "the plan replaces it" not in plan.report()


def test_the_trial_decides_and_not_the_prediction() -> None:
    plan = plan_of((Group(1),) * 4)
    assert plan.prediction.gain_over_ddp > 0.15
    slow = Trial((5000.0, 5100.0, 4900.0), (5000.0,) * 3, (6000.0,) * 3)
    tried = replace(plan, trial=slow)
    assert not tried.replaces_ddp_default and tried.replaces_torchrec_default
    ddp_line, torchrec_line = tried.report().splitlines()[-2:]
    assert ddp_line.startswith("backward against DistributedDataParallel's default: 0.0 % shorter")
    assert ddp_line.endswith("it stays, since no gain is certain")
    assert torchrec_line.endswith("the plan replaces it")


def test_a_loss_is_told_as_a_loss() -> None:
    # Turns that agree leave 1.34 % open.
    plan = replace(
        plan_of((Group(1),) * 4), trial=Trial((1012.0,) * 3, (1000.0,) * 3, (1012.0 / 0.99,) * 3)
    )
    longer, shorter = (line.split(": ")[1] for line in plan.report().splitlines()[-2:])
    assert longer == "1.2 % longer, at worst 2.5 % longer; it stays, since no gain is certain"
    assert shorter == "1.0 % shorter, at worst 0.3 % longer; it stays, since no gain is certain"


def test_a_predicted_loss_is_told_as_a_loss() -> None:
    slow = Mode("slow", ModeTimes(5000.0, 0, 0, 1.0))
    plan = replace(plan_of((Group(4, mode=1),), FLOAT32, slow), trial=None)
    by_default = 4000 + 100 + (260 + 3 * 16_640) * 3e-2
    lost = 100 * ((4000 + 5000) / by_default - 1)
    assert f"default: {lost:.1f} % longer by prediction; it stays" in plan.report()


def test_the_least_gain_is_what_turns_leave_certain() -> None:
    # Gains of 10, 12 and 14 %: a variance of (2 x 0.02^2 + 2 x 0.02^2) / 4, of the mean a third.
    trial = Trial((90.0, 88.0, 86.0), (100.0,) * 3, (100.0,) * 3)
    gain = trial.gain_over_ddp
    assert gain.mean == pytest.approx(0.12)
    assert gain.least == pytest.approx(0.12 - 1.645 * (0.02**2 / 3) ** 0.5)
    assert gain == trial.gain_over_torchrec
    # More turns that agree leave less open.
    longer = Trial(trial.planned_us * 3, trial.ddp_default_us * 3, trial.torchrec_default_us * 3)
    assert gain.least < longer.gain_over_ddp.least < gain.mean


@pytest.mark.parametrize(("saved", "replaces"), [(0.028, False), (0.029, True)])
def test_a_default_goes_where_a_gain_of_one_and_a_half_percent_is_certain(
    saved: float, replaces: bool
) -> None:
    # Of three turns that agree, 1.645 x 0.02 x (2 / 4 / 3) ^ 0.5 = 1.34 % are left open.
    trial = Trial((1000 * (1 - saved),) * 3, (1000.0,) * 3, (1000.0,) * 3)
    plan = replace(plan_of((Group(1),) * 4), trial=trial)
    assert plan.replaces_ddp_default == plan.replaces_torchrec_default == replaces


def test_the_report() -> None:
    text = plan_of((Group(1), Group(2, mode=1), Group(1)), FLOAT32, UINT8).report()
    assert "8 parameters, 0.05 MiB, 2 ranks over gloo, profile by hand, today" in text
    assert "uint8, 4.bias to 2.weight" in text
    assert "backward against TorchRec's default:" in text
    planned, *_ = (line for line in text.splitlines() if "with this plan" in line)
    assert planned.split()[3] == planned.split()[-1]  # as predicted, as tried


def test_a_gradient_larger_than_all_others_is_said() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 1000), torch.nn.Linear(1000, 1000))
    assert "'1.weight' has 99 % of all bytes" in plan_of((Group(1), Group(1)), model=model).report()


def test_the_trace(tmp_path: Path) -> None:
    plan_of((Group(1), Group(3))).trace(tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert names == ["plan", "DistributedDataParallel's default", "TorchRec's default"]
    planned = {
        each["name"]: (each["ts"], each["ts"] + each["dur"])
        for each in events
        if each["ph"] == "X" and each["pid"] == 0
    }
    assert planned["layer 1"] == pytest.approx((1000, 2000))
    assert planned["bucket 0, float32"] == pytest.approx((1000, 1000 + 100 + 260 * 3e-2))
    assert planned["bucket 1, float32"] == pytest.approx((4000, 4100 + 49_920 * 3e-2))
    others = [
        each for each in events if each["ph"] == "X" and each["pid"] == 2 and each["tid"] == 1
    ]
    assert len(others) == 1  # 25 MiB hold everything


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    profile = profile_with(FLOAT32)
    plan = plan_of((Group(1), Group(2, mode=1), Group(1)), FLOAT32, UINT8)
    plan.save(path)
    with pytest.raises(ValueError, match="made with the profile 'by hand, today', this one is"):
        load_plan(path, profile)
    content = json.loads(path.read_text())
    content["origin"]["profile"] = f"{profile.name}, {profile.measured_at}"
    path.write_text(json.dumps(content))
    again = load_plan(path, profile)
    assert again.trial is not None and replace(again, origin=plan.origin) == plan
    replace(plan, origin=again.origin, trial=None).save(path)
    assert load_plan(path, profile).trial is None
    for mode in content["modes"]:  # of an older version
        mode |= {"draws": [mode["times"]], "channels": None, "threads": 2, "held_out_percent": 4.0}
        mode["times"] |= dict.fromkeys(("behind_us", "wake_us", "cold_us", "hook_us"), 9.0)
    path.write_text(json.dumps(content))
    assert load_plan(path, profile) == again
    content["origin"]["torch"] = "1.0"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"made with torch 1\.0, this is"):
        load_plan(path, profile)
    path.write_text(json.dumps({"format": "another", "version": 1}))
    with pytest.raises(
        ValueError,
        match="is not a torchrec-bls overlap plan: make it with",
    ):
        load_plan(path, profile)


def test_layers_by_hand_are_those_of_the_model() -> None:
    assert sum(layer.bytes for layer in layers_of(make_model())) == sum(
        4 * parameter.numel() for parameter in make_model().parameters()
    )
