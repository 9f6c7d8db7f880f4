"""Finds the rank that holds the others up, if any does, from the statistics of all ranks' channels.

docs/design/straggler.md says why the slowest rank is the one that waited least.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchrec_bls.collective.channel import ChannelStats
from torchrec_bls.observe.slowest import Slowest, chance_in, slowest_of
from torchrec_bls.records import Format, Record, Whole


@dataclass(frozen=True)
class StragglerReport:
    """Who waited for whom, over all channels of a run.

    Attributes:
        wait_seconds: seconds waited, by rank and peer. The sums by rank are exact. A peer's number
            says that the rank was looking at this peer while it waited. The late one may be another
            peer.
        lag_histogram: number of waits for a peer in which a rank was `index` iterations ahead of
            it, for each rank.
        seconds: time of the run.
        steps: number of its steps.
    """

    wait_seconds: list[list[float]]
    lag_histogram: list[list[int]]
    seconds: float
    steps: int

    @classmethod
    def of(cls, stats: Sequence[Sequence[ChannelStats]]) -> StragglerReport:
        """Adds up the statistics of each rank's channels. The outer list is by rank.

        Raises:
            ValueError: the ranks have different numbers of channels, or a channel's ranks are not
                those of the list.
        """
        ranks = len(stats)
        counts = [len(channels) for channels in stats]
        if len(set(counts)) > 1:
            raise ValueError(f"the ranks have {counts} channels: a report needs all of each rank's")
        sizes = {len(channel.wait_seconds) for channels in stats for channel in channels}
        if sizes - {ranks}:
            raise ValueError(
                f"there are statistics of {ranks} ranks, but channels of {sorted(sizes)} ranks"
            )
        return cls(
            wait_seconds=[
                [sum(channel.wait_seconds[peer] for channel in channels) for peer in range(ranks)]
                for channels in stats
            ],
            lag_histogram=[
                [
                    sum(counts)
                    for counts in zip_longest(*(c.lag_histogram for c in channels), fillvalue=0)
                ]
                for channels in stats
            ],
            seconds=max((channel.seconds for each in stats for channel in each), default=0.0),
            steps=max(
                (
                    sum(channel.lag_histogram) // max(1, ranks - 1)
                    for channels in stats
                    for channel in channels
                ),
                default=0,
            ),
        )

    @property
    def waited(self) -> list[float]:
        """Returns the seconds that each rank waited for any peer."""
        return [sum(seconds) for seconds in self.wait_seconds]

    @property
    def waited_least(self) -> Slowest | None:
        """Returns the rank that waited least, which did the most work, or None if none waited."""
        return slowest_of(self.waited, self.seconds, chance_in(self.steps))

    @property
    def slowest(self) -> int | None:
        """Returns the rank that holds the others up, or None if no rank stands out."""
        least = self.waited_least
        return least.rank if least is not None and least.stands_out else None

    @property
    def share(self) -> float:
        """Returns the share of all waiting that would end if the rank that waited least were as
        fast as the next one."""
        waited = self.waited
        if not any(waited):
            return 0.0
        least, next_to_it, *_ = sorted(waited)
        return (len(waited) - 1) * (next_to_it - least) / sum(waited)

    def to_json(self) -> dict[str, Any]:
        """Returns all numbers, for `json.dumps`."""
        return {
            "slowest": self.slowest,
            "waited_least": None if self.waited_least is None else asdict(self.waited_least),
            "share": self.share,
            "waited": self.waited,
            **asdict(self),
        }

    def __str__(self) -> str:
        """Returns the report as text: whether a rank stands out, waiting by peer, lag."""
        ranks = range(len(self.wait_seconds))
        lags = range(max((len(histogram) for histogram in self.lag_histogram), default=0))
        lines = [self._verdict(), "", "seconds waited, and for whom"]
        lines.append("rank      all" + "".join(f" {f'rank {peer}':>8}" for peer in ranks))
        for rank, seconds in enumerate(self.wait_seconds):
            cells = ["-" if peer == rank else f"{seconds[peer]:.3f}" for peer in ranks]
            lines.append(f"{rank:4} {sum(seconds):8.3f}" + "".join(f" {c:>8}" for c in cells))
        lines += ["", "iterations ahead of a peer when waiting, % of the times"]
        lines.append("rank" + "".join(f" {lag:6}" for lag in lags))
        for rank, histogram in enumerate(self.lag_histogram):
            total = max(1, sum(histogram))
            lines.append(f"{rank:4}" + "".join(f" {100 * n / total:6.1f}" for n in histogram))
        return "\n".join(lines)

    def _verdict(self) -> str:
        least = self.waited_least
        if least is None:
            return "no rank waited for another"
        others = [seconds for rank, seconds in enumerate(self.waited) if rank != least.rank]
        return (
            f"{least};\nin {self.steps} steps and {self.seconds:.3f} s it waited "
            f"{self.waited[least.rank]:.3f} s, the others {sum(others) / len(others):.3f} s on "
            "average"
        )


def gather_report(
    stats: Sequence[ChannelStats], group: dist.ProcessGroup | None = None
) -> StragglerReport:
    """Makes the report of a run from each rank's own statistics. All ranks call it and get it.

    Args:
        stats: statistics of this rank's channels.
        group: group of the channels; None: the default group.

    Raises:
        ValueError: see `StragglerReport.of`.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, list(stats), group)
    return StragglerReport.of(everyone)


def save_stats(path: Path, rank: int, stats: Sequence[ChannelStats]) -> None:
    """Writes one rank's statistics as JSON, for `load_report`. It works after a failure, too."""
    record = {"rank": rank, "channels": [asdict(channel) for channel in stats]}
    path.write_text(json.dumps(record) + "\n")


def load_report(paths: Iterable[Path]) -> StragglerReport:
    """Makes the report from the files that `save_stats` left, one a rank, in any order.

    Raises:
        ValueError: a file is no such file, or a rank is missing or there twice; see also
            `StragglerReport.of`.
    """
    records = sorted((_FILE.read(path) for path in paths), key=lambda record: record.rank)
    ranks = [record.rank for record in records]
    if ranks != list(range(len(ranks))):
        raise ValueError(f"the files are of ranks {ranks}, but must be one of each rank from 0")
    return StragglerReport.of([record.channels for record in records])


class _StatsRecord(Record):
    rank: Whole
    channels: list[ChannelStats]


_FILE = Format(_StatsRecord, "write it with save_stats")
