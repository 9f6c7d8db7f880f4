"""The study's tables and figure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from quantized.cells import NODES, Cell, all_cells
from quantized.compensation import ITERATIONS, relative_errors
from quantized.deltas import CRITERION, Delta, Deltas
from torchrec_bls.codecs.rows import Codec

Record = dict[str, Any]

_CAPTIONS = {
    2: "Table 2: quantized all-to-all (forward, backward), full-precision all-reduce",
    3: "Table 3: quantized all-reduce, full-precision all-to-all",
    4: "Table 4: both",
}


def section(record: Record) -> str:
    """Returns what stands between the page's markers."""
    deltas = Deltas(record)
    lines: list[str] = []
    for source in record["settings"]["sources"]:
        if deltas.baselines(source["name"]):
            lines += _source(deltas, source)
    lines += ["### Sums of gradients that do not change", "", *_compensation(), ""]
    where = record["environment"]
    lines += [
        f"*{where['cpu']}, {where['cores']} cores, torch {where['versions']['torch']}, commit "
        f"{where['commit']}, {where['date'][:10]}: `{where['command']}`*",
    ]
    return "\n".join(lines)


def _source(deltas: Deltas, source: dict[str, Any]) -> list[str]:
    name = source["name"]
    bases = deltas.baselines(name)
    base = bases[0]
    lines = [
        f"### {name}",
        "",
        f"{base['iterations']} iterations of {source['batch_size']} samples, "
        f"{base['test_rows']:,} samples to test on, {len(bases)} seeds. In full precision: "
        f"{_range([b['accuracy'] for b in bases], 4)} right, loss "
        f"{_range([b['loss'] for b in bases], 4)}; deciding for no click is right for "
        f"{max(base['click_rate'], 1 - base['click_rate']):.4f}"
        + (
            f", a model that knows the probabilities for {base['bayes_accuracy']:.4f} with loss "
            f"{base['bayes_loss']:.4f}."
            if "bayes_loss" in base
            else "."
        ),
        "",
    ]
    for table, caption in _CAPTIONS.items():
        cells = [cell for cell in all_cells() if cell.table == table]
        found = [cell for cell in cells if deltas.of(name, cell) is not None]
        if found:
            several = {cell.collectives.nodes for cell in cells} == set(NODES)
            lines += [f"{caption}.", "", *_table(deltas, name, cells, several), ""]
    return [*lines, *_verdict(deltas, name), ""]


def _table(deltas: Deltas, source: str, cells: list[Cell], several: bool) -> list[str]:
    columns = [f"{nodes} nodes" for nodes in NODES] if several else ["accuracy"]
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.row, []).append(cell)
    header = [""]
    for column in columns:
        header += [f"{column}, %", "paper"]
    lines = [_line([*header, "loss, %"]), _line(["---"] * (len(header) + 1))]
    for row, of_row in rows.items():
        texts = [row]
        losses = []
        for cell in of_row:
            delta = deltas.of(source, cell)
            texts += [_change(delta), f"{cell.paper:+.3f}"]
            losses.append("-" if delta is None else _loss(delta))
        lines.append(_line([*texts, " / ".join(losses)]))
    return lines


def _verdict(deltas: Deltas, source: str) -> list[str]:
    """How small a change this source can show."""
    control = all_cells()[1]
    found = deltas.of(source, control)
    errors = [
        delta
        for cell in all_cells()[2:]
        if (delta := deltas.of(source, cell)) is not None and cell.table in (2, 3, 4)
    ]
    ordered = sorted(delta.error for delta in errors)
    if not any(ordered):  # one seed, or nothing trained yet
        return []
    middle = ordered[len(ordered) // 2]
    decided = [delta for delta in errors if abs(delta.accuracy + CRITERION) > 2 * delta.error]
    lines = []
    on_labels = "."
    if found is not None:
        lines.append(
            f"- Control, full precision but sums in a ring's order: {_change(found)} %, "
            f"{found.flipped:.2f} % of the decisions differ."
        )
        labels = deltas.of(source, control, "_on_labels")
        assert labels is not None
        if labels.error != found.error:
            on_labels = (
                f"; on labels instead of probabilities the control's would be {labels.error:.4f} %."
            )
    lines += [
        f"- Standard error of a row: median {middle:.4f} %, of which the test set has "
        f"{_median([delta.test_error for delta in errors]):.4f} % and the seeds have "
        f"{_median([delta.seed_error for delta in errors]):.4f} %{on_labels}",
        f"- Rows whose side of -{CRITERION} % is two standard errors sure: {len(decided)} of "
        f"{len(errors)}.",
    ]
    if middle > CRITERION / 2:
        more = (middle / (CRITERION / 2)) ** 2
        lines.append(
            f"- To halve the criterion's width with one standard error, a median row needs "
            f"{math.ceil(more):,} times as many seeds and test samples."
        )
    return lines


def plot(path: Path, record: Record) -> None:
    """Draws our changes on the first source beside the paper's."""
    from matplotlib.figure import Figure

    deltas = Deltas(record)
    source = record["settings"]["sources"][0]["name"]
    figure = Figure(figsize=(9, 12), layout="constrained")
    tables = [[cell for cell in all_cells() if cell.table == table] for table in _CAPTIONS]
    axes = figure.subplots(3, 1, sharex=True, height_ratios=[len(cells) for cells in tables])
    for axis, cells, caption in zip(axes, tables, _CAPTIONS.values(), strict=True):
        places = range(len(cells))
        names = [
            cell.row if cell.table == 2 else f"{cell.row}, {cell.collectives.nodes}"
            for cell in cells
        ]
        axis.plot([cell.paper for cell in cells], places, "o", mfc="none", label="paper")
        ours = [(place, delta) for place in places if (delta := deltas.of(source, cells[place]))]
        axis.errorbar(
            [delta.accuracy for _, delta in ours],
            [place for place, _ in ours],
            xerr=[2 * delta.error for _, delta in ours],
            fmt=".",
            label="ours, two standard errors",
        )
        axis.axvline(-CRITERION, color="grey", linestyle=":")
        axis.set_yticks(list(places), names, fontsize=7)
        axis.invert_yaxis()
        axis.set_title(caption, fontsize=9)
        axis.set_xscale("symlog", linthresh=CRITERION)
    labels = axes[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside upper center", ncols=2)
    axes[-1].set_xlabel(f"change of the accuracy, % ({source})")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _compensation() -> list[str]:
    header = ["", "error of the 1st sum", "5th", f"{ITERATIONS}th", f"of the mean of {ITERATIONS}"]
    lines = [
        "32 nodes, normal values, RMS relative to the exact sum's:",
        "",
        _line(header),
        _line(["---"] * len(header)),
    ]
    for algorithm, name in (("ring", "ring"), ("recursive_doubling", "RD")):
        for codec in (Codec.UINT8, Codec.UINT4, Codec.UINT2):
            for compensated in (False, True):
                errors, of_mean = relative_errors(32, algorithm, codec, compensated)
                row = f"{codec.name.lower()} {name}{' EC' if compensated else ''}"
                shown = [errors[0], errors[4], errors[-1], of_mean]
                lines.append(_line([row, *(f"{error:.3f}" for error in shown)]))
    return lines


def _change(delta: Delta | None) -> str:
    return "-" if delta is None else f"{delta.accuracy:+.3f} ± {delta.spread:.3f}"


def _loss(delta: Delta) -> str:
    return "diverged" if delta.loss is None else f"{delta.loss:+.2f}"


def _range(values: list[float | None], digits: int) -> str:
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return "not finite for some seeds"
    return f"{min(finite):.{digits}f} to {max(finite):.{digits}f}"


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _line(texts: list[str]) -> str:
    return f"| {' | '.join(texts)} |"
