"""Tables of direct reads: beside exchanges and FBGEMM's lookup, under faults, and in switches."""

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


def latency_section(record: Record) -> str:
    """Quantiles of single forwards."""
    rows = [
        [module_of(result), *inputs_of(result)[:3], *(f"{result[q]:.3f}" for q in _QUANTILES)]
        for result in sorted(record["results"], key=place_of)
    ]
    return page.section(
        record,
        f"{record['settings']['forwards']:,} forwards of 26 tables through "
        "DistributedModelParallel on 2 ranks, which do not wait for each other; ms, the larger of "
        "the two ranks' quantiles:",
        page.table(["module", "batch", "ids", "rows", *_QUANTILES], rows),
    )


_QUANTILES = ("median", "p90", "p99")
_STRUCK = {
    "delays": "the other ranks sleep U(0,10) ms more in each step",
    "slow": "one rank's dense work takes 10 times as long",
    "stopped": "one rank is stopped (SIGSTOP)",
    "killed": "one rank is killed (SIGKILL)",
}


def faults_section(record: Record) -> str:
    """Steps of the healthy ranks, and what a fault of another one costs them."""
    rows = [
        [
            _STRUCK[result["fault"]],
            f"{result['steps']:,}",
            f"{result['ms']['median']:.2f}",
            f"{result['ms_with_fault']['median']:.2f}",
            interval(result["mean"]),
            interval(result["p99"]),
        ]
        for result in record["results"]
    ]
    return page.section(
        record,
        "Steps of the healthy ranks of 4, a lookup and 5 ms of sleep for the dense work; every "
        "answer was compared with the exchange's. Ratios with the fault to without, of pairs of "
        "windows that follow each other, with 95 % intervals:",
        page.table(
            ["fault", "steps", "ms without", "ms with", "mean, with / without", "p99"], rows
        ),
    )


def switches_section(record: Record) -> str:
    """Lookups of a reader beside a process that is idle, copies tables, and publishes them."""
    settings, (result,) = record["settings"], record["results"]
    rows = [
        [phase, f"{of['lookups']:,}", *(f"{of[each]:.2f}" for each in ("median", "p99", "p99_9"))]
        for phase, of in result["phases"].items()
    ]
    return page.section(
        record,
        f"A reader's lookups, batches of {settings['batch']}, while another process is idle, "
        f"copies its 26 tables of {settings['rows']:,} rows, and publishes them, "
        f"{settings['publications']} times. Every output was of exactly one version. The p99.9 "
        f"of switching is {interval(result['over_idle_p99'])} times the p99 beside an idle "
        f"process, and {interval(result['over_copying_p99_9'])} times the p99.9 beside one that "
        "copies:",
        page.table(["other process", "lookups", "median, ms", "p99, ms", "p99.9, ms"], rows),
    )


def idle_section(record: Record) -> str:
    """Processor time of a process that only follows."""
    rows = [
        [f"{each['descriptors']:,}", "lost" if each["lost"] else "none", f"{each['percent']:.2f}"]
        for each in record["results"]
    ]
    return page.section(
        record,
        f"Processor time of a process without batches that follows, over "
        f"{record['settings']['seconds']:g} s, as a percentage of one processor:",
        page.table(["descriptors of other processes", "new generation", "%"], rows),
    )


def threads_section(record: Record) -> str:
    """Forwards a second of one thread and of two."""
    rows = [
        [
            module_of(each),
            each["batch"],
            each.get("ids", 1),
            f"{each['one']['median']:,.0f}",
            f"{each['two']['median']:,.0f}",
            f"{each['ratio']['median']:.2f} ({each['ratio']['min']:.2f} to "
            f"{each['ratio']['max']:.2f})",
        ]
        for each in record["results"]
    ]
    return page.section(
        record,
        "Forwards a second of 26 tables through DistributedModelParallel in one process, by one "
        f"thread and by two that call the same model; {record['settings']['turns']} turns:",
        page.table(["module", "batch", "ids", "one thread", "two", "ratio"], rows),
    )


def service_tables_section(record: Record) -> str:
    """Loads and refreshes of a checkpoint; attaches and switches by the size of the tables."""
    load, *sizes = record["results"]
    mib = 1 << 20
    peer = load["torchrec"]
    rate, of_peer = (
        load["float_gib"] * (1 << 30) / 1e9 / seconds
        for seconds in (load["load_processor_s"], peer["processor_s"])
    )
    generation = f"{load['generation'] / mib:.0f}"
    loads = page.table(
        ["", "GB of float32 a core second", "peak, MiB", "of it INT8 rows, MiB"],
        [
            ["keeper", f"{rate:.2f}", f"{load['load_peak'] / mib:.0f}", generation],
            ["TorchRec", f"{of_peer:.2f}", f"{peer['peak'] / mib:.0f}", ""],
        ],
    )
    seconds, ratio, extra = (load[name]["median"] for name in ("refresh_s", "ratio", "extra"))
    share = 100 * load["extra"]["max"] / load["generation"]
    refresh = (
        f"A refresh with 1 of 26 tables changed took {seconds:.2f} s, {ratio:.2f} "
        f"({load['ratio']['min']:.2f} to {load['ratio']['max']:.2f}) times as long as reading and "
        f"hashing the directory once, medians of {record['settings']['repetitions']}. It wrote "
        f"{load['written'] / mib:.1f} MiB and reused {load['reused'] / mib:.0f} MiB. At most it "
        f"took {share:.1f} % more memory ({extra / mib:.0f} MiB, the median)."
    )
    rows = [
        [
            f"{size['gib']:g}",
            *(
                f"{size[name]['median']:.3f}" if name in size else ""
                for name in ("attach_s", "first_answer_s", "switch_s", "switch_answer_s")
            ),
            f"{size['page_tables_kib']['median']:.0f}" if "page_tables_kib" in size else "",
        ]
        for size in sizes
    ]
    times = ["attach, s", "first answer, s", "switch, s", "its first answer, s"]
    by_size = page.table(["INT8 rows, GiB", *times, "page tables, KiB"], rows)
    return page.section(record, loads, refresh, by_size)


def row_refresh_section(record: Record) -> str:
    """Deltas beside whole versions, and batches beside deltas."""
    settings, results = record["settings"], record["results"]
    whole = results["whole_s"]["median"]
    written = results["written_s"]["median"]
    forwards = {name: each["median"] for name, each in results["forward_ns"].items()}
    rows = [
        [
            what,
            page.median_and_range(results[key]),
            f"{100 * results[key]['median'] / whole:.1f}",
            f"{results[key]['median'] / written:.1f}",
        ]
        for what, key in (
            ("a whole version", "whole_s"),
            ("the first delta after it", "first_delta_s"),
            (f"the second one, {settings['rest_s']:g} s later", "second_delta_s"),
            ("all from the second one on", "delta_s"),
            ("writing as many rows twice, by a process alone", "written_s"),
        )
    ]
    batches = [
        [kind, f"{of['count']:,}", *(f"{of[each]:.2f}" for each in ("p50", "p99", "p99.9"))]
        for kind, of in results["batches"].items()
    ]
    return page.section(
        record,
        f"26 float tables, {settings['gib']:g} GiB; a delta has {settings['percent']:g} % of their "
        f"rows, scattered. Seconds from the call until {settings['readers']} readers, which run "
        "batch after batch, have had one of the version, median and range:",
        page.table(["", "seconds", "% of a whole version", "times writing the rows twice"], rows),
        f"The tables' memory in all processes is {results['memory_times']:.2f} times the tables, "
        "once the readers have left the whole version. A delta every "
        f"{settings['every_s']:g} s, and another process that writes as many rows as often, take "
        "turns; the p99.9 beside deltas is "
        f"{interval(results['over_writes_p99_9'])} times that beside writes. Batches of 128:",
        page.table(["beside", "batches", "median, ms", "p99, ms", "p99.9, ms"], batches),
        "A forward of 26 bags with an id each takes "
        f"{forwards['rows'] - forwards['whole']:.0f} ns of the processor more where rows may be "
        f"refreshed, of {forwards['whole'] / 1e3:.1f} µs, medians.",
    )
