"""Draws two steps of three ranks by one clock, as docs/tutorials/straggler.md records them.

`python docs/figures/traced_steps.py all.json` takes the steps over from a file that
`torchrec-bls trace --perfetto all.json` wrote. Without it the picture is drawn from those that were
taken over.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from svg import BLUE, ORANGE, Drawing

STEPS = Path(__file__).with_suffix(".json")
FIRST, NUMBER = 10, 2
STEP, WAITING = "#7f889233", ORANGE
LEFT, WIDTH, TOP, PITCH, BAR = 64, 780, 44, 76, 26
_RANKS_APART = 100  # process numbers of ranks in the joined trace


def steps_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns steps, posts and waits within the steps that are drawn: rank, kind, begin and
    duration in microseconds, from the begin of the first step on."""
    ranges = [
        (event["pid"] // _RANKS_APART, event["name"], event["ts"], event["dur"])
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
    ]
    wanted = {f"ProfilerStep#{FIRST + number}" for number in range(NUMBER)}
    steps = [each for each in ranges if each[1] in wanted]
    begin = min(each[2] for each in steps)
    end = max(each[2] + each[3] for each in steps)
    found = []
    for rank, name, start, duration in sorted(ranges, key=lambda each: each[:3]):
        if start < begin or start + duration > end:
            continue
        kind = "step" if name in wanted else _kind_of(name)
        if kind:
            found.append(
                {
                    "rank": rank,
                    "kind": kind,
                    "name": name,
                    "begin_us": round(start - begin, 1),
                    "us": round(duration, 1),
                }
            )
    return found


def _kind_of(name: str) -> str:
    match = re.match(r"bls::\S+ (post|wait) seq=", name)
    return match[1] if match else ""


def drawing() -> Drawing:
    """Returns the picture."""
    events = json.loads(STEPS.read_text())
    end = max(each["begin_us"] + each["us"] for each in events)
    per_us = WIDTH / end
    picture = Drawing(
        860, 316, "Ranks 0 and 1 wait in each step until rank 2, which is late, has posted"
    )
    picture.label(LEFT, 18, "Two steps of three ranks by one clock", "start", bold=True)
    for rank in sorted({each["rank"] for each in events}):
        y = TOP + rank * PITCH
        picture.label(LEFT - 8, y + BAR, f"rank {rank}", "end")
        for each in events:
            if each["rank"] != rank:
                continue
            x, width = LEFT + each["begin_us"] * per_us, each["us"] * per_us
            if each["kind"] == "step":
                number = each["name"].partition("#")[2]
                picture.bar(x, y, width - 1, 2 * BAR, STEP)
                picture.label(x + 6, y + 12, f"step {number}", "start")
            else:
                colour = WAITING if each["kind"] == "wait" else BLUE
                picture.bar(x, y + BAR, max(width, 1.5), BAR, colour)
    _draw_axis(picture, end, per_us)
    picture.legend(LEFT, 302, {"post": BLUE, "wait": WAITING})
    return picture


def _draw_axis(picture: Drawing, end: float, per_us: float) -> None:
    y = TOP + 3 * PITCH - 10
    picture.line((LEFT, y), (LEFT + WIDTH, y))
    for ms in range(0, int(end / 1000) + 1, 10):
        x = LEFT + 1000 * ms * per_us
        picture.line((x, y), (x, y + 5))
        picture.label(x, y + 16, f"{ms} ms")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        steps = steps_of(json.loads(Path(sys.argv[1]).read_text()))
        lines = ",\n".join(json.dumps(each) for each in steps)
        STEPS.write_text(f"[\n{lines}\n]\n")
    drawing().save(__file__)
