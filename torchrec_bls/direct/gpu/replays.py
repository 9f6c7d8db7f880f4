"""Replays of forwards in CUDA graphs, and what runs around each in place of a forward's Python."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.reader import Launch
from torchrec_bls.direct.gpu.registered_tables import RegisteredTables
from torchrec_bls.direct.gpu.under_way import CapturedLookup, ForwardsUnderWay


class Served(NamedTuple):
    """What a replay reads of a module.

    Attributes:
        version: name of the version.
        tables: its tables.
    """

    version: str
    tables: RegisteredTables


def replayed(
    gpu: Gpu,
    lookups: Sequence[CapturedLookup],
    replay: Callable[[], None],
    used: Sequence[torch.Tensor],
    served: Mapping[ForwardsUnderWay, Served],
) -> None:
    """Replays a graph, which reads what there is of each module now. It waits for nothing.

    Args:
        gpu: the GPU.
        lookups: lookups in the graph.
        replay: function that launches the graph, and what comes before, on the current stream.
        used: tensors of the caller's stream that it reads.
        served: by its forwards, what is read of each module.
    """
    tables = {
        launch.reader: served[lookup.under_way].tables
        for lookup in lookups
        for launch in lookup.launches
    }
    # In one order for all threads, each of which may read another version.
    readers = sorted(tables, key=id)
    with ExitStack() as launching:
        for reader in readers:
            launching.enter_context(reader.launching)
        with gpu.reading(used):
            for reader in readers:
                reader.show(tables[reader])
            replay()
            reports = [
                [gpu.copy_of_report(launch.report) for launch in lookup.launches]
                for lookup in lookups
            ]
            done = gpu.mark()
    for lookup, of_lookup in zip(lookups, reports, strict=True):
        launches = [
            Launch(launch.reader, report, done)
            for launch, report in zip(lookup.launches, of_lookup, strict=True)
        ]
        under_way, version = lookup.under_way, served[lookup.under_way].version
        number = under_way.next_batch()
        under_way.check_later(launches, number, version, lookup.keys, lookup.ids)
