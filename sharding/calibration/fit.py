"""Fits a profile to the measurements of a calibration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ..costs.collective_model import AlphaBeta, CollectiveModel
from ..costs.fitting.accuracy import gmae_percent
from ..costs.fitting.collectives import (
    choose_curve,
    fit_alpha_beta,
    fit_imbalance,
    held_out_uneven_us,
)
from ..costs.fitting.intervals import interval_log
from ..costs.fitting.lookups import LEAST_OPS, fit_lookup, samples_of
from ..costs.fitting.repeats import LOOKUP_TIMES, undisturbed_us
from ..costs.host_costs import HostModel
from ..costs.lookup.model import DIRECTIONS as LOOKUP_DIRECTIONS
from ..costs.lookup.model import LookupModel
from ..costs.machine import Machine
from ..costs.profile import MemoryCurve, Profile, ProfileError
from ..costs.profiled import ProfiledCosts
from ..simulation.fit_host import MeasuredPlan, host_model
from .step_models import StepModel, plans_by_hand

Floats = npt.NDArray[np.float64]
Entries = Sequence[dict[str, Any]]

# Host costs are held out by model.
_LEAST_STEP_MODELS = 2


@dataclass(frozen=True)
class CollectiveSamples:
    """Measured messages of one operation on one backend among some ranks.

    Attributes:
        role: (n,) role of each message: "grid", "between" or "uneven".
        mean_bytes: (n,) float64, bytes of a rank on average.
        largest_bytes: (n,) float64, bytes of the rank that sends or receives most.
        measured_us: (n,) float64, the measured microseconds.
        visits_us: (visits, n) float64, the microseconds that each visit alone measured.
        cpu_us: (n,) float64, time of a rank's threads on cores; None if that was not measured.
    """

    role: npt.NDArray[np.str_]
    mean_bytes: Floats
    largest_bytes: Floats
    measured_us: Floats
    visits_us: Floats
    cpu_us: Floats | None = None


def fit_profile(
    entries: Entries, *, name: str, machine: Machine, optimizer: str, measured_at: str
) -> Profile:
    """Fits all models of a profile.

    Args:
        entries: entries of `Records`.
        name: name of the machine, for people.
        machine: the machine that was measured.
        optimizer: the optimizer that the backward includes.
        measured_at: date, ISO 8601.

    Raises:
        ProfileError: too little was measured.
    """
    memory = [entry for entry in entries if entry["kind"] == "memory"]
    if not memory:
        raise ProfileError("the calibration stopped before it had read any memory: run it again")
    profile = Profile(
        name=name,
        measured_at=measured_at,
        machine=machine,
        optimizer=optimizer,
        lookup_time=lookup_time(entries),
        lookups=_lookup_models(entries),
        collectives={
            key: fit_collective(key, each) for key, each in collectives_of(entries).items()
        },
        memory=MemoryCurve(
            *(
                np.asarray(memory[0][field], dtype=np.float64)
                for field in ("buffer_bytes", "bytes_per_us", "row_us")
            )
        ),
        retest_percent=retest_percent(entries),
    )
    return replace(profile, hosts=_host_models(entries, profile))


def _host_models(entries: Entries, profile: Profile) -> dict[tuple[str, bool, int], HostModel]:
    """Fits what steps take beside lookups and exchanges. `profile` has the times of the latter."""
    together: defaultdict[tuple[str, bool, int], list[MeasuredPlan]] = defaultdict(list)
    for entry in entries:
        if entry["kind"] != "steps":
            continue
        model = StepModel.from_json(entry["model"])
        if any(
            (collection.pooled, "forward") not in profile.lookups
            for collection in model.collections
        ):
            continue  # a calibration of seconds has no unpooled lookups
        backend, training, ranks = entry["backend"], entry["training"], entry["world_size"]
        job = model.job(ranks, profile.machine.cores, backend, training=training)
        workload = model.workload(ranks)
        plans = plans_by_hand(workload, job)
        together[backend, training, ranks].extend(
            MeasuredPlan(model.name, plans[name], workload, job, us)
            for name, us in entry["us"].items()
        )
    costs = ProfiledCosts(profile)
    return {
        key: host_model(measured, costs)
        for key, measured in together.items()
        if len({each.model for each in measured}) >= _LEAST_STEP_MODELS
    }


def lookups_of(entries: Entries, kind: str = "lookup") -> dict[int, dict[str, Any]]:
    """Returns the measured workloads, each with the repeats of all its visits.

    Args:
        entries: entries of `Records`.
        kind: "lookup", or "retest" for lookups that were measured again to see how repeatable
            they are.

    Returns:
        The workloads by index.
    """
    workloads = {entry["index"]: entry for entry in entries if entry["kind"] == "workload"}
    together: dict[int, dict[str, Any]] = {}
    for entry in entries:
        if entry["kind"] == kind:
            index = entry["index"]
            measured = together.setdefault(index, dict(workloads[index]))
            for direction in LOOKUP_DIRECTIONS:
                times = f"{direction}_us"
                if times in entry:
                    measured[times] = [*measured.get(times, []), *entry[times]]
    return together


def collectives_of(entries: Entries) -> dict[tuple[str, str, int], CollectiveSamples]:
    """Collects the messages of each operation, backend and world size, over all visits."""
    visits: defaultdict[tuple[str, str, int], list[list[dict[str, Any]]]] = defaultdict(list)
    for entry in entries:
        if entry["kind"] != "collectives":
            continue
        for operation in ("all_to_all", "all_reduce"):
            of_it = [each for each in entry["messages"] if each["operation"] == operation]
            if of_it:
                visits[operation, entry["backend"], entry["world_size"]].append(of_it)
    return {key: _collective_samples(each) for key, each in visits.items()}


def fit_collective(key: tuple[str, str, int], samples: CollectiveSamples) -> CollectiveModel:
    """Fits a collective to sizes that double from each to the next, and its intervals to the
    held-out messages.

    Nothing is fitted to the drawn sizes. They only rule out a sigmoid that predicts them worse than
    alpha-beta. Each uneven message tests an exponent that is fitted to all others. So the model's
    stored errors are the ones that `benchmarks/planner/study_models.py` finds.

    Args:
        key: operation, backend and world size.
        samples: messages of the collective.
    """
    grid, uneven = samples.role == "grid", samples.role == "uneven"
    between = ~grid & ~uneven
    sizes, measured = samples.largest_bytes, samples.measured_us
    curve, errors = choose_curve(
        sizes[grid], measured[grid], drawn=(sizes[between], measured[between])
    )
    drawn_errors = np.log(measured[between] / curve.microseconds(sizes[between]))
    errors = np.concatenate([errors, drawn_errors])
    held_out = drawn_errors if between.any() else errors
    imbalance, uneven_errors, uneven_held_out = 1.0, errors, held_out
    if uneven.any():
        messages = (samples.mean_bytes[uneven], sizes[uneven], measured[uneven])
        imbalance = fit_imbalance(curve, *messages)
        uneven_errors = np.log(measured[uneven] / held_out_uneven_us(curve, *messages))
        uneven_held_out = uneven_errors
    return CollectiveModel(
        *key,
        curve,
        imbalance,
        interval_log(errors),
        interval_log(uneven_errors),
        (float(sizes[~uneven].min()), float(sizes[~uneven].max())),
        _gmae(held_out),
        _gmae(uneven_held_out),
        _work_of(key[1], samples),
    )


def _work_of(backend: str, samples: CollectiveSamples) -> AlphaBeta | None:
    """Returns what ranks do on cores; None for channels, where a rank that waits spins."""
    if samples.cpu_us is None or backend != "gloo":
        return None
    grid = (samples.role == "grid") & (samples.cpu_us > 0)
    return fit_alpha_beta(samples.largest_bytes[grid], samples.cpu_us[grid])


def _gmae(errors: Floats) -> float:
    return round(gmae_percent(np.exp(-errors), np.ones_like(errors)), 2)


def lookup_time(entries: Entries) -> str:
    """Returns which of `LOOKUP_TIMES` two measurements on this host agree on best.

    On a quiet host the tenth percentile agrees best, by far. On a host that disturbs nearly every
    call, few repeats are undisturbed, and their number is a matter of luck.
    """

    def floor(name: str) -> float:
        both = (lookup_retest_percent(entries, d, name) for d in ("forward", "backward"))
        return sum(each or 0.0 for each in both)

    return min(LOOKUP_TIMES, key=floor)


def lookup_retest_percent(
    entries: Entries, direction: str, time: str, pooled: bool | None = None
) -> float | None:
    """Returns how much two measurements of the same lookups differ, GMAE in per cent, or None.

    Args:
        entries: entries of `Records`.
        direction: one of `LOOKUP_DIRECTIONS`.
        time: one of `LOOKUP_TIMES`.
        pooled: kind of lookups to compare; None for all.
    """
    first, again = lookups_of(entries), lookups_of(entries, "retest")
    pairs = [
        [LOOKUP_TIMES[time](each[f"{direction}_us"]) for each in (first[index], entry)]
        for index, entry in again.items()
        if pooled in (None, entry["configuration"]["pooled"]) and f"{direction}_us" in entry
    ]
    if not pairs:
        return None
    before, after = np.asarray(pairs).T
    return gmae_percent(after, before)


def retest_percent(entries: Entries) -> dict[str, float]:
    """Returns how much two measurements of one thing differ, GMAE in per cent, by its name."""
    floors = {}
    for direction in LOOKUP_DIRECTIONS:
        floor = lookup_retest_percent(entries, direction, lookup_time(entries))
        if floor is not None:
            floors[f"lookup_{direction}"] = round(floor, 2)
    for (operation, backend, world_size), samples in collectives_of(entries).items():
        if len(samples.visits_us) > 1:
            floor = gmae_percent(samples.visits_us[1], samples.visits_us[0])
            floors[f"{operation}_{backend}_{world_size}_ranks"] = round(floor, 2)
    return floors


def _lookup_models(entries: Entries) -> dict[tuple[bool, str], LookupModel]:
    models = {}
    measured, time = list(lookups_of(entries).values()), lookup_time(entries)
    for pooled in (True, False):
        for direction in LOOKUP_DIRECTIONS:
            samples = samples_of(measured, direction, pooled, time)
            if len(samples.measured_us) >= LEAST_OPS:
                models[pooled, direction] = fit_lookup(samples)
    if (True, "forward") not in models:
        raise ProfileError(
            f"the calibration measured fewer than {LEAST_OPS} pooled lookups: give it more minutes"
        )
    return models


def _collective_samples(visits: list[list[dict[str, Any]]]) -> CollectiveSamples:
    messages = visits[0]
    totals = [np.asarray(message["bytes"], dtype=np.float64) for message in messages]
    samples = [[message["us"] for message in visit] for visit in visits]
    together = [list(chain.from_iterable(each)) for each in zip(*samples, strict=True)]
    cpu = [[message.get("cpu_us", []) for message in visit] for visit in visits]
    of_cpu = [list(chain.from_iterable(each)) for each in zip(*cpu, strict=True)]
    return CollectiveSamples(
        role=np.asarray([message["role"] for message in messages]),
        mean_bytes=np.asarray([each.sum() / len(each) for each in totals]),
        largest_bytes=np.asarray([max(each.sum(0).max(), each.sum(1).max()) for each in totals]),
        measured_us=np.asarray([undisturbed_us(each) for each in together]),
        visits_us=np.asarray([[undisturbed_us(each) for each in visit] for visit in samples]),
        cpu_us=np.asarray([undisturbed_us(each) for each in of_cpu]) if all(of_cpu) else None,
    )
