"""What each rank does: run every variant over the same batches and delays, and compare."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from dlrm import build_model, shard_model
from torchrec.datasets.utils import Batch
from tqdm import tqdm

from benchmarks.demo.settings import Settings, draw_delays, load_batches
from benchmarks.demo.steps import RankTimes, run_steps
from benchmarks.demo.variants import Variant
from torchrec_bls import ChannelStats

MEASURED = "measured.json"
WARM_UP_BATCHES = 5


@dataclass(frozen=True)
class RankResult:
    """One rank's outcome of one variant.

    Attributes:
        times: the times of each run.
        channels: what each channel did in these runs; empty if there is none.
        max_difference: largest |logit - TorchRec's logit|.
        equals_torchrec: whether every logit is TorchRec's, bit for bit.
        equals_first_bound: whether every logit is that of the first bound, bit for bit.
    """

    times: list[RankTimes]
    channels: list[ChannelStats]
    max_difference: float
    equals_torchrec: bool
    equals_first_bound: bool


@dataclass
class Expected:
    """The logits to compare results with, one tensor a batch; empty before they are known."""

    torchrec: list[torch.Tensor]
    first_bound: list[torch.Tensor]


def measure(
    rank: int, folder: Path, settings: Settings, make_variants: Callable[[Settings], list[Variant]]
) -> None:
    """Runs one rank; rank 0 leaves all ranks' results in ``folder / MEASURED``.

    The first variant is the reference. Every other one must equal the second one bit for bit.
    """
    torch.set_num_threads(1)
    _quiet_deprecations()
    dist.init_process_group(
        "gloo",
        init_method=(folder / "rendezvous").as_uri(),
        rank=rank,
        world_size=settings.ranks,
    )
    batches = load_batches(settings, rank)
    delays = draw_delays(settings)[rank].tolist()
    expected = Expected([], [])
    variants = make_variants(settings)
    collected = []
    with tqdm(
        total=len(variants) * settings.runs * settings.steps,
        disable=rank != 0,
        unit="batch",
        dynamic_ncols=True,
        mininterval=1.0,
    ) as bar:
        for variant in variants:
            bar.set_description(variant.name)
            result = _measure_variant(variant, settings, batches, delays, expected, bar.update)
            everyone: list[RankResult] = [result] * settings.ranks
            dist.all_gather_object(everyone, result)
            ranks = [asdict(one) for one in everyone]
            collected.append({"name": variant.name, "bound": variant.bound, "ranks": ranks})
    if rank == 0:
        (folder / MEASURED).write_text(json.dumps(collected))
    dist.barrier()
    dist.destroy_process_group()


def _quiet_deprecations() -> None:
    """Hides that TorchRec calls names which torch deprecates: no user can act on it."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def _measure_variant(
    variant: Variant,
    settings: Settings,
    batches: list[Batch],
    delays: list[float],
    expected: Expected,
    on_step: Callable[[], object],
) -> RankResult:
    model = shard_model(
        build_model(settings.rows_per_table, settings.embedding_dim, settings.seed),
        variant.sharder,
        settings.ranks,
    )
    try:
        warm_up = batches[:WARM_UP_BATCHES]
        progress = variant.start(model)
        run_steps(
            progress,
            warm_up,
            [0.0] * len(warm_up),
            waited=lambda: 0.0,
            on_step=lambda: None,
        )
        before = variant.stats(model)
        times: list[RankTimes] = []
        outputs: list[list[torch.Tensor]] = []
        for _ in range(settings.runs):
            dist.barrier()
            logits, rank_times = run_steps(
                progress,
                batches,
                delays,
                waited=lambda: sum(sum(channel.wait_seconds) for channel in variant.stats(model)),
                on_step=on_step,
            )
            times.append(rank_times)
            outputs.append(logits)
        channels = [now.since(then) for now, then in zip(variant.stats(model), before, strict=True)]
    finally:
        variant.close(model)
    if not expected.torchrec:
        expected.torchrec = outputs[0]
    elif variant.bound is not None and not expected.first_bound:
        expected.first_bound = outputs[0]
    return compare(times, outputs, channels, expected)


def compare(
    times: list[RankTimes],
    outputs: list[list[torch.Tensor]],
    channels: list[ChannelStats],
    expected: Expected,
) -> RankResult:
    """Holds the logits of every run against TorchRec's and the first bound's.

    Equal means bit for bit, for row-wise tables too. Every bag of the demo has one id. So a sum
    over the ranks has only one term that isn't zero, and is exact in any order.

    Args:
        times: one entry a run.
        outputs: the logits of each batch, for each run.
        channels: the rank's counters.
        expected: the correct logits.
    """
    max_difference = 0.0
    equals_torchrec = equals_first_bound = True
    for logits in outputs:
        for index, found in enumerate(logits):
            difference = (found - expected.torchrec[index]).abs()
            max_difference = max([max_difference, *difference.flatten().tolist()])
            equals_torchrec &= torch.equal(found, expected.torchrec[index])
            if expected.first_bound:
                equals_first_bound &= torch.equal(found, expected.first_bound[index])
    return RankResult(
        times=times,
        channels=channels,
        max_difference=max_difference,
        equals_torchrec=equals_torchrec,
        equals_first_bound=equals_first_bound,
    )
