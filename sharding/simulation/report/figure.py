"""Throughput and memory by bound and codec, as a figure. It needs the extra "plot"."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from ..bounds import BoundOutcome

_US = 1e6  # in a second
_GIB = 2**30


def curves_svg(outcomes: Sequence[BoundOutcome]) -> str:
    """Returns an SVG element: steps a second and memory by bound, with a curve for each codec.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    of_codec = {
        codec: sorted((each for each in outcomes if each.codec == codec), key=lambda o: o.bound)
        for codec in dict.fromkeys(each.codec for each in outcomes)
    }
    figure, (throughput, memory) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    for codec, own in of_codec.items():
        bounds = [each.bound for each in own]
        throughput.plot(bounds, [_US / each.step_us for each in own], marker="o", label=codec)
        memory.plot(bounds, [each.memory_bytes / _GIB for each in own], marker="o", label=codec)
    throughput.set_ylabel("steps a second")
    memory.set_ylabel("GiB of the fullest rank")
    for axes in (throughput, memory):
        axes.set_xlabel("bound")
        axes.set_xticks(sorted({each.bound for each in outcomes}))
        axes.set_ylim(bottom=0)
    memory.legend(fontsize="small")
    figure.tight_layout()
    text = StringIO()
    # No date and no random names: the same simulation gives the same page.
    with matplotlib.rc_context({"svg.hashsalt": "torchrec-bls"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return "<svg" + text.getvalue().partition("<svg")[2]
