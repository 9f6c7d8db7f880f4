"""Draws lives and births until enough was done: python -m tests.random_actions [--actions N]."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.processes import run
from tests.random_actions.births import WHATS, give_birth
from tests.random_actions.check import check
from tests.random_actions.counting import count_lives, options
from tests.random_actions.life import Life

# A group makes some models and ends, so that what one leaves behind does not add up.
_BIRTHS_A_GROUP = 10 * len(WHATS)


def main() -> None:
    """Prints the actions by name. Ends with an error at the first life that goes wrong."""
    parser = options(__doc__)
    parser.add_argument("--births", type=int, default=1_100, help="how many at least")
    given = parser.parse_args()
    with ThreadPoolExecutor(1) as beside:
        # A late rank is waited for, which takes no core.
        births = beside.submit(_births, given.seed, given.births)
        count_lives(given, _live, births.result)


def _live(seed: int) -> Counter[str]:
    life = Life.draw(seed, epochs=6, batches=300)
    return check(life) + Counter({f"life over {life.transport}": 1})


def _births(seed: int, births: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for group in range(-(-births // _BIRTHS_A_GROUP)):
        ranks = 2 + group % 2
        drawn = run(ranks, give_birth, seed + group, _BIRTHS_A_GROUP, WHATS, deadline=600)
        counts += drawn[0]
    return counts


if __name__ == "__main__":
    main()
