"""A forward that is captured in a CUDA graph: what its lookups leave for the replays, which run no
Python."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchrec_bls.direct.gpu.report import Launch

if TYPE_CHECKING:
    from torchrec_bls.direct.gpu.device import Gpu
    from torchrec_bls.direct.gpu.registered_tables import RegisteredTables
    from torchrec_bls.direct.gpu.under_way import ForwardsUnderWay


class CapturedLookup(NamedTuple):
    """Reads of a batch that each replay does again.

    Attributes:
        under_way: forwards of their module.
        launches: launches, whose reports are on the GPU: each replay writes them anew.
        keys: keys of the batch.
        ids: number of its ids.
    """

    under_way: "ForwardsUnderWay"
    launches: Sequence[Launch]
    keys: Sequence[str]
    ids: int


class Served(NamedTuple):
    """What a replay reads of a module.

    Attributes:
        version: name of the version.
        tables: its tables.
    """

    version: str
    tables: "RegisteredTables"


class Capture:
    """A forward in a CUDA graph. One thread makes it: it runs the forward as usual first, and then
    once more while the graph is captured.

    Args:
        gpu: the GPU.

    Attributes:
        gpu: see above.
        is_running: whether the graph is captured now: nothing is read before it is replayed.
    """

    def __init__(self, gpu: "Gpu") -> None:
        self.gpu = gpu
        self.is_running = False
        self._lookups: list[CapturedLookup] = []
        # Tensors of the host that the forward copies, in their order, and their copies. A graph
        # would copy from memory that serves something else by then.
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._place = 0

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Returns a context in which this thread runs the forward as usual."""
        self._copies = []
        with self._of_this_thread():
            yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """Returns a context in which this thread runs the forward in the graph."""
        self._lookups, self._place, self.is_running = [], 0, True
        try:
            with self._of_this_thread():
                yield
        finally:
            self.is_running = False

    @contextmanager
    def _of_this_thread(self) -> Iterator[None]:
        _here.capture = self
        try:
            yield
        finally:
            _here.capture = None

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor of the host, which is the same in all replays.

        Raises:
            ValueError: the forward copied another one before it was captured.
        """
        if not self.is_running:
            copy = self.gpu.copy_of(tensor)
            self._copies.append((tensor.clone(), copy))
            return copy
        place, self._place = self._place, self._place + 1
        if place >= len(self._copies) or not torch.equal(self._copies[place][0], tensor):
            raise ValueError(
                "the forward gives its lookups other tensors of the host in each run, which a "
                "CUDA graph can't: make them on the GPU, or of the batch"
            )
        return self._copies[place][1]

    def add(self, lookup: CapturedLookup) -> None:
        """Notes reads that are in the graph."""
        self._lookups.append(lookup)

    def replayed(
        self,
        replay: Callable[[], None],
        used: Sequence[torch.Tensor],
        served: Mapping["ForwardsUnderWay", Served],
    ) -> None:
        """Reads what there is of each module now. It waits for nothing.

        Args:
            replay: function that launches the graph, and what comes before, on the current stream.
            used: tensors of the caller's stream that it reads.
            served: by its forwards, what is read of each module.
        """
        tables = {
            launch.reader: served[lookup.under_way].tables
            for lookup in self._lookups
            for launch in lookup.launches
        }
        # In one order for all threads, each of which may read another version.
        readers = sorted(tables, key=id)
        with ExitStack() as launching:
            for reader in readers:
                launching.enter_context(reader.launching)
            with self.gpu.reading(used):
                for reader in readers:
                    reader.show(tables[reader])
                replay()
                reports = [
                    [self.gpu.copy_of_report(launch.report) for launch in lookup.launches]
                    for lookup in self._lookups
                ]
                done = self.gpu.mark()
        for lookup, of_lookup in zip(self._lookups, reports, strict=True):
            launches = [
                Launch(launch.reader, report, done)
                for launch, report in zip(lookup.launches, of_lookup, strict=True)
            ]
            under_way, version = lookup.under_way, served[lookup.under_way].version
            number = under_way.next_batch()
            under_way.check_later(launches, number, version, lookup.keys, lookup.ids)


def copied(gpu: "Gpu", tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy on a GPU of a tensor of the host. In a forward that is captured it is the same
    for all replays.

    Raises:
        ValueError: see Capture.copy_of.
    """
    capture = capture_here()
    return gpu.copy_of(tensor) if capture is None else capture.copy_of(tensor)


def capture_here() -> Capture | None:
    """Returns what this thread captures, None if it captures nothing."""
    return getattr(_here, "capture", None)


_here = threading.local()
