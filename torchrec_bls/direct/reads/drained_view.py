"""What lookups find in the place of tables while these are drained."""

from typing import NoReturn

from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.process import is_alive, pid_of
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.errors import DrainedError

# One owner has all tables.
_OWNER = 0


class DrainedView:
    """The view of a generation without rows: whatever a lookup asks for is an error.

    Args:
        where: name of the module, for messages.
        tables: tables of the module.
        generation: the generation.

    Attributes:
        generation: see above.
    """

    def __init__(self, where: str, tables: SharedTables, generation: Generation) -> None:
        self.generation = generation
        self._where = where
        self._tables = tables

    def of(self, _: object) -> NoReturn:
        """Raises DrainedError: float tables are asked so."""
        self._refuse()

    @property
    def module(self) -> NoReturn:
        """Raises DrainedError: quantized tables are asked so."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise DrainedError(f"{self._where}: {why_drained(self._tables, self.generation)}")


def why_drained(tables: SharedTables, generation: Generation) -> str:
    """Returns why no version of some tables serves, and what to do.

    Args:
        tables: the tables.
        generation: generation without rows.
    """
    owner = tables.page.process(_OWNER)
    what = f"the tables are drained: version {generation.drained_for!r}"
    if is_alive(owner):
        return (
            f"{what} is made by process {pid_of(owner)}, on a host that can't hold two versions. "
            "Send requests to another replica until serving_state(model).drained_for is empty"
        )
    return (
        f"{what} was to be made by a process that is gone. Start a keeper, or publish a version by "
        "publish(..., owner=0), and send requests to another replica until it serves"
    )
