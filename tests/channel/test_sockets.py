"""A forked child has none of the connections that a channel made."""

import os
import socket
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from tests.processes import run
from torchrec_bls import BoundedLagChannel
from torchrec_bls.collective.transport.sockets import close_sockets, identity_of, tcp_sockets


def new_in_child(before: set[str]) -> int:
    """Returns how many TCP sockets a forked child has that are not among those."""
    child = os.fork()
    if child == 0:
        os._exit(len(set(tcp_sockets().values()) - before))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def new_with_a_channel(rank: int) -> tuple[int, int]:
    """Returns how many TCP sockets a channel adds here, and in a forked child."""
    dist.barrier()
    before = set(tcp_sockets().values())
    with BoundedLagChannel(dist.group.WORLD, slot_bytes=1024):
        dist.barrier()
        return len(set(tcp_sockets().values()) - before), new_in_child(before)


@pytest.mark.parametrize("transport", ["tcp", "c10d"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_a_child_has_the_sockets_from_before_only() -> None:
    for here, in_child in run(3, new_with_a_channel):
        assert here >= 2  # one to each peer
        assert in_child == 0


@pytest.mark.parametrize("transport", ["tcp", "c10d"], indirect=True)
def test_only_the_same_socket_is_closed() -> None:
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        pair = [stack.enter_context(end) for end in socket.socketpair()]
        found = tcp_sockets()
        assert listening.fileno() in found
        assert not {end.fileno() for end in pair} & found.keys()
        number = listening.detach()
        os.dup2(pair[0].fileno(), number)
        close_sockets({number: found[number]})
        os.fstat(number)  # another one by now, and still open
        close_sockets({number: identity_of(number)})
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
