"""What a plan is for: ranks, batch, exchange and memory."""

from collections.abc import Sequence
from dataclasses import dataclass

BACKENDS = ("gloo", "nccl", "bls")


@dataclass(frozen=True)
class Job:
    """What a plan is for.

    Attributes:
        ranks: world size.
        batch: samples per rank and step.
        memory_bytes: memory of each rank for weights, optimizer state and activations: HBM for
            tables on GPUs, else DDR.
        ranks_per_host: ranks that share a host; None: all of them.
        backend: backend of the exchanges: "gloo", "nccl", or "bls" for the bounded-lag sharders.
        bound: iterations that ranks may be apart; above 0 there is no training.
        training: whether there is a backward.
        host_memory_bytes: memory of each rank for the slots of bounded-lag channels, if the weights
            are elsewhere; None: slots take from `memory_bytes`.
        cores_per_host: number of cores that the ranks of a host share; None: each rank has its own.
        memory_kind: what messages call `memory_bytes`: "HBM" or "DDR".
    """

    ranks: int
    batch: int
    memory_bytes: Sequence[int]
    ranks_per_host: int | None = None
    backend: str = "bls"
    bound: int = 0
    training: bool = True
    host_memory_bytes: Sequence[int] | None = None
    cores_per_host: int | None = None
    memory_kind: str = "DDR"

    def __post_init__(self) -> None:
        """Raises ValueError for a job that contradicts itself."""
        if self.ranks < 1 or self.batch < 1 or self.bound < 0:
            raise ValueError(
                f"{self.ranks} ranks, batch {self.batch}, bound {self.bound}: ranks and batch have "
                "to be positive, the bound not negative"
            )
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is '{self.backend}', not one of {', '.join(BACKENDS)}")
        if self.training and self.bound > 0:
            raise ValueError(f"bound is {self.bound}, but only bound 0 trains")
        for memory in (self.memory_bytes, self.host_memory_bytes):
            if memory is not None and len(memory) != self.ranks:
                raise ValueError(f"{len(memory)} capacities were given for {self.ranks} ranks")
        if self.cores_per_host is not None and self.cores_per_host < 1:
            raise ValueError(f"cores_per_host is {self.cores_per_host}")
        if self.ranks % self.host_ranks:
            raise ValueError(f"{self.ranks} ranks do not fill hosts of {self.host_ranks}")

    @property
    def host_ranks(self) -> int:
        """Returns the number of ranks that share a host."""
        return self.ranks_per_host or self.ranks

    @property
    def ranks_per_core(self) -> float:
        """Returns how many ranks share a core, at least 1."""
        return max(1.0, self.host_ranks / (self.cores_per_host or self.host_ranks))

    @property
    def ways_of_rows(self) -> int:
        """Returns how often embeddings go between ranks in a step. Gradients count when
        training."""
        return 2 if self.training else 1

    @property
    def exchanges_of_ids(self) -> int:
        """Returns how many all-to-alls take ids to their rows. Bounded-lag channels have one.
        TorchRec has three: splits, lengths and values, one after the other."""
        return 1 if self.backend == "bls" else 3

    @property
    def samples(self) -> int:
        """Returns the samples of a step on all ranks."""
        return self.ranks * self.batch

    @property
    def in_flight(self) -> int:
        """Returns the number of iterations whose ids and embeddings a rank holds at once."""
        return self.bound + 1
