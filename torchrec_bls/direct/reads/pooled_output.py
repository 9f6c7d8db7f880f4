"""The output of an EmbeddingBagCollection that is read directly."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torchrec.distributed.embeddingbag import _apply_mean_pooling, _create_mean_pooling_divisor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_bls.direct.reads.float_reads import OutputForm
from torchrec_bls.direct.reads.tables_view import TablesView
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.inputs.variable_batch import spread
from torchrec_bls.distributed.outputs.shared_means import Misdivided, bag_sizes, correct


@dataclass(frozen=True)
class SumDivision:
    """TorchRec's way from sums to means, for tables that are sharded by rows.

    Attributes:
        features: features of all lookups, in the order of the shardings.
        sums: features that stay sums.
        misdivided: embeddings that TorchRec gets wrong.
    """

    features: list[str]
    sums: list[str]
    misdivided: Misdivided


class PooledOutput(OutputForm):
    """The output form of a KeyedTensor.

    Args:
        names: names of the embeddings, in the order of the output.
        dims: number of columns of each embedding.
        features: feature of each embedding.
        kernel_means: tables whose bags are pooled to means when they are looked up.
        division: division that follows the lookups, if there is one.
    """

    pooled = True

    def __init__(
        self,
        names: Iterable[str],
        dims: Iterable[int],
        features: Iterable[str],
        kernel_means: Iterable[str],
        division: SumDivision | None,
    ) -> None:
        super().__init__(names, kernel_means)
        self._dims = list(dims)
        self._columns = sum(self._dims)
        self._division = division
        self._features = dict(zip(self.names, features, strict=True))
        divided = [] if division is None else division.features
        self._first_places = {name: place for place, name in reversed(list(enumerate(divided)))}
        self._dims_of_names = torch.tensor(self._dims)
        of_names = [] if division is None else [self._features[name] for name in self.names]
        self._places_of_names = torch.tensor([self._first_places[name] for name in of_names])

    def read(self, view: TablesView, batch: CheckedBatch) -> KeyedTensor:
        """See OutputForm."""
        features, division = batch.features, self._division
        is_divided = division is not None and features.stride() > 0
        if is_divided and batch.is_on_gpu and features.weights_or_none() is not None:
            raise ValueError(
                "weighted means of tables that are sharded by rows are divided by sums of weights "
                "on the CPU: give the batch on the CPU, before it is moved"
            )
        embeddings = KeyedTensor(self.names, self._dims, view.sums(batch, self._columns))
        if division is not None and is_divided:
            divisor = self._divisor(view, division, batch)
            embeddings = _apply_mean_pooling(embeddings, self._by_column(view, divisor))
        if batch.varying is not None:
            names, indices = batch.varying.inverse_indices()
            inverse = names, view.beside_output(indices)
            embeddings = spread(embeddings, inverse, self._features)
        return embeddings

    def as_json(self) -> dict[str, Any]:
        """See OutputForm."""
        return {
            "names": self.names,
            "kernel_means": self.kernel_means,
            "division": None if self._division is None else asdict(self._division),
        }

    def _divisor(
        self, view: TablesView, division: SumDivision, batch: CheckedBatch
    ) -> torch.Tensor:
        """Returns what sums are divided by, [samples, embeddings], on the device of the batch."""
        features = batch.features
        sizes = bag_sizes(features)
        ones = [1] * len(self.names)
        dims, places = torch.tensor(ones), self._places_of_names
        if batch.is_on_gpu:
            dims, places = view.beside_output(dims), view.beside_output(places)
        divisor: torch.Tensor = _create_mean_pooling_divisor(
            lengths=torch.cat([sizes[name] for name in division.features]),
            stride=features.stride(),
            keys=division.features,
            offsets=torch.empty(0),
            pooling_type_to_rs_features={PoolingType.SUM.value: division.sums},
            stride_per_key=[features.stride()] * len(division.features),
            dim_per_key=dims,
            embedding_names=self.names,
            embedding_dims=ones,
            variable_batch_per_feature=False,
            kjt_inverse_order=torch.empty(0, dtype=torch.int64),
            kjt_key_indices=self._first_places,
            kt_key_ordering=places,
            inverse_indices=None,
            weights=None,
        )
        if any(division.misdivided):
            correct(divisor, division.misdivided, self.names, ones, features)
        return divisor

    def _by_column(self, view: TablesView, divisor: torch.Tensor) -> torch.Tensor:
        """Returns a divisor where the output is, [samples, columns]."""
        dims = view.beside_output(self._dims_of_names)
        divisor = view.beside_output(divisor)
        return divisor.repeat_interleave(dims, dim=1, output_size=self._columns)
