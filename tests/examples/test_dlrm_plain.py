"""The plain DLRM gives the same logits over every backend, with every bound and any ranks."""

import pytest
import torch
import torch.distributed as dist

from tests.processes import run

ROWS, STEPS = 16, 6


def infer_all(rank: int, ranks: int, group: dist.ProcessGroup, bound: int) -> list[torch.Tensor]:
    from dlrm_plain.data import DENSE_FEATURES, ROWS_PER_TABLE, generate
    from dlrm_plain.exchange import EmbeddingExchange, over
    from dlrm_plain.inference import infer
    from dlrm_plain.model import Dlrm

    model = Dlrm(
        rank, ranks, rows_per_table=ROWS_PER_TABLE, dense_features=DENSE_FEATURES, embedding_dim=8
    )
    rows = ROWS // ranks
    exchange = EmbeddingExchange(model, rows, over(group))
    batches = generate(rank, ranks, model.own_tables, rows=rows, steps=STEPS)
    with torch.no_grad():
        return list(infer(model, batches, exchange, bound))


def infer_over_all_backends(rank: int, ranks: int) -> dict[tuple[str, int], list[torch.Tensor]]:
    from dlrm_plain.run import make_group

    return {
        (backend, bound): infer_all(rank, ranks, make_group(backend, bound, 4096), bound)
        for backend in ("gloo", "bls")
        for bound in (0, 1, STEPS + 1)
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_depend_on_neither_backend_nor_bound(ranks: int) -> None:
    by_rank = run(ranks, infer_over_all_backends, ranks)
    [whole] = run(1, infer_alone)
    for rank, found in enumerate(by_rank):
        expected = found["gloo", 0]
        assert len(expected) == STEPS
        for logits in found.values():
            assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))
        rows = ROWS // ranks
        for logits, all_rows in zip(expected, whole, strict=True):
            own = all_rows[rank * rows : (rank + 1) * rows]
            # Matrices of other shapes are multiplied in another order.
            torch.testing.assert_close(logits, own)
            assert logits.std() > 0


def infer_alone(rank: int) -> list[torch.Tensor]:
    return infer_all(rank, 1, dist.group.WORLD, 0)


def test_every_rank_needs_a_table() -> None:
    from dlrm_plain.model import Dlrm

    with pytest.raises(ValueError, match="3 ranks for 2 tables"):
        Dlrm(0, 3, rows_per_table=[4, 4], dense_features=1, embedding_dim=2)
