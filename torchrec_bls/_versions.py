"""Checks, before they are imported, that the installed packages fit together.

torch, fbgemm and torchrec are built against one another. A pair that doesn't match fails while it
is being imported, with an undefined symbol that names neither package, so the check reads the
installed packages' metadata and imports none of them.
"""

import importlib
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources

# Either distribution holds the module fbgemm_gpu: the first is the CPU build, which is pinned.
FBGEMM_DISTRIBUTIONS = ("fbgemm-gpu-cpu", "fbgemm-gpu")
REQUIRED_DISTRIBUTIONS = ("numpy", "tqdm", "tensordict", "torchmetrics", "pyre-extensions")
BUILD_COMMAND = "make build"
BUILD_COMMAND_WITHOUT_MAKE = "pip install --no-build-isolation -e ."


class VersionError(ImportError):
    """A required package is missing, or torch, fbgemm and torchrec don't match."""


class NativeModuleError(ImportError):
    """The compiled module ``torchrec_bls._native`` is missing or can't be loaded."""


@dataclass(frozen=True)
class Pins:
    """The contents of ``pins.txt``.

    Attributes:
        requirements: The requirement line of every pinned distribution, by its name.
        next_torchrec: Version of torchrec that is accepted besides the pinned one.
    """

    requirements: Mapping[str, str]
    next_torchrec: str

    def exact(self, distribution: str) -> str:
        """Returns the version that ``distribution`` is pinned to with ``==``."""
        return self.requirements[distribution].removeprefix(f"{distribution}==")

    def accepted_torchrecs(self) -> tuple[str, str]:
        """Returns the pinned version of torchrec and the one accepted besides it."""
        return self.exact("torchrec"), self.next_torchrec


def parse_pins(text: str) -> Pins:
    """Reads the text of ``pins.txt``: requirement lines and one ``# next: torchrec==`` comment.

    Raises:
        ValueError: A line is not a requirement, or there is no ``next`` comment.
    """
    requirements = {}
    next_torchrec = None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("# next: torchrec=="):
            next_torchrec = line.removeprefix("# next: torchrec==").strip()
        requirement = line.split("#", maxsplit=1)[0].strip()
        if not requirement:
            continue
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if name is None:
            raise ValueError(f"pins.txt, line {number}: {line!r} is not a requirement")
        requirements[name[0]] = requirement
    if next_torchrec is None:
        raise ValueError("pins.txt has no line '# next: torchrec==VERSION'")
    return Pins(requirements, next_torchrec)


@dataclass(frozen=True)
class PackageReport:
    """Which packages were found, and whether they fit together.

    Attributes:
        found: torch, fbgemm and torchrec with their versions.
        needed: the same as they are needed.
        faults: what is missing or doesn't match, a sentence each. Empty where all fits.
        cure: command that mends the faults.
    """

    found: str
    needed: str
    faults: Sequence[str]
    cure: str


def examine_packages(installed: Callable[[str], str] = metadata.version) -> PackageReport:
    """Compares the installed packages with the pinned ones and imports none of them.

    Args:
        installed: Returns a distribution's version, or raises ``PackageNotFoundError``.
    """
    pins = _installed_pins()
    trio = _Trio.find(installed)
    to_install = trio.unfit(pins)
    faults = trio.faults(pins) if to_install else []
    for name in REQUIRED_DISTRIBUTIONS:
        if _version(name, installed) is None:
            faults.append(f"{name} is not installed.")
            to_install.append(name)
    command = _install_command(to_install, replaced=trio.fbgemms, pins=pins)
    return PackageReport(trio.found(), _needed(pins), faults, command)


def check_torch(installed: Callable[[str], str] = metadata.version) -> None:
    """Raises if torch, which everything here needs, is missing or does not match.

    Args:
        installed: Returns a distribution's version, or raises ``PackageNotFoundError``.

    Raises:
        VersionError: Names what was found, what is needed and the command that mends it.
    """
    pins = _installed_pins()
    trio = _Trio.find(installed)
    if "torch" not in trio.unfit(pins):
        return
    if trio.torchrec or trio.fbgemms:
        check_packages(installed)
    cure = _install_command(["torch"], replaced=(), pins=pins)
    raise VersionError(
        f"torchrec_bls found torch {trio.torch or 'not installed'}; it needs torch "
        f"{pins.exact('torch')}.\nMend it with: {cure}"
    )


def check_packages(installed: Callable[[str], str] = metadata.version) -> None:
    """Raises if a required package is missing or torch, fbgemm and torchrec don't match.

    Args:
        installed: Returns a distribution's version, or raises ``PackageNotFoundError``.

    Raises:
        VersionError: Names what was found, what is needed and the command that mends it.
    """
    report = examine_packages(installed)
    if report.faults:
        raise VersionError("\n".join([*report.faults, f"Mend it with: {report.cure}"]))


def check_native(load: Callable[[str], object] = importlib.import_module) -> None:
    """Raises if the compiled module can't be loaded.

    Args:
        load: Imports a module by its name.

    Raises:
        NativeModuleError: Names the Python it was looked for under and the command that builds it.
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


def _installed_pins() -> Pins:
    return parse_pins(resources.files("torchrec_bls").joinpath("pins.txt").read_text("utf-8"))


@dataclass(frozen=True)
class _Trio:
    """The installed versions; None or an empty mapping where there is none."""

    torch: str | None
    fbgemms: Mapping[str, str]
    torchrec: str | None

    @classmethod
    def find(cls, installed: Callable[[str], str]) -> "_Trio":
        fbgemms = {name: _version(name, installed) for name in FBGEMM_DISTRIBUTIONS}
        return cls(
            torch=_version("torch", installed),
            fbgemms={name: version for name, version in fbgemms.items() if version is not None},
            torchrec=_version("torchrec", installed),
        )

    def unfit(self, pins: Pins) -> list[str]:
        """Returns the pinned distributions that are missing here or have another version."""
        unfit = []
        if self.torch is None or _minor(self.torch) != _minor(pins.exact("torch")):
            unfit.append("torch")
        fbgemm_minors = {_minor(version) for version in self.fbgemms.values()}
        if fbgemm_minors != {_minor(pins.exact("fbgemm-gpu-cpu"))}:
            unfit.append("fbgemm-gpu-cpu")
        if self.torchrec is None or _public(self.torchrec) not in pins.accepted_torchrecs():
            unfit.append("torchrec")
        return unfit

    def found(self) -> str:
        return ", ".join(
            [
                f"torch {self.torch or 'not installed'}",
                *(f"{name} {version}" for name, version in self.fbgemms.items()),
                *([] if self.fbgemms else ["fbgemm not installed"]),
                f"torchrec {self.torchrec or 'not installed'}",
            ]
        )

    def faults(self, pins: Pins) -> list[str]:
        faults = [f"torchrec_bls found {self.found()}; it needs {_needed(pins)}."]
        for name, version in self.fbgemms.items():
            if self.torch is not None and not _is_pair(self.torch, version):
                faults.append(
                    f"torch {self.torch} and {name} {version} are not a pair: fbgemm 1.X is built "
                    f"for torch 2.(X+5) and fails with an undefined symbol under any other."
                )
        return faults


def _needed(pins: Pins) -> str:
    return (
        f"torch {pins.exact('torch')}, "
        f"fbgemm-gpu-cpu (or fbgemm-gpu) {pins.exact('fbgemm-gpu-cpu')}, "
        f"torchrec {' or '.join(pins.accepted_torchrecs())}"
    )


def _install_command(names: list[str], *, replaced: Collection[str], pins: Pins) -> str:
    """Returns a command that installs ``names`` in place of the fbgemm distributions given."""
    commands = []
    if "fbgemm-gpu-cpu" in names and replaced:
        # Both distributions write the same files: one left behind would overlay the other.
        commands.append(f"pip uninstall -y {' '.join(replaced)}")
    requirements = [f"'{pins.requirements[name]}'" for name in names if name != "torchrec"]
    if requirements:
        commands.append(f"pip install {' '.join(requirements)}")
    if "torchrec" in names:
        # It requires fbgemm-gpu, which would overlay the CPU build.
        commands.append(f"pip install --no-deps '{pins.requirements['torchrec']}'")
    return " && ".join(commands)


def _version(distribution: str, installed: Callable[[str], str]) -> str | None:
    try:
        return installed(distribution)
    except metadata.PackageNotFoundError:
        return None


def _public(version: str) -> str:
    """Returns ``version`` without its local suffix, which names the build: ``+cpu``, ``+cu130``."""
    return version.split("+", maxsplit=1)[0]


def _minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def _is_pair(torch: str, fbgemm: str) -> bool:
    fbgemm_minor = _minor(fbgemm)
    if fbgemm_minor is None or fbgemm_minor[0] != 1:
        return False
    return _minor(torch) == (2, fbgemm_minor[1] + 5)
