"""Which deadlines a clock can count."""

from numbers import Real

# Seconds; the clock counts nanoseconds in 64 bits.
LONGEST_DEADLINE = 1e9


def check_deadline(deadline: float) -> None:
    """Raises ValueError unless `deadline` is a number of seconds that a clock can count."""
    is_number = isinstance(deadline, Real) and not isinstance(deadline, bool)
    if not is_number or not 0 < deadline <= LONGEST_DEADLINE:
        raise ValueError(
            f"deadline is {deadline} s, but must be positive and at most {LONGEST_DEADLINE:.0e}"
        )
