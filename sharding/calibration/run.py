"""Measures everything within a given time, and fits the profile."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any, TypeVar

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
#: Those who calibrate for less than a minute only try it.
_LEAST_STEP_TURNS, _STEP_TURNS = 3, 15

_Task = TypeVar("_Task")
#: Fields of an entry in the records.
_Fields = dict[str, Any]


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
        run = _Run(settings, records, bar)
        _memory(run)
        for visit in range(LOOKUP_VISITS):
            _lookups(run, visit)
            if visit in _COLLECTIVE_VISITS:
                _collectives(run, visit)
            _retests(run, visit)
        _steps(run, machine.cores)
    profile = fit_profile(
        records.entries,
        name=name,
        machine=machine,
        optimizer=settings.optimizer,
        measured_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
    profile.save(out)
    return profile


@dataclass(frozen=True)
class _Run:
    """A calibration that goes on from what is recorded."""

    settings: Settings
    records: Records
    bar: Any

    def measure(
        self,
        kind: str,
        names: tuple[str, ...],
        todo: dict[tuple[Any, ...], _Task],
        measured: Callable[[list[_Task]], Iterable[list[_Fields]]],
    ) -> None:
        """Measures and records what is not recorded yet.

        Args:
            kind: kind of the measurements.
            names: fields that tell them apart.
            todo: what to measure, by the values of these fields.
            measured: measures a list of such things, or as many of its first as there is time for.
                It yields the other fields of those that it measured together.
        """
        done = {tuple(entry[name] for name in names) for entry in self.records.of(kind)}
        missing = {key: task for key, task in todo.items() if key not in done}
        if not missing:
            return
        keys = iter(missing)
        start = time.monotonic()
        for together in measured([*missing.values()]):
            seconds = (time.monotonic() - start) / len(together)
            for fields in together:
                own = dict(zip(names, next(keys), strict=True))
                self.records.add(kind, seconds, {**own, **fields})
                self.bar.update(min(seconds, max(self.bar.total - self.bar.n, 0)))
            start = time.monotonic()


def _memory(run: _Run) -> None:
    run.bar.set_description("memory")
    todo = {(): run.settings.memory_bytes}
    run.measure("memory", (), todo, lambda sizes: ([measure_memory(size)] for size in sizes))


def _lookups(run: _Run, visit: int) -> None:
    run.bar.set_description(f"lookups, visit {visit + 1} of {LOOKUP_VISITS}")
    todo = _drawn(run.records)
    if visit == 0:
        seed, memory_bytes = run.settings.seed, run.settings.memory_bytes
        todo = dict(enumerate(draw_lookups(_MOST_LOOKUPS, seed=seed, memory_bytes=memory_bytes)))
    _measure_lookups(run, "lookup", visit, todo, _LOOKUPS)


def _retests(run: _Run, visit: int) -> None:
    run.bar.set_description(f"lookups again, visit {visit + 1} of {LOOKUP_VISITS}")
    todo = dict(list(_drawn(run.records).items())[::_RETEST_EVERY])
    _measure_lookups(run, "retest", visit, todo, _RETESTS)


def _drawn(records: Records) -> dict[int, LookupConfiguration]:
    return {
        entry["index"]: LookupConfiguration.from_json(entry["configuration"])
        for entry in records.of("workload")
    }


def _measure_lookups(
    run: _Run, kind: str, visit: int, todo: dict[int, LookupConfiguration], share: float
) -> None:
    # FBGEMM is imported only by processes that measure.
    from .lookups import LookupTimer, on_one_core

    # Later visits measure as many as the first had time for.
    limit = share * 60 * run.settings.minutes / LOOKUP_VISITS * (1 if visit == 0 else 1.3)
    described = set(_drawn(run.records))

    def is_time_left() -> bool:
        # The recorded time decides. A run that goes on after a stop decides in the same way, so
        # that an ended visit stays ended.
        seconds = (each["seconds"] for each in run.records.of(kind) if each["visit"] == visit)
        return sum(seconds) < limit or len(described) < _LEAST_LOOKUPS

    def measured(missing: list[tuple[int, LookupConfiguration]]) -> Iterator[list[_Fields]]:
        timer = LookupTimer(run.settings.optimizer)
        while missing and is_time_left():
            group = _together(missing, run.settings.memory_bytes)
            missing = missing[len(group) :]
            found = timer.measure([lookup for _, lookup in group], _ROUNDS)
            for (index, _), (workload, _) in zip(group, found, strict=True):
                if index not in described:
                    described.add(index)
                    run.records.add("workload", 0.0, {"index": index, **workload})
            yield [times for _, times in found]

    of_visit = {(visit, index): (index, lookup) for index, lookup in sorted(todo.items())}
    with on_one_core():
        run.measure(kind, ("visit", "index"), of_visit, measured)


def _together(
    lookups: list[tuple[int, LookupConfiguration]], memory_bytes: int
) -> list[tuple[int, LookupConfiguration]]:
    """Returns the first of these lookups whose tables fit into the memory together."""
    sizes = accumulate(lookup.table_bytes() for _, lookup in lookups[:_MOST_TOGETHER])
    return lookups[: max(1, sum(size <= memory_bytes for size in sizes))]


def _collectives(run: _Run, visit: int) -> None:
    run.bar.set_description(f"collectives, visit {_COLLECTIVE_VISITS.index(visit) + 1}")
    combinations = list(product(_CARRIERS, run.settings.world_sizes))
    seconds = _COLLECTIVES * 60 * run.settings.minutes / len(combinations) / len(_COLLECTIVE_VISITS)
    todo = {
        (*combination, visit): CollectiveTask(
            *combination, _messages(*combination, run.settings), seconds
        )
        for combination in combinations
    }

    def measured(tasks: list[CollectiveTask]) -> Iterator[list[_Fields]]:
        for messages_of_task in measure_collectives(tasks):
            yield [{"messages": messages_of_task}]

    run.measure("collectives", ("backend", "world_size", "visit"), todo, measured)


def _messages(backend: str, world_size: int, settings: Settings) -> tuple[Message, ...]:
    every = messages(
        world_size,
        seed=settings.seed,
        memory_bytes=settings.memory_bytes,
        between=settings.between,
        uneven=settings.uneven,
    )
    return tuple(each for each in every if backend in _BACKENDS or each.operation == "all_to_all")


def _steps(run: _Run, cores: int) -> None:
    # TorchRec is imported only by processes that measure.
    from .steps import measure_steps

    run.bar.set_description("steps")
    turns = max(_LEAST_STEP_TURNS, min(round(_STEP_TURNS * run.settings.minutes), _STEP_TURNS))
    wanted = round(_STEP_MODELS_PER_MINUTE * run.settings.minutes)
    models = max(_LEAST_STEP_MODELS, min(wanted, _MOST_STEP_MODELS))
    kinds = list(enumerate(product(range(models), _BACKENDS, (True, False))))
    for world_size in run.settings.world_sizes:

        def measured(
            missing: list[tuple[int, str, bool]], ranks: int = world_size
        ) -> Iterator[list[_Fields]]:
            tasks = [
                _step_task((ranks, cores), run.settings.seed, turns, *kind) for kind in missing
            ]
            times = measure_steps(ranks, tasks, pinned=ranks <= cores)
            for task, us in zip(tasks, times, strict=True):
                fields = {"model": task.model.as_json(), "backend": task.backend}
                yield [{**fields, "training": task.training, "us": us}]

        todo = {
            (world_size, index): (index, backend, training)
            for index, (_, backend, training) in kinds
        }
        run.measure("steps", ("world_size", "index"), todo, measured)


def _step_task(
    ranks_and_cores: tuple[int, int],
    seed: int,
    turns: int,
    index: int,
    backend: str,
    training: bool,
) -> StepTask:
    """Returns the steps of a drawn model under plans made by hand."""
    model = draw_step_model(f"model {index}", (seed, index), ModelRanges())
    ranks, cores = ranks_and_cores
    job = model.job(ranks, cores, backend, training=training)
    plans = plans_by_hand(model.workload(ranks), job)
    return StepTask(model, backend, training, plans, turns)


def _as_lists(settings: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items()}
