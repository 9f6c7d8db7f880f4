"""New rows of some tables, checked before any of them is written."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torchrec_bls.direct.beside_lookups import leave_core, one_torch_thread
from torchrec_bls.direct.layout import TableLayout
from torchrec_bls.direct.new_weights import check_is_dense
from torchrec_bls.direct.shared_tables import SharedTables


class RowDelta(NamedTuple):
    """New rows of a table. Nobody else writes to these tensors.

    Attributes:
        ids: the rows' numbers in ascending order, each once, int64 [rows].
        stored: the rows as they are stored, uint8 [rows, bytes].
    """

    ids: torch.Tensor
    stored: torch.Tensor


#: The new rows of a module's tables, by name.
RowDeltas = Mapping[str, RowDelta]


def deltas_of(tables: Mapping[str, SharedTables], given: Mapping[str, Any]) -> list[RowDeltas]:
    """Returns the new rows of each module. All that a caller can get wrong is checked.

    Args:
        tables: tables of each module, by the prefix of their names in a state dict of the model.
        given: pairs of ids and rows, by the tables' names in a state dict of the model.

    Raises:
        ValueError: a table is unknown; ids or rows are of another dtype or shape than the table's;
            an id is no row of it; or a row has numbers that are NaN or infinite.
    """
    known = {f"{prefix}{name}.weight" for prefix, of in tables.items() for name in of.layouts}
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"the model has no tables {unknown}, but {sorted(known)}")
    return [
        {
            table: _delta(name, given[name], of_module, layout)
            for table, layout in of_module.layouts.items()
            if (name := f"{prefix}{table}.weight") in given
        }
        for prefix, of_module in tables.items()
    ]


@one_torch_thread()
def _delta(name: str, pair: Any, tables: SharedTables, layout: TableLayout) -> RowDelta:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"'{name}' is a {type(pair).__name__}, but must be a pair (ids, rows)")
    ids, rows = pair
    check_is_dense(f"ids of {name}", ids)
    check_is_dense(f"rows of {name}", rows)
    if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1:
        raise ValueError(
            f"the ids of '{name}' are {ids.dtype} {list(ids.shape)}, but must be int64 or int32, "
            "[rows]"
        )
    expected = [len(ids), layout.columns]
    if rows.dtype not in tables.given_dtypes or list(rows.shape) != expected:
        raise ValueError(
            f"the rows of '{name}' are {rows.dtype} {list(rows.shape)}, but for {len(ids)} ids "
            f"must be {' or '.join(map(str, tables.given_dtypes))} {expected}"
        )
    # Copies, which the caller can't write to between the checks and the end.
    ids = ids.detach().to("cpu", torch.int64, copy=True)
    outside = (ids < 0) | (ids >= layout.rows)
    if bool(outside.any()):
        raise ValueError(
            f"id {int(ids[outside][0])} is no row of '{name}', which has {layout.rows}"
        )
    ids, order = _in_order(ids)
    rows = rows.detach().to("cpu").index_select(0, order)
    # A sum, which takes a tenth of the time, is finite only if all rows are.
    if not bool(rows.sum(dtype=torch.float32).isfinite()):
        finite = rows.isfinite().all(dim=1)
        if not bool(finite.all()):
            row = int(ids[finite.logical_not()][0])
            raise ValueError(
                f"'{name}' has NaN or infinite weights, in row {row} for example: publish rows of "
                "sound weights"
            )
    stored = tables.stored(layout.name, rows)
    leave_core()
    return RowDelta(ids, stored)


def _in_order(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ids in ascending order, each once, and the place of the last one of each."""
    ids, order = ids.sort(stable=True)
    is_last = torch.ones_like(ids, dtype=torch.bool)
    is_last[:-1] = ids[1:] != ids[:-1]
    return ids[is_last], order[is_last]
