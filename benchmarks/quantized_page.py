"""Writes tables and figure of docs/reproduction/quantized.md from a record of quantized_study.py,
also from one that has not ended."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from common import ROOT
from quantized.page import plot, section

BEGIN = "<!-- results: written by benchmarks/quantized_page.py -->"
END = "<!-- end of results -->"


def fill(page: str, text: str) -> str:
    """Puts `text` between the markers of `page`.

    Raises:
        ValueError: the markers are not there in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN} and {END}, in this order")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> int:
    """Writes page and figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    results = ROOT / "benchmarks" / "results" / "quantized.json"
    parser.add_argument("--json", type=Path, default=results)
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs" / "reproduction" / "quantized.md"
    )
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "figures" / "quantized.png")
    arguments = parser.parse_args()
    try:
        record = json.loads(arguments.json.read_text())
        arguments.page.write_text(fill(arguments.page.read_text(), section(record)))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    plot(arguments.plot, record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
