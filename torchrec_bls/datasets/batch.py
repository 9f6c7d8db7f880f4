"""Building TorchRec's ``Batch`` from numpy arrays."""

import numpy as np
import numpy.typing as npt
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls.datasets.criteo_shape import CATEGORICAL_NAMES


def make_batch(
    labels: npt.NDArray[np.int32],
    dense: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
) -> Batch:
    """Joins arrays into a batch of n rows; no array is copied.

    Args:
        labels: (n,), labels of 0 or 1.
        dense: (n, 13), dense features.
        ids: (total,), ids feature by feature, and row by row within a feature.
        lengths: (26, n), number of ids of each feature in each row; their sum is `total`.
    """
    return Batch(
        dense_features=torch.from_numpy(dense),
        sparse_features=KeyedJaggedTensor(
            keys=list(CATEGORICAL_NAMES),
            values=torch.from_numpy(ids),
            lengths=torch.from_numpy(lengths.reshape(-1)),
            stride=len(labels),
        ),
        labels=torch.from_numpy(labels),
    )
