"""Plans as JSON."""

import json
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from torchrec_bls.overlap.measured.dense_layers import DenseLayer
from torchrec_bls.overlap.measured.trial import Trial
from torchrec_bls.overlap.modes.mode import Mode
from torchrec_bls.overlap.search.timeline import Group
from torchrec_bls.records import Format, Record

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
        ValueError: the file is no plan, is of another version, or contradicts itself.
        OSError: the file can't be read.
    """
    record = _FILE.read(path)
    return (
        record.origin,
        record.layers,
        record.reduced_us,
        record.modes,
        record.groups,
        record.trial,
    )


class _PlanRecord(Record):
    format: str
    version: int
    origin: PlanOrigin
    layers: Annotated[tuple[DenseLayer, ...], Meta(min_length=1)]
    reduced_us: Annotated[tuple[float, ...], Meta(min_length=1)]
    modes: Annotated[tuple[Mode, ...], Meta(min_length=1)]
    groups: tuple[Group, ...]
    trial: Trial | None

    def __post_init__(self) -> None:
        samples = {len(self.reduced_us)} | {len(layer.compute_us) for layer in self.layers}
        if len(samples) > 1:
            raise ValueError(f"layers and reduced_us have {sorted(samples)} measurements")
        if any(len(layer.parameters) != len(layer.sizes) for layer in self.layers):
            raise ValueError("a layer does not have one size for each parameter")
        if any(
            group.layers < 1 or group.hold < 0 or not 0 <= group.mode < len(self.modes)
            for group in self.groups
        ) or sum(group.layers for group in self.groups) != len(self.layers):
            raise ValueError(f"groups {self.groups} are not those of {len(self.layers)} layers")
        if self.trial is not None:
            times = astuple(self.trial)
            if len({len(each) for each in times}) > 1 or not min(map(min, times), default=0) > 0:
                raise ValueError(
                    "the trial does not have one time above 0 of each way in each turn"
                )


_FILE = Format(
    _PlanRecord, "make it with torchrec_bls.overlap.plan", name=_FORMAT, versions=(_VERSION,)
)
