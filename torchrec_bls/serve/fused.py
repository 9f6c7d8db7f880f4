"""Parts of TorchRec's DLRM in fewer steps, where that is faster."""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.models.dlrm import InteractionArch, SparseArch

from torchrec_bls import _native
from torchrec_bls.errors import named
from torchrec_bls.serve.model_calls import ENOUGH, Measured, times_as_fast


class DotProducts(nn.Module):
    """The dot products of TorchRec's InteractionArch in one step. That multiplies each pair of rows
    twice, copies all rows before and all products afterwards.

    Products are added in another order, so that the last bits are others.

    Args:
        plain: the module that it replaces.
    """

    def __init__(self, plain: InteractionArch) -> None:
        super().__init__()
        self._plain = plain

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Returns the dense features, and the dot product of each pair of features.

        Args:
            dense_features: [samples, columns].
            sparse_features: [samples, features, columns].

        Returns:
            [samples, columns + features + pairs of features].
        """
        if torch.is_grad_enabled() or not _can_be_read(dense_features, sparse_features):
            plain: torch.Tensor = self._plain(dense_features, sparse_features)
            return plain
        samples, features, columns = sparse_features.shape
        out = dense_features.new_empty((samples, columns + features * (features + 1) // 2))
        _native.dot_products(dense_features, sparse_features, out)
        return out


class Stacked(nn.Module):
    """The embeddings of TorchRec's SparseArch without copies of them.

    Args:
        plain: the module that it replaces.
    """

    def __init__(self, plain: SparseArch) -> None:
        super().__init__()
        self.embedding_bag_collection = plain.embedding_bag_collection
        self.sparse_feature_names = list(plain.sparse_feature_names)
        self._shape = -1, plain.F, plain.D

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns the embeddings of a batch, [samples, features, columns]."""
        found: KeyedTensor = self.embedding_bag_collection(features)
        values: torch.Tensor = found.values()
        if found.keys() != self.sparse_feature_names:
            by_name = found.to_dict()
            values = torch.cat([by_name[name] for name in self.sparse_feature_names], dim=1)
        return values.reshape(self._shape)


# A module, the name of one in it, and that one.
_Place = tuple[nn.Module, str, nn.Module]
# Modules of exactly these classes: others may do something else.
_FUSED: dict[type[nn.Module], Callable[..., nn.Module]] = {
    InteractionArch: DotProducts,
    SparseArch: Stacked,
}


def fuse_if_faster(model: nn.Module, measure: Callable[[], Measured]) -> str:
    """Replaces modules of TorchRec's DLRM in a model by such that take fewer steps, and leaves them
    so if batches are faster then.

    Args:
        model: the model, which has attached to its tables.
        measure: function that calls it with batches of several sizes.

    Returns:
        A text for the log, or nothing where it has no such modules.
    """
    places = list(_places(model))
    if not places:
        return ""
    measure()  # else what is measured first is slower, since its code and data are not in caches
    before = measure()
    for parent, name, module in places:
        setattr(parent, name, _FUSED[type(module)](module))
    try:
        factor = times_as_fast(before, measure())
    except Exception as error:
        _undo(places)
        return f"TorchRec's DLRM is left as it is: in fewer steps, {named(error)}"
    if factor < ENOUGH:
        _undo(places)
        return f"TorchRec's DLRM is left as it is: in fewer steps, it is {factor:.2f} times as fast"
    return f"TorchRec's DLRM takes fewer steps, which makes batches {factor:.2f} times as fast"


def _undo(places: list[_Place]) -> None:
    for parent, name, module in places:
        setattr(parent, name, module)


def _places(model: nn.Module) -> Iterator[_Place]:
    for parent in model.modules():
        for name, module in parent.named_children():
            if type(module) in _FUSED and not _has_more(module):
                yield parent, name, module


def _has_more(module: nn.Module) -> bool:
    """Returns whether somebody has changed what a call of the module does."""
    return bool(module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module))


def _can_be_read(dense_features: torch.Tensor, sparse_features: torch.Tensor) -> bool:
    """Returns whether native code can read both, and they belong together."""
    if sparse_features.dim() != 3 or dense_features.shape != sparse_features.shape[::2]:
        return False
    return all(
        each.dtype is torch.float32 and each.device.type == "cpu" and each.is_contiguous()
        for each in (dense_features, sparse_features)
    )
