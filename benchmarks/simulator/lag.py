"""Steps by the bound, simulated and measured: sleeping ranks that are held up, and real exchanges.

Suite C of the study. Ranks sleep for the time of a dense part, so that 8 of them need no 8 cores;
what they exchange over the bounded-lag channel is real. Every run is a stretch of steps; the runs
of all bounds take turns. The runs of the bounded-lag paper's Figure 7, measured by
`benchmarks.paper_bls`, are simulated as well.
"""

import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torchrec_bls.sharding.costs.profile import load_profile
from torchrec_bls.sharding.costs.profiled import ProfiledCosts
from torchrec_bls.sharding.simulation.bounds import WORTH
from torchrec_bls.sharding.simulation.delays import read_delays
from torchrec_bls.sharding.simulation.engine.timeline import simulate
from torchrec_bls.sharding.simulation.program import Ranks, graph_of

from benchmarks.delays.exchanges import PAIR_KIB, Channel, Words, draw_delays, timed
from benchmarks.harness import page, record
from benchmarks.harness.launch import gathered, on_ranks
from benchmarks.harness.statistics import taking_turns
from benchmarks.paper_bls.windows import SEED
from torchrec_bls.rank_steps import Begin, Exchange, Messages, Wait, Work

CORES = 2
BOUNDS = (0, 1, 2, 4, 8, 16)
DELAYS = (
    "none",
    "constant:5ms",
    "uniform:0-2ms",
    "uniform:0-10ms",
    "uniform:0-30ms",
    "exponential:2ms",
    "exponential:5ms",
    "lognormal:2ms,0.8",
    "lognormal:1ms,1.5",
    "spikes:5%,50ms",
    "spikes:1%,100ms",
    "bursts:2%,20%,20ms",
)
_DENSE_S = 0.005
_SEED = 7
_US = 1e6
# WaitPolicy::yield_for of csrc/channel/waiter.h.
_YIELDS_US = 200.0


def main() -> None:
    parser = record.parser(__doc__, quick="two delays, few steps")
    parser.set_defaults(json=Path("out/simulator_lag.json"))
    parser.add_argument("--profile", default="epyc-milan-2-cores", help="file or name")
    options = parser.parse_args()
    settings: dict[str, Any] = {"ranks": (4, 8), "steps": 120, "rounds": 3, "delays": DELAYS}
    if options.quick:
        settings |= {"ranks": (4,), "steps": 30, "rounds": 1, "delays": DELAYS[3:5]}
    settings["profile"] = options.profile
    before = record.environment()
    cells: list[dict[str, Any]] = []
    host: dict[int, Host] = {}
    for ranks in settings["ranks"]:
        host[ranks], of_ranks = on_ranks(ranks, _measure, settings)
        cells += of_ranks
    results = {"host": host, "cells": cells, "figure_7": _figure_7(settings, host)}
    record.publish(options.json, "simulator_lag", before, settings, results, section)


class Host(NamedTuple):
    """What ranks of this host take that sleep and exchange next to nothing, seconds.

    Attributes:
        late: by which a sleep is longer than it is asked to be.
        latency: from the last rank's post until all ranks go on, beside what they do themselves.
    """

    late: float
    latency: float


def _measure(rank: int, settings: dict[str, Any]) -> tuple[Host, list[dict[str, Any]]]:
    ranks, steps = dist.get_world_size(), settings["steps"]
    costs = ProfiledCosts(load_profile(settings["profile"]))
    host = _host(steps)
    words = _words(steps, 128 * PAIR_KIB)
    channels = {bound: Channel(words, bound) for bound in BOUNDS}
    results = []
    for text in settings["delays"]:
        delays = read_delays(text).sample(ranks, steps, _SEED)
        own = (delays[rank] / _US).tolist()
        runs = {k: partial(timed, each.run, own, _DENSE_S) for k, each in channels.items()}
        taken = taking_turns(runs, settings["rounds"], f"{text}, {ranks} ranks")
        for bound, of_bound in taken.items():
            entry = {"ranks": ranks, "delays": text, "bound": bound}
            entry["measured_ms"] = [ms for ms, _ in of_bound]
            entry["simulated_ms"] = simulated_ms(delays, bound, host, costs)
            results.append(entry)
    for each in channels.values():
        each.close()
    return host, results


def _words(steps: int, count: int) -> Words:
    ranks = dist.get_world_size()
    words = np.full((steps, ranks, ranks), count)
    words[:, range(ranks), range(ranks)] = 0
    return words


def _host(steps: int, runs: int = 5) -> Host:
    """A message of a word is there in time at bound 1, and waited for at bound 0."""
    late = max(gathered(_oversleep_s()))
    channels = {bound: Channel(_words(steps, 1), bound, "shm") for bound in (0, 1)}
    nothing = [0.0] * steps
    turns = {k: partial(timed, each.run, nothing, _DENSE_S) for k, each in channels.items()}
    taken = taking_turns(turns, runs)
    for each in channels.values():
        each.close()
    waiting, ahead = (min(ms for ms, _ in taken[bound]) for bound in (0, 1))
    return Host(late, max(0.0, waiting - ahead) / 1e3)


def _figure_7(settings: dict[str, Any], host: dict[int, Host]) -> list[dict[str, Any]]:
    """Steps of the record of the paper's evaluation beside simulations of the same delays."""
    stages = record.read(record.RESULTS / "paper_bls.json")["stages"]
    costs = ProfiledCosts(load_profile(settings["profile"]))
    rows = []
    for ranks in settings["ranks"]:
        stage = stages[f"fig7-delays-{ranks}"]
        own = stage["settings"]
        delays = _US * draw_delays(SEED, ranks, own["steps"], own["max_delay"])
        for entry in stage["results"]:
            if entry["peer"] == "shm":
                each = {
                    "ranks": ranks,
                    "bound": entry["bound"],
                    "measured_ms": entry["ms_per_step"],
                }
                predicted = simulated_ms(delays, entry["bound"], host[ranks], costs)
                rows.append({**each, "simulated_ms": predicted})
    return rows


def simulated_ms(delays: Any, bound: int, host: Host, costs: ProfiledCosts) -> float:
    """Milliseconds of a step of the same runs, whose ranks read next to nothing of what arrives;
    puts are half of an all-to-all, and what one without bytes takes is in `host`."""
    ranks, steps = delays.shape
    nothing, each = ([bytes] * ranks for bytes in (0.0, 1024.0 * PAIR_KIB * (ranks - 1)))
    whole, empty = (costs.all_to_all(of, of, "bls", 1.0).microseconds for of in (each, nothing))
    late = host.late * _US
    held_up = np.where(delays > 0, delays + late, 0.0)
    exchange = Exchange("messages")
    program = [
        Begin(exchange, Messages(host.latency * _US), work_us=(whole - empty) / 2),
        Wait(exchange, lag=bound),
        Work(0.0, "dense", _DENSE_S * _US + late, lag=bound),
    ]
    # Whoever waits yields its core at first, and takes to wake up what one takes that slept.
    where = Ranks.on_hosts(ranks, ranks, CORES, spin_us=_YIELDS_US, wake_us=late)
    graph = graph_of(program, where, steps, held_up)
    return float(simulate(graph).end.max()) / steps / 1e3


def _oversleep_s(sleeps: int = 50, asked: float = 0.002) -> float:
    start = time.perf_counter()
    for _ in range(sleeps):
        time.sleep(asked)
    return (time.perf_counter() - start) / sleeps - asked


def section(run: dict[str, Any]) -> str:
    """A row for each setting, and how good the bounds are that simulations choose."""
    cells: defaultdict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    for each in run["results"]["cells"]:
        of_setting = cells[f"{each['ranks']} ranks, {each['delays']}"]
        of_setting[each["bound"]] = float(np.median(each["measured_ms"])), each["simulated_ms"]
    rows, errors, regrets = [], [], []
    for name, by_bound in cells.items():
        measured = {bound: ms for bound, (ms, _) in by_bound.items()}
        least = min(ms for _, ms in by_bound.values())
        # The smallest that is nearly as fast as the fastest, as `choose_bound` takes it.
        chosen = min(k for k, (_, ms) in by_bound.items() if ms <= WORTH * least)
        regrets.append(measured[chosen] / min(measured.values()) - 1)
        errors += [np.log(predicted / ms) for ms, predicted in by_bound.values()]
        texts = [f"{ms:.2f} ({100 * (p / ms - 1):+.0f} %)" for ms, p in by_bound.values()]
        rows.append([name, *texts, chosen, f"{100 * regrets[-1]:.1f}"])
    gmae = 100 * np.expm1(np.exp(np.mean(np.log(np.maximum(np.abs(errors), 1e-4)))))
    near = sum(regret <= 0.03 for regret in regrets)
    header = ["ranks, delays", *(f"k = {k}, ms" for k in BOUNDS), "chosen", "regret, %"]
    summary = (
        f"GMAE {gmae:.1f} %; the chosen bound is within 3 % of the best in {near} of {len(rows)} "
        f"settings, mean regret {100 * np.mean(regrets):.1f} %."
    )
    return page.section(run, summary, page.table(header, rows), *_figure_7_table(run))


def _figure_7_table(run: dict[str, Any]) -> list[str]:
    rows = []
    for each in run["results"]["figure_7"]:
        measured, simulated = each["measured_ms"], each["simulated_ms"]
        error = 100 * (simulated / measured["mean"] - 1)
        interval = f"{measured['mean']:.2f} ± {measured['ci95']:.2f}"
        rows.append([each["ranks"], each["bound"], interval, f"{simulated:.2f}", f"{error:+.1f}"])
    header = ["ranks", "bound", "measured, ms", "simulated, ms", "error, %"]
    title = "**Figure 7 of the bounded-lag paper**: delays of 0-10 ms, shared memory."
    return [title, page.table(header, rows)]


if __name__ == "__main__":
    main()
