"""Checks, before they are imported, that the installed packages fit together.

torch, fbgemm and torchrec are built against one another. A pair that doesn't match fails during its
import, with an undefined symbol that names neither package. So the check reads the installed
packages' metadata and imports none of them.
"""

import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.version import InvalidVersion, Version

from torchrec_bls._trios import BESIDE_TORCHREC, DEFAULT, TRIOS, Trio

# Both distributions hold the module fbgemm_gpu. The first, the CPU build, is the one proposed.
FBGEMM_DISTRIBUTIONS = ("fbgemm-gpu-cpu", "fbgemm-gpu")
BUILD_COMMAND = "make build"
BUILD_COMMAND_WITHOUT_MAKE = "pip install --no-build-isolation -e ."

# Versions of one series fit together: X of torch 2.X. The other two count from 5 less.
_MINORS_BEHIND_TORCH = 5
_OLDEST, _NEWEST = TRIOS[0], TRIOS[-1]


class VersionError(ImportError):
    """A required package is missing, or torch, fbgemm and torchrec don't match."""


class NativeModuleError(ImportError):
    """The compiled module ``torchrec_bls._native`` is missing or can't be loaded."""


class UntestedVersionsWarning(UserWarning):
    """torch, fbgemm and torchrec are newer than all versions that this package was tested with."""


@dataclass(frozen=True)
class PackageReport:
    """Which packages were found, and whether they fit together.

    Attributes:
        found: torch, fbgemm and torchrec with their versions.
        needed: tested versions nearest to the found ones.
        faults: missing packages and versions that don't match, a sentence each; empty where all
            fits.
        untested: sentence if the versions match and are newer than all tested ones; else empty.
        cure: command that installs what is needed; empty where nothing is wrong.
    """

    found: str
    needed: str
    faults: Sequence[str]
    untested: str
    cure: str


def examine_packages(installed: Callable[[str], str] = metadata.version) -> PackageReport:
    """Compares the installed packages with the tested ones and imports none of them.

    Args:
        installed: Function that returns a distribution's version, or raises
            ``PackageNotFoundError``.
    """
    trio = _Installed.find(installed)
    target = trio.nearest()
    to_install = trio.unfit()
    faults = trio.faults() if to_install else []
    for requirement in BESIDE_TORCHREC:
        name = _name(requirement)
        if _version(name, installed) is None:
            faults.append(f"{name} is not installed.")
            to_install.append(name)
    untested = ""
    if not faults and trio.is_newer():
        untested = _untested(trio.text())
        to_install = ["torch", "fbgemm-gpu-cpu", "torchrec"]
    command = _install_command(to_install, target, replaced=trio.fbgemms)
    return PackageReport(trio.text(), _text(target), faults, untested, command)


def check_torch(installed: Callable[[str], str] = metadata.version) -> None:
    """Raises if torch is missing or too old; everything here needs torch. Warns if it is newer than
    any tested version.

    Args:
        installed: Function that returns a distribution's version, or raises
            ``PackageNotFoundError``.

    Raises:
        VersionError: Names the version found, the version needed and the command that installs it.
    """
    trio = _Installed.find(installed)
    series = _series_of_torch(trio.torch)
    if series is not None and series >= _series(_OLDEST):
        if series > _series(_NEWEST):
            _warn_once(_untested(f"torch {trio.torch}"))
        return
    if trio.torchrec or trio.fbgemms:
        check_packages(installed)
    target = trio.nearest()
    raise VersionError(
        f"torchrec_bls found torch {trio.torch or 'not installed'}; it needs torch "
        f"{_OLDEST.torch} to {_NEWEST.torch}.\n"
        f"Mend it with: {_install_command(['torch'], target, replaced=())}"
    )


def check_packages(installed: Callable[[str], str] = metadata.version) -> None:
    """Raises if a required package is missing, or torch, fbgemm and torchrec don't match. Warns if
    they are newer than all tested versions.

    Args:
        installed: Function that returns a distribution's version, or raises
            ``PackageNotFoundError``.

    Raises:
        VersionError: Names the version found, the version needed and the command that installs it.
    """
    report = examine_packages(installed)
    if report.faults:
        raise VersionError("\n".join([*report.faults, f"Mend it with: {report.cure}"]))
    if report.untested:
        _warn_once(report.untested)


def check_native(load: Callable[[str], object] = importlib.import_module) -> None:
    """Raises if the compiled module can't be loaded.

    Args:
        load: Function that imports a module by its name.

    Raises:
        NativeModuleError: Names the Python that lacks the module, and the command that builds it.
    """
    try:
        load("torchrec_bls._native")
    except ImportError as error:
        raise NativeModuleError(
            f"torchrec_bls._native, the compiled module, can't be loaded by Python "
            f"{sys.version_info.major}.{sys.version_info.minor} ({sys.executable}): {error}. "
            f"Build it in the source tree with: {BUILD_COMMAND} "
            f"(or, in an environment of your own: {BUILD_COMMAND_WITHOUT_MAKE})"
        ) from error


@dataclass(frozen=True)
class _Installed:
    """The installed versions; None or an empty mapping for missing packages."""

    torch: str | None
    fbgemms: Mapping[str, str]
    torchrec: str | None

    @classmethod
    def find(cls, installed: Callable[[str], str]) -> "_Installed":
        fbgemms = {name: _version(name, installed) for name in FBGEMM_DISTRIBUTIONS}
        return cls(
            torch=_version("torch", installed),
            fbgemms={name: version for name, version in fbgemms.items() if version is not None},
            torchrec=_version("torchrec", installed),
        )

    def all_series(self) -> list[int | None]:
        """Returns the series of torch, of each fbgemm and of torchrec; None for one without a
        series."""
        return [
            _series_of_torch(self.torch),
            *(_series_of_others(version) for version in self.fbgemms.values()),
            _series_of_others(self.torchrec),
        ]

    def nearest(self) -> Trio:
        """Returns the tested trio of this torch; if there is none, that of fbgemm or torchrec."""
        if self.is_newer():
            return _NEWEST
        by_series = {_series(trio): trio for trio in TRIOS}
        trios = [by_series[series] for series in self.all_series() if series in by_series]
        return trios[0] if trios else DEFAULT

    def is_newer(self) -> bool:
        """Returns whether all match and are newer than the newest tested trio."""
        series = self.all_series()
        newest = _series(_NEWEST)
        return len({*series}) == 1 and bool(self.fbgemms) and (series[0] or 0) > newest

    def unfit(self) -> list[str]:
        """Returns the packages that are missing or of another series than the nearest tested
        trio."""
        if self.is_newer():
            return []
        series = _series(self.nearest())
        unfit = []
        if _series_of_torch(self.torch) != series:
            unfit.append("torch")
        if {_series_of_others(version) for version in self.fbgemms.values()} != {series}:
            unfit.append("fbgemm-gpu-cpu")
        if _series_of_others(self.torchrec) != series:
            unfit.append("torchrec")
        return unfit

    def text(self) -> str:
        return ", ".join(
            [
                f"torch {self.torch or 'not installed'}",
                *(f"{name} {version}" for name, version in self.fbgemms.items()),
                *([] if self.fbgemms else ["fbgemm not installed"]),
                f"torchrec {self.torchrec or 'not installed'}",
            ]
        )

    def faults(self) -> list[str]:
        faults = [f"torchrec_bls found {self.text()}; it needs {_text(self.nearest())}."]
        torch = _series_of_torch(self.torch)
        if torch is not None and torch < _series(_OLDEST):
            faults.append(f"torch {_OLDEST.torch} is the oldest that is supported.")
        for name, version in self.fbgemms.items():
            series = _series_of_others(version)
            if self.torch is not None and (torch is None or torch != series):
                faults.append(
                    f"torch {self.torch} and {name} {version} are not a pair: fbgemm 1.X is built "
                    f"for torch 2.(X+5) and fails with an undefined symbol under any other."
                )
            if self.torchrec is not None and series != _series_of_others(self.torchrec):
                faults.append(
                    f"{name} {version} and torchrec {self.torchrec} are not a pair: torchrec 1.X "
                    "goes with fbgemm 1.X."
                )
        return faults


def _text(trio: Trio) -> str:
    return (
        f"torch {trio.torch}, fbgemm-gpu-cpu (or fbgemm-gpu) {trio.fbgemm}, "
        f"torchrec {trio.torchrec}"
    )


def _untested(found: str) -> str:
    return (
        f"torchrec_bls found {found}, newer than all that it was tested with, and goes on. The "
        f"newest tested are {_text(_NEWEST)}; `torchrec-bls doctor` says whether names are missing."
    )


_warned = False


def _warn_once(text: str) -> None:
    # Several imports check, each with its own text and line. The ranks of a host have one
    # installation, so the first of them speaks for all; without a launcher's number each does.
    global _warned
    rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    if not _warned and rank == "0":
        _warned = True
        warnings.warn(text, UntestedVersionsWarning, stacklevel=3)


def _install_command(names: list[str], trio: Trio, *, replaced: Collection[str]) -> str:
    """Returns a command that installs ``names`` in place of the fbgemm distributions given."""
    if not names:
        return ""
    # Users who have only the CUDA build have chosen it, and keep it.
    fbgemm = "fbgemm-gpu" if [*replaced] == ["fbgemm-gpu"] else "fbgemm-gpu-cpu"
    requirements = {
        "torch": f"torch=={trio.torch}",
        "fbgemm-gpu-cpu": f"{fbgemm}=={trio.fbgemm}",
        **{_name(requirement): requirement for requirement in BESIDE_TORCHREC},
    }
    commands = []
    if "fbgemm-gpu-cpu" in names and replaced:
        # Both distributions write the same files: the one that stayed would overlay the other.
        commands.append(f"pip uninstall -y {' '.join(replaced)}")
    quoted = [f"'{requirements[name]}'" for name in names if name != "torchrec"]
    if quoted:
        commands.append(f"pip install {' '.join(quoted)}")
    if "torchrec" in names:
        # It requires fbgemm-gpu, which would overlay the CPU build.
        commands.append(f"pip install --no-deps 'torchrec=={trio.torchrec}'")
    return " && ".join(commands)


def _name(requirement: str) -> str:
    return re.split(r"[<>=]", requirement, maxsplit=1)[0]


def _version(distribution: str, installed: Callable[[str], str]) -> str | None:
    try:
        return installed(distribution)
    except metadata.PackageNotFoundError:
        return None


def _series(trio: Trio) -> int:
    return Version(trio.torch).minor


def _series_of_torch(version: str | None) -> int | None:
    return _minor(version, major=2)


def _series_of_others(version: str | None) -> int | None:
    minor = _minor(version, major=1)
    return None if minor is None else minor + _MINORS_BEHIND_TORCH


def _minor(version: str | None, *, major: int) -> int | None:
    """Returns the minor version, whatever the patch release and the build: ``+cpu``, ``+cu130``."""
    try:
        parsed = Version(version or "")
    except InvalidVersion:
        return None
    return parsed.minor if parsed.major == major else None
