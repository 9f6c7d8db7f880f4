"""Sentences of the README and of docs/results."""

from typing import Any

from benchmarks.prose.figures import (
    MIB,
    NUMBERS,
    Records,
    Sentences,
    alltoall_us,
    backend_us,
    range_of,
    single_gloo_ms,
)


def readme(records: Records) -> Sentences:
    cells = alltoall_us(records)
    large = [us for (ranks, size, _), us in cells.items() if (ranks, size) == (4, 4 * MIB)]
    times = range_of([us["open_mpi"] / us["channel"] for us in large])
    yield f"with 4 ranks and 4 MiB per pair, Open MPI takes {times} times as long as the channel"


def delays(records: Records) -> Sentences:
    longer: dict[int, list[float]] = {4: [], 8: []}
    for each in records["delays"]["results"]["sleep"]:
        if each["bound"] > 0:
            ms = {name: each["ms_per_step"][name]["median"] for name in ("gloo", "channel")}
            longer[each["ranks"]].append(100 * (ms["gloo"] / ms["channel"] - 1))
    yield (
        f"gloo with a window takes at most {max(longer[4]):.0f} % longer than the channel with 4 "
        f"ranks, and {range_of(longer[8], '.0f')} % longer with 8, at bounds from 1 on"
    )


def exchange(records: Records) -> Sentences:
    cells, bls = alltoall_us(records), backend_us(records)
    us = cells[8, 4 * MIB, "one_shot"]
    yield f"at 8 ranks and 4 MiB ({us['channel'] / 1e3:.1f} of {us['raw'] / 1e3:.1f} ms)"
    slower = sum(bls[cell]["bls"] > cells[cell]["open_mpi"] for cell in cells)
    yield f"it takes longer than Open MPI in {slower} of these {len(cells)} cells"
    yield (
        f"of single calls {range_of(single_gloo_ms(cells, 2))} ms with 2 ranks, and "
        f"{range_of(single_gloo_ms(cells, 4), '.2f')} ms with 4 ranks up to 256 KiB"
    )


def backend(records: Records) -> Sentences:
    mpi, cells = alltoall_us(records), backend_us(records)
    large = [cell for cell in cells if cell[0] > 2 and cell[1] == 4 * MIB]
    times = range_of([cells[cell]["bls"] / mpi[cell]["open_mpi"] for cell in large])
    yield f"At 4 MiB with 4 and 8 ranks it is not: there `bls` takes {times} times as long"
    yield (
        f"gloo's single calls take {range_of(single_gloo_ms(cells, 2))} ms with 2 ranks, whatever "
        f"the size, and {range_of(single_gloo_ms(cells, 4))} ms with 4 ranks up to 256 KiB"
    )


def overlap(records: Records) -> Sentences:
    cells = records["overlap"]["results"]
    slow = [each["over"] for each in cells if each["gbit"] == 1.0]
    most = {name: max(1 / each[name][1] for each in slow) for name in ("torchrec", "ddp")}
    yield (
        f"at 1 Gbit/s up to {most['torchrec']:.2f} times over TorchRec's default and "
        f"{most['ddp']:.1f} over DDP's"
    )
    replaced = [
        (each["over"][name], each, name)
        for each in cells
        for name in ("ddp", "torchrec")
        if each["replaces"][name]
    ]
    count = {of: sum(name == of for *_, name in replaced) for of in ("ddp", "torchrec")}
    faster = 100 * (1 - min(over[1] for over, *_ in replaced))
    yield (
        f"The plan replaces a default {len(replaced)} times, DDP's in {NUMBERS[count['ddp']]} "
        f"cells and TorchRec's in {NUMBERS[count['torchrec']]}, and is up to {faster:.0f} % faster"
    )
    over, cell, name = max(replaced, key=lambda each: each[0][1])
    ms = {each: cell["ms"][each]["median"] for each in ("plan", name)}
    where = f"at {cell['gbit']:g} Gbit/s" if cell["gbit"] else f"on one host over {cell['backend']}"
    yield (
        f"{cell['model']} of {cell['ranks']} ranks {where}, {ms['plan']:.2f} against "
        f"{ms[name]:.2f} ms by DDP's default"
    )
    above = sum(each[0][2] > 1.02 for each in replaced)
    alone = "this one alone" if above == 1 else f"{above} of them"
    yield f"ends above 1.02, which is {alone}, at {over[2]:.3f}"
    here = [each for each in replaced if not each[1]["gbit"]]
    yield f"{NUMBERS[len(here)]} defaults are replaced there"
    late = [100 * (1 - each["over"]["early"][1]) for each in records["late_wait"]["results"]]
    yield f"It saves {range_of(late, '.0f')} % of a backward here"


def direct_reads(records: Records) -> Sentences:
    (large,) = (
        each
        for each in records["service_tables"]["results"]
        if each.get("gib") == 4 and "switch_s" in each
    )
    more = 1e3 * (large["switch_answer_s"]["median"] - large["switch_s"]["median"])
    yield f"took {more:.1f} ms more at 4 GiB, by medians"


def serving(records: Records) -> Sentences:
    levels = {
        level: [
            (each, of)
            for each in records["serving"]["results"]
            for of in each["levels"]
            if of["level"] == level
        ]
        for level in (1.5, 3.0)
    }
    refused = max(of["early_refusals_p99_ms"] for _, of in levels[1.5])
    yield f"what does not fit gets 503 within {refused:.1f} ms in 99 of 100 cases"
    rates = " and ".join(f"{round(of['rate'], -2):,.0f}" for _, of in levels[3.0])
    yield f"At 300 %, {rates} requests/s"
    answered = [of["in_time_rate"]["median"] / of["allowed_rate"] for _, of in levels[3.0]]
    yield f"what is left answers {range_of(answered, '.2f')} times what it would"
    yield from _fire(records["serving_fire"]["results"])
    yield from _deaths(records["serving_deaths"]["results"])
    yield from _peers(records["serving_peers"]["results"])


def _fire(results: list[Any]) -> Sentences:
    percent = {
        each["scenario"]: 100 * sum(each["refused"].values()) / each["offered"] for each in results
    }
    yield f"**Refused** are {percent['nothing happens']:.1f} % where nothing happens"
    yield (
        f"While workers are replaced by a rolling restart it is {percent['rolling restart']:.1f} "
        f"%, and while a checkpoint comes every 10 s {percent['refresh']:.1f} %"
    )
    late = max(each["lag_p99_ms"] for each in results if each["scenario"] == "refresh")
    yield f"The generator itself was late by up to {late:.1f} ms then (99th percentile)"


def _deaths(results: list[Any]) -> Sentences:
    def again(servers: tuple[str, ...]) -> list[float]:
        return [
            seconds
            for each in results
            if each["scenario"].startswith("SIGKILL") and each["server"] in servers
            for seconds in each["again_s"]
            if seconds is not None
        ]

    yield f"has two workers again after {range_of(again(('ours',)))} s"
    others = range_of(again(("rayserve", "rayserve_haproxy", "mlserver")))
    yield f"A worker of the others has to load the model, for {others} s"
    (ray,) = (
        each
        for each in results
        if each["scenario"].endswith("every 20 s") and each["server"] == "rayserve_haproxy"
    )
    yield f"loses nothing either, but answers {100 * ray['late'] / ray['offered']:.1f} % late"


def _peers(results: list[Any]) -> Sentences:
    ours = {(each["tables"], each["round"]): each for each in results if each["server"] == "ours"}
    times = {
        peer: range_of(
            [
                ours[each["tables"], each["round"]]["capacity"] / each["capacity"]
                for each in results
                if each["server"] == peer
            ]
        )
        for peer in ("fastapi", "fastapi_alone")
    }
    yield (
        f"The service has {times['fastapi']} times the capacity of the one that comes closest, "
        f"FastAPI with a batcher, and {times['fastapi_alone']} times that of FastAPI alone"
    )
    in_time: dict[float, list[float]] = {1.5: [], 3.0: []}
    for each in ours.values():
        for load in each.get("overload", ()):
            in_time[load["share"]].append(load["in_time_rate"] / each["capacity"])
    yield (
        f"At 150 % of its capacity it answers {range_of(in_time[1.5])} times as many in time as at "
        "it"
    )
    yield f"it still answers {range_of(in_time[3.0])} times as many in time as at it"
