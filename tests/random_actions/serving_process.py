"""What one process of a served model does at random: lookups, publications, and mishaps."""

import faulthandler
import gc
import os
import random
import re
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torchrec.distributed import DistributedModelParallel

import torchrec_bls
from tests.direct import nodes
from tests.direct.forked import wait_for_child
from tests.direct.nodes import Node
from tests.direct.test_last_defence import no_descriptors
from torchrec_bls import attach, offer, publish, serving_state
from torchrec_bls.errors import (
    BLSError,
    PeerDiedError,
    PeerTimeoutError,
    ProtocolError,
    RendezvousError,
)

BATCH, STATE, PUBLISH, IN_PLACE, FAIL, FOR_ANOTHER = (
    "batch",
    "state",
    "publish",
    "publish in place",
    "publish too little",
    "publish for a rank that is gone",
)
NO_DESCRIPTORS, INTERRUPT, FORK, ATTACH, OFFER = (
    "no descriptors",
    "interrupt",
    "fork",
    "attach",
    "offer",
)
_WEIGHTS = {
    BATCH: 60,
    STATE: 5,
    PUBLISH: 8,
    IN_PLACE: 3,
    FAIL: 3,
    FOR_ANOTHER: 3,
    NO_DESCRIPTORS: 3,
    INTERRUPT: 5,
    FORK: 1.5,
    ATTACH: 2,
    OFFER: 1,
}
# Weights that are published, by number.
NUMBERS = range(2, 10)
# Seconds until an owner withdraws what others do not publish.
_PATIENCE = (0.005, 0.05)
# Seconds that any action may take: what it waits for by itself takes less than one.
_LONGEST = 30.0
# What a batch may be refused with after the weights were written to in place.
_HELD_BACK = re.compile("written to")
_NO_DESCRIPTORS_LEFT = re.compile("ulimit -n|Too many open files|descriptor")
# Why a rank's version is not announced although nobody is at fault.
_OVERTAKEN = re.compile("has waited for version")

_PACKAGE = str(Path(torchrec_bls.__file__).parent)
# Seconds until the next try to strike in the package.
_NEXT_TRY = 5e-5


@cache
def _weights_of(served: Any, number: int) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = served.weights_of(number)
    return weights


def weights_of(node: Node, number: int) -> dict[str, torch.Tensor]:
    return _weights_of(node.served, number)


def act(node: Node, seed: int, actions: int, others: list[object]) -> Counter[str]:
    """Does that many actions, and returns how often each thing happened.

    Args:
        node: process that acts.
        seed: of what is drawn.
        actions: how many.
        others: names by which others offer their tables.
    """
    return act_by(_WEIGHTS, _ACTIONS, node, seed, actions, others)


def act_by(
    weights: Mapping[str, float],
    by_name: Mapping[str, Callable[[Node, random.Random, Any], str]],
    node: Node,
    seed: int,
    actions: int,
    others: Any = None,
) -> Counter[str]:
    """Does that many actions, drawn by their weights. See `act`."""
    draw, counts = random.Random(seed), Counter[str]()
    for number in range(actions):
        [name] = draw.choices(list(weights), list(weights.values()))
        # Says where, if the action does not end.
        faulthandler.dump_traceback_later(_LONGEST)
        began = time.monotonic()
        try:
            counts[by_name[name](node, draw, others)] += 1
        except Exception as error:
            raise AssertionError(f"action {number} of seed {seed}, {name}: {error!r}") from error
        assert time.monotonic() - began < _LONGEST, f"action {number} of seed {seed}, {name}"
    faulthandler.cancel_dump_traceback_later()
    return counts


def _look(node: Node, draw: random.Random, _: object) -> str:
    try:
        node.served.check(
            node.model, node.batches, node.expected, draw.randrange(len(node.batches))
        )
    except ValueError as error:
        if not _HELD_BACK.search(str(error)):
            raise
        return f"{BATCH}, held back"
    return BATCH


def _ask(node: Node, *_: object) -> str:
    state = serving_state(node.model)
    assert not (state.rank is None and state.rank in state.owners_gone)
    return STATE


def _version(node: Node, draw: random.Random) -> int:
    """Returns what to publish: mostly what another owner waits with."""
    state = serving_state(node.model)
    pending = [int(version) for owner, version in state.pending.items() if owner != state.rank]
    return pending[0] if pending and draw.random() < 0.8 else draw.choice(NUMBERS)


def _publish(node: Node, draw: random.Random, _: object) -> str:
    number = _version(node, draw)
    try:
        own = publish(
            node.model,
            weights_of(node, number),
            version=str(number),
            deadline=draw.uniform(*_PATIENCE),
        )
    except ValueError as error:
        return _refusal(node, error, PUBLISH)
    return f"{PUBLISH}, was announced" if own.was_announced else PUBLISH


def _refusal(node: Node, error: ValueError, what: str) -> str:
    if _OVERTAKEN.search(str(error)):
        return f"{what}, overtaken"
    if serving_state(node.model).rank is None:
        assert re.search("publishes none|was forked from process", str(error)), str(error)
        return f"{what}, refused to a reader"
    raise error


def _publish_in_place(node: Node, draw: random.Random, others: object) -> str:
    is_sharded = isinstance(node.model, DistributedModelParallel)
    if not is_sharded or serving_state(node.model).rank is None:
        return _publish(node, draw, others)
    number = _version(node, draw)
    node.served.write_in_place(node.model, number)
    try:
        publish(node.model, version=str(number), deadline=draw.uniform(*_PATIENCE))
    except ValueError as error:
        if not _HELD_BACK.search(str(error)):
            return _refusal(node, error, IN_PLACE)
        return f"{IN_PLACE}, would mix"
    except PeerTimeoutError as error:
        assert "can't be shown here" in str(error), str(error)
        return f"{IN_PLACE}, not shown yet"
    return IN_PLACE


def _publish_too_little(node: Node, draw: random.Random, _: object) -> str:
    number = draw.choice(NUMBERS)
    without = {name: w for name, w in weights_of(node, number).items() if name != "dense.bias"}
    try:
        publish(node.model, without, version=str(number), deadline=draw.uniform(*_PATIENCE))
    except ValueError as error:
        if "no 'dense.bias'" in str(error):
            return FAIL
        return _refusal(node, error, FAIL)
    raise AssertionError("weights that lack one were published")


def _publish_for(node: Node, draw: random.Random, others: object) -> str:
    gone = serving_state(node.model).owners_gone
    if not gone:
        return _look(node, draw, others)
    owner, number = draw.choice(gone), _version(node, draw)
    try:
        publish(
            node.model,
            weights_of(node, number),
            version=str(number),
            owner=owner,
            deadline=draw.uniform(*_PATIENCE),
        )
    except PeerTimeoutError as error:
        assert "another process acts for rank" in str(error), str(error)
        return f"{FOR_ANOTHER}, another does"
    except ValueError as error:
        if re.search("lives, as process|another process publishes", str(error)):
            return f"{FOR_ANOTHER}, it is back"
        return _refusal(node, error, FOR_ANOTHER)
    return FOR_ANOTHER


def _without_descriptors(node: Node, draw: random.Random, others: list[object]) -> str:
    action = draw.choice([_look, _ask, _publish, _publish_for, _attach_and_drop])
    with no_descriptors():
        try:
            action(node, draw, others)
        except (BLSError, OSError) as error:
            assert _NO_DESCRIPTORS_LEFT.search(str(error)), repr(error)
            return f"{NO_DESCRIPTORS}, refused"
    return NO_DESCRIPTORS


def _interrupt(node: Node, draw: random.Random, others: list[object]) -> str:
    # Not `offer`: nobody could close what was interrupted on its way to its variable.
    action = draw.choice([_look, _ask, _publish, _publish_in_place, _publish_for, _attach_and_drop])
    try:
        with interrupted_after(draw.uniform(0.0, 0.004)):
            action(node, draw, others)
    except KeyboardInterrupt:
        return INTERRUPT
    return f"{INTERRUPT}, too late"


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raises KeyboardInterrupt in what this package does in this context: torch itself does not
    stand one everywhere."""
    is_inside = True

    def interrupt(_: int, frame: FrameType | None) -> None:
        if is_inside and frame is not None:
            if frame.f_code.co_filename.startswith(_PACKAGE):
                raise KeyboardInterrupt
            signal.setitimer(signal.ITIMER_REAL, _NEXT_TRY)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        is_inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _fork(node: Node, draw: random.Random, others: list[object]) -> str:
    """Forks a child that serves for a moment."""
    why = Path(node.path_of(f"{node.name}'s child"))
    child = os.fork()
    if child == 0:
        status, node.name = 1, f"child of {node.name}"
        try:
            for action in (_look, _publish, _look, _ask, _attach, _look):
                action(node, draw, others)
            status = 0
        except BaseException:
            why.write_text(traceback.format_exc())
        finally:
            os._exit(status)
    assert wait_for_child(child, _LONGEST) == 0, f"a forked child failed: {why.read_text()}"
    return FORK


def _attach(node: Node, draw: random.Random, others: list[object]) -> str:
    """Attaches a model, and serves it from now on where that replaces no publisher."""
    came, model = _attached(node, draw, others)
    if model is not None and serving_state(node.model).rank is None and draw.random() < 0.5:
        node.model = model
        offer_anew(node)
    return came


def _attach_and_drop(node: Node, draw: random.Random, others: list[object]) -> str:
    return _attached(node, draw, others)[0]


def _attached(node: Node, draw: random.Random, others: list[object]) -> tuple[str, Any]:
    """Returns what came of it, and the model that was attached, or None."""
    model = node.served.bare_model()
    try:
        attach(model, node.path_of(draw.choice(others)), deadline=_LONGEST / 2)
    except (RendezvousError, PeerDiedError) as error:
        if _NO_DESCRIPTORS_LEFT.search(str(error)):
            raise
        return f"{ATTACH}, to one that is gone", None
    except ProtocolError as error:
        assert re.search(f"{_NO_DESCRIPTORS_LEFT.pattern}|not there any more", str(error)), error
        return f"{ATTACH}, to one that can't", None
    node.served.check(model, node.batches, node.expected, 0)
    return ATTACH, model


def _offer(node: Node, *_: object) -> str:
    offer_anew(node)
    return OFFER


def offer_anew(node: Node) -> None:
    """Ends what the process offers, and offers its model."""
    while node.offers:
        node.offers.pop().close()
    node.offers.append(offer(node.model, node.path_of(node.name)))


_ACTIONS: dict[str, Callable[[Node, random.Random, Any], str]] = {
    BATCH: _look,
    STATE: _ask,
    PUBLISH: _publish,
    IN_PLACE: _publish_in_place,
    FAIL: _publish_too_little,
    FOR_ANOTHER: _publish_for,
    NO_DESCRIPTORS: _without_descriptors,
    INTERRUPT: _interrupt,
    FORK: _fork,
    ATTACH: _attach,
    OFFER: _offer,
}


def prepare(node: Node) -> None:
    """Computes what each version gives, so that no action has to."""
    torch.set_num_threads(1)
    for number in NUMBERS:
        for batch in range(len(node.batches)):
            node.expected.of(number, batch)


def settle(node: Node, number: int, owners: list[int | None]) -> None:
    """Publishes a version, however often others hinder it.

    Args:
        node: process that publishes.
        number: of the version.
        owners: ranks for which it does; None for its own.
    """
    left = list(owners)
    why = ""

    def are_published() -> bool:
        nonlocal why
        for owner in list(left):
            try:
                publish(
                    node.model,
                    weights_of(node, number),
                    version=str(number),
                    owner=owner,
                    deadline=0.1,
                )
                left.remove(owner)
            except ValueError as error:
                why = str(error)
                if not _OVERTAKEN.search(why):
                    raise
        return not left

    try:
        nodes.until(are_published)
    except AssertionError:
        raise AssertionError(f"does not publish {number} for {left}: {why}") from None


def count_readers(node: Node, pids: list[int]) -> None:
    """Waits until these processes are the readers, and none of them holds an older version."""

    def are_counted() -> bool:
        # What the process has dropped is freed everywhere, since all of them wait here.
        gc.collect()
        state = serving_state(node.model)
        return sorted(state.readers) == pids and not state.readers_behind

    try:
        nodes.until(are_counted)
    except AssertionError:
        raise AssertionError(f"not {pids}: {serving_state(node.model)}") from None


def follow(node: Node, number: int) -> None:
    """Waits for a version, and looks all batches up in it."""
    why = ""

    def serves() -> bool:
        nonlocal why
        try:
            seen = node.served.check(node.model, node.batches, node.expected, 0)
        except ValueError as error:
            # What this rank wrote in place is replaced by the version.
            if not _HELD_BACK.search(str(error)):
                raise
            why = str(error)
            return False
        # A process that is behind may be at an earlier version of the same name.
        state = serving_state(node.model)
        return seen == number and state.serial == state.announced_serial

    try:
        nodes.until(serves)
    except AssertionError:
        state = serving_state(node.model)
        raise AssertionError(f"does not get to version {number}: {state}; {why}") from None
    nodes.check(node, number)
