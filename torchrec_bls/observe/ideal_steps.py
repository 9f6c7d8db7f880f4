"""The best that any exchange can do under a bound: step times with a free network."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def ideal_finish_times(
    before_post: npt.ArrayLike, bound: int, after_wait: npt.ArrayLike | None = None
) -> npt.NDArray[np.float64]:
    """Computes when each rank ends each step if exchanging costs nothing and the bound holds.

    In step t a rank works for ``before_post[r, t]``, posts, waits until every rank has posted in
    step t - k, and works for ``after_wait[r, t]``:

        post[r, t]   = finish[r, t - 1] + before_post[r, t]
        wait[r, t]   = max(post[r, t], max over q of post[q, t - k])     (t >= k)
        finish[r, t] = wait[r, t] + after_wait[r, t]

    with finish[r, -1] = 0 and no waiting before step k. A pipeline with two queues (ids, then
    embeddings) waits in step t for ids posted in step t - k and for embeddings posted in step
    t - k. So each of its queues keeps the bound k, and one wait a step stands for both: the result
    is a lower bound for it. The rule is that of the BLS paper, Listing 2: a process waits for the
    all-to-all of k iterations ago.

    Without ``after_wait`` three facts hold. For k = 0 the last step ends at the sum over steps of
    the slowest rank's duration. If k is at least the number of steps, the slowest rank ends at the
    largest sum. More lag never makes a step later.

    Args:
        before_post: (ranks, steps), durations in any unit, not negative.
        bound: the bound k.
        after_wait: (ranks, steps), or None for zeros.

    Returns:
        The end of each step, (ranks, steps) float64, in the unit of the durations.

    Raises:
        ValueError: the bound or a duration is negative, a duration is not finite, or shapes differ
            or have no ranks.
    """
    before = _check_durations("before_post", before_post)
    after = before * 0 if after_wait is None else _check_durations("after_wait", after_wait)
    if after.shape != before.shape:
        raise ValueError(f"after_wait has shape {after.shape}, before_post {before.shape}")
    if bound < 0:
        raise ValueError(f"bound is {bound}; a bound is 0 or more steps")
    ranks, steps = before.shape
    finish = np.empty((ranks, steps))
    last_post = np.empty(steps)
    now = np.zeros(ranks)
    for step in range(steps):
        now = now + before[:, step]
        last_post[step] = now.max()
        if step >= bound:
            now = np.maximum(now, last_post[step - bound])
        now = now + after[:, step]
        finish[:, step] = now
    return finish


def _check_durations(name: str, durations: npt.ArrayLike) -> npt.NDArray[np.float64]:
    array = np.asarray(durations, dtype=np.float64)
    if array.ndim != 2 or array.shape[0] == 0:
        raise ValueError(f"{name} has shape {array.shape}, expected (ranks, steps)")
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise ValueError(f"{name} has durations that are negative or not finite")
    return array
