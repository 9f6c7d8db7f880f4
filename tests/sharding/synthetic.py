"""Measurements that a known machine would give, for tests of the fits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from torchrec_bls.sharding.cost_interface import LookupWork
from torchrec_bls.sharding.costs.collective_model import AlphaBeta, CollectiveModel
from torchrec_bls.sharding.costs.fitting.lookups import LookupSamples
from torchrec_bls.sharding.costs.host_costs import HostCosts, HostModel
from torchrec_bls.sharding.costs.lookup.features import (
    TERMS,
    TREE_COLUMNS,
    as_columns,
    tree_columns,
)
from torchrec_bls.sharding.costs.lookup.hash_maps import MAP_TERMS
from torchrec_bls.sharding.costs.lookup.model import LookupModel
from torchrec_bls.sharding.costs.lookup.trees import Trees, empty
from torchrec_bls.sharding.costs.machine import Machine
from torchrec_bls.sharding.costs.profile import MemoryCurve, Profile
from torchrec_bls.sharding.reuse.statistics import REUSE_BINS

from torchrec_bls.records import decode

T = TypeVar("T")


def random_works(random: np.random.Generator, count: int, pooled: bool = True) -> list[LookupWork]:
    works = []
    for _ in range(count):
        rows = int(np.exp(random.uniform(np.log(100), np.log(1e6))))
        samples, pooling = int(random.integers(32, 4096)), float(random.uniform(0.5, 30))
        works.append(
            LookupWork(
                rows=rows,
                dim=int(random.choice([8, 16, 64, 128])),
                weight_bytes=4,
                samples=samples,
                pooling=pooling,
                unique_rows=min(rows, samples * pooling) * random.uniform(0.2, 1.0),
                pooled=pooled,
            )
        )
    return works


def planted_model(**coefficients: float) -> LookupModel:
    """An op of 200 us and these coefficients, with a residual where rows are wide.

    Shards share maps if a coefficient of them is there.
    """
    terms = (*TERMS, *MAP_TERMS) if coefficients.keys() & set(MAP_TERMS) else TERMS
    step = Trees(
        np.asarray([[TREE_COLUMNS.index("dim")]]), np.asarray([[5.0]]), np.asarray([[-0.15, 0.15]])
    )
    return LookupModel(
        op_us=200.0,
        coefficients_us=np.asarray([coefficients.get(name, 0.0) for name in terms]),
        trees=step,
        uses_reuse_factors=False,
        interval_log=(-0.1, 0.1),
        lowest=np.full(len(TREE_COLUMNS), -20.0),
        highest=np.full(len(TREE_COLUMNS), 60.0),
    )


def measured_ops(
    model: LookupModel, ops: int, *, noise: float, seed: int = 0, outliers: int = 0
) -> LookupSamples:
    random = np.random.default_rng(seed)
    works, op_of = [], []
    for op in range(ops):
        shards = random_works(random, int(random.integers(1, 6)))
        works += shards
        op_of += [op] * len(shards)
    samples = LookupSamples(
        tuple(works),
        np.asarray(op_of),
        np.ones(ops),
        np.zeros((len(works), REUSE_BINS)),
        model.shares_maps,
    )
    times = samples.predicted_us(model) * np.exp(random.normal(0, noise, ops))
    times[:outliers] *= 8
    return dataclasses.replace(samples, measured_us=times)


def plain_model(op_us: float, lookup_us: float, works: list[LookupWork]) -> LookupModel:
    """So many microseconds for an op and for each lookup; calibrated for the range of `works`."""
    seen = tree_columns(as_columns(works))
    return LookupModel(
        op_us=op_us,
        coefficients_us=np.asarray([lookup_us * (name == "lookup") for name in TERMS]),
        trees=empty(),
        uses_reuse_factors=False,
        interval_log=(-0.1, 0.2),
        lowest=seen.min(axis=0),
        highest=seen.max(axis=0),
    )


def small_profile() -> Profile:
    """A profile whose predictions can be done by hand."""
    works = random_works(np.random.default_rng(0), 50)
    collectives = [
        CollectiveModel(
            operation,
            backend,
            world_size,
            AlphaBeta(100.0 * world_size, 0.001),
            1.0,
            (-0.1, 0.1),
            (-0.2, 0.2),
            (64.0, 2.0**20),
            5.0,
            8.0,
        )
        for operation in ("all_to_all", "all_reduce")
        for backend in ("gloo", "bls")
        for world_size in (2, 4)
    ]
    return Profile(
        name="by hand",
        measured_at="2026-01-01T00:00:00+00:00",
        machine=Machine("cpu", "a processor", 2, 2**33, {"L1": 2**15}),
        optimizer="exact_sgd",
        lookup_time="tenth percentile",
        lookups={
            (True, "forward"): plain_model(100.0, 0.01, works),
            (True, "backward"): plain_model(50.0, 0.02, works),
            (False, "forward"): plain_model(80.0, 0.03, works),
        },
        collectives={(c.operation, c.backend, c.world_size): c for c in collectives},
        memory=MemoryCurve(
            np.asarray([1e4, 1e6]), np.asarray([9e3, 8e3]), np.asarray([0.01, 0.05])
        ),
        retest_percent={"lookup_forward": 2.0},
        hosts={
            ("bls", training, world_size): HostModel(
                "bls",
                training,
                world_size,
                HostCosts(step=100.0 * world_size, feature=10.0),
                (-0.1, 0.2),
                0.05,
                4.0,
            )
            for training in (True, False)
            for world_size in (2, 4)
        },
    )


def read_back(record: Any, form: type[T]) -> T:
    """Returns what a profile's reader makes of a part of a profile."""
    return decode(json.dumps(record), form, "it", "mend it")


def changed(profile: Profile, path: Sequence[Any], value: Any) -> dict[str, Any]:
    """Returns a profile's file with another value at a path, or, with KeyError, without it."""
    record: dict[str, Any] = json.loads(json.dumps(profile.as_json()))
    place: Any = record
    for name in path[:-1]:
        place = place[name]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return record
