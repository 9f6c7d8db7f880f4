"""Draws lives and births until enough was done: python -m tests.random_actions [--actions N]."""

import argparse
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from tests.processes import run
from tests.random_actions.births import WHATS, give_birth
from tests.random_actions.check import check
from tests.random_actions.life import Life

# A group makes some models and ends, so that what one leaves behind does not add up.
_BIRTHS_A_GROUP = 10 * len(WHATS)


def main() -> None:
    """Prints the actions by name. Ends with an error at the first life that goes wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actions", type=int, default=100_000, help="how many at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first life")
    parser.add_argument("--births", type=int, default=1_100, help="how many at least")
    parser.add_argument("--json", type=Path, help="file for the counts")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    seed, started = arguments.seed, time.monotonic()
    with (
        tqdm(total=arguments.actions, unit="action") as bar,
        ThreadPoolExecutor(1) as beside,
    ):
        # A late rank is waited for, which takes no core.
        births = beside.submit(_births, arguments.seed, arguments.births)
        while counts.total() < arguments.actions:
            life = Life.draw(seed, epochs=6, batches=300)
            done = check(life)
            counts += done + Counter({f"life over {life.transport}": 1})
            bar.update(done.total())
            seed += 1
        counts += births.result()
    report = {
        "first seed": arguments.seed,
        "lives": seed - arguments.seed,
        "seconds": round(time.monotonic() - started),
        "actions": dict(counts.most_common()),
    }
    print(json.dumps(report, indent=2))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def _births(seed: int, births: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for group in range(-(-births // _BIRTHS_A_GROUP)):
        ranks = 2 + group % 2
        drawn = run(ranks, give_birth, seed + group, _BIRTHS_A_GROUP, WHATS, deadline=600)
        counts += drawn[0]
    return counts


if __name__ == "__main__":
    main()
