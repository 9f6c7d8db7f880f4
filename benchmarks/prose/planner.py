"""Sentences on performance models, planning and simulated steps."""

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from benchmarks.prose.figures import NUMBERS, Records, Sentences, range_of


def performance_models(records: Records) -> Sentences:
    results = records["performance-models"]["results"]
    every, curves = results["collectives"]["all"], results["collectives"]["by_curve"]
    lookups = {
        name: of["models"]["analytic x trees, unique rows (ours)"]
        for name, of in results["lookups"].items()
    }
    even, uneven = (_errors(every[f"all_to_all, {kind}"]) for kind in ("between", "uneven"))
    yield f"| even {even}, uneven {uneven} |"
    yield f"| 4.98 / 6.77 | {_errors(every['all_reduce, between'])} |"
    yield f"| 5.64 / 9.17 | {_errors(lookups['pooled forward'])} |"
    yield f"| 3.63 / 5.44 | {_errors(lookups['pooled backward'])} |"
    yield f"to {_errors(lookups['unpooled backward'])}. Their form follows from"
    straight = sum(each["curve"] == "AlphaBeta" for each in curves.values())
    which = f"All {NUMBERS[straight]}" if straight == len(curves) else f"{straight}"
    yield f"{which} curves below are straight lines"
    retests = range_of([each["retest_gmae_percent"] for each in curves.values()], ".0f")
    yield f"measurements of one collective differ by {retests} % on two cores"
    runs = records["sharding_search"]["results"]
    seconds = {
        planner: [
            each["seconds"]
            for each in runs
            if each["tables"] == 1000 and each["planner"] == planner
        ]
        for planner in ("ours", "torchrec")
    }
    minutes = range_of([each / 60 for each in seconds["torchrec"]])
    yield (
        f"Planning 1,000 tables for 128 ranks takes {range_of(seconds['ours'], '.0f')} s. "
        f"TorchRec's planner takes {minutes} minutes"
    )
    theirs = [each for each in runs if each["planner"] == "torchrec"]
    over = range_of([100 * each["over_bound"] for each in theirs if "over_bound" in each], ".0f")
    yield f"They are {over} % over the bound"
    fullest = max(each["fullest_rank"] for each in theirs if "fullest_rank" in each)
    yield f"its plans need up to {fullest:.2f} times what a rank has"


def _errors(scores: Any) -> str:
    return f"{scores['gmae_percent']:.1f} / {scores['mape_percent']:.1f}"


def simulated_steps(records: Records) -> Sentences:
    suites = records["simulator"]["results"]
    scores = {suite: of["scores"] for suite, of in suites.items()}

    def both(form: str, value_of: Callable[[Any], float], joined: str = " and ") -> str:
        return joined.join(format(value_of(of), form) for of in suites.values())

    ours = {suite: of["simulated"] for suite, of in scores.items()}
    yield (
        f"predicted with an error of {ours['A']['mape']:.1f} % on average at 2 ranks with a core "
        f"each and {ours['B']['mape']:.1f} % at 4 ranks on 2 cores. That is "
        f"{both('.0f', lambda of: 100 * of['lower_mape'][1])} % less than the error of an affine"
    )
    yield f"Two visits of the same plans differ by {both('.1f', lambda of: of['retest_gmae'])} %"
    mean = both(".1f", lambda of: of["scores"]["simulated"]["gmae"])
    yield f"The geometric mean of the errors is {mean} %, the paper's 5.21 %"
    shortest = both(".1f", lambda of: of["by_kind"]["bls, inference"]["mape"])
    yield f"Over `bls` without gradients errors are the largest, {shortest} %"
    most = both(".0f", lambda of: of["scores"]["simulated"]["most"])
    yield f"Single steps are off by up to {most} %"
    low = {
        suite: f"{-of['Algorithm 1']['bias']:.0f} and {-of['sum of kernels']['bias']:.0f} %"
        for suite, of in scores.items()
    }
    yield f"are {low['A']} too low at 2 ranks, {low['B']} at 4"
    algorithm_1 = both(".1f", lambda of: of["scores"]["Algorithm 1, affine"]["mape"])
    torchrec = both(".0f", lambda of: of["scores"]["TorchRec's estimator, affine"]["mape"])
    yield (
        f"Algorithm 1 without T1 to T5 is off by {algorithm_1} %, TorchRec's estimator by "
        f"{torchrec} %"
    )
    yield from _choices(suites)
    near = " and ".join(
        str(sum(regret <= 0.1 for regret in of["picks"]["regret"])) for of in suites.values()
    )
    chance = {suite: 100 * np.mean(of["picks"]["chance"]) for suite, of in suites.items()}
    yield (
        f"the fastest in {chance['A']:.0f} % of the models of suite A and {chance['B']:.0f} % of "
        f"suite B, so that our {near} of 60 have little room"
    )
    yield from _bounds(records["simulator_lag"]["results"])
    yield from _codecs(records["simulator_links"]["results"])
    named = np.sum(list(records["simulator_traced"]["results"]["named"].values()), axis=0)
    yield (
        f"the rank that was delayed is named in {named[0]} of {named[1]}, where a guess among 4 "
        f"ranks would name {named[1] // 4}"
    )
    yield f"{_transformers(records['simulator_transformer']['results'])}, without a fit to any"


def _choices(suites: Any) -> Sentences:
    def near(name: str) -> str:
        return " and ".join(f"{of['choices'][name]['near']:.0f}" for of in suites.values())

    random = [f"{of['choices']['at random, the mean']['near']:.0f}" for of in suites.values()]
    yield (
        f"at random is within 10 % of the best in {random[0]} of 60 models at 2 ranks and in "
        f"{random[1]} at 4"
    )
    slower = " and ".join(
        f"{100 * of['choices']['simulated']['regret']:.1f}" for of in suites.values()
    )
    yield f"Picked by simulation it is in {near('simulated')}, and {slower} % slower on average"
    sharders = ("naive", "random", "size_greedy", "lookup_greedy", "norm_lookup_greedy")
    best = " and ".join(
        str(max(of["choices"][name]["near"] for name in (*sharders, "size_lookup_greedy")))
        for of in suites.values()
    )
    yield (
        f"Our planner's own first plan is in {near('ours 1')}, the best single sharder in {best}, "
        f"TorchRec's planner in {near('torchrec')}"
    )


def _bounds(results: Any) -> Sentences:
    by_setting: dict[Any, dict[int, float]] = {}
    for each in results["cells"]:
        of = by_setting.setdefault((each["ranks"], each["delays"]), {})
        of[each["bound"]] = median(each["measured_ms"])
    near = {
        bound: sum(ms[bound] <= 1.03 * min(ms.values()) for ms in by_setting.values())
        for bound in (16, 4, 0)
    }
    yield (
        f"always 16, the largest, is within 3 % of the best in {near[16]} of {len(by_setting)} "
        f"settings, always 4 in {near[4]}, always 0 in {near[0]}"
    )
    shorter = [
        100 * (1 - each["simulated_ms"] / each["measured_ms"]["mean"])
        for each in results["figure_7"]
    ]
    yield f"There simulated steps are {range_of(shorter, '.0f')} % shorter"


def _codecs(results: Any) -> Sentences:
    ms = [{codec: of["median"] for codec, of in each["ms"].items()} for each in results]
    near = sum(each["uint4"] <= 1.05 * min(each.values()) for each in ms)
    regrets = [
        of[each["chosen"]] / min(of.values()) - 1 for of, each in zip(ms, results, strict=True)
    ]
    chosen = sum(each <= 0.05 for each in regrets)
    yield (
        f"always uint4 is within 5 % of the best in {near} of {len(results)} cells. The chosen one "
        f"is in {chosen}, {100 * np.mean(regrets):.1f} % slower on average"
    )
    off = [
        100 * (each["simulated_ms"][codec] / time - 1)
        for of, each in zip(ms, results, strict=True)
        for codec, time in of.items()
        if time < 2
    ]
    yield (
        f"Steps of less than 2 ms on links are predicted up to {-min(off):.0f} % too short, and up "
        f"to {max(off):.0f} % too long"
    )


def _transformers(results: Any) -> str:
    short = {
        suite: -100
        * np.mean(
            [
                each["predicted_ms"]["simulated"] / each["ms"]["median"] - 1
                for each in results
                if each["suite"] == suite
            ]
        )
        for suite in ("A", "B")
    }
    return f"are predicted {short['A']:.1f} % too short at 2 ranks and {short['B']:.1f} % at 4"
