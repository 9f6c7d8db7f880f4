"""Training whose ranks have unequal numbers of batches, and stop together."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from torchrec_bls.collective.channel import BoundedLagChannel, refuse
from torchrec_bls.collective.exchange_options import timeout_of
from torchrec_bls.slot_size import SMALLEST_SLOT_BYTES

Batch = TypeVar("Batch")


class EndTogether(Generic[Batch]):
    """Batches of this rank, as many in each epoch as the rank with the fewest has.

    Without it a rank whose data ends leaves the others waiting for it, until their deadline. Give
    the iterator to a TorchRec pipeline in place of the loader's own, or loop over it::

        batches = EndTogether(loader)
        for epoch in range(epochs):
            data = iter(batches)
            while True:
                try:
                    pipeline.progress(data)
                except StopIteration:
                    break

    The ranks agree on the next `lookahead` batches before the first of them is handed out. So all
    ranks get the same number of batches, however far ahead a pipeline takes them. The rest of a
    rank's data is loaded up to `lookahead` batches and dropped. The agreement is one message of
    32 bytes to each rank, every `lookahead` batches, through a channel of its own.

    If `loader` raises an exception, this rank raises it in the place of the batch, and the other
    ranks end there.

    Creation is collective: all ranks of the group create theirs in the same order. All ranks begin
    the same epochs.

    Args:
        loader: batches of an epoch, iterated anew for each. An iterator has one epoch.
        lookahead: batches that are loaded before they are needed; the same on all ranks. They take
            host memory.
        group: ranks that train together; None: the default group.
        deadline: seconds after which waiting for a rank is an error; None: the group's timeout.

    Raises:
        ValueError: an argument is out of range.
        RendezvousError: the ranks disagree, or some do not come.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        *,
        lookahead: int = 4,
        group: dist.ProcessGroup | None = None,
        deadline: float | None = None,
    ) -> None:
        if not isinstance(lookahead, int) or isinstance(lookahead, bool) or lookahead < 1:
            raise ValueError(
                f"lookahead is {lookahead!r}, but must be a positive number of batches"
            )
        group = group or dist.group.WORLD
        if group is None:
            raise ValueError("EndTogether needs a process group: call init_process_group first")
        self._loader = loader
        self._lookahead = lookahead
        self._epochs = 0
        self._channel = BoundedLagChannel(
            group,
            slot_bytes=SMALLEST_SLOT_BYTES,
            name="end of data",
            deadline=timeout_of(group) if deadline is None else deadline,
        )

    def __iter__(self) -> Iterator[Batch]:
        """Returns the batches of the next epoch."""
        self._epochs += 1
        return _Epoch(self._loader, self._channel, self._epochs, self._lookahead)

    def close(self) -> None:
        """Ends the channel of the agreement. Ranks that wait for this one raise PeerClosedError."""
        self._channel.close()


class _Epoch(Iterator[Batch]):
    """One epoch of an EndTogether.

    Args:
        loader: batches of the epoch.
        channel: channel of the agreement.
        number: number of the epoch, from 1 on.
        lookahead: number of batches that the ranks agree on at a time.
    """

    def __init__(
        self, loader: Iterable[Batch], channel: BoundedLagChannel, number: int, lookahead: int
    ) -> None:
        self._batches = iter(loader)
        self._channel = channel
        self._number = number
        self._lookahead = lookahead
        self._ahead: deque[Batch] = deque()
        self._exhausted = False
        self._error: Exception | None = None
        self._handed_out = 0
        self._agreed = 0  # batches that every rank has
        self._ends = False  # whether a rank has no more

    def __next__(self) -> Batch:
        if self._handed_out == self._agreed:
            self._agree()
        batch = self._ahead.popleft()
        self._handed_out += 1
        self._load()  # one at a time, as without an agreement
        return batch

    def _agree(self) -> None:
        """Finds how many more batches all ranks have. Raises where there are none."""
        if not self._ends:
            self._load()
            fewest = self._fewest_ahead()
            self._ends = fewest < self._lookahead
            self._agreed += fewest
        if self._handed_out < self._agreed:
            return
        error, self._error = self._error, None
        if error is not None and not self._ahead:
            raise error
        self._ahead.clear()
        raise StopIteration

    def _load(self) -> None:
        while not self._exhausted and len(self._ahead) < self._lookahead:
            try:
                self._ahead.append(next(self._batches))
            except StopIteration:
                self._exhausted = True
            except Exception as error:
                self._exhausted = True
                self._error = error

    def _fewest_ahead(self) -> int:
        channel = self._channel
        # What they agree about, by which ranks that went different ways are found.
        about = [self._number, self._handed_out, self._lookahead]
        own = torch.tensor([*about, len(self._ahead)])
        channel.post([[own]] * channel.world_size)
        fewest = self._lookahead
        with channel.wait() as arrival:
            for rank in range(channel.world_size):
                *of_rank, ahead = arrival.tensor(rank, dtype=torch.int64).tolist()
                if of_rank != about:
                    raise refuse(channel, arrival, _differs(rank, of_rank, channel.rank, about))
                fewest = min(fewest, ahead)
        return fewest


def _differs(peer: int, of_peer: list[int], rank: int, own: list[int]) -> str:
    at = "rank {} asks about epoch {} from batch {} on, with lookahead {}"
    return (
        f"{at.format(peer, *of_peer)}, but {at.format(rank, *own)}: give all ranks one lookahead, "
        "and leave an epoch early on all ranks or on none"
    )
