"""Batches in Criteo's shape: readers of the real rows and a built-in generator."""
# ruff: noqa: E402

from torchrec_bls._versions import check_packages

# Before any import of torchrec, which fails with an undefined symbol where versions do not match.
check_packages()

from torchrec_bls.datasets.criteo import CriteoDataset
from torchrec_bls.datasets.criteo_shape import (
    CATEGORICAL_NAMES,
    DENSE_FEATURES,
    KAGGLE_CARDINALITIES,
    capped_cardinalities,
)
from torchrec_bls.datasets.synthetic import SyntheticDataset

__all__ = [
    "CATEGORICAL_NAMES",
    "DENSE_FEATURES",
    "KAGGLE_CARDINALITIES",
    "CriteoDataset",
    "SyntheticDataset",
    "capped_cardinalities",
]
