"""Writes what pages show of the records in benchmarks/results: their tables, and the figures."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT
from benchmarks.codecs import page as codecs
from benchmarks.delays import page as delays
from benchmarks.exchange import page as exchange
from benchmarks.harness import page, record
from benchmarks.harness.statistics import geometric_mean
from benchmarks.modules import page as modules
from benchmarks.paper_bls import figures
from benchmarks.paper_bls import page as paper_bls
from benchmarks.planner import page as planner
from benchmarks.quantized import page as quantized
from benchmarks.soak import page as soak

#: The program that writes each record.
PROGRAMS = {
    "alltoall": "exchange.alltoall",
    "backend": "modules.backend",
    "codec_exchange": "codecs.exchange",
    "codecs": "codecs.rows",
    "delays": "delays.delays",
    "embedding": "modules.embedding",
    "paper_bls": "paper_bls.evaluation",
    "performance-models": "planner.study_models",
    "quantized": "quantized.study",
    "sharding_executed": "planner.executed",
    "sharding_search": "planner.search",
    "soak": "soak.soak",
}


class Section(NamedTuple):
    """What stands between the markers of a page: the text that records, by name, become."""

    path: str
    name: str
    records: Sequence[str]
    text: Callable[..., str]


def headlines(delays: Any, embedding: Any, alltoall: Any) -> str:
    """The three figures of the README, each with what it was measured on."""
    dlrm = {e["bound"]: e["ms_per_step"]["median"] for e in delays["results"]["dlrm"]}
    ms = [result["ms"] for result in embedding["results"]]
    gains = [each["torchrec"]["median"] / each["ours"]["median"] for each in ms]
    calls = [cell["peers"] for cell in alltoall["results"] if "open_mpi" in cell["peers"]]
    over = [
        peers["open_mpi"]["us_per_call"]["median"] / peers["channel"]["us_per_call"]["median"]
        for peers in calls
    ]
    where = [
        f"{each['environment']['cpu']}, {each['environment']['cores']} cores, "
        f"{each['environment']['date'][:10]}"
        for each in (delays, embedding, alltoall)
    ]
    lines = [
        f"- **{dlrm[None] / dlrm[2]:.1f} times faster under random delays.** A DLRM whose 4 ranks "
        f"are each late by 0-10 ms takes {dlrm[2]:.1f} ms a step at bound 2, {dlrm[0]:.1f} ms at "
        f"bound 0, and {dlrm[None]:.1f} ms with TorchRec on gloo "
        f"([delays](docs/results/delays.md); {where[0]}).",
        f"- **{min(gains):.1f} to {max(gains):.1f} times faster forwards at bound 0.** Sharded "
        "modules with 26 tables of dimension 64 among 2 and 4 ranks, beside TorchRec's on gloo "
        f"([modules](docs/results/modules.md); {where[1]}).",
        f"- **{geometric_mean(over)[1]:.1f} times faster all-to-alls than Open MPI's**, from "
        f"{min(over):.1f} to {max(over):.1f} times over 2 to 8 ranks "
        "and 8 B to 4 MiB per pair, the channel called from C++ "
        f"([exchange](docs/results/exchange.md); {where[2]}).",
    ]
    return "\n".join(lines)


def _codecs(speeds: Any, exchanges: Any) -> str:
    parts = (codecs.section(speeds), "## Exchanges", codecs.exchange_section(exchanges))
    return "\n\n".join(parts)


_PLANS = ("sharding_executed", "sharding_search")
_MODELS = "docs/reproduction/performance-models.md"
SECTIONS = [
    Section("README.md", "results", ("delays", "embedding", "alltoall"), headlines),
    Section("docs/results/delays.md", "results", ("delays",), delays.section),
    Section("docs/results/modules.md", "results", ("embedding",), modules.section),
    Section("docs/results/backend.md", "results", ("backend",), modules.backend_section),
    Section("docs/results/exchange.md", "results", ("alltoall",), exchange.section),
    Section("docs/results/codecs.md", "results", ("codecs", "codec_exchange"), _codecs),
    Section("docs/results/planner.md", "results", _PLANS, planner.section),
    Section("docs/soak.md", "results", ("soak",), soak.section),
    Section(_MODELS, "models", ("performance-models",), planner.models_section),
    Section(_MODELS, "sharding", _PLANS, planner.details),
    Section("docs/reproduction/bls.md", "results", ("paper_bls",), paper_bls.section),
    Section("docs/reproduction/quantized.md", "results", ("quantized",), quantized.section),
]


def load(folder: Path) -> dict[str, Any]:
    """Reads all records.

    Raises:
        RecordError: one cannot be used; the text has the command that writes it.
    """
    return {
        name: record.read(folder / f"{name}.json", f"python -m benchmarks.{program}")
        for name, program in PROGRAMS.items()
    }


def written(root: Path, records: dict[str, Any]) -> dict[Path, str]:
    """What each page below `root` has to be.

    Raises:
        PageError: a page lacks its markers.
    """
    texts: dict[Path, str] = {}
    for section in SECTIONS:
        path = root / section.path
        text = section.text(*(records[name] for name in section.records))
        before = texts.get(path) or path.read_text()
        try:
            texts[path] = page.fill(before, section.name, text)
        except page.PageError as error:
            raise page.PageError(f"{path}: {error}") from None
    return texts


def draw(docs: Path, records: dict[str, Any]) -> None:
    """Draws the figures that the pages show."""
    delays.plot(docs / "figures/delays.png", records["delays"])
    modules.plot(docs / "figures/embedding.png", records["embedding"])
    exchange.plot(docs / "figures/alltoall.png", records["alltoall"])
    quantized.plot(docs / "figures/quantized.png", records["quantized"])
    figures.draw(docs / "reproduction", records["paper_bls"])


def main() -> int:
    """Rewrites pages and figures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, default=record.RESULTS, help="folder of records")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs")
    options = parser.parse_args()
    try:
        records = load(options.records)
        texts = written(options.root, records)
    except (record.RecordError, page.PageError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for path, text in texts.items():
        path.write_text(text)
    draw(options.root / "docs", records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
