"""How well the cost models predict what they have not seen, beside other models.

Lookups: the configurations of a calibration are split six times into 80 % that models are fitted to
and 20 % that nothing is fitted to or chosen on. Collectives: curves are fitted to, and chosen on,
sizes that double, and predict sizes that were drawn, even and uneven. Every figure stands beside
the retest floor, the difference between two measurements of the same.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import numpy.typing as npt
from torchrec_bls.sharding.calibration.fit import (
    collectives_of,
    fit_collective,
    lookup_retest_percent,
    lookup_time,
    lookups_of,
    retest_percent,
)
from torchrec_bls.sharding.calibration.records import read_records
from torchrec_bls.sharding.costs.fitting.accuracy import bias_percent, gmae_percent, mape_percent
from torchrec_bls.sharding.costs.fitting.collectives import fit_alpha_beta, held_out_uneven_us
from torchrec_bls.sharding.costs.fitting.lookups import LookupSamples, fit_lookup, samples_of
from torchrec_bls.sharding.costs.lookup.features import as_columns
from torchrec_bls.sharding.costs.lookup.model import LookupModel
from tqdm import tqdm

from benchmarks.harness import record
from benchmarks.planner import measurements
from benchmarks.planner.baselines import linear, perceptron, roofline, torchrec_estimator
from benchmarks.planner.models_page import OURS, OURS_WITH_FACTORS, section

Floats = npt.NDArray[np.float64]

SPLITS = 6
HELD_OUT = 0.2


def main() -> None:
    """Runs the study."""
    parser = record.parser(__doc__)
    parser.add_argument(
        "--measurements", type=Path, help="of `torchrec-bls calibrate`; ours unless given"
    )
    options = parser.parse_args()
    before = record.environment()
    if options.measurements:
        head, entries = read_records(options.measurements)
    else:
        head, entries = measurements.read()
    results = {
        "machine": head["machine"],
        "retest_percent": retest_percent(entries),
        "lookup_time": lookup_time(entries),
        "lookups": lookup_results(entries),
        "collectives": collective_results(entries),
    }
    settings = head["settings"]
    record.publish(options.json, "performance-models", before, settings, results, section)
    if options.json and options.measurements:
        measurements.write(
            record.raw_path(options.json.with_name("calibration.json")), head, entries
        )


def splits(samples: LookupSamples) -> Iterator[tuple[LookupSamples, LookupSamples]]:
    """Fitted and held-out ops of each split."""
    ops = len(samples.measured_us)
    for split in range(SPLITS):
        shuffled = np.random.default_rng(split).permutation(ops)
        held_out = round(HELD_OUT * ops)
        yield samples.take(np.sort(shuffled[held_out:])), samples.take(np.sort(shuffled[:held_out]))


def lookup_results(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Scores of each model by pooled/unpooled and direction."""
    results: dict[str, Any] = {}
    measured, time = list(lookups_of(entries).values()), lookup_time(entries)
    for pooled in (True, False):
        for direction in ("forward", "backward"):
            samples = samples_of(measured, direction, pooled, time)
            models = _models(direction, pooled)
            predicted: dict[str, list[Floats]] = {
                name: [] for name in [*models, OURS, OURS_WITH_FACTORS]
            }
            labels, covered = [], []
            what = f"{'pooled' if pooled else 'unpooled'} {direction}"
            for fitted, tested in tqdm(splits(samples), total=SPLITS, desc=what):
                labels.append(tested.measured_us)
                for name, model in models.items():
                    predicted[name].append(model(fitted, tested))
                ours = fit_lookup(fitted)
                predicted[OURS].append(tested.predicted_us(ours))
                covered.append(coverage(ours, tested))
                with_factors = fit_lookup(fitted, reuse_factors=True)
                predicted[OURS_WITH_FACTORS].append(tested.predicted_us(with_factors))
            results[what] = {
                "ops": len(samples.measured_us),
                "models": {name: score(each, labels) for name, each in predicted.items()},
                "interval_coverage": float(np.mean(covered)),
                "retest_gmae_percent": lookup_retest_percent(entries, direction, time, pooled),
            }
    return results


def coverage(model: LookupModel, tested: LookupSamples) -> float:
    """The share of held-out ops within the model's interval."""
    inside = []
    for op, measured in enumerate(tested.measured_us):
        works = [w for w, of in zip(tested.works, tested.op_of, strict=True) if of == op]
        estimate = model.estimate(as_columns(works))
        inside.append(estimate.low <= measured <= estimate.high)
    return float(np.mean(inside))


def score(predicted: list[Floats], measured: list[Floats]) -> dict[str, Any]:
    """Means over the splits, and each split's GMAE."""
    errors = {"gmae": gmae_percent, "mape": mape_percent, "bias": bias_percent}
    splits = {
        name: [error(p, m) for p, m in zip(predicted, measured, strict=True)]
        for name, error in errors.items()
    }
    means = {f"{name}_percent": float(np.mean(each)) for name, each in splits.items()}
    return {**means, "gmae_percent_by_split": splits["gmae"]}


def collective_results(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Scores of curves that are fitted to the sizes that double, on the other sizes.

    How unevenness counts is fitted to all uneven messages but the one that it is tested on. "all"
    are the scores of all messages of an operation, by the models that profiles hold.
    """
    results: dict[str, Any] = {}
    together: defaultdict[str, list[tuple[Floats, Floats]]] = defaultdict(list)
    for key, samples in collectives_of(entries).items():
        grid = samples.role == "grid"
        sizes, times = samples.largest_bytes[grid], samples.measured_us[grid]
        kept = fit_collective(key, samples).curve
        relative = fit_alpha_beta(sizes, times)
        matrix = np.stack([np.ones_like(sizes), sizes], axis=1)
        ordinary = np.linalg.lstsq(matrix, times, rcond=None)[0]
        for kind in ("between", "uneven"):
            tested = samples.role == kind
            if not tested.any():
                continue
            mean, largest = samples.mean_bytes[tested], samples.largest_bytes[tested]
            measured = samples.measured_us[tested]
            predicted = {
                "kept, largest rank": kept.microseconds(largest),
                "alpha-beta, relative": relative.microseconds(largest),
                "alpha-beta, ordinary": np.maximum(ordinary[0] + ordinary[1] * largest, 1.0),
            }
            if kind == "uneven":
                predicted = {"kept": held_out_uneven_us(kept, mean, largest, measured), **predicted}
            ours = predicted.get("kept", predicted["kept, largest rank"])
            together[f"{key[0]}, {kind}"].append((ours, measured))
            before, *after = samples.visits_us[:, tested]
            results[f"{' '.join(map(str, key))} ranks, {kind}"] = {
                "messages": int(tested.sum()),
                "curve": type(kept).__name__,
                "retest_gmae_percent": gmae_percent(after[-1], before) if after else None,
                "models": {name: score([each], [measured]) for name, each in predicted.items()},
            }
    every = {
        name: score(*([np.concatenate(each)] for each in zip(*pairs, strict=True)))
        for name, pairs in together.items()
    }
    return {"by_curve": results, "all": every}


def _models(direction: str, pooled: bool) -> dict[str, Any]:
    models = {
        "linear, no reuse": linear,
        "roofline, unique rows": roofline,
        "MLP, reuse factors (the paper's)": perceptron(reuse_factors=True),
        "MLP, unique rows": perceptron(reuse_factors=False),
    }
    if not pooled:  # TorchRec's estimator is asked about bags
        return models
    return {
        "TorchRec's estimator, scale": torchrec_estimator(direction, constant=False),
        "TorchRec's estimator, scale and constant": torchrec_estimator(direction, constant=True),
        **models,
    }


if __name__ == "__main__":
    main()
