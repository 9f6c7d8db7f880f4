"""What becomes of requests, and what health endpoints say, while workers die: a table."""

from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness import page
from benchmarks.harness.record import Record
from benchmarks.serve.peers.running import REPLACING


@dataclass(frozen=True)
class Own:
    """The service with a front.

    Attributes:
        title: its name.
        front: the service's option.
    """

    title: str
    front: str


#: The service among servers that replace their workers.
OURS = {
    "ours": Own("torchrec-bls serve", "haproxy"),
    "ours_alone": Own("torchrec-bls serve, no front", "none"),
}
_TITLES = {
    **{name: each.title for name, each in OURS.items()},
    **{name: each.title for name, each in REPLACING.items()},
}


def deaths_section(record: Record) -> str:
    """What each server loses, how soon it is whole again, and what it says of its health."""
    rows = []
    for each in record["results"]:
        lost = each["lost"]
        healthy = each["healthy"]
        rows.append(
            [
                each["scenario"],
                _TITLES[each["server"]],
                each["times"],
                each["offered"],
                each["in_time"],
                each["late"],
                sum(each["refused"].values()),
                ", ".join(f"{count} {why}" for why, count in lost.items()) or 0,
                _again(each["again_s"]),
                *(_share(healthy[when]) for when in ("after", "fewer", "none")),
            ]
        )
    header = [
        *("what happens", "server", "times", "requests", "in time", "late", "refused", "lost"),
        *("two answer again", "healthy in the second after"),
        *("healthy with fewer than two", "healthy with none"),
    ]
    settings = record["settings"]
    return page.section(
        record,
        f"Float tables, {settings['rate']:g} requests/s, two workers on two cores; in time is "
        f"within {1000 * settings['deadline_s']:g} ms. Two answer again: how often before the next "
        "worker was hit, and after how many seconds, the median and the most. Healthy: polls of "
        "the health endpoint that got 200, of all in the second after a worker was hit, of those "
        "with fewer than two workers that could answer, and with none:",
        page.table(header, rows),
    )


def _again(seconds: list[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    text = f"{len(known)} of {len(seconds)}"
    return f"{text}: {median(known):.1f}, {max(known):.1f}" if known else text


def _share(polls: dict[str, Any]) -> str:
    return f"{polls['healthy']} of {polls['polls']}" if polls["polls"] else ""
