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


@pytest.mark.parametrize("told", ["", "[]", "{}", '{"rank": "x", "error": 1}', "[" * 100_000])
@two_sided_is_slow
@pytest.mark.usefixtures("transport")
def test_anything_in_place_of_a_failure_is_refused(told: str) -> None:
    message, _ = run(2, fail_behind_a_phase, told)
    assert "Install one version" in message or "rank 1 could not set it up" in message
