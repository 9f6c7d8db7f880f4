"""Batches in Criteo's shape: readers of the real rows and a built-in generator."""

from typing import TYPE_CHECKING

from torchrec_bls._first_use import imported_at_first_use

if TYPE_CHECKING:
    from torchrec_bls.datasets.criteo import CriteoDataset
    from torchrec_bls.datasets.criteo_shape import (
        CATEGORICAL_NAMES,
        DENSE_FEATURES,
        capped_cardinalities,
    )
    from torchrec_bls.datasets.synthetic import SyntheticDataset

__all__ = [
    "CATEGORICAL_NAMES",
    "DENSE_FEATURES",
    "CriteoDataset",
    "SyntheticDataset",
    "capped_cardinalities",
]

__getattr__ = imported_at_first_use(
    __name__,
    {
        "CATEGORICAL_NAMES": ".criteo_shape",
        "CriteoDataset": ".criteo",
        "DENSE_FEATURES": ".criteo_shape",
        "SyntheticDataset": ".synthetic",
        "capped_cardinalities": ".criteo_shape",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
