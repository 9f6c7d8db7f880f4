"""What an exception leaves behind, at whichever line of the package it strikes."""

import gc
import os
import signal
import time
from collections.abc import Callable
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.direct.at_every_line import places_of, some_of, strike
from tests.direct.nodes import FLOAT, state_of, until
from tests.processes import run_outcomes
from torchrec_bls import Publication, attach, offer, publish, serving_state
from torchrec_bls.direct.serving.ownership import Ownership
from torchrec_bls.direct.serving.served_model import ServedModel

DEADLINE = 30.0
ERRORS = (KeyboardInterrupt, OSError)
# Every line takes minutes.
STEP = 4


class Process:
    """A process whose model reads the tables of two ranks, of which one is gone.

    Attributes:
        folder: folder for sockets.
        served: module with the model, its weights and batches.
        model: the model.
        batches: batches of it.
        shown: weights that its last batch showed.
    """

    def __init__(self, folder: str, served_by: str) -> None:
        self.folder = folder
        self.served: Any = import_module(served_by)
        self.model = self.served.sharded()
        self.batches = self.served.batches_of(0)
        self.shown = 1
        self._expected = self.served.Expected(self.batches)
        self._number = 0
        self.check(self.model, 1)

    def check(self, model: Any, *allowed: int) -> None:
        """Compares two batches: each shows one of the weights that are allowed, and nothing
        else."""
        for _ in range(2):
            self._number = (self._number + 1) % len(self.batches)
            with torch.no_grad():
                output = model(self.batches[self._number])
            self.shown = self._weights_of(output, allowed)

    def _weights_of(self, output: Any, allowed: tuple[int, ...]) -> int:
        for weights in allowed:
            expected = self._expected.of(weights, self._number)
            if all(torch.equal(output[name], expected[name]) for name in expected):
                return weights
        raise AssertionError(f"a batch shows none of {allowed} alone")

    @property
    def next(self) -> int:
        """Returns other weights than are shown."""
        return self.shown % 3 + 1

    def publish(self, weights: int, owner: int | None = None) -> Publication:
        """Publishes for this rank, or for one that is gone."""
        new = self.served.weights_of(weights)
        return publish(self.model, new, version=str(weights), owner=owner, deadline=DEADLINE)

    def publish_all(self, weights: int) -> None:
        """Publishes for both ranks, and checks that these weights are shown."""
        self.publish(weights, owner=1)
        self.publish(weights).wait(DEADLINE)
        self.check(self.model, weights)


def strike_all(what: Callable[[], None], afterwards: Callable[[], None], step: int = STEP) -> int:
    """Strikes at places of a call, and checks each time what is left. Returns how many it has."""
    places = places_of(what)
    afterwards()
    before = held()
    # Each line is struck by one of them, as all of them at all lines take minutes.
    for place, error in zip(some_of(places, step), cycle(ERRORS)):
        strike(what, place, error)
        try:
            afterwards()
        except BaseException as failure:
            name = f"{Path(place[0]).name}:{place[1]}"
            raise AssertionError(f"after {error.__name__} at {name}: {failure!r}") from failure
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    return len(places)


def held() -> tuple[int, ...]:
    """Returns the numbers of threads, descriptors and mapped memory files of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:torchrec_bls")
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), maps  # noqa: PTH208


def strike_publish(process: Process) -> int:
    """Rank 1 publishes first, and so the struck call makes a version serve."""
    new: list[int] = []

    def prepare() -> None:
        new[:] = [process.next]
        process.publish(new[0], owner=1)

    def what() -> None:
        process.publish(new[0])

    def afterwards() -> None:
        process.check(process.model, process.shown, *new)
        if serving_state(process.model).announced_serial == serials[-1]:
            what()
        until(lambda: serving_state(process.model).announced_serial > serials[-1])
        until(lambda: follows(process.model))
        process.check(process.model, *new)
        serials.append(serving_state(process.model).announced_serial)
        prepare()

    serials = [serving_state(process.model).announced_serial]
    prepare()
    places = strike_all(what, afterwards)
    process.publish(new[0]).wait(DEADLINE)
    process.check(process.model, *new)
    return places


def follows(model: Any) -> bool:
    """Returns whether the next batch sees what was announced."""
    publisher = ServedModel.of(model).publisher
    return publisher.follower.newest[0].serial == publisher.versions.serial


def strike_publish_for(process: Process) -> int:
    """Rank 0 publishes afterwards."""
    new = [process.next]

    def what() -> None:
        process.publish(new[0], owner=1)

    def afterwards() -> None:
        assert serving_state(process.model).owners_gone == (1,)
        own = process.publish(new[0])
        if serving_state(process.model).announced != own.version:
            what()
        own.wait(DEADLINE)
        process.check(process.model, *new)
        new[:] = [process.next]

    return strike_all(what, afterwards)


def strike_attach(process: Process) -> int:
    """A model takes the place of rank 1. After a failure all is as it was."""
    model = process.served.bare_model()
    modules = dict(model.named_modules())
    weights = {name: tensor.clone() for name, tensor in model.dense.state_dict().items()}
    pages = [reads.tables.page for reads in ServedModel.of(process.model).reads]
    path = f"{process.folder}/struck"

    def what() -> None:
        attach(model, path, owner=1, deadline=DEADLINE)

    def afterwards() -> None:
        attached = serving_state(process.model).owners_gone == ()
        if attached:
            process.check(model, process.shown)
            # Puts all back for the next time.
            ServedModel.forget(model)
            for name in dict(model.named_children()):
                setattr(model, name, modules[name])
            model.dense.load_state_dict(weights)
            Ownership(pages).give_up(1)
        assert serving_state(process.model).owners_gone == (1,)
        assert dict(model.named_modules()) == modules
        assert all(
            torch.equal(weights[name], new) for name, new in model.dense.state_dict().items()
        )
        assert not model._forward_pre_hooks

    with offer(process.model, path):
        return strike_all(what, afterwards)


def strike_offer(process: Process) -> int:
    path = f"{process.folder}/offered"

    def what() -> None:
        offer(process.model, path).close()

    def afterwards() -> None:
        with offer(process.model, path):
            model = process.served.bare_model()
            attach(model, path, deadline=DEADLINE)
        assert not Path(path).exists()

    return strike_all(what, afterwards)


CALLS = {
    "publish": strike_publish,
    "publish for a rank that is gone": strike_publish_for,
    "attach": strike_attach,
    "offer": strike_offer,
}


def strike_one(rank: int, folder: str, name: str, served_by: str) -> None:
    process = Process(folder, served_by)
    serving_state(process.model)
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: state_of(pids[1]) in "ZX")
    assert {**CALLS, "locks": strike_locks}[name](process) > 10  # places
    process.publish_all(process.next)


def strike_locks(process: Process) -> int:
    """What keeps other threads, and other processes, from publishing."""
    publisher = ServedModel.of(process.model).publisher

    def lock() -> None:
        with publisher.one_at_a_time(time.monotonic() + DEADLINE):
            pass

    def place() -> None:
        with publisher._ownership.in_place_of(1, time.monotonic() + DEADLINE):
            pass

    def afterwards() -> None:
        with publisher.one_at_a_time(time.monotonic()):
            pass
        assert serving_state(process.model).owners_gone == (1,)

    return strike_all(lock, afterwards, step=1) + strike_all(place, afterwards, step=1)


def test_locks_and_places_are_given_back(tmp_path: Path) -> None:
    outcomes = run_outcomes(2, strike_one, str(tmp_path), "locks", FLOAT, deadline=60.0)
    assert [outcome.error for outcome in outcomes] == [None, "ProcessDied"], str(outcomes[0])


@pytest.mark.slow
@pytest.mark.parametrize("served_by", [FLOAT, "tests.quant.served"])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_left_serves(tmp_path: Path, name: str, served_by: str) -> None:
    arguments = (str(tmp_path), name, served_by)
    outcomes = run_outcomes(2, strike_one, *arguments, deadline=600.0)
    assert [outcome.error for outcome in outcomes] == [None, "ProcessDied"], str(outcomes[0])
