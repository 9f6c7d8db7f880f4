"""Plans as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchrec_bls.overlap.dense_layers import DenseLayer
from torchrec_bls.sharding.costs.contention import Mode, ModeTimes
from torchrec_bls.sharding.overlap.timeline import Group

_FORMAT, _VERSION = "torchrec-bls overlap plan", 2


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
    PlanOrigin, tuple[DenseLayer, ...], tuple[float, ...], tuple[Mode, ...], tuple[Group, ...]
]


def write_plan(
    path: Path,
    origin: PlanOrigin,
    layers: Sequence[DenseLayer],
    reduced_us: Sequence[float],
    modes: Sequence[Mode],
    groups: Sequence[Group],
) -> None:
    """Writes a plan."""
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "origin": asdict(origin),
        "layers": [asdict(layer) for layer in layers],
        "reduced_us": list(reduced_us),
        "modes": [asdict(mode) for mode in modes],
        "groups": [asdict(group) for group in groups],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


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
        return PlanOrigin(**content["origin"]), layers, reduced_us, modes, groups
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
