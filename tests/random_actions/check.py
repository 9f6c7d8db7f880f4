"""Lives a life on its ranks, and checks how they end together."""

from collections import Counter

from tests.processes import run_outcomes
from tests.random_actions.life import Life, live

# How a rank may end when another was interrupted: it hears why, or finds the other gone.
_HEARD = {
    "KeyboardInterrupt",
    "PoisonedError",
    "PeerClosedError",
    "PeerDiedError",
    "RendezvousError",
}


def check(life: Life, deadline: float = 120.0) -> Counter[str]:
    """Returns the actions that the ranks did, by name.

    Raises:
        AssertionError: an answer was wrong, or a rank did not end; the text has the life.
    """
    outcomes = run_outcomes(life.ranks, live, life, deadline=deadline)
    actions: Counter[str] = Counter()
    ends = []
    for outcome in outcomes:
        assert outcome.error is None or (
            outcome.error == "KeyboardInterrupt" and outcome.rank == life.interrupted
        ), f"{life}: {outcome}"
        if outcome.error is None:
            done, end = outcome.value
            actions += done
            ends.append(end)
        else:
            ends.append("KeyboardInterrupt")
    if life.interrupted is None or "KeyboardInterrupt" not in ends:
        assert set(ends) == {"end"}, f"{life}: {ends}"
    else:
        # Ranks may have had all they wanted before.
        assert set(ends) <= _HEARD | {"end"}, f"{life}: {ends}"
    return actions
