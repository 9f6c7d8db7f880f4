"""What all workers of a service report: whichever is asked asks the others."""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from torchrec_bls.serve.tally import ToldTally

#: Where a worker reports to another one.
PATH = "/worker"
# Seconds that a worker may take to report. One that stands still is left out.
_PATIENCE = 2.0


class Report(msgspec.Struct):
    """What a worker reports.

    Attributes:
        tally: requests that have ended.
        metrics: its metrics in Prometheus's text format.
        freshness: see Observer.
    """

    tally: ToldTally
    metrics: str
    freshness: float | None


async def reports(sockets: Mapping[str, Path]) -> dict[str, Report]:
    """Returns the reports of workers by their names, of those that answer.

    Args:
        sockets: where they take HTTP.
    """
    found = await asyncio.gather(*(_asked(path) for path in sockets.values()))
    return {name: report for name, report in zip(sockets, found, strict=True) if report is not None}


async def _asked(path: Path) -> Report | None:
    with suppress(OSError, asyncio.TimeoutError, msgspec.DecodeError):
        return await asyncio.wait_for(_got(path), _PATIENCE)
    return None


async def _got(path: Path) -> Report:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(f"GET {PATH} HTTP/1.1\r\nHost: -\r\nConnection: close\r\n\r\n".encode())
        _, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    return msgspec.json.decode(body, type=Report)


def metrics_of(reports: Mapping[str, Report]) -> bytes:
    """Returns the metrics of all workers in Prometheus's text format, with the label `worker`."""
    return generate_latest(_Together(reports))


class _Together(Collector):
    def __init__(self, reports: Mapping[str, Report]) -> None:
        self._reports = reports

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, report in self._reports.items():
            for family in text_string_to_metric_families(report.metrics):
                labelled = [
                    each._replace(labels={**each.labels, "worker": name}) for each in family.samples
                ]
                known = families.setdefault(family.name, family)
                known.samples = [*known.samples, *labelled] if known is not family else labelled
        return families.values()
