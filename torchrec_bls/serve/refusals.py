"""The share of requests that are refused."""

# Seconds whose requests count: this many and those of the ones before them, up to twice as many.
_SECONDS = 0.5


class Refusals:
    """Counts which share of the requests of the last second were refused."""

    def __init__(self) -> None:
        self._began = 0.0
        # Decided and refused requests, of this half second and of the one before it.
        self._now = self._before = (0, 0)

    def add(self, is_refused: bool, now: float) -> None:
        """Counts a request.

        Args:
            is_refused: whether it was refused.
            now: this moment, in seconds of `time.monotonic()`.
        """
        if now >= self._began + _SECONDS:
            self._before = self._now if now < self._began + 2 * _SECONDS else (0, 0)
            self._now = (0, 0)
            self._began = now
        decided, refused = self._now
        self._now = decided + 1, refused + is_refused

    @property
    def share(self) -> float:
        """Returns the share of those that are refused; 0 without requests."""
        decided = self._now[0] + self._before[0]
        refused = self._now[1] + self._before[1]
        return refused / decided if decided else 0.0
