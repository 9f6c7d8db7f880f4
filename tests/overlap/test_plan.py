"""What a plan says, without processes."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.overlap.plans import FLOAT32, UINT8, layers_of, make_model, plan_of, profile_with
from torchrec_bls.overlap import prediction
from torchrec_bls.overlap.bucket_plan import load_plan
from torchrec_bls.overlap.interval import Interval
from torchrec_bls.overlap.measured.trial import Trial
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
    assert prediction.alone.middle == pytest.approx(4.0)
    assert prediction.planned.middle == pytest.approx(4.0 + 0.1 + 3 * 16_640 * 3e-5)
    everything = 4.0 + 0.1 + (260 + 3 * 16_640) * 3e-5
    assert prediction.torchrec_default.middle == pytest.approx(everything)
    assert prediction.ddp_default.middle == pytest.approx(everything)  # of less than 1 MiB
    gain = 1 - prediction.planned.middle / everything
    assert prediction.gain_over_torchrec.middle == pytest.approx(gain)


def test_all_reduces_take_as_long_as_in_place() -> None:
    plan = plan_of((Group(1), Group(2), Group(1)))
    # One all-reduce of everything behind the backward takes twice as long as calibrated.
    slower = replace(plan, reduced_us=tuple(2 * each for each in plan.reduced_us))
    after = slower.prediction
    everything = 4.0 + 2 * (0.1 + (260 + 3 * 16_640) * 3e-5)
    assert after.torchrec_default.middle == pytest.approx(everything)
    # The second group begins after 3 of 4 ms, and takes 2.2 ms; the third comes behind it.
    begin = [us / 1e3 for us in slower.timeline.begin]
    assert begin == pytest.approx([1.0, 3.0, 3.0 + 2 * (0.1 + 2 * 16_640 * 3e-5)])
    assert after.planned.middle == pytest.approx(begin[-1] + 2 * (0.1 + 16_640 * 3e-5))
    assert after.alone == plan.prediction.alone
    assert slower.modes == plan.modes
    assert "measured 3.21 ms, by the profile 1.61 ms" in slower.report()


def test_intervals_are_as_wide_as_medians_of_so_many_backwards_vary() -> None:
    plan = plan_of((Group(1), Group(3)))
    random = np.random.default_rng(1)
    (typical, *_), backwards = plan.reduced_us, 15
    noise = random.normal(0, 1000, backwards)
    layers = tuple(replace(each, compute_us=each.compute_us[:1] * 15) for each in plan.layers)
    varied = replace(plan, layers=layers, reduced_us=tuple(typical + noise))
    with patch.multiple(prediction, _ONE=0.0, _SEVERAL=0.0):
        assert width(plan.prediction.torchrec_default) == pytest.approx(0)
        found = width(varied.prediction.torchrec_default)
    medians = [np.median(random.choice(noise, backwards)) for _ in range(1000)]
    # Both what was measured and what will be: the variances add up.
    wanted = 2 * 1.64 * np.sqrt(2) * np.std(medians) / 1e3
    assert 0.6 * wanted < found < 1.5 * wanted


def test_intervals_of_several_buckets_are_wider_than_those_of_one() -> None:
    several, one = plan_of((Group(1), Group(3))).prediction, plan_of((Group(4),)).prediction
    for interval, error in ((one.planned, 0.03), (several.planned, 0.06)):
        assert width(interval) == pytest.approx(2 * 1.64 * error * interval.middle, rel=0.3)
    assert width(several.gain_over_torchrec) == pytest.approx(0)


def width(interval: Interval) -> float:
    return interval.high - interval.low


def test_disturbances_of_single_layers_count_for_the_whole_backward() -> None:
    plan = plan_of((Group(1),) * 4)
    # Each of four backwards has another layer that takes 3 ms in place of 1.
    layers = tuple(
        replace(layer, compute_us=tuple(3000.0 if at == number else 1000.0 for at in range(4)))
        for number, layer in enumerate(plan.layers)
    )
    varied = replace(plan, layers=layers, reduced_us=plan.reduced_us[:1] * 4)
    assert varied.prediction.alone.middle == pytest.approx(6.0)
    without = tuple(replace(layer, compute_us=(0.0,) * 3) for layer in plan.layers)
    assert replace(plan, layers=without).prediction.alone.middle == 0


def test_buckets_are_exact_sizes_for_ddp() -> None:
    plan = plan_of((Group(1),) * 4)
    assert plan.replaces_ddp_default and plan.replaces_torchrec_default
    caps = plan.ddp_kwargs()["bucket_cap_mb_list"]
    assert [int(cap * MIB) for cap in caps] == [260, 16_640, 16_640, 16_640]


def test_a_third_of_what_was_measured_in_place_counts_where_ranks_share_cores() -> None:
    times = replace(FLOAT32.times, wake_us=1500.0)
    plan = plan_of((Group(1), Group(3)), Mode("float32", times))
    slower = replace(plan, reduced_us=tuple(each + 3000 for each in plan.reduced_us))
    before, after = plan.prediction, slower.prediction
    assert slower.modes_as_measured == plan.modes and slower.timeline == plan.timeline
    assert after.planned.middle == pytest.approx(before.planned.middle + 1)
    assert after.torchrec_default.middle == pytest.approx(before.torchrec_default.middle + 3)


def test_defaults_stay_where_nothing_was_tried() -> None:
    plan = replace(plan_of((Group(1),) * 4), trial=None)
    assert plan.gain_over_ddp is None and plan.gain_over_torchrec is None
    assert not plan.replaces_ddp_default and plan.ddp_kwargs() == {}
    assert "it stays" in plan.report() and "the plan replaces it" not in plan.report()


def test_a_trial_outweighs_a_prediction() -> None:
    plan = plan_of((Group(1),) * 4)
    assert plan.prediction.gain_over_ddp.middle > 0.15
    slow = Trial((5000.0, 5100.0, 4900.0), (5000.0,) * 3, (6000.0,) * 3)
    tried = replace(plan, trial=slow)
    assert not tried.replaces_ddp_default and tried.replaces_torchrec_default
    ddp_line, torchrec_line = tried.report().splitlines()[-2:]
    assert ddp_line.startswith("over DistributedDataParallel's default:")
    assert ddp_line.endswith("nothing certain: it stays")
    assert torchrec_line.endswith("the plan replaces it")


def test_gains_are_weighed_by_their_variances() -> None:
    # Gains of 10, 12 and 14 %: a variance of (2 x 0.02^2 + 2 x 0.02^2) / 4, of the mean a third.
    trial = Trial((90.0, 88.0, 86.0), (100.0,) * 3, (100.0,) * 3)
    tried, predicted = 0.02**2 / 3, 0.05**2
    gain = trial.gain_over_ddp(0.05)
    wanted = (0.12 / tried + 0.05 / predicted) / (1 / tried + 1 / predicted)
    assert gain.middle == pytest.approx(wanted)
    half = 1.645 * (1 / (1 / tried + 1 / predicted)) ** 0.5
    assert (gain.low, gain.high) == pytest.approx((wanted - half, wanted + half))
    assert gain == trial.gain_over_torchrec(0.05)


def test_the_report() -> None:
    text = plan_of((Group(1), Group(2, mode=1), Group(1)), FLOAT32, UINT8).report()
    assert "8 parameters, 0.05 MiB, 2 ranks over gloo, profile by hand, today" in text
    assert "uint8, 4.bias to 2.weight" in text
    assert "over TorchRec's default:" in text
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
