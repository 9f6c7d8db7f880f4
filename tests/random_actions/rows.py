"""Refreshes a model by rows while others read it, kills them, and lets all act at random.

    python -m tests.random_actions.rows [--actions N]

One process keeps the tables: it publishes rows and whole versions, and makes mistakes. Three read
them. Every batch has to be of one version, the one that it says, bit for bit as the unsharded model
of that version has it. Nobody may wait beyond a deadline, and after each while all processes have
to follow a new version.
"""

import random
from collections import Counter
from pathlib import Path

from tests.direct import nodes
from tests.direct.forked import fork
from tests.direct.nodes import Nodes
from tests.direct.served import number_of
from tests.direct.test_keeper import KEEPER, keep
from tests.random_actions.counting import count_lives, options
from tests.random_actions.processes import KILL, hurt, lived
from tests.random_actions.rows_process import publish_at_random, read_at_random, settle

READERS = 3
KILL_KEEPER, KILL_READER, FORKED, READER = (
    "kill of the keeper",
    "kill of a reader",
    "forked process",
    "process that reads",
)
# Actions of the keeper and of each reader in a round, and the rounds of a life.
_PUBLICATIONS, _READS, _ROUNDS = 40, 200, 15
# Seconds of a life, on a busy machine.
_LONGEST_LIFE = 1200.0
# Models of float tables, and of quantized and float ones. They take turns.
_SERVED = ("tests.direct.refreshed", "tests.quant.refreshed")


class Refreshes:
    """The processes of a life.

    Args:
        folder: for sockets.
        seed: of everything that is drawn.
        served_by: module with the model and its weights.
    """

    def __init__(self, folder: Path, seed: int, served_by: str) -> None:
        self.counts: Counter[str] = Counter()
        self._processes = Nodes(folder, served_by, _LONGEST_LIFE)
        self._draw = random.Random(seed)
        self._born = 0
        self._readers: list[str] = []
        self._keeper = self._begin()
        assert not self._processes.call(self._keeper, keep, 1)

    def live(self, rounds: int, publications: int, reads: int) -> None:
        """Does that many rounds, in each of which all processes act."""
        for _ in range(rounds):
            while len(self._readers) < READERS:
                self._give_birth()
            self._act(publications, reads)
            self._settle()

    def close(self) -> None:
        self._processes.close()

    def _begin(self) -> str:
        self._born += 1
        name = f"born {self._born}"
        self._processes.start(name)
        return name

    def _give_birth(self) -> None:
        """Adds a reader: one that attaches, or one that another one has forked."""
        if self._readers and self._draw.random() < 0.3:
            self._born += 1
            name = f"born {self._born}"
            fork(self._processes, self._draw.choice(self._readers), name)
            self.counts[FORKED] += 1
        else:
            name = self._begin()
            self._processes.call(name, nodes.join, KEEPER)
            self.counts[READER] += 1
        self._readers.append(name)

    def _act(self, publications: int, reads: int) -> None:
        """Has all processes act at once, and stops or kills one of them meanwhile."""
        living = [self._keeper, *self._readers]
        pids = {name: self._processes.call(name, nodes.pid_of) for name in living}
        for name in living:
            seed = self._draw.randrange(1 << 32)
            if name == self._keeper:
                self._processes.begin(name, publish_at_random, seed, publications)
            else:
                self._processes.begin(name, read_at_random, seed, reads)
        killed = self._hurt(pids)
        for name in living:
            try:
                self.counts += self._processes.end(name)
            except (EOFError, ConnectionError):
                assert name == killed, f"{name} has died"
        if killed == self._keeper:
            self._keeper = self._begin()
            # It loads nothing: readers have the tables.
            assert self._processes.call(self._keeper, keep, None)
        elif killed is not None:
            self._readers.remove(killed)

    def _hurt(self, pids: dict[str, int]) -> str | None:
        """Stops a process for a while, or kills it and returns its name, or does nothing."""
        name = self._keeper if self._draw.random() < 0.5 else self._draw.choice(self._readers)
        fate = hurt(pids[name], self._draw, kills=0.5, longest=0.5)
        if fate == KILL:
            self.counts[KILL_KEEPER if name == self._keeper else KILL_READER] += 1
            return name
        if fate is not None:
            self.counts[fate] += 1
        return None

    def _settle(self) -> None:
        """Checks that all processes still follow: two more versions serve, one on each side."""
        for _ in range(2):
            number = self._processes.call(self._keeper, settle)
            self._processes.call_all([self._keeper, *self._readers], nodes.go_over, number)
        state = self._processes.call(self._keeper, nodes.state)
        assert number_of(state.version) == number and not state.problem


def live(
    seed: int, rounds: int = _ROUNDS, publications: int = _PUBLICATIONS, reads: int = _READS
) -> Counter[str]:
    """Returns how often each thing happened in one life; see `lived`."""
    served_by = _SERVED[seed % len(_SERVED)]
    return lived(
        seed,
        lambda folder: Refreshes(folder, seed, served_by),
        lambda refreshes: refreshes.live(rounds, publications, reads),
    )


def main() -> None:
    """Prints the actions by name. Ends with an error at the first life that goes wrong."""
    count_lives(options(__doc__).parse_args(), live)


if __name__ == "__main__":
    main()
