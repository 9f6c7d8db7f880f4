"""Which weights serve when ranks skip versions, fail, are late, die or take each other's place."""

import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.direct import nodes, served
from tests.direct.nodes import Node, started, state_of, until
from tests.direct.served import Expected, batches_of, check, weights_of
from tests.processes import run, run_outcomes
from torchrec_bls import (
    attach,
    bounded_lag_modules,
    offer,
    publish,
    serving_state,
    version_of,
)
from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.process import this_process
from torchrec_bls.direct.serving.follower import Follower
from torchrec_bls.direct.serving.ownership import _ACTING
from torchrec_bls.errors import PeerTimeoutError

DEADLINE = 60.0


class Ranked:
    """A rank's model, and its checked batches."""

    def __init__(self, rank: int) -> None:
        self.model: Any = served.sharded()
        self.batches = batches_of(rank)
        self.expected = Expected(self.batches)
        assert self.check() == 1

    def check(self) -> int:
        """Compares all batches with the version that each says it is of; returns the last one."""
        seen = [check(self.model, self.batches, self.expected, i) for i in range(4)]
        return seen[-1]

    def publish(self, number: int, deadline: float = DEADLINE, owner: int | None = None) -> Any:
        return publish(
            self.model, weights_of(number), version=str(number), owner=owner, deadline=deadline
        )


def fail_once(rank: int) -> None:
    ranked = Ranked(rank)
    for number in range(2, 6):
        if (rank, number) == (1, 2):
            without = {name: w for name, w in weights_of(2).items() if name != "dense.bias"}
            with pytest.raises(ValueError, match=r"no 'dense\.bias'"):
                publish(ranked.model, without, version="2")
            continue
        own = ranked.publish(number)
        assert ranked.check() in (1, *range(3, number + 1))
        if number > 2:
            own.wait(DEADLINE)
            assert ranked.check() == number
    dist.barrier()


def test_a_version_that_one_rank_fails_to_publish_is_skipped_by_all() -> None:
    run(2, fail_once)


def skip_in_turn(rank: int) -> None:
    ranked = Ranked(rank)
    for number in range(2, 8):
        if number % 2 == rank:
            ranked.publish(number)
        assert ranked.check() == 1
        dist.barrier()
    state = serving_state(ranked.model)
    assert (state.version, state.announced) == (FIRST_VERSION, FIRST_VERSION)
    assert state.pending == {0: "6", 1: "7"}
    assert state.missing == ()
    dist.barrier()
    ranked.publish(8).wait(DEADLINE)
    assert ranked.check() == 8
    dist.barrier()


def test_ranks_that_never_publish_the_same_version_stay_with_the_old_one() -> None:
    run(2, skip_in_turn)


def be_late(rank: int) -> None:
    ranked = Ranked(rank)
    if rank == 0:
        given_up = ranked.publish(2)
        assert serving_state(ranked.model).pending == {0: "2"}
        assert serving_state(ranked.model).missing == (1,)
        with pytest.raises(
            PeerTimeoutError, match=r"'2' does not serve after .* s: ranks \[1\] have not publish"
        ):
            given_up.wait(0.01)
        without = {name: w for name, w in weights_of(3).items() if name != "dense.bias"}
        with pytest.raises(ValueError, match=r"no 'dense\.bias'"):
            publish(ranked.model, without, version="3", deadline=0.05)
        assert serving_state(ranked.model).pending == {0: "2"}
        own = ranked.publish(3, deadline=0.05)
        assert own.version == "3" and not own.was_announced
        with pytest.raises(PeerTimeoutError, match="version '2' was withdrawn before all ranks"):
            given_up.wait(DEADLINE)
    dist.barrier()
    if rank == 1:
        with pytest.raises(
            ValueError,
            match="rank 0 has waited for version '2' in vain, and has announced version '3' inst",
        ):
            ranked.publish(2)
        assert ranked.check() == 1
        own = ranked.publish(3)
    own.wait(DEADLINE)
    assert ranked.check() == 3
    dist.barrier()


def test_who_comes_with_a_version_that_was_withdrawn_is_told_the_other_one() -> None:
    run(2, be_late)


def come_again(rank: int) -> None:
    """Both announce version 2 in vain, and then others."""
    ranked = Ranked(rank)
    if rank == 0:
        ranked.publish(2)
        # So does a publication that then lacks memory.
        ranked.model.module.bags.direct_reads.tables.page.withdraw(0)
    dist.barrier()
    if rank == 1:
        ranked.publish(2)
        ranked.publish(4, deadline=0.05)
    dist.barrier()
    if rank == 0:
        ranked.publish(3)
        assert serving_state(ranked.model).pending == {0: "3", 1: "4"}
    dist.barrier()
    ranked.publish(2).wait(DEADLINE)
    assert ranked.check() == 2
    dist.barrier()


def test_a_version_that_all_have_given_up_may_be_published_after_all() -> None:
    run(2, come_again)


def publish_again(rank: int) -> None:
    ranked = Ranked(rank)
    for number in (2, 3, 2):
        own = ranked.publish(number)
        assert not own.was_announced
        own.wait(DEADLINE)
        assert own.serves and ranked.check() == number
        again = ranked.publish(number)
        assert again.was_announced and again.serves
        again.wait(DEADLINE)
        dist.barrier()
    assert serving_state(ranked.model).serial == 4
    if rank == 0:
        waiting, twice = ranked.publish(4), ranked.publish(4)
        assert (waiting.was_announced, twice.was_announced) == (False, True)
        assert not twice.serves
        # Who goes back to what serves does not want what waits.
        back = ranked.publish(2, deadline=0.05)
        assert back.was_announced and back.serves
        with pytest.raises(PeerTimeoutError, match="was withdrawn"):
            twice.wait(DEADLINE)
    dist.barrier()
    assert ranked.check() == 2
    assert serving_state(ranked.model).pending == {}
    dist.barrier()


def test_what_serves_is_not_published_again_and_an_earlier_version_is() -> None:
    run(2, publish_again)


def give_no_version(rank: int) -> None:
    ranked = Ranked(rank)
    with pytest.raises(ValueError, match=r"2 ranks publish these tables.*publish\(\.\.\., version"):
        publish(ranked.model, weights_of(2))
    for wrong in ("", "x" * 65, 2, "a\nb", "\ud800", FIRST_VERSION):
        with pytest.raises(ValueError, match="version is "):
            publish(ranked.model, weights_of(2), version=wrong)  # type: ignore[arg-type]
    assert serving_state(ranked.model).pending == {}
    dist.barrier()


def test_several_ranks_have_to_name_the_version() -> None:
    run(2, give_no_version)


def publish_alone(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    with torch.no_grad():
        model(batches[0])
        names = []
        for number in (2, 3):
            own = publish(model, weights_of(number))
            own.wait(DEADLINE)
            model(batches[0])
            assert version_of(model) == own.version
            names.append(own.version)
    assert len({*names, FIRST_VERSION}) == 3


def test_one_rank_alone_need_not_name_versions() -> None:
    run(1, publish_alone)


def publish_for_the_dead(rank: int) -> None:
    ranked = Ranked(rank)
    pids = pids_of_ranks()
    survivors = dist.new_group([0, 2])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: state_of(pids[1]) in "ZX")
    for number in range(2, 6):
        own = ranked.publish(number)
        for owner in serving_state(ranked.model).owners_gone:
            ranked.publish(number, owner=owner)  # both do
        own.wait(DEADLINE)
        assert ranked.check() == number
    dist.barrier(survivors)


def test_all_survivors_may_publish_for_a_rank_that_is_gone() -> None:
    outcomes = run_outcomes(3, publish_for_the_dead)
    errors = [outcome.error for outcome in outcomes]
    assert errors == [None, "ProcessDied", None], "\n".join(map(str, outcomes))


def pids_of_ranks() -> list[int]:
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def check_that_rank_1_dies_alone(function: Callable[[int], None]) -> None:
    outcomes = run_outcomes(2, function)
    errors = [outcome.error for outcome in outcomes]
    assert errors == [None, "ProcessDied"], "\n".join(map(str, outcomes))


def announce_and_die(rank: int) -> None:
    ranked = Ranked(rank)
    pids = pids_of_ranks()
    if rank == 1:
        ranked.publish(2)
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: state_of(pids[1]) in "ZX")
    assert serving_state(ranked.model).pending == {1: "2"}
    # Its segments went with it, before anybody had mapped them.
    assert not ranked.publish(2, owner=1).was_announced
    assert ranked.publish(2, owner=1).was_announced
    ranked.publish(2).wait(DEADLINE)
    assert ranked.check() == 2


def test_what_a_rank_announced_and_took_with_it_is_published_again() -> None:
    check_that_rank_1_dies_alone(announce_and_die)


def complete_what_is_lost(rank: int) -> None:
    ranked = Ranked(rank)
    pids = pids_of_ranks()
    if rank == 1:
        ranked.publish(2)
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: state_of(pids[1]) in "ZX")
    own = ranked.publish(2)  # nobody could map what it would complete
    assert serving_state(ranked.model).pending == {0: "2"}
    assert serving_state(ranked.model).missing == (1,)
    with pytest.raises(PeerTimeoutError, match=r"ranks \[1\] have not published it, of which"):
        own.wait(0.01)
    ranked.publish(2, owner=1)
    own.wait(DEADLINE)
    assert ranked.check() == 2


def test_what_a_rank_took_with_it_completes_no_version() -> None:
    check_that_rank_1_dies_alone(complete_what_is_lost)


def lose_what_serves(rank: int) -> None:
    ranked = Ranked(rank)
    pids = pids_of_ranks()
    look = Follower.look
    if rank == 0:
        ranked.publish(2)
        looks_no_more = threading.Event()
        Follower.look = lambda _: looks_no_more.set() or True  # type: ignore[func-returns-value, method-assign]
        assert looks_no_more.wait(DEADLINE)  # so that a look that had begun is over
    dist.barrier()
    if rank == 1:
        ranked.publish(2)
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: state_of(pids[1]) in "ZX")
    Follower.look = look  # type: ignore[method-assign]
    assert serving_state(ranked.model).announced == "2"
    until(lambda: "cannot open shared memory" in serving_state(ranked.model).problem)
    assert ranked.check() == 1
    for owner in (None, 1):
        own = ranked.publish(2, owner=owner)
        assert not own.was_announced
    own.wait(DEADLINE)
    assert ranked.check() == 2
    assert ranked.publish(2).was_announced and ranked.publish(2, owner=1).was_announced


def test_a_version_that_a_rank_took_with_it_is_announced_anew() -> None:
    check_that_rank_1_dies_alone(lose_what_serves)


def find_an_old_mark(rank: int) -> None:
    ranked = Ranked(rank)
    pids = pids_of_ranks()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: state_of(pids[1]) in "ZX")
    page = ranked.model.module.bags.direct_reads.tables.page
    assert page.take_over(1, page.process(1), this_process().identity | _ACTING)
    ranked.publish(2, owner=1)
    assert page.process(1) == 0
    ranked.publish(2).wait(DEADLINE)
    assert ranked.check() == 2


def test_a_mark_that_an_interrupted_call_left_keeps_nobody_out() -> None:
    check_that_rank_1_dies_alone(find_an_old_mark)


def pending(node: Node) -> dict[int, str]:
    return dict(serving_state(node.model).pending)


def test_a_successor_sees_what_waits_for_it(tmp_path: Path) -> None:
    with started(tmp_path, 2) as processes:
        processes.call(0, nodes.publish_all, 2)
        processes.kill(1)
        processes.start("successor")
        processes.call("successor", nodes.join, 0, 1)
        assert processes.call("successor", pending) == {0: "2"}
        # One that begins with a later version mixes it with nothing.
        processes.call("successor", nodes.publish_all, 3)
        assert processes.call(0, pending) == {0: "2", 1: "3"}
        for name in (0, "successor"):
            processes.call(name, nodes.check, 1)
        processes.call(0, nodes.publish_all, 3)
        for name in (0, "successor"):
            processes.call(name, nodes.go_over, 3)


class Outer(nn.Module):
    """A model in a model."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Any) -> Any:
        return self.inner(ids)


def publish_parts(rank: int) -> None:
    ranked = Ranked(rank)
    inner, outer = ranked.model, Outer(ranked.model.module)

    def check_outer() -> int:
        return check(outer, ranked.batches, ranked.expected, 0)

    whole = {f"inner.{name}": weight for name, weight in weights_of(2).items()}
    publish(outer, whole | {"bias": torch.ones(1)}, version="2").wait(DEADLINE)
    assert check_outer() == 2 and outer.bias.item() == 1
    own = publish(inner, weights_of(3), version="3")
    own.wait(DEADLINE)
    assert check_outer() == 3 and outer.bias.item() == 1
    # Who has let go of the version before may change between two looks.
    until(lambda: serving_state(outer) == serving_state(inner))
    with pytest.raises(ValueError, match=r"served together with 1 other modules.*whole model"):
        publish(inner.module.bags, version="4")
    dist.barrier()


def test_a_model_and_its_part_publish_by_one_coordinator() -> None:
    run(2, publish_parts)


def publish_the_part_first(rank: int) -> None:
    ranked = Ranked(rank)
    outer = Outer(ranked.model.module)
    ranked.publish(2).wait(DEADLINE)
    assert ranked.check() == 2
    dist.barrier()
    whole = {f"inner.{name}": weight for name, weight in weights_of(3).items()}
    publish(outer, whole | {"bias": torch.ones(1)}, version="3").wait(DEADLINE)
    assert check(outer, ranked.batches, ranked.expected, 0) == 3 and outer.bias.item() == 1
    dist.barrier()


def test_the_whole_model_may_follow_its_part() -> None:
    run(2, publish_the_part_first)


def leave_readers_behind(rank: int, folder: str, how: str) -> None:
    ranked = Ranked(rank)
    with offer(ranked.model, f"{folder}/{rank}") as offered:
        reader = nodes.bare_model()
        attach(reader, offered.path, deadline=DEADLINE)
    assert check(reader, ranked.batches, ranked.expected, 0) == 1
    assert serving_state(reader).problem == ""
    if how == "resharded":
        for module in bounded_lag_modules(ranked.model).values():
            module._bls.forget_lookup()  # as reshard does
    else:
        del ranked.model, offered
        gc.collect()
    # The thread that follows may be in a look, and free them after it.
    says = "rank 0 has shared its tables anew or has freed the model"
    until(lambda: says in serving_state(reader).problem)
    assert check(reader, ranked.batches, ranked.expected, 1) == 1


@pytest.mark.parametrize("how", ["resharded", "freed"])
def test_a_reader_is_told_that_the_tables_were_shared_anew(tmp_path: Path, how: str) -> None:
    run(1, leave_readers_behind, str(tmp_path), how)
