"""One finding of the doctor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Status(Enum):
    """The importance of a finding."""

    OK = "ok"
    WARNING = "warning"  # the defaults will work, something else won't or will be slow
    PROBLEM = "problem"  # the defaults won't work


@dataclass(frozen=True)
class Finding:
    """The result of looking at one thing, and the cure.

    Attributes:
        subject: thing that was looked at, in a word or two.
        status: importance of the finding.
        text: text of the finding.
        cure: action that cures it; empty where there is none.
        facts: the finding for programs; names carry their units.
    """

    subject: str
    status: Status
    text: str
    cure: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
