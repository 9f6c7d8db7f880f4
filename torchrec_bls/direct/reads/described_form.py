"""The form of a float module's output, as another process describes it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchrec.modules.embedding_modules import get_embedding_names_by_table

from torchrec_bls.direct.reads.float_reads import OutputForm
from torchrec_bls.direct.reads.pooled_output import PooledOutput, SumDivision
from torchrec_bls.direct.reads.row_output import RowOutput
from torchrec_bls.distributed.inputs.variable_batch import features_of_names
from torchrec_bls.distributed.outputs.shared_means import Misdivided
from torchrec_bls.errors import ProtocolError


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
