"""Forwards that end early on some ranks, over modules that do nothing but exchange."""

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.direct.at_every_line import places_of, strike
from tests.processes import run
from torchrec_bls import BoundedLagChannel
from torchrec_bls.collective.forwards import Forwards, is_in_training, is_of_forward
from torchrec_bls.collective.scope import Scope
from torchrec_bls.distributed.model_forwards import add_hooks
from torchrec_bls.errors import BatchRefusedError, BLSError, PeerTimeoutError

NEVER = 60.0


class Lookup(nn.Module):
    """Sends an id to every rank, and gets a row of each: the id, the rank and its version."""

    def __init__(self, name: str, deadline: float = NEVER, bound: int = 0) -> None:
        super().__init__()
        group = dist.group.WORLD
        assert group is not None
        self.forwards = Forwards()
        self.version = 0
        self.deadline = deadline
        self._rank, self._world_size = group.rank(), group.size()
        self._channels = [
            BoundedLagChannel(group, slot_bytes=512, name=f"{name}.{part}", bound=bound)
            for part in ("ids", "rows")
        ]

    @property
    def calls_channel(self) -> BoundedLagChannel:
        return self._channels[0]

    def joins_scopes(self) -> bool:
        return True

    def awaiting(self) -> list[int]:
        return []

    def meet(self) -> None:
        raise AssertionError("its channels are there from the start")

    def take_part(self, trains: bool, refusal: str | None) -> None:
        with torch.set_grad_enabled(trains):
            if refusal is None:
                self._call([], None)
                return
            with pytest.raises(BatchRefusedError):
                self._call([], refusal)

    def is_asked_ahead(self) -> bool:
        return False

    def fail(self, reason: str) -> None:
        for channel in self._channels:
            channel.poison(reason)

    def forward(self, number: int) -> list[list[int]]:
        return self._call([number], None)

    def _call(self, ids: list[int], refusal: str | None) -> list[list[int]]:
        label = self.forwards.call()
        sent = [torch.tensor(ids, dtype=torch.int64), torch.tensor([refusal is not None])]
        asked, refused = [], False
        with self._exchange(0, label, [sent] * self._world_size) as arrival:
            for rank in range(self._world_size):
                asked.append(arrival.tensor(rank, 0, torch.int64).tolist())
                refused |= bool(arrival.tensor(rank, 1, torch.bool))
        if refused:
            raise BatchRefusedError("a rank refused it")
        rows = [
            torch.tensor([[n, self._rank, self.version] for n in of_rank], dtype=torch.int64)
            for of_rank in asked
        ]
        with self._exchange(1, label, [[each.reshape(-1)] for each in rows]) as arrival:
            self.forwards.answered(label)
            return [
                arrival.tensor(rank, 0, torch.int64).tolist() for rank in range(self._world_size)
            ]

    def _exchange(self, which: int, label: int, parts: Sequence[Sequence[torch.Tensor]]):  # type: ignore[no-untyped-def]
        channel = self._channels[which]
        channel.native.label(label)
        channel.post(parts)
        return channel.wait()


class Model(nn.Module):
    """Calls lookups in an order that the batch says, up to a call of `fails`."""

    def __init__(self, names: Sequence[str], deadline: float = NEVER, bound: int = 0) -> None:
        super().__init__()
        self.lookups = nn.ModuleList(Lookup(name, deadline, bound) for name in names)
        self.hooks = add_hooks(self, self._open_scope)

    def _open_scope(self, owner: object) -> Scope:
        return Scope(list(self.lookups), owner).__enter__()  # type: ignore[arg-type]

    def forward(
        self, calls: Sequence[int], fails_at: int | None = None, error: type = ArithmeticError
    ) -> list[list[list[int]]]:
        rows = []
        for at, which in enumerate(calls):
            if at == fails_at:
                raise error("by order")
            rows.append(self.lookups[which](10 * at + which))
        if fails_at == len(calls):
            raise error("by order")
        return rows

    def set_version(self, version: int) -> None:
        for lookup in self.lookups:
            lookup.version = version


def rows_of(calls: Sequence[int], world_size: int, version: int) -> list[list[list[int]]]:
    return [
        [[10 * at + which, rank, version] for rank in range(world_size)]
        for at, which in enumerate(calls)
    ]


@torch.no_grad()
def fail_at_random(rank: int, world_size: int, bound: int) -> None:
    model = Model(["a", "b"], bound=bound)
    order = random.Random(1)  # the same on all ranks
    for version in range(40):
        model.set_version(version)
        calls = [order.randrange(2) for _ in range(order.randrange(5))]
        fails = [order.choice([None, order.randint(0, len(calls))]) for _ in range(world_size)]
        if fails[rank] is None:
            assert model(calls) == rows_of(calls, world_size, version)
        else:
            with pytest.raises(ArithmeticError, match="by order"):
                model(calls, fails[rank])
        dist.barrier()  # in which no rank answers another


@pytest.mark.parametrize(("world_size", "bound"), [(2, 0), (3, 1)])
def test_the_other_ranks_get_their_rows_of_the_weights_of_that_forward(
    world_size: int, bound: int
) -> None:
    run(world_size, fail_at_random, world_size, bound)


@torch.no_grad()
def fail_between_two_models(rank: int) -> None:
    first, second = Model(["a"]), Model(["b"])
    modules = [*first.lookups, *second.lookups]
    for turn in range(6):
        if rank == turn % 2:
            with pytest.raises(ArithmeticError), Scope(modules):  # type: ignore[arg-type]
                first([0], turn % 3 % 2)
        else:
            with Scope(modules):  # type: ignore[arg-type]
                assert first([0]) == second([0]) == rows_of([0], 2, 0)
        # A canary: each by itself, one fails.
        canary = (first, second)[turn % 2]
        if rank == 1:
            with pytest.raises(ArithmeticError):
                canary([0, 0], 1)
        else:
            assert canary([0, 0]) == rows_of([0, 0], 2, 0)


def test_a_function_over_two_models_and_a_canary() -> None:
    run(2, fail_between_two_models)


@torch.no_grad()
def interrupt(rank: int) -> None:
    model = Model(["a", "b"])
    assert model([0, 1]) == rows_of([0, 1], 2, 0)
    if rank == 0:
        with pytest.raises(KeyboardInterrupt):
            model([0, 1, 1], 1, KeyboardInterrupt)
        model.set_version(1)
    else:
        with pytest.raises(BatchRefusedError):
            model([0, 1, 1])
    assert [len(rows) for rows in model([1, 0])] == [2, 2]
    # Left by a with statement, and ended by a call outside of scopes.
    lookup = model.lookups[0]
    if rank == 1:
        with pytest.raises(KeyboardInterrupt), Scope([lookup]):  # type: ignore[list-item]
            raise KeyboardInterrupt
        assert len(lookup(5)) == 2
    else:
        with pytest.raises(BatchRefusedError), Scope([lookup]):  # type: ignore[list-item]
            lookup(5)
        assert len(lookup(5)) == 2


def test_what_an_interrupt_left_open_is_refused_by_the_next_forward() -> None:
    run(2, interrupt)


@torch.no_grad()
def call_outside(rank: int) -> None:
    model = Model(["a", "b"])
    lookup = model.lookups[0]
    assert lookup(7) == lookup(7) == [[7, 0, 0], [7, 1, 0]]
    assert model([0, 0]) == rows_of([0, 0], 2, 0)
    assert [each.forwards.now[0] for each in model.lookups] == [3, 1]  # type: ignore[union-attr]
    if rank == 0:
        with pytest.raises(ArithmeticError):
            model([0, 0], 1)
    else:
        model([0, 0])
    assert lookup(7) == [[7, 0, 0], [7, 1, 0]]


def test_calls_outside_of_scopes_are_forwards_of_their_own() -> None:
    run(2, call_outside)


def fail_in_training(rank: int) -> None:
    model = Model(["a", "b"])
    for turn in range(3):
        if rank == 0:
            with pytest.raises(ArithmeticError):
                model([turn % 2, 1], 1)
        else:
            with pytest.raises(BatchRefusedError):
                model([turn % 2, 1])
        assert model([0, 1]) == rows_of([0, 1], 2, 0)


def test_no_rank_goes_on_with_a_step_of_training_that_fails_on_one() -> None:
    run(2, fail_in_training)


@torch.no_grad()
def never_end(rank: int) -> None:
    model = Model(["a"], deadline=0.5)
    if rank == 0:
        with (
            pytest.warns(UserWarning, match=r"ranks \[1\] did not end a forward"),
            pytest.raises(ArithmeticError),
        ):
            model([0], 1)
        dist.barrier()
        return
    scope = Scope(list(model.lookups))  # type: ignore[arg-type]
    scope.__enter__()
    model.lookups[0](0)
    dist.barrier()
    with pytest.raises(BLSError, match=r"did not end a forward within 0\.5 s"):
        model([0])


def test_a_peer_that_does_not_end_its_forward_is_named_at_the_deadline() -> None:
    run(2, never_end)


@torch.no_grad()
def end_without_the_others(rank: int) -> None:
    model = Model(["a"], deadline=0.5)
    if rank == 0:
        with (
            pytest.raises(PeerTimeoutError, match=r"ranks \[1\] did not"),
            Scope(list(model.lookups)),  # type: ignore[arg-type]
        ):
            raise ArithmeticError
    dist.barrier()


def test_a_with_statement_raises_at_the_deadline() -> None:
    run(2, end_without_the_others)


@torch.no_grad()
def call_from_two_threads(rank: int) -> None:
    model = Model(["a"])
    refused: list[str] = []

    def call() -> None:
        for callee in (lambda: model([0]), lambda: model.lookups[0](0)):
            with pytest.raises(ValueError, match="another thread of this process") as caught:
                callee()
            refused.append(str(caught.value))

    with Scope(list(model.lookups), owner=model):  # type: ignore[arg-type]
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert model.lookups[0](0) == [[0, 0, 0]]
    assert len(refused) == 2
    assert model([0, 0]) == rows_of([0, 0], 1, 0)
    assert model.lookups[0].forwards.now[0] == 2  # type: ignore[union-attr]


def test_a_second_thread_is_refused_before_anything_is_counted() -> None:
    run(1, call_from_two_threads)


class Hurried(Lookup):
    """Lets two threads begin at the same moment, which both have found it free."""

    def __init__(self, name: str, world: list[threading.Barrier]) -> None:
        super().__init__(name)
        self._meetings = world

    def joins_scopes(self) -> bool:
        if self._meetings:
            self._meetings[0].wait(NEVER)
            self._meetings.clear()
        return True


@torch.no_grad()
def begin_at_once(rank: int) -> None:
    lookups: list[Any] = [Hurried("a", [threading.Barrier(2)]), Lookup("b")]
    ended = threading.Event()
    outcomes: list[str] = []

    def call() -> None:
        try:
            with Scope(lookups) as scope:
                outcomes.append("first")
                assert scope.modules == lookups
                assert ended.wait(NEVER)
        except ValueError as error:
            assert "another thread of this process" in str(error)
            outcomes.append("second")
            ended.set()

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(NEVER)
    assert sorted(outcomes) == ["first", "second"]
    assert [each.forwards.now for each in lookups] == [(1, None)] * 2


def test_of_two_threads_that_begin_at_once_one_is_refused() -> None:
    run(1, begin_at_once)


@torch.no_grad()
def leave_to_another_thread(rank: int) -> None:
    lookup: Any = Lookup("a")
    if rank == 1:
        with pytest.raises(BatchRefusedError, match="refused it"), Scope([lookup]):
            lookup(5)
        assert len(lookup(5)) == 2
        return
    left, go_on = threading.Event(), threading.Event()

    def call() -> None:
        with pytest.raises(KeyboardInterrupt), Scope([lookup]):
            raise KeyboardInterrupt
        left.set()
        assert go_on.wait(NEVER)

    thread = threading.Thread(target=call)
    thread.start()
    assert left.wait(NEVER)
    assert len(lookup(5)) == 2
    go_on.set()
    thread.join(NEVER)


def test_what_a_thread_left_open_is_ended_by_another_one() -> None:
    run(2, leave_to_another_thread)


class Unmet:
    """A module whose ranks have not met. It has nobody to wait for."""

    calls_channel = None
    deadline = NEVER

    def __init__(self) -> None:
        self.forwards = Forwards()

    def joins_scopes(self) -> bool:
        return True


def test_a_signal_leaves_no_module_in_a_forward_that_others_have_ended() -> None:
    modules: list[Any] = [Unmet(), Unmet()]

    def call() -> None:
        with Scope(modules):
            for module in modules:
                module.forwards.call()

    places = places_of(call)
    assert len(places) > 20
    for place in places:
        strike(call, place, KeyboardInterrupt)
        call()
        numbers, scopes = zip(*(module.forwards.now for module in modules), strict=True)
        assert scopes == (None, None)
        assert len(set(numbers)) == 1


def test_a_signal_while_a_forward_ends_leaves_the_rest_to_the_next_one() -> None:
    modules: list[Any] = [Unmet(), Unmet()]
    for first in range(2):  # modules that have ended
        number = modules[0].forwards.now[0]
        with pytest.raises(KeyboardInterrupt), Scope(modules) as scope:
            for module in modules[:first]:
                module.forwards.end(scope)
            raise KeyboardInterrupt
        with Scope(modules) as scope:
            assert [module.forwards.now for module in modules] == [(number + 1, scope)] * 2


@torch.no_grad()
def exit_a_thread(rank: int) -> None:
    model = Model(["a"])

    def call() -> None:
        with pytest.raises(SystemExit):
            model([0], 0, SystemExit)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert model([0]) == rows_of([0], 1, 0)


def test_a_forward_that_an_ended_thread_has_left_keeps_nobody_out() -> None:
    run(1, exit_a_thread)


def test_labels_tell_calls_and_forwards_apart() -> None:
    forwards = Forwards()
    labels = {}
    for number in (*range(300), (1 << 23) - 1):
        for trains in (False, True):
            forwards.now = number, None
            with torch.set_grad_enabled(trains), Scope([]) as scope:
                forwards.begin(scope)
                labels |= {forwards.call(): (number, trains) for _ in range(256)}
                forwards.end(scope)
    assert len(labels) == 301 * 256 * 2
    assert max(labels) < 1 << 32
    for label, (number, trains) in labels.items():
        assert is_of_forward(label, number)
        assert is_of_forward(label, number + (1 << 23))
        assert not is_of_forward(label, number + 1)
        assert is_in_training(label) == trains
