"""The speed of the network under the all-to-alls of the channel."""

from __future__ import annotations

from .collective_model import CollectiveModel
from .profile import Profile, ProfileError

_MICROSECONDS = 1e6  # in a second


def link_of(profile: Profile, ranks: int) -> float:
    """Returns how many bytes a second each rank sends in an all-to-all of the backend "bls", for
    large messages. Start-up times are left out.

    Args:
        profile: a profile with such all-to-alls.
        ranks: world size, one that was calibrated.

    Raises:
        ProfileError: the profile has no all-to-all among so many ranks.
    """
    models = _models(profile)
    if ranks not in models:
        known = ", ".join(str(size) for size in sorted(models))
        raise ProfileError(
            f"profile {profile.name} has no all_to_all among {ranks} ranks: choose one of {known}, "
            "which were calibrated"
        )
    return _MICROSECONDS / models[ranks].curve.us_per_byte


def most_ranks(profile: Profile) -> int:
    """Returns the largest world size that `link_of` knows; raises as `link_of` does."""
    return max(_models(profile))


def _models(profile: Profile) -> dict[int, CollectiveModel]:
    """Returns all-to-alls by world size; there is at least one."""
    models = {
        size: model
        for (operation, backend, size), model in profile.collectives.items()
        if operation == "all_to_all" and backend == "bls"
    }
    if not models:
        raise ProfileError(
            f"profile {profile.name} has no all_to_all on backend 'bls': calibrate again"
        )
    return models
