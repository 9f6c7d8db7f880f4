"""How well the cost models predict what they have not seen, beside other models.

Lookups: the configurations of a calibration are split six times into 80 % that models are fitted to
and 20 % that nothing is fitted to or chosen on. Collectives: curves are fitted to, and chosen on,
sizes that double, and predict sizes that were drawn, even and uneven. Every figure stands beside
the retest floor, the difference between two measurements of the same.
"""

import bz2
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import numpy.typing as npt
from torchrec_bls.sharding.calibration import fit
from torchrec_bls.sharding.calibration.records import read_records
from torchrec_bls.sharding.costs.fitting.accuracy import bias_percent, gmae_percent, mape_percent
from torchrec_bls.sharding.costs.fitting.collectives import fit_alpha_beta, held_out_uneven_us
from torchrec_bls.sharding.costs.fitting.lookups import fit_lookup, samples_of
from torchrec_bls.sharding.costs.lookup.features import as_columns
from tqdm import trange

from benchmarks.harness import record
from benchmarks.planner.baselines import baselines
from benchmarks.planner.page import OUR_MODEL, OUR_MODEL_WITH_FACTORS, models_section

Entry = dict[str, Any]
#: Predicted and measured microseconds of the same ops or messages.
Pair = Sequence[npt.NDArray[np.float64]]

SPLITS, HELD_OUT = 6, 0.2


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--measurements", type=Path, help="of `torchrec-bls calibrate`, else ours")
    options = parser.parse_args()
    before = record.environment()
    given = options.measurements
    head, entries = read_records(given) if given else _unpacked(_packed_path(record.RESULTS))
    results = {
        "machine": head["machine"],
        "retest_percent": fit.retest_percent(entries),
        "lookup_time": fit.lookup_time(entries),
        "lookups": lookup_results(entries),
        "collectives": collective_results(entries),
    }
    settings = head["settings"]
    record.publish(options.json, "performance-models", before, settings, results, models_section)
    if options.json and given:
        _pack(_packed_path(options.json.parent), head, entries)


def _packed_path(results: Path) -> Path:
    return record.raw_path(results / "calibration.json")


def _pack(path: Path, head: Entry, entries: list[Entry]) -> None:
    """Writes a calibration's measurements by kind and in columns, which makes them small."""
    kinds: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        for name, value in _shortened(entry).items():
            kinds[entry["kind"]][name].append(value)
    with bz2.open(path, "wt") as file:
        json.dump({"head": head, "kinds": kinds}, file, separators=(",", ":"))


def _shortened(entry: Entry) -> Entry:
    """An entry, and the messages in it, with repeats of three digits: two differ by more than 3 %.

    They are by size, which no statistic uses.
    """
    short = dict(entry)
    for name in {"us", "forward_us", "backward_us"} & entry.keys():
        short[name] = sorted(float(f"{each:.3g}") for each in entry[name])
    if "messages" in entry:
        short["messages"] = [_shortened(message) for message in entry["messages"]]
    return short


def _unpacked(path: Path) -> tuple[Entry, list[Entry]]:
    """What a calibration was, and its measurements of each kind in order."""
    with bz2.open(path, "rt") as file:
        packed = json.load(file)
    return packed["head"], [
        dict(zip(columns, row, strict=True))
        for columns in packed["kinds"].values()
        for row in zip(*columns.values(), strict=True)
    ]


def lookup_results(entries: list[Entry]) -> dict[str, Any]:
    """Scores of each model by pooled/unpooled and direction."""
    results = {}
    measured, time = list(fit.lookups_of(entries).values()), fit.lookup_time(entries)
    for pooled, direction in product((True, False), ("forward", "backward")):
        samples = samples_of(measured, direction, pooled, time)
        models = baselines(direction, pooled=pooled)
        pairs: defaultdict[str, list[Pair]] = defaultdict(list)
        covered = []
        what = f"{'pooled' if pooled else 'unpooled'} {direction}"
        ops = len(samples.measured_us)
        for split in trange(SPLITS, desc=what):
            shuffled = np.random.default_rng(split).permutation(ops)
            held_out, others = np.split(shuffled, [round(HELD_OUT * ops)])
            fitted, tested = samples.take(np.sort(others)), samples.take(np.sort(held_out))
            of_split = {name: model(fitted, tested) for name, model in models.items()}
            ours, with_factors = fit_lookup(fitted), fit_lookup(fitted, reuse_factors=True)
            of_split[OUR_MODEL] = tested.predicted_us(ours)
            of_split[OUR_MODEL_WITH_FACTORS] = tested.predicted_us(with_factors)
            for name, each in of_split.items():
                pairs[name].append((each, tested.measured_us))
            for op, measured_us in enumerate(tested.measured_us):
                interval = ours.estimate(as_columns(tested.take(np.array([op])).works))
                covered.append(interval.low <= measured_us <= interval.high)
        results[what] = {
            "ops": ops,
            "models": {name: score(each) for name, each in pairs.items()},
            "interval_coverage": np.mean(covered),
            "retest_gmae_percent": fit.lookup_retest_percent(entries, direction, time, pooled),
        }
    return results


def score(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Means over the splits, and each split's GMAE."""
    errors = {"gmae": gmae_percent, "mape": mape_percent, "bias": bias_percent}
    by_split = {name: [error(*pair) for pair in pairs] for name, error in errors.items()}
    means = {f"{name}_percent": np.mean(each) for name, each in by_split.items()}
    return {**means, "gmae_percent_by_split": by_split["gmae"]}


def collective_results(entries: list[Entry]) -> dict[str, Any]:
    """Scores of curves that are fitted to the sizes that double, on the other sizes.

    How unevenness counts is fitted to all uneven messages but the one that it is tested on. "all"
    are the scores of all messages of an operation, by the models that profiles hold.
    """
    results = {}
    together: defaultdict[str, list[Pair]] = defaultdict(list)
    for key, samples in fit.collectives_of(entries).items():
        grid = samples.role == "grid"
        sizes, times = samples.largest_bytes[grid], samples.measured_us[grid]
        kept = fit.fit_collective(key, samples).curve
        relative = fit_alpha_beta(sizes, times)
        per_byte, start = np.polyfit(sizes, times, 1)
        for kind in ("between", "uneven"):
            tested = samples.role == kind
            if not tested.any():
                continue
            mean, largest = samples.mean_bytes[tested], samples.largest_bytes[tested]
            measured = samples.measured_us[tested]
            predicted = {}
            if kind == "uneven":
                predicted["kept"] = held_out_uneven_us(kept, mean, largest, measured)
            predicted["kept, largest rank"] = kept.microseconds(largest)
            predicted["alpha-beta, relative"] = relative.microseconds(largest)
            predicted["alpha-beta, ordinary"] = np.maximum(start + per_byte * largest, 1.0)
            ours = predicted.get("kept", predicted["kept, largest rank"])
            together[f"{key[0]}, {kind}"].append((ours, measured))
            before, *after = samples.visits_us[:, tested]
            results[f"{' '.join(map(str, key))} ranks, {kind}"] = {
                "messages": int(tested.sum()),
                "curve": type(kept).__name__,
                "retest_gmae_percent": gmae_percent(after[-1], before) if after else None,
                "models": {name: score([(each, measured)]) for name, each in predicted.items()},
            }
    every = {name: score([np.concatenate(pairs, axis=1)]) for name, pairs in together.items()}
    return {"by_curve": results, "all": every}


if __name__ == "__main__":
    main()
