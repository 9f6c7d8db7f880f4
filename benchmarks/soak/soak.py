"""Exchanges small messages among 8 ranks for a long time and checks every byte and resource."""

import gc
import random
import struct
import time
import warnings
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.harness import page, record
from benchmarks.harness.launch import gathered, on_ranks
from torchrec_bls import BoundedLagChannel

SETTINGS: dict[str, Any] = {
    "ranks": 8,
    "iterations": 1_000_000,  # of each rank, in all runs
    "seconds": None,  # after which no run is begun; None for all iterations
    "run_iterations": 5_000,  # of a run, which has one channel
    "bounds": (0, 1, 2, 3, 4, 8),  # of which a run draws one
    "delay_every": 1000,  # a rank sleeps before one post in so many on average,
    "max_delay": 0.002,  # uniformly up to so many seconds
    "seed": 1,  # of bounds, sizes, bytes and delays
}
LARGEST = 480
OVERSIZED = 6000
# One message in so many is larger than a slot.
_OVERSIZED_EVERY = 4001
# By how much a resource may grow over the runs and while a channel is open. Above the noise of the
# allocator, below a leak of a few bytes an iteration; and a message larger than a slot keeps its
# memory, which has a descriptor, until the slot's next one.
_ALLOWED = {"private_kib": (2048, 2048), "shared_kib": (0, 512), "descriptors": (0, 8)}
_STAMP = struct.Struct("<IQHH")
_STRETCHES = 1 << 16
_BYTES = random.Random(0).randbytes(_STRETCHES + OVERSIZED)


def message(seed: int, iteration: int, source: int, destination: int) -> bytes:
    """What `source` sends to `destination` in an iteration; these count on over the runs.

    Sizes are uniform up to `LARGEST` bytes, few are just below `OVERSIZED`. A stamp that no other
    message has comes first, then a stretch of random bytes, from somewhere else in most messages.
    """
    stamp = _STAMP.pack(seed, iteration, source, destination)
    drawn, size = divmod(zlib.crc32(stamp), LARGEST - len(stamp) + 1)
    if drawn % _OVERSIZED_EVERY == 0:
        size = OVERSIZED - len(stamp) - size
    start = drawn % _STRETCHES
    return stamp + _BYTES[start : start + size]


def soak(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs one rank until the iterations or the seconds are over, each run with a channel and a
    bound of its own; returns what all ranks counted. Raises if a byte was wrong."""
    warnings.filterwarnings("ignore", message=".*larger messages are pulled")
    draw = random.Random(settings["seed"])
    delays = random.Random(settings["seed"] * settings["ranks"] + rank)
    iterations, seconds = settings["iterations"], settings["seconds"]
    done, pulled, bounds, closed, growth = 0, 0, [], [], []
    started = time.monotonic()
    with tqdm(total=None if seconds else iterations, unit=" iterations", disable=rank != 0) as bar:
        while done < iterations:
            over = torch.tensor(seconds is not None and time.monotonic() - started >= seconds)
            dist.broadcast(over, 0)  # rank 0's clock decides for all
            if over:
                break
            bounds.append(draw.choice(settings["bounds"]))
            run = range(done, min(done + settings["run_iterations"], iterations))
            grown, pulled_in_run = _run(bounds[-1], run, settings, delays)
            growth.append(grown)
            pulled += pulled_in_run
            closed.append(_resources())
            bar.update(len(run))
            done = run.stop
    seconds = time.monotonic() - started
    own = {
        "messages_checked": done * (settings["ranks"] - 1),
        "pulled_messages": pulled,
        # By then every bound's memory has been in use.
        "first": closed[len(closed) // 10],
        "last": closed[-1],
        "largest_growth_within_run": {name: max(each[name] for each in growth) for name in grown},
    }
    return {"seconds": seconds, "iterations": done, "bounds": bounds, "ranks": gathered(own)}


def _run(
    bound: int, run: range, settings: dict[str, Any], delays: random.Random
) -> tuple[dict[str, int], int]:
    """Exchanges messages through a new channel; returns by how much resources grew after a tenth of
    the iterations, and the number of pulled messages."""
    seed = settings["seed"]
    with BoundedLagChannel(dist.group.WORLD, bound=bound, slot_bytes=LARGEST + 64) as channel:
        for iteration in range(run.start, run.stop + bound):
            if iteration == run.start + len(run) // 10:
                early = _resources()
            if iteration in run:
                if delays.random() < 1 / settings["delay_every"]:
                    time.sleep(delays.uniform(0, settings["max_delay"]))
                ranks = range(channel.world_size)
                sent = (bytearray(message(seed, iteration, channel.rank, to)) for to in ranks)
                channel.post([[torch.frombuffer(each, dtype=torch.uint8)] for each in sent])
            if iteration - bound in run:
                _complete(channel, seed, iteration - bound)
        late = _resources()
        pulled = channel.stats().pulled_messages
    return {name: late[name] - early[name] for name in early}, pulled


def _complete(channel: BoundedLagChannel, seed: int, iteration: int) -> None:
    """Waits for the messages of an iteration and compares every byte."""
    with channel.wait() as arrival:
        for source in range(channel.world_size):
            expected = message(seed, iteration, source, channel.rank)
            found = [bytes(part) for part in arrival.parts(source)]
            if found != [expected]:
                raise AssertionError(
                    f"rank {channel.rank}: iteration {iteration} from rank {source} has "
                    f"{[part.hex() for part in found]} instead of {expected.hex()}"
                )


def _resources() -> dict[str, int]:
    """Resident memory in KiB, private and shared, and open descriptors of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "private_kib": int(status["RssAnon"].split()[0]),
        "shared_kib": int(status["RssShmem"].split()[0]),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def problems(results: record.Record) -> list[str]:
    """One line for each resource of a rank that has grown."""
    found = []
    for rank, result in enumerate(results["ranks"]):
        for name, (over_runs, within_run) in _ALLOWED.items():
            first, last = result["first"][name], result["last"][name]
            grown = result["largest_growth_within_run"][name]
            if last - first > over_runs:
                found.append(f"rank {rank}: {name} grew from {first} to {last} over the runs")
            if grown > within_run:
                found.append(f"rank {rank}: {name} grew by {grown} while a channel was open")
    return found


def section(run: record.Record) -> str:
    results = run["results"]
    ranks, bounds = results["ranks"], results["bounds"]
    by_bound = ", ".join(f"{count} of {bound}" for bound, count in sorted(Counter(bounds).items()))
    rows = []
    for rank, result in enumerate(ranks):
        rows.append([rank])
        for name in _ALLOWED:
            grown = result["largest_growth_within_run"][name]
            rows[-1].append(f"{result['first'][name]:,} → {result['last'][name]:,} ({grown:+,})")
    return page.section(
        run,
        f"- {results['iterations']:,} iterations of {len(ranks)} ranks in "
        f"{results['seconds']:,.0f} s\n"
        f"- {len(bounds)} channels, by bound: {by_bound}\n"
        f"- {sum(rank['messages_checked'] for rank in ranks):,} messages between ranks, "
        f"{sum(rank['pulled_messages'] for rank in ranks):,} of them larger than a slot\n"
        "- no wrong byte",
        "After the first tenth of the runs → after the last one; in parentheses by how much it "
        "grew at most while a channel was open:",
        page.table(["rank", "private memory, KiB", "shared memory, KiB", "descriptors"], rows),
    )


def main() -> None:
    """Soaks as long as the command line says; exits with 1 when a resource has grown."""
    parser = record.parser(__doc__)
    parser.add_argument("--seconds", type=float, help="stop after the run that is under way then")
    options = parser.parse_args()
    settings = SETTINGS | {"seconds": options.seconds}
    before = record.environment()
    results = on_ranks(settings["ranks"], soak, settings)
    record.publish(options.json, "soak", before, settings, results, section)
    if found := problems(results):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
