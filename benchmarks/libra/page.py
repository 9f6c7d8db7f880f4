"""The page's tables, what the printed numbers imply of each other, and Fig. 9."""

from pathlib import Path
from typing import Any

from benchmarks.harness import page
from benchmarks.harness.record import Record
from benchmarks.libra.fit import PRINTED
from benchmarks.libra.systems import SYSTEMS, THREADS

_COLOURS = ("gray", "brown", "orange", "green", "blue", "purple", "black")
_OVER = ("H-N", "MG-N", "SE", "one r")


def implied() -> str:
    """implied.md with its numbers.

    With f what an iteration takes beside LIBRA's backward, over that, and t a baseline's backward
    over LIBRA's, throughput gains (t - 1) / (1 + f) and the backward is shorter by 1 - 1 / t.
    """
    printed = {text: value / 100 for text, value in PRINTED.items()}
    rest = {}
    for base in ("SE", "H-N", "MG-N"):
        for end in ("least", "most"):
            t = 1 / (1 - printed[f"7: LIBRA's backward under {base}, {end}"])
            rest[f"{base}, {end}"] = (t - 1) / printed[
                f"6: LIBRA's throughput over {base}, {end}"
            ] - 1
    over = [printed[f"7: {name}'s backward over MG-CF, mean"] for name in ("MG-N", "LIBRA")]
    gaps = [printed[f"6: {name}'s throughput under MG-CF, mean"] for name in ("MG-N", "LIBRA")]
    of_gaps = [each / gap - 1 - each for each, gap in zip(over, gaps, strict=True)]
    gained = printed["6: LIBRA-M's throughput over MG-N, mean"]
    of_m = (1 + over[0] - gained * of_gaps[0]) / (1 + gained)
    most = (over[0] - over[1]) / printed["7: LIBRA's residual communication under MG-N, mean"]
    less = most * printed["7: LIBRA-M's residual communication under MG-N, mean"]
    numbers = {
        "rest": rest,
        "printed": 1 / (1 - printed["7: LIBRA's backward under MG-N, most"]) - 1,
        "half": 1.5 * printed["6: LIBRA's throughput over MG-N, most"],
        "gaps": of_gaps,
        "m": [
            1 - of_m / (1 + over[0]),
            less / (1 + over[0]),
            (1 + over[0] - of_m - less) / (1 + over[0] - most),
        ],
    }
    return Path(__file__).with_name("implied.md").read_text().format(**numbers).rstrip()


def section(record: Record) -> str:
    results, ms = record["results"], record["results"]["shared_cores"]
    ours = (each["percent"] for each in results["fits"])
    fits = [
        [text, f"{printed:.1f}", *(f"{each:.1f}" for each in found)]
        for (text, printed), *found in zip(PRINTED.items(), *ours, strict=True)
    ]
    at_8 = [
        [
            e["network"],
            *(f"{e['ms'][name]:.1f}" for name in SYSTEMS),
            f"{1 - e['ms']['LIBRA'] / e['ms']['one r']:.1%}",
        ]
        for e in results["at_8"]
    ]
    grid = [
        [e["network"], e["groups"], *(f"{over:.2f} %" for over in e["over"])]
        for e in results["at_8"]
    ]
    return page.section(
        record,
        "### Whether the printed numbers hold together",
        page.table(["figure, %", "paper", "rest fitted", "rest 0.5"], fits),
        page.table(*_parameters(results["fits"])),
        "### The missing baseline: backward on 8 nodes, ms",
        page.table(["", *SYSTEMS, "LIBRA under one r"], at_8),
        "### Fig. 9: throughput of a node over that of one alone",
        page.table(*_last(results["scaling"], record["settings"]["nodes"][-1])),
        "### Over the optimum",
        page.table(
            ["", "its groups", "Algorithm 1, K = 10, Z = 150", "MG-WFBP, no contention"], grid
        ),
        "### Where Assumption 3 fails",
        "Eight layers of 10 ms and as long a transmission; together, each has a third of its pace. "
        f"A group a layer takes {ms['given']:.1f} ms by Eq. 17, and {ms['held']:.1f} ms if all are "
        f"held to the end. Algorithm 1 takes {ms['free']:.1f} ms, the optimum {ms['best']:.1f} ms.",
    )


def _parameters(fits: list[Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for each, name in zip(fits, ("fitted", "0.5"), strict=True):
        alpha, gigabytes, gamma, nccl, window = each["cluster"]
        shared = f"{alpha:.1f}, {gigabytes:.2f}, {gamma:.3f}, {THREADS[nccl]}, {window / 1e3:g}"
        for network, us, *others in each["networks"]:
            numbers = (f"{other:.2f}" for other in (others[0], 1 - others[1] * 2048, others[2]))
            rows.append([network, name, f"{us / 1e3:.0f}", *numbers, shared])
    header = ["network", "rest", "backward, ms", "rest over it", "compute's rate, 2,048 threads"]
    units = "alpha, µs; GB/s; gamma 3; NCCL's threads; Horovod, ms"
    return [*header, "transmission's rate", units], rows


def _last(scaling: list[Any], nodes: int) -> tuple[list[str], list[list[str]]]:
    rows = []
    for each in scaling:
        last = {name: values[-1] for name, values in each["relative"].items()}
        name = f"{each['network']}, {'tree' if each['tree'] else 'ring'}"
        gains = [f"{last['LIBRA'] / last[other] - 1:+.1%}" for other in _OVER]
        rows.append([name, *(f"{last[system]:.3f}" for system in SYSTEMS), *gains])
    return [f"{nodes:,} nodes", *SYSTEMS, *(f"LIBRA over {name}" for name in _OVER)], rows


def plot(path: Path, record: Record) -> None:
    """Draws throughput of a node over that of one alone, by ring and, dashed, by tree."""
    nodes, scaling = record["settings"]["nodes"], record["results"]["scaling"]
    names = list(dict.fromkeys(each["network"] for each in scaling))
    with page.figure(path, 11, 7, nrows=2, ncols=2, sharex=True, sharey=True) as (figure, axes):
        for each in scaling:
            axis = axes.flat[names.index(each["network"])]
            for (system, values), colour in zip(each["relative"].items(), _COLOURS, strict=True):
                label = None if each["tree"] else system
                axis.plot(nodes, values, "--" if each["tree"] else "-", color=colour, label=label)
            axis.set_xscale("log", base=2)
            axis.set(title=each["network"])
            axis.grid(alpha=0.3)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=7)
        figure.supxlabel("nodes")
