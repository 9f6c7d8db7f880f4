"""The output of an EmbeddingCollection that is read directly."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_bls.direct.reads.float_reads import OutputForm
from torchrec_bls.direct.reads.tables_view import TablesView
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.outputs.lazy_jagged_tensors import CutEmbeddings, LazyJaggedTensor
from torchrec_bls.distributed.outputs.output_memory import empty_output


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
        batch = batch.in_full([view.keys[place] for place in view.order])
        order = view.order
        ids = sum([batch.counts[key] for key in order])
        rows = empty_output((ids, self._dim), view.dtype)
        view.copy_rows(batch, rows)
        features = batch.features
        lengths = features.lengths().clone().view(len(batch.counts), features.stride())
        cut = CutEmbeddings(rows, lengths, order, batch.counts)
        embeddings = {
            name: LazyJaggedTensor.at(cut, place) for place, name in enumerate(self.names)
        }
        return _with_ids(embeddings, batch, order) if self._with_ids else embeddings

    def as_json(self) -> dict[str, Any]:
        """See OutputForm."""
        return {"names": self.names, "with_ids": self._with_ids}


def _with_ids(
    embeddings: Mapping[str, JaggedTensor], batch: CheckedBatch, order: Sequence[int]
) -> dict[str, JaggedTensor]:
    """Gives each feature its ids as the weights, as TorchRec does."""
    ids = torch.split_with_sizes(batch.features.values().clone(), batch.counts)
    return {
        name: JaggedTensor(values=rows.values(), lengths=rows.lengths(), weights=ids[key])
        for (name, rows), key in zip(embeddings.items(), order, strict=True)
    }
