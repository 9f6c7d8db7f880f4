"""Findings as text for people and as JSON for programs."""

import platform
import shutil
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from torchrec_bls.doctor.finding import Finding, Status
from torchrec_bls.rendering import document
from torchrec_bls.rendering.document import WIDTH, Part, Table, Words

# Grows when a field changes its name or meaning; new facts don't count.
FORMAT = 1


def defaults_will_work(findings: Sequence[Finding]) -> bool:
    """Returns whether a channel with default configuration will work on this host."""
    return all(finding.status is not Status.PROBLEM for finding in findings)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the findings as a JSON object."""
    return {
        "format": FORMAT,
        **_environment(),
        "defaults_will_work": defaults_will_work(findings),
        "findings": [
            {
                "subject": finding.subject,
                "status": finding.status.value,
                "text": finding.text,
                "cure": finding.cure,
                "facts": dict(finding.facts),
            }
            for finding in findings
        ],
    }


def as_text(findings: Sequence[Finding]) -> str:
    """Returns the findings as aligned text. The last line is the verdict."""
    rows = []
    for finding in findings:
        rows.append([finding.status.value, finding.subject, finding.text])
        if finding.cure:
            rows.append(["", "", f"-> {finding.cure}"])
    count = sum(finding.status is Status.PROBLEM for finding in findings)
    verdict = f"will not work: {count} problem{'s'[: count > 1]}" if count else "will work"
    parts: list[Part] = [
        "torchrec-bls {package} on {host}: {system}, Python {python}".format(**_environment()),
        Table([Words(), Words(), Words()], rows),
        f"The defaults {verdict}.",
    ]
    columns = shutil.get_terminal_size((WIDTH, 0)).columns
    return document.as_text(parts, min(columns, WIDTH))


def _environment() -> dict[str, str]:
    return {
        "package": metadata.version("torchrec-bls"),
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }
