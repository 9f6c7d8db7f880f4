"""An embedding module in a process that reads tables which others have shared."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)

from torchrec_bls.direct.reads.direct_reads import DirectReads, OutputForm
from torchrec_bls.direct.reads.pooled_output import PooledOutput, SumDivision
from torchrec_bls.direct.reads.row_output import RowOutput
from torchrec_bls.distributed.inputs.input_check import InputCheck
from torchrec_bls.distributed.inputs.variable_batch import features_of_names
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.distributed.outputs.shared_means import Misdivided
from torchrec_bls.errors import ProtocolError

# EmbeddingBagCollection or EmbeddingCollection, which have no types.
Collection = Any


class AttachedCollection(nn.Module):
    """Replaces an EmbeddingBagCollection or EmbeddingCollection in a model.

    It gives the results of the sharded modules that share the tables, at once and without waiting.
    It has no parameters: its tables are read where they lie.

    Args:
        reads: the tables.
        input_check: check of the input.

    Attributes:
        direct_reads: see above.
        input_check: see above.
    """

    def __init__(self, reads: DirectReads, input_check: InputCheck) -> None:
        super().__init__()
        self.direct_reads = reads
        self.input_check = input_check

    @property
    def version(self) -> str:
        """Returns the version of the weights that lookups read."""
        return self.direct_reads.generation.version

    @property
    def owners_gone(self) -> list[int]:
        """Returns the ranks whose tables are read although their process is gone."""
        return self.direct_reads.tables.owners_gone()

    @property
    def replaced_ids(self) -> int:
        """Returns how many ids got row 0 instead, by bad_ids="row0"."""
        return self.input_check.replaced_ids

    @outside_inference_mode
    def forward(self, features: object) -> Any:
        """Returns the embeddings of a batch.

        Args:
            features: features of the batch, a KeyedJaggedTensor on the CPU.

        Returns:
            A KeyedTensor, [samples, columns], or a JaggedTensor, [ids, columns], of each feature by
            name.

        Raises:
            ValueError: the batch does not fit the module, or autograd is on.
        """
        if torch.is_grad_enabled():
            raise ValueError(
                f"{self.direct_reads.where}: autograd is on, but tables that are read directly do "
                "not change: use torch.no_grad()"
            )
        try:
            batch = self.input_check.check(features)
        except Exception as error:  # whatever a request holds, the fault is that request's
            raise ValueError(f"{self.direct_reads.where}: {error}") from error
        return self.direct_reads.output(batch).wait()


def collections_of(model: nn.Module) -> dict[str, Collection]:
    """Returns the embedding modules of a model that is not sharded, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection))
    }


def configs_of(collection: Collection) -> list[Any]:
    """Returns the EmbeddingBagConfig or EmbeddingConfig of each table."""
    if isinstance(collection, EmbeddingBagCollection):
        return list(collection.embedding_bag_configs())
    return list(collection.embedding_configs())


def form_of(content: Mapping[str, Any], configs: Sequence[Any], pooled: bool) -> OutputForm:
    """Returns the form that another process described by `OutputForm.as_json`.

    Args:
        content: content of the description.
        configs: EmbeddingConfig or EmbeddingBagConfig of each table.
        pooled: whether the form is an EmbeddingBagCollection's.

    Raises:
        ProtocolError: the description does not fit the tables.
    """
    dims = {
        name: table.embedding_dim
        for table, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
        for name in names
    }
    features = features_of_names(configs)
    try:
        names = list(content["names"])
        if sorted(names) != sorted(dims):
            raise ValueError(f"it has {names}")
        if not pooled:
            return RowOutput(names, configs[0].embedding_dim, bool(content["with_ids"]))
        return PooledOutput(
            names,
            [dims[name] for name in names],
            [features[name] for name in names],
            list(content["kernel_means"]),
            _division_of(content["division"], configs),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            f"the output that another process describes does not fit the tables ({error!r}): "
            "install one version of torchrec-bls in both processes"
        ) from error


def _division_of(content: Mapping[str, Any] | None, configs: Sequence[Any]) -> SumDivision | None:
    if content is None:
        return None
    features = {feature for table in configs for feature in table.feature_names}
    means, sums = content["misdivided"]
    misdivided = Misdivided(dict(means), list(sums))
    division = SumDivision(list(content["features"]), list(content["sums"]), misdivided)
    if set(division.features) != features or not features.issuperset(
        [*division.sums, *misdivided.means.values()]
    ):
        raise ValueError(f"{division} is not of {sorted(features)}")
    return division
