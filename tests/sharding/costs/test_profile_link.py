"""The speed of the link that a profile has."""

from dataclasses import replace

import pytest
from torchrec_bls.sharding import load_profile
from torchrec_bls.sharding.costs.profile import ProfileError

from tests.sharding.synthetic import small_profile


def test_the_link_is_what_large_messages_see() -> None:
    profile = load_profile("epyc-milan-2-cores")
    for ranks in (2, 4):
        curve = profile.collectives["all_to_all", "bls", ranks].curve
        assert profile.link(ranks) == pytest.approx(1e6 / curve.us_per_byte)
    assert profile.calibrated_ranks() == [2, 4]
    assert small_profile().link(2) == pytest.approx(1e9)


def test_ranks_that_were_not_calibrated() -> None:
    with pytest.raises(
        ProfileError, match="no all_to_all among 3 ranks: choose one of 2, 4, which"
    ):
        small_profile().link(3)
    profile = small_profile()
    others = {key: model for key, model in profile.collectives.items() if key[1] != "bls"}
    profile = replace(profile, collectives=others)
    for ask in (profile.calibrated_ranks, lambda: profile.link(2)):
        with pytest.raises(ProfileError, match="no all_to_all on backend 'bls': calibrate again"):
            ask()
