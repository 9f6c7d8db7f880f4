"""Exchanges small messages among 8 ranks for a long time and checks every byte and every resource.

See README.md in this folder for what is checked and how.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from common import environment, write_json
from soak_ranks import SoakSettings, soak
from soak_report import page, problems, summary


def main() -> None:
    """Soaks as long as the command line says; exits with 1 when a resource has grown."""
    settings = SoakSettings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the whole record to this file")
    parser.add_argument("--page", type=Path, help="write the figures to this Markdown file")
    parser.add_argument("--iterations", type=int, default=settings.iterations)
    parser.add_argument("--seconds", type=float, help="stop after the run that is under way then")
    parser.add_argument("--seed", type=int, default=settings.seed)
    arguments = parser.parse_args()
    settings = replace(
        settings,
        iterations=arguments.iterations,
        seconds=arguments.seconds,
        seed=arguments.seed,
    )
    before = environment()
    with tempfile.TemporaryDirectory(prefix="bls-soak-") as folder:
        results = soak(Path(folder), settings)
    print(summary(results))
    record = {"environment": before, "settings": asdict(settings), "results": results}
    if arguments.json:
        write_json(arguments.json, "soak", before, asdict(settings), results)
    if arguments.page:
        arguments.page.write_text(page(record))
    if found := problems(results):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
