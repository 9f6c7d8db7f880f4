"""Batches in Criteo's shape: readers of the real rows and a built-in generator."""

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
