"""Rows of the fault matrix of a keeper's tables: rank 1 keeps them, and the others read."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from tests.direct import served
from tests.faults.faults import Kill, Nothing, Stop
from tests.faults.row import KILLED, Row, Scene
from torchrec_bls import attach, keeper, serving_state, version_of
from torchrec_bls.direct.serving.versions import Versions

# Rank that keeps the tables, and the one that does if it is killed.
_KEEPER, _SUCCESSOR = 1, 2
_PUBLICATIONS = 6
_DEADLINE = 60.0
_END = "the last version is read"


def keep(scene: Scene) -> None:
    """One rank publishes one version after the other, and the others compare each batch with the
    version that it says it is of, until all have read the last one."""
    if scene.rank == _KEEPER:
        _publish_all(scene)
    else:
        _read(scene)


def _publish_all(scene: Scene) -> None:
    with keeper(served.bare_model, served.weights_of(1), _path(scene), version="1") as made:
        dist.barrier()
        dist.barrier()  # all have attached
        original = Versions.announce

        def announce(versions: Versions, *args: Any) -> None:
            scene.reach("announce", iteration)
            original(versions, *args)
            scene.reach("announced", iteration)

        Versions.announce = announce  # type: ignore[method-assign]
        for iteration in range(_PUBLICATIONS):
            scene.reach("publish", iteration)
            number = iteration % 3 + 1
            made.publish(served.weights_of(number), version=str(number), deadline=_DEADLINE)
        made.publish(served.weights_of(4), version="4", deadline=_DEADLINE)
        _until(lambda: _have_ended(scene))


def _read(scene: Scene) -> None:
    model, batches = served.bare_model(), served.batches_of(scene.rank)
    expected = served.Expected(batches)
    dist.barrier()
    attach(model, _path(scene), deadline=_DEADLINE)
    dist.barrier()
    is_killed = isinstance(scene.row.fault, Kill)
    number, made, end = 0, None, time.monotonic() + _DEADLINE

    def check() -> bool:
        nonlocal number
        number += 1
        scene.reach("batch", number)
        return served.check(model, batches, expected, number) == 4

    while made is None and not check():
        if scene.rank == _SUCCESSOR and is_killed and (scene.folder / "struck").exists():
            try:
                made = keeper(served.bare_model, {}, _path(scene))
            except ValueError:  # it has not ended yet
                if time.monotonic() >= end:
                    raise
    if made is not None:
        assert made.took_over
        made.publish(served.weights_of(4), version="4", deadline=_DEADLINE)
        _until(check)
    assert serving_state(model).owners_gone == ()
    assert version_of(model) == "4"
    (scene.folder / f"{_END} by {scene.rank}").touch()
    if made is not None:
        _until(lambda: _have_ended(scene))


def _have_ended(scene: Scene) -> bool:
    return len(list(scene.folder.glob(f"{_END} by *"))) == scene.row.world - 1


def _path(scene: Scene) -> str:
    return str(scene.folder / "keeper")


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


_killed = Row(
    "",
    Kill(),
    play=keep,
    end="ProcessDied",
    exit_code=KILLED,
    rank=_KEEPER,
    iteration=3,
    deadline=60.0,
)
KEEPER = [
    *(
        replace(_killed, name=f"SIGKILL of a keeper {when}", moment=moment)
        for when, moment in (
            ("between publications", "publish"),
            ("before it announces a version", "announce"),
            ("after it has announced a version", "announced"),
        )
    ),
    *(
        replace(
            _killed,
            name=f"SIGSTOP of {whom}",
            fault=Stop(2.0),
            moment=moment,
            rank=rank,
            end=None,
            exit_code=0,
        )
        for whom, moment, rank in (
            ("a keeper", "announce", _KEEPER),
            ("a reader that holds an old version", "batch", 0),
        )
    ),
    replace(
        _killed,
        name="a keeper and its readers",
        fault=Nothing(),
        moment="publish",
        end=None,
        exit_code=0,
    ),
]
