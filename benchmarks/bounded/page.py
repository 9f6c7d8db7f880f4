"""The study's summary, tables and figure, beside what the paper prints."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.bounded import paper
from benchmarks.bounded.cells import BASELINE, CELLS, LOOKUPS
from benchmarks.bounded.lookups import EDGES, PHASES, SHOWN
from benchmarks.harness import page
from benchmarks.harness.record import Record
from benchmarks.quantized.trainings import changes_by_source, description

#: The paper accepts a fall of the accuracy by so many percent.
CRITERION = 0.02
#: From so many on a cell may be said to be within it, or to fall: of a dozen cells with fewer seeds
#: some have a small spread by chance.
ENOUGH_SEEDS = 8
#: Links in bytes per second.
LINKS = {"4 GB/s": paper.LINK, "1 Gbit/s": 1.25e8}
#: Columns of Table V, by what records have.
COLUMNS = {
    "window 255": "vector-LZ",
    "Huffman": "Huffman",
    "either": "the better one",
    "zlib": "zlib",
    "zstd": "zstd -1",
    "ours": "ours",
    "with ids": "ours, ids",
    "fixed width": "fixed width, ids",
}
_SHOWN_OF_CHANGES = ("accuracy", "seed_error", "test_error", "loss", "seeds")
Numbers = np.ndarray


def summarize(raw: Record) -> Record:
    """The record of a study, also of one that has not ended."""
    trained = changes_by_source(raw, BASELINE.key)
    own_tests = {e["name"] for e in raw["settings"]["sources"] if e.get("own_tests")}
    for result in trained:
        for cell, delta in result["changes"].items():
            ratios = (
                each["ratio"]
                for each in raw["results"]
                if (each["source"], each["cell"]) == (result["source"], cell)
            )
            short = {name: delta[name] for name in _SHOWN_OF_CHANGES}
            if result["source"] in own_tests:  # then the seeds' spread has the tests' errors
                short["test_error"] = 0.0
            result["changes"][cell] = {**short, "ratio": fmean(ratios)}
    found = [each for each in raw["results"] if each["cell"] == LOOKUPS.key]
    return {**raw, "results": [*trained, *(_shortened(e, raw["settings"]["etas"]) for e in found)]}


def _shortened(found: Record, thresholds: list[float]) -> Record:
    """What a page shows of lookups: tables one by one in the first source's Tables III to V."""
    batches = found["batches"]
    etas = {size: _etas(of_batch) for size, of_batch in batches.items()}
    classes = {size: paper.classes_by_eta(of, thresholds) for size, of in etas.items()}
    first = found["source"] == "planted"
    names = ("source", "phases", "speeds", "chunks") if first else ("source",)
    short = {name: found[name] for name in names}
    short.setdefault("phases", [{n: p[n] for n in ("ratio", "deviation")} for p in found["phases"]])
    short["classes"] = {"size": paper.classes_by_size(found["rows"]), **classes}
    many = {name: np.array(of) for name, of in batches["2048"].items()}
    short["worse predicted"] = int((many["entropy predicted"] > many["entropy"]).sum())
    short["kurtosis"] = np.quantile(many["kurtosis"] / (many["fp32"] / 4), [0, 0.5, 1]).tolist()
    shown = {"fp32", *COLUMNS, "patterns", "patterns quantized"}
    kept = shown if first else set()
    short["batches"] = {
        size: {name: of if name in kept else [sum(of)] for name, of in of_batch.items()}
        for size, of_batch in batches.items()
    }
    return short


def _etas(of_batch: Record) -> list[float]:
    return (1 - np.divide(of_batch["patterns quantized"], of_batch["patterns"])).tolist()


def interval(delta: Record) -> tuple[float, float]:
    """The 95 % interval of a change of accuracy, by Student's t over the seeds; the error of a test
    set that all seeds share comes on top."""
    of_seeds = delta["seed_error"] * float(stats.t.ppf(0.975, max(1, delta["seeds"] - 1)))
    half = math.hypot(of_seeds, float(stats.norm.ppf(0.975)) * delta["test_error"])
    return delta["accuracy"] - half, delta["accuracy"] + half


def verdict(low: float, high: float, seeds: int) -> str:
    """What an interval says, and what it excludes."""
    if seeds >= ENOUGH_SEEDS and low > -CRITERION and high < CRITERION:
        return f"**within {CRITERION} %**"
    if seeds >= ENOUGH_SEEDS and high < 0:
        return f"**falls**; more than {-low:.3f} % excluded"
    return f"falls of more than {max(0.0, -low):.3f} %"


def section(record: Record) -> str:
    """All sources: their trainings, then their lookups."""
    batches = {each["name"]: each["batch_size"] for each in record["settings"]["sources"]}
    found = [each for each in record["results"] if "batches" in each]
    parts = ["## Accuracy"]
    for each in record["results"]:
        if "changes" in each:
            about = description(each, batches[each["source"]])
            parts += [f"### {each['source']}", about, _accuracy(each["changes"])]
    if found:
        parts += ["## Bytes", *_table_2(found), *_tables_3_and_4(found[0]), *_table_5(found)]
        parts += [*_windows(found, record["settings"]["dim"]), *_rows(found), *_phases(found)]
        parts += [*_speeds(found[0]), *_chunks(found[0])]
    return page.section(record, *parts)


def _accuracy(changes: Record) -> str:
    lines = []
    for cell in CELLS:
        if delta := changes.get(cell.key):
            low, high = interval(delta)
            shown = (f"{low:+.3f} to {high:+.3f}", verdict(low, high, delta["seeds"]))
            loss = "diverged" if delta["loss"] is None else f"{delta['loss']:+.2f}"
            line = [cell.key, cell.figure, delta["seeds"], f"{delta['accuracy']:+.3f}"]
            line += shown if delta["seeds"] > 1 else ("-", "-")
            lines.append([*line, loss, f"{delta['ratio']:.1f}"])
    header = ["", "figure", "seeds", "accuracy, %", "95 % interval", "excluded", "loss, %", "ratio"]
    return page.table(header, lines)


def _table_2(found: list[Record]) -> list[str]:
    lines = [
        [f"paper, {s}", f"`{c}`", ""] for s, c in zip(paper.SETS, paper.TABLES["II"], strict=True)
    ]
    for each in found:
        by_size = each["classes"]["size"]
        for how, names in each["classes"].items():
            how = how if how == "size" else f"eta of {how} rows"
            same = f"{paper.as_many(names, by_size)} of 26"
            lines.append([f"{each['source']}, by {how}", f"`{names}`", same])
    table = page.table(["", "tables 0 to 25", "as by size"], lines)
    return ["### Table II: classes of bounds", table]


def _tables_3_and_4(first: Record) -> list[str]:
    lines = []
    for number, of_batch in zip(("III", "IV"), first["batches"].values(), strict=True):
        etas = _etas(of_batch)
        for table, *printed, index in paper.TABLES[number]:
            ours = [etas[table], 1 - etas[table]]
            theirs = [1 - printed[1] / printed[0], index]
            lines.append([number, table, *(f"{each:.3f}" for each in (*ours, *theirs))])
    header = ["", "table", "eta", "1 - eta", "paper: eta", "as printed"]
    return ["### Tables III and IV: rows that quantizing makes equal", page.table(header, lines)]


def _ratios(of_batch: Record, column: str) -> Numbers:
    """The ratio of each table, and of all together."""
    of_column = {"either": np.minimum(of_batch["window 255"], of_batch["Huffman"])} | of_batch
    raw, sent = np.array(of_batch["fp32"]), np.array(of_column[column])
    return np.append(raw / sent, raw.sum() / sent.sum())


def _table_5(found: list[Record]) -> list[str]:
    columns = [c for c in COLUMNS if c in found[0]["batches"]["128"] or c == "either"]
    lines = []
    for each in found:
        both = [[_ratios(b, c) for b in each["batches"].values()] for c in columns]
        for at in range(len(both[0][0])) if each is found[0] else [-1]:
            name = at if 0 <= at < len(both[0][0]) - 1 else each["source"]
            lines.append([name, *(" / ".join(f"{of[at]:.1f}" for of in pair) for pair in both)])
    printed = dict(zip(columns, paper.TABLES["V"].values(), strict=False))
    means = {c: [f"{paper.harmonic_mean(h):.1f}" for h in of] for c, of in printed.items()}
    lines.append(["paper", *(" / ".join(means.get(c, "-")) for c in columns)])
    table = page.table(["table", *(COLUMNS[c] for c in columns)], lines)
    beaten = [
        f"{sum((_ratios(b, c) > _ratios(b, 'ours'))[:-1].sum() for b in batches)} by {COLUMNS[c]}"
        for batches in [found[0]["batches"].values()]
        for c in columns
        if c != "ours"
    ]
    text = f"Of ours in 26 tables and two sizes of batches, beaten: {', '.join(beaten)}."
    return ["### Table V: ratios at 128 / 2,048 rows", table, text]


def _by_batch(found: list[Record], cells: Callable[[Record], list[Any]]) -> Iterator[list[Any]]:
    for each in found:
        for size, of_batch in each["batches"].items():
            yield [f"{each['source']}, {size} rows", *cells(of_batch)]


def _windows(found: list[Record], dim: int) -> list[str]:
    def gains(of_batch: Record) -> list[str]:
        sent = [sum(of_batch[f"window {window}"]) for window in paper.WINDOWS]
        return [f"{sent[0] / each:.2f}" for each in sent]

    printed = [
        [f"paper, {s}, as printed", *r] for s, r in zip(paper.SETS, paper.TABLES["VI"], strict=True)
    ]
    header = ["ratio of vector-LZ by window, over that of 32 rows", *paper.WINDOWS]
    table = page.table(header, [*_by_batch(found, gains), *printed])
    many = {name: np.array(of) for name, of in found[0]["batches"]["2048"].items()}
    rows = many["fp32"] / 4 / dim
    matched, bits = 1 - (many["window 255"] / rows - 1) / dim, 8 * many["Huffman"] / rows / dim
    texts = (
        f"{matched[table]:.1%} of table {table}'s rows, for which Huffman takes {bits[table]:.1f} "
        "bits a value"
        for table in SHOWN
    )
    text = f"Figure 13, 2,048 rows: a window of 255 rows has {'; '.join(texts)}."
    return ["### Table VI: windows", table, text]


def _rows(found: list[Record]) -> list[str]:
    def features(of_batch: Record) -> list[str]:
        values = sum(of_batch["fp32"]) / 4
        names = ("patterns", "patterns in codes", "patterns predicted")
        bits = (sum(of_batch[name]) / values for name in ("entropy", "entropy predicted"))
        return [*(f"{sum(of_batch[n]):,}" for n in names), *(f"{each:.2f}" for each in bits)]

    header = [
        "all batches",
        "different rows",
        "quantized",
        "predicted",
        "bits a value",
        "predicted",
    ]
    texts = (
        "- {source}, 2,048 rows: prediction takes more bits in {worse predicted} of 26 tables; "
        "excess kurtosis {kurtosis[0]:.1f} to {kurtosis[2]:.1f}, median {kurtosis[1]:.1f} (-1.2 of "
        "a uniform and 0 of a normal distribution).".format(**each)
        for each in found
    )
    table = page.table(header, _by_batch(found, features))
    return ["### Table I, figures 4 and 13: prediction", table, "\n".join(texts)]


def _phases(found: list[Record]) -> list[str]:
    lines = [
        [f"{each['source']}, {name}", *(how(phase) for phase in each["phases"])]
        for each in found
        for name, how in (
            ("ratio", lambda phase: f"{phase['ratio']:.1f}"),
            ("median deviation", lambda phase: f"{phase['deviation']:.4f}"),
        )
    ]
    table = page.table(["share of the training", *(f"{share:.0%}" for share in PHASES)], lines)
    return ["### Figure 14: phases, 2,048 rows", table]


def _speeds(first: Record) -> list[str]:
    ours = [
        (f"{COLUMNS[e['way']]}, {e['rows']:,} rows", e["ratio"], (e["encode"], e["decode"]))
        for e in first["speeds"]
    ]
    theirs = [
        (f"paper, {name}, {of_set}", paper.harmonic_mean(ratios), speeds)
        for name, speeds in paper.SPEEDS.items()
        for of_set, ratios in zip(paper.SETS, paper.TABLES["V"][name], strict=True)
    ]
    lines = []
    for name, ratio, speeds in ours + theirs:
        times = [paper.speed_up(ratio, speeds, link) for link in LINKS.values()]
        lines.append(
            [name, f"{ratio:.1f}", *(f"{speed / 1e9:.1f}" for speed in speeds)]
            + [f"{each:.2f} ({paper.end_to_end(each):.2f})" for each in times]
        )
    header = ["", "ratio", "encode, GB/s", "decode, GB/s", *LINKS]
    text = (
        "Times faster: the all-to-all by equation 2, and in brackets a step of which it was 31.3 %."
    )
    return ["### Figures 11 and 12: speeds", page.table(header, lines), text]


def _chunks(first: Record) -> list[str]:
    lines = []
    for each in first["chunks"]:
        both = (each["whole"], each["apart"])
        times = [both[1][what] / both[0][what] for what in ("seconds", "bytes")]
        line = [each["chunks"], *(f"{how['seconds'] * 1e3:.2f}" for how in both)]
        lines.append([*line, *(f"{each:.2f}" for each in times)])
    header = ["chunks", "a call for each, ms", "for each and table, ms", "times", "times the bytes"]
    return ["### Figure 15: calls for a batch of 2,048 rows", page.table(header, lines)]


def plot(path: Path, record: Record) -> None:
    """Draws the first source's changes of accuracy, and two tables' values by phase."""
    with page.figure(path, 12, 4.5, ncols=3, width_ratios=[2, 1, 1]) as (_, axes):
        axis = axes[0, 0]
        changes = next(each for each in record["results"] if "changes" in each)["changes"]
        means = [delta["accuracy"] for delta in changes.values()]
        halves = [delta["accuracy"] - interval(delta)[0] for delta in changes.values()]
        axis.errorbar(means, range(len(means)), xerr=halves, fmt=".", capsize=2)
        names = [f"{name} ({delta['ratio']:.1f})" for name, delta in changes.items()]
        axis.set_yticks(range(len(means)), names, fontsize=7)
        axis.axvspan(-CRITERION, CRITERION, alpha=0.2)
        axis.set(xlabel="change of accuracy, %, and the ratio in the training")
        for each in [each for each in record["results"] if "phases" in each][:1]:
            for place, table in enumerate(SHOWN):
                axis = axes[0, 1 + place]
                for share, phase in zip(PHASES, each["phases"], strict=True):
                    axis.stairs(phase["histograms"][place], EDGES, label=f"{share:.0%}")
                axis.set(xlabel=f"values of table {table} by phase", yscale="log")
                axis.legend(fontsize=7)
