"""Draws what a bound does: four ranks that are late now and then, at k = 0 and at k = 2.

The times are those of `ideal_finish_times`: exchanges cost nothing, so that all there is to see is
waiting.
"""

import numpy as np
from svg import BLUE, ORANGE, Drawing

from torchrec_bls.observe import ideal_finish_times

RANKS, STEPS, USUAL_MS, LATE_MS = 4, 12, 4.0, 12.0
WAITING = "#7f889255"
LEFT, BAR, PITCH, PER_MS = 64, 24, 29, 6.2


def durations() -> np.ndarray:
    """Returns (RANKS, STEPS) milliseconds: each rank is late in one step of four, at random."""
    late = np.random.default_rng(5).random((RANKS, STEPS)) < 0.25
    return np.where(late, LATE_MS, USUAL_MS)


def draw_timelines(picture: Drawing, top: float, work: np.ndarray, bound: int, title: str) -> None:
    """Draws the ranks' steps one under the other, and when the last one ends."""
    finish = ideal_finish_times(work, bound)
    start = np.concatenate([np.zeros((RANKS, 1)), finish[:, :-1]], axis=1)
    end = float(finish.max())
    # Said at the left as well: a telephone shows no more at first.
    picture.label(LEFT, top, f"k = {bound}, {end:.0f} ms: {title}", "start", bold=True)
    top += 18
    for rank in range(RANKS):
        y = top + rank * PITCH
        picture.label(LEFT - 8, y + BAR / 2, f"rank {rank}", "end")
        for step in range(STEPS):
            begin, busy = float(start[rank, step]), float(work[rank, step])
            waited = float(finish[rank, step]) - begin - busy
            x, width = LEFT + begin * PER_MS, busy * PER_MS
            colour = ORANGE if busy > USUAL_MS else BLUE
            picture.bar(x, y, width - 1, BAR, colour, str(step))
            if waited > 0:
                picture.bar(x + width, y, waited * PER_MS - 1, BAR, WAITING)
    x, bottom = LEFT + end * PER_MS, top + RANKS * PITCH - (PITCH - BAR)
    picture.line((x, top - 4), (x, bottom + 4))
    picture.label(x + 6, (top + bottom) / 2, f"{end:.0f} ms", "start")


def drawing() -> Drawing:
    """Returns the picture."""
    picture = Drawing(
        860,
        336,
        "At k = 0 every step takes as long as its slowest rank, at k = 2 ranks hardly wait",
    )
    work = durations()
    draw_timelines(picture, 16, work, 0, "every step takes as long as its slowest rank")
    draw_timelines(
        picture, 166, work, 2, "a late rank holds up nobody who is less than 2 steps ahead"
    )
    picture.legend(
        LEFT,
        320,
        {
            "step, with its number": BLUE,
            "step in which the rank is late": ORANGE,
            "waiting for others": WAITING,
        },
    )
    return picture


if __name__ == "__main__":
    drawing().save(__file__)
