"""Pauses between processes that take each other's place."""

# What has lived for fewer seconds is followed by another one after a pause, doubled each time up to
# the longest.
_SHORT_LIFE, _SHORTEST, _LONGEST = 2.0, 0.1, 10.0


class Pause:
    """When the next process may begin: at once, or later and later if none of them lives for long.

    Attributes:
        until: the moment, in seconds of `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.until = 0.0
        self._seconds = 0.0

    def ended(self, began: float, now: float) -> float:
        """Takes the end of a process into account. Returns the seconds until the next one.

        Args:
            began: moment of its begin.
            now: this moment.
        """
        is_short = now - began < _SHORT_LIFE
        self._seconds = min(max(_SHORTEST, 2 * self._seconds), _LONGEST) if is_short else 0.0
        self.until = now + self._seconds
        return self._seconds
