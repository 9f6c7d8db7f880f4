"""Row-wise pooled sums are added in rank order, and how far gloo's own order may be from that."""

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from tests.distributed import models
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BLSConfig

KINDS = {kind.name: kind for kind in (models.EBC, models.WEIGHTED)}


def pooled(model: torch.nn.Module, batch: object) -> dict[str, torch.Tensor]:
    """Returns the pooled embeddings by feature, whatever the order of the columns."""
    with torch.no_grad():
        return dict(models.arrived(model(batch)).to_dict())


def row_wise_pools(rank: int) -> tuple[KeyedJaggedTensor, dict[str, torch.Tensor]]:
    ids = models.make_ids(models.EBC, rank, 20, most_ids=9)
    return ids, pooled(
        models.shard(models.EBC, "row_wise", models.EBC.bls_sharder(BLSConfig())), models.Batch(ids)
    )


def add_up(rows: np.ndarray) -> np.ndarray:
    total = np.zeros(rows.shape[1], dtype=np.float32)
    for row in rows:
        total += row
    return total


def pool_in_rank_order(
    ids: KeyedJaggedTensor, feature: str, table: int, weights: np.ndarray, world_size: int
) -> np.ndarray:
    """Adds up the rows of each rank's block, then these sums in rank order; both one by one."""
    jagged = ids[feature]
    block = -(-models.ROWS[table] // world_size)
    pools = []
    for sample in jagged.to_dense():
        rows = sample.numpy()
        partial = np.stack([add_up(weights[rows[rows // block == r]]) for r in range(world_size)])
        count = len(rows) if table % 2 else 1  # mean pooling in the odd tables
        # The divisor with which TorchRec keeps clear of a division by 0.
        pools.append(add_up(partial) / (np.float32(count) + np.float32(1e-6)))
    return np.stack(pools)


def test_pooled_rows_are_added_in_rank_order() -> None:
    unsharded = models.EBC.module()
    for ids, pools in run(3, row_wise_pools):
        for table, dim in enumerate(models.DIMS):
            weights = unsharded.embedding_bags[f"t{table}"].weight.detach().numpy()
            for feature, name in (
                (f"f{table}", f"f{table}@t{table}" if table == 0 else f"f{table}"),
                *([("f0", "f0@t3")] if table == 3 else []),
            ):
                expected = pool_in_rank_order(ids, feature, table, weights, 3)
                assert expected.shape == (20, dim)
                np.testing.assert_array_equal(pools[name].numpy(), expected, err_msg=name)


def ours_and_gloos(
    rank: int, kind: models.Kind, nodes: int
) -> tuple[KeyedJaggedTensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    models.set_nodes(nodes)
    ids = models.make_ids(kind, rank, 20 + rank, most_ids=9)
    ours, theirs = (
        pooled(models.shard(kind, "mixed", sharder, nodes), models.Batch(ids))
        for sharder in (kind.bls_sharder(BLSConfig()), kind.torchrec_sharder())
    )
    return ids, ours, theirs


def magnitudes(kind: models.Kind, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
    """Returns the pools of the absolute values of all terms."""
    module: EmbeddingBagCollection = kind.module()
    for weight in module.parameters():
        weight.data.abs_()
    return pooled(module, ids)  # the weights of ids are positive already


@pytest.mark.parametrize(
    ("world_size", "nodes", "kind"),
    slow_but(
        [(2, 2, "weighted"), (3, 1, "weighted"), (4, 2, "ebc")],
        [
            (world_size, nodes, kind)
            for world_size, nodes in ((2, 2), (3, 1), (4, 2), (8, 2))
            for kind in KINDS
        ],
    ),
)
def test_the_difference_to_gloos_reduce_scatter_is_rounding(
    world_size: int, nodes: int, kind: str
) -> None:
    # A sum of n floats in any order is off by at most (n - 1) u times the sum of the magnitudes, u
    # being half of eps (Higham, Accuracy and Stability of Numerical Algorithms, 4.2), so two orders
    # differ by (n - 1) eps times that. The partial sums are the same on both sides. One eps more
    # covers the division of mean pooling and terms of second order.
    eps = torch.finfo(torch.float32).eps
    for ids, ours, theirs in run(world_size, ours_and_gloos, KINDS[kind], nodes):
        terms = magnitudes(KINDS[kind], ids)
        assert ours.keys() == theirs.keys() == terms.keys()
        for name, ours_of in ours.items():
            if world_size == 2:
                assert torch.equal(ours_of, theirs[name])
            assert torch.all((ours_of - theirs[name]).abs() <= world_size * eps * terms[name])
