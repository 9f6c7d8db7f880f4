"""Draws the step of a DLRM by the bound k, as it was measured (docs/results/delays.md)."""

import json
from pathlib import Path

from svg import BLUE, GREEN, GREY, Drawing

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "delays.json"
LEFT, TOP, WIDTH, HEIGHT, MOST_MS = 70, 52, 560, 230, 40.0


def drawing() -> Drawing:
    """Returns the picture."""
    runs = json.loads(RECORD.read_text())["results"]["dlrm"]
    picture = Drawing(860, 340, "A step gets shorter up to bound 2, and then no more")
    picture.label(
        LEFT, 18, "A DLRM on 4 ranks, each late by 0 to 10 ms: ms a step", "start", bold=True
    )
    for ms in range(0, int(MOST_MS) + 1, 10):
        picture.line((LEFT, _y(ms)), (LEFT + WIDTH, _y(ms)), colour="#7f889255")
        picture.label(LEFT - 10, _y(ms), str(ms), "end")
    (gloo,) = (run for run in runs if run["bound"] is None)
    bounded = [run for run in runs if run["bound"] is not None]
    across = [LEFT + WIDTH * (0.5 + place) / len(bounded) for place in range(len(bounded))]
    measured = [run["ms_per_step"]["median"] for run in bounded]
    ideal = [run["ideal_ms"] for run in bounded]
    level = _y(gloo["ms_per_step"]["median"])
    picture.line((LEFT, level), (LEFT + WIDTH, level), colour=GREY, dashed=True)
    picture.label(LEFT + WIDTH + 10, level, "TorchRec on gloo", "start")
    picture.line(*zip(across, map(_y, ideal), strict=True), colour=GREEN, dashed=True)
    picture.line(*zip(across, map(_y, measured), strict=True), colour=BLUE)
    for x, run, ms in zip(across, bounded, measured, strict=True):
        picture.dot(x, _y(ms), BLUE)
        picture.label(x, _y(ms) - 18, f"{ms:.1f}")
        picture.label(x, TOP + HEIGHT + 18, f"k = {run['bound']}")
    picture.label(LEFT + WIDTH + 10, _y(measured[-1]), "torchrec-bls", "start")
    picture.legend(LEFT, 326, {"measured": BLUE, "if exchanges cost nothing": GREEN})
    return picture


def _y(ms: float) -> float:
    return TOP + HEIGHT * (1 - ms / MOST_MS)


if __name__ == "__main__":
    drawing().save(__file__)
