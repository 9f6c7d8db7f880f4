"""Chooses the transport between the ranks of a channel, and sets it up on all of them."""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torchrec_bls import _native
from torchrec_bls.collective.transport.rendezvous import Rendezvous, require_equal
from torchrec_bls.collective.transport.shape import Shape
from torchrec_bls.collective.transport.tcp_connections import Listener, connected, own_address
from torchrec_bls.collective.transport.verbs_config import VerbsConfig
from torchrec_bls.errors import RendezvousError

TRANSPORTS = ("auto", "shm", "verbs", "tcp")

_ONE_KIND_OF_LINK = {"link": "Use RDMA ports of one kind on all hosts"}


def set_up(
    rendezvous: Rendezvous, shape: Shape, transport: str, config: VerbsConfig | None
) -> _native.Transport:
    """Makes and connects this rank's transport, collectively.

    Args:
        rendezvous: rendezvous of the channel.
        shape: shape of the channel.
        transport: one of TRANSPORTS. "auto" is shared memory among the ranks of a host and RDMA
            between hosts, or TCP where one of them has no RDMA.
        config: options of RDMA devices; None: as the environment variables say.

    Raises:
        RendezvousError: a rank could not make its part.
    """
    if transport == "tcp":
        return _tcp(rendezvous, shape, _others(shape))
    if transport == "verbs":
        with _own_part_of_verbs(rendezvous, "transport 'verbs'"):
            verbs = _open_verbs(shape, config, _others(shape))
        return _connect_verbs(rendezvous, shape, verbs)
    hosts = _ranks_by_host(shape)
    if len(hosts) == 1:
        return _shm(rendezvous, shape, range(shape.world_size))
    names = rendezvous.names
    told = "; ".join(f"{names.of_all(ranks)} on host {host}" for host, ranks in hosts.items())
    if transport == "shm":
        raise RendezvousError(
            f"channel '{shape.name}': host differs between ranks ({told}). Shared memory joins "
            "processes of one host, one PID namespace and one user namespace only: use "
            "transport='auto', 'verbs' or 'tcp'"
        )
    return _between_hosts(rendezvous, shape, config, told)


def _between_hosts(
    rendezvous: Rendezvous, shape: Shape, config: VerbsConfig | None, hosts: str
) -> _native.Transport:
    elsewhere = [rank for rank in _others(shape) if rank not in shape.local_ranks]
    missing = ""
    with _own_part_of_verbs(rendezvous, f"host differs between ranks ({hosts})"):
        try:
            verbs = _open_verbs(shape, config, elsewhere)
        except RendezvousError as error:
            missing = str(error)
    records = rendezvous.exchange("RDMA", {"missing": missing})
    for rank, record in enumerate(records):
        if record["missing"]:
            if shape.rank == 0:  # all ranks know the same
                warnings.warn(
                    "Ranks on several hosts have no RDMA between them and use TCP instead, which "
                    f"is slower. On {rendezvous.names.of(rank)}: {record['missing']} "
                    "(`torchrec-bls doctor` says more). Set transport='tcp' to choose it for all",
                    stacklevel=2,
                )
            network: _native.Transport = _tcp(rendezvous, shape, elsewhere)
            break
    else:
        network = _connect_verbs(rendezvous, shape, verbs)
    # All ranks find the same, since a rank alone on its host changes the result for all of them.
    if len(_ranks_by_host(shape)) == shape.world_size:
        return network
    shm = _shm(rendezvous, shape, shape.local_ranks)
    return _native.MixedTransport(shm, network, shape.local_ranks, shape.world_size)


def _ranks_by_host(shape: Shape) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(shape.hosts):
        hosts[host].append(rank)
    return hosts


def _others(shape: Shape) -> list[int]:
    return [rank for rank in range(shape.world_size) if rank != shape.rank]


def _shm(rendezvous: Rendezvous, shape: Shape, ranks: Sequence[int]) -> _native.ShmTransport:
    """Joins `ranks`, which are numbered anew within the transport."""
    with rendezvous.own_part():
        transport = _native.ShmTransport(
            ranks.index(shape.rank),
            len(ranks),
            shape.slots,
            shape.slot_bytes,
            [rendezvous.names.of(rank) for rank in ranks],
        )
    records = rendezvous.exchange("memory", {"address": transport.address})
    addresses = [tuple(records[rank]["address"]) for rank in ranks]
    with rendezvous.own_part():
        try:
            transport.connect(addresses)
        except TypeError as error:
            raise RendezvousError(
                f"numbers too large for addresses of shared memory: {addresses}"
            ) from error
    rendezvous.exchange("connected", {})
    transport.seal()
    return transport


def _tcp(rendezvous: Rendezvous, shape: Shape, peers: Sequence[int]) -> _native.TcpTransport:
    with rendezvous.own_part():
        listener = Listener(own_address(len(set(shape.hosts)) == 1, shape.deadline))
    try:
        records = rendezvous.exchange("TCP addresses", listener.record)
        with rendezvous.own_part(), ExitStack() as stack:
            sockets = connected(
                shape.rank,
                listener,
                {peer: records[peer] for peer in peers},
                shape.deadline,
                rendezvous.names,
            )
            for socket in sockets.values():  # the transport has copies
                stack.enter_context(socket)
            transport = _native.TcpTransport(
                [sockets[rank].fileno() if rank in sockets else -1 for rank in range(len(records))],
                shape.rank,
                shape.slots,
                shape.slot_bytes,
                shape.deadline,
                shape.names,
            )
    finally:
        listener.close()
    rendezvous.exchange("TCP connected", {})
    return transport


@contextmanager
def _own_part_of_verbs(rendezvous: Rendezvous, why: str) -> Iterator[None]:
    with rendezvous.own_part():
        try:
            yield
        except (RendezvousError, ValueError) as error:
            raise RendezvousError(f"{why}: {error}") from error


def _connect_verbs(
    rendezvous: Rendezvous, shape: Shape, transport: _native.VerbsTransport
) -> _native.VerbsTransport:
    records = rendezvous.exchange("RDMA memory", _record(transport))
    require_equal(shape.name, records, _ONE_KIND_OF_LINK, rendezvous.names)
    with rendezvous.own_part():
        try:
            transport.connect([_address(record) for record in records])
        except (TypeError, ValueError) as error:
            raise RendezvousError(f"damaged addresses of RDMA memory: {records}") from error
    rendezvous.exchange("RDMA connected", {})
    if transport.fork_hazard:
        warnings.warn(
            "libibverbs cannot prepare RDMA for forks of this process "
            f"({transport.fork_hazard}), since another library has used RDMA before: a fork may "
            "damage what is under way. Start processes with 'spawn' or 'forkserver', or set "
            "RDMAV_FORK_SAFE=1 before the start",
            stacklevel=2,
        )
    return transport


def _open_verbs(
    shape: Shape, config: VerbsConfig | None, peers: Sequence[int]
) -> _native.VerbsTransport:
    config = config or VerbsConfig.from_environment()
    if not _native.WITH_VERBS:
        raise RendezvousError(
            "this build of torchrec-bls has no RDMA, since infiniband/verbs.h was missing when it "
            "was built: install libibverbs-dev and reinstall torchrec-bls"
        )
    native = _native.VerbsConfig()
    for name, value in vars(config).items():
        setattr(native, name, value)
    return _native.VerbsTransport(
        native,
        shape.rank,
        shape.world_size,
        shape.slots,
        shape.slot_bytes,
        shape.deadline,
        peers,
        shape.names,
    )


def _record(transport: _native.VerbsTransport) -> dict[str, Any]:
    gid, lid, mtu, packet_number, memory, memory_bytes, remote_key, pairs, places = (
        transport.address
    )
    return {
        "link": transport.link,
        "gid": bytes(gid).hex(),
        "lid": lid,
        "mtu": mtu,
        "packet_number": packet_number,
        "memory": memory,
        "memory_bytes": memory_bytes,
        "remote_key": remote_key,
        "queue_pairs": pairs,
        "places": places,
    }


def _address(record: dict[str, Any]) -> tuple[Any, ...]:
    return (
        list(bytes.fromhex(record["gid"])),
        record["lid"],
        record["mtu"],
        record["packet_number"],
        record["memory"],
        record["memory_bytes"],
        record["remote_key"],
        record["queue_pairs"],
        record["places"],
    )
