"""A plan's report as a figure. It needs the extra "plot" (matplotlib)."""

from pathlib import Path

import numpy as np

from .plan_report import PlanReport


def save_figure(report: PlanReport, path: Path) -> None:
    """Writes a picture of what each rank computes, communicates and holds to `path`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = report.rating.ranks
    numbers = np.arange(len(ranks))
    compute = np.array([rank.compute.microseconds for rank in ranks]) / 1000
    communication = np.array([rank.communication.microseconds for rank in ranks]) / 1000
    step = compute + communication
    below = step - np.array([rank.step.low for rank in ranks]) / 1000
    above = np.array([rank.step.high for rank in ranks]) / 1000 - step

    figure, (times, memory) = pyplot.subplots(
        2, 1, figsize=(max(6.0, min(20.0, 0.25 * len(ranks) + 3)), 6), sharex=True
    )
    times.bar(numbers, compute, label="compute")
    times.bar(numbers, communication, bottom=compute, label="communication")
    times.errorbar(
        numbers, step, [below, above], fmt="none", ecolor="black", capsize=2, label="interval"
    )
    times.axhline(report.rating.step.microseconds / 1000, ls="--", c="grey", label="step")
    if "step" in report.measured_us:
        times.axhline(report.measured_us["step"] / 1000, ls=":", c="red", label="measured step")
    times.set_ylabel("ms a step")
    times.legend(ncols=4, fontsize="small", loc="lower left", bbox_to_anchor=(0, 1))

    bottom = np.zeros(len(ranks))
    for name in ("shard", "slot", "result"):
        amount = np.array([getattr(rank, f"{name}_bytes") for rank in ranks]) / 2**30
        memory.bar(numbers, amount, bottom=bottom, label=f"{name}s")
        bottom += amount
    memory.set_ylabel(f"GiB of {report.job.memory_kind}")
    memory.set_xlabel("rank")
    memory.legend(ncols=3, fontsize="small", loc="lower left", bbox_to_anchor=(0, 1))
    memory.xaxis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
