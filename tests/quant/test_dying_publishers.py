"""A keeper is killed at each step of a publication; readers go on, and its successor publishes."""

import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.direct import nodes
from tests.direct.nodes import Node, started
from torchrec_bls import attach, publish
from torchrec_bls.direct import owner_part, steps
from torchrec_bls.direct.serving.versions import Versions

DEADLINE = 60.0
SERVED = "tests.quant.served"


def die_at(step: int) -> None:
    """Has this process be killed before that step of a publication: a read, a piece, an index, a
    record, the announcement; the last one comes after it."""
    numbers = count()

    def may_die() -> None:
        if next(numbers) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            may_die()
            return original(*args)

        return call

    def announce(
        versions: Versions, owner: int, serial: int, version: str, parts: list[Any]
    ) -> None:
        pages = [tables.page for tables in versions._tables]
        for page, part in zip(pages, parts, strict=True):
            may_die()
            page.record(owner, serial, version, part.index.address)
        may_die()
        pages[0].announce(owner, serial)
        may_die()

    steps._digest = after(steps._digest)
    owner_part._made = after(owner_part._made)
    owner_part.make_index = after(owner_part.make_index)
    Versions.announce = announce  # type: ignore[assignment,method-assign]


def publish_in_child(node: Node, version: int, step: int) -> bool:
    """Attaches a child in the place of the keeper, which publishes. Returns whether it was killed
    in the middle."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            model = node.served.bare_model()
            attach(model, node.path_of("reader"), owner=0, deadline=DEADLINE)
            die_at(step)
            new = node.served.weights_of(version)
            publish(model, new, version=str(version), deadline=DEADLINE).wait(DEADLINE)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == signal.SIGKILL or status == 0, status
    return status == signal.SIGKILL


def another_than(*versions: int) -> int:
    return next(each for each in (2, 3, 4) if each not in versions)


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_a_keeper_dies_at_each_step(tmp_path: Path, stride: int) -> None:
    with started(tmp_path, 1, SERVED) as processes:
        for name in ("reader", "publisher"):
            processes.start(name)
        processes.call("reader", nodes.join, 0, None, "reader")
        processes.kill(0)
        serving, version, died = 1, 1, 0
        for step in count(0, stride):
            version = another_than(serving, version)
            was_killed = processes.call("publisher", publish_in_child, version, step)
            died += was_killed
            # What was announced may have been mapped before it was gone, and be taken later.
            serving = processes.call("reader", nodes.check, None)
            if not was_killed:
                break
        assert died * stride >= 30
        processes.start("successor")
        processes.call("successor", nodes.join, "reader", 0)
        version = another_than(serving, version)
        processes.call("successor", nodes.publish_all, version)
        processes.call_all(["reader", "successor"], nodes.go_over, version)
