"""Backwards with planned buckets beside the defaults, over links of several speeds."""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel
from torchrec_bls.sharding import load_profile
from tqdm import tqdm

from benchmarks.harness import page, record
from benchmarks.harness.launch import gathered
from benchmarks.harness.networks import links_of_ranks, over_network
from benchmarks.harness.statistics import Spread, geometric_mean, in_turns, ratio_of_medians
from benchmarks.overlap.models import MODELS, model_and_batch
from torchrec_bls import overlap
from torchrec_bls.overlap import hook
from torchrec_bls.overlap.bucket_plan import OverlapPlan
from torchrec_bls.overlap.measured.trial import Trial
from torchrec_bls.overlap.modes.calibration import fit_modes
from torchrec_bls.overlap.modes.mode import with_modes
from torchrec_bls.overlap.modes.timer import OverlapTimer
from torchrec_bls.overlap.prediction import modes_as_measured, typical_layers
from torchrec_bls.overlap.search.allocation import allocate
from torchrec_bls.overlap.search.timeline import Group, Layer

FULL: dict[str, Any] = {"ranks": [2, 4], "gbit": [None, 5.0, 1.0], "models": list(MODELS)}
FULL |= {"backends": ["gloo", "bls"], "turns": 9, "steps": 2, "minutes": 0.7}
# Where the plan replaces a default, turns go on until ratios of medians are so certain.
FULL |= {"most_turns": 36, "half_interval": 0.02}
QUICK = FULL | {
    "ranks": [2],
    "gbit": [None],
    "models": ["Kaggle DLRM"],
    "turns": 2,
    "steps": 1,
    "most_turns": 4,
}
QUICK |= {"minutes": 0.05}
DEFAULTS = {"ddp": "DDP", "torchrec": "TorchRec"}
POLICIES = {"plan": "plan", **DEFAULTS, "all": "one bucket", "one by one": "a bucket a layer"}
_WARM_UP = 5  # DDP makes its buckets in the second step
# Layers of which every fusion is executed, and where.
_MERGED, _ORACLE = 5, {"ranks": 2, "gbit": 1.0}
_SIZES = tuple(2**k for k in range(14, 26, 2))


def measure_on_rank(rank: int, backend: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Calibrates this network, and compares all models in it."""
    torch.set_num_threads(1)
    group = dist.new_group(backend=backend)
    timer = OverlapTimer(group, codecs=False, seconds=60 * settings["minutes"], sizes=_SIZES)
    timer.measure_until(time.monotonic() + 60 * settings["minutes"])
    timer.close()
    modes = [fit_modes(timer.samples())]
    dist.broadcast_object_list(modes)
    profile = with_modes(
        load_profile("epyc-milan-2-cores"), {(backend, dist.get_world_size()): modes[0]}
    )
    found = []
    for name in tqdm(settings["models"], disable=rank != 0, unit="model"):
        model, batch = model_and_batch(name, rank)
        plan = overlap.plan(model, profile, [batch], group=group)
        found.append({"model": name} | _compare(plan, model, batch, group, settings))
    return found


def _compare(
    plan: OverlapPlan, model: nn.Module, batch: Any, group: Any, settings: dict[str, Any]
) -> dict[str, Any]:
    each = len(plan.layers)
    plans = {"plan": plan, "one by one": replace(plan, groups=(Group(1),) * each)}
    plans |= {"all": replace(plan, groups=(Group(each),))}
    defaults = {"ddp": {}, "torchrec": {"bucket_cap_mb": 25}}
    policies = {name: _wrapped(model, group, **how) for name, how in defaults.items()}
    policies |= {name: _following(own, model, group) for name, own in plans.items()}
    ms = _backward_ms(policies, batch, settings)
    replaced = [name for name in DEFAULTS if getattr(plan, f"replaces_{name}_default")]
    while replaced and not _is_certain(ms, replaced, settings):
        compared = {name: policies[name] for name in ("plan", *replaced)}
        for name, more in _backward_ms(compared, batch, settings).items():
            ms[name] = Spread([*ms[name].values_in_order, *more.values_in_order])
    predicted = {name: own.prediction.planned for name, own in plans.items()}
    by_default = plan.prediction.ddp_default, plan.prediction.torchrec_default
    predicted |= dict(zip(DEFAULTS, by_default, strict=True))
    with _noting_starts() as starts:
        _backward_ms({"plan": policies["plan"]}, batch, settings | {"turns": 3}, starts)
    result = {
        "layers": each,
        "mib": sum(layer.bytes for layer in plan.layers) / 2**20,
        "groups": [[group.layers, group.mode] for group in plan.groups],
        "replaces": {name: name in replaced for name in DEFAULTS},
        "alone_ms": plan.prediction.alone_us / 1e3,
        "tried_ms": plan.trial and _tried(plan.trial),
        "ms": ms,
        "retest": {name: _retest(each.values_in_order) for name, each in ms.items()},
        "predicted": {
            name: {"middle": each.timeline.finish / 1e3} for name, each in predicted.items()
        },
        "over": {
            name: ratio_of_medians(ms["plan"].values_in_order, ms[name].values_in_order)
            for name in DEFAULTS
        },
        "starts_ms": _starts(plan, starts),
    }
    if settings["where"] == _ORACLE:
        result["oracle"] = _oracle(plan, model, batch, group, settings)
    return result


def _is_certain(ms: dict[str, Spread], replaced: list[str], settings: dict[str, Any]) -> bool:
    own = ms["plan"].values_in_order
    ratios = [ratio_of_medians(own, ms[name].values_in_order) for name in replaced]
    half = max((high - low) / 2 for low, _, high in ratios)
    return half <= settings["half_interval"] or len(own) >= settings["most_turns"]


def _tried(trial: Trial) -> dict[str, float]:
    times = trial.planned_us, trial.ddp_default_us, trial.torchrec_default_us
    return {name: float(np.median(us)) / 1e3 for name, us in zip(POLICIES, times, strict=False)}


def _wrapped(model: nn.Module, group: Any, **how: Any) -> DistributedDataParallel:
    return DistributedDataParallel(
        copy.deepcopy(model), process_group=group, gradient_as_bucket_view=True, **how
    )


def _following(plan: OverlapPlan, model: nn.Module, group: Any) -> DistributedDataParallel:
    """Follows the plan, whether or not it would replace the default."""
    ddp = _wrapped(model, group, **plan._buckets_argument())
    plan._register(ddp, True)
    return ddp


def _backward_ms(
    policies: dict[str, nn.Module],
    batch: Any,
    settings: dict[str, Any],
    starts: list[Any] | None = None,
) -> Any:
    def sample(model: nn.Module, steps: int) -> float:
        times = []
        for _ in range(steps):
            model.zero_grad()
            loss = model(*batch).sum()
            dist.barrier()
            begin = time.perf_counter()
            if starts is not None:
                starts.append([begin])
            loss.backward()  # type: ignore[no-untyped-call]
            times.append(time.perf_counter() - begin)
        return 1e3 * float(np.mean(np.max(gathered(times), axis=0)))

    for model in policies.values():
        sample(model, _WARM_UP)
    if starts is not None:
        starts.clear()
    samplers = {name: partial(sample, model, settings["steps"]) for name, model in policies.items()}
    return in_turns(samplers, settings["turns"])


@contextmanager
def _noting_starts() -> Iterator[list[Any]]:
    """Has a list for each backward: when it began, and each bucket's average."""
    starts: list[Any] = []

    def noting(label: str) -> Any:
        if starts:
            starts[-1].append(time.perf_counter())
        return record_function(label)

    with patch.object(hook, "record_function", noting):
        yield starts


def _retest(ms: Sequence[float]) -> float:
    """How far the medians of the first and of the last turns are from each other, as a share."""
    half = len(ms) // 2
    return abs(float(np.median(ms[:half]) / np.median(ms[-half:])) - 1)


def _starts(plan: OverlapPlan, starts: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """When the last rank began each all-reduce, the median, and when it was predicted to."""
    own = [each for each in starts if len(each) == 1 + len(plan.groups)]
    of_ranks = gathered([np.subtract(each[1:], each[0]) for each in own])
    measured = 1e3 * np.median(np.max(of_ranks, axis=0), axis=0)
    predicted = [each / 1e3 for each in plan.prediction.planned.timeline.begin]
    return {"measured": measured.tolist(), "predicted": predicted}


def _oracle(
    plan: OverlapPlan, model: nn.Module, batch: Any, group: Any, settings: dict[str, Any]
) -> dict[str, Any]:
    """Executes every fusion of a few merged layers, and what the allocation chooses of them."""
    typical = typical_layers(plan.layers)
    bytes_before = np.cumsum([layer.bytes for layer in typical])
    cuts = np.searchsorted(bytes_before, np.arange(1, _MERGED) / _MERGED * bytes_before[-1]) + 1
    ends = sorted({*cuts.tolist(), len(typical)} - {0})
    sizes = np.diff([0, *ends]).tolist()
    merged = [
        Layer(sum(each.compute_us for each in part), sum(each.bytes for each in part))
        for first, size in zip([0, *ends], sizes, strict=False)
        for part in (typical[first : first + size],)
    ]
    modes = modes_as_measured(plan.modes, plan.layers, plan.reduced_us)
    policies, chosen = {}, allocate(merged, [mode.times for mode in modes])
    wanted = tuple(np.cumsum([each.layers for each in chosen]).tolist())
    for count in range(len(sizes)):
        for inner in combinations(range(1, len(sizes)), count):
            bounds = (*inner, len(sizes))
            parts = zip((0, *bounds), bounds, strict=False)
            groups = tuple(Group(sum(sizes[first:last])) for first, last in parts)
            policies[bounds] = _following(replace(plan, groups=groups), model, group)
    ms = _backward_ms(policies, batch, settings)
    best = min(ms, key=lambda each: ms[each]["median"])
    excess = ms[wanted]["median"] / ms[best]["median"] - 1
    return {"best": list(best), "chosen": list(wanted), "excess": excess}


def _off(errors: Sequence[float]) -> str:
    """Mean absolute error and bias of relative errors, as a reader says them."""
    return f"{100 * np.mean(np.abs(errors)):.1f} % off (bias {100 * np.mean(errors):+.1f} %)"


def _score(scores: Sequence[tuple[float, float]], inside: Sequence[bool]) -> str:
    """Errors of predictions, how many measured times are inside of intervals, and retests."""
    if not scores:
        return "none"
    errors, retests = zip(*scores, strict=True)
    of_intervals = f", {100 * np.mean(inside):.0f} % inside their intervals" if inside else ""
    return (
        f"{_off(errors)}{of_intervals}; medians of the first and of the last turns are "
        f"{100 * np.mean(retests):.1f} % from each other on average"
    )


def section(made: record.Record) -> str:
    """All cells, and the bars: gains, predictions, starts, oracle."""
    rows, late, gains, oracle, worse, tried = [], [], [], [], [], []
    errors: dict[str, list[float]] = {name: [] for name in POLICIES}
    scores: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    inside: dict[bool, list[bool]] = {True: [], False: []}
    for cell in made["results"]:
        ms = {name: each["median"] for name, each in cell["ms"].items()}
        link = "loopback" if cell["gbit"] is None else f"{cell['gbit']:g} Gbit/s"
        where = f"{cell['model']}, {cell['ranks']} ranks, {cell['backend']}, {link}"
        ratios = [
            f"{r:.2f} ({low:.2f}-{high:.2f})" for low, r, high in map(cell["over"].get, DEFAULTS)
        ]
        decision = [DEFAULTS[name] for name in DEFAULTS if cell["replaces"][name]]
        rows.append(
            [
                *(cell["model"], cell["ranks"], cell["backend"], link, f"{cell['mib']:.1f}"),
                *(f"{each:.1f}" for each in (cell["alone_ms"], ms["ddp"], ms["torchrec"])),
                *(f"{ms['plan']:.1f}", *ratios, " and ".join(decision) or "neither"),
            ]
        )
        of_one = {"plan": len(cell["groups"]) == 1, "all": True, "torchrec": cell["mib"] <= 25}
        for name, predicted in cell["predicted"].items():
            errors[name].append(predicted["middle"] / ms[name] - 1)
            is_one = of_one.get(name, False)
            scores[is_one].append((errors[name][-1], cell["retest"][name]))
            if "low" in predicted:  # of plans that had intervals
                inside[is_one].append(predicted["low"] <= ms[name] <= predicted["high"])
        tried += [each / ms[name] - 1 for name, each in (cell["tried_ms"] or {}).items()]
        starts = zip(*cell["starts_ms"].values(), strict=True)
        late += [abs(p - m) <= max(1.0, 0.1 * m) for m, p in starts]
        if cell["gbit"] == 1.0 and ms["all"] > 1.3 * cell["alone_ms"]:
            gains.append(1 / cell["over"]["torchrec"][1] if cell["replaces"]["torchrec"] else 1.0)
        if "oracle" in cell:
            oracle.append(cell["oracle"]["excess"])
        worse += [
            f"{where}: {DEFAULTS[name]}'s default"
            for name in DEFAULTS
            if cell["replaces"][name] and cell["over"][name][2] > 1.02
        ]
    header = ["model", "ranks", "backend", "link", "MiB", "alone", "DDP", "TorchRec", "plan"]
    header += ["over DDP", "over TorchRec", "replaces"]
    off = ", ".join(f"{POLICIES[name]} {_off(own)}" for name, own in errors.items())
    several, one = (_score(scores[is_one], inside[is_one]) for is_one in (False, True))
    lines = [
        f"Predicted backwards of several buckets: {several}. Those of one bucket, "
        f"which the plan has measured in place: {one}. By policy: {off}. "
        f"{100 * np.mean(late):.0f} % of the planned all-reduces began within 10 % or 1 ms of the "
        "predicted moment."
    ]
    if tried:
        lines.append(f"What plans tried before the training: {_off(tried)}.")
    if gains:
        low, mean, high = geometric_mean(gains)
        lines.append(
            f"At 1 Gbit/s, where communication is at least 0.3 of compute, backwards are "
            f"{mean:.2f} times as fast as by TorchRec's default ({low:.2f}-{high:.2f})."
        )
    if oracle:
        lines.append(
            f"Beside the best of all fusions of {_MERGED} merged layers, executed: "
            f"{100 * np.median(oracle):.1f} % more in the median, "
            f"{100 * max(oracle):.1f} % at worst."
        )
    return page.section(
        made,
        "Milliseconds of a backward with its all-reduces, slowest rank, medians of the turns; "
        "ratios of medians with their 95 % intervals by bootstrap.",
        page.table(header, rows),
        "\n\n".join(lines),
        faster=worse,
    )


def main() -> None:
    parser = record.parser(__doc__, quick="one model on loopback, two turns")
    arguments = parser.parse_args()
    settings = QUICK if arguments.quick else FULL
    links = links_of_ranks(parser, settings)
    before = record.environment()
    results = []
    for ranks, gbit, network in links:
        where = {"ranks": ranks, "gbit": gbit}
        for backend in settings["backends"] if gbit is None else ["gloo"]:
            own = settings | {"where": where}
            found = over_network(network, ranks, measure_on_rank, backend, own)
            results += [where | {"backend": backend} | each for each in found]
    record.publish(arguments.json, "overlap", before, settings, results, section)


if __name__ == "__main__":
    main()
