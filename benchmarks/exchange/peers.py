"""What the all-to-all benchmarks call from Python: our channel, our backend and gloo."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from torchrec_bls import BoundedLagChannel

HEADER_ROOM = 256


def close_unpulled(channel: BoundedLagChannel) -> None:
    """Closes a channel whose slots must have sufficed; an exchange that pulls measures others."""
    pulled = channel.stats().pulled_messages
    channel.close()
    if pulled:
        raise RuntimeError(f"{pulled} messages did not fit into their slots")


class Peer(Protocol):
    """One rank's end of an all-to-all of int64 words; `outgoing` is sent next, by destination."""

    outgoing: list[torch.Tensor]

    def exchange(self) -> None:
        """Returns when the data of all ranks can be read."""

    def view(self, source: int) -> torch.Tensor:
        """What `source` sent in the last exchange, valid until `release`."""

    def release(self) -> None:
        """Gives the data of the last exchange back."""

    def close(self) -> None:
        """Ends the peer."""


class _ChannelPeer:
    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        rank, world = group.rank(), group.size()
        self.outgoing = [torch.zeros(size // 8, dtype=torch.int64) for _ in range(world)]
        # A rank's own block needs no transfer; no peer here moves it.
        self._parts = [[t] if to != rank else [] for to, t in enumerate(self.outgoing)]
        self._channel = BoundedLagChannel(group, bound=0, slot_bytes=size + HEADER_ROOM)

    def exchange(self) -> None:
        self._channel.post(self._parts)
        self._arrival = self._channel.wait()

    def view(self, source: int) -> torch.Tensor:
        return self._arrival.tensor(source, 0, torch.int64)

    def release(self) -> None:
        self._arrival.release()

    def close(self) -> None:
        close_unpulled(self._channel)


class _BackendPeer:
    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        words = size // 8
        self._group = group
        self._splits = [0 if of == group.rank() else words for of in range(group.size())]
        self._send = torch.zeros(sum(self._splits), dtype=torch.int64)
        self._receive = torch.zeros_like(self._send)
        self.outgoing = list(torch.split(self._send, self._splits))
        self._received = list(torch.split(self._receive, self._splits))

    def exchange(self) -> None:
        dist.all_to_all_single(
            self._receive, self._send, self._splits, self._splits, group=self._group
        )

    def view(self, source: int) -> torch.Tensor:
        return self._received[source]

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


class _OwnGroupPeer(_BackendPeer):
    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        super().__init__(dist.new_group(backend="bls"), size)

    def close(self) -> None:
        dist.destroy_process_group(self._group)


PEERS: dict[str, Callable[[dist.ProcessGroup, int], Peer]] = {
    "channel_python": _ChannelPeer,
    "gloo": _BackendPeer,
    "bls": _OwnGroupPeer,
}
