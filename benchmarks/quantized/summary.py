"""What a study says about accuracy, and how surely."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.quantized.cells import all_cells
from benchmarks.quantized.compensation import relative_errors
from torchrec_bls.codecs.rows import Codec

Record = dict[str, Any]

#: The paper accepts a fall of the accuracy by so many percent.
CRITERION = 0.02


def summarize(raw: Record) -> Record:
    """The record of a study, also of one that has not ended: each source's baseline and changes."""
    results = []
    for source in raw["settings"]["sources"]:
        trained = [each for each in raw["results"] if each["source"] == source["name"]]
        bases = {each["seed"]: each for each in trained if each["cell"] == all_cells()[0].key}
        if not bases:
            continue
        by_cell: dict[str, list[Record]] = {}
        for each in trained:
            if each["cell"] != all_cells()[0].key:
                by_cell.setdefault(each["cell"], []).append(each)
        one = next(iter(bases.values()))
        known = ("iterations", "test_rows", "click_rate", "bayes_accuracy", "bayes_loss")
        baseline = {name: one[name] for name in known if name in one}
        baseline |= {name: [base[name] for base in bases.values()] for name in ("accuracy", "loss")}
        changes = {cell: change(of_cell, bases) for cell, of_cell in by_cell.items()}
        control = all_cells()[1].key
        if control in by_cell:
            changes["control on labels"] = change(by_cell[control], bases, "_on_labels")
        results.append({"source": source["name"], "baseline": baseline, "changes": changes})
    return {**raw, "results": results, "compensation": _compensation()}


def change(results: list[Record], bases: dict[int, Record], suffix: str = "") -> Record:
    """Changes of a cell against the baselines of the same seeds, in percent of these (equation 2).

    Args:
        results: of the cell, by seed.
        bases: the baselines' by seed.
        suffix: "" counts decisions by the probability that they are right, where that is known;
            "_on_labels" by the labels.

    Returns:
        accuracy: mean over the seeds. spread: standard deviation over the seeds, 0 with one.
        seed_error: standard error of the mean because of the seeds. test_error: standard error
        because of the finite test set, the same for all seeds. error: both. loss: mean change of
        the loss; None if one was not finite, the baseline's included. flipped: percent of the
        decisions that differ from the baseline's. seeds: how many.
    """

    def percent(of: Callable[[Record, Record], float]) -> list[float]:
        return [100 * of(result, bases[result["seed"]]) for result in results]

    changes = percent(lambda r, base: r[f"difference{suffix}"] / base[f"accuracy{suffix}"])
    errors = percent(lambda r, base: r[f"test_error{suffix}"] / base[f"accuracy{suffix}"])
    finite = all(r["loss"] is not None and bases[r["seed"]]["loss"] is not None for r in results)
    several = len(changes) > 1
    seed_error = float(stats.sem(changes)) if several else 0.0
    return {
        "accuracy": float(np.mean(changes)),
        "spread": float(np.std(changes, ddof=1)) if several else 0.0,
        "seed_error": seed_error,
        "test_error": float(np.mean(errors)),
        "error": math.hypot(seed_error, float(np.mean(errors))),
        "loss": np.mean(percent(lambda r, b: r["loss"] / b["loss"] - 1)) if finite else None,
        "flipped": float(np.mean(percent(lambda r, _: r["flipped"]))),
        "seeds": len(changes),
    }


@cache
def _compensation() -> list[Record]:
    return [
        {
            "row": f"{codec.name.lower()} {name}{' EC' if compensated else ''}",
            "errors": relative_errors(32, algorithm, codec, compensated),
        }
        for algorithm, name in (("ring", "ring"), ("recursive_doubling", "RD"))
        for codec in (Codec.UINT8, Codec.UINT4, Codec.UINT2)
        for compensated in (False, True)
    ]
