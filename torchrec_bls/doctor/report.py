"""Findings as text for people and as JSON for programs."""

import platform
import shutil
import textwrap
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from torchrec_bls.doctor.finding import Finding, Status

# Grows when a field changes its name or meaning; new facts don't count.
FORMAT = 1

_WIDEST = 110


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
    width = max(20, min(shutil.get_terminal_size((_WIDEST, 0)).columns, _WIDEST))
    statuses = max(len(status.value) for status in Status)
    subjects = max(len(finding.subject) for finding in findings)
    indent = " " * (statuses + subjects + 4)
    lines = ["torchrec-bls {package} on {host}: {system}, Python {python}".format(**_environment())]
    for finding in findings:
        start = f"{finding.status.value:{statuses}}  {finding.subject:{subjects}}  "
        lines += _wrap(finding.text, width, start, indent)
        if finding.cure:
            lines += _wrap(finding.cure, width, f"{indent}-> ", f"{indent}   ")
    count = sum(finding.status is Status.PROBLEM for finding in findings)
    verdict = f"will not work: {count} problem{'s'[: count > 1]}" if count else "will work"
    return "\n".join([*lines, f"The defaults {verdict}."])


def _wrap(text: str, width: int, first: str, following: str) -> list[str]:
    # Neither commands nor paths are cut: they are there to be copied.
    return textwrap.wrap(
        text,
        max(width, len(first) + 40),
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _environment() -> dict[str, str]:
    return {
        "package": metadata.version("torchrec-bls"),
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }
