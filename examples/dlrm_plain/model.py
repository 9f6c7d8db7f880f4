"""A DLRM in plain PyTorch: whole tables dealt out to the ranks, the rest on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

BOTTOM_LAYERS = (128,)
TOP_LAYERS = (128, 64)


class Dlrm(nn.Module):
    """One rank's part of the model (Naumov et al., arXiv:1906.00091).

    The weights are a function of the seed alone: any number of ranks make up the same model.

    Args:
        rank: this rank.
        ranks: number of ranks. Each owns a run of consecutive tables; the runs are equally long, or
            differ by one table.
        rows_per_table: rows of all tables.
        dense_features: width of the dense input.
        embedding_dim: columns of every table.
        seed: seed of the weights.

    Raises:
        ValueError: there are more ranks than tables.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        *,
        rows_per_table: Sequence[int],
        dense_features: int,
        embedding_dim: int,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if ranks > len(rows_per_table):
            raise ValueError(
                f"{ranks} ranks for {len(rows_per_table)} tables: some would have none"
            )
        self.tables_of_rank = deal_out(len(rows_per_table), ranks)
        self.own_tables = self.tables_of_rank[rank]
        self.embedding_dim = embedding_dim
        self.tables = nn.ParameterList(
            _table(seed + 1 + table, rows_per_table[table], embedding_dim)
            for table in self.own_tables
        )
        torch.manual_seed(seed)
        self.bottom = _mlp([dense_features, *BOTTOM_LAYERS, embedding_dim])
        vectors = 1 + len(rows_per_table)
        self.top = _mlp([embedding_dim + vectors * (vectors - 1) // 2, *TOP_LAYERS, 1])
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1))

    def apply_emb(
        self, ids: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Looks the ids of the whole batch up in this rank's tables and sums them up by sample.

        Args:
            ids: the ids of all samples for each own table, int64.
            offsets: where each sample's ids begin, for each own table, (samples,) int64.

        Returns:
            (samples, own tables * embedding_dim).
        """
        bags = [
            F.embedding_bag(values, table, begins, mode="sum")
            for table, values, begins in zip(self.tables, ids, offsets, strict=True)
        ]
        return torch.cat(bags, dim=1)

    def apply_bottom(self, dense: torch.Tensor) -> torch.Tensor:
        """Returns (rows, embedding_dim) for this rank's rows of the batch."""
        return self.bottom(dense)

    def apply_top(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Returns the logits of this rank's rows.

        Args:
            dense: output of `apply_bottom`.
            embeddings: (rows, tables, embedding_dim), of all tables.
        """
        vectors = torch.cat([dense.unsqueeze(1), embeddings], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        interactions = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, interactions], dim=1)).squeeze(1)


def deal_out(count: int, ranks: int) -> list[range]:
    """Cuts 0, ..., count - 1 into one run for each rank, the first ones longer by at most one."""
    share, rest = divmod(count, ranks)
    begins = [rank * share + min(rank, rest) for rank in range(ranks + 1)]
    return [range(begin, end) for begin, end in pairwise(begins)]


def _table(seed: int, rows: int, columns: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.rand(rows, columns, generator=generator) - 0.5, requires_grad=False)


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
