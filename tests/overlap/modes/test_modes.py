"""What all-reduces and the backward take from each other: fitted, and kept in a profile."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchrec_bls.sharding.costs.profile import (
    Profile,
    ProfileError,
    load_profile,
    profile_from_json,
)

from tests.sharding.synthetic import changed, small_profile
from torchrec_bls.overlap.modes.contention import ModeTimes, stage
from torchrec_bls.overlap.modes.fitting import ModeSamples, fit_mode
from torchrec_bls.overlap.modes.mode import Mode, modes_of, overlap_of, with_modes

TRUE = ModeTimes(300.0, 0.0005, 0.0012, 0.4, 500.0, 160.0)
SIZES = np.geomspace(2**14, 2**25, 10)
NAMES = [field.name for field in dataclasses.fields(ModeTimes)]


def made(seed: int, noise: float, rounds: int = 15) -> ModeSamples:
    """What a mode of the true times would be measured to take."""
    random = np.random.default_rng(seed)

    def measured(true: Any) -> Any:
        return true * np.exp(random.normal(0, noise, (rounds, len(SIZES))))

    beside = 800.0 + 0.0012 * SIZES
    # In the startup of 800 microseconds the backward's rate is 0.6.
    rate = (0.6 * 800.0 + 0.4 * 0.0012 * SIZES) / beside
    alone = measured(300.0 + 0.0005 * SIZES)
    return ModeSamples(SIZES, alone, measured(beside), measured(rate))


def values(times: ModeTimes) -> list[float]:
    return [getattr(times, name) for name in NAMES]


def test_slower_all_reduces_leave_all_else() -> None:
    times = ModeTimes(10.0, 1.0, 2.0, 0.5, 4.0, 3.0)
    assert times.slower(2.0) == ModeTimes(20.0, 2.0, 4.0, 0.5, 8.0, 3.0)


def test_measurements_without_noise_are_fitted_exactly() -> None:
    assert values(fit_mode(made(0, noise=0.0))) == pytest.approx(values(TRUE))


def test_the_rate_of_a_backward_depends_on_how_much_is_sent() -> None:
    assert TRUE.rate(0) == pytest.approx(0.6)
    assert TRUE.rate(1_000_000) == pytest.approx((0.6 * 800 + 0.4 * 1200) / 2000)
    assert dataclasses.replace(TRUE, added_compute_us=0.0).rate(1_000_000) == 0.4
    # An all-reduce of nothing in no time.
    assert ModeTimes(0.0, 0.0, 0.0, 0.7).rate(0) == 0.7


def test_stages_by_hand() -> None:
    # 2,000 us beside a backward, of which 960 us are done in that time; 800 us alone.
    assert dataclasses.astuple(stage(TRUE, 1_000_000, 1960.0)) == pytest.approx((2000, 0, 1000))
    # Half of the all-reduce is done when the backward ends.
    assert dataclasses.astuple(stage(TRUE, 1_000_000, 480.0)) == pytest.approx((1000, 400, 0))


def test_rounds_in_which_the_host_was_disturbed_hardly_matter() -> None:
    samples = made(1, noise=0.05, rounds=20)
    samples.alone_us[:6] *= 4
    samples.overlapped_us[3:9] *= 6
    samples.compute_rate[:7] *= 0.2
    assert values(fit_mode(samples)) == pytest.approx(values(TRUE), rel=0.1)


def test_a_size_off_the_line_hardly_matters() -> None:
    samples = made(2, noise=0.02)
    samples.alone_us[:, 4] *= 3
    assert values(fit_mode(samples)) == pytest.approx(values(TRUE), rel=0.1)


def test_large_all_reduces_are_fitted_where_there_is_no_straight_line() -> None:
    samples = made(3, noise=0.0)
    at_once = np.minimum(SIZES, 2**18)  # these bytes cost nothing
    samples.alone_us[:] = 1000.0 + 0.008 * (SIZES - at_once)
    for size, us in zip(SIZES[-3:], samples.alone_us[0, -3:], strict=True):
        assert fit_mode(samples).alone_us(size) == pytest.approx(us, rel=0.06)


def test_too_few_sizes() -> None:
    with pytest.raises(ValueError, match="2 sizes of all-reduces; at least 3"):
        fit_mode(ModeSamples(SIZES[:2], *(np.ones((3, 2)) for _ in range(3))))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_times_that_no_mode_can_have(name: str, value: float) -> None:
    with pytest.raises(
        ValueError, match=rf"{name} is (-1.0|nan|inf), but must be finite and not negative"
    ):
        dataclasses.replace(TRUE, **{name: value})


def with_overlap() -> Profile:
    modes = Mode("float32", TRUE), Mode("uint4", TRUE, changes_values=True)
    return with_modes(small_profile(), {("gloo", 2): modes, ("bls", 2): modes[:1]})


def test_an_overlap_comes_back_and_may_lack(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    with_overlap().save(file)
    assert overlap_of(load_profile(file)) == overlap_of(with_overlap())
    small_profile().save(file)
    assert "overlap" not in json.loads(file.read_text())
    assert overlap_of(load_profile(file)) == {}


def test_modes_of_older_profiles_have_more_fields() -> None:
    record = with_overlap().as_json()
    for of_group in record["overlap"]:
        for mode in of_group["modes"]:
            mode |= {
                "channels": None,
                "threads": 2,
                "held_out_percent": 4.0,
                "draws": {"startup_us": [1.0]},
            }
            mode["times"] |= dict.fromkeys(("behind_us", "wake_us", "cold_us", "hook_us"), 9.0)
    (float32, _) = modes_of(profile_from_json(json.dumps(record), "profile"), "gloo", 2)
    assert float32 == Mode("float32", TRUE)


def test_the_modes_of_a_group() -> None:
    profile = with_overlap()
    assert [mode.name for mode in modes_of(profile, "gloo", 2)] == ["float32", "uint4"]
    command = "`torchrec-bls calibrate --overlap --out PROFILE --world-sizes 4`"
    with pytest.raises(ProfileError, match=rf"of gloo among 2 ranks, bls among 2 ranks.*{command}"):
        modes_of(profile, "bls", 4)
    with pytest.raises(ProfileError, match=r"nccl among 2 ranks.*but of no group at all"):
        modes_of(small_profile(), "nccl", 2)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((0, "world_size"), 1, r"overlap\[0\].world_size: expected int >= 2, got 1"),
        ((1, "backend"), "gloo", "2 lists of modes are of gloo among 2 ranks"),
        ((0, "backend"), KeyError, "'backend' is missing"),
        ((0, "modes"), [], r"modes: expected array of length >= 1, got \[\]"),
        ((0, "modes", 1, "name"), "float32", "modes have the names .'float32', 'float32'."),
        (
            (0, "modes", 0, "times", "startup_us"),
            -1,
            "startup_us is -1.0, but must be finite and not",
        ),
        (
            (0, "modes", 0, "times", "compute_rate"),
            0,
            "compute_rate is 0, but a backward must go on",
        ),
        ((0, "modes", 0, "times", "compute_rate"), KeyError, "'compute_rate' is missing"),
        ((0, "modes", 0, "times", "startup_us"), "1", "expected float, got '1'"),
        ((0, "modes", 1, "times"), KeyError, "'times' is missing"),
    ],
)
def test_an_overlap_that_cannot_be_used(
    tmp_path: Path, path: tuple[Any, ...], value: Any, message: str
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(changed(with_overlap(), ("overlap", *path), value)))
    with pytest.raises(ProfileError, match=message) as caught:
        overlap_of(load_profile(file))
    assert str(caught.value).startswith(f"profile {file}: ")
    assert 'remove its section "overlap", and measure it anew' in str(caught.value)


def test_a_group_that_was_not_measured_is_missed_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    with_overlap().save(file)
    with pytest.raises(ProfileError, match=rf"^profile {file} does not say how .* among 4 ranks"):
        modes_of(load_profile(file), "bls", 4)
