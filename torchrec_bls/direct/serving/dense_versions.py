"""The dense state of each version: what this process has published, and what others hand over."""

from collections.abc import Mapping
from typing import Any

from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.serving.dense_state import DenseState
from torchrec_bls.direct.serving.publisher import Publisher


class DenseVersions:
    """Finds the dense state that belongs to a generation of the tables.

    Args:
        dense: dense state of the model.
        publisher: publisher of the model's tables. Other processes' dense states lie behind them.
    """

    def __init__(self, dense: DenseState, publisher: Publisher) -> None:
        self._dense = dense
        self._publisher = publisher
        # By serial number, as this process has published them.
        self._own: dict[int, tuple[str, dict[str, Any]]] = {}

    def keep(self, serial: int, version: str, state: dict[str, Any]) -> None:
        """Keeps the state of a version that this process publishes. It replaces the one of a
        version that was withdrawn."""
        self._own[serial] = version, state

    def kept(self) -> dict[int, tuple[str, dict[str, Any]]]:
        """Returns version and state by serial number."""
        return dict(self._own)

    def drop(self, serial: int) -> None:
        """Drops the state of a version that was withdrawn."""
        self._own.pop(serial, None)

    def forget_until(self, serial: int) -> None:
        """Drops the states up to the one that the model has."""
        for each in list(self._own):  # another thread may be keeping one
            if each <= serial:
                self._own.pop(each, None)

    def begin_in_child(self) -> None:
        """Forgets what the parent publishes, which may fail: segments have what it announced."""
        self._own.clear()

    def of(self, newest: Generation) -> Mapping[str, Any] | None:
        """Returns the dense state of a generation, or None if there is none.

        Args:
            newest: generation of the first module.

        Raises:
            ProtocolError: another process published the state of another model.
        """
        version, own = self._own.get(newest.serial, ("", None))
        if version == newest.version:
            return own
        given = self._publisher.dense_weights(newest)
        if given is not None:
            self._dense.check(given, f"version {newest.version!r}")
        return given
