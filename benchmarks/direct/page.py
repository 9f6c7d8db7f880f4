"""Table of direct reads beside exchanges and FBGEMM's lookup."""

from benchmarks.harness import page
from benchmarks.harness.record import Record
from benchmarks.modules.page import inputs_of, interval, module_of, place_of


def section(record: Record) -> str:
    """Forward times, and how often the forward of bound 0 takes that of direct reads."""
    rows, slower = [], []
    for result in sorted(record["results"], key=place_of):
        times = [f"{result['ms'][name]['median']:.3f}" for name in ("torchrec", "bound 0")]
        times += [f"{result['ms'][name]['median']:.3f}" for name in ("direct", "lookup")]
        ratios = [interval(result[name]) for name in ("speedup", "over_lookup")]
        rows.append([module_of(result), result["ranks"], *inputs_of(result), *times, *ratios])
        if result["speedup"][2] < 1:
            slower.append(f"{module_of(result)}, batch {result['batch']}: bound 0")
    of = ["batch", "ids", "rows", "dim"]
    peers = ["TorchRec on gloo", "bound 0", "direct", "FBGEMM"]
    return page.section(
        record,
        "Forward of each rank's own batch, ms, median; ratios of medians with 95 % intervals. "
        "FBGEMM looks the same ids up in whole tables of the rank's own, unchecked:",
        page.table(["module", "ranks", *of, *peers, "bound 0 / direct", "direct / FBGEMM"], rows),
        faster=slower,
    )
