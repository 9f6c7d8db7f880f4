"""Draws until enough was done, and writes down what it was."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm


def options(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the options that all random actions have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--actions", type=int, default=100_000, help="how many at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first life")
    parser.add_argument("--json", type=Path, help="file for the counts")
    return parser


def count_lives(
    options: argparse.Namespace,
    live: Callable[[int], Counter[str]],
    beside: Callable[[], Counter[str]] = Counter,
) -> None:
    """Lives one life after the other, each with another seed, and prints the actions by name.

    Args:
        options: what the parser of `options` has read.
        live: function that lives the life of a seed and counts its actions.
        beside: function that is called after the last life and returns what else was done.
    """
    counts: Counter[str] = Counter()
    seed, started = options.seed, time.monotonic()
    with tqdm(total=options.actions, unit="action") as bar:
        while counts.total() < options.actions:
            done = live(seed)
            counts += done
            bar.update(done.total())
            seed += 1
    counts += beside()
    report: dict[str, Any] = {
        "first seed": options.seed,
        "lives": seed - options.seed,
        "seconds": round(time.monotonic() - started),
        "actions": dict(counts.most_common()),
    }
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
