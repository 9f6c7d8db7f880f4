"""What a soak has found: figures, and resources that grew."""

from collections import Counter

from benchmarks.harness import page
from benchmarks.harness.record import Record

# By how much a resource may grow over the runs and while a channel is open. Above the noise of the
# allocator, below a leak of a few bytes an iteration; and a message larger than a slot keeps its
# memory, which has a descriptor, until the slot's next one.
_ALLOWED = {"private_kib": (2048, 2048), "shared_kib": (0, 512), "descriptors": (0, 8)}


def problems(results: Record) -> list[str]:
    """One line for each resource of a rank that has grown."""
    found = []
    for rank, result in enumerate(results["ranks"]):
        for name, (over_runs, within_run) in _ALLOWED.items():
            first, last = result["first"][name], result["last"][name]
            grown = result["largest_growth_within_run"][name]
            if last - first > over_runs:
                found.append(f"rank {rank}: {name} grew from {first} to {last} over the runs")
            if grown > within_run:
                found.append(f"rank {rank}: {name} grew by {grown} while a channel was open")
    return found


def section(record: Record) -> str:
    """The figures of a run."""
    results = record["results"]
    ranks, bounds = results["ranks"], results["bounds"]
    by_bound = ", ".join(f"{count} of {bound}" for bound, count in sorted(Counter(bounds).items()))
    rows = []
    for rank, result in enumerate(ranks):
        rows.append([rank])
        for name in _ALLOWED:
            grown = result["largest_growth_within_run"][name]
            rows[-1].append(f"{result['first'][name]:,} → {result['last'][name]:,} ({grown:+,})")
    return page.section(
        record,
        f"- {results['iterations']:,} iterations of {len(ranks)} ranks in "
        f"{results['seconds']:,.0f} s\n"
        f"- {len(bounds)} channels, by bound: {by_bound}\n"
        f"- {sum(rank['messages_checked'] for rank in ranks):,} messages between ranks, "
        f"{sum(rank['pulled_messages'] for rank in ranks):,} of them larger than a slot\n"
        "- no wrong byte",
        "After the first tenth of the runs → after the last one; in parentheses by how much it "
        "grew at most while a channel was open:",
        page.table(["rank", "private memory, KiB", "shared memory, KiB", "descriptors"], rows),
    )
