"""Measures everything within a given time, and fits the profile."""

from __future__ import annotations

import datetime
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..costs.machine import this_machine
from ..costs.profile import Profile
from .collectives import CollectiveTask, measure_collectives
from .configurations import LookupConfiguration, draw_lookups
from .fit import fit_profile
from .memory import measure_memory
from .messages import Message, messages
from .records import Records
from .step_models import ModelRanges, StepTask, draw_step_model, plans_by_hand

#: Shares of the time; the rest is for starting processes.
_LOOKUPS, _RETESTS, _COLLECTIVES = 0.40, 0.08, 0.21
_LEAST_LOOKUPS, _MOST_LOOKUPS = 24, 2000

#: So many configurations are timed in turn, so often. The machine's slow moments last tenths of a
#: second.
_MOST_TOGETHER, _ROUNDS = 12, 5
_RETEST_EVERY = 7

#: How often everything is measured, far apart: a machine that others share has slow minutes.
LOOKUP_VISITS = 3
_COLLECTIVE_VISITS = (0, 2)
_BACKENDS = ("gloo", "bls")
#: How messages travel: channels of bls also over TCP, as between hosts.
_CARRIERS = (*_BACKENDS, "tcp")

#: Models of each backend, with a backward and without, whose steps are measured, for each minute of
#: the calibration: each takes a second or two.
_STEP_MODELS_PER_MINUTE = 1.4
_LEAST_STEP_MODELS, _MOST_STEP_MODELS = 3, 16
_STEP_TURNS = 15


@dataclass(frozen=True)
class Settings:
    """What is measured, and how long.

    Attributes:
        minutes: minutes of measuring in all, even if a calibration stops and goes on.
        memory_bytes: bytes that the tables of a lookup, or the buffers of a collective, may take.
        optimizer: FBGEMM's name of the optimizer in the backward.
        world_sizes: numbers of ranks among which collectives are measured, each at least 2.
        between: number of random sizes of each collective, besides the sizes that double.
        uneven: uneven all-to-alls for each world size.
        seed: seed of everything that is drawn.
    """

    minutes: float = 9.0
    memory_bytes: int = 2**30
    optimizer: str = "exact_sgd"
    world_sizes: tuple[int, ...] = (2, 4)
    between: int = 8
    uneven: int = 12
    seed: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError for world sizes of less than 2."""
        if not self.world_sizes or min(self.world_sizes) < 2:
            raise ValueError(
                f"collectives among {self.world_sizes} ranks: name world sizes of at least 2"
            )


def measurements_of(profile: Path) -> Path:
    """Returns the file that keeps the measurements for a profile."""
    return profile.with_suffix(".measurements.jsonl")


def calibrate(out: Path, name: str, settings: Settings) -> Profile:
    """Measures this machine and writes its profile.

    What a stopped run has measured already is not measured again.

    Args:
        out: path of the profile, a .json file. The measurements go into a file beside it.
        name: name of the machine, for people.
        settings: what to measure.

    Raises:
        ValueError: `out` does not end in .json.
        ProfileError: measurements of another machine or other settings lie beside it.
        RanksFailedError: a process of a collective failed.
    """
    if out.suffix != ".json":
        raise ValueError(f"a profile is a .json file, not {out}")
    machine = this_machine()
    records = Records(measurements_of(out), _as_lists(asdict(settings)), machine)
    total = 60 * settings.minutes
    kinds = ("memory", "lookup", "retest", "collectives", "steps")
    done = sum(records.seconds(kind) for kind in kinds)
    with tqdm(
        total=total,
        initial=min(done, total),
        bar_format="{desc}{percentage:3.0f} %|{bar}| {elapsed}<{remaining}",
    ) as bar:
        _memory(records, settings, bar)
        for visit in range(LOOKUP_VISITS):
            _lookups(records, settings, visit, bar)
            if visit in _COLLECTIVE_VISITS:
                _collectives(records, settings, visit, bar)
            _retests(records, settings, visit, bar)
        _steps(records, settings, machine.cores, bar)
    profile = fit_profile(
        records.entries,
        name=name,
        machine=machine,
        optimizer=settings.optimizer,
        measured_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
    profile.save(out)
    return profile


def _memory(records: Records, settings: Settings, bar: Any) -> None:
    if not records.of("memory"):
        bar.set_description("memory")
        start = time.monotonic()
        entry = measure_memory(settings.memory_bytes)
        _add(records, "memory", time.monotonic() - start, entry, bar)


def _lookups(records: Records, settings: Settings, visit: int, bar: Any) -> None:
    bar.set_description(f"lookups, visit {visit + 1} of {LOOKUP_VISITS}")
    if visit == 0:
        drawn = draw_lookups(_MOST_LOOKUPS, seed=settings.seed, memory_bytes=settings.memory_bytes)
        todo = dict(enumerate(drawn))
    else:
        todo = _drawn(records)
    _measure_lookups(records, "lookup", visit, todo, _LOOKUPS, settings, bar)


def _retests(records: Records, settings: Settings, visit: int, bar: Any) -> None:
    bar.set_description(f"lookups again, visit {visit + 1} of {LOOKUP_VISITS}")
    todo = dict(list(_drawn(records).items())[::_RETEST_EVERY])
    _measure_lookups(records, "retest", visit, todo, _RETESTS, settings, bar)


def _drawn(records: Records) -> dict[int, LookupConfiguration]:
    return {
        entry["index"]: LookupConfiguration.from_json(entry["configuration"])
        for entry in records.of("workload")
    }


def _measure_lookups(
    records: Records,
    kind: str,
    visit: int,
    todo: dict[int, LookupConfiguration],
    share: float,
    settings: Settings,
    bar: Any,
) -> None:
    # FBGEMM is imported only by processes that measure.
    from .lookups import LookupTimer, on_one_core

    def done() -> list[dict[str, Any]]:
        return [entry for entry in records.of(kind) if entry["visit"] == visit]

    # Later visits measure as many as the first had time for.
    limit = share * 60 * settings.minutes / LOOKUP_VISITS * (1 if visit == 0 else 1.3)
    timer = LookupTimer(settings.optimizer)
    described = set(_drawn(records))
    missing = sorted(set(todo) - {entry["index"] for entry in done()})
    # The recorded time decides. A run that goes on after a stop decides in the same way, so that an
    # ended visit stays ended.
    with on_one_core():
        while missing and (
            sum(entry["seconds"] for entry in done()) < limit or len(described) < _LEAST_LOOKUPS
        ):
            start = time.monotonic()
            group = _together(missing, todo, settings.memory_bytes)
            missing = missing[len(group) :]
            measured = timer.measure([todo[index] for index in group], _ROUNDS)
            share_of_time = (time.monotonic() - start) / len(group)
            for index, (workload, times) in zip(group, measured, strict=True):
                if index not in described:
                    described.add(index)
                    records.add("workload", 0.0, {"index": index, **workload})
                entry = {"visit": visit, "index": index, **times}
                _add(records, kind, share_of_time, entry, bar)


def _together(
    indices: list[int], todo: dict[int, LookupConfiguration], memory_bytes: int
) -> list[int]:
    """Returns the first of these indices whose tables fit into the memory together."""
    group: list[int] = []
    for index in indices[:_MOST_TOGETHER]:
        if group and sum(todo[i].table_bytes() for i in [*group, index]) > memory_bytes:
            break
        group.append(index)
    return group


def _collectives(records: Records, settings: Settings, visit: int, bar: Any) -> None:
    bar.set_description(f"collectives, visit {_COLLECTIVE_VISITS.index(visit) + 1}")
    done = {
        (entry["backend"], entry["world_size"])
        for entry in records.of("collectives")
        if entry["visit"] == visit
    }
    combinations = list(product(_CARRIERS, settings.world_sizes))
    seconds = _COLLECTIVES * 60 * settings.minutes / len(combinations) / len(_COLLECTIVE_VISITS)
    tasks = [
        CollectiveTask(
            backend,
            world_size,
            _messages(backend, world_size, settings),
            seconds,
        )
        for backend, world_size in combinations
        if (backend, world_size) not in done
    ]
    start = time.monotonic()
    if tasks:
        for task, measured in zip(tasks, measure_collectives(tasks), strict=True):
            entry = {
                "backend": task.backend,
                "world_size": task.world_size,
                "visit": visit,
                "messages": measured,
            }
            _add(records, "collectives", time.monotonic() - start, entry, bar)
            start = time.monotonic()


def _messages(backend: str, world_size: int, settings: Settings) -> tuple[Message, ...]:
    every = messages(
        world_size,
        seed=settings.seed,
        memory_bytes=settings.memory_bytes,
        between=settings.between,
        uneven=settings.uneven,
    )
    return tuple(each for each in every if backend in _BACKENDS or each.operation == "all_to_all")


def _steps(records: Records, settings: Settings, cores: int, bar: Any) -> None:
    # TorchRec is imported only by processes that measure.
    from .steps import measure_steps

    bar.set_description("steps")
    wanted = round(_STEP_MODELS_PER_MINUTE * settings.minutes)
    models = max(_LEAST_STEP_MODELS, min(wanted, _MOST_STEP_MODELS))
    done = {(entry["world_size"], entry["index"]) for entry in records.of("steps")}
    for world_size in settings.world_sizes:
        kinds = list(product(range(models), _BACKENDS, (True, False)))
        todo = {
            index: _step_task((world_size, cores), settings.seed, index, *kind[1:])
            for index, kind in enumerate(kinds)
            if (world_size, index) not in done
        }
        start = time.monotonic()
        pinned = world_size <= cores
        measured = measure_steps(world_size, list(todo.values()), pinned=pinned) if todo else ()
        for (index, task), us in zip(todo.items(), measured, strict=True):
            entry = {"world_size": world_size, "index": index, "model": task.model.as_json()}
            entry |= {"backend": task.backend, "training": task.training, "us": us}
            _add(records, "steps", time.monotonic() - start, entry, bar)
            start = time.monotonic()


def _step_task(
    ranks_and_cores: tuple[int, int], seed: int, index: int, backend: str, training: bool
) -> StepTask:
    """Returns the steps of a drawn model under plans made by hand."""
    model = draw_step_model(f"model {index}", (seed, index), ModelRanges())
    ranks, cores = ranks_and_cores
    job = model.job(ranks, cores, backend, training=training)
    plans = plans_by_hand(model.workload(ranks), job)
    return StepTask(model, backend, training, plans, _STEP_TURNS)


def _add(records: Records, kind: str, seconds: float, entry: dict[str, Any], bar: Any) -> None:
    records.add(kind, seconds, entry)
    bar.update(min(seconds, max(bar.total - bar.n, 0)))


def _as_lists(settings: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items()}
