"""The study's summary, tables and figure: how accuracy changes, how surely, and sums alone."""

import math
from functools import cache
from itertools import groupby, product
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness import page
from benchmarks.harness.record import Record
from benchmarks.quantized.cells import BASELINE, CELLS, CONTROL, Cell, collectives
from benchmarks.quantized.dlrm import Collectives
from benchmarks.quantized.trainings import changes_by_source, description

#: The paper accepts a fall of the accuracy by so many percent.
CRITERION = 0.02
#: How often gradients that do not change are summed.
SUMS = 20
_CAPTIONS = {
    2: "Table 2: quantized all-to-all (forward, backward), full-precision all-reduce",
    3: "Table 3: quantized all-reduce, full-precision all-to-all",
    4: "Table 4: both",
}
_TABLES = {
    caption: [cell for cell in CELLS if cell.table == table] for table, caption in _CAPTIONS.items()
}


def summarize(raw: Record) -> Record:
    """The record of a study, also of one that has not ended: each source's baseline and changes."""
    results = changes_by_source(raw, BASELINE.key, CONTROL.key)
    return {**raw, "results": results, "compensation": errors_by_row()}


@cache
def errors_by_row() -> list[Record]:
    """The errors of 32 nodes with each codec, in a ring and by recursive doubling, with and
    without compensation."""
    names = product(("ring", "RD"), ("uint8", "uint4", "uint2"), ("", " EC"))
    rows = [f"{codec} {algorithm}{compensated}" for algorithm, codec, compensated in names]
    return [{"row": row, "errors": relative_errors(collectives(32, row))} for row in rows]


def relative_errors(how: Collectives) -> list[float]:
    """Sums the same normal values of each node again and again: the RMS errors of the first, fifth
    and last sum and of the mean of all, relative to the exact sum's RMS."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(how.nodes, how.nodes, 64, generator=generator)
    error = torch.zeros_like(values) if how.compensated else None
    sums = [how.sum_gradients(values, error) for _ in range(SUMS)]
    mean = sum(each / SUMS for each in sums)
    exact = values.sum(0)
    compared = (sums[0], sums[4], sums[-1], mean)
    return [((found - exact).norm() / exact.norm()).item() for found in compared]


def section(record: Record) -> str:
    """All sources, and sums without any training."""
    batches = {each["name"]: each["batch_size"] for each in record["settings"]["sources"]}
    sources = [_source(each, batches[each["source"]]) for each in record["results"]]
    header = ["", "error of the 1st sum", "5th", f"{SUMS}th", f"of the mean of {SUMS}"]
    rows = [[e["row"], *(f"{error:.3f}" for error in e["errors"])] for e in record["compensation"]]
    sums = "### Sums of gradients that do not change"
    what = "32 nodes, normal values, RMS relative to the exact sum's:"
    return page.section(record, *sources, sums, what, page.table(header, rows))


def _source(result: Record, batch: int) -> str:
    changes = result["changes"]
    parts = [f"### {result['source']}", description(result, batch)]
    for caption, cells in _TABLES.items():
        if any(cell.key in changes for cell in cells):
            parts += [f"{caption}.", _table(changes, cells)]
    return "\n\n".join(parts + _verdict(changes))


def _table(changes: Record, cells: list[Cell]) -> str:
    lines = []
    for row, of_row in groupby(cells, lambda cell: cell.row):
        line, losses = [row], []
        for cell in of_row:
            accuracy, loss = _texts(changes.get(cell.key))
            line += [accuracy, f"{cell.paper:+.3f}"]
            losses.append(loss)
        lines.append([*line, " / ".join(losses)])
    nodes = sorted({cell.collectives.nodes for cell in cells})
    columns = [f"{number} nodes" for number in nodes] if len(nodes) > 1 else ["accuracy"]
    header = [text for column in columns for text in (f"{column}, %", "paper")]
    return page.table(["", *header, "loss, %"], lines)


def _verdict(changes: Record) -> list[str]:
    """How small a change this source can show."""
    rows = [changes[cell.key] for cell in CELLS[2:] if cell.key in changes]
    if not any(each["error"] for each in rows):  # one seed, or nothing trained yet
        return []
    middle, of_test, of_seeds = (
        median(each[name] for each in rows) for name in ("error", "test_error", "seed_error")
    )
    lines = []
    on_labels = "."
    if CONTROL.key in changes:
        control, labels = changes[CONTROL.key], changes["control on labels"]
        lines.append(
            f"- Control, full precision but sums in a ring's order: {_texts(control)[0]} %, "
            f"{control['flipped']:.2f} % of the decisions differ."
        )
        if labels["error"] != control["error"]:
            on_labels = (
                "; on labels instead of probabilities the control's would be "
                f"{labels['error']:.4f} %."
            )
    sure = sum(abs(each["accuracy"] + CRITERION) > 2 * each["error"] for each in rows)
    lines += [
        f"- Standard error of a row: median {middle:.4f} %, of which the test set has "
        f"{of_test:.4f} % and the seeds have {of_seeds:.4f} %{on_labels}",
        f"- Rows whose side of -{CRITERION} % is two standard errors sure: {sure} of {len(rows)}.",
    ]
    if middle > CRITERION / 2:
        more = (middle / (CRITERION / 2)) ** 2
        lines.append(
            f"- To halve the criterion's width with one standard error, a median row needs "
            f"{math.ceil(more):,} times as many seeds and test samples."
        )
    return ["\n".join(lines)]


def plot(path: Path, record: Record) -> None:
    """Draws our changes on the first source beside the paper's."""
    source, changes = record["results"][0]["source"], record["results"][0]["changes"]
    grid = {"nrows": 3, "sharex": True, "height_ratios": [len(c) for c in _TABLES.values()]}
    with page.figure(path, 9, 12, **grid) as (figure, axes):
        for axis, (caption, cells) in zip(axes[:, 0], _TABLES.items(), strict=True):
            places = range(len(cells))
            several = len({cell.collectives.nodes for cell in cells}) > 1
            names = [
                f"{cell.row}, {cell.collectives.nodes}" if several else cell.row for cell in cells
            ]
            axis.plot([cell.paper for cell in cells], places, "o", mfc="none", label="paper")
            ours = {p: changes[cells[p].key] for p in places if cells[p].key in changes}
            axis.errorbar(
                [each["accuracy"] for each in ours.values()],
                list(ours),
                xerr=[2 * each["error"] for each in ours.values()],
                fmt=".",
                label="ours, two standard errors",
            )
            axis.axvline(-CRITERION, color="grey", linestyle=":")
            axis.set_yticks(list(places), names, fontsize=7)
            axis.invert_yaxis()
            axis.set_title(caption, fontsize=9)
            axis.set_xscale("symlog", linthresh=CRITERION)
        labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(*labels, loc="outside upper center", ncols=2)
        axes[-1, 0].set_xlabel(f"change of the accuracy, % ({source})")


def _texts(delta: Record | None) -> tuple[str, str]:
    """Changes of the accuracy and of the loss."""
    if delta is None:
        return "-", "-"
    loss = "diverged" if delta["loss"] is None else f"{delta['loss']:+.2f}"
    return f"{delta['accuracy']:+.3f} ± {delta['spread']:.3f}", loss
