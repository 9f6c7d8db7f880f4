"""The model of `served`, whose versions differ in some rows and dense weights from the one
before."""

from torch import nn

from tests.direct.row_versions import RowVersions
from tests.quant import served
from tests.quant.served import (  # noqa: F401 (tests find them here)
    Model,
    bare_model,
    batches_of,
    check,
    number_of,
    quantized,
)

_versions = RowVersions(served)
delta_of, dense_of, weights_of = _versions.delta_of, _versions.dense_of, _versions.weights_of


class Expected(served.Expected):
    """See served.Expected."""

    def _model(self, number: int) -> nn.Module:
        model = Model()
        model.load_state_dict(weights_of(number))
        return quantized(model)
