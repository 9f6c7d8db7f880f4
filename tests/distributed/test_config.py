"""What BLSConfig and BLSOptions share, and the deadline that follows from what a module does."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed import models
from tests.distributed.results.test_training import loss_of
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BLSConfig, BLSOptions, BoundedLagChannel, BoundedLagPipeline
from torchrec_bls.collective.exchange_options import timeout_of
from torchrec_bls.distributed.config import Deadline
from torchrec_bls.distributed.exchanges import exchange

SHARED = ["bound", "transport", "slot_bytes", "deadline", "verbs"]


def test_shared_fields_have_the_same_defaults() -> None:
    config = {field.name: field.default for field in fields(BLSConfig)}
    options = {field.name: field.default for field in fields(BLSOptions)}
    assert list(options) == SHARED
    assert {name: config[name] for name in SHARED} == options


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bound": -1}, "bound is -1, but must be a number of iterations"),
        ({"transport": "rdma"}, "transport is 'rdma', but has to be one of auto"),
        (
            {"slot_bytes": 8},
            "slot_bytes is 8, but a message header alone may take .*: use at least",
        ),
        ({"deadline": 0.0}, "deadline is 0.0 s, but must be positive"),
    ],
)
@pytest.mark.parametrize("kind", [BLSConfig, BLSOptions])
def test_shared_fields_have_the_same_checks(
    kind: type, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**values)


def ask_for_timeouts(rank: int) -> list[float]:
    groups = [
        dist.new_group(timeout=timedelta(seconds=700)),
        dist.new_group(backend="bls", timeout=timedelta(seconds=800)),
    ]
    return [timeout_of(group) for group in groups]


def test_the_timeout_of_a_group() -> None:
    assert run(2, ask_for_timeouts) == [[700.0, 800.0]] * 2


@contextmanager
def deadlines_of_channels() -> Iterator[dict[str, float]]:
    """Yields the deadline of each channel of a module made meanwhile, by the end of its name."""
    deadlines: dict[str, float] = {}

    def make(*args: Any, **options: Any) -> BoundedLagChannel:
        deadlines[options["name"].rpartition(".")[2]] = options["deadline"]
        return BoundedLagChannel(*args, **options)

    with mock.patch.object(exchange, "BoundedLagChannel", make):
        yield deadlines


def wait_as_long_as_fits(rank: int, kind: models.Kind) -> None:
    ids = models.make_ids(kind, rank, 4)
    timeout = timeout_of(dist.group.WORLD)
    assert timeout != 60.0
    both = {"ids", "embeddings"}

    with deadlines_of_channels() as deadlines:
        model = models.shard(kind, "table_wise", kind.bls_sharder(BLSConfig()))
        loss_of(models.arrived(model(models.Batch(ids)))).backward()
    assert deadlines == dict.fromkeys(both | {"gradients"}, timeout)

    with deadlines_of_channels() as deadlines, torch.no_grad():
        model = models.shard(kind, "table_wise", kind.bls_sharder(BLSConfig()))
        models.arrived(model(models.Batch(ids)))
    assert deadlines == dict.fromkeys(both, 60.0)
    with deadlines_of_channels() as deadlines:  # it is trained later
        loss_of(models.arrived(model(models.Batch(ids)))).backward()
    assert deadlines == {"gradients": timeout}

    with deadlines_of_channels() as deadlines:
        model = models.shard(kind, "table_wise", kind.bls_sharder(BLSConfig(bound=1)))
        BoundedLagPipeline[models.Batch, Any](model).progress(iter([models.Batch(ids)]))
    assert deadlines == dict.fromkeys(both, 60.0)

    with deadlines_of_channels() as deadlines:
        model = models.shard(kind, "table_wise", kind.bls_sharder(BLSConfig(deadline=33)))
        loss_of(models.arrived(model(models.Batch(ids)))).backward()
    assert deadlines == dict.fromkeys(both | {"gradients"}, 33)


@pytest.mark.parametrize(
    "kind", slow_but([models.EBC], [models.EC, models.EBC]), ids=lambda kind: kind.name
)
def test_a_module_waits_as_its_group_when_it_trains_and_a_minute_when_it_does_not(
    kind: models.Kind,
) -> None:
    run(2, wait_as_long_as_fits, kind, deadline=100)


def test_a_given_deadline_asks_no_group() -> None:
    nobody: Any = None
    assert Deadline(5.0, nobody).seconds == 5.0
