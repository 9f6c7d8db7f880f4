"""What a soak has found: figures, and resources that grew."""

from typing import Any

from benchmarks.harness import page

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


def section(record: Record) -> str:
    """The figures of a run."""
    results = record["results"]
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
    ]
    rows = [
        [str(rank), *(_growth(result, name) for name in _ALLOWED_BETWEEN_RUNS)]
        for rank, result in enumerate(ranks)
    ]
    header = ["rank", "private memory, KiB", "shared memory, KiB", "descriptors"]
    return "\n".join([*lines, page.table(header, rows), "", page.conditions(record)])


def _growth(result: Record, name: str) -> str:
    first, last = result["first"][name], result["last"][name]
    return f"{first:,} → {last:,} ({result['largest_growth_within_run'][name]:+,})"
