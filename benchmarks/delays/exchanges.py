"""Exchanges with a window of bound + 1 posts, and runs of them under random delays."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.synchronize import Semaphore
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from dlrm_plain.exchange import Start

from benchmarks.exchange.timing import HEADER_ROOM, close_unpulled
from benchmarks.harness.launch import gathered
from benchmarks.harness.statistics import taking_turns
from torchrec_bls import BoundedLagChannel
from torchrec_bls.observe import ideal_finish_times

_LIMIT_SECONDS = 60.0
#: What 8 ranks with 128 samples each send for 26 tables of dimension 64 in fp32.
PAIR_KIB = 104
# For all ranks to hear of the common start before it comes.
_START_SECONDS = 0.05
# Steps; the window of the largest bound, 8, is filled twice.
_WARM_UP = 18

#: (steps, source, destination), 8 bytes each; nobody moves a rank's own block.
Words = npt.NDArray[np.int64]
#: [source][destination], one counter for each ordered pair of ranks.
Counters = Sequence[Sequence[Semaphore]]
#: By name, of each run: ms a step to the slowest rank's end, and CPU ms a step of a rank with all
#: its threads.
Times = Mapping[str, Sequence[tuple[float, float]]]


class Exchange:
    """One rank's end of an all-to-all with a window.

    The last word of every message says step and source, and is checked on arrival.
    """

    def __init__(self, words: Words, bound: int) -> None:
        self.bound = bound
        self._rank, self._words = dist.get_rank(), words
        self._others = [other for other in range(words.shape[1]) if other != self._rank]

    def run(self, delays: Sequence[float], dense: float) -> None:
        """Per step the delay, the post, then step - bound's wait and dense part; in seconds."""
        steps = len(delays)
        for step in range(steps + self.bound):
            if step < steps:
                time.sleep(delays[step])
                self.post(step)
            if step >= self.bound:
                self.complete(step - self.bound)
                time.sleep(dense)
                self._release()

    def post(self, step: int) -> None:
        """Sends this rank's messages of `step`."""
        raise NotImplementedError

    def complete(self, step: int) -> None:
        """Returns when the messages of `step`, the oldest posted, can be read."""
        for source, message in self._arrivals(step):
            expected = (step, source, int(self._words[step, source, self._rank]))
            if (found := (*divmod(int(message[-1]), 1000), len(message))) != expected:
                raise RuntimeError(f"got (step, source, words) {found}, expected {expected}")

    def close(self) -> None:
        pass

    def _arrivals(self, step: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the sources and messages of `step`, each when it can be read."""
        raise NotImplementedError

    def _release(self) -> None:
        """Gives the messages of the last completed step back."""

    def _stamp(self, step: int) -> int:
        return 1000 * step + self._rank


class Free(Exchange):
    """The ideal: counts posts, moves nothing and keeps the bound.

    An uncontended count is an atomic operation in shared memory; a rank that has to wait sleeps in
    the kernel until that very post, so that neither polling nor its granularity enters the result.
    It stamps and checks words of its own: that is the benchmark's work and not an exchange's.
    """

    def __init__(self, words: Words, bound: int, counters: Counters) -> None:
        super().__init__(np.minimum(words, 1), bound)
        self._messages = torch.zeros(len(words), words.shape[1], 1, dtype=torch.int64)
        self._sources = torch.arange(words.shape[1])[:, None]
        self._counters = counters

    def post(self, step: int) -> None:
        self._messages[step] = 1000 * step + self._sources
        for other in self._others:
            self._counters[self._rank][other].release()

    def _arrivals(self, step: int) -> Iterator[tuple[int, torch.Tensor]]:
        for source in self._others:
            if not self._counters[source][self._rank].acquire(timeout=_LIMIT_SECONDS):
                raise RuntimeError(f"rank {source} did not post step {step} in {_LIMIT_SECONDS} s")
            yield source, self._messages[step, source]


class Channel(Exchange):
    """`BoundedLagChannel`; messages are read in place and released after the dense part."""

    def __init__(self, words: Words, bound: int, transport: str = "auto") -> None:
        super().__init__(words, bound)
        most = int(words.max())
        self._messages = torch.zeros(words.shape[1], most, dtype=torch.int64)
        options = {"transport": transport, "slot_bytes": 8 * most + HEADER_ROOM}
        name = f"{transport}, bound {bound}"
        self._channel = BoundedLagChannel(dist.group.WORLD, bound=bound, name=name, **options)

    def post(self, step: int) -> None:
        parts: list[list[torch.Tensor]] = [[] for _ in self._messages]
        for to in self._others:
            message = self._messages[to, : self._words[step, self._rank, to]]
            message[-1] = self._stamp(step)
            parts[to] = [message]
        self._channel.post(parts)

    def _arrivals(self, step: int) -> Iterator[tuple[int, torch.Tensor]]:
        self._arrival = self._channel.wait()
        for source in self._others:
            yield source, self._arrival.tensor(source, 0, torch.int64)

    def _release(self) -> None:
        self._arrival.release()

    def close(self) -> None:
        close_unpulled(self._channel)


class Backend(Exchange):
    """Asynchronous all-to-alls of a backend, with sizes that all know, into the caller's memory."""

    def __init__(self, words: Words, bound: int, start: Start) -> None:
        super().__init__(words, bound)
        self._start = start
        self._sent = torch.zeros(bound + 1, int(words.sum(axis=2).max()), dtype=torch.int64)
        self._received = torch.zeros(bound + 1, int(words.sum(axis=1).max()), dtype=torch.int64)
        self._under_way: deque[tuple[Any, Sequence[torch.Tensor]]] = deque()

    def post(self, step: int) -> None:
        buffer = step % len(self._sent)
        sends = self._words[step, self._rank].tolist()
        receives = self._words[step, :, self._rank].tolist()
        sent = self._sent[buffer, : sum(sends)]
        for message in sent.split(sends):
            if len(message):
                message[-1] = self._stamp(step)
        received = self._received[buffer, : sum(receives)]
        work = self._start(received, sent, receives, sends)
        self._under_way.append((work, received.split(receives)))

    def _arrivals(self, step: int) -> Iterator[tuple[int, torch.Tensor]]:
        work, messages = self._under_way.popleft()
        work.wait()
        for source in self._others:
            yield source, messages[source]


def draw_delays(seed: int, ranks: int, steps: int, longest: float) -> npt.NDArray[np.float64]:
    """Seconds by (rank, step), the same in every run (BLS paper, sec. V-E2)."""
    return np.random.default_rng([seed, ranks]).uniform(0, longest, (ranks, steps))


def timed(
    work: Callable[[Sequence[float], float], None], delays: Sequence[float], dense: float
) -> tuple[float, float]:
    """What `Times` has of a run of `work`, which takes this rank's delays and the dense part's."""
    # Untimed: memory and connections are used for the first time here.
    work([0.0] * min(_WARM_UP, len(delays)), 0.0)
    start, cpu = common_start(), time.process_time()
    work(delays, dense)
    elapsed = max(gathered(time.monotonic() - start))
    mean_cpu = fmean(gathered(time.process_time() - cpu))
    return 1e3 * elapsed / len(delays), 1e3 * mean_cpu / len(delays)


def measure_windows(
    settings: dict[str, Any],
    seed: int,
    make: Callable[[Words, int], Mapping[str, Exchange]],
    title: str,
) -> Iterator[tuple[int, float, Times]]:
    """Runs exchanges on every rank; yields each bound, its ideal in ms a step, and the times.

    `make` makes the exchanges of a bound, by name. `settings` have `bounds`; `steps` of a run;
    `runs`; `max_delay` of a rank before each post and the sleep `dense`, seconds; smallest and
    largest message `kib`, drawn by step and pair.
    """
    ranks, steps, dense = dist.get_world_size(), settings["steps"], settings["dense"]
    delays = draw_delays(seed, ranks, steps, settings["max_delay"])
    own = delays[dist.get_rank()].tolist()
    low, high = settings["kib"]
    random = np.random.default_rng([seed, ranks, low])
    words = 128 * random.integers(low, high, (steps, ranks, ranks), endpoint=True)
    words[:, range(ranks), range(ranks)] = 0  # nobody moves a rank's own block
    exchanges = {
        (bound, name): exchange
        for bound in settings["bounds"]
        for name, exchange in make(words, bound).items()
    }
    runs = {case: partial(timed, each.run, own, dense) for case, each in exchanges.items()}
    times = taking_turns(runs, settings["runs"], title)
    for exchange in exchanges.values():
        exchange.close()
    for bound in settings["bounds"]:
        # With exact sleeps and a free exchange, by recurrence. The dense part of step t comes in
        # step t + bound, and in the end `bound` steps without delay and post empty the window.
        before = np.pad(delays, ((0, 0), (0, bound)))
        after = np.pad(np.full_like(delays, dense), ((0, 0), (bound, 0)))
        ideal = ideal_finish_times(before, bound, after)[:, -1].max()
        of_bound = {name: runs for (of, name), runs in times.items() if of == bound}
        yield bound, 1e3 * float(ideal) / steps, of_bound


def common_start() -> float:
    """Sleeps until a moment that all ranks share, and returns it, in `time.monotonic`'s seconds."""
    start = torch.tensor(time.monotonic() + _START_SECONDS, dtype=torch.float64)
    dist.broadcast(start, 0)
    sleep_until(start.item())
    return start.item()


def sleep_until(moment: float) -> None:
    """Sleeps until `moment`, in `time.monotonic`'s seconds."""
    time.sleep(max(0.0, moment - time.monotonic()))
