"""A drain that is interrupted at any line leaves the version before, the new one, or none."""

from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.direct.at_every_line import places_of, some_of, strike
from tests.direct.nodes import FLOAT, until
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import publish, serving_state, version_of
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.errors import DrainedError

DEADLINE = 30.0
ERRORS = (KeyboardInterrupt, OSError)


def strike_drains(rank: int, served_by: str, step: int) -> tuple[int, int, int]:
    """Returns at how many places a drain was struck, and how many of these left the tables drained,
    or the version before."""
    torch.set_num_threads(1)
    served: Any = import_module(served_by)
    model, batches = served.sharded(), served.batches_of(0)
    expected = served.Expected(batches)
    shown = served.check(model, batches, expected, 0)
    drained = before = 0

    def drain() -> None:
        new = str(shown % 3 + 1)
        publish(model, served.weights_of(shown % 3 + 1), version=new, drain=True, deadline=DEADLINE)

    serving_state(model)
    places = some_of(places_of(drain), step)
    for number, (place, error) in enumerate(zip(places, cycle(ERRORS))):
        until(lambda: follows(model))
        shown = served.check(model, batches, expected, number)
        strike(drain, place, error)
        what = f"{error.__name__} at {Path(place[0]).name}:{place[1]}"
        until(lambda: follows(model))
        try:
            seen = served.check(model, batches, expected, number)
        except DrainedError:
            drained += 1
            assert serving_state(model).drained_for != "", what
        else:
            before += seen == shown
            assert seen in (shown, shown % 3 + 1), what
        new = (shown + 1) % 3 + 1
        last = publish(model, served.weights_of(new), version=str(new), drain=number % 2 == 0)
        last.wait(DEADLINE)
        shown = served.check(model, batches, expected, number)
        assert shown == new and version_of(model) == str(new), what
    return len(places), drained, before


def follows(model: Any) -> bool:
    """Returns whether the next batch sees what serves."""
    publisher = ServedModel.of(model).publisher
    return publisher.follower.newest[0].serial == publisher.versions.serial


@pytest.mark.parametrize(
    ("served_by", "step"), slow_but([(FLOAT, 9)], [(FLOAT, 9), ("tests.quant.served", 7)])
)
def test_a_drain_is_struck_at_some_lines(served_by: str, step: int) -> None:
    [(places, drained, before)] = run(1, strike_drains, served_by, step, deadline=900.0)
    assert min(places - 10, drained, before) > 0
