"""The options of a channel, for the backend and for the sharded modules."""

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from torchrec_bls.collective.channel import (
    check_bound,
    check_slot_bytes,
    known_transport,
)
from torchrec_bls.collective.transport.deadlines import LONGEST_DEADLINE, check_deadline
from torchrec_bls.collective.transport.verbs_config import VerbsConfig


@dataclass(frozen=True)
class ExchangeOptions:
    """The fields that BLSConfig and BLSOptions share. All ranks need the same first three.

    Attributes:
        bound: iterations that ranks may be apart; bound + 1 exchanges may be outstanding. 0 is
            synchronous and, for modules, the only one that trains.
        transport: way of messages. "shm" is shared memory, for the ranks of one host; "verbs" is
            RDMA for all; "tcp" is TCP for all; "auto" is shared memory among the ranks of a host,
            and RDMA between hosts, or TCP where a host has no RDMA.
        slot_bytes: size of every slot. Messages up to this size, less a header of at most 256
            bytes, go straight into the receiver's memory. The receiver pulls larger ones. None:
            modules derive the size for each exchange from the first batch, with room for messages
            half as large again; the backend takes 64 KiB.
        deadline: seconds after which waiting for a peer is an error. None: the timeout of the
            process group, which is half an hour unless given; but modules without autograd take 60
            s.
        verbs: options of RDMA devices; None: as the environment variables TORCHREC_BLS_IB_* say.
    """

    bound: int = 0
    transport: str = "auto"
    slot_bytes: int | None = None
    deadline: float | None = None
    verbs: VerbsConfig | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for values that no channel can have."""
        check_bound(self.bound)
        object.__setattr__(self, "transport", known_transport(self.transport))
        if self.slot_bytes is not None:
            check_slot_bytes(self.slot_bytes)
        if self.deadline is not None:
            check_deadline(self.deadline)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Returns the seconds after which collectives of CPU tensors fail in `group`."""
    timeout: timedelta = default_pg_timeout
    # A group may have no backend for CPU tensors, and a backend no options.
    with suppress(RuntimeError, AttributeError):
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    return min(timeout.total_seconds(), LONGEST_DEADLINE)
