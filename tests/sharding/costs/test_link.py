"""The speed of the link that a profile has."""

from dataclasses import replace

import pytest
from torchrec_bls.sharding import link_of, load_profile
from torchrec_bls.sharding.costs.link import most_ranks
from torchrec_bls.sharding.costs.profile import ProfileError

from tests.sharding.synthetic import small_profile


def test_the_link_is_what_large_messages_see() -> None:
    profile = load_profile("epyc-milan-2-cores")
    for ranks in (2, 4):
        curve = profile.collectives["all_to_all", "bls", ranks].curve
        assert link_of(profile, ranks) == pytest.approx(1e6 / curve.us_per_byte)
    assert most_ranks(profile) == 4
    assert link_of(small_profile(), 2) == pytest.approx(1e9)


def test_ranks_that_were_not_calibrated() -> None:
    with pytest.raises(
        ProfileError, match="no all_to_all among 3 ranks: choose one of 2, 4, which"
    ):
        link_of(small_profile(), 3)
    profile = small_profile()
    others = {key: model for key, model in profile.collectives.items() if key[1] != "bls"}
    profile = replace(profile, collectives=others)
    for ask in (most_ranks, lambda of: link_of(of, 2)):
        with pytest.raises(ProfileError, match="no all_to_all on backend 'bls': calibrate again"):
            ask(profile)
