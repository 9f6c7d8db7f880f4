"""What a soak has found: figures, and resources that grew."""

from __future__ import annotations

from typing import Any

# Above the noise of the allocator, below a leak of a few bytes an iteration.
_ALLOWED_BETWEEN_RUNS = {"private_kib": 2048, "shared_kib": 0, "descriptors": 0}
# A message larger than a slot keeps its memory, which has a descriptor, until the slot's next one.
_ALLOWED_WITHIN_RUN = {"private_kib": 2048, "shared_kib": 512, "descriptors": 8}

Record = dict[str, Any]


def problems(results: Record) -> list[str]:
    """One line for each resource of a rank that has grown."""
    found = []
    for rank, result in enumerate(results["ranks"]):
        for name, allowed in _ALLOWED_BETWEEN_RUNS.items():
            first, last = result["first"][name], result["last"][name]
            if last > first + allowed:
                found.append(f"rank {rank}: {name} grew from {first} to {last} over the runs")
        for name, allowed in _ALLOWED_WITHIN_RUN.items():
            grown = result["largest_growth_within_run"][name]
            if grown > allowed:
                found.append(f"rank {rank}: {name} grew by {grown} while a channel was open")
    return found


def page(record: Record) -> str:
    """The last run's figures as a document."""
    where, settings, results = record["environment"], record["settings"], record["results"]
    return "\n".join(
        [
            "# Soak",
            "",
            f"{settings['ranks']} processes exchange small messages of random sizes, few larger "
            "than a slot, with random delays before posts. Every "
            f"{settings['run_iterations']:,} iterations they open a new channel with a random "
            "bound. Every byte of every message is compared with what its sender must have sent, "
            "and resident memory and descriptors of every rank are watched "
            "([how](../benchmarks/README.md#soak)). The last run:",
            "",
            summary(results),
            "",
            f"*{where['cpu']}, {where['cores']} cores, load {where['load_average']} before the "
            f"run, Linux {where['kernel']}, torch {where['versions']['torch']}, commit "
            f"{where['commit']}, {where['date'][:10]}: `{where['command']}`*",
            "",
        ]
    )


def summary(results: Record) -> str:
    """The figures as Markdown."""
    ranks, bounds = results["ranks"], results["bounds"]
    by_bound = ", ".join(f"{bounds.count(bound)} of {bound}" for bound in sorted(set(bounds)))
    lines = [
        f"- {results['iterations']:,} iterations of {len(ranks)} ranks in "
        f"{results['seconds']:,.0f} s",
        f"- {len(bounds)} channels, by bound: {by_bound}",
        f"- {sum(rank['messages_checked'] for rank in ranks):,} messages between ranks, "
        f"{sum(rank['pulled_messages'] for rank in ranks):,} of them larger than a slot",
        "- no wrong byte",
        "",
        "After the first tenth of the runs → after the last one; in parentheses by how much it "
        "grew at most while a channel was open:",
        "",
        "| rank | private memory, KiB | shared memory, KiB | descriptors |",
        "| --- | --- | --- | --- |",
    ]
    for rank, result in enumerate(ranks):
        cells = [
            f"{result['first'][name]:,} → {result['last'][name]:,} "
            f"({result['largest_growth_within_run'][name]:+,})"
            for name in _ALLOWED_BETWEEN_RUNS
        ]
        lines.append(f"| {rank} | {' | '.join(cells)} |")
    return "\n".join(lines)
