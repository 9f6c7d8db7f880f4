"""Delays: their distributions, and texts that describe none."""

from pathlib import Path

import numpy as np
import pytest
from torchrec_bls.sharding.simulation.delays import DelayError, read_delays

_RANKS, _STEPS = 4, 20_000


@pytest.mark.parametrize(
    ("text", "mean_us", "deviation_us"),
    [
        ("none", 0.0, 0.0),
        ("constant:5ms", 5000.0, 0.0),
        ("uniform:0-10ms", 5000.0, 10_000 / np.sqrt(12)),
        ("uniform:500us-1ms", 750.0, 500 / np.sqrt(12)),
        ("exponential:2ms", 2000.0, 2000.0),
        ("lognormal:1ms,0.5", 1000 * np.exp(0.125), 1000 * np.exp(0.125) * np.sqrt(np.expm1(0.25))),
        ("spikes:5%,50ms", 2500.0, 50_000 * np.sqrt(0.05 * 0.95)),
        # In the long run 1 of 5 steps is in a burst, as often begun as ended.
        ("bursts:5%,20%,10ms", 2000.0, 10_000 * np.sqrt(0.2 * 0.8)),
    ],
)
def test_mean_and_deviation_are_those_asked_for(
    text: str, mean_us: float, deviation_us: float
) -> None:
    delays = read_delays(text).sample(_RANKS, _STEPS, seed=1)
    assert delays.shape == (_RANKS, _STEPS)
    assert delays.mean() == pytest.approx(mean_us, rel=0.05)
    assert delays.std() == pytest.approx(deviation_us, rel=0.05)


def test_bursts_last() -> None:
    held_up = read_delays("bursts:1%,25%,10ms").sample(1, 100_000, seed=1)[0] > 0
    begins = np.count_nonzero(held_up[1:] & ~held_up[:-1])
    assert np.count_nonzero(held_up) / begins == pytest.approx(4, rel=0.1)


def test_ranks_have_their_own() -> None:
    delays = read_delays("ranks:0,0,5ms,0").sample(4, 3, seed=1)
    assert delays.tolist() == [[0.0] * 3, [0.0] * 3, [5000.0] * 3, [0.0] * 3]
    with pytest.raises(DelayError, match="delays of 4 ranks were given for 8"):
        read_delays("ranks:0,0,5ms,0").sample(8, 3, seed=1)


def test_a_file_is_drawn_from(tmp_path: Path) -> None:
    file = tmp_path / "delays.json"
    file.write_text('{"milliseconds": [1.5, 0, 3]}')
    drawn = read_delays(str(file)).sample(4, 1000, seed=1)
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [0.0, 1500.0, 3000.0]
    assert (counts > 1000).all()


def test_seeds_decide() -> None:
    delays = read_delays("uniform:0-10ms")
    np.testing.assert_array_equal(delays.sample(4, 9, seed=1), delays.sample(4, 9, seed=1))
    assert (delays.sample(4, 9, seed=1) != delays.sample(4, 9, seed=2)).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("often", r"are none of: none; constant:5ms \(in each step\); "),
        ("none:5ms", "takes nothing"),
        ("constant:5", "'5' needs one of the units us, ms, s"),
        ("constant:5min", "'5min' is no number"),
        ("constant:-5ms", "'-5' is negative or no number"),
        ("constant:nanms", "'nan' is negative or no number"),
        ("constant:ms", "'' is no number"),
        (
            "uniform:10ms",
            r"^delays 'uniform:10ms': a range has two ends: give uniform:0-10ms \(anything between",
        ),
        ("uniform:10-5ms", "a range has its lower end first: give uniform:0-10ms"),
        ("lognormal:0ms,1", "the median must be positive: give lognormal:5ms,0.8"),
        ("lognormal:5ms", "these have 2 values with commas"),
        ("spikes:105%,5ms", "is more than all steps"),
        ("bursts:5%,5ms", "these have 3 values with commas between them: give bursts:2%,20%,50ms"),
        ("ranks:0,x", "'x' is no number"),
    ],
)
def test_texts_that_describe_none_are_refused(text: str, message: str) -> None:
    with pytest.raises(DelayError, match=message):
        read_delays(text)


def test_the_examples_of_an_error_are_delays() -> None:
    with pytest.raises(DelayError) as caught:
        read_delays("help")
    *forms, of_a_file = str(caught.value).partition(" are none of: ")[2].split("; ")
    assert len(forms) == 8 and of_a_file.startswith("a file of JSON: ")
    for form in forms:
        assert read_delays(form.split(" ")[0]).sample(4, 2, seed=0).shape == (4, 2)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"milliseconds": []}',
        '{"milliseconds": ["x"]}',
        '{"milliseconds": [-1]}',
        '{"milliseconds": [NaN]}',
        '{"milliseconds": 3}',
    ],
)
def test_files_without_delays_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "delays.json"
    file.write_text(content)
    with pytest.raises(DelayError, match=str(file)):
        read_delays(str(file))
