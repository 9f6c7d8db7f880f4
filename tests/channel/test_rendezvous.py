"""How the ranks of a channel meet: who fails between two phases is heard in the later one."""

from typing import Any

import pytest
import torch.distributed as dist

from tests.processes import run
from tests.tiers import two_sided_is_slow
from torchrec_bls.collective.transport.rendezvous import _FAILURE, Rendezvous
from torchrec_bls.errors import RendezvousError


def fail_behind_a_phase(rank: int, told: str | None) -> str | None:
    """Rank 1 fails in a phase whose record of it the others have read already."""
    group: Any = dist.group.WORLD
    rendezvous = Rendezvous(group, "exchange", deadline=50)
    rendezvous.exchange("terms", {"size": 1})
    dist.barrier()
    if rank == 1:
        rendezvous.fail("terms", "channel 'exchange' on rank 1: KeyboardInterrupt")
        if told is not None:
            group.get_group_store().set(rendezvous._key(*_FAILURE), told)
        return None
    with pytest.raises(RendezvousError) as raised:
        rendezvous.exchange("memory", {"size": 1})
    return str(raised.value)


def test_a_rank_that_fails_between_two_phases_is_heard_in_the_later_one() -> None:
    for message in run(3, fail_behind_a_phase, None)[::2]:
        assert "rank 1 could not set it up: channel 'exchange' on rank 1: Keyboard" in message


class AskedTooEarly:
    """A store that has nothing yet when first asked, and a failure by the next question."""

    def __init__(self, store: dist.Store, failure_key: str) -> None:
        self._store = store
        self._failure_key = failure_key
        self._failure_seen = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        if keys == [self._failure_key]:
            self._store.wait(keys)
            self._failure_seen = True
        return self._failure_seen and self._store.check(keys)


def come_and_fail_in_the_next_phase(rank: int) -> str | None:
    """Rank 1 comes and fails between two questions of rank 0."""
    rendezvous = Rendezvous(dist.group.WORLD, "exchange", deadline=50)
    if rank == 1:
        rendezvous.exchange("terms", {"size": 1})
        rendezvous.fail("memory", "channel 'exchange' on rank 1: no memory for a test")
        return None
    store: Any = AskedTooEarly(rendezvous._store, rendezvous._key(*_FAILURE))
    rendezvous._store = store
    assert rendezvous.exchange("terms", {"size": 1}) == [{"size": 1}] * 2
    with pytest.raises(RendezvousError) as raised:
        rendezvous.exchange("memory", {"size": 1})
    return str(raised.value)


def test_a_phase_to_which_all_came_ends_well_whatever_follows() -> None:
    message, _ = run(2, come_and_fail_in_the_next_phase)
    assert "rank 1 could not set it up: channel 'exchange' on rank 1: no memory" in message


@pytest.mark.parametrize("told", ["", "[]", "{}", '{"rank": "x", "error": 1}', "[" * 100_000])
@two_sided_is_slow
@pytest.mark.usefixtures("transport")
def test_anything_in_place_of_a_failure_is_refused(told: str) -> None:
    message, _ = run(2, fail_behind_a_phase, told)
    assert "Install one version" in message or "rank 1 could not set it up" in message
