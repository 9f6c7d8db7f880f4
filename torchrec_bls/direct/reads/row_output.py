"""The output of an EmbeddingCollection that is read directly."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_bls.direct.reads.float_reads import OutputForm
from torchrec_bls.direct.reads.tables_view import TablesView
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.outputs.lazy_jagged_tensors import CutEmbeddings, LazyJaggedTensor


class RowOutput(OutputForm):
    """The output form of JaggedTensors by feature.

    Args:
        names: names of the embeddings, in the order of the output.
        dim: number of columns of a row.
        with_ids: whether the output also has the ids.
    """

    pooled = False

    def __init__(self, names: Iterable[str], dim: int, with_ids: bool) -> None:
        super().__init__(names, [])
        self._dim = dim
        self._with_ids = with_ids

    def read(self, view: TablesView, batch: CheckedBatch) -> dict[str, JaggedTensor]:
        """See OutputForm."""
        batch = batch.counted().in_full([view.keys[place] for place in view.order])
        order = view.order
        rows = view.rows(batch, self._dim)
        features = batch.features
        # A copy, since the caller may write to its own.
        lengths = view.copy_beside_output(features.lengths())
        lengths = lengths.view(len(batch.counts), features.stride())
        cut = CutEmbeddings(rows, lengths, order, batch.counts)
        embeddings = {
            name: LazyJaggedTensor.at(cut, place) for place, name in enumerate(self.names)
        }
        if not self._with_ids:
            return embeddings
        ids = view.copy_beside_output(features.values())
        return _with_ids(embeddings, torch.split_with_sizes(ids, batch.counts), order)

    def as_json(self) -> dict[str, Any]:
        """See OutputForm."""
        return {"names": self.names, "with_ids": self._with_ids}


def _with_ids(
    embeddings: Mapping[str, JaggedTensor], ids: Sequence[torch.Tensor], order: Sequence[int]
) -> dict[str, JaggedTensor]:
    """Gives each feature its ids as the weights, as TorchRec does.

    Args:
        embeddings: embeddings of each feature by name.
        ids: ids of each key.
        order: keys in the order of `embeddings`, by index.
    """
    return {
        name: JaggedTensor(values=rows.values(), lengths=rows.lengths(), weights=ids[key])
        for (name, rows), key in zip(embeddings.items(), order, strict=True)
    }
