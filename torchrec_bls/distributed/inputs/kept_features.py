"""Copies of what a batch still needs after its post, when its memory is the caller's again."""

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def kept(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns `features` in memory of its own."""
    weights, inverse = features.weights_or_none(), features.inverse_indices_or_none()
    varies = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values().clone(),
        weights=None if weights is None else weights.clone(),
        lengths=features.lengths().clone(),
        stride=None if varies else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if varies else None,
        inverse_indices=None if inverse is None else (list(inverse[0]), inverse[1].clone()),
    )
