"""The time of all-to-alls as a constant and a slope, for a search that adds up shards."""

from dataclasses import dataclass

from .estimates import CostModel
from .job import Job


@dataclass(frozen=True)
class ExchangeCosts:
    """Microseconds of an all-to-all: `constant` + `per_byte` x bytes of the largest rank."""

    constant: float
    per_byte: float


def exchange_costs(model: CostModel, job: Job, bytes_per_rank: float) -> ExchangeCosts:
    """Returns the line through the model's times at `bytes_per_rank` and twice as much.

    A rank alone exchanges nothing. Where the model falls with more bytes the line is flat, where it
    would be negative at no bytes it starts at 0.
    """
    if job.ranks == 1:
        return ExchangeCosts(0.0, 0.0)
    at = max(bytes_per_rank, 1.0)
    once, twice = (
        model.all_to_all([size] * job.ranks, [size] * job.ranks, job.backend).microseconds
        for size in (at, 2 * at)
    )
    per_byte = min(max(twice - once, 0.0), once) / at
    return ExchangeCosts(once - per_byte * at, per_byte)
