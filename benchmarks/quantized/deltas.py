"""What the cells of a record say about accuracy, and how surely."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from quantized.cells import Cell, all_cells

Record = dict[str, Any]

#: The paper accepts a fall of the accuracy by so many percent.
CRITERION = 0.02


@dataclass(frozen=True)
class Delta:
    """Changes against the baselines of the same seeds, in percent of these (equation 2).

    Attributes:
        accuracy: mean over the seeds.
        spread: standard deviation over the seeds, 0 with one.
        seed_error: standard error of the mean because of the seeds.
        test_error: standard error because of the finite test set, the same for all seeds.
        loss: mean change of the loss; None if one was not finite, the baseline's included.
        flipped: percent of the decisions that differ from the baseline's.
        seeds: how many.
    """

    accuracy: float
    spread: float
    seed_error: float
    test_error: float
    loss: float | None
    flipped: float
    seeds: int

    @property
    def error(self) -> float:
        """Standard error of the accuracy's change."""
        return math.hypot(self.seed_error, self.test_error)


class Deltas:
    """The changes that a record holds, also of a study that has not ended.

    Args:
        record: the study's JSON.
    """

    def __init__(self, record: Record) -> None:
        self._results: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for result in record["results"]:
            self._results.setdefault((result["source"], result["cell"]), []).append(result)

    def baselines(self, source: str) -> list[dict[str, Any]]:
        """Returns the results in full precision, by seed."""
        found = self._results.get((source, all_cells()[0].key), [])
        return sorted(found, key=lambda result: result["seed"])

    def of(self, source: str, cell: Cell, suffix: str = "") -> Delta | None:
        """Returns the change of a cell.

        Args:
            source: of the samples.
            cell: that was trained.
            suffix: "" counts decisions by the probability that they are right, where that is
                known; "_on_labels" by the labels.
        """
        results = self._results.get((source, cell.key))
        if not results:
            return None
        bases = {base["seed"]: base for base in self.baselines(source)}
        changes, errors, losses = [], [], []
        for result in results:
            base = bases[result["seed"]]
            accuracy = base[f"accuracy{suffix}"]
            changes.append(100 * result[f"difference{suffix}"] / accuracy)
            errors.append(100 * result[f"test_error{suffix}"] / accuracy)
            if result["loss"] is not None and base["loss"] is not None:
                losses.append(100 * (result["loss"] / base["loss"] - 1))
        spread = statistics.stdev(changes) if len(changes) > 1 else 0.0
        return Delta(
            accuracy=statistics.mean(changes),
            spread=spread,
            seed_error=spread / math.sqrt(len(changes)),
            test_error=statistics.mean(errors),
            loss=statistics.mean(losses) if len(losses) == len(results) else None,
            flipped=100 * statistics.mean(result["flipped"] for result in results),
            seeds=len(changes),
        )
