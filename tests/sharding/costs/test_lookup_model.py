import dataclasses

import numpy as np
import pytest
from torchrec_bls.sharding.cost_interface import LookupWork
from torchrec_bls.sharding.costs.fitting.accuracy import bias_percent, gmae_percent, mape_percent
from torchrec_bls.sharding.costs.fitting.lookups import fit_lookup
from torchrec_bls.sharding.costs.lookup.features import TERMS, analytic_terms, as_columns
from torchrec_bls.sharding.costs.lookup.model import LookupRecord

from tests.sharding.synthetic import (
    measured_ops,
    plain_model,
    planted_model,
    random_works,
    read_back,
)

WORK = LookupWork(
    rows=1023, dim=20, weight_bytes=4, samples=100, pooling=3.0, unique_rows=50, pooled=True
)


def test_terms_of_one_shard_by_hand() -> None:
    terms = dict(zip(TERMS, analytic_terms(as_columns([WORK]))[0], strict=True))
    pages = np.log2(1 + 1023 * 80 / 4096)
    assert terms == pytest.approx(
        {
            "shard": 1,
            "sample": 100,
            "lookup": 300,
            "lookup_element": 300 * 20,
            "lookup_half_element": 0,
            "unique_row": 50 * pages,
            "unique_line": 50 * 2,  # 80 bytes are two cache lines
            "unique_line_far": 50 * 2 * pages,
            "unique_half_element": 0,
            "output_element": 100 * 20,
            "sort_digit": 300 * 10,
        }
    )
    half = dict(zip(TERMS, analytic_terms(as_columns([_half()]))[0], strict=True))
    assert half["lookup_half_element"] == 300 * 20
    assert half["unique_line"] == 50


def _half() -> LookupWork:
    return dataclasses.replace(WORK, weight_bytes=2)


@pytest.mark.parametrize(
    "change",
    [{"rows": 0}, {"dim": float("nan")}, {"samples": -1}, {"unique_rows": 2000}, {"pooling": -0.1}],
)
def test_shards_that_cannot_be_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"LookupWork\("):
        as_columns([WORK, dataclasses.replace(WORK, **change)])


def test_an_op_is_a_constant_and_its_shards() -> None:
    model = planted_model(lookup=0.01, unique_line=0.02)
    works = random_works(np.random.default_rng(0), 7)
    together = model.estimate(as_columns(works)).microseconds
    alone = [model.estimate(as_columns([work])).microseconds for work in works]
    assert together == pytest.approx(200 + sum(each - 200 for each in alone))


def test_a_fit_recovers_a_planted_machine() -> None:
    truth = planted_model(shard=5.0, lookup=0.004, lookup_element=3e-4, unique_line=0.02)
    model = fit_lookup(measured_ops(truth, 120, noise=0.02, outliers=3))
    unseen = measured_ops(truth, 100, noise=0.0, seed=1)
    predicted = unseen.predicted_us(model)
    assert gmae_percent(predicted, unseen.measured_us) < 3.0
    assert mape_percent(predicted, unseen.measured_us) < 5.0
    assert abs(bias_percent(predicted, unseen.measured_us)) < 2.0
    assert model.op_us == pytest.approx(200, rel=0.25)
    assert len(model.trees.value), "the planted residual is not linear"


def test_intervals_hold_nine_of_ten_measurements() -> None:
    truth = planted_model(lookup=0.004, unique_line=0.02)
    model = fit_lookup(measured_ops(truth, 120, noise=0.08))
    unseen = measured_ops(truth, 400, noise=0.08, seed=1)
    ratio = np.log(unseen.measured_us / unseen.predicted_us(model))
    inside = (model.interval_log[0] <= ratio) & (ratio <= model.interval_log[1])
    assert 0.85 <= inside.mean() <= 0.97


def test_reuse_factors_are_used_where_they_matter() -> None:
    """A machine whose times depend on the reuse factors alone."""
    samples = measured_ops(planted_model(lookup=0.01), 120, noise=0.0)
    random = np.random.default_rng(0)
    factors = np.zeros_like(samples.reuse_factors)
    factors[:, 0] = random.uniform(size=len(factors))
    slow = samples.sums(np.where(factors[:, 0] > 0.5, 400.0, 0.0))
    samples = dataclasses.replace(
        samples, measured_us=samples.measured_us + slow, reuse_factors=factors
    )
    fitted, tested = samples.take(np.arange(90)), samples.take(np.arange(90, 120))
    errors = []
    for reuse_factors in (False, True):
        model = fit_lookup(fitted, reuse_factors=reuse_factors)
        errors.append(mape_percent(tested.predicted_us(model), tested.measured_us))
    assert errors[1] < 0.8 * errors[0]
    with pytest.raises(ValueError, match="reuse factors"):
        model.shards_us(as_columns(tested.works), tested.ops)


def test_shards_unlike_any_that_were_calibrated_widen_the_interval() -> None:
    model = plain_model(10.0, 1.0, [WORK, dataclasses.replace(WORK, rows=4000, samples=400)])
    inside = model.estimate(as_columns([WORK]))
    assert (inside.microseconds, inside.low, inside.high) == pytest.approx(
        (310.0, 310 * np.exp(-0.1), 310 * np.exp(0.2))
    )
    far = model.estimate(as_columns([dataclasses.replace(WORK, rows=1023 * 2**6)]))
    assert far.microseconds == pytest.approx(310.0)
    doublings = 6 - np.log2(4000 / 1023)
    assert far.high == pytest.approx(310 * np.exp(0.2 * (1 + doublings * 300 / 310)))


def test_json_gives_the_same_model_back() -> None:
    model = fit_lookup(measured_ops(planted_model(lookup=0.01), 30, noise=0.05))
    again = read_back(model.as_json(), LookupRecord).model()
    works = as_columns(random_works(np.random.default_rng(5), 20))
    assert again.estimate(works) == model.estimate(works)


def test_too_few_ops_to_fit() -> None:
    with pytest.raises(ValueError, match="at least 10"):
        fit_lookup(measured_ops(planted_model(lookup=0.01), 9, noise=0.0))
