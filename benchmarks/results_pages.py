"""Writes what pages show of the records in benchmarks/results: their tables, and the figures.

It prints which sentences of pages have other figures than their records.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import ROOT, prose
from benchmarks.bounded import page as bounded
from benchmarks.bounded import paper
from benchmarks.codecs import page as codecs
from benchmarks.delays import page as delays
from benchmarks.direct import page as direct
from benchmarks.exchange import all_reduce, over_tcp
from benchmarks.exchange import page as exchange
from benchmarks.harness import page, record
from benchmarks.harness.statistics import geometric_mean
from benchmarks.libra import gpu
from benchmarks.libra import page as libra
from benchmarks.modules import page as modules
from benchmarks.overlap import backward, late_wait
from benchmarks.paper_bls import page as paper_bls
from benchmarks.planner import page as planner
from benchmarks.programs import PROGRAMS
from benchmarks.quantized import page as quantized
from benchmarks.serve import page as serve
from benchmarks.serve.peers import deaths_page
from benchmarks.serve.peers import page as peers
from benchmarks.simulator import lag, links, traced, transformer
from benchmarks.simulator import page as simulator
from benchmarks.soak import soak


def headlines(delays: Any, embedding: Any, alltoall: Any, backend: Any) -> str:
    """The three figures of the README, by ranks a core: so they serve on a host with more cores."""
    dlrm = {e["bound"]: e["ms_per_step"]["median"] for e in delays["results"]["dlrm"]}
    late = f"{dlrm[None] / dlrm[2]:.1f} ({dlrm[2]:.1f} ms in place of {dlrm[None]:.1f})"
    ranks = delays["settings"]["dlrm"]["ranks"]
    forwards, calls = modules.speedups(embedding), defaultdict(list)
    for (of_call, *_), us in exchange.medians(alltoall).items():
        if "open_mpi" in us:
            calls[of_call].append(us["open_mpi"] / us["channel"])
    rows = {
        "TorchRec on gloo: [a DLRM](docs/results/delays.md) whose ranks are each late by 0 to 10 "
        "ms, at bound 2": _by_ranks_a_core(delays, {ranks: late}),
        "TorchRec on gloo: [forwards](docs/results/modules.md) of 26 tables at bound 0, "
        "inference": _by_ranks_a_core(
            embedding, {ranks: _mean_and_range(each) for ranks, each in forwards.items()}
        ),
        "Open MPI: [all-to-alls](docs/results/exchange.md) from C++, read in place, which it "
        "copies out": _by_ranks_a_core(
            alltoall, {ranks: _mean_and_range(each) for ranks, each in calls.items()}
        ),
    }
    columns = sorted({place for row in rows.values() for place in row})
    copied = modules.over_mpi(backend, alltoall)
    slower = sum(each > 1 for each in copied.values())
    first, *more = (f"with {place:g}" for place in columns)
    dates = sorted(each["environment"]["date"][:10] for each in (delays, embedding, alltoall))
    return "\n\n".join(
        [
            page.table(
                ["times faster than", f"{first} rank a core", *more],
                [[name, *(row.get(place, "") for place in columns)] for name, row in rows.items()],
            ),
            "Geometric means, with the least and the greatest. At bound 0 the DLRM takes "
            f"{dlrm[0]:.1f} ms. The backend `bls`, called from Python, copies messages out as Open "
            f"MPI does, and takes longer than it in [{slower} of {len(copied)} "
            f"cells](docs/results/backend.md), up to {max(copied.values()):.0f} times. "
            f"({page.host(delays)}, {dates[0]} to {dates[-1]}.)",
        ]
    )


def _by_ranks_a_core(record: Any, of_ranks: dict[int, str]) -> dict[float, str]:
    cores = record["environment"]["cores"]
    return {ranks / cores: text for ranks, text in of_ranks.items()}


def _mean_and_range(ratios: list[float]) -> str:
    return f"{geometric_mean(ratios)[1]:.1f} ({min(ratios):.1f} to {max(ratios):.1f})"


def ages(*records: Any) -> str:
    """When each of `PROGRAMS`' records was taken, and at which commit."""
    rows = []
    for (name, program), each in zip(PROGRAMS.items(), records, strict=True):
        parts = each["stages"].values() if "stages" in each else [each]
        taken = {(p["environment"]["date"][:10], p["environment"]["commit"]) for p in parts}
        rows += [[name, date, commit, program.name] for date, commit in sorted(taken)]
    return page.table(["record", "taken", "commit", "program now, in `benchmarks`"], rows)


def _codecs(speeds: Any, exchanges: Any) -> str:
    return f"{codecs.section(speeds)}\n\n## Exchanges\n\n{codecs.exchange_section(exchanges)}"


_MODELS = "docs/reproduction/performance-models.md"
_STEPS = "docs/reproduction/simulated-steps.md"
#: What stands between the markers of a page: what makes the text, and of which records.
SECTIONS: dict[tuple[str, str], tuple[Any, ...]] = {
    ("README.md", "results"): (headlines, "delays", "embedding", "alltoall", "backend"),
    ("docs/results/README.md", "records"): (ages, *PROGRAMS),
    ("docs/results/delays.md", "results"): (delays.section, "delays"),
    ("docs/results/modules.md", "results"): (modules.section, "embedding"),
    ("docs/results/modules.md", "tracking"): (modules.tracking_section, "tracking"),
    ("docs/results/backend.md", "results"): (modules.backend_section, "backend", "alltoall"),
    ("docs/results/direct-reads.md", "results"): (direct.section, "direct_reads"),
    ("docs/results/direct-reads.md", "latency"): (direct.latency_section, "direct_latency"),
    ("docs/results/direct-reads.md", "faults"): (direct.faults_section, "direct_faults"),
    ("docs/results/direct-reads.md", "switches"): (direct.switches_section, "direct_switches"),
    ("docs/results/direct-reads.md", "service"): (direct.service_tables_section, "service_tables"),
    ("docs/results/direct-reads.md", "rows"): (direct.row_refresh_section, "row_refresh"),
    ("docs/results/direct-reads.md", "quantized"): (modules.quantized_section, "quantized_modules"),
    ("docs/results/serving.md", "costs"): (serve.costs_section, "serving_costs"),
    ("docs/results/serving.md", "load"): (serve.load_section, "serving"),
    ("docs/results/serving.md", "peers"): (peers.section, "serving_peers"),
    ("docs/results/serving.md", "batches"): (peers.grid_section, "serving_peers_grid"),
    ("docs/results/serving.md", "fire"): (serve.fire_section, "serving_fire"),
    ("docs/results/serving.md", "deaths"): (deaths_page.deaths_section, "serving_deaths"),
    ("docs/results/serving.md", "refreshes"): (serve.refresh_section, "serving_refreshes"),
    ("docs/results/serving.md", "refreshes of INT8"): (
        serve.refresh_section,
        "serving_refreshes_int8",
    ),
    ("docs/results/serving.md", "freshness"): (serve.freshness_section, "serving_freshness"),
    ("docs/results/exchange.md", "results"): (exchange.section, "alltoall"),
    ("docs/results/exchange.md", "tcp"): (over_tcp.section, "over_tcp"),
    ("docs/results/all-reduce.md", "results"): (all_reduce.section, "all_reduce"),
    ("docs/results/overlap.md", "results"): (backward.section, "overlap"),
    ("docs/results/overlap.md", "late wait"): (late_wait.section, "late_wait"),
    ("docs/results/codecs.md", "results"): (_codecs, "codecs", "codec_exchange"),
    ("docs/results/codecs.md", "bounded"): (codecs.bounded_section, "bounded_codec"),
    ("docs/results/planner.md", "results"): (planner.section, "simulator", "sharding_search"),
    ("docs/soak.md", "results"): (soak.section, "soak"),
    (_MODELS, "models"): (planner.models_section, "performance-models"),
    (_MODELS, "planning"): (planner.search_section, "sharding_search"),
    (_STEPS, "steps"): (simulator.steps_section, "simulator"),
    (_STEPS, "bounds"): (lag.section, "simulator_lag"),
    (_STEPS, "links"): (links.section, "simulator_links"),
    (_STEPS, "traces"): (traced.section, "simulator_traced"),
    (_STEPS, "transformers"): (transformer.section, "simulator_transformer"),
    ("docs/reproduction/bls.md", "results"): (paper_bls.section, "paper_bls"),
    ("docs/reproduction/libra.md", "implied"): (libra.implied,),
    ("docs/reproduction/libra.md", "results"): (libra.section, "libra"),
    ("docs/reproduction/libra.md", "gpu"): (gpu.section, "libra_gpu"),
    ("docs/reproduction/quantized.md", "results"): (quantized.section, "quantized"),
    ("docs/reproduction/bounded.md", "errors"): (paper.errors,),
    ("docs/reproduction/bounded.md", "results"): (bounded.section, "bounded"),
}


def load() -> dict[str, Any]:
    """Reads all records; a RecordError has the command that writes what cannot be used."""
    return {
        name: record.read(record.RESULTS / f"{name}.json", f"python -m benchmarks.{program.name}")
        for name, program in PROGRAMS.items()
    }


def written(records: dict[str, Any]) -> dict[Path, str]:
    """What each page has to be; a PageError says which markers one lacks."""
    texts: dict[Path, str] = {}
    for (path, markers), (section, *names) in SECTIONS.items():
        before = texts.get(ROOT / path) or (ROOT / path).read_text()
        text = section(*(records[name] for name in names))
        texts[ROOT / path] = page.fill(before, markers, text, of=path)
    return texts


def draw(docs: Path, records: dict[str, Any]) -> None:
    delays.plot(docs / "figures/delays.png", records["delays"])
    over_gloo, over_bound_0 = "times faster than TorchRec on gloo", "times faster than bound 0"
    modules.plot(docs / "figures/embedding.png", records["embedding"], over_gloo)
    modules.plot(docs / "figures/direct_reads.png", records["direct_reads"], over_bound_0)
    exchange.plot(docs / "figures/alltoall.png", records["alltoall"])
    quantized.plot(docs / "figures/quantized.png", records["quantized"])
    bounded.plot(docs / "figures/bounded.png", records["bounded"])
    paper_bls.draw(docs / "reproduction", records["paper_bls"])
    libra.plot(docs / "reproduction/libra-fig9.png", records["libra"])
    of_simulator = [records[f"simulator{each}"] for each in ("", "_lag", "_transformer")]
    simulator.draw(docs / "reproduction/simulated-steps.png", *of_simulator)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    records = load()
    for path, text in written(records).items():
        path.write_text(text)
    draw(ROOT / "docs", records)
    for name in prose.PAGES:
        for sentence in prose.missing(name, (ROOT / name).read_text(), records):
            print(f"{name} should say: {sentence}")


if __name__ == "__main__":
    main()
