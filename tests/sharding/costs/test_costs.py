import dataclasses
import json

import numpy as np
import pytest
from torchrec_bls.sharding.cost_interface import AdditiveCosts, Estimate, LookupWork
from torchrec_bls.sharding.costs.collective_model import AlphaBeta, message_bytes
from torchrec_bls.sharding.costs.profile import ProfileError, load_profile, profile_from_json
from torchrec_bls.sharding.costs.profiled import ProfiledCosts

from tests.sharding.synthetic import random_works, small_profile

WORK = LookupWork(
    rows=1000, dim=16, weight_bytes=4, samples=100, pooling=5.0, unique_rows=200, pooled=True
)
COSTS: AdditiveCosts = ProfiledCosts(small_profile())


def test_lookups_by_hand() -> None:
    assert COSTS.lookup_forward([WORK, WORK]).microseconds == pytest.approx(100 + 2 * 5.0)
    assert COSTS.lookup_backward([WORK]).microseconds == pytest.approx(50 + 10.0)
    assert COSTS.lookup_forward([]) == Estimate(0.0, 0.0, 0.0)


def test_what_fbgemm_cannot_fuse_are_several_ops() -> None:
    half = dataclasses.replace(WORK, weight_bytes=2)
    row = dataclasses.replace(WORK, pooled=False)
    wide = dataclasses.replace(row, dim=32)
    narrow = dataclasses.replace(WORK, dim=8)
    assert COSTS.lookup_forward([WORK, half, narrow]).microseconds == pytest.approx(200 + 15.0)
    assert COSTS.lookup_forward([row, wide]).microseconds == pytest.approx(160 + 30.0)


def test_marginals_add_up_to_the_op() -> None:
    works = random_works(np.random.default_rng(3), 30)
    for marginal, whole, op in (
        (COSTS.marginal_forward, COSTS.lookup_forward, 100.0),
        (COSTS.marginal_backward, COSTS.lookup_backward, 50.0),
    ):
        shards = marginal(works)
        assert shards.shape == (30,)
        assert shards.sum() + op == pytest.approx(whole(works).microseconds)
    assert not len(COSTS.marginal_forward([]))


def test_a_profile_without_such_lookups() -> None:
    with pytest.raises(ProfileError, match="no unpooled lookup backward"):
        COSTS.lookup_backward([dataclasses.replace(WORK, pooled=False)])


def test_an_exchange_that_reads_the_tables_has_times_of_its_own() -> None:
    own = dataclasses.replace(WORK, by_exchange=True)
    assert COSTS.lookup_forward([own]) == COSTS.lookup_forward([WORK])  # older profiles
    profile = small_profile()
    model = dataclasses.replace(profile.lookups[True, "forward"], op_us=7.0)
    lookups = {**profile.lookups, (True, "by_exchange"): model}
    costs = ProfiledCosts(dataclasses.replace(profile, lookups=lookups))
    assert costs.lookup_forward([own, own]).microseconds == pytest.approx(7 + 2 * 5.0)
    assert costs.lookup_forward([own, WORK]).microseconds == pytest.approx(7 + 100 + 2 * 5.0)
    assert costs.lookup_backward([own]) == COSTS.lookup_backward([WORK])
    twice = dataclasses.replace(model, coefficients_us=2 * model.coefficients_us)
    lookups[True, "by_exchange"] = twice
    assert costs.marginal_forward([own, WORK]) == pytest.approx([10.0, 5.0])


def test_collectives_by_hand() -> None:
    estimate = COSTS.all_to_all([1000.0] * 4, [1000.0] * 4, "gloo")
    assert estimate.microseconds == pytest.approx(401.0)
    assert estimate.high == pytest.approx(401.0 * np.exp(0.1))
    uneven = COSTS.all_to_all([1000.0, 9000.0], [6000.0, 4000.0], "bls")
    assert uneven.microseconds == pytest.approx(209.0)
    assert uneven.low == pytest.approx(209.0 * np.exp(-0.2))
    assert COSTS.all_reduce(5000.0, 2, "gloo").microseconds == pytest.approx(205.0)
    assert COSTS.all_reduce(5000.0, 1, "gloo") == Estimate(0.0, 0.0, 0.0)
    assert COSTS.all_to_all([7.0], [7.0], "gloo") == Estimate(0.0, 0.0, 0.0)


def test_channels_over_tcp_in_profiles_of_all_ages() -> None:
    sent, received = [1000.0, 9000.0], [6000.0, 4000.0]
    # Without them, and with those that went over gloo's messages: as channels of a host.
    assert COSTS.all_to_all(sent, received, "tcp") == COSTS.all_to_all(sent, received, "bls")
    assert with_carrier("c10d").all_to_all(sent, received, "tcp").microseconds == pytest.approx(209)
    assert with_carrier("tcp").all_to_all(sent, received, "tcp").microseconds == pytest.approx(79)


def with_carrier(backend: str) -> ProfiledCosts:
    """The costs of a profile, read from its JSON, that has another carrier of 70 us a message."""
    profile = small_profile()
    carrier = dataclasses.replace(
        profile.collectives["all_to_all", "bls", 2], backend=backend, curve=AlphaBeta(70.0, 0.001)
    )
    collectives = {**profile.collectives, ("all_to_all", backend, 2): carrier}
    text = json.dumps(dataclasses.replace(profile, collectives=collectives).as_json())
    return ProfiledCosts(profile_from_json(text, "by hand"))


def test_more_ranks_than_were_calibrated() -> None:
    measured = COSTS.all_to_all([0.0] * 4, [0.0] * 4, "gloo")
    more = COSTS.all_to_all([0.0] * 16, [0.0] * 16, "gloo")
    # 15 peers instead of 3, and two doublings of what the interval doesn't know.
    assert more.microseconds == pytest.approx(measured.microseconds * 5)
    assert np.log(more.high / more.microseconds) == pytest.approx(0.1 * 4)
    between = COSTS.all_to_all([0.0] * 3, [0.0] * 3, "gloo")
    assert measured.microseconds * 0.5 < between.microseconds < measured.microseconds


def test_collectives_are_those_of_as_many_ranks_on_a_core() -> None:
    """The profile has 2 and 4 ranks on 2 cores: with a core each, and two on each core."""
    profile = load_profile("epyc-milan-2-cores")
    costs, among = ProfiledCosts(profile), {}
    for size in (2, 4):
        among[size] = profile.collectives["all_to_all", "bls", size]
    one_has_all = [0.0] * 15 + [1e6]
    for ranks_per_core, size in ((1.0, 2), (2.0, 4), (4.0, 4), (1.3, 2)):
        time = costs.all_to_all(one_has_all, one_has_all, "bls", ranks_per_core).microseconds
        model = among[size]
        bytes_alike = message_bytes(one_has_all, one_has_all, model.imbalance)
        start = (15 / (size - 1) - 1) * model.curve.start_us
        assert time == pytest.approx(model.estimate(bytes_alike).microseconds + start)


def test_what_collectives_refuse() -> None:
    with pytest.raises(ValueError, match="2 senders and 1 receivers"):
        COSTS.all_to_all([1.0, 1.0], [2.0], "gloo")
    with pytest.raises(ValueError, match="bytes of an all-to-all"):
        COSTS.all_to_all([1.0, float("nan")], [1.0, 1.0], "gloo")
    with pytest.raises(ValueError, match="-1"):
        COSTS.all_reduce(-1.0, 2, "gloo")
    with pytest.raises(ProfileError, match="'nccl'"):
        COSTS.all_reduce(1.0, 2, "nccl")
