"""Tables of the service under load, and of its refreshes."""

from typing import Any

from benchmarks.harness import page
from benchmarks.harness.record import Record
from benchmarks.serve import shape
from benchmarks.serve.outcome import PERCENTILES


def load_section(record: Record) -> str:
    """What becomes of requests at shares of the capacity."""
    rows = []
    for result in record["results"]:
        at_capacity = {"level": 1.0, "rate": result["capacity"], **result.get("confirmed", {})}
        levels = [*result["levels"], *([at_capacity] if "confirmed" in result else [])]
        levels.sort(key=lambda level: float(level["level"]))
        rows += [_row(result["tables"], level) for level in levels]
    header = [
        *("tables", "% of the capacity", "requests/s", "in time/s", "allowed/s"),
        *("late, %", "refused, %"),
        *(
            "failed",
            *(f"p{percent:g}" for percent in PERCENTILES),
            "refused, p99",
            "of it 503, p99",
        ),
        *("service", "generator"),
    ]
    settings = record["settings"]
    return page.section(
        record,
        f"At most {1000 * settings['deadline_s']:g} ms from the intended send are in time; late is "
        "a share of the answers, refused of the requests; 504 is a request that was admitted and "
        "became hopeless. Allowed is what the CPU would answer that refusals leave"
        f"{_costs_of_refusals(record['results'])}. Latencies in ms, over "
        f"{settings['repetitions']} runs of {settings['run_s']:g} s; CPU of the service and of the "
        "generator in cores; else medians:",
        page.table(header, rows),
    )


def refresh_section(record: Record) -> str:
    """Answers during refreshes, and latencies beside those of a run without."""
    settings, results = record["settings"], record["results"]
    rows = []
    for title, key in (("refreshes", "refreshed"), ("copies of as many bytes", "beside")):
        run = results[key]
        rows.append(
            [
                title,
                run["offered"],
                run["in_time"],
                run["late"],
                sum(run["refused"].values()),
                sum(run["failed"].values()),
                *(_ms(run["answers_ms"][f"p{percent:g}"]) for percent in PERCENTILES),
                f"{run['server_cores']:.2f}",
            ]
        )
    checked = (
        f"{settings['tables']} tables, {settings['rate']:g} requests/s for "
        f"{settings['seconds']:g} s, {results['written']} checkpoints, one every "
        f"{settings['every_s']:g} s. {len(results['versions'])} versions have answered. "
        f"{results['wrong']} of {results['answers']} answers differ from the named version's by "
        f"more than 1e-6; the largest difference is {results['largest_difference']:.1e}."
    )
    header = ["beside", "requests", "in time", "late", "refused", "failed"]
    header += [*(f"p{percent:g}, ms" for percent in PERCENTILES), "service, cores"]
    return page.section(record, checked, page.table(header, rows))


def _costs_of_refusals(results: list[dict[str, Any]]) -> str:
    costs = [f"{each['refusal_ms']:.3f}" for each in results if "refusal_ms" in each]
    return f", of which one takes {' and '.join(costs)} ms" if costs else ""


def _row(tables: str, level: dict[str, Any]) -> list[object]:
    refused = 100 * sum(level["refused"].values()) / max(1, level["offered"])
    return [
        tables,
        f"{100 * level['level']:.0f}",
        f"{level['rate']:.0f}",
        f"{level['in_time_rate']['median']:.0f}",
        f"{level['allowed_rate']:.0f}" if level.get("allowed_rate") and level["level"] > 1 else "",
        f"{level['late_percent']['median']:.2f}",
        f"{refused:.1f}",
        sum(level["failed"].values()),
        *(_ms(level["answers_ms"][f"p{percent:g}"]) for percent in PERCENTILES),
        _ms(level["refusals_p99_ms"]),
        _ms(level["early_refusals_p99_ms"]),
        f"{level['server_cores']['median']:.2f}",
        f"{level['generator_cores']['median']:.2f}",
    ]


def _ms(latency: float | None) -> str:
    return "" if latency is None else f"{latency:.1f}"


def costs_section(record: Record) -> str:
    """CPU of a request in the model and beside it."""
    rows = [
        [
            f"{each['rate']:g}",
            *(f"{each[name]['median']:.2f}" for name in ("request_ms", "model_ms", "beside_ms")),
            f"{each['beside_ms']['min']:.2f} to {each['beside_ms']['max']:.2f}",
        ]
        for each in record["results"]
    ]
    idle = record["results"][0]["idle_cores"]
    return page.section(
        record,
        "CPU of a request of 32 candidates, binary, ms, medians of "
        f"{record['settings']['repetitions']} runs. Without requests the service takes {idle:.3f} "
        "cores, which are taken off:",
        page.table(["requests/s", "in all", "the model", "beside it", "range"], rows),
    )


def fire_section(record: Record) -> str:
    """What requests notice of deaths and replacements."""
    rows = []
    for each in record["results"]:
        lost = each["lost"]
        rows.append(
            [
                each["scenario"],
                each["times"],
                each["offered"],
                ", ".join(f"{count} {why}" for why, count in lost.items()) or 0,
                sum(each["refused"].values()),
                each["late"],
                each["wrong"],
                *(_ms(each["answers_ms"][f"p{percent:g}"]) for percent in PERCENTILES),
                f"{max(each['again_s']):.2f}" if each["again_s"] else "",
            ]
        )
    header = ["what happens", "times", "requests", "lost", "refused", "late", "wrong"]
    header += [*(f"p{percent:g}, ms" for percent in PERCENTILES), "answers again after, s"]
    return page.section(
        record,
        f"Float tables, {record['settings']['rate']:g} requests/s, two workers:",
        page.table(header, rows),
    )


def freshness_section(record: Record) -> str:
    """Seconds from a step of a training until its files are written, and until answers have it."""
    settings, results = record["settings"], record["results"]
    told = ", ".join(f"{seconds:.2f} s" for seconds in results["told_s"].values())
    rows = [
        [what, *(f"{results[key][name]:.2f}" for name in ("median", "q3", "max"))]
        for what, key in (
            ("until the delta is written", "written_s"),
            ("until the first answer of a worker", "first_answer_s"),
            ("until answers of all callers", "all_answer_s"),
        )
    ]
    firsts = " and ".join(f"{each:.2f}" for each in results["of_the_first_s"])
    return page.section(
        record,
        f"{settings['deltas']} deltas of {settings['changed']:,} rows in {shape.TABLES} tables of "
        f"{settings['rows']:,}, one every {settings['every_s']:g} s; seconds from the end of the "
        f"step. The two deltas before them took {firsts} s until answers of all callers. The "
        f"workers' own metric says {told} on average. {results['wrong']} of "
        f"{results['answers']} answers differ from the training's by more than 1e-5.",
        page.table(["", "median", "third quartile", "longest"], rows),
    )
