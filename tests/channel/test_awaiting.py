"""Whether ranks wait for this one where they meet, as a rank sees that has not come."""

import pytest
import torch.distributed as dist

from torchrec_bls.collective.transport.meeting import Meeting, OtherRankFailedError

RANKS = 3


@pytest.fixture(scope="module")
def transport() -> None:
    """In the place of the one for the other files: what ranks tell each other is the same."""


class Ranks:
    """Tries of ranks, which are numbered over all ranks."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self._tries = 0

    def new(self, rank: int, session: str = "") -> Meeting:
        self._tries += 1
        return Meeting(self._store, "base", rank, RANKS, f"try {self._tries}", session)

    def come(self, rank: int, session: str = "") -> Meeting:
        meeting = self.new(rank, session)
        meeting.come("0", "terms")
        return meeting

    def meet(self, steps: int) -> list[Meeting]:
        meetings = [self.come(rank) for rank in range(RANKS)]
        for step in range(steps):
            if step > 0:
                for meeting in meetings:
                    meeting.come(str(step), "more")
            for _ in range(RANKS):  # each sees the seats, then the records of the others
                arrived = [meeting.look() for meeting in meetings]
            assert all(arrived)
            for meeting in meetings:
                assert meeting.texts() == [b"more" if step else b"terms"] * RANKS
        return meetings

    def awaiting(self, rank: int) -> list[int]:
        return self.new(rank).awaiting()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_ranks_that_have_met_wait_for_nobody(steps: int) -> None:
    ranks = Ranks()
    assert ranks.awaiting(0) == []
    ranks.meet(steps)
    assert [ranks.awaiting(rank) for rank in range(RANKS)] == [[], [], []]
    ranks.come(2)
    assert [ranks.awaiting(rank) for rank in range(RANKS)] == [[2], [2], []]


def test_a_try_that_was_given_up_waits_for_nobody() -> None:
    ranks = Ranks()
    first = ranks.come(1)
    assert ranks.awaiting(0) == [1]
    first.give_up("too late")
    assert ranks.awaiting(0) == []
    ranks.meet(1)
    again = ranks.come(1)
    assert ranks.awaiting(0) == [1]
    again.give_up("too late")
    # The seat of rank 2 still has the try that met.
    assert ranks.awaiting(0) == []


def test_a_try_that_failed_waits_for_nobody() -> None:
    ranks = Ranks()
    ranks.meet(1)
    ranks.come(1).fail("no memory")
    assert ranks.awaiting(0) == []
    with pytest.raises(OtherRankFailedError, match="no memory"):
        ranks.come(0).look()
    assert ranks.awaiting(2) == []


def test_a_try_of_another_session_waits_for_others() -> None:
    ranks = Ranks()
    ranks.come(1, "an earlier one")
    assert ranks.awaiting(0) == []
