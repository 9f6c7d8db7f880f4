"""The exchange of rows in their stored form."""

import torch

from torchrec_bls import _native
from torchrec_bls.distributed.exchanges.exchange import Exchange, Pending
from torchrec_bls.distributed.inputs.arrived_features import ArrivedFeatures
from torchrec_bls.distributed.inputs.input_dist import IdsLayout
from torchrec_bls.distributed.outputs.output_memory import empty_output
from torchrec_bls.quant.row_plan import AskedBatch, RowPlan


class StoredExchange:
    """Sends the rows that were asked for. Puts arriving rows where a lookup reads them.

    Args:
        rank: this rank.
        exchange: the module's channel for rows.
        plan: row plan of the module.
        tables: tables of this rank's blocks.
    """

    def __init__(
        self, rank: int, exchange: Exchange, plan: RowPlan, tables: _native.Tables
    ) -> None:
        first = sum(plan.splits[:rank])
        self._exchange = exchange
        self._splits = plan.splits
        self._tables = tables
        self._used_bytes = plan.used_bytes[first : first + plan.splits[rank]]

    def post(
        self, ids: ArrivedFeatures, layout: IdsLayout, asked: AskedBatch
    ) -> Pending[torch.Tensor]:
        """Posts rows straight from the tables.

        Args:
            ids: rows that the ranks ask this one for.
            layout: layout of these ids.
            asked: batch of this rank; the result has its rows, in uint8.

        Raises:
            ValueError: a table does not have a row that another rank asks for.
        """
        slot_bytes = layout.slot_bytes.embeddings
        if not self._exchange.has_slots(slot_bytes):
            self._exchange.open(self._largest_message(layout), asked.samples, slot_bytes)
        rows = empty_output((asked.scratch_bytes,), torch.uint8)

        def send(channel: _native.Channel) -> None:
            _native.post_stored_rows(channel, self._tables, ids.native)

        def collect(arrival: _native.Arrival) -> torch.Tensor:
            _native.collect_placed_rows(arrival, rows, asked.placed, self._splits)
            return rows

        return self._exchange.post(send, collect, [], layout.label)

    def _largest_message(self, layout: IdsLayout) -> int:
        counts = torch.tensor(layout.counts).view(-1, len(layout.order))
        sizes = torch.tensor(self._used_bytes).view(-1, 1) * counts
        return int(sizes.sum(0).max())
