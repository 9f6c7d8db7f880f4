"""A keeper is killed at lines of a publication. Its readers serve on, and its successor takes
the tables over from them."""

import ast
import gc
import inspect
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.direct import nodes
from tests.direct.at_every_line import PACKAGE, Place, some_of
from tests.direct.nodes import DEADLINE, FLOAT, Node
from tests.direct.test_drain import go_over
from tests.direct.test_keeper import KEEPER, keep, kept, processes_of, publish
from tests.tiers import slow_but
from torchrec_bls import Keeper, keeper
from torchrec_bls.direct import shared_tables
from torchrec_bls.errors import DrainedError


def walk(call: Callable[[], Any], kill_at: Place | None) -> list[Place]:
    """Makes a call, and kills this process when it gets to a place for the first time. Returns all
    places of the package that the call has been at."""
    places: dict[Place, None] = {}

    def on_line(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            places[place] = None
            if place == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    def on_call(frame: Any, event: str, _: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    sys.settrace(on_call)
    try:
        call()
    finally:
        sys.settrace(None)
    return list(places)


def publish_and_walk(node: Node, number: int, drain: bool, kill_at: Place | None) -> list[Place]:
    made: Keeper = keeper(node.served.bare_model, {}, node.path_of(KEEPER))
    assert made.took_over
    new = node.served.weights_of(number)

    def call() -> None:
        made.publish(new, version=str(number), drain=drain, deadline=DEADLINE)

    places = walk(call, kill_at)
    made.close()
    return places


def walk_in_child(
    node: Node, number: int, drain: bool, kill_at: Place | None
) -> tuple[int, list[Place]]:
    """Returns the signal that has ended a child which publishes, 0 if none has, and its places."""
    told = Path(node.path_of("places"))
    pid = os.fork()
    if pid == 0:
        try:
            told.write_bytes(pickle.dumps(publish_and_walk(node, number, drain, kill_at)))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status), []
    assert os.WEXITSTATUS(status) == 0
    return 0, pickle.loads(told.read_bytes())


def take_over(node: Node, number: int, drain: bool) -> None:
    """Publishes. Nothing is loaded for that, unless all readers had let go of their version."""
    if drain:
        keep(node, number)
    else:
        assert keep(node, None)
    publish(node, number)


def look(node: Node) -> int:
    """Returns the version that serves; 0 while there is none."""
    try:
        return nodes.check(node)
    except DrainedError:
        return 0


def give_up(node: Node) -> None:
    kept(node).close()
    node.offers.clear()
    node.model = None
    gc.collect()  # models are in cycles, and would all follow the versions to come


@cache
def after_a_holder_s_end() -> set[Place]:
    """Returns the lines that open a file anew, of which the process that it was announced by has
    just ended."""
    lines, first = inspect.getsourcelines(shared_tables._open_all)
    [function] = ast.parse("".join(lines)).body
    again = [
        each
        for each in ast.walk(function)
        if isinstance(each, ast.ExceptHandler)
        or (isinstance(each, ast.If) and isinstance(each.test, ast.Name))
    ]
    return {
        (shared_tables.__file__, first - 1 + number)
        for each in again
        for number in range(
            each.lineno + isinstance(each, ast.If), (each.end_lineno or each.lineno) + 1
        )
    }


def kill_at_places(folder: Path, served_by: str, step: int, drain: bool) -> None:
    names = "first", "nursery", "successor", "reader"
    with processes_of(folder, served_by, *names, deadline=1200.0) as processes:
        processes.call("first", keep, 1)
        processes.call("reader", nodes.join, KEEPER)
        processes.call("first", give_up)
        _, places = processes.call("nursery", walk_in_child, 2, drain, None)
        assert len(places) > 100
        processes.call("reader", go_over, 2)
        shown, seen_drained = 2, 0
        for place in some_of(places, step):
            new, last = shown % 3 + 1, (shown + 1) % 3 + 1
            what = f"{Path(place[0]).name}:{place[1]}"
            ended_by, _ = processes.call("nursery", walk_in_child, new, drain, place)
            by_luck = Path(place[0]).name == "file_holders.py" or place in after_a_holder_s_end()
            assert ended_by == signal.SIGKILL or (by_luck and ended_by == 0), what
            seen = processes.call("reader", look)
            assert seen in (shown, new, *([0] if drain else [])), (what, seen)
            seen_drained += seen == 0
            processes.call("successor", take_over, last, drain)
            processes.call("reader", go_over, last)
            processes.call("successor", give_up)
            shown = last
        assert (seen_drained > 0) == drain


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize(
    ("served_by", "step"), slow_but([(FLOAT, 29)], [(FLOAT, 29), ("tests.quant.served", 23)])
)
def test_a_keeper_is_killed_at_some_lines(
    tmp_path: Path, served_by: str, step: int, drain: bool
) -> None:
    kill_at_places(tmp_path, served_by, step, drain)
