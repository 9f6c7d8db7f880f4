"""The whole DLRM of the demo in the two synthetic settings of the BLS paper (sec. V-E)."""

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from demo.bounded_lag import bounded_lag
from demo.measure import MEASURED, measure
from demo.settings import Settings
from demo.summary import summarize
from demo.variants import Variant, torchrec_on_gloo

from benchmarks.harness.statistics import Spread
from torchrec_bls.processes import run

# Pooled sums of row-wise tables have more than one term only with several ids a table, and the
# order in which gloo adds them up may differ.
_TOLERANCE = 1e-4
_DEADLINE_S = 3600.0

#: Random delays, Criteo's one id a table: what the demo runs.
DELAYS = Settings(
    **{"data": None, "ranks": 4, "bounds": (0, 1, 2, 4, 8), "steps": 100, "runs": 3, "batch": 128},
    **{"max_delay": 0.010, "embedding_dim": 64, "seed": 0},
)
#: No delays, 1 to 100 ids a table, so that ranks differ in lookups and message sizes.
HETEROGENEOUS = replace(DELAYS, bounds=(0, 1, 2, 4), steps=30, max_delay=0.0, max_ids_per_table=100)


def variants(settings: Settings) -> list[Variant]:
    """TorchRec on gloo, then the bounds."""
    return [torchrec_on_gloo(), *(bounded_lag(k, settings.batch) for k in settings.bounds)]


def measure_dlrm(settings: Settings) -> list[dict[str, Any]]:
    """Runs the demo's measurement; one entry for each line of its table.

    Raises:
        RuntimeError: a bound gives other logits than TorchRec.
    """
    with tempfile.TemporaryDirectory(prefix="bls-delays-") as name:
        folder = Path(name)
        ranks = {"deadline_s": _DEADLINE_S, "start_method": "spawn"}
        run(settings.ranks, measure, folder, settings, variants, **ranks)
        entries = json.loads((folder / MEASURED).read_text())
    return [_result(entry, exact=settings.max_ids_per_table == 1) for entry in entries]


def _result(entry: dict[str, Any], *, exact: bool) -> dict[str, Any]:
    line = summarize(entry)
    equal = line.equals_torchrec if exact else line.max_difference < _TOLERANCE
    if not (equal and line.equals_first_bound):
        raise RuntimeError(
            f"{line.name}: logits differ from TorchRec's by up to {line.max_difference:.3g}, "
            f"and are {'' if line.equals_first_bound else 'not '}those of the first bound"
        )
    runs = zip(*(rank["times"] for rank in entry["ranks"]), strict=True)
    steps = len(entry["ranks"][0]["times"][0]["slept"]) - 1
    per_step = [1e3 * fmean(t["total"] for t in run) / steps for run in runs]
    return {**asdict(line), "ms_per_step": Spread(per_step)}
