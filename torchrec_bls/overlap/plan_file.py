"""Plans as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchrec_bls.overlap.measured.dense_layers import DenseLayer
from torchrec_bls.overlap.measured.trial import Trial
from torchrec_bls.sharding.costs.contention import Mode, ModeTimes
from torchrec_bls.sharding.overlap.timeline import Group

_FORMAT, _VERSION = "torchrec-bls overlap plan", 3


@dataclass(frozen=True)
class PlanOrigin:
    """The conditions that a plan was made for.

    Attributes:
        torch: version of torch.
        backend: backend of the process group.
        ranks: number of ranks in the group.
        profile: name and date of the profile.
    """

    torch: str
    backend: str
    ranks: int
    profile: str


Content = tuple[
    PlanOrigin,
    tuple[DenseLayer, ...],
    tuple[float, ...],
    tuple[Mode, ...],
    tuple[Group, ...],
    Trial | None,
]


def write_plan(path: Path, content: Content) -> None:
    """Writes a plan."""
    origin, layers, reduced_us, modes, groups, trial = content
    record = {
        "format": _FORMAT,
        "version": _VERSION,
        "origin": asdict(origin),
        "layers": [asdict(layer) for layer in layers],
        "reduced_us": list(reduced_us),
        "modes": [asdict(mode) for mode in modes],
        "groups": [asdict(group) for group in groups],
        "trial": trial and asdict(trial),
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def read_plan(path: Path) -> Content:
    """Reads what `write_plan` wrote.

    Raises:
        ValueError: the file is no plan, or of another version.
        OSError: the file can't be read.
    """
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT or content["version"] != _VERSION:
            raise ValueError(f"{content['format']} {content['version']}")
        layers = tuple(_layer(each) for each in content["layers"])
        reduced_us = tuple(map(float, content["reduced_us"]))
        modes = tuple(_mode(each) for each in content["modes"])
        groups = tuple(Group(**each) for each in content["groups"])
        trial = content["trial"] and Trial(**{k: tuple(v) for k, v in content["trial"].items()})
        return PlanOrigin(**content["origin"]), layers, reduced_us, modes, groups, trial
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no {_FORMAT} of version {_VERSION}: {error!r}. Make it with "
            "torchrec_bls.overlap.plan"
        ) from error


def _layer(record: dict[str, Any]) -> DenseLayer:
    return DenseLayer(**{name: tuple(values) for name, values in record.items()})


def _mode(record: dict[str, Any]) -> Mode:
    times, draws = ModeTimes(**record["times"]), [ModeTimes(**each) for each in record["draws"]]
    return Mode(**{**record, "times": times, "draws": tuple(draws)})
