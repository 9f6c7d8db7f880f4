"""Switches weights while requests flow: python -m tests.random_actions.refreshes."""

from tests.distributed.pipeline.test_updates import switch_under_load
from tests.processes import run

RANKS, BOUND, BATCHES, EVERY = 4, 2, 10_000, 500


def main() -> None:
    """Prints how many outputs were of which version. Ends with an error if one is of none or two,
    is lost, or is of another version than on another rank."""
    by_rank = run(RANKS, switch_under_load, BOUND, BATCHES, EVERY, False, deadline=1200)
    for seen in by_rank:
        assert len(seen) == BATCHES and seen == by_rank[0]
    versions = [version for _, version in by_rank[0]]
    assert versions == sorted(versions)
    counts = [versions.count(version) for version in range(max(versions) + 1)]
    print(
        f"{RANKS} ranks, {BATCHES} batches each, 0 lost; outputs of each version, the same batches "
        f"on all ranks: {counts}"
    )


if __name__ == "__main__":
    main()
