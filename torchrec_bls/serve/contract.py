"""What a service promises to those who call it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Contract:
    """The promise of a service: a request is answered within its deadline, or refused early.

    Attributes:
        deadline_ms: milliseconds from the arrival of a request to the last byte of its answer. A
            request may ask for fewer or more, by the parameter `timeout` in microseconds or by
            gRPC's deadline.
        max_samples: samples that a request may have at most. It is refused otherwise (413).
        max_body_bytes: bytes that the body of a request may have at most. It is refused otherwise
            (413).

    Raises:
        ValueError: one of them is not above zero.
    """

    deadline_ms: float = 20.0
    max_samples: int = 2048
    max_body_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name in ("deadline_ms", "max_samples", "max_body_bytes"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value!r}, but must be above 0")
