"""The study's tables and figure."""

import math
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import page
from benchmarks.quantized.cells import NODES, Cell, all_cells
from benchmarks.quantized.compensation import ITERATIONS
from benchmarks.quantized.summary import CRITERION

Record = dict[str, Any]

_CAPTIONS = {
    2: "Table 2: quantized all-to-all (forward, backward), full-precision all-reduce",
    3: "Table 3: quantized all-reduce, full-precision all-to-all",
    4: "Table 4: both",
}


def section(record: Record) -> str:
    """All sources, and sums without any training."""
    parts: list[str] = []
    batches = {each["name"]: each["batch_size"] for each in record["settings"]["sources"]}
    for result in record["results"]:
        parts += _source(result, batches[result["source"]])
    header = ["", "error of the 1st sum", "5th", f"{ITERATIONS}th", f"of the mean of {ITERATIONS}"]
    rows = [[e["row"], *(f"{error:.3f}" for error in e["errors"])] for e in record["compensation"]]
    parts += [
        "### Sums of gradients that do not change",
        "32 nodes, normal values, RMS relative to the exact sum's:",
        page.table(header, rows),
        page.conditions(record),
    ]
    return "\n\n".join(parts)


def _source(result: Record, batch: int) -> list[str]:
    base, changes = result["baseline"], result["changes"]
    knowing = "."
    if "bayes_loss" in base:
        knowing = (
            f", a model that knows the probabilities for {base['bayes_accuracy']:.4f} with loss "
            f"{base['bayes_loss']:.4f}."
        )
    right, loss = _range(base["accuracy"]), _range(base["loss"])
    parts = [
        f"### {result['source']}",
        f"{base['iterations']} iterations of {batch} samples, {base['test_rows']:,} samples to "
        f"test on, {len(base['accuracy'])} seeds. In full precision: {right} right, loss {loss}; "
        "deciding for no click is right for "
        f"{max(base['click_rate'], 1 - base['click_rate']):.4f}{knowing}",
    ]
    for table, caption in _CAPTIONS.items():
        cells = [cell for cell in all_cells() if cell.table == table]
        if any(cell.key in changes for cell in cells):
            parts += [f"{caption}.", _table(changes, cells)]
    return [*parts, *_verdict(changes)]


def _table(changes: Record, cells: list[Cell]) -> str:
    several = {cell.collectives.nodes for cell in cells} == set(NODES)
    columns = [f"{nodes} nodes" for nodes in NODES] if several else ["accuracy"]
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.row, []).append(cell)
    lines = []
    for row, of_row in rows.items():
        found = [changes.get(cell.key) for cell in of_row]
        texts = [row]
        for cell, delta in zip(of_row, found, strict=True):
            texts += [_change(delta), f"{cell.paper:+.3f}"]
        lines.append([*texts, " / ".join(map(_loss, found))])
    header = [text for column in columns for text in (f"{column}, %", "paper")]
    return page.table(["", *header, "loss, %"], lines)


def _verdict(changes: Record) -> list[str]:
    """How small a change this source can show."""
    control, labels = changes.get(all_cells()[1].key), changes.get("control on labels")
    rows = [changes[cell.key] for cell in all_cells()[2:] if cell.key in changes]
    if not any(each["error"] for each in rows):  # one seed, or nothing trained yet
        return []
    middle, of_test, of_seeds = (
        median(each[name] for each in rows) for name in ("error", "test_error", "seed_error")
    )
    lines = []
    on_labels = "."
    if control is not None:
        lines.append(
            f"- Control, full precision but sums in a ring's order: {_change(control)} %, "
            f"{control['flipped']:.2f} % of the decisions differ."
        )
        if labels["error"] != control["error"]:
            on_labels = (
                "; on labels instead of probabilities the control's would be "
                f"{labels['error']:.4f} %."
            )
    sure = [each for each in rows if abs(each["accuracy"] + CRITERION) > 2 * each["error"]]
    lines += [
        f"- Standard error of a row: median {middle:.4f} %, of which the test set has "
        f"{of_test:.4f} % and the seeds have {of_seeds:.4f} %{on_labels}",
        f"- Rows whose side of -{CRITERION} % is two standard errors sure: {len(sure)} of "
        f"{len(rows)}.",
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
    tables = [[cell for cell in all_cells() if cell.table == table] for table in _CAPTIONS]
    grid = {"nrows": 3, "sharex": True, "height_ratios": [len(cells) for cells in tables]}
    with page.figure(path, 9, 12, **grid) as (figure, axes):
        for axis, cells, caption in zip(axes[:, 0], tables, _CAPTIONS.values(), strict=True):
            places = range(len(cells))
            nodes = [f", {cell.collectives.nodes}" * (cell.table != 2) for cell in cells]
            names = [f"{cell.row}{of}" for cell, of in zip(cells, nodes, strict=True)]
            axis.plot([cell.paper for cell in cells], places, "o", mfc="none", label="paper")
            known = [place for place in places if cells[place].key in changes]
            ours = [changes[cells[place].key] for place in known]
            axis.errorbar(
                [each["accuracy"] for each in ours],
                known,
                xerr=[2 * each["error"] for each in ours],
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


def _change(delta: Record | None) -> str:
    return "-" if delta is None else f"{delta['accuracy']:+.3f} ± {delta['spread']:.3f}"


def _loss(delta: Record | None) -> str:
    if delta is None:
        return "-"
    return "diverged" if delta["loss"] is None else f"{delta['loss']:+.2f}"


def _range(values: list[float | None]) -> str:
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return "not finite for some seeds"
    return f"{min(finite):.4f} to {max(finite):.4f}"
