"""What a shard makes its rank look up, send, receive and hold in one step."""

from dataclasses import dataclass

from torchrec_bls.slot_size import SMALLEST_SLOT_BYTES, wanted_slot_bytes

from ..cost_interface import LookupWork, TableReuse
from .job import Job
from .tables import COLUMN_WISE, Table

ID_BYTES = 8
LENGTH_BYTES = 4
ID_WEIGHT_BYTES = 4
EMBEDDING_BYTES = 4  # the lookups' output is float32

# Bytes that a ring holds beside each slot (docs/design/channel.md).
_RING_BYTES_PER_SLOT = 192


@dataclass(frozen=True)
class ShardTraffic:
    """The bytes that a shard moves in one step, and its lookup.

    Attributes:
        lookup: lookup for the cost model.
        ids_per_rank: bytes of ids and lengths from each rank, the own one included.
        rows_per_rank: bytes of embeddings for each rank, the own one included; as many bytes of
            gradients come back when training.
        held_bytes: bytes on its rank: weights, optimizer state and the data of iterations in
            flight.
    """

    lookup: LookupWork
    ids_per_rank: float
    rows_per_rank: float
    held_bytes: float


def shard_traffic(
    table: Table, reuse: TableReuse, job: Job, sharding_type: str, rows: int, columns: int
) -> ShardTraffic:
    """Returns what a shard of `rows` x `columns` of `table` makes its rank do.

    Ids are assumed to spread evenly over the rows of a table that is split by rows. A partial sum
    of such a table travels as an embedding of its own (docs/design/torchrec-seam.md).
    """
    share = rows / table.rows
    ids = reuse.pooling_factor * share
    id_bytes = ID_BYTES + (ID_WEIGHT_BYTES if table.weighted else 0)
    ids_per_rank = job.batch * (ids * id_bytes + table.features * LENGTH_BYTES)
    results = table.features if table.pooled else ids
    rows_per_rank = job.batch * results * columns * EMBEDDING_BYTES
    copies = job.in_flight * (ids_per_rank + rows_per_rank)
    gradients = rows_per_rank if job.training else 0.0
    return ShardTraffic(
        lookup=LookupWork(
            rows=rows,
            dim=columns,
            weight_bytes=table.weight_bytes,
            samples=float(job.samples * table.features),
            pooling=ids / table.features,
            unique_rows=min(reuse.unique_rows(job.samples), table.rows) * share,
            pooled=table.pooled,
            by_exchange=read_by_exchange(table, job, sharding_type),
        ),
        ids_per_rank=ids_per_rank,
        rows_per_rank=rows_per_rank,
        held_bytes=table.weights_bytes(rows, columns) + job.ranks * (copies + gradients),
    )


def read_by_exchange(table: Table, job: Job, sharding_type: str) -> bool:
    """Returns whether the exchange reads a table's rows (LookupWork.by_exchange). TorchRec puts
    unpooled rows together that come column-wise, and FBGEMM looks them up then."""
    together = sharding_type == COLUMN_WISE and not table.pooled
    floats = table.weight_bytes == EMBEDDING_BYTES
    return job.backend == "bls" and not job.training and floats and not together


def result_bytes(table: Table, reuse: TableReuse, job: Job) -> float:
    """Returns the bytes of a table's embeddings of the own samples. Every rank keeps them."""
    results = table.features if table.pooled else reuse.pooling_factor
    copies = job.in_flight + (1 if job.training else 0)
    return job.batch * results * table.dim * EMBEDDING_BYTES * copies


def slots_bytes(job: Job, largest_message: float) -> int:
    """Returns the bytes of one channel's slots on each rank; 0 without bounded-lag channels.

    Args:
        job: job that the plan is for.
        largest_message: bytes of the largest message between two ranks.
    """
    if job.backend != "bls":
        return 0
    slot = max(SMALLEST_SLOT_BYTES, wanted_slot_bytes(largest_message))
    return job.ranks * 2 * (job.bound + 1) * (slot + _RING_BYTES_PER_SLOT)
