"""Rows of samples, for batches of an EmbeddingCollection with a size per key.

Such a batch has equal samples once per key, and each sample chooses a row of each key. TorchRec
copies the embeddings of the chosen rows with a kernel of FBGEMM that has no gradients on the CPU: a
training would change nothing, without a word. An index_select has them.
"""

from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def choose_rows_with_gradients(context: Any) -> None:
    """Makes TorchRec choose the embeddings of samples as those of deduplicated ids.

    Args:
        context: EmbeddingCollectionContext of a batch whose ids were posted. If the batch has a
            size per key, `reverse_indices` and `input_features` take the place of `seq_vbe_ctx`.
    """
    if not context.seq_vbe_ctx:
        return
    for chosen, sharding in zip(context.seq_vbe_ctx, context.sharding_contexts, strict=True):
        context.reverse_indices.append(_indices(chosen))
        context.input_features.append(
            KeyedJaggedTensor(
                keys=sharding.features_before_input_dist.keys(),
                # TorchRec reads them only where it gives out ids beside the embeddings.
                values=chosen.recat[:0]
                if chosen.reindexed_values is None
                else chosen.reindexed_values,
                lengths=chosen.reindexed_lengths.reshape(-1),
                stride=chosen.reindexed_lengths.shape[1],
                length_per_key=chosen.reindexed_length_per_key,
            )
        )
    context.seq_vbe_ctx.clear()


def _indices(chosen: Any) -> torch.Tensor:
    """Returns the place of each sample's ids among the ids of the batch, by feature and sample."""
    lengths = chosen.reindexed_lengths.reshape(-1).to(torch.int64)
    of_rows = chosen.unpadded_lengths.to(torch.int64)
    first = (of_rows.cumsum(0) - of_rows)[chosen.recat]
    ids = sum(chosen.reindexed_length_per_key)
    before = lengths.cumsum(0) - lengths
    moved: torch.Tensor = (first - before).repeat_interleave(lengths, output_size=ids)
    return torch.arange(ids) + moved
