"""The hash maps in which the backward of unpooled lookups adds up gradients.

FBGEMM's kernel for the CPU (`split_embedding_nobag_backward_exact_cpu_kernel`) keeps two maps over
all tables of an op. The first map has for each id a map from table to gradient. The second map has
the table's number for each id and table. A new id costs more than a further table for a known id.
More ids and tables make each of them more expensive: the maps are made anew in each step, and soon
exceed the caches. So the cost of a shard depends on the other shards of its op.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...cost_interface import Ops

Floats = npt.NDArray[np.float64]

#: Terms of the analytic model besides `lookup_features.TERMS`, where gradients go through maps.
MAP_TERMS = ("map_id", "map_id_far")

# Bytes that libstdc++ and malloc take. For an id: its node in either map, a bucket, and the 13
# buckets of its own map. For a table of an id: two nodes and a vector; its numbers come on top.
_ID_BYTES = 2 * (80 + 8 + 112)
_ROW_BYTES = 48 + 32 + 8
_LEAST_VECTOR_BYTES = 24
_GRADIENT_BYTES = 4

# Maps of this size are out of the caches. From 8 to 32 MiB predictions are equally good.
_FAR_BYTES = 16 * 2.0**20


def map_terms(columns: dict[str, Floats], ops: Ops) -> Floats:
    """Counts the terms that the maps are charged for.

    `map_id` is an entry of the outer maps. An op's entries are divided among its shards by their
    unique rows. `map_id_far` is the same times log2(1 + bytes of the op's maps / 16 MiB) squared.

    Args:
        columns: `as_columns` of the shards.
        ops: the ops that look the shards up.

    Returns:
        (n, len(MAP_TERMS)) float64.
    """
    unique = columns["unique_rows"]
    vectors = np.maximum(_GRADIENT_BYTES * columns["dim"], _LEAST_VECTOR_BYTES)
    map_id, far = np.zeros_like(unique), np.zeros_like(unique)
    for op in np.unique(ops.of):
        of_op = ops.of == op
        per_op = ops.per_op[of_op]
        rows = float((per_op * unique[of_op]).sum())
        if rows == 0:
            continue
        ids = _distinct_ids(columns["rows"][of_op], unique[of_op], per_op)
        row_bytes = per_op * unique[of_op] * (_ROW_BYTES + vectors[of_op])
        map_bytes = ids * _ID_BYTES + float(row_bytes.sum())
        map_id[of_op] = unique[of_op] * ids / rows
        far[of_op] = np.log2(1.0 + map_bytes / _FAR_BYTES) ** 2
    return np.stack([map_id, map_id * far], axis=1)


def _distinct_ids(rows: Floats, unique: Floats, per_op: Floats) -> float:
    """Returns how many ids are looked up in any of some shards, if each shard's ids are spread
    evenly over its rows. The probability that an id is in none of them is a product of
    probabilities, one for each shard that the op has."""
    order = np.argsort(rows)
    absent_in_each = 1.0 - np.minimum(unique[order] / rows[order], 1.0)
    # Ids between two shards' numbers of rows can be only in the shards with more rows.
    absent = np.cumprod(np.power(absent_in_each, per_op[order])[::-1])[::-1]
    return float((np.diff(rows[order], prepend=0.0) * (1.0 - absent)).sum())
