"""Sentences on the evaluation of the bounded-lag paper."""

from typing import Any

from benchmarks.prose.figures import KIB, MIB, Records, Sentences, alltoall_us, backend_us, range_of


def bls(records: Records) -> Sentences:
    stages = {name: stage["results"] for name, stage in records["paper_bls"]["stages"].items()}
    sizes = {
        (ranks, each["bytes"]): each["us"] for ranks in (4, 8) for each in stages[f"fig6a-{ranks}"]
    }
    four, more = sizes[8, 4 * KIB], sizes[8, 32 * KIB]
    overlapping = [
        size
        for (_, size), us in sizes.items()
        if us["open_mpi"]["mean"] - us["channel"]["mean"]
        <= us["open_mpi"]["ci95"] + us["channel"]["ci95"]
    ]
    small = sum(size <= 4 * KIB for size in overlapping)
    yield (
        f"{_means(four, ' against ')} µs at 4 KiB and {_means(more, ' against ')} µs at 32 KiB (8 "
        f"ranks). Intervals overlap in {len(overlapping)} of {len(sizes)} cells, of which {small} "
        "are up to 4 KiB"
    )
    slower = {cell: us["bls"]["mean"] / us["open_mpi"]["mean"] for cell, us in sizes.items()}
    large = range_of([times for (_, size), times in slower.items() if size == 4 * MIB])
    cells = sum(times > 1 for times in slower.values())
    which = f"all {cells}" if cells == len(slower) else f"{cells} of {len(slower)}"
    yield (f"slower than Open MPI in C in {which}, by {large} times at 4 MiB and more below")
    jumps = [
        " to ".join(f"{sizes[ranks, size * KIB]['open_mpi']['mean']:.0f}" for size in (4, 32))
        for ranks in (4, 8)
    ]
    yield f"({jumps[0]} µs with 4 ranks, {jumps[1]} µs with 8)"
    yield from _bls_trains(stages)
    later, mpi = backend_us(records), alltoall_us(records)
    own = [later[ranks, 8, "one_shot"]["bls"] for ranks in (4, 8)]
    times = [
        us / mpi[ranks, 8, "one_shot"]["open_mpi"] for us, ranks in zip(own, (4, 8), strict=True)
    ]
    then = " and ".join(f"{sizes[ranks, 8]['bls']['mean']:,.0f}" for ranks in (4, 8))
    yield (
        f"`bls` takes {own[0]:.0f} µs at 8 B with 4 ranks and {own[1]:.0f} µs with 8 "
        f"([backend](../results/backend.md)), not {then}. It is still slower than Open MPI there, "
        f"{times[0]:.1f} and {times[1]:.1f} times"
    )
    yield from _bls_bounds(stages)


def _means(us: dict[str, dict[str, float]], joined: str) -> str:
    return joined.join(f"{us[name]['mean']:.0f}" for name in ("channel", "open_mpi"))


def _bls_trains(stages: Any) -> Sentences:
    trains = {
        (ranks, each["repetitions"]): {name: of["mean"] for name, of in each["seconds"].items()}
        for ranks in (4, 8)
        for each in stages[f"fig6b-{ranks}"]
    }
    both = [each for each in trains.values() if "open_mpi" in each]
    less = range_of([each["open_mpi"] / each["channel"] for each in both])
    some, many = trains[8, 10_000], trains[4, 100_000]
    yield (
        f"the channel in C++ takes {less} times less than Open MPI, {some['channel']:.2f} against "
        f"{some['open_mpi']:.2f} s for 10,000 calls (8 ranks) and {many['channel']:.2f} against "
        f"{many['open_mpi']:.2f} s for 100,000 (4 ranks)"
    )
    longer = [each["bls"] / each["open_mpi"] for each in both if "bls" in each]
    yield (
        f"`bls` from Python takes {min(longer):.1f} to {max(longer):.0f} times as long as Open MPI"
    )


def _bls_bounds(stages: Any) -> Sentences:
    def mean(stage: str, name: str, bound: int) -> float:
        (found,) = (
            each.get("step_ms") or each["ms_per_step"]
            for each in stages[stage]
            if (each.get("peer") or each["backend"], each["bound"]) == (name, bound)
        )
        return float(found["mean"])

    def gain(stage: str, name: str) -> str:
        return f"{100 * (1 - mean(stage, name, 4) / mean(stage, name, 0)):.0f}"

    delayed = ", ".join(
        f"{title} {mean('fig7-delays-8', name, 0):.1f} to {mean('fig7-delays-8', name, 2):.1f}"
        for title, name in (
            *(("channel", "shm"), ("`bls`", "bls")),
            *(("Open MPI", "mpi"), ("gloo", "gloo")),
        )
    )
    yield f"at k = 2 and 8 ranks {delayed}; most of it at k = 1"
    lookups = [gain("fig7-dlrm-ids-8", name) for name in ("bls", "mpi")]
    yield (
        f"With 8 ranks `bls` gains {gain('fig7-sizes-8', 'bls')} % where messages differ, and Open "
        f"MPI's gain is not shown; where lookups differ both gain, {lookups[0]} and {lookups[1]} %"
    )
    balanced = {
        name: [gain(f"fig8-{ranks}", name) for ranks in (2, 4, 8)]
        for name in ("bls", "mpi", "gloo")
    }
    signed = {name: "-{}, -{} and -{} %".format(*of) for name, of in balanced.items()}
    yield (
        f"`bls` {signed['bls']} with 2, 4 and 8 ranks, Open MPI {signed['mpi']}, none shown; gloo "
        f"gains {balanced['gloo'][0]} % with 2 ranks and {balanced['gloo'][1]} % with 4"
    )
    ideal = [
        next(
            each["computed_ideal_ms"]
            for each in stages[f"fig7-delays-{ranks}"]
            if each["bound"] == 2
        )
        for ranks in (4, 8)
    ]
    yield (
        f"A free exchange with k = 2 needs {ideal[0]:.1f} ms (4 ranks) and {ideal[1]:.1f} ms (8 "
        "ranks)"
    )
    over = {
        name: [
            100 * (mean(f"fig7-delays-{r}", name, 2) / mean(f"fig7-delays-{r}", "shm", 2) - 1)
            for r in (4, 8)
        ]
        for name in ("c10d", "gloo")
    }
    yield (
        f"Means give {over['c10d'][0]:+.1f} and {over['c10d'][1]:+.0f} %. gloo alone is at "
        f"{over['gloo'][0]:+.0f} % and {over['gloo'][1]:+.0f} %"
    )
    first = {
        name: (mean("fig8-2", name, 0), mean("fig8-2", name, 0) - mean("fig8-2", name, 1))
        for name in ("bls", "mpi")
    }
    yield (
        f"means at k = 1 are {first['bls'][1]:.1f} ms of {first['bls'][0]:.1f} lower with `bls` "
        f"and {first['mpi'][1]:.1f} ms of {first['mpi'][0]:.1f} with Open MPI"
    )
