"""First forwards of many short-lived models, in one group of ranks, and what may happen at them."""

import gc
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed import DistributedModelParallel

from tests.distributed import models
from torchrec_bls import BLSConfig, BoundedLagPipeline
from torchrec_bls.errors import RendezvousError

LATE, ORDER, REFUSED, EMPTY, DETACH = (
    "late first forward",
    "two models in another order",
    "refused first batch",
    "empty first batch",
    "detach in flight",
)
_SAMPLES = 3
# Seconds that ranks wait for a late one. Nothing else waits for its end.
_SHORT = 1.0
_LONG = 60.0


class Birth(NamedTuple):
    """What all ranks know of a model's first forward.

    Attributes:
        number: of the birth in its group; keys in the store have it.
        what: what happens.
        kind: module that is sharded.
        sharding: of its tables.
        lookup: of the configuration.
        transport: of the configuration.
        bound: of the configuration.
        odd: rank that does something else than the others.
    """

    number: int
    what: str
    kind: models.Kind
    sharding: str
    lookup: str
    transport: str
    bound: int
    odd: int

    @classmethod
    def draw(cls, seed: int, number: int, ranks: int, whats: tuple[str, ...]) -> "Birth":
        """Returns the birth of a number, the same on all ranks."""
        draw = random.Random(f"{seed}/{number}")
        kind = draw.choice([models.EC, models.EBC, models.WEIGHTED])
        # With tables by rows beside others TorchRec divides sums as if they were means.
        mixed = [] if kind is models.EBC else ["mixed"]
        return cls(
            number,
            whats[number % len(whats)],
            kind,
            draw.choice(["table_wise", "row_wise", "column_wise", *mixed]),
            draw.choice(["exchange", "exchange", "direct"]),
            draw.choice(["auto", "tcp"]),
            draw.choice([0, 1, 2]),
            draw.randrange(ranks),
        )


def give_birth(rank: int, seed: int, births: int, whats: tuple[str, ...]) -> Counter[str]:
    """Makes models one after the other, each of which has to give the unsharded module's rows.
    Returns how often each thing happened."""
    counts: Counter[str] = Counter()
    for number in range(births):
        birth = Birth.draw(seed, number, dist.get_world_size(), whats)
        try:
            with torch.no_grad():
                _EVENTS[birth.what](rank, birth)
        except Exception as error:
            raise AssertionError(f"rank {rank}, {birth}, seed {seed}: {error!r}") from error
        counts[birth.what] += 1
        gc.collect()  # channels of the last model, before the next one's
    return counts


def _late(rank: int, birth: Birth) -> None:
    model = _model(birth, deadline=_SHORT)
    store = dist.distributed_c10d._get_default_store()
    others = [each for each in range(dist.get_world_size()) if each != birth.odd]
    if rank == birth.odd:
        store.wait([f"births/{birth.number}/{each} gave up" for each in others])
    else:
        # On a loaded host another rank may have given up before: it is missing then as well.
        missing = "".join(str(each) for each in range(dist.get_world_size()) if each != rank)
        with pytest.raises(RendezvousError, match=rf"ranks? \[?[{missing}]"):
            _rows(model(_batch(birth, rank, 0)))
        store.set(f"births/{birth.number}/{rank} gave up", "")
        store.wait([f"births/{birth.number}/{each} gave up" for each in others])
    _check_batches(model, birth, rank)


def _in_another_order(rank: int, birth: Birth) -> None:
    twins = [_model(birth, twin=twin) for twin in range(2)]
    first = twins[rank % 2]
    with pytest.raises(RendezvousError, match="name"):
        _rows(first(_batch(birth, rank, 0)))
    del twins, first
    named = [_model(birth, twin=twin, name=f"twin {twin}") for twin in range(2)]
    for step in range(2):
        for twin, model in enumerate(named):
            _check(model, birth, rank, step, twin)


def _refused(rank: int, birth: Birth) -> None:
    model = _model(birth)
    if rank == birth.odd:
        ids = _batch(birth, rank, 0).ids.to_dict()
        keys = list(reversed(ids))
        mixed = KeyedJaggedTensor.from_jt_dict({key: ids[key] for key in keys})
        mixed.values()[-1:] = 10**6
        mixed = _with_weights(birth, mixed)
        with pytest.raises(ValueError, match=r"out of range|malformed"):
            _rows(model(models.Batch(mixed)))
    else:
        _check(model, birth, rank, 0)
    _check_batches(model, birth, rank)


def _empty(rank: int, birth: Birth) -> None:
    model = _model(birth)
    if rank == birth.odd:
        none = KeyedJaggedTensor(
            keys=birth.kind.features,
            values=torch.zeros(0, dtype=torch.int32),
            weights=torch.zeros(0, dtype=torch.float64) if birth.kind is models.WEIGHTED else None,
            lengths=torch.zeros(0, dtype=torch.int64),
            stride=0,
        )
        assert all(len(rows) == 0 for rows in _rows(model(models.Batch(none))).values())
    else:
        _check(model, birth, rank, 0)
    _check_batches(model, birth, rank)


def _detach(rank: int, birth: Birth) -> None:
    model = _model(birth)
    pipeline = BoundedLagPipeline[models.Batch, Any](model)
    batches = [_batch(birth, rank, step) for step in range(4)]
    left = iter(batches)
    outputs = []
    while True:
        try:
            outputs.append(_rows(pipeline.progress(left)))
        except StopIteration:
            break
        if birth.lookup == "exchange" and birth.bound and len(outputs) == 1:
            with pytest.raises(ValueError, match="under way"):
                pipeline.detach()
    assert len(outputs) == len(batches)
    for step, rows in enumerate(outputs):
        _compare(rows, birth, rank, step)
    pipeline.detach()
    _check_batches(model, birth, rank)


_EVENTS: dict[str, Callable[[int, Birth], None]] = {
    LATE: _late,
    ORDER: _in_another_order,
    REFUSED: _refused,
    EMPTY: _empty,
    DETACH: _detach,
}
WHATS = tuple(_EVENTS)


def _model(
    birth: Birth, *, twin: int = 0, name: str | None = None, deadline: float = _LONG
) -> DistributedModelParallel:
    config = BLSConfig(
        bound=birth.bound,
        lookup=birth.lookup,
        transport=birth.transport,
        deadline=deadline,
        name=name,
    )
    sharder = birth.kind.bls_sharder(config)
    module = _whole(birth, twin)
    plan = models.make_plan(module, models.sharding_types(birth.kind, birth.sharding, 1), sharder)
    return models.shard_model(models.SparseOnly(module), {"embeddings": plan}, [sharder])


def _whole(birth: Birth, twin: int) -> Any:
    module = birth.kind.module()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + twin)
    return module


def _batch(birth: Birth, rank: int, step: int) -> models.Batch:
    ids = models.make_ids(birth.kind, 1000 * rank + 10 * birth.number + step, _SAMPLES)
    return models.Batch(ids)


def _with_weights(birth: Birth, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    if birth.kind is not models.WEIGHTED or ids.weights_or_none() is not None:
        return ids
    weights = torch.ones(ids.values().numel())
    return KeyedJaggedTensor(ids.keys(), ids.values(), weights, ids.lengths())


def _check_batches(model: DistributedModelParallel, birth: Birth, rank: int) -> None:
    for step in range(1, 4):
        _check(model, birth, rank, step)


def _check(
    model: DistributedModelParallel, birth: Birth, rank: int, step: int, twin: int = 0
) -> None:
    batch = _batch(birth, rank, step)
    output = model(batch)
    _refill(batch.ids)
    _compare(_rows(output), birth, rank, step, twin)


def _compare(
    rows: dict[str, torch.Tensor], birth: Birth, rank: int, step: int, twin: int = 0
) -> None:
    expected = _rows(_whole(birth, twin)(_batch(birth, rank, step).ids))
    assert rows.keys() == expected.keys()
    for key, tensor in rows.items():
        torch.testing.assert_close(
            tensor, expected[key], msg=lambda text, key=key: f"{key} of step {step}: {text}"
        )


def _refill(ids: KeyedJaggedTensor) -> None:
    """Writes what the next batch may hold over a batch that was given."""
    ids.lengths().fill_(7)
    ids.values().fill_(3)
    if ids.weights_or_none() is not None:
        ids.weights().fill_(-5.0)


def _rows(output: Any) -> dict[str, torch.Tensor]:
    """Returns a module's output by key: the order of keys depends on the plan."""
    output = models.arrived(output)
    if isinstance(output, KeyedTensor):
        keys = output.keys()
        return {key: output[key].clone() for key in keys}
    flat = {}
    for key, jagged in output.items():
        flat[f"{key} rows"] = jagged.values().clone()
        flat[f"{key} lengths"] = jagged.lengths().to(torch.int64).clone()
    return flat
