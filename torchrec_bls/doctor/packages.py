"""The packages that have to fit together."""

from collections.abc import Callable
from importlib import metadata

from torchrec_bls._versions import examine_packages
from torchrec_bls.doctor.finding import Finding, Status


def packages_finding(installed: Callable[[str], str] = metadata.version) -> Finding:
    """Says which torch, fbgemm and torchrec are installed, without importing them.

    Args:
        installed: Returns a distribution's version, or raises ``PackageNotFoundError``.
    """
    report = examine_packages(installed)
    facts = {"found": report.found, "needed": report.needed}
    if report.faults:
        return Finding("packages", Status.PROBLEM, " ".join(report.faults), report.cure, facts)
    return Finding("packages", Status.OK, report.found, facts=facts)
