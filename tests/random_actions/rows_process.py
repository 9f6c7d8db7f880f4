"""What a process does at random whose tables are refreshed by row: publish, err, and read."""

import os
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.direct import nodes
from tests.direct.forked import wait_for_child
from tests.direct.nodes import DEADLINE, Node
from tests.direct.row_versions import go_on, is_whole
from tests.direct.served import number_of
from tests.direct.test_keeper import KEEPER, kept
from tests.random_actions.serving_process import act_by, interrupted_after
from torchrec_bls import attach, serving_state
from torchrec_bls.errors import PeerTimeoutError

DELTA, WHOLE, WRONG_BASE, BAD_DELTA, BAD_PROBE, INTERRUPT = (
    "delta",
    "whole version",
    "delta of another base",
    "delta that can't be",
    "delta that does not pass its probe",
    "interrupt",
)
BATCH, STATE, FORK, ATTACH, ALONE = (
    "batch",
    "state",
    "fork",
    "attach",
    "lookup past the model",
)
_PUBLICATIONS = {DELTA: 50, WRONG_BASE: 5, BAD_DELTA: 8, BAD_PROBE: 5, INTERRUPT: 12, BATCH: 10}
_READS = {BATCH: 75, STATE: 5, INTERRUPT: 12, FORK: 1, ATTACH: 2, ALONE: 5}
# Seconds that the keeper waits for readers that are stopped inside a batch.
_PATIENCE = 0.1
# Seconds after which an action is interrupted, at most.
_STRIKE = 0.01
_CHILD = 30.0


def publish_at_random(node: Node, seed: int, actions: int) -> Counter[str]:
    """Acts that often as the keeper, and returns how often each thing happened."""
    return act_by(_PUBLICATIONS, _ACTIONS_OF_KEEPER, node, seed, actions)


def read_at_random(node: Node, seed: int, actions: int) -> Counter[str]:
    """Acts that often as a reader, and returns how often each thing happened."""
    return act_by(_READS, _ACTIONS_OF_READER, node, seed, actions)


def settle(node: Node) -> int:
    """Publishes the next version, and returns its number. No reader stays in a batch."""
    number = _number(node) + 1
    go_on(node, number)
    return number


def _number(node: Node) -> int:
    """Returns the number of the version that serves, whatever this process has seen of it."""
    return number_of(serving_state(node.model).announced)


def _go_on(node: Node, draw: random.Random, _: object) -> str:
    number = _number(node) + 1
    what = WHOLE if is_whole(number) else DELTA
    try:
        go_on(node, number, _PATIENCE)
    except PeerTimeoutError as error:
        if not re.search("still run a batch|can't be read here|does not serve", str(error)):
            raise
        return f"{what}, too late"
    except ValueError:
        # An interrupted one has been announced meanwhile.
        if _number(node) < number:
            raise
        return f"{what}, announced before"
    nodes.check(node, number)
    return what


def _refused(node: Node, says: str, **changed: Any) -> None:
    """Fails to publish a delta that serves nowhere afterwards."""
    number = _number(node)
    arguments: dict[str, Any] = {
        "rows": node.served.delta_of(number + 1),
        "version": f"bad {number}",
        "base": str(number),
        "deadline": DEADLINE,
    }
    arguments |= changed
    rows = arguments.pop("rows")
    try:
        kept(node).publish_rows(rows, **arguments)
    except ValueError as error:
        assert re.search(says, str(error)), error
    else:
        raise AssertionError(f"{changed} was published")
    # What was interrupted before may be seen by now.
    assert _number(node) in (number, number + 1)
    nodes.check(node)


def _wrong_base(node: Node, draw: random.Random, _: object) -> str:
    _refused(node, "belong on version", base=str(_number(node) + draw.choice([-1, 2, 7])))
    return WRONG_BASE


def _bad_delta(node: Node, draw: random.Random, _: object) -> str:
    tables = {
        name: weight
        for name, weight in node.served.weights_of(1).items()
        if not name.startswith("dense")
    }
    name = draw.choice(sorted(tables))
    count, columns = tables[name].shape
    ids, rows = torch.tensor([0, count - 1]), torch.ones(2, columns)
    spoilt = rows.clone()
    spoilt[1, draw.randrange(columns)] = draw.choice([float("nan"), float("inf")])
    bad: list[tuple[dict[str, Any], str]] = [
        ({f"{name}.more": (ids, rows)}, "has no tables"),
        ({name: (ids, rows[:1])}, "but for 2 ids must be"),
        ({name: (ids, torch.ones(2, columns + 1))}, "but for 2 ids must be"),
        ({name: (ids, rows.double())}, "but for 2 ids must be"),
        ({name: (ids + 1, rows)}, "is no row of"),
        ({name: (-ids - 1, rows)}, "is no row of"),
        ({name: (ids, spoilt)}, "NaN or infinite"),
        ({name: rows}, "must be a pair"),
    ]
    delta, says = draw.choice(bad)
    _refused(node, says, rows=delta)
    return BAD_DELTA


def _bad_probe(node: Node, draw: random.Random, _: object) -> str:
    number = _number(node)
    try:
        _refused(node, "does not pass", probe=lambda model: False)
    except PeerTimeoutError:
        assert _number(node) == number
        return f"{BAD_PROBE}, too late"
    return BAD_PROBE


def _look(node: Node, draw: random.Random, _: object) -> str:
    node.served.check(node.model, node.batches, node.expected, draw.randrange(len(node.batches)))
    return BATCH


def _ask(node: Node, *_: object) -> str:
    serving_state(node.model)
    return STATE


def _interrupt_keeper(node: Node, draw: random.Random, _: object) -> str:
    return _interrupt(node, draw, [_go_on, _go_on, _bad_delta, _look])


def _interrupt_reader(node: Node, draw: random.Random, _: object) -> str:
    return _interrupt(node, draw, [_look, _look, _ask, _attach])


def _interrupt(node: Node, draw: random.Random, actions: list[Any]) -> str:
    try:
        with interrupted_after(draw.uniform(0.0, _STRIKE)):
            draw.choice(actions)(node, draw, None)
    except KeyboardInterrupt:
        return INTERRUPT
    return f"{INTERRUPT}, too late"


def _fork(node: Node, draw: random.Random, _: object) -> str:
    """Forks a child that reads for a moment."""
    why = Path(node.path_of(f"{node.name}'s child"))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for _ in range(5):
                _look(node, draw, None)
            status = 0
        except BaseException:
            why.write_text(traceback.format_exc())
        finally:
            os._exit(status)
    assert wait_for_child(child, _CHILD) == 0, f"a forked child failed: {why.read_text()}"
    return FORK


def _attach(node: Node, draw: random.Random, _: object) -> str:
    """Attaches another model, and drops it."""
    model = node.served.bare_model()
    try:
        attach(model, node.path_of(KEEPER), deadline=_PATIENCE)
    except Exception as error:
        # The keeper is killed or stopped.
        if not re.search("RendezvousError|PeerDiedError|PeerTimeoutError", type(error).__name__):
            raise
        return f"{ATTACH}, to one that is gone"
    node.served.check(model, node.batches, node.expected, 0)
    return ATTACH


def _look_alone(node: Node, draw: random.Random, _: object) -> str:
    """Calls a module past the model. Its rows may be written over: then it has no answer."""
    batch = draw.randrange(len(node.batches))
    try:
        with torch.no_grad():
            found = node.model.bags(node.batches[batch])
    except Exception as error:
        # A forked child reads nothing before it has called the model.
        expected = "are written over by later ones|was forked from the one that mapped"
        assert re.search(expected, str(error)), repr(error)
        return f"{ALONE}, refused"
    del found
    return ALONE


_Actions = dict[str, Callable[[Node, random.Random, Any], str]]
_ACTIONS_OF_KEEPER: _Actions = {
    DELTA: _go_on,
    WRONG_BASE: _wrong_base,
    BAD_DELTA: _bad_delta,
    BAD_PROBE: _bad_probe,
    INTERRUPT: _interrupt_keeper,
    BATCH: _look,
}
_ACTIONS_OF_READER: _Actions = {
    BATCH: _look,
    STATE: _ask,
    INTERRUPT: _interrupt_reader,
    FORK: _fork,
    ATTACH: _attach,
    ALONE: _look_alone,
}
