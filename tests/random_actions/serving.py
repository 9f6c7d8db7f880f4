"""Serves one model from four processes, kills and forks them, and lets all of them act at random.

    python -m tests.random_actions.serving [--actions N]

Every batch has to be of one version, the one that it says. Nobody may wait beyond a deadline, and
after each while all processes have to follow a version that all owners publish.
"""

import random
from collections import Counter
from pathlib import Path

from tests.direct import nodes
from tests.direct.forked import fork
from tests.direct.nodes import Nodes
from tests.random_actions.counting import count_lives, options
from tests.random_actions.processes import KILL, hurt, lived
from tests.random_actions.serving_process import (
    NUMBERS,
    act,
    count_readers,
    follow,
    offer_anew,
    prepare,
    settle,
)

PROCESSES, RANKS = 4, 2
FORKED, SUCCESSOR, READER = (
    "forked process",
    "process in the place of a rank",
    "process that reads",
)
# Actions of each process in a round, and the rounds of a life.
_ACTIONS, _ROUNDS = 40, 15
# Models of float tables, and of quantized and float ones. They take turns.
_SERVED = (nodes.FLOAT, "tests.quant.served")


class Serving:
    """The processes of a life.

    Args:
        folder: for sockets.
        seed: of everything that is drawn.
        served_by: module with the model and its weights.
    """

    def __init__(self, folder: Path, seed: int, served_by: str) -> None:
        self.counts: Counter[str] = Counter()
        self._processes = Nodes(folder, served_by)
        self._draw = random.Random(seed)
        self._living: list[object] = list(range(RANKS))
        self._forked: set[object] = set()
        self._born = 0
        self._settled = 1
        self._processes.start_ranks(RANKS)
        self._processes.call_all(self._living, prepare)
        self._processes.call_all(self._living, nodes.serve)

    def live(self, rounds: int, actions: int) -> None:
        """Does that many rounds, in each of which every process acts that often."""
        for _ in range(rounds):
            while len(self._living) < PROCESSES:
                self._give_birth()
            self._act(actions)
            self._settle()

    def close(self) -> None:
        self._processes.close()

    def _give_birth(self) -> None:
        """Adds a process: a forked one, or one that attaches, in the place of a rank or not."""
        self._born += 1
        source, gone = self._draw.choice(self._living), self._gone()
        name = f"born {self._born}"
        if self._draw.random() < 0.4:
            fork(self._processes, source, name)
            self._forked.add(name)
            self.counts[FORKED] += 1
        else:
            self._processes.start(name)
            self._processes.call(name, prepare)
            owner = self._draw.choice([*gone, None])
            self._processes.call(name, nodes.join, source, owner)
            self.counts[READER if owner is None else SUCCESSOR] += 1
        self._processes.call(name, offer_anew)
        self._living.append(name)

    def _gone(self) -> tuple[int, ...]:
        return tuple(self._processes.call(self._living[0], nodes.state).owners_gone)

    def _act(self, actions: int) -> None:
        """Has all processes act at once, and stops or kills one of them meanwhile."""
        pids = {name: self._processes.call(name, nodes.pid_of) for name in self._living}
        for name in self._living:
            seed = self._draw.randrange(1 << 32)
            others = [each for each in self._living if each != name]
            self._processes.begin(name, act, seed, actions, others)
        killed = self._hurt(pids)
        for name in list(self._living):
            try:
                self.counts += self._processes.end(name)
            except (EOFError, ConnectionError):
                assert name == killed, f"{name} has died"
        if killed is not None:
            self._living.remove(killed)

    def _hurt(self, pids: dict[object, int]) -> object:
        """Stops a process for a while, or kills it and returns its name, or does nothing."""
        name = self._draw.choice(self._living)
        fate = hurt(pids[name], self._draw, kills=0.4, longest=0.3)
        if fate is not None:
            self.counts[fate] += 1
        return name if fate == KILL else None

    def _settle(self) -> None:
        """Checks that all processes still follow: a version that all owners publish serves."""
        states = dict(
            zip(self._living, self._processes.call_all(self._living, nodes.state), strict=True)
        )
        publishers = {state.rank: name for name, state in states.items() if state.rank is not None}
        number = self._draw.choice([each for each in NUMBERS if each != self._settled])
        # By process, the ranks for which it publishes; None stands for its own.
        owners: dict[object, list[int | None]] = {name: [None] for name in publishers.values()}
        for owner in set(range(RANKS)) - publishers.keys():
            owners.setdefault(self._in_place_of(owner), []).append(owner)
        for name, of_process in owners.items():
            self._processes.begin(name, settle, number, of_process)
        for name in owners:
            self._processes.end(name)
        self._processes.call_all(self._living, follow, number)
        pids = sorted(self._processes.call_all(self._living, nodes.pid_of))
        self._processes.call_all(self._living, count_readers, pids)
        self._settled = number

    def _in_place_of(self, owner: int) -> object:
        """Returns a process that publishes for a rank that is gone. A forked one takes the rank's
        place for good, as it can't do otherwise."""
        able = [name for name in self._living if name not in self._forked]
        if able:
            return self._draw.choice(able)
        name, source = self._draw.choice(self._living), self._draw.choice(self._living)
        self._processes.call(name, nodes.join, source, owner)
        self._processes.call(name, offer_anew)
        self._forked.remove(name)
        self.counts[SUCCESSOR] += 1
        return name


def live(seed: int, rounds: int = _ROUNDS, actions: int = _ACTIONS) -> Counter[str]:
    """Returns how often each thing happened in one life; see `lived`."""
    served_by = _SERVED[seed % len(_SERVED)]
    return lived(
        seed,
        lambda folder: Serving(folder, seed, served_by),
        lambda serving: serving.live(rounds, actions),
    )


def main() -> None:
    """Prints the actions by name. Ends with an error at the first life that goes wrong."""
    count_lives(options(__doc__).parse_args(), live)


if __name__ == "__main__":
    main()
