"""Draws lives until enough actions were done: python -m tests.random_actions [--actions 100000]."""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from tests.random_actions.check import check
from tests.random_actions.life import Life


def main() -> None:
    """Prints the actions by name. Ends with an error at the first life that goes wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actions", type=int, default=100_000, help="how many at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first life")
    parser.add_argument("--json", type=Path, help="file for the counts")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    seed, started = arguments.seed, time.monotonic()
    with tqdm(total=arguments.actions, unit="action") as bar:
        while counts.total() < arguments.actions:
            life = Life.draw(seed, epochs=6, batches=300)
            done = check(life)
            counts += done + Counter({f"life over {life.transport}": 1})
            bar.update(done.total())
            seed += 1
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


if __name__ == "__main__":
    main()
