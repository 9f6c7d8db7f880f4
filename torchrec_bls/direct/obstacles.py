"""Why the ranks of a module can't read its tables directly, the same answer on all of them."""

import warnings

import torch.distributed as dist

from torchrec_bls.collective.transport.rendezvous import Rendezvous
from torchrec_bls.direct.process import this_process


def agree_on_direct_reads(
    group: dist.ProcessGroup, name: str, deadline: float, reason: str, session: str = ""
) -> str:
    """Returns why the ranks can't read tables directly, the same on all; empty if they can.

    Args:
        group: the module's ranks.
        name: name of the module.
        deadline: seconds to wait for the other ranks.
        reason: reason why this rank can't; empty if it can.
        session: session of the module's agreement.
    """
    refusal, apart = find_obstacles(group, name, deadline, reason, session)
    return refusal or apart


def find_obstacles(
    group: dist.ProcessGroup, name: str, deadline: float, reason: str, session: str = ""
) -> tuple[str, str]:
    """Returns which rank has a reason not to read tables directly, and which ranks are on different
    hosts; each is empty if there is none. The arguments are those of `agree_on_direct_reads`."""
    rendezvous = Rendezvous(group, f"{name} direct reads", deadline, session=session)
    records = rendezvous.exchange("possible", {"reason": reason, "host": this_process().host})
    reasons = [(rank, record["reason"]) for rank, record in enumerate(records) if record["reason"]]
    names = rendezvous.names
    refusal = f"{names.of(reasons[0][0])}: {reasons[0][1]}" if reasons else ""
    hosts = [record["host"] for record in records]
    if len(set(hosts)) == 1:
        return refusal, ""
    other = next(rank for rank, host in enumerate(hosts) if host != hosts[0])
    apart = names.of_all([0, other])
    return refusal, f"{apart} are on different hosts, or in different PID or user namespaces"


def warn_of_exchange(group: dist.ProcessGroup, name: str, reason: str) -> None:
    """Says once, on rank 0, that a module exchanges with lookup="auto". All ranks know the same.

    Args:
        group: the module's ranks.
        name: name of the module.
        reason: what `agree_on_direct_reads` has returned.
    """
    if group.rank() == 0:
        warnings.warn(
            f'{name}: lookup="auto" exchanges ids and embeddings, and ranks wait for each other. '
            f'{reason}. lookup="direct" refuses instead, and lookup="exchange" is silent',
            stacklevel=3,
        )
