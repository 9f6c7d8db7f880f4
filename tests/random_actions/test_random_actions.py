"""Some hundred of the actions that `make random-actions` draws."""

from dataclasses import replace
from itertools import product

import pytest

from tests.processes import run
from tests.random_actions import rows, serving
from tests.random_actions.births import WHATS, give_birth
from tests.random_actions.check import check
from tests.random_actions.life import Life
from tests.tiers import slow_but

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("seed", "transport"),
    slow_but([(3, "shm"), (7, "tcp")], product((3, 7), ("shm", "tcp"))),
)
def test_no_answer_is_wrong_and_nobody_hangs(seed: int, transport: str) -> None:
    life = replace(Life.draw(seed, epochs=3, batches=30), transport=transport, interrupted=None)
    assert check(life).total() > 50


def test_an_interrupt_ends_all_ranks() -> None:
    check(replace(Life.draw(11, epochs=3, batches=200), interrupted=0))


def test_first_forwards_give_right_rows_whatever_happens_at_them() -> None:
    births = 2 * len(WHATS)
    for counts in run(2, give_birth, 0, births, WHATS, deadline=120):
        assert counts.total() == births


@pytest.mark.parametrize("seed", [2, 3], ids=["float tables", "quantized tables"])
def test_batches_are_of_one_version_whatever_happens_to_rows(seed: int) -> None:
    assert rows.live(seed, rounds=3, publications=15, reads=40).total() > 300


@pytest.mark.parametrize("seed", [2, 3], ids=["float tables", "quantized tables"])
def test_processes_that_serve_follow_whatever_happens_to_them(seed: int) -> None:
    assert serving.live(seed, rounds=3, actions=20).total() > 100
