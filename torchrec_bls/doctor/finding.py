"""What the doctor says of one thing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Status(Enum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"  # the defaults will work, something else won't or will be slow
    PROBLEM = "problem"  # the defaults won't work


@dataclass(frozen=True)
class Finding:
    """What was found of one thing, and what to do about it.

    Attributes:
        subject: what was looked at, in a word or two.
        status: how much it matters.
        text: what was found.
        cure: what to do, empty where there is nothing to.
        facts: the same for programs; names carry their units.
    """

    subject: str
    status: Status
    text: str
    cure: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
