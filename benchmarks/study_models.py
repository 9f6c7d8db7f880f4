"""How well the cost models predict what they have not seen, beside other models.

Lookups: the configurations of a calibration are split six times into 80 % that models are fitted to
and 20 % that nothing is fitted to or chosen on. Collectives: the profile's curves against other
sizes, measured by this script. Every figure stands beside the retest floor, the difference between
two measurements of the same.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import numpy.typing as npt
from common import ROOT, environment, write_json
from model_baselines import linear, perceptron, roofline, torchrec_estimator
from model_report import write_report
from torchrec_bls.sharding.accuracy import bias_percent, gmae_percent, mape_percent
from torchrec_bls.sharding.calibration.collectives import CollectiveTask, measure_collectives
from torchrec_bls.sharding.calibration.fit import (
    collectives_of,
    fit_profile,
    lookups_of,
    retest_percent,
)
from torchrec_bls.sharding.calibration.messages import messages
from torchrec_bls.sharding.calibration.records import read_records
from torchrec_bls.sharding.collective_fit import fit_alpha_beta
from torchrec_bls.sharding.lookup_features import as_columns
from torchrec_bls.sharding.lookup_fit import LookupSamples, fit_lookup, samples_of
from torchrec_bls.sharding.lookup_model import LookupModel
from torchrec_bls.sharding.machine import Machine
from tqdm import tqdm

Floats = npt.NDArray[np.float64]

SPLITS = 6
HELD_OUT = 0.2
TEST_SEED = 1
OURS = "analytic x trees, unique rows (ours)"
OURS_WITH_FACTORS = "analytic x trees, reuse factors (ours)"


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--measurements",
        type=Path,
        required=True,
        help=".measurements.jsonl of `torchrec-bls calibrate`",
    )
    parser.add_argument(
        "--tests", type=Path, required=True, help="measured messages, made if absent"
    )
    parser.add_argument("--test-seconds", type=float, default=20.0, help="for each group of ranks")
    parser.add_argument("--json", type=Path, default=ROOT / "out/study/models.json")
    parser.add_argument("--report", type=Path, help="a page to write the tables into")
    options = parser.parse_args()
    started_in = environment()
    head, entries = read_records(options.measurements)
    if not options.tests.exists():
        measure_tests(options.tests, entries, head["settings"], options.test_seconds)
    tests = read_tests(options.tests)
    results = {
        "retest_percent": retest_percent(entries),
        "lookups": lookup_results(entries),
        "collectives": collective_results(entries, tests, head),
    }
    write_json(options.json, "performance-models", started_in, head["settings"], results)
    write_report(results, head, options.report)


def measure_tests(
    path: Path, entries: list[dict[str, Any]], settings: dict[str, Any], seconds: float
) -> None:
    """Measures messages of other sizes than the calibration's, in two visits."""
    import json

    groups = [(backend, world) for _, backend, world in collectives_of(entries)]
    tasks = []
    for backend, world_size in sorted(set(groups)):
        drawn = messages(
            world_size,
            seed=TEST_SEED,
            memory_bytes=settings["memory_bytes"],
            between=16,
            uneven=16,
        )
        todo = tuple(each for each in drawn if each.role != "grid")
        tasks.append(CollectiveTask(backend, world_size, todo, seconds / 2))
    measured = []
    for visit in range(2):
        for task, each in zip(tasks, measure_collectives(tasks), strict=True):
            measured.append(
                {
                    "kind": "collectives",
                    "backend": task.backend,
                    "world_size": task.world_size,
                    "visit": visit,
                    "messages": each,
                }
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in measured))


def read_tests(path: Path) -> list[dict[str, Any]]:
    """Reads what `measure_tests` wrote."""
    import json

    return [json.loads(line) for line in path.read_text().splitlines()]


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
    measured = list(lookups_of(entries).values())
    for pooled in (True, False):
        for direction in ("forward", "backward"):
            samples = samples_of(measured, direction, pooled)
            models = _models(direction) if pooled else {}
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
    gmae = [gmae_percent(p, m) for p, m in zip(predicted, measured, strict=True)]
    mape = [mape_percent(p, m) for p, m in zip(predicted, measured, strict=True)]
    bias = [bias_percent(p, m) for p, m in zip(predicted, measured, strict=True)]
    return {
        "gmae_percent": float(np.mean(gmae)),
        "mape_percent": float(np.mean(mape)),
        "bias_percent": float(np.mean(bias)),
        "gmae_percent_by_split": gmae,
    }


def collective_results(
    entries: list[dict[str, Any]], tests: list[dict[str, Any]], head: dict[str, Any]
) -> dict[str, Any]:
    """Scores of the profile's curves and of alpha-beta on sizes that nothing was fitted to."""
    profile = fit_profile(
        entries,
        name="study",
        machine=Machine(**head["machine"]),
        optimizer=head["settings"]["optimizer"],
        measured_at="",
    )
    calibrated, measured = collectives_of(entries), collectives_of(tests)
    results: dict[str, Any] = {}
    for key, samples in measured.items():
        even = calibrated[key].role != "uneven"
        sizes, times = calibrated[key].message_bytes[even], calibrated[key].measured_us[even]
        matrix = np.stack([np.ones_like(sizes), sizes], axis=1)
        start, per_byte = np.linalg.lstsq(matrix, times, rcond=None)[0]
        model = profile.collectives[key]
        curves = {
            f"kept ({type(model.curve).__name__})": model.curve.microseconds(samples.message_bytes),
            "alpha-beta, relative": fit_alpha_beta(sizes, times).microseconds(
                samples.message_bytes
            ),
            "alpha-beta, ordinary": np.maximum(start + per_byte * samples.message_bytes, 1.0),
        }
        for kind in ("between", "uneven"):
            chosen = samples.role == kind
            if chosen.any():
                labels = samples.measured_us[chosen]
                before, after = samples.visits_us[:2, chosen]
                results[f"{' '.join(map(str, key))} {kind}"] = {
                    "messages": int(chosen.sum()),
                    "retest_gmae_percent": gmae_percent(after, before),
                    "models": {n: score([c[chosen]], [labels]) for n, c in curves.items()},
                }
    return results


def _models(direction: str) -> dict[str, Any]:
    return {
        "TorchRec's estimator, scale": torchrec_estimator(direction, constant=False),
        "TorchRec's estimator, scale and constant": torchrec_estimator(direction, constant=True),
        "linear, no reuse": linear,
        "roofline, unique rows": roofline,
        "MLP, reuse factors (the paper's)": perceptron(reuse_factors=True),
        "MLP, unique rows": perceptron(reuse_factors=False),
    }


if __name__ == "__main__":
    main()
