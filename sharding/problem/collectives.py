"""The collectives that take embeddings to the ranks of their samples, and gradients back.

These are the collectives of TorchRec's sharders over a process group. Bounded-lag channels have one
all-to-all for all ways of sharding. If pooled tables are sharded by rows, every rank has partial
sums of all samples: TorchRec sums them by a reduce-scatter, and spreads gradients by an all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cost_interface import CostModel, Estimate
from .job import Job
from .tables import ROW_WISE, TABLE_ROW_WISE


@dataclass(frozen=True)
class Collective:
    """A collective of a job; or several at once, in groups that together have all ranks.

    Attributes:
        ranks: number of ranks in a group.
        host_ranks: number of ranks of a group that share a host.
        destinations: ratio of a rank's bytes in all to its bytes for each rank.
        reduces: whether it is an all-reduce. Otherwise it is an all-to-all, or takes as long as
            one: a ring's all-gather and reduce-scatter send as many bytes from every rank.
    """

    ranks: int
    host_ranks: int
    destinations: int
    reduces: bool = False

    def estimate(
        self,
        for_each: Sequence[float],
        job: Job,
        model: CostModel,
        ranks_per_core: float,
        carrier: str | None = None,
    ) -> Estimate:
        """Returns the time of the collective.

        Args:
            for_each: (ranks), bytes that each rank of a group has for each rank of the job.
            job: the collective's job.
            model: costs on the machine.
            ranks_per_core: number of ranks that share a core.
            carrier: backend that the messages travel by; None: the job's.
        """
        backend = carrier or job.backend
        held = tuple(size * self.destinations for size in for_each)
        mean = sum(held) / len(held)
        if self.reduces:
            return model.all_reduce(mean, self.ranks, backend, ranks_per_core)
        sent = (mean,) * len(held)
        return model.all_to_all(sent, held, backend, ranks_per_core, self.host_ranks)


@dataclass(frozen=True)
class Way:
    """The exchange of embeddings of tables that are sharded in the same way.

    Attributes:
        forward: collectives, one after the other.
        backward: collectives of the gradients, one after the other; none without training.
        holders: number of ranks that have bytes of the same table.
    """

    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    holders: int

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Returns the collectives of both directions."""
        return self.forward + self.backward


def all_to_all_of(job: Job) -> Collective:
    """Returns the all-to-all of all ranks."""
    return Collective(job.ranks, job.host_ranks, job.ranks)


def way_of(job: Job, sharding_type: str, pooled: bool) -> Way:
    """Returns how the embeddings of tables are exchanged.

    Torch's gloo has no reduce-scatter. It reduces a copy of all data on all ranks and takes a part.

    Args:
        job: job that the plan is for.
        sharding_type: sharding type of the tables.
        pooled: whether the tables are an EmbeddingBagCollection's.
    """
    forward: list[Collective] = [all_to_all_of(job)]
    backward, holders = forward, 1
    if pooled and job.backend != "bls" and sharding_type in (ROW_WISE, TABLE_ROW_WISE):
        holders = job.ranks if sharding_type == ROW_WISE else job.host_ranks
        gathering = Collective(holders, job.host_ranks, job.ranks)
        summing = Collective(holders, job.host_ranks, job.ranks, reduces=job.backend == "gloo")
        # Sums of a host's tables go to the same rank of each other host.
        hosts = job.ranks // holders
        across = Collective(hosts, 1, hosts)
        forward, backward = [summing, across], [across, gathering]
    return Way(
        tuple(one for one in forward if one.ranks > 1),
        tuple(one for one in backward if one.ranks > 1 and job.training),
        holders,
    )
