"""The packages that have to fit together."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from torchrec_bls._versions import examine_packages
from torchrec_bls.doctor.finding import Finding, Status

_MISSING_NAMES = (sys.executable, "-m", "torchrec_bls._contract")
_NEWER_PACKAGE = "pip install --upgrade torchrec-bls"


def packages_finding(installed: Callable[[str], str] = metadata.version) -> Finding:
    """Says which torch, fbgemm and torchrec are installed, without importing them.

    Args:
        installed: Function that returns a distribution's version, or raises
            ``PackageNotFoundError``.
    """
    report = examine_packages(installed)
    facts = {"found": report.found, "needed": report.needed}
    if report.faults:
        return Finding("packages", Status.PROBLEM, " ".join(report.faults), report.cure, facts)
    if report.untested:
        return Finding("packages", Status.WARNING, report.untested, report.cure, facts)
    return Finding("packages", Status.OK, report.found, facts=facts)


def names_finding(
    installed: Callable[[str], str] = metadata.version,
    deadline: float = 300.0,
    program: Sequence[str] = _MISSING_NAMES,
) -> Finding:
    """Says which of the private names used here the packages lack.

    Args:
        installed: Function that returns a distribution's version, or raises
            ``PackageNotFoundError``.
        deadline: seconds for all of it. On a slow machine, importing torchrec takes most of them.
        program: program that prints the missing names, a line each; it runs in a new process.
    """
    cure = examine_packages(installed).cure or _NEWER_PACKAGE
    try:
        process = subprocess.run(
            program,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline,
            # A module in the current folder must not replace an installed one.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
    except subprocess.TimeoutExpired:
        text = f"still importing torchrec after {deadline:g} s"
        return Finding("private names", Status.PROBLEM, text, "Try again on an idle machine")
    if process.returncode:
        text = (process.stderr.strip() or f"exit status {process.returncode}").splitlines()[-1]
        return Finding("private names", Status.PROBLEM, f"can't be looked at: {text}", cure)
    missing = process.stdout.split()
    facts = {"missing": missing}
    if missing:
        text = f"the installed packages lack {', '.join(missing)}"
        return Finding("private names", Status.PROBLEM, text, cure, facts)
    text = "all that are used of torch, fbgemm and torchrec are there"
    return Finding("private names", Status.OK, text, facts=facts)
