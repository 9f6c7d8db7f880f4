"""Adds to a profile how all-reduces of gradients and the backward slow each other down."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from torchrec_bls.collective.backend import process_group
from torchrec_bls.overlap.modes.fitting import ModeSamples, fit_mode
from torchrec_bls.overlap.modes.mode import Mode, Overlap, overlap_of, with_modes
from torchrec_bls.overlap.modes.timer import FLOAT32, LEAST_ROUNDS, SIZES, OverlapTimer
from torchrec_bls.processes import stream
from torchrec_bls.sharding.costs.machine import this_machine
from torchrec_bls.sharding.costs.profile import Profile, ProfileError, load_profile

BACKENDS = ("gloo", "bls")
# Backends that send from rank to rank, as quantized all-reduces do.
_SENDING = ("gloo",)

#: How often everything is measured, far apart: a machine that others share has slow minutes.
_VISITS = 2
# A round may take longer than planned, and a visit makes at least one.
_START_S, _MOST_TIMES = 120.0, 5.0

Samples = dict[tuple[str, int], dict[str, ModeSamples]]


@dataclass(frozen=True)
class OverlapSettings:
    """What is measured, and how long.

    Attributes:
        minutes: minutes of measuring; processes start before.
        world_sizes: world sizes of the ranks that are started, each at least 2.
        sizes: bytes of gradients, ascending multiples of 1024.
    """

    minutes: float = 5.0
    world_sizes: tuple[int, ...] = (2, 4)
    sizes: tuple[int, ...] = SIZES

    def __post_init__(self) -> None:
        """Raises ValueError for settings by which nothing can be measured."""
        if not (math.isfinite(self.minutes) and self.minutes >= 0):
            raise ValueError(f"all-reduces can't be measured for {self.minutes} minutes")
        if not self.world_sizes or min(self.world_sizes) < 2:
            raise ValueError(
                f"all-reduces among {self.world_sizes} ranks: name world sizes of at least 2"
            )


def is_joining() -> bool:
    """Whether this process is a rank that torchrun has started."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def calibrate_overlap(out: Path, settings: OverlapSettings) -> Overlap:
    """Measures this machine, or the ranks that torchrun has started, and adds it to a profile.

    The result replaces what the profile has of the same backends and world sizes.

    Args:
        out: the profile, which `torchrec-bls calibrate` has made.
        settings: what to measure; under torchrun all its ranks, whatever `world_sizes` says.

    Returns:
        The part that was added. Under torchrun only rank 0 writes, and the others return nothing.

    Raises:
        ProfileError: no such profile is there, or it is of another machine.
        RanksFailedError: a rank failed.
    """
    if is_joining() and int(os.environ["RANK"]):
        _measure_joined(settings)
        return {}
    profile = _profile_of_this_machine(out)
    samples = _measure_joined(settings) if is_joining() else measure_started(settings)
    added = {key: fit_modes(each) for key, each in samples.items()}
    with_modes(profile, added).save(out)
    return added


def fit_modes(samples: dict[str, ModeSamples]) -> tuple[Mode, ...]:
    """Fits each mode."""
    return tuple(
        Mode(name, fit_mode(each), changes_values=name != FLOAT32) for name, each in samples.items()
    )


def measure_started(settings: OverlapSettings) -> Samples:
    """Measures between new processes of this machine.

    Raises:
        RanksFailedError: a rank failed.
    """
    (samples,) = stream(
        max(settings.world_sizes),
        _rank,
        settings,
        deadline_s=_deadline_s(settings),
        backend="gloo",
        preload=(__name__,),
    )
    measured: Samples = samples
    return measured


def _rank(rank: int, settings: OverlapSettings) -> Iterator[Samples]:
    yield measure_groups(settings)


def _measure_joined(settings: OverlapSettings) -> Samples:
    """Measures among the ranks of torchrun, of which this process is one."""
    torch.set_num_threads(1)
    # The command leaves out what importing the package does.
    if not hasattr(dist.Backend, process_group.NAME.upper()):
        process_group.register()
    dist.init_process_group("gloo", timeout=timedelta(seconds=_deadline_s(settings)))
    samples = measure_groups(replace(settings, world_sizes=(dist.get_world_size(),)))
    dist.destroy_process_group()
    return samples


def measure_groups(settings: OverlapSettings) -> Samples:
    """Measures all backends among the first so many ranks of the default group.

    Every rank calls it alike.

    Returns:
        On rank 0 all measurements; on another rank those of the groups that it is in.
    """
    timeout = timedelta(seconds=_deadline_s(settings))
    groups = {
        (backend, ranks): dist.new_group(list(range(ranks)), timeout=timeout, backend=backend)
        for ranks, backend in product(settings.world_sizes, BACKENDS)
    }
    seconds = 60 * settings.minutes / (_VISITS * len(groups))
    timers: dict[tuple[str, int], OverlapTimer] = {}
    visits = list(product(range(_VISITS), groups.items()))
    for _, (key, group) in tqdm(visits, disable=dist.get_rank() != 0, unit="visit"):
        if dist.get_rank() < key[1]:
            end = time.monotonic() + seconds
            if key not in timers:
                timers[key] = OverlapTimer(
                    group,
                    codecs=key[0] in _SENDING,
                    seconds=_VISITS * seconds,
                    sizes=settings.sizes,
                )
            timers[key].measure_until(end, -(-LEAST_ROUNDS // _VISITS))
        # The others sleep here meanwhile.
        dist.barrier()
    for timer in timers.values():
        timer.close()
    return {key: timer.samples() for key, timer in timers.items()}


def _deadline_s(settings: OverlapSettings) -> float:
    return _START_S + _MOST_TIMES * 60 * settings.minutes


def _profile_of_this_machine(out: Path) -> Profile:
    """Reads the profile that is added to; errors as `calibrate_overlap`."""
    if out.suffix != ".json" or not out.exists():
        raise ProfileError(
            f"there is no profile {out} to add to: make one with `torchrec-bls calibrate --out"
            " PROFILE.json`, which measures everything else, or copy one of this machine"
        )
    profile, here = load_profile(out), this_machine()
    there = profile.machine
    if (there.cpu, there.cores) != (here.cpu, here.cores):
        raise ProfileError(
            f"profile {out} is of {there.cpu} with {there.cores} cores, and this machine is"
            f" {here.cpu} with {here.cores}: calibrate this one with `torchrec-bls calibrate`"
        )
    overlap_of(profile)  # else minutes of measurements would be thrown away
    return profile
