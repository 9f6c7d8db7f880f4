"""What Dual-Level Adaptive Lossy Compression prints, paper.json, and what follows from it."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from torchrec_bls.codecs.compression import Measured
from torchrec_bls.datasets.criteo_shape import KAGGLE_CARDINALITIES

_FOLDER = Path(__file__).parent
#: By number; in some a row, in some a column is (Kaggle, Terabyte).
TABLES = json.loads((_FOLDER / "paper.json").read_text())
SETS, BATCHES = ("Kaggle", "Terabyte"), (128, 2048)
WINDOWS = (32, 64, 128, 255)  # the columns of Table VI
#: Of small, medium and large bounds.
BOUNDS = {"S": 0.01, "M": 0.03, "L": 0.05}
#: Bytes per second: of their all-to-all, and encoded and decoded.
LINK, SPEEDS = 4e9, {"vector-LZ": (40.5e9, 205.4e9), "Huffman": (78.4e9, 38.9e9)}
_FORWARD_SHARE = 0.313  # of their step
_ALL_TO_ALL, _OVERALL = (6.22, 8.6), (11.19, 19.89)
#: From how many rows on a table's bound is medium, and small, in Table II.
THRESHOLDS = ((20, 50_000), (1_000, 500_000))


def speed_up(ratio: float, speeds: tuple[float, float], link: float = LINK) -> float:
    """Equation 2, for speeds of encoding and decoding and a link in bytes per second."""
    return 1 / (link * Measured(ratio, *speeds).seconds_per_byte(link))


def end_to_end(all_to_all: float) -> float:
    """The step's speed-up, for that of the forward's all-to-all."""
    return 1 / (1 - _FORWARD_SHARE + _FORWARD_SHARE / all_to_all)


def classes_by_size(rows: Sequence[int], thresholds: tuple[int, int] = THRESHOLDS[0]) -> str:
    """The class of the bound of each table, by its rows."""
    return "".join("LMS"[sum(each >= least for least in thresholds)] for each in rows)


def classes_by_eta(etas: Sequence[float], thresholds: Sequence[float]) -> str:
    """The class of the bound of each table as Algorithm 1 has it: small where quantizing makes many
    rows equal, large where it makes hardly any."""
    return "".join("LMS"[(eta >= thresholds[0]) + (eta > thresholds[1])] for eta in etas)


def as_many(one: str, other: str) -> int:
    """How many tables have the same class in both."""
    return sum(map(str.__eq__, one, other))


def harmonic_mean(ratios: Sequence[float]) -> float:
    """The ratio of tables of equal sizes together."""
    return len(ratios) / sum(1 / ratio for ratio in ratios)


def compounded(iterations: int, steps: int = 4) -> float:
    """The decimal logarithm of what Algorithm 1 makes of a bound that is to halve in `steps`."""
    factors = (1 - 0.5 * (i * steps // iterations) / steps for i in range(iterations))
    return sum(map(math.log10, factors))


def errors() -> str:
    """The seven errors, with the numbers that show them."""
    indices = [row[1:] for number in ("III", "IV") for row in TABLES[number]]
    ratios, hybrids = {name: TABLES["V"][name] for name in SPEEDS}, TABLES["V"]["hybrid"]
    total, larger, otherwise = [], 0, 0
    for of_set, hybrid in enumerate(hybrids):
        seconds = 0.0
        for table, of_hybrid in enumerate(hybrid):
            of_table = {name: ratios[name][of_set][table] for name in SPEEDS}
            speed_ups = {name: speed_up(of_table[name], SPEEDS[name]) for name in SPEEDS}
            best = max(speed_ups, key=speed_ups.__getitem__)
            seconds += 1 / speed_ups[best] / len(hybrid)
            larger += of_hybrid == max(of_table.values())
            otherwise += of_hybrid != of_table[best]
        total.append(1 / seconds)
    sizes = (KAGGLE_CARDINALITIES, TABLES["MLPerf"])
    small = [
        min(rows for rows, name in zip(of_set, names, strict=True) if name == "S")
        for of_set, names in zip(sizes, TABLES["II"], strict=True)
    ]
    numbers = {
        "indices": len(indices),
        "inverse": sum(abs(found[1] / found[0] - found[2]) < 1e-6 for found in indices),
        "agreeing": [
            as_many(classes_by_size(*how), names)
            for *how, names in zip(sizes, THRESHOLDS, TABLES["II"], strict=True)
        ],
        "small": small,
        "first": [rows**-0.5 for rows in small],
        "total": total,
        "fastest": [speed_up(ratio, SPEEDS["vector-LZ"]) for ratio in _OVERALL],
        "larger": larger,
        "otherwise": otherwise,
        "windows": TABLES["VI"],
        "steps": [end_to_end(times) for times in _ALL_TO_ALL],
        "left": _FORWARD_SHARE / _ALL_TO_ALL[0],
        "compounded": compounded(1000),
        "means": [[harmonic_mean(half) for half in halves] for halves in TABLES["V"].values()],
    }
    return (_FOLDER / "errors.md").read_text().format(**numbers).rstrip()
