"""How the ranks of a channel meet: failures between exchanges, late ranks, and what is left."""

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch.distributed as dist

from tests.processes import run
from torchrec_bls.collective.transport.rendezvous import Rendezvous, host_identity
from torchrec_bls.errors import RendezvousError


@pytest.fixture(scope="module")
def transport() -> None:
    """In the place of the one for the other files: what ranks tell each other is the same."""


def fail_behind_a_phase(rank: int, told: str | None) -> str | None:
    """Rank 1 fails in a phase whose records the others have read already."""
    group: Any = dist.group.WORLD
    rendezvous = Rendezvous(group, "exchange", deadline=50)
    rendezvous.exchange("terms", {"size": 1})
    dist.barrier()
    if rank == 1:
        if told is None:
            rendezvous.fail("channel 'exchange' on rank 1: KeyboardInterrupt")
        else:
            group.get_group_store().set(rendezvous._meeting._step_key(1), told)
        return None
    with pytest.raises(RendezvousError) as raised:
        rendezvous.exchange("memory", {"size": 1})
    return str(raised.value)


def test_a_rank_that_fails_between_two_phases_is_heard_in_the_later_one() -> None:
    for message in run(3, fail_behind_a_phase, None)[::2]:
        assert "rank 1 could not set it up: channel 'exchange' on rank 1: Keyboard" in message


class AskedTooEarly:
    """A store that says at first that nobody has come, and later that rank 1 has failed."""

    def __init__(self, store: dist.Store, rendezvous: Rendezvous) -> None:
        self._store = store
        self._rendezvous = rendezvous
        self._asked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        if len(keys) == 2 and not self._asked:
            self._asked = True
            self._store.wait([self._rendezvous._meeting._step_key(1)])
            return False
        return self._store.check(keys)


def come_and_fail_in_the_next_phase(rank: int) -> str | None:
    """Rank 1 comes and fails between two questions of rank 0."""
    rendezvous = Rendezvous(dist.group.WORLD, "exchange", deadline=50)
    if rank == 1:
        rendezvous.exchange("terms", {"size": 1})
        rendezvous.fail("channel 'exchange' on rank 1: no memory for a test")
        return None
    store: Any = AskedTooEarly(rendezvous._store, rendezvous)
    rendezvous._meeting._store = store
    assert rendezvous.exchange("terms", {"size": 1}) == [{"size": 1}] * 2
    with pytest.raises(RendezvousError) as raised:
        rendezvous.exchange("memory", {"size": 1})
    return str(raised.value)


def test_a_phase_to_which_all_came_ends_well_whatever_follows() -> None:
    message, _ = run(2, come_and_fail_in_the_next_phase)
    assert "rank 1 could not set it up: channel 'exchange' on rank 1: no memory" in message


@pytest.mark.parametrize("told", ["", "[]", "{}", '{"rank": "x", "error": 1}', "[" * 100_000])
def test_anything_in_place_of_a_failure_is_refused(told: str) -> None:
    message, _ = run(2, fail_behind_a_phase, told)
    assert "Install one version" in message


class Group:
    """Ranks of one process, each of them in a thread of its own."""

    group_name = "threads"

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def get_group_store(self) -> dist.Store:
        return self._store


def rendezvous_of(store: dist.Store, rank: int, size: int, deadline: float = 50.0) -> Rendezvous:
    group: Any = Group(store, rank, size)
    return Rendezvous(group, "exchange", deadline)


def meet(store: dist.Store, size: int, phases: int = 1) -> None:
    """Lets all ranks meet once. They check each other's records."""
    wrong: list[object] = []

    def come(rank: int) -> None:
        rendezvous = rendezvous_of(store, rank, size)
        for phase in range(phases):
            records = rendezvous.exchange(f"phase {phase}", {"rank": rank})
            if records != [{"rank": other} for other in range(size)]:
                wrong.append(records)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def raised(call: Any) -> str:
    with pytest.raises(RendezvousError) as caught:
        call()
    return str(caught.value)


def test_a_late_rank_meets_the_others_at_their_next_try() -> None:
    store = dist.HashStore()
    for _ in range(3):  # rank 0 has come and gone three times when rank 1 comes
        message = raised(lambda: rendezvous_of(store, 0, 2, 0.05).exchange("terms", {}))
        assert "channel 'exchange' on rank 0: ranks [1] did not come to phase 'terms'" in message
        assert "within 0.05 s, which BLSConfig(deadline=...) sets" in message
    meet(store, 2)


def test_a_rank_hears_of_a_failed_try_once() -> None:
    store = dist.HashStore()
    rendezvous_of(store, 0, 2).fail("no memory")
    assert "rank 0 could not set it up: no memory" in raised(
        lambda: rendezvous_of(store, 1, 2).exchange("terms", {})
    )
    meet(store, 2)


def test_a_failure_of_another_session_is_none() -> None:
    store = dist.HashStore()
    group: Any = Group(store, 0, 2)
    Rendezvous(group, "exchange", 50.0, session="before").fail("no memory")
    message = raised(lambda: rendezvous_of(store, 1, 2, 0.05).exchange("terms", {}))
    assert "ranks [0] did not come" in message
    meet(store, 2)


def test_a_failure_that_nobody_heard_ends_with_the_next_try() -> None:
    store = dist.HashStore()
    rendezvous_of(store, 0, 2).fail("no memory")
    raised(lambda: rendezvous_of(store, 0, 2, 0.05).exchange("terms", {}))
    message = raised(lambda: rendezvous_of(store, 1, 2, 0.05).exchange("terms", {}))
    assert "ranks [0] did not come" in message


def test_two_threads_cannot_meet_under_one_name_at_once() -> None:
    store = dist.HashStore()
    first = threading.Thread(
        target=lambda: rendezvous_of(store, 0, 2).exchange("terms", {"number": 1})
    )
    first.start()
    store.wait(["torchrec_bls/exchange/seat/0"])
    message = raised(lambda: rendezvous_of(store, 0, 2).exchange("terms", {"number": 2}))
    assert "another thread sets up a channel of this name" in message
    assert rendezvous_of(store, 1, 2).exchange("terms", {"number": 3})[0] == {"number": 1}
    first.join()


def test_records_are_freed() -> None:
    store = dist.HashStore()
    counts = []
    for phases in (1, 3, 2, 5, 1):
        meet(store, 3, phases)
        counts.append(store.num_keys())
    assert counts == [8] * 5  # a counter, three seats, and three records and one word of the last


def test_records_of_tries_that_were_given_up_are_freed() -> None:
    store = dist.HashStore()
    for _ in range(4):
        for rank in range(3):
            raised(lambda rank=rank: rendezvous_of(store, rank, 3, 0.02).exchange("terms", {}))
    rendezvous_of(store, 0, 3).fail("no memory")
    raised(lambda: rendezvous_of(store, 1, 3).exchange("terms", {}))
    raised(lambda: rendezvous_of(store, 2, 3).exchange("terms", {}))
    meet(store, 3)
    assert store.num_keys() == 8


@pytest.mark.parametrize(
    "seat",
    ["", "[]", "{}", '{"nonce": 1, "error": null}', '{"nonce": "a", "error": 2}', "[" * 100_000],
)
def test_anything_in_place_of_a_seat_is_refused(seat: str) -> None:
    store = dist.HashStore()
    store.set("torchrec_bls/exchange/seat/1", seat)
    message = raised(lambda: rendezvous_of(store, 0, 2).exchange("terms", {}))
    assert "Install one version" in message


@pytest.mark.parametrize("left", ["[]", "7", '["other/key", 3]', "null"])
def test_anything_in_place_of_the_own_seat_harms_nobody(left: str) -> None:
    store = dist.HashStore()
    store.set("other/key", "kept")
    text = '{"nonce": "", "error": null, "heard": [], "left": ' + left + "}"
    store.set("torchrec_bls/exchange/seat/0", text)
    meet(store, 2)
    assert store.get("other/key") == b"kept"


def give_up_in_a_group(rank: int) -> str | None:
    group = dist.new_group([1, 3])
    if rank != 3:
        return None
    return raised(lambda: Rendezvous(group, "part", 0.05).exchange("terms", {}))


def test_ranks_of_a_group_have_their_global_numbers() -> None:
    message = run(4, give_up_in_a_group)[3]
    assert "channel 'part' on rank 3 (1 of its group): ranks [1] ([0] of their group)" in message


_HOST = "from torchrec_bls.collective.transport import rendezvous as r; print(r.host_identity())"


def test_a_user_namespace_is_a_host_of_its_own() -> None:
    """Its processes may not open the descriptors of others, though all have one PID namespace."""
    command = ["unshare", "--user", sys.executable, "-c", _HOST]
    told = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
    boot, processes, users = told.strip().split("/")
    ours = host_identity().split("/")
    assert [boot, processes] == ours[:2]
    assert users != ours[2]
