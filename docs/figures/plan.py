"""Draws a plan of tables on ranks: what each rank has to do, and which tables it holds.

The plan is plan.json, which is written by

    torchrec-bls plan --model examples/tables.json --profile epyc-milan-2-cores --ranks 8 \\
        --inference --json docs/figures/plan.json
"""

import json
from pathlib import Path
from typing import Any

from svg import BLUE, GREEN, GREY, ORANGE, Drawing

PLAN = Path(__file__).with_suffix(".json")
LEFT, TOP, WIDTH, PITCH, BAR = 64, 48, 420, 38, 26
TABLES = LEFT + WIDTH + 40


def drawing() -> Drawing:
    """Returns the picture."""
    plan = json.loads(PLAN.read_text())
    ranks = plan["ranks"]
    picture = Drawing(
        860, TOP + PITCH * len(ranks) + 78, "A plan makes the slowest rank as fast as possible"
    )
    step_us, bound_us = plan["step_us"]["predicted"], plan["lower_bound_us"]
    per_us = WIDTH / (1.05 * step_us)
    picture.label(LEFT, 18, "What each rank has to do in a step", "start", bold=True)
    picture.label(TABLES, 18, "Its tables", "start", bold=True)
    for rank, each in enumerate(ranks):
        y = TOP + rank * PITCH
        compute = each["compute_us"]["predicted"] * per_us
        exchange = each["communication_us"]["predicted"] * per_us
        picture.label(LEFT - 8, y + BAR / 2, f"rank {rank}", "end")
        picture.bar(LEFT, y, compute, BAR, BLUE)
        picture.bar(LEFT + compute, y, exchange, BAR, ORANGE)
        picture.label(TABLES, y + BAR / 2, _tables(plan["decisions"], rank), "start")
    bottom = TOP + PITCH * len(ranks)
    for us, text, colour, side in (
        (step_us, f"step: {step_us:,.0f} us", GREY, "start"),
        (bound_us, f"no plan is below {bound_us:,.0f} us", GREEN, "end"),
    ):
        x, y = LEFT + us * per_us, bottom + 10
        picture.line((x, TOP - 8), (x, y), colour=colour, dashed=True)
        picture.label(x + (6 if side == "start" else -6), y, text, side)
    picture.legend(LEFT, bottom + 58, {"lookups": BLUE, "exchanges": ORANGE})
    return picture


def _tables(decisions: list[dict[str, Any]], rank: int) -> str:
    held = [each for each in decisions if rank in each["ranks"]]
    whole = [each for each in held if len(each["ranks"]) == 1]
    parts = [each["table"] for each in held if len(each["ranks"]) > 1]
    text = f"{len(whole)} whole"
    if parts:
        shown = ", ".join(parts[:2]) + (f" and {len(parts) - 2} more" if len(parts) > 2 else "")
        text += f", parts of {shown}"
    return text


if __name__ == "__main__":
    drawing().save(__file__)
